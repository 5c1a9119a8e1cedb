"""Records to rows of `request`: the anthropic SDK's span, Claude Code's span and its events."""

from __future__ import annotations

import math
from dataclasses import dataclass

from opusmon.collectors.api.request import NAN, Outcome, Request, word
from opusmon.collectors.otlp.records import Record

PATH = "/v1/messages"
SDK_START = "API call, retries included"
SPAN_START = "span of Claude Code"
EVENT_START = "duration_ms of Claude Code"

_SUBJECT = {"claude_code.api_refusal": 0, "claude_code.api_request": 1, "claude_code.api_error": 1}


@dataclass(slots=True)
class Seen:
    """A request as one record tells it.

    Attributes:
        request: the row; its `t` is set when its time is known on the session's clock.
        end_ns: wall time of its end.
        rank: of several records of one request, the one with the highest has the say.
        paired: other records of the same request may follow.
    """

    request: Request
    end_ns: int
    rank: int
    paired: bool


def seen(record: Record) -> Seen | None:
    """What a record tells of a request; None when its times make no sense."""
    if record.end_ns <= 0 or (record.start_ns and record.end_ns < record.start_ns):
        return None
    if record.name == "anthropic.messages.create":
        return Seen(_sdk(record), record.end_ns, 3, paired=False) if record.start_ns else None
    if record.name == "claude_code.llm_request":
        return Seen(_claude_span(record), record.end_ns, 2, paired=True) if record.start_ns else None
    return Seen(_claude_event(record), record.end_ns, _SUBJECT[record.name], paired=True)


def _row(start: str, model: str) -> Request:
    return Request(0, "otlp", start, 0, PATH, word(model))


def _sdk(record: Record) -> Request:
    row = _row(SDK_START, record.word("gen_ai.response.model") or record.word("gen_ai.request.model"))
    row.streaming = 1.0 if record.attributes.get("gen_ai.request.stream") is True else 0.0
    row.e2e_ns = float(record.end_ns - record.start_ns)
    row.ttft_ns = _within(record.number("gen_ai.response.time_to_first_chunk") * 1e9, row.e2e_ns)
    row.status = record.number("http.response.status_code")
    resent = record.number("http.request.resend_count")
    row.retry = 0.0 if math.isnan(resent) else resent
    row.input_tokens = record.number("gen_ai.usage.input_tokens")
    row.output_tokens = record.number("gen_ai.usage.output_tokens")
    row.cache_read_tokens = record.number("gen_ai.usage.cache_read.input_tokens")
    row.cache_write_tokens = record.number("gen_ai.usage.cache_write.input_tokens")
    row.thinking_tokens = record.number("gen_ai.usage.reasoning.output_tokens")
    row.stop = word(record.word("anthropic.message.stop_reason"))
    row.id = word(record.word("anthropic.request.id"))
    row.error = word(record.word("error.type"))
    row.outcome = _sdk_outcome(record, row)
    return row


def _sdk_outcome(record: Record, row: Request) -> Outcome:
    """The SDK names a stream that was cut, and a JSON error sent as a stream, `api_error` with status 200."""
    if record.failed or row.error:
        known: dict[str, Outcome] = {
            "client_timeout_error": "timeout",
            "connection_error": "transport_error" if math.isnan(row.status) else "truncated",
        }
        if row.error in known:
            return known[row.error]
        if not row.status < 400:
            return "transport_error" if math.isnan(row.status) else "upstream_http_error"
        if not row.streaming:
            return "json_error_in_200"
        return "truncated" if row.error in ("api_error", "client_error") else "stream_error_event"
    return "client_disconnect" if row.streaming and not record.fine and not row.stop else "ok"


def _claude_span(record: Record) -> Request:
    row = _claude(record, SPAN_START)
    row.e2e_ns = float(record.end_ns - record.start_ns)
    row.ttft_ns = _within(record.number("ttft_ms") * 1e6, row.e2e_ns)
    row.streaming = NAN if math.isnan(row.ttft_ns) else 1.0
    row.stop = word(record.word("stop_reason"))
    row.error = word(record.word("error_class"))
    if record.failed or record.attributes.get("success") is False:
        row.outcome = _claude_outcome(row)
    return row


def _claude_event(record: Record) -> Request:
    row = _claude(record, EVENT_START)
    row.e2e_ns = record.number("duration_ms") * 1e6
    if record.name == "claude_code.api_error":
        row.outcome = _claude_outcome(row)
    elif record.name == "claude_code.api_refusal":
        row.stop = "refusal"
    return row


def _claude(record: Record, start: str) -> Request:
    row = _row(start, record.word("model") or record.word("gen_ai.request.model"))
    row.id = word(record.word("request_id"))
    row.status = record.number("status_code")
    attempt = record.number("attempt")
    row.retry = attempt - 1 if attempt >= 1 else NAN
    read, written = record.number("cache_read_tokens"), record.number("cache_creation_tokens")
    cached = sum(part for part in (read, written) if not math.isnan(part))
    row.input_tokens = record.number("input_tokens") + cached  # Claude Code's own leaves the cache out
    row.output_tokens = record.number("output_tokens")
    row.cache_read_tokens, row.cache_write_tokens = read, written
    return row


def _claude_outcome(row: Request) -> Outcome:
    if row.status >= 400:
        return "upstream_http_error"
    kind = row.error.lower()
    if "timeout" in kind:
        return "timeout"
    if "abort" in kind or "cancel" in kind:
        return "client_disconnect"
    return "transport_error" if math.isnan(row.status) else "stream_error_event"


def _within(value_ns: float, most_ns: float) -> float:
    """A time that cannot be longer than the request; NaN when it is: the two came from clocks that disagree."""
    return value_ns if 0 <= value_ns <= most_ns else NAN
