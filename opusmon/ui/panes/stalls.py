"""The stalls pane: what kept the threads that feed a GPU from doing so, by eBPF, and the host's figures.

A live list of events; what they amount to over the span stands under it, and the host in one line at the foot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from opusmon.collectors import shows
from opusmon.ui import units
from opusmon.ui.panes.base import Frame, Size, first_shown
from opusmon.ui.panes.gpu_process import more_line
from opusmon.ui.panes.gpu_rows import settle
from opusmon.ui.panes.stalls_detail import detail_lines
from opusmon.ui.panes.stalls_host import has_figures, host_line
from opusmon.ui.panes.stalls_state import (
    CHANNEL,
    COLLECTOR,
    SORTS,
    Identity,
    Snapshot,
    identity,
    place_of,
    snapshot,
)
from opusmon.ui.panes.stalls_table import WIDE_CELLS, brief, layout, table_head, table_row
from opusmon.ui.panes.stalls_totals import (
    HISTOGRAM_LINES,
    STRIP_CELLS,
    UNSEEN,
    beside,
    head_line,
    histogram_lines,
    histogram_strip,
    kind_lines,
    kinds_line,
    when_line,
)
from opusmon.ui.panes.statuses import WRONG_RANK, Status, trouble_line, troubles, waiting
from opusmon.ui.panes.waiting import WaitingPane
from opusmon.ui.text import Line, clean, fill, fit, fit_lines, join, line_cells

NUMBER = 4
MIN_TOTALS_LINES = 12
"""From this height on the totals stand under the list."""
MIN_WHEN_LINES = 15
"""From this height on a row shows when stalls were."""
MIN_DETAIL_LINES = 6
"""Room to spare from which on the selected stall is shown in full."""
MIN_LIST_LINES = 5
"""What the list keeps when a stall is open in full."""
BESIDE_CELLS = 120
"""From this width on the totals of a maximized pane stand beside the selected stall."""
SIDE_CELLS = 64


class StallsPane:
    """The pane itself; it keeps nothing between frames."""

    name: ClassVar[str] = COLLECTOR
    number: ClassVar[int] = NUMBER
    channel: ClassVar[str] = CHANNEL
    sorts: ClassVar[tuple[str, ...]] = SORTS

    def title(self, frame: Frame) -> str:
        """`4 stalls  eBPF  watching 2 processes`; its state when it does not run, its age when it falls silent."""
        known = snapshot(frame)
        off = _off(known)
        if off is not None:
            return off.title(frame)
        head = f"{NUMBER} {COLLECTOR}  eBPF"
        said = known.collector
        if said is not None:
            watching = said.reason.partition(",")[0]
            head = f"{head}  {watching or said.state}" if said.is_ok else f"{head}  {said.state}"
        if known.silent_ns is not None:
            return f"{head}  stale {known.silent_ns / 1e9:.0f} s"
        return head

    def render(self, frame: Frame) -> list[Line]:
        """Exactly `size.height` lines of exactly `size.width` cells."""
        width, height = frame.size.width, frame.size.height
        if width <= 0 or height <= 0:
            return fit_lines((), width, height)
        known = snapshot(frame)
        off = _off(known)
        if off is not None:
            return _waiting(frame, off)
        foot = _foot(frame, known) if height > 3 else []
        room = height - len(foot)
        body = [settle(line, width) for line in _body(frame, known, room)[:room]]
        body.extend([settle((), width)] * (room - len(body)))
        return [*body, *(settle(line, width) for line in foot)]

    def summary(self, frame: Frame) -> Line:
        """The worst stall of the span in one line, and how many there were."""
        width = frame.size.width
        known = snapshot(frame)
        off = _off(known)
        if off is not None:
            return off.summary(frame)
        head: Line = ((f"{NUMBER} {COLLECTOR}  ", "title"),)
        if known.worst is None:
            return fit((*head, (_none(frame, known), "dim")), width)
        stall = known.stall(known.worst)
        count: Line = ((f"{len(known.kept)} in {units.span(frame.span_ns)}", "dim"),)
        room = width - line_cells(head)
        line = brief(stall, frame.view.anchors, frame.glyphs, room - line_cells(count) - 2)
        return fit((*head, *join([line, count])), width)

    def items(self, frame: Frame) -> int:
        """Stalls that pass the filter."""
        return len(snapshot(frame).order)

    def identity(self, frame: Frame) -> Identity | None:
        """Which stall is selected, to find it again by `place` when others have come; None without any."""
        return identity(snapshot(frame), frame.state.selected)

    def place(self, frame: Frame, wanted: Identity) -> int | None:
        """The index that selects a stall now; None when it has left the list."""
        return place_of(snapshot(frame), wanted)


def _off(known: Snapshot) -> WaitingPane | None:
    """What stands in for the pane while there is nothing; None when there are stalls, or none is the news."""
    if len(known.rows) or known.unread:
        return None
    return waiting(COLLECTOR, NUMBER, shows.STALLS, known.collector)


def _waiting(frame: Frame, off: WaitingPane) -> list[Line]:
    """Why there are no stalls; the host is known all the same where its figures come."""
    width, height = frame.size.width, frame.size.height
    if height < 3 or not has_figures(frame.view, frame.t):
        return off.lines(frame.size)
    line = settle(host_line(frame.view, frame.t, width), width)
    return [*off.lines(Size(width, height - 1)), line]


def _none(frame: Frame, known: Snapshot) -> str:
    """Why the list is empty."""
    wanted = clean(frame.state.filter)
    if wanted and len(known.rows):
        return f'no stall matches "{wanted}"'
    return f"no stall in {units.span(frame.span_ns)}"


# -- the pane's parts --------------------------------------------------------------------------------------------


def _body(frame: Frame, known: Snapshot, height: int) -> list[Line]:
    top = _top(frame, known, height)
    if not len(known.kept):
        return [*top, (), ((f" {_none(frame, known)}", "value"),), ((f" {UNSEEN[2:]}", "dim"),)]
    if frame.state.maximized and height >= MIN_TOTALS_LINES:
        return [*top, *_maximized(frame, known, height - len(top))]
    return [*top, *_quarter(frame, known, height - len(top))]


def _top(frame: Frame, known: Snapshot, height: int) -> list[Line]:
    """How many stalls there are, and when they were."""
    if height < 3:
        return []
    width = frame.size.width
    lines: list[Line] = [((" ", ""), *fill(head_line(frame, known, clean(frame.state.filter)), width - 1))]
    if height >= MIN_WHEN_LINES and len(known.kept):
        left = f" -{units.span(frame.span_ns)} "
        lines.append(((left, "dim"), *when_line(frame, known, width - len(left) - 2), (" 0", "dim")))
    return lines


def _quarter(frame: Frame, known: Snapshot, height: int) -> list[Line]:
    """The list, the selected stall where there is room or it is asked for, the totals."""
    width = frame.size.width
    totals = _brief_totals(frame, known) if height >= MIN_TOTALS_LINES - 2 else []
    room = height - len(totals)
    count = len(known.order)
    if frame.state.detail:
        listed = min(count + 1, MIN_LIST_LINES)
    else:
        listed = count + 1 if room - count - 1 > MIN_DETAIL_LINES else room
    lines = _list(frame, known, width, listed)
    below = room - len(lines)
    if below > MIN_DETAIL_LINES or frame.state.detail:
        chosen = known.chosen(frame.state.selected)
        lines = [*lines, (), *detail_lines(frame, known, chosen, width - 1, below - 1)]
        totals = _full_totals(frame, known, height - len(lines) - 1) or totals
    return _over(lines, totals, height)


def _over(lines: list[Line], totals: list[Line], height: int) -> list[Line]:
    """Lines at the top and totals at the bottom of `height` lines."""
    room = height - len(totals)
    return [*lines[:room], *([()] * (room - len(lines))), *totals]


def _full_totals(frame: Frame, known: Snapshot, room: int) -> list[Line]:
    """The histogram and the kinds in full beside each other; nothing where there is no room for it."""
    width = frame.size.width
    if width < WIDE_CELLS or room < HISTOGRAM_LINES:
        return []
    left = histogram_lines(frame, known, width - SIDE_CELLS - 2)
    return beside(
        [((" ", ""), *line) for line in left], kind_lines(frame, known, SIDE_CELLS - 1), width - SIDE_CELLS
    )[:room]


def _brief_totals(frame: Frame, known: Snapshot) -> list[Line]:
    """What the time went into, and the histogram where it fits."""
    width = frame.size.width
    strip = histogram_strip(frame, known) if width >= STRIP_CELLS else []
    kinds = kinds_line(known, width)
    return [*([kinds] if kinds else []), *strip]


def _maximized(frame: Frame, known: Snapshot, height: int) -> list[Line]:
    """The list over the selected stall in full; the totals beside it, or under it in a narrow pane."""
    width = frame.size.width
    is_wide = width >= BESIDE_CELLS and height >= HISTOGRAM_LINES + MIN_LIST_LINES
    totals = [] if is_wide else _brief_totals(frame, known)
    room = height - len(totals)
    share = MIN_LIST_LINES if frame.state.detail else max(room // 2, MIN_LIST_LINES)
    lines = _list(frame, known, width, min(len(known.order) + 1, share))
    below = room - len(lines) - 1
    left = width - SIDE_CELLS if is_wide else width
    detail = detail_lines(frame, known, known.chosen(frame.state.selected), left - 2, below)
    if is_wide:
        side = [*histogram_lines(frame, known, SIDE_CELLS - 1), (), *kind_lines(frame, known, SIDE_CELLS - 1)]
        detail = beside(detail, side[:below], left)
    return _over([*lines, (), *detail], totals, height)


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a list that is in sight: place of the first one, of the selected one, how many are shown."""

    first: int
    chosen: int
    shown: int


def _in_sight(frame: Frame, count: int, room: int) -> _Part:
    shown = room - 1 if count > room > 1 else max(room, 1)
    chosen = min(max(frame.state.selected, 0), count - 1)
    return _Part(first_shown(chosen, frame.state.scroll, count, shown), chosen, shown)


def _list(frame: Frame, known: Snapshot, width: int, height: int) -> list[Line]:
    """The headings, as many stalls as have room, and how many are out of sight."""
    count = len(known.order)
    plan = layout(width)
    head = [table_head(plan, frame.state.sort)] if height > 1 else []
    part = _in_sight(frame, count, height - len(head))
    rows = [
        table_row(
            known.stall(int(place)), plan, frame.view.anchors, frame.glyphs, selected=number == part.chosen
        )
        for number, place in enumerate(known.order[part.first : part.first + part.shown], part.first)
    ]
    below = count - part.first - len(rows)
    more = [more_line(part.first, below)] if part.first or below else []
    return [*head, *rows, *more][: max(height, 0)]


def _foot(frame: Frame, known: Snapshot) -> list[Line]:
    """What the collector cannot see, if anything, and the host."""
    trouble = _trouble(known.statuses, frame.size.width)
    host = host_line(frame.view, frame.t, frame.size.width)
    return [trouble, host] if trouble and frame.size.height > MIN_DETAIL_LINES else [host]


def _is_wrong(status: Status) -> bool:
    """Something is broken or kept from us; other states are limits, as are kinds that cannot occur here."""
    return status.is_whole or (status.rank <= WRONG_RANK and status.state != "unavailable")


def _trouble(statuses: Sequence[Status], width: int) -> Line:
    """The reason that matters most and how many more there are."""
    found = troubles(statuses)
    if not found:
        return ()
    first = min(found, key=lambda status: (not _is_wrong(status), status.rank))
    line = trouble_line(first.text, first.remedy, len(found) - 1, width - 1, is_wrong=_is_wrong(first))
    return ((" ", ""), *line)
