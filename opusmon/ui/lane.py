"""The time line with the event lane under it: a row for each pane that is on screen, one column per cell of time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from opusmon.ui.glyphs import Glyphs
from opusmon.ui.marks import Place, by_pane
from opusmon.ui.text import Line, fit, pad
from opusmon.ui.units import span as span_words
from opusmon.ui.widgets.timeline import TimeBar, lane_row, on_bar, timeline

USUAL_LINES = 40
"""From this height on the lane shows unless it is put away: two panes one above the other keep 16 lines each."""
LEAST_LINES = 20
"""Under this height there is no lane, whatever is wanted: the panes would have fewer than ten lines."""
END_CELLS = 6
"""Right of the time line: what its end is, and how many marks a row has."""


def has_lane(height: int, wanted: bool | None) -> bool:
    """Whether the lane shows.

    Args:
        height: of the terminal, lines.
        wanted: what the reader chose; None for nothing yet.
    """
    if height < LEAST_LINES:
        return False
    return height >= USUAL_LINES if wanted is None else wanted


def label(span_ns: int) -> str:
    """What stands left of the time line."""
    return f" span {span_words(span_ns):<5} "


def bar_width(span_ns: int, width: int) -> int:
    """Cells of the time line on a screen of `width`."""
    return max(width - len(label(span_ns)) - END_CELLS, 0)


def time_lines(
    bar: TimeBar,
    places: Iterable[Place],
    panes: Sequence[tuple[int, str]],
    current: int,
    end: str,
    width: int,
    glyphs: Glyphs,
) -> list[Line]:
    """The time line, then a row per pane; a mark that has no row is on the time line itself.

    Args:
        bar: without marks.
        places: all marks, in any order.
        panes: number and name of those that have a row.
        current: number of the pane that has the keys.
        end: what the right end of the time line is.
        width: cells of every line.
        glyphs: the characters.
    """
    found = by_pane(places, [name for _, name in panes])
    head, room = label(bar.span_ns), bar_width(bar.span_ns, width)
    top = timeline(replace(bar, marks=found[""]), room, glyphs)
    lines = [((head, "label"), *top, (pad(f" {end}", END_CELLS), "dim"))]
    for number, name in panes:
        own = [place for place in found[name] if on_bar(bar, place)]
        row = lane_row(replace(bar, marks=own), room, glyphs)
        count = f"{len(own):>{END_CELLS - 1}} " if own else ""
        style = "title" if number == current else "label"
        lines.append(((pad(f" {number} {name}", len(head)), style), *row, (pad(count, END_CELLS), "dim")))
    return [fit(line, width) for line in lines]
