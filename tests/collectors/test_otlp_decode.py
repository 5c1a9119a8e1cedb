"""Both decoders on anything at all, and the two on the same thing."""

import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opusmon.collectors.otlp.answers import Refusal, failure, success
from opusmon.collectors.otlp.decode import decode_json, decode_protobuf
from opusmon.collectors.otlp.pairing import Pairs
from opusmon.collectors.otlp.records import EVENTS, KEPT, SPANS, Undecodable, attributes
from opusmon.collectors.otlp.spans import Seen, seen

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
logs_service = pytest.importorskip("opentelemetry.proto.collector.logs.v1.logs_service_pb2")
from google.protobuf import json_format  # noqa: E402
from google.rpc import status_pb2  # noqa: E402

SIGNALS = st.sampled_from(["traces", "logs"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
KEYS = st.sampled_from(
    sorted(
        {
            "resourceSpans",
            "scopeSpans",
            "spans",
            "resourceLogs",
            "scopeLogs",
            "logRecords",
            "scope",
            "name",
            "key",
        }
        | {
            "attributes",
            "value",
            "stringValue",
            "intValue",
            "doubleValue",
            "status",
            "code",
            "body",
            "eventName",
        }
        | {"startTimeUnixNano", "endTimeUnixNano", "timeUnixNano"}
    )
)
TREES = st.recursive(
    SCALARS | st.sampled_from(sorted(SPANS | EVENTS | KEPT)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=25,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(SIGNALS, TREES)
def test_any_json_gives_records_or_says_that_it_cannot(signal, tree):
    usable(decode_json, signal, json.dumps(tree).encode())
    leaf = {"resourceSpans": "spans", "resourceLogs": "logRecords"}
    for outer, inner in leaf.items():
        middle = outer.replace("resource", "scope")
        record = {"name": "claude_code.llm_request", "body": {"stringValue": "claude_code.api_request"}}
        if isinstance(tree, dict):
            record |= tree
        usable(decode_json, signal, json.dumps({outer: [{middle: [{inner: [record]}]}]}).encode())


@settings(max_examples=200, deadline=None)
@given(SIGNALS, st.binary(max_size=300))
def test_any_bytes_give_records_or_say_that_they_cannot(signal, body):
    usable(decode_json, signal, body)
    usable(decode_protobuf, signal, body)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_damaged_message_gives_records_or_says_that_it_cannot(data):
    whole = bytearray(one_span().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    usable(decode_protobuf, "traces", bytes(whole[: data.draw(st.integers(0, len(whole)))]))


def usable(decode, signal, body):
    try:
        decoded = decode(signal, body)
    except Undecodable:
        return
    for record in decoded.records:
        assert record.name in SPANS | EVENTS
        assert set(record.attributes) <= KEPT
        one = seen(record)
        if one is not None:
            assert one.end_ns > 0
            for number in (one.request.e2e_ns, one.request.ttft_ns, one.request.input_tokens):
                assert math.isnan(number) or 0 <= number < 1e20


def one_span(**attributes_given):
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
    from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

    given_now = attributes_given or {"model": "m", "ttft_ms": 5.5, "success": False, "status_code": 529}
    kinds = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value"}
    pairs = [KeyValue(key=name, value=AnyValue(**{kinds[type(one)]: one})) for name, one in given_now.items()]
    span = Span(
        name="claude_code.llm_request", start_time_unix_nano=10**18, end_time_unix_nano=10**18 + 10**9
    )
    span.attributes.extend(pairs)
    span.status.code = 2
    return trace_service.ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=[span])])]
    )


@given(
    st.floats(0, 900), st.integers(0, 2**52), st.sampled_from(["m", "claude-opus-5", "a b"]), st.booleans()
)
def test_json_and_protobuf_say_the_same(ttft_ms, tokens, model, success_flag):
    message = one_span(ttft_ms=ttft_ms, input_tokens=tokens, model=model, success=success_flag)
    by_protobuf = decode_protobuf("traces", message.SerializeToString())
    by_json = decode_json("traces", json_format.MessageToJson(message).encode())
    assert by_json == by_protobuf
    record = by_json.records[0]
    assert record.failed
    assert record.number("ttft_ms") == ttft_ms
    assert record.word("model") == ("" if model == "a b" else model)
    row = seen(record).request
    assert row.e2e_ns == 1e9
    assert row.ttft_ns == ttft_ms * 1e6


def test_a_time_to_first_token_longer_than_the_request_is_not_believed():
    record = decode_protobuf("traces", one_span(ttft_ms=1000.5).SerializeToString()).records[0]
    assert math.isnan(seen(record).request.ttft_ns)


@pytest.mark.parametrize(
    ("name", "given_value", "kept"),
    [
        ("duration_ms", "1521", 1521.0),
        ("duration_ms", "NaN", None),
        ("duration_ms", "1e400", None),
        ("duration_ms", -1, None),
        ("duration_ms", True, None),
        ("input_tokens", 10**400, None),
        ("success", "false", False),
        ("success", "maybe", None),
        ("model", "claude-opus-5@20260101", "claude-opus-5@20260101"),
        ("model", "two words", None),
        ("error_class", "me@example.com", None),
        ("error_class", "x" * 129, None),
        ("prompt", "anything", None),
        ("user.email", "x", None),
    ],
)
def test_attributes_have_the_type_they_should_or_are_dropped(name, given_value, kept):
    assert attributes([(name, given_value)]) == ({} if kept is None else {name: kept})


@settings(deadline=None)
@given(st.integers(1, 2**63 - 1), st.text(max_size=300))
def test_partial_success_reads_back(rejected, words):
    words = words.encode("utf-8", "ignore").decode()
    message = trace_service.ExportTraceServiceResponse.FromString(
        success("protobuf", "traces", rejected, words)
    )
    assert (message.partial_success.rejected_spans, message.partial_success.error_message) == (
        rejected,
        words,
    )
    body = success("json", "logs", rejected, words)
    message = json_format.Parse(body, logs_service.ExportLogsServiceResponse())
    assert message.partial_success.rejected_log_records == rejected


def test_errors_read_back():
    read = status_pb2.Status.FromString(failure("protobuf", Refusal(413, "bodies of up to 4 MiB are taken")))
    assert (read.code, read.message) == (8, "bodies of up to 4 MiB are taken")
    assert json.loads(failure("json", Refusal(400, "no"))) == {"code": 3, "message": "no"}


def test_pairs_are_bounded_and_refuse_what_has_no_room():
    def one(number):
        record = decode_protobuf("traces", one_span(request_id=f"r{number}").SerializeToString()).records[0]
        found = seen(record)
        assert isinstance(found, Seen)
        return found

    pairs = Pairs(hold_ns=10, limit=3)
    assert [pairs.add(one(n), 0) for n in range(5)] == [True, True, True, False, False]
    assert pairs.due(9) == []
    assert [request.id for request in pairs.due(10)] == ["r0", "r1", "r2"]
    assert pairs.add(one(0), 11)
    assert pairs.due(30) == []
