"""Stalls as a list, one line each: when, how bad, what, how long, who, and where."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from opusmon.clock import Anchors
from opusmon.times import format_wall
from opusmon.ui import units
from opusmon.ui.glyphs import Glyphs
from opusmon.ui.panes.stalls_state import SORTS, Stall
from opusmon.ui.panes.stalls_words import (
    BAR_WORDS,
    KIND_CELLS,
    KINDS,
    OTHER,
    PAGE_FAULTS,
    bar_share,
    code_words,
    duration_cell,
    letter_of,
    severity_mark,
    whole,
)
from opusmon.ui.text import Line, Span, abbreviated, fill, pad
from opusmon.ui.widgets.chart import bar

_TIME_CELLS, _MARK_CELLS, _DURATION_CELLS = 10, 3, 8
_FIXED_CELLS = 1 + _TIME_CELLS + 1 + _MARK_CELLS + 1 + KIND_CELLS + 1 + _DURATION_CELLS
"""The selection mark and the columns that every list has."""
_MIN_BAR_CELLS = 6
_STREAM_CELLS = 14
WIDE_CELLS = 110
"""From this width on call, stream and reason have a column each."""
CALLS = "STREAM, CALL, REASON"


@dataclass(frozen=True, slots=True)
class Plan:
    """Cells of the columns that depend on the width; 0 leaves one out.

    Attributes:
        bar: of the duration.
        who: process and thread.
        call: the function; 0 when call, stream and reason share `rest`.
        rest: the reason, or all three.
    """

    bar: int
    who: int
    call: int
    rest: int


def layout(width: int) -> Plan:
    """The columns for a list of `width` cells, the selection mark included."""
    room = width - _FIXED_CELLS
    if width < 60:
        return Plan(0, max(room - 1, 0), 0, 0)
    bar_cells = _MIN_BAR_CELLS if width < 100 else min(width // 10, 20)
    room -= bar_cells + 1
    who = min(max(room // 4, 14), 34)
    room -= who + 1
    call = min(max(room * 2 // 5, 20), 34) if width >= WIDE_CELLS else 0
    if call:
        return Plan(bar_cells, who, call, room - 1 - call - 1 - _STREAM_CELLS - 1)
    return Plan(bar_cells, who, 0, room - 1)


def table_head(plan: Plan, sort: str) -> Line:
    """The headings; the order chosen is marked with a star, and the scale of the bar is said."""
    bar_title = f" {BAR_WORDS}" if plan.bar else ""
    columns = [
        ("TIME", _TIME_CELLS, "newest"),
        ("SEV", _MARK_CELLS, "severity"),
        ("KIND", KIND_CELLS, "kind"),
        (f"DUR{bar_title}", _DURATION_CELLS + (plan.bar + 1 if plan.bar else 0), "longest"),
        ("PROC/THREAD", plan.who, ""),
    ]
    if plan.call:
        columns += [("CALL", plan.call, ""), ("STREAM", _STREAM_CELLS, ""), ("REASON", plan.rest, "")]
    elif plan.rest:
        columns.append((CALLS, plan.rest, ""))
    row: list[Span] = []
    for title, width, order in columns:
        row.extend(_heading(title, width, is_order=order == (sort if sort in SORTS else SORTS[0])))
    return tuple(row)


def _heading(title: str, width: int, *, is_order: bool) -> list[Span]:
    """A heading after its gap; the star stands in the gap where there is no room behind."""
    style = "accent" if is_order else "label"
    if is_order and len(title) < width:
        return [(" ", ""), (pad(f"{title}*", width), style)]
    return [("*" if is_order else " ", style), (pad(title, width), style)]


def clock_words(anchors: Anchors, t: int, decimals: int = 1) -> str:
    """Wall time of an instant: `14:03:22.1`."""
    return format_wall(anchors, t, decimals)


def kind_words(stall: Stall) -> str:
    """What its kind is called; an unknown kind is called as it is."""
    return KINDS[stall.place].short if stall.place < OTHER else stall.kind or "?"


def table_row(stall: Stall, plan: Plan, anchors: Anchors, glyphs: Glyphs, *, selected: bool) -> Line:
    """One stall in one line; where columns are scarce, what broke a capture takes all of them."""
    mark, style = severity_mark(stall.level, glyphs)
    row: list[Span] = [
        (glyphs.select if selected else " ", "select" if selected else ""),
        (f"{clock_words(anchors, stall.t)} ", "label"),
        (f"{mark}{letter_of(stall.place)} ", style),
        (shortened(kind_words(stall), KIND_CELLS), "title"),
        (f" {duration_cell(stall.each_ns)}", "value" if math.isfinite(stall.each_ns) else "dim"),
    ]
    if is_broken_capture(stall) and plan.rest and not plan.call:
        width = plan.bar + 1 + plan.who + 1 + plan.rest
        return (*row, (f" {shortened(capture_words(stall), width)}", "value"))
    if plan.bar:
        row += [(" ", ""), *bar(bar_share(stall.each_ns), plan.bar, glyphs, "series1")]
    row.append((f" {shortened(stall.who, plan.who)}", "title" if selected else ""))
    if plan.rest > 0:
        row += [(" ", ""), *_tail(stall, plan)]
    return tuple(row)


def _tail(stall: Stall, plan: Plan) -> Iterator[Span]:
    """Where and why: in three columns, or in one where they do not fit; a broken capture in words."""
    if is_broken_capture(stall):
        width = plan.call + 1 + _STREAM_CELLS + 1 + plan.rest
        yield shortened(capture_words(stall), width), "value"
        return
    if plan.call:
        stream = handle(stall, _STREAM_CELLS)
        yield f"{shortened(stall.call, plan.call)} {pad(stream, _STREAM_CELLS)} ", "label"
        yield shortened(remark(stall), plan.rest), "value"
        return
    words = "  ".join(part for part in (handle(stall, 6), stall.call, remark(stall)) if part)
    yield shortened(words, plan.rest), "label"


def handle(stall: Stall, width: int) -> str:
    """The stream's handle in at most `width` cells, the last digits first of all; "" for no single stream."""
    full = stall.stream_words.removeprefix("stream ")
    short = full.partition(" ")[0]
    if len(full) <= width or not full:
        return full
    return short if len(short) <= width else f"~{short[len(short) - width + 1 :]}"


def is_broken_capture(stall: Stall) -> bool:
    """A graph capture that did not end well."""
    return stall.kind == "capture" and math.isfinite(stall.code) and stall.code != 0


def capture_words(stall: Stall) -> str:
    """`901 invalidated by cuMemAlloc_v2 thread nccl`; without a culprit it says so."""
    what = code_words(stall.kind, stall.code)
    if not (stall.by_call or stall.by_tid):
        return f"{what}  by what was not seen"
    thread = stall.by_thread or (str(stall.by_tid) if stall.by_tid else "")
    return f"{what} by {stall.by_call or '?'}" + (f" thread {thread}" if thread else "")


def remark(stall: Stall) -> str:
    """What there is to add: result, how many, how much, reason. The reasons of `jit` and `tls` tell the result."""
    said = stall.reason and stall.kind in ("jit", "tls")
    result = "" if said else code_words(stall.kind, stall.code)
    return "  ".join(part for part in (result, *amounts(stall), stall.reason) if part)


def amounts(stall: Stall) -> list[str]:
    """`x12, 1.1 s in all`, `1.2 GiB`: what was folded into the row, and the bytes concerned."""
    found = []
    if stall.place == PAGE_FAULTS:
        found.append(f"{whole(stall.count)} faults in {units.duration(stall.dur_ns)}")
    elif stall.count > 1 and math.isfinite(stall.count):
        found.append(f"x{whole(stall.count)}, {units.duration(stall.dur_ns)} in all")
    if stall.size_b > 0 and math.isfinite(stall.size_b):
        found.append(units.size(stall.size_b))
    return found


def shortened(text: str, width: int) -> str:
    """Text in exactly `width` cells; the last one says when something was cut off."""
    return pad(abbreviated(text, width), max(width, 0))


def brief(stall: Stall, anchors: Anchors, glyphs: Glyphs, width: int) -> Line:
    """A stall in at most `width` cells: for one line that has to do."""
    mark, style = severity_mark(stall.level, glyphs)
    broken = is_broken_capture(stall)
    where = f"by {stall.by_call}" if broken and stall.by_call else stall.call or stall.reason
    duration = () if not math.isfinite(stall.each_ns) else ((units.duration(stall.each_ns), "value"),)
    parts: list[Line] = [
        ((f"{mark.strip()} " if mark.strip() else "", style), (kind_words(stall), "title")),
        ((code_words(stall.kind, stall.code), "value"),) if broken else duration,
        ((stall.who, "value"),),
        ((where, "label"),) if where else (),
        ((clock_words(anchors, stall.t), "dim"),),
    ]
    return fill(parts, width)
