"""What the stalls pane knows at the playhead: the stalls that ended in the span, their severity and order.

Everything over all rows is numpy; only rows in sight become objects. Work per frame is bounded: of a span that
holds too many rows the newest are read, and it is said how many are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from opusmon.channels import STALL, WHOLE_CONTEXT
from opusmon.clock import NS
from opusmon.schema import Rows, StringTable, conform
from opusmon.triage.severity import (
    CRIT,
    NONE,
    NOTE,
    WARN,
    Levels,
    distinct,
    each_ns,
    stall_severity,
    translate,
)
from opusmon.ui.panes.base import Frame, View, has
from opusmon.ui.panes.history import Floats, Ints
from opusmon.ui.panes.memo import FrameMemo
from opusmon.ui.panes.stalls_words import KINDS, MARKS, OTHER, PAGE_FAULTS
from opusmon.ui.panes.statuses import Status, read_statuses, whole
from opusmon.ui.panes.streams_state import STALE_INTERVALS
from opusmon.ui.text import CUT_OFF, clean

COLLECTOR = "stalls"
CHANNEL = STALL.name
SORTS = ("newest", "longest", "severity", "kind")

ROWS_NS = 15 * 60 * NS
"""Up to this span the rows are in memory, or a moment away."""
MAX_ROWS = 100_000
"""Most rows of such a span that a frame looks at."""
MAX_FAR_ROWS = 20_000
"""Most rows of a wider span: they are read from the recording."""
_BIN_NS = 600 * NS
"""Wider spans are counted in bins of a recording's rollups, to know how far back the rows may be read."""
_HEARTBEAT_NS = 65 * NS

Flags = np.ndarray[tuple[Any, ...], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Stall:
    """One row of channel `stall` in words; text is cleaned. See the channel for the meaning of the fields.

    Attributes:
        level: its severity.
        place: of its kind in `KINDS`, `OTHER` for an unknown one.
        each_ns: how long it took, the mean where the row folds several; NaN where that is not known.
    """

    t: int
    level: int
    place: int
    each_ns: float
    kind: str
    pid: int
    tid: int
    process: str
    thread: str
    call: str
    reason: str
    dur_ns: float
    stream: int
    code: float
    count: float
    size_b: float
    by_tid: int
    by_thread: str
    by_call: str
    by_code: float
    before: str
    stack: str

    @property
    def who(self) -> str:
        """`vllm/worker-0`, or the process alone when its thread has the same name."""
        if not self.thread or self.thread == self.process:
            return self.process or "?"
        return f"{self.process or '?'}/{self.thread}"

    @property
    def stream_words(self) -> str:
        """`stream 0x7`, "" where no single stream is concerned."""
        return stream_words(self.stream)


def stream_words(stream: int) -> str:
    """A handle in words, "" where no single stream is concerned."""
    if stream == WHOLE_CONTEXT:
        return ""
    named = {0: "legacy stream", 1: "legacy stream", 2: "per-thread stream"}
    return named.get(stream) or f"stream {stream:#x}"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All of it.

    Attributes:
        rows: the stalls read, in time order.
        levels: their severities, shape (rows,).
        places: their kinds as places in `KINDS`, shape (rows,).
        each_ns: how long each took, the mean where several are folded into a row; NaN where that is not known, as of
            page faults, whose rows cover the time in which they were counted. Shape (rows,).
        kept: those that pass the filter, as places in `rows`, in time order.
        order: the same in the order chosen.
        unread: how many older ones of the span were not read.
        statuses: what the collector says of itself, as a whole first.
        silent_ns: how long the collector has given no sign of life; None while it does, or when that is not known.
        strings: the texts of the rows.
    """

    rows: Rows
    levels: Levels
    places: Levels
    each_ns: Floats
    kept: Ints
    order: Ints
    unread: int
    statuses: tuple[Status, ...]
    silent_ns: int | None
    strings: StringTable

    @property
    def collector(self) -> Status | None:
        """What the collector says of itself as a whole; None when it says nothing."""
        return whole(self.statuses)

    @cached_property
    def level_counts(self) -> dict[int, int]:
        """How many of those kept are of each severity."""
        counts = np.bincount(self.levels[self.kept], minlength=CRIT + 1)
        return {level: int(counts[level]) for level in (NONE, NOTE, WARN, CRIT)}

    @cached_property
    def worst(self) -> int | None:
        """Place in `rows` of the longest of the most severe ones kept; None without any."""
        if not len(self.kept):
            return None
        levels = self.levels[self.kept]
        worst = self.kept[levels == levels.max()]
        return int(worst[np.argmax(longest_last(self.each_ns[worst]))])

    def stall(self, place: int) -> Stall:
        """A row in words."""
        row = self.rows[place]
        values: dict[str, Any] = dict(zip(self.rows.dtype.names or (), row.tolist(), strict=True))
        for field in STALL.fields:
            if field.text:
                values[field.name] = clean(self.strings.text(values[field.name]))
        each_ns = float(self.each_ns[place])
        return Stall(level=int(self.levels[place]), place=int(self.places[place]), each_ns=each_ns, **values)

    def chosen(self, selected: int) -> int:
        """Place in `rows` of the selected one; there must be one."""
        return int(self.order[min(max(selected, 0), len(self.order) - 1)])


Identity = tuple[int, int, int, int]
"""What tells a stall from all others, whatever came since: time, process, thread, and text id of the kind."""


def identity(known: Snapshot, selected: int) -> Identity | None:
    """Which stall is selected; None when there is none."""
    if not len(known.order):
        return None
    row = known.rows[known.chosen(selected)]
    return int(row["t"]), int(row["pid"]), int(row["tid"]), int(row["kind"])


def place_of(known: Snapshot, wanted: Identity) -> int | None:
    """Where a stall stands in the order chosen; None when it is not there."""
    t, pid, tid, kind = wanted
    first, last = np.searchsorted(known.rows["t"], (t, t + 1))
    near = known.rows[first:last]
    own = np.flatnonzero((near["pid"] == pid) & (near["tid"] == tid) & (near["kind"] == kind))
    if not len(own):
        return None
    found = np.flatnonzero(known.order == int(own[0]) + int(first))
    return int(found[0]) if len(found) else None


def longest_last(dur_ns: Floats) -> Floats:
    """Durations to sort by, ns: missing ones before all others."""
    return np.where(np.isnan(dur_ns), -math.inf, dur_ns)


def _snapshot(frame: Frame) -> Snapshot:
    """Read the view at the playhead."""
    view = frame.view
    rows, unread = read_stalls(frame)
    levels = stall_severity(rows, view.strings)
    places = kind_places(rows, view.strings)
    lasted_ns = np.where(places == PAGE_FAULTS, np.nan, each_ns(rows))
    kept = _kept(rows, levels, places, frame.state.filter, view.strings)
    return Snapshot(
        rows=rows,
        levels=levels,
        places=places,
        each_ns=lasted_ns,
        kept=kept,
        order=_ORDERS.get(frame.state.sort, _newest)(kept, lasted_ns, levels, places),
        unread=unread,
        statuses=read_statuses(view, frame.t, COLLECTOR),
        silent_ns=_silent_ns(view, frame.t),
        strings=view.strings,
    )


snapshot = FrameMemo(_snapshot)
"""What is known at the playhead, read once per frame."""


def read_stalls(frame: Frame) -> tuple[Rows, int]:
    """The stalls that ended in the span, the newest ones where they are too many, and how many more there are."""
    view, t0 = frame.view, frame.t - frame.span_ns
    if CHANNEL not in view.channels:
        return np.empty(0, dtype=STALL.dtype), 0
    if frame.span_ns <= ROWS_NS:
        rows = view.query(CHANNEL, t0, frame.t)
        unread = max(len(rows) - MAX_ROWS, 0)
        return conform(rows[unread:], STALL), unread
    start, total = _far(view, t0, frame.t)
    rows = view.query(CHANNEL, start, frame.t)[-MAX_FAR_ROWS:]
    return conform(rows, STALL), max(total - len(rows), 0)


def _far(view: View, t0: int, t: int) -> tuple[int, int]:
    """From when on at most about `MAX_FAR_ROWS` rows were written, and how many there are since `t0`."""
    bins = view.binned(CHANNEL, [], t0, t, _BIN_NS)
    if not len(bins):
        return t0, 0
    newest_first = np.argsort(-bins["t"], kind="stable")
    so_far = np.cumsum(bins["n"][newest_first].astype(np.int64))
    too_many = int(np.searchsorted(so_far, MAX_FAR_ROWS, side="right"))
    if too_many >= len(bins):
        return t0, int(so_far[-1])
    return max(int(bins["t"][newest_first[too_many]]) - 1, t0), int(so_far[-1])


def kind_places(rows: Rows, strings: StringTable) -> Levels:
    """The kind of each row as a place in `KINDS`, `OTHER` for an unknown one; shape (rows,)."""
    known = {kind.name: place for place, kind in enumerate(KINDS)}
    table = {number: known.get(strings.text(number), OTHER) for number in distinct(rows["kind"])}
    return translate(rows["kind"], table, OTHER)


# -- filter and order --------------------------------------------------------------------------------------------

_SEARCHED = ("process", "thread", "call", "reason", "by_thread", "by_call", "kind")


def _kept(rows: Rows, levels: Levels, places: Levels, wanted: str, strings: StringTable) -> Ints:
    """Places of the rows that contain every word of the filter, in time order."""
    keep = np.ones(len(rows), dtype=np.bool_)
    for word in wanted.lower().split():
        keep &= _contains(rows, levels, places, word, strings)
    return np.flatnonzero(keep)


def _contains(rows: Rows, levels: Levels, places: Levels, word: str, strings: StringTable) -> Flags:
    """A text, the kind's name or severity's mark contains the word, or it is the number of a process or thread."""
    found = np.isin(
        places, [place for place, kind in enumerate(KINDS) if word in f"{kind.short} {kind.words}".lower()]
    )
    found |= np.isin(levels, [level for level, (mark, _) in MARKS.items() if word in mark])
    for name in _SEARCHED:
        ids = [number for number in distinct(rows[name]) if word in clean(strings.text(number)).lower()]
        if ids:
            found |= np.isin(rows[name], ids)
    streams = np.unique(rows["stream"])
    wanted = word.removeprefix(CUT_OFF)  # as the list shows a handle
    found |= np.isin(rows["stream"], [one for one in streams if wanted in stream_words(int(one))])
    if word.isdecimal() and len(word) < 10:
        found |= (rows["pid"] == int(word)) | (rows["tid"] == int(word))
    return found


Order = Callable[[Ints, Floats, Levels, Levels], Ints]


def _newest(kept: Ints, lasted_ns: Floats, levels: Levels, places: Levels) -> Ints:
    del lasted_ns, levels, places
    return kept[::-1]


def _longest(kept: Ints, lasted_ns: Floats, levels: Levels, places: Levels) -> Ints:
    del levels, places
    newest = kept[::-1]
    return newest[np.argsort(-longest_last(lasted_ns[newest]), kind="stable")]


def _severest(kept: Ints, lasted_ns: Floats, levels: Levels, places: Levels) -> Ints:
    del lasted_ns, places
    newest = kept[::-1]
    return newest[np.argsort(-levels[newest], kind="stable")]


def _by_kind(kept: Ints, lasted_ns: Floats, levels: Levels, places: Levels) -> Ints:
    del lasted_ns, levels
    newest = kept[::-1]
    return newest[np.argsort(places[newest], kind="stable")]


_ORDERS: dict[str, Order] = {
    "newest": _newest,
    "longest": _longest,
    "severity": _severest,
    "kind": _by_kind,
}
"""Equals stay in the order of time, the newest first."""


# -- the collector -----------------------------------------------------------------------------------------------


def _silent_ns(view: View, t: int) -> int | None:
    """How long its `cost` rows have failed to come: stalls themselves come when they like."""
    rows = view.latest("cost", t, _HEARTBEAT_NS)
    if not has(rows, "collector", "dt_ns"):
        return None
    for row in rows:
        if view.strings.text(row["collector"]) == COLLECTOR:
            age_ns = t - int(row["t"])
            return age_ns if age_ns > STALE_INTERVALS * max(int(row["dt_ns"]), NS) else None
    return None


def same_thread(known: Snapshot, place: int, within_ns: int) -> Sequence[int]:
    """Places of the other stalls of a thread that ended within a time of one of its stalls, in time order."""
    times = known.rows["t"]
    t = int(times[place])
    first, last = np.searchsorted(times, (t - within_ns, t + within_ns + 1))
    near = known.rows[first:last]
    row = known.rows[place]
    own = np.flatnonzero((near["tid"] == row["tid"]) & (near["pid"] == row["pid"])) + first
    return [int(other) for other in own if other != place]
