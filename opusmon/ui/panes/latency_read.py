"""What the latency pane reads of a view: requests, those in flight, and in which sources they may be.

Up to `ROWS_NS` requests are read as they are. Their rollups do not add up to percentiles, so over wider spans their
figures say which time they cover.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from opusmon.channels import REQUEST, REQUEST_OPEN
from opusmon.clock import NS
from opusmon.collectors import REGISTRY
from opusmon.request_rows import status_codes
from opusmon.schema import Channel, Rows, conform
from opusmon.ui.panes.base import Frame, View
from opusmon.ui.text import clean

Array = np.ndarray[tuple[Any, ...], np.dtype[Any]]
Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]
Ints = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]
Flags = np.ndarray[tuple[Any, ...], np.dtype[np.bool_]]

ROWS_NS = 15 * 60 * NS
NOW_NS = 60 * NS
"""What "now" covers."""
ENGINE_LOOKBACK_NS = 75 * NS
"""An engine without a row for this long is gone: longer than any scrape interval in use."""
OPEN_LOOKBACK_NS = 5 * NS // 2
"""In-flight requests have a row each second."""
COLLECTORS = ("engine", "proxy", "canary", "otlp")
"""Where latencies come from, by the name of the collector, and of the source of a request."""
REMEDIES = {name: REGISTRY[name].enabled_by or f"opusmon --{name} URL" for name in COLLECTORS}
"""What switches each of them on, where no `status` row says it better."""
_SEARCHED = ("source", "endpoint", "model", "label", "id", "outcome", "error", "phase")
SHORT = {
    "client_disconnect": "client left",
    "monitor_stopped": "opusmon stopped",
    "stream_error_event": "error in stream",
    "json_error_in_200": "error in 200",
    "transport_error": "transport",
}
"""Outcomes in fewer words, where the recorded one is long."""


def read(view: View, channel: Channel, t0: int, t1: int) -> Rows:
    """Rows with t0 < t <= t1 in the columns of this version; a file of another one may have others."""
    return conform(view.query(channel.name, t0, t1), channel)


def binned(view: View, channel: Channel, fields: Sequence[str], t0: int, t1: int, step_ns: int) -> Rows:
    """`View.binned`; no rows where the session's own version of the channel lacks one of the columns."""
    kind = view.channels.get(channel.name)
    if kind is None or not {*fields, *channel.key} <= set(kind.by_name):
        return np.empty(0, dtype=[("t", "<i8")])
    return view.binned(channel.name, fields, t0, t1, step_ns)


def since(rows: Rows, t: int) -> Rows:
    """The rows after `t`, of rows by time; no copy."""
    return rows[int(np.searchsorted(rows["t"], t, side="right")) :]


# -- requests ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Requests:
    """Rows of `request` that pass the filter.

    Attributes:
        rows: by time.
        covers_ns: they are of this long a time before the playhead.
        total: how many there are without the filter.
    """

    rows: Rows
    covers_ns: int
    total: int

    @cached_property
    def parts(self) -> Mapping[tuple[int, int], Rows]:
        """The rows of each source and start of the clock, by their text ids; of one there is no copy."""
        if not len(self.rows):
            return {}
        code = self.rows["source"].astype(np.int64) << 32 | self.rows["start"].astype(np.int64)
        if bool(np.all(code == code[0])):
            return {(int(code[0]) >> 32, int(code[0]) & 0xFFFFFFFF): self.rows}
        return {(n >> 32, n & 0xFFFFFFFF): self.rows[code == n] for n in np.unique(code).tolist()}

    def of(self, start_id: tuple[int, int] | None) -> Rows:
        """Those of one source and start."""
        found = self.parts.get(start_id) if start_id is not None else None
        return self.rows[:0] if found is None else found


def read_requests(frame: Frame) -> Requests:
    """Requests that ended in the span, of a wide one in its last `ROWS_NS`, and in the last minute at least."""
    covers_ns = min(max(frame.span_ns, NOW_NS), ROWS_NS)
    rows = read(frame.view, REQUEST, frame.t - covers_ns, frame.t)
    kept = rows[matching(frame, rows)] if frame.state.filter and len(rows) else rows
    return Requests(kept, covers_ns, len(rows))


def read_open(frame: Frame, ended: Rows) -> Rows:
    """Requests in flight at the playhead that pass the filter: the newest row of each that has not ended since."""
    rows = conform(frame.view.latest(REQUEST_OPEN.name, frame.t, OPEN_LOOKBACK_NS), REQUEST_OPEN)
    recent = since(ended, frame.t - 2 * OPEN_LOOKBACK_NS) if len(ended) else ended
    done = set(zip(recent["source"].tolist(), recent["number"].tolist(), strict=True)) if len(recent) else ()
    keep = [key not in done for key in zip(rows["source"].tolist(), rows["number"].tolist(), strict=True)]
    rows = rows[np.array(keep, dtype=np.bool_)]
    return rows[matching(frame, rows)] if frame.state.filter and len(rows) else rows


def outcome_word(view: View, outcome: int, status: float) -> str:
    """`ok`, `529`, `truncated`, ...: an HTTP error is called by its status."""
    word = clean(view.strings.text(outcome)) or "?"
    if word == "upstream_http_error" and status > 0:
        return f"{status:.0f}"
    return SHORT.get(word, word)


def outcome_codes(rows: Rows) -> Ints:
    """Outcome and HTTP status of ended requests in one number: `code >> 16` and `code & 0xFFFF`."""
    return np.asarray(rows["outcome"].astype(np.int64) << 16 | status_codes(rows["status"]))


def matching(frame: Frame, rows: Rows) -> Flags:
    """Which rows have the filter's words in one of their texts, or in how their end is shown, or as their number."""
    words = frame.state.filter.lower()
    found = np.zeros(len(rows), dtype=np.bool_)
    for name in _SEARCHED:
        if name in (rows.dtype.names or ()):
            found |= np.isin(rows[name], _ids(frame.view, rows[name], words))
    if "outcome" in (rows.dtype.names or ()):
        found |= np.isin(outcome_codes(rows), _outcomes(frame.view, rows, words))
    return np.asarray(found | (rows["number"].astype(np.str_) == words), dtype=np.bool_)


def _outcomes(view: View, rows: Rows, words: str) -> list[int]:
    codes = np.unique(outcome_codes(rows)).tolist()
    return [code for code in codes if words in outcome_word(view, code >> 16, code & 0xFFFF)]


def _ids(view: View, ids: Array, words: str) -> list[int]:
    return [number for number in np.unique(ids).tolist() if words in view.strings.text(number).lower()]
