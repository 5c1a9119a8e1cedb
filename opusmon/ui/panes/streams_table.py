"""Streams as a table, one line each: which columns fit, and what is in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opusmon.ui import units
from opusmon.ui.glyphs import Glyphs
from opusmon.ui.panes.streams_state import DIRECTIONS, Stream
from opusmon.ui.text import Align, Line, Span, abbreviated, pad
from opusmon.ui.widgets.chart import bar

WAIT_FULL_MS = 1000.0
"""A full bar: one thread that waits all the time."""
LANE_MIN_CELLS = 30
LANE_SHARE = 0.5
"""What lanes get of the width at least, where they are what the pane is about."""
_MIXED_SHARE = 0.9
"""A direction with less than this share of the bytes is not named alone."""

Cell = Callable[[Stream, Glyphs, int], Line]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of streams.

    Attributes:
        titles: headings with the unit, the longest that fits is shown.
        width: least cells.
        rank: the lower, the earlier it gets room.
        cell: draws it, given its width, which it fills.
        align: of heading and cell.
        grow: most cells it takes when there is room to spare.
        sort: the sort order that it shows, "" for none.
    """

    titles: tuple[str, ...]
    width: int
    rank: float
    cell: Cell
    align: Align = ">"
    grow: int = 0
    sort: str = ""


def short_duration(ns: float) -> str:
    """At most six cells: `412 ms`, `84 ms`, `8.4 ms`, `1.9 s`, `13 us`; "--" when missing."""
    if not math.isfinite(ns) or ns <= 0:
        return units.MISSING if not math.isfinite(ns) else "0"
    for scale, unit in ((1.0, "ns"), (1e3, "us"), (1e6, "ms"), (1e9, "s"), (6e10, "m"), (3.6e12, "h")):
        value = ns / scale
        if value < (59.5 if unit in ("s", "m") else 999.5):
            return f"{value:.{1 if value < 9.95 and unit != 'ns' else 0}f}".removesuffix(".0") + f" {unit}"
    return f"{ns / 8.64e13:.0f} d"


def short_number(value: float) -> str:
    """At most four digits: `0.4`, `610`, `9999`, `12k`; "--" when missing."""
    if not math.isfinite(value):
        return units.MISSING
    if 0 < value < 9.95:
        return f"{value:.1f}"
    return f"{value:.0f}" if value < 9999.5 else f"{value / 1000:.0f}k"


def number_style(value: float) -> str:
    """Zero and missing stand back."""
    return "value" if value > 0 else "dim"


def _count(field: str) -> Cell:
    def cell(stream: Stream, glyphs: Glyphs, width: int) -> Line:
        del glyphs
        value = stream.per_s(field)
        decimals = 1 if 0 < value < 9.95 else 0
        return ((units.number(value, width, decimals), number_style(value)),)

    return cell


def _name_cell(stream: Stream, glyphs: Glyphs, width: int) -> Line:
    del glyphs
    return ((pad(abbreviated(stream.name, width), width), "title"),)


def _pid_cell(stream: Stream, glyphs: Glyphs, width: int) -> Line:
    del glyphs
    return ((str(stream.pid).rjust(width), "label"),)


def _handle_cell(stream: Stream, glyphs: Glyphs, width: int) -> Line:
    del glyphs
    return ((pad(stream.handle(width), width), "label"),)


def copies_words(stream: Stream, width: int) -> str:
    """`55.3 d2d`: GB/s in all directions and the one that nine tenths of the bytes go in, else `mix`."""
    known = {label: stream.per_s(field) for label, field in DIRECTIONS}
    total = stream.copy_bps
    if not total > 0:
        return pad("--" if math.isnan(total) else "0.0", width - 4, ">") + "    "
    rate = "<0.1" if total < 0.05e9 else units.gb_rate(total, 0, 1 if total < 99.95e9 else 0)
    most = max(known, key=lambda label: known[label] if known[label] == known[label] else -1.0)
    label = most if known[most] >= _MIXED_SHARE * total else "mix"
    return f"{rate.rjust(width - 4)} {label}"


def _copies_cell(stream: Stream, glyphs: Glyphs, width: int) -> Line:
    del glyphs
    return ((copies_words(stream, width), number_style(stream.copy_bps)),)


def _rate_cell(field: str) -> Cell:
    def cell(stream: Stream, glyphs: Glyphs, width: int) -> Line:
        del glyphs
        value = stream.per_s(field)
        return ((units.gb_rate(value, width), number_style(value)),)

    return cell


def _wait_cell(stream: Stream, glyphs: Glyphs, width: int) -> Line:
    """The number in four cells, the bar in the rest."""
    value = stream.wait_ms_per_s
    text = short_number(value).rjust(4)
    if math.isnan(value):
        return ((pad(text, width), "dim"),)
    return ((f"{text} ", number_style(value)), *bar(value / WAIT_FULL_MS, width - 5, glyphs, "series1"))


def _longest_cell(field: str) -> Cell:
    def cell(stream: Stream, glyphs: Glyphs, width: int) -> Line:
        del glyphs
        value = stream.longest_ns(field)
        return ((pad(short_duration(value), width, ">"), number_style(value)),)

    return cell


def bubble_words(value_pct: float) -> str:
    """`12 %`; `>100 %` when the bubble began before the interval in which it ended."""
    return ">100 %" if value_pct > 100.5 else percent_words(value_pct)


def percent_words(value: float) -> str:
    """`12 %`, or "--" without a unit when it is missing."""
    return units.percent(value, 0) if math.isfinite(value) else units.MISSING


def _bubble_cell(stream: Stream, glyphs: Glyphs, width: int) -> Line:
    del glyphs
    value = stream.bubble_pct
    return ((pad(bubble_words(value), width, ">"), number_style(value)),)


def _share_cell(stream: Stream, glyphs: Glyphs, width: int) -> Line:
    del glyphs
    value = stream.graph_share_pct
    return ((pad(percent_words(value), width, ">"), number_style(value)),)


def _since_cell(stream: Stream, glyphs: Glyphs, width: int) -> Line:
    del glyphs
    value = stream.since_launch_ns
    return ((pad(short_duration(value), width, ">"), "value" if value == value else "dim"),)


def _call_cell(stream: Stream, glyphs: Glyphs, width: int) -> Line:
    del glyphs
    value = stream.call_ns / 1e3
    return ((units.number(value, width, 1), number_style(value)),)


def _lane_cell(stream: Stream, glyphs: Glyphs, width: int) -> Line:
    """Drawn for all streams at once; `table_row` puts it in."""
    del stream, glyphs, width
    return ()


LANE = Column(("",), LANE_MIN_CELLS, 9, _lane_cell, "<", 400)

TABLE: tuple[Column, ...] = (
    Column(("PROC/THREAD",), 13, 0, _name_cell, "<", 34, "name"),
    Column(("PID",), 7, 10, _pid_cell),
    Column(("STREAM",), 6, 1, _handle_cell, "<", 14),
    Column(("LAUNCH/s",), 8, 4, _count("launches"), sort="launches"),
    Column(("GRAPH/s",), 7, 5, _count("graph_launches"), sort="graphs"),
    Column(("GRAPH%",), 6, 11, _share_cell),
    Column(("COPY GB/s", "GB/s"), 8, 7, _copies_cell, ">", 9, "copies"),
    Column(("h2d GB/s",), 8, 14, _rate_cell("h2d_b")),
    Column(("d2h GB/s",), 8, 15, _rate_cell("d2h_b")),
    Column(("d2d GB/s",), 8, 16, _rate_cell("d2d_b")),
    Column(("WAIT ms/s",), 9, 2, _wait_cell, "<", 17, "wait"),
    Column(("MAX WAIT", "MAX"), 6, 6, _longest_cell("wait_max_ns"), ">", 8),
    Column(("BUBBLE",), 6, 3, _bubble_cell, sort="bubble"),
    Column(("LAST LAUNCH", "SINCE"), 6, 8, _since_cell, ">", 11),
    Column(("CALL us",), 7, 12, _call_cell),
    Column(("MAX CALL",), 8, 13, _longest_cell("launch_call_max_ns")),
    Column(("POLLS/s",), 7, 18, _count("not_ready")),
    LANE,
)
_PID_PLACE, _LANE_PLACE = 1, len(TABLE) - 1
_PID_RANK, _LANE_RANK = 2.05, 2.1
"""Of the process ids when there are several processes, and of lanes that are asked for."""
_GROWTH = (0, 10, 2, 13, 11, 6)
"""Places of the columns that get the room to spare, in turn, before the lane."""

Plan = Sequence[tuple[Column, int]]


def layout(width: int, *, pids: bool, lane_share: float | None = 0.0) -> list[tuple[Column, int]]:
    """The columns that fit in `width` cells and their widths, in the order of `TABLE`.

    Args:
        width: cells of a row, without the selection mark.
        pids: there are several processes.
        lane_share: of the width for a lane; 0 gives it only what the important columns leave, None leaves it out.
    """
    chosen: dict[int, int] = {}
    left = width + 1
    ranks = {
        _PID_PLACE: _PID_RANK if pids else TABLE[_PID_PLACE].rank,
        _LANE_PLACE: _LANE_RANK if lane_share else LANE.rank,
    }
    for place in sorted(range(len(TABLE)), key=lambda place: ranks.get(place, TABLE[place].rank)):
        least = TABLE[place].width
        if place == _LANE_PLACE:
            least = width + 1 if lane_share is None else max(least, int(width * lane_share))
        if least + 1 <= left:
            chosen[place] = least
            left -= least + 1
    for place in (*_GROWTH, _LANE_PLACE):
        if place in chosen and left > 0:
            more = min(left, max(TABLE[place].grow - chosen[place], 0))
            chosen[place] += more
            left -= more
    return [(TABLE[place], width) for place, width in sorted(chosen.items())]


def lane_cells(plan: Plan) -> int:
    """Width of the lane in a table, 0 when it has none."""
    return next((width for column, width in plan if column is LANE), 0)


def table_head(plan: Plan, sort: str, lane_title: str = "") -> Line:
    """The headings; the order chosen is marked with a star, in the gap before it where there is no room behind."""
    row: list[Span] = []
    for column, width in plan:
        is_order = bool(column.sort) and column.sort == sort
        if column is LANE:
            title = lane_title
        else:
            title = next((title for title in column.titles if len(title) <= width), column.titles[-1])
        star_fits = len(title) < width
        row.append(("*" if is_order and not star_fits else " ", "accent" if is_order else ""))
        words = f"{title}*" if is_order and star_fits else title
        row.append((pad(words, width, column.align), _head_style(column, is_order)))
    return tuple(row)


def _head_style(column: Column, is_order: bool) -> str:
    if is_order:
        return "accent"
    return "dim" if column is LANE else "label"


def table_row(stream: Stream, plan: Plan, glyphs: Glyphs, *, selected: bool, lane: Line = ()) -> Line:
    """One stream in one line."""
    row: list[Span] = [(glyphs.select if selected else " ", "select" if selected else "")]
    for place, (column, width) in enumerate(plan):
        spans = lane if column is LANE else column.cell(stream, glyphs, width)
        if place and spans:
            text, style = spans[0]
            row.append((f" {text}", style))  # the gap goes with the cell: fewer spans to settle
            row.extend(spans[1:])
        else:
            row.extend(spans)
    if stream.quiet:
        return tuple((text, "dim" if style in ("value", "title", "label") else style) for text, style in row)
    return tuple(row)
