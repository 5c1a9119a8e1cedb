"""OTLP bodies to records: JSON with the standard library, protobuf where the package is installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from opusmon.collectors.otlp.records import (
    KEPT,
    SPANS,
    Decoded,
    Record,
    Signal,
    Undecodable,
    attributes,
    event_name,
)

_SCALARS = ("stringValue", "intValue", "doubleValue", "boolValue")
_MAX_NS = 2**63 - 1
_ERROR, _OK = 2, 1
_CODES = {"STATUS_CODE_ERROR": _ERROR, "STATUS_CODE_OK": _OK}


def has_protobuf() -> bool:
    """Whether protobuf bodies can be read."""
    try:
        return find_spec("opentelemetry.proto.collector") is not None
    except ModuleNotFoundError:
        return False


def decode_json(signal: Signal, body: bytes) -> Decoded:
    """Read a JSON body.

    Raises:
        Undecodable: it is not JSON, or not of that shape.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise Undecodable("the body is not JSON") from None
    if not isinstance(content, dict):
        raise Undecodable("the body is not a JSON object")
    out = Decoded()
    read = _span if signal == "traces" else _log
    for scope, record in _leaves(content, *_NESTING[signal]):
        out.add(read(record, scope))
    return out


_NESTING: Mapping[Signal, tuple[str, str, str]] = {
    "traces": ("resourceSpans", "scopeSpans", "spans"),
    "logs": ("resourceLogs", "scopeLogs", "logRecords"),
}


def _leaves(
    content: Mapping[str, Any], outer: str, middle: str, inner: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for resource in _objects(content.get(outer)):
        for group in _objects(resource.get(middle)):
            scope = group.get("scope")
            name = scope.get("name") if isinstance(scope, dict) else ""
            for record in _objects(group.get(inner)):
                yield name if isinstance(name, str) else "", record


def _objects(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list; null and what is missing are empty.

    Raises:
        Undecodable: it is no list of objects.
    """
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise Undecodable("the body is not OTLP: a list of objects was expected")
    return value


def _span(record: Mapping[str, Any], scope: str) -> Record | None:  # noqa: ARG001  (as `_log`)
    name = record.get("name")
    if not isinstance(name, str) or name not in SPANS:
        return None
    status = record.get("status")
    code = status.get("code") if isinstance(status, dict) else 0
    code = _CODES.get(code, 0) if isinstance(code, str) else code
    times = _time(record.get("startTimeUnixNano")), _time(record.get("endTimeUnixNano"))
    return Record(name, *times, code == _ERROR, code == _OK, attributes(_pairs(record.get("attributes"))))


def _log(record: Mapping[str, Any], scope: str) -> Record | None:
    body = record.get("body")
    text = body.get("stringValue") if isinstance(body, dict) else None
    given = record.get("eventName")
    kept = attributes(_pairs(record.get("attributes")))
    name = event_name(given if isinstance(given, str) else "", text, scope, kept)
    if not name:
        return None
    t = _time(record.get("timeUnixNano")) or _time(record.get("observedTimeUnixNano"))
    return Record(name, 0, t, attributes=kept)


def _time(value: object) -> int:
    """Wall ns; 0 for what is none. JSON carries them as text, some senders as numbers."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return 0
    return value if 0 <= value <= _MAX_NS else 0


def _pairs(value: Any) -> Iterator[tuple[str, object]]:
    for pair in _objects(value):
        name, holder = pair.get("key"), pair.get("value")
        if isinstance(name, str) and name in KEPT and isinstance(holder, dict):
            yield from ((name, holder[kind]) for kind in _SCALARS if kind in holder)


def decode_protobuf(signal: Signal, body: bytes) -> Decoded:
    """Read a protobuf body. Only where `has_protobuf`.

    Raises:
        Undecodable: it is not such a message.
    """
    from google.protobuf.message import DecodeError

    try:
        groups = _messages(signal)(body)
    except (DecodeError, ValueError, RecursionError):
        raise Undecodable("the body is not an OTLP protobuf message") from None
    out = Decoded()
    for scope, record in groups:
        out.add(_pb_span(record) if signal == "traces" else _pb_log(record, scope))
    return out


def _messages(signal: Signal) -> Callable[[bytes], Iterable[tuple[str, Any]]]:
    return _pb_traces if signal == "traces" else _pb_logs


def _pb_traces(body: bytes) -> list[tuple[str, Any]]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    message = ExportTraceServiceRequest.FromString(body)
    groups = (group for resource in message.resource_spans for group in resource.scope_spans)
    return [(group.scope.name, span) for group in groups for span in group.spans]


def _pb_logs(body: bytes) -> list[tuple[str, Any]]:
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

    message = ExportLogsServiceRequest.FromString(body)
    groups = (group for resource in message.resource_logs for group in resource.scope_logs)
    return [(group.scope.name, log) for group in groups for log in group.log_records]


def _pb_span(span: Any) -> Record | None:
    if span.name not in SPANS:
        return None
    code = span.status.code
    times = (_time(span.start_time_unix_nano), _time(span.end_time_unix_nano))
    return Record(span.name, *times, code == _ERROR, code == _OK, attributes(_pb_pairs(span.attributes)))


def _pb_log(log: Any, scope: str) -> Record | None:
    body = log.body.string_value if log.HasField("body") else None
    kept = attributes(_pb_pairs(log.attributes))
    name = event_name(log.event_name, body, scope, kept)
    if not name:
        return None
    return Record(name, 0, _time(log.time_unix_nano) or _time(log.observed_time_unix_nano), attributes=kept)


def _pb_pairs(pairs: Any) -> Iterator[tuple[str, object]]:
    for pair in pairs:
        kind = pair.value.WhichOneof("value") if pair.key in KEPT else None
        if kind in ("string_value", "int_value", "double_value", "bool_value"):
            yield pair.key, getattr(pair.value, kind)
