"""The whole session on one time bar: the span shown is bright, marks are letters, the playhead is a bar.

The rows of the event lane lie under it column by column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opusmon.ui.glyphs import Glyphs
from opusmon.ui.marks import Place
from opusmon.ui.text import Line, merge

MARKS: dict[str, tuple[str, str]] = {
    "critical": ("!!", "bad"),
    "xid": ("x", "bad"),
    "warning": ("!", "warn"),
    "restart": ("r", "warn"),
    "drop": ("d", "warn"),
    "info": ("i", "mark"),
    "capture": ("c", "mark"),
    "jit": ("j", "mark"),
    "check": ("k", "accent"),
    "bookmark": ("b", "accent"),
    "gap": ("g", "dim"),
}
"""Letter and style of each kind of mark, the worst first: where two share a cell, the earlier one shows."""

_RANK = {kind: rank for rank, kind in enumerate(MARKS)}


@dataclass(frozen=True, slots=True)
class TimeBar:
    """What the bar shows, all in monotonic ns.

    Attributes:
        t0: start of the session.
        t1: its end, or now.
        playhead: the instant shown.
        span_ns: the panes show [playhead - span_ns, playhead].
        marks: in any order; those outside [t0, t1] are not drawn, one that began before stands at the left edge.
    """

    t0: int
    t1: int
    playhead: int
    span_ns: int
    marks: Sequence[Place] = ()


def on_bar(bar: TimeBar, mark: Place) -> bool:
    """Whether any of a mark lies on the bar."""
    return mark.t <= bar.t1 and mark.t + mark.dur_ns >= bar.t0


def column_of(bar: TimeBar, t: int, width: int) -> int:
    """Column of an instant on a bar of `width` cells: t0 is column 0, t1 the last one; clipped to the bar."""
    length = bar.t1 - bar.t0
    if width <= 1 or length <= 0:
        return max(width - 1, 0)
    return min(max((t - bar.t0) * (width - 1) // length, 0), width - 1)


def time_at(bar: TimeBar, column: int, width: int) -> int:
    """The instant a click on a column means: the earliest one that `column_of` draws there."""
    length = bar.t1 - bar.t0
    if width <= 1 or length <= 0 or column >= width - 1:
        return bar.t1
    return bar.t0 - (-max(column, 0) * length // (width - 1))


def timeline(bar: TimeBar, width: int, glyphs: Glyphs) -> Line:
    """Draw the bar in exactly `width` cells."""
    if width <= 0:
        return ()
    chars = [glyphs.rest] * width
    styles = ["dim"] * width
    first = column_of(bar, bar.playhead - bar.span_ns, width)
    now = column_of(bar, bar.playhead, width)
    for column in range(first, now + 1):
        chars[column], styles[column] = glyphs.span, "accent"
    chars[now], styles[now] = glyphs.playhead, "title"
    _put_marks(_cells(bar, width), width, chars, styles)
    return merge(tuple(zip(chars, styles, strict=True)))


def lane_row(bar: TimeBar, width: int, glyphs: Glyphs) -> Line:
    """Draw the bar's marks alone in exactly `width` cells, what lasts from its begin to its end.

    The playhead goes through, so that a row is read together with the bar above.
    """
    if width <= 0:
        return ()
    chars = [" "] * width
    styles = ["dim"] * width
    cells = _cells(bar, width)
    for _, first, last, kind in reversed(cells):
        if first < last:
            chars[first : last + 1] = glyphs.span * (last + 1 - first)
            styles[first : last + 1] = [_look(kind)[1]] * (last + 1 - first)
    now = column_of(bar, bar.playhead, width)
    chars[now], styles[now] = glyphs.playhead, "title"
    _put_marks(cells, width, chars, styles)
    return merge(tuple(zip(chars, styles, strict=True)))


def _look(kind: str) -> tuple[str, str]:
    return MARKS.get(kind, ("*", "mark"))


def _cells(bar: TimeBar, width: int) -> list[tuple[int, int, int, str]]:
    """Rank, first and last column, and kind of the marks on the bar: each once, the worst first."""
    found = set()
    for mark in bar.marks:
        if on_bar(bar, mark):
            first = column_of(bar, mark.t, width)
            last = column_of(bar, mark.t + mark.dur_ns, width) if mark.dur_ns else first
            found.add((_RANK.get(mark.kind, len(_RANK)), first, last, mark.kind))
    return sorted(found)


def _put_marks(
    cells: Iterable[tuple[int, int, int, str]], width: int, chars: list[str], styles: list[str]
) -> None:
    taken: set[int] = set()
    for _, column, _, kind in cells:
        if column in taken:
            continue
        letters, style = _look(kind)
        second = column + 1 if column + 1 < width else column - 1
        places = [column]
        if len(letters) == 2 and second >= 0 and second not in taken:
            places = sorted((column, second))
        for place, letter in zip(places, letters, strict=False):
            chars[place], styles[place] = letter, style
            taken.add(place)
