"""What happened at an instant within a comparison: XIDs, throttling, captures, JIT, loads, restarts, marks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from opusmon.channels import ENGINE, GPU_EVENT, GPU_PROCESS, PROCESS, STALL, STATUS, STREAM
from opusmon.channels.own import KEYFRAME_NS
from opusmon.clock import NS
from opusmon.schema import Channel, Rows, conform
from opusmon.triage.explain_series import stream_words
from opusmon.triage.scene import View

FOLD_NS = 10 * NS
"""Events of one kind and subject closer than this are one: a storm of them is one thing to know."""

PIECE_NS = 600 * NS
LONGEST_NS = 600 * NS
"""Nothing that is told as an event takes longer."""
LATE_NS = 3 * NS
"""A row that is late by less, or by less than three of its series' intervals, is not missing."""

STALL_EVENTS = {
    "capture": "graph capture failed",
    "jit": "compiles",
    "module": "loads a module",
    "init_in_capture": "initialises inside a capture",
}
"""Kinds of stall that are events, and what the process does; the others are series."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    Attributes:
        t: when, or when the first of several did; monotonic ns.
        last: when the last one did.
        kind: "xid", "throttle_on", "capture", "restart", "mark", ...
        text: what, with `{0}`, `{1}` in the places of `names`.
        names: text from outside.
        count: how many.
    """

    t: int
    last: int
    kind: str
    text: str
    names: tuple[str, ...] = ()
    count: int = 1


def events(view: View, t0: int, t1: int) -> list[Event]:
    """The events with t0 < t <= t1, folded, in time order; what took a while is among them by when it ended."""
    found: list[Event] = []
    for read in (_gpu_events, _stalls, _restarts, _processes, _status, _marks):
        found.extend(fold(read(view, t0, t1)))
    return sorted(found, key=lambda one: (one.t, one.kind, one.text))


def fold(found: Iterable[Event]) -> list[Event]:
    """Events of one kind, text and names that follow each other within `FOLD_NS` become one."""
    rows: dict[tuple[str, str, tuple[str, ...]], list[Event]] = {}
    for one in sorted(found, key=lambda event: event.t):
        row = rows.setdefault((one.kind, one.text, one.names), [])
        if row and one.t - row[-1].last <= FOLD_NS:
            row[-1] = replace(row[-1], last=one.t, count=row[-1].count + one.count)
        else:
            row.append(one)
    return [one for row in rows.values() for one in row]


def _rows(view: View, channel: Channel, t0: int, t1: int) -> Rows:
    """Rows of a channel in this version's columns; none where the view has no such channel."""
    if channel.name not in view.channels:
        return np.empty(0, dtype=channel.dtype)
    return conform(view.query(channel.name, t0, t1), channel)


def _pieces(view: View, channel: Channel, t0: int, t1: int) -> Iterator[Rows]:
    """The same in pieces of ten minutes, so that a day of events does not have to fit in memory."""
    for begin in range(t0, t1, PIECE_NS):
        rows = _rows(view, channel, begin, min(begin + PIECE_NS, t1))
        if len(rows):
            yield rows


def _gpu_events(view: View, t0: int, t1: int) -> Iterator[Event]:
    text = view.strings.text
    for row in (row for rows in _pieces(view, GPU_EVENT, t0, t1) for row in rows):
        kind, detail = text(row["kind"]), text(row["detail"])
        what = f"XID {row['code']:.0f}" if kind == "xid" else kind.replace("_", " ")
        t = int(row["t"])
        words = f"gpu {row['gpu']}: {what}" + (f" ({detail})" if detail else "")
        yield Event(t, t, kind, _literal(words))


def _stalls(view: View, t0: int, t1: int) -> Iterator[Event]:
    for rows in _pieces(view, STALL, t0, t1):
        yield from _stall_events(view, rows)


def _stall_events(view: View, rows: Rows) -> Iterator[Event]:
    text = view.strings.text
    for number in np.unique(rows["kind"]).tolist():
        kind = text(number)
        if kind not in STALL_EVENTS:
            continue
        own = rows[rows["kind"] == number]
        if kind == "capture":
            own = own[~np.isnan(own["code"]) & (own["code"] != 0)]
        for row in own:
            call = text(row["by_call"]) if kind == "capture" else text(row["call"])
            code = f" ({row['code']:.0f}" + (f" by {call})" if call else ")") if kind == "capture" else ""
            words = f"{{0}} {row['pid']} {STALL_EVENTS[kind]}{_literal(code)}"
            t, dur_ns = int(row["t"]), float(row["dur_ns"])
            begun = t - int(dur_ns) if math.isfinite(dur_ns) and 0 < dur_ns < LONGEST_NS else t
            yield Event(begun, t, kind, words, (text(row["process"]),))


def _restarts(view: View, t0: int, t1: int) -> Iterator[Event]:
    for rows in _pieces(view, ENGINE, t0, t1):
        for row in rows[rows["restarts"] > 0]:
            t = int(row["t"])
            yield Event(t, t, "restart", "engine {0} restarted", (view.strings.text(row["engine"]),))


def _processes(view: View, t0: int, t1: int) -> Iterator[Event]:
    """Processes that came or went, as the first channel that knows processes saw them, and streams of processes."""
    known = next((one for one in (PROCESS, GPU_PROCESS) if one.name in view.channels), None)
    if known is not None:
        yield from _presence(view, known, ("pid",), t0, t1)
    yield from _presence(view, STREAM, ("pid", "stream"), t0, t1)


@dataclass(slots=True)
class _Seen:
    """When rows of a series were seen, and the id of its process's name."""

    first: int
    last: int
    rows: int
    name: int


def _presence(view: View, channel: Channel, key: tuple[str, ...], t0: int, t1: int) -> Iterator[Event]:
    """Series whose rows begin or stop after t0, while others of the channel go on."""
    name = "process" if "process" in channel.by_name else "name"
    seen: dict[tuple[int, ...], _Seen] = {}
    for rows in _pieces(view, channel, t0 - (t1 - t0), t1):
        codes = np.stack([rows[one].astype(np.int64) for one in key], axis=1)
        for code, own in ((code, rows[np.all(codes == code, axis=1)]) for code in np.unique(codes, axis=0)):
            one = seen.setdefault(tuple(code.tolist()), _Seen(int(own["t"][0]), 0, 0, int(own[name][0])))
            one.last, one.rows = int(own["t"][-1]), one.rows + len(own)
    begin = min((one.first for one in seen.values()), default=0)
    end = max((one.last for one in seen.values()), default=0)
    for code, one in seen.items():
        slack = max(LATE_NS, 3 * (one.last - one.first) // max(one.rows - 1, 1))
        words = f"{{0}} {code[0]}" + (f" {stream_words(code[1] % 2**64)}" if len(code) > 1 else "")
        names = (view.strings.text(one.name),)
        if one.first > max(t0, begin + slack):
            yield Event(one.first, one.first, "started", f"{words} appears", names)
        if t0 < one.last < end - slack:
            yield Event(one.last, one.last, "ended", f"{words} is seen last", names)


def _status(view: View, t0: int, t1: int) -> Iterator[Event]:
    """Collectors that changed their state: what they did not see did not change."""
    text = view.strings.text
    states: dict[tuple[str, ...], str] = {}
    for row in _rows(view, STATUS, t0 - KEYFRAME_NS - FOLD_NS, t1):
        key = tuple(text(row[name]) for name in STATUS.key)
        state, t = text(row["state"]), int(row["t"])
        before = states.get(key, "ok")
        states[key] = state
        if t > t0 and before != state and not key[2]:
            words = f"collector {key[0]}: {state.replace('_', ' ')}"
            yield Event(t, t, "status", _literal(words))


def _marks(view: View, t0: int, t1: int) -> Iterator[Event]:
    marks = getattr(view, "marks", None)
    for mark in marks(t0, t1) if marks is not None else ():
        if t0 < mark.t0 <= t1:
            yield Event(mark.t0, mark.t0, "mark", f"{_literal(mark.kind)}: {{0}}", (mark.text,))


def _literal(text: str) -> str:
    """Text that `str.format` leaves as it is."""
    return text.replace("{", "{{").replace("}", "}}")
