"""One API request as a row of `request`, and one in flight as a row of `request_open`."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from opusmon.channels import REQUEST, REQUEST_OPEN
from opusmon.clock import NS
from opusmon.schema import Batch, Channel, StringTable

Outcome = Literal[
    "ok",
    "stream_error_event",
    "truncated",
    "upstream_http_error",
    "json_error_in_200",
    "client_disconnect",
    "monitor_stopped",
    "timeout",
    "transport_error",
]
Phase = Literal["sending", "waiting", "thinking", "answering", "ending"]

NAN = math.nan
_MAX_WORD = 128
_UNSAFE = re.compile(r"[^ -~]")


@dataclass(slots=True)
class Request:
    """A request that ended; one attribute per field of channel `request`, NaN and "" for what is not known.

    Attributes:
        t: its end, monotonic ns; it covers [t - e2e_ns, t].
        number: of the request in this session and source.
        outcome: see `Outcome`.
    """

    t: int
    source: str
    start: str
    number: int
    endpoint: str = ""
    model: str = ""
    label: str = ""
    id: str = ""
    outcome: Outcome = "ok"
    error: str = ""
    stop: str = ""
    streaming: float = NAN
    status: float = NAN
    e2e_ns: float = NAN
    headers_ns: float = NAN
    first_event_ns: float = NAN
    ttft_ns: float = NAN
    first_answer_ns: float = NAN
    last_token_ns: float = NAN
    tpot_ns: float = NAN
    chunks: float = NAN
    gap_mean_ns: float = NAN
    gap_p95_ns: float = NAN
    gap_max_ns: float = NAN
    request_b: float = NAN
    response_b: float = NAN
    input_tokens: float = NAN
    output_tokens: float = NAN
    cache_read_tokens: float = NAN
    cache_write_tokens: float = NAN
    thinking_tokens: float = NAN
    tool_calls: float = NAN
    usage_more: str = ""
    retry: float = NAN
    retry_after_s: float = NAN
    limit_requests: float = NAN
    left_requests: float = NAN
    limit_input_tokens: float = NAN
    left_input_tokens: float = NAN
    limit_output_tokens: float = NAN
    left_output_tokens: float = NAN
    dns_ns: float = NAN
    connect_ns: float = NAN
    tls_ns: float = NAN
    reused: float = NAN
    late_ns: float = NAN
    own_ns: float = NAN
    own_chunk_ns: float = NAN


@dataclass(slots=True)
class OpenRequest:
    """A request in flight; one attribute per field of channel `request_open`.

    Attributes:
        t: when it was looked at, monotonic ns.
    """

    t: int
    source: str
    start: str
    number: int
    endpoint: str = ""
    model: str = ""
    label: str = ""
    phase: Phase = "waiting"
    age_ns: float = NAN
    ttft_ns: float = NAN
    chunks: float = NAN
    silent_ns: float = NAN
    no_token_ns: float = NAN


def word(text: object) -> str:
    """A short text from outside (a model, a label, an error type), fit for the table: printable ASCII, at most 128.

    Other characters become "?"; what is not text becomes "".
    """
    return _UNSAFE.sub("?", text[:_MAX_WORD]).strip() if isinstance(text, str) else ""


class Keeper:
    """Decides which texts of requests enter the string table, which never forgets and holds 65,536.

    An id is new with every request: it is kept when the request failed or is among the `slowest` of its minute.
    Texts that differ between requests (ids, unknown usage) spend from one allowance of `burst`, refilled at
    `per_minute`, and `limit` in all. Models, labels and the like are few: the first `distinct` of each are kept,
    later ones read "(other)".

    Args:
        slowest: requests of a minute whose ids are kept for their duration.
        burst: texts kept at once, as when every request fails.
        per_minute: texts kept per minute in the long run.
        limit: texts kept in a session.
        distinct: different values kept of each recurring field.
    """

    OTHER = "(other)"

    def __init__(
        self,
        *,
        slowest: int = 8,
        burst: int = 256,
        per_minute: float = 10.0,
        limit: int = 20_000,
        distinct: int = 512,
    ) -> None:
        self._slowest, self._burst, self._per_ns = slowest, float(burst), per_minute / (60 * NS)
        self._left, self._limit, self._distinct = float(burst), limit, distinct
        self._refilled: int | None = None
        self._minute = 0
        self._top: list[float] = []
        self._seen: dict[str, set[str]] = {}
        self._kept: set[str] = set()
        self.dropped = 0

    def id(self, request: Request) -> str:
        """The request's id if it is kept, else ""."""
        slow = self._is_slow(request)
        wanted = request.outcome != "ok" or slow
        return self.spend(request.id, request.t) if request.id and wanted else ""

    def spend(self, text: str, t: int) -> str:
        """A text that few requests share: itself if the allowance at `t` (monotonic ns) has room, else ""."""
        if not text or text in self._kept:
            return text
        if self._refilled is not None:
            self._left = min(self._burst, self._left + max(0, t - self._refilled) * self._per_ns)
        self._refilled = t
        if self._left < 1 or len(self._kept) >= self._limit:
            self.dropped += 1
            return ""
        self._left -= 1
        self._kept.add(text)
        return text

    def recurring(self, field: str, text: str) -> str:
        """A text that many requests share: itself, or "(other)" once the field has had too many."""
        seen = self._seen.setdefault(field, {""})
        if text in seen:
            return text
        if len(seen) > self._distinct:
            return self.OTHER
        seen.add(text)
        return text

    def _is_slow(self, request: Request) -> bool:
        if request.t // (60 * NS) != self._minute:
            self._minute, self._top = request.t // (60 * NS), []
        took = request.e2e_ns
        if math.isnan(took) or (len(self._top) >= self._slowest and took <= self._top[0]):
            return False
        heapq.heappush(self._top, took)
        if len(self._top) > self._slowest:
            heapq.heappop(self._top)
        return True


_RECURRING = ("endpoint", "model", "label", "error", "stop")


def request_batch(requests: Sequence[Request], strings: StringTable, keeper: Keeper | None = None) -> Batch:
    """Rows of `request`, sorted by `t`.

    Args:
        requests: at least one.
        strings: the table that gets the texts.
        keeper: which ids and usage texts are kept, one for the collector's life; without it every text is.
    """
    records = [_record(request, REQUEST, _texts(request, keeper), strings) for request in requests]
    return Batch(REQUEST, REQUEST.rows(records))


def open_batch(requests: Sequence[OpenRequest], strings: StringTable, keeper: Keeper | None = None) -> Batch:
    """Rows of `request_open`, sorted by `t`; see `request_batch`."""
    records = [_record(request, REQUEST_OPEN, _texts(request, keeper), strings) for request in requests]
    return Batch(REQUEST_OPEN, REQUEST_OPEN.rows(records))


def _texts(request: Request | OpenRequest, keeper: Keeper | None) -> dict[str, str]:
    """The fields whose text differs from the attribute's."""
    if keeper is None:
        return {}
    texts = {name: keeper.recurring(name, getattr(request, name, "")) for name in _RECURRING}
    if isinstance(request, Request):
        texts["id"] = keeper.id(request)
        texts["usage_more"] = keeper.spend(request.usage_more, request.t)
    return texts


def _record(
    request: Request | OpenRequest, channel: Channel, texts: dict[str, str], strings: StringTable
) -> tuple[float, ...]:
    """Column values in the channel's order, `t` first."""
    values: list[float] = [request.t]
    for field in channel.fields:
        value = getattr(request, field.name)
        values.append(strings.intern(texts.get(field.name, value)) if field.text else value)
    return tuple(values)
