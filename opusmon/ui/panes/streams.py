"""The streams pane: what the host asks of every CUDA stream, and how long it waits for it, by eBPF.

This is host evidence: launches, copies, waits and the gaps between them. What the GPU did in that time is
measured elsewhere and stands above it, labelled so that neither is taken for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from opusmon.collectors import shows
from opusmon.ui import units
from opusmon.ui.panes.base import Frame, first_shown
from opusmon.ui.panes.gpu_process import more_line
from opusmon.ui.panes.gpu_rows import settle
from opusmon.ui.panes.statuses import WRONG_RANK, Status, trouble_line, troubles, waiting
from opusmon.ui.panes.streams_detail import BESIDE_CELLS, HISTOGRAM_LINES, NUMBER_LINES, detail_lines
from opusmon.ui.panes.streams_lanes import (
    axis,
    device_lanes,
    device_words,
    devices_words,
    lanes,
    legend,
    stream_charts,
)
from opusmon.ui.panes.streams_state import SORTS, Snapshot, Stream, snapshot
from opusmon.ui.panes.streams_table import (
    LANE_SHARE,
    Plan,
    bubble_words,
    lane_cells,
    layout,
    percent_words,
    short_duration,
    short_number,
    table_head,
    table_row,
)
from opusmon.ui.panes.waiting import WaitingPane
from opusmon.ui.text import Line, clean, fill, fit, fit_lines, line_cells, spread, wrapped

LATE_INTERVALS = 1.5
"""A newest row older than this many intervals is worth saying in the title."""
NO_CALLS = "no CUDA call has been seen in the last 10 s"
FULL_DETAIL_LINES, BRIEF_DETAIL_LINES = 26, 12
"""Heights from which a maximized pane shows the selected stream in full, or in short."""
BRIEF_LINES = 3
MIN_MAXIMIZED_LINES = 6
"""With less a maximized pane is as the others."""
MAX_DEVICE_LANES = 8
MIN_CHART_LINES, MAX_CHART_LINES = 4, 24
MEASURED_CELLS = 28
"""What the activity of one GPU takes in words, and some room after it."""


class StreamsPane:
    """The pane itself; it keeps nothing between frames."""

    name: ClassVar[str] = "streams"
    number: ClassVar[int] = 3
    channel: ClassVar[str] = "stream"
    sorts: ClassVar[tuple[str, ...]] = SORTS

    def title(self, frame: Frame) -> str:
        """`3 streams  eBPF 1 s (host evidence)`; the age of the newest row is added when rows fail to come."""
        known = snapshot(frame)
        off = _off(known)
        if off is not None:
            return off.title(frame)
        head = f"{self.number} {self.name}  eBPF"
        if known.age_ns is None:
            return f"{head} (host evidence)"
        head = f"{head} {units.duration(float(f'{known.interval_ns:.1e}'))} (host evidence)"
        if known.age_ns <= LATE_INTERVALS * known.interval_ns:
            return head
        return f"{head}  {'stale' if known.stale else 'age'} {known.age_ns / 1e9:.1f} s"

    def render(self, frame: Frame) -> list[Line]:
        """Exactly `size.height` lines of exactly `size.width` cells."""
        width, height = frame.size.width, frame.size.height
        if width <= 0 or height <= 0:
            return fit_lines((), width, height)
        known = snapshot(frame)
        off = _off(known)
        if off is not None:
            return off.render(frame)
        foot = _foot(known.statuses, width) if height > 2 else ()
        room = height - 1 if foot else height
        body = [settle(line, width) for line in _body(frame, known, room)[:room]]
        body.extend([settle((), width)] * (room - len(body)))
        return [*body, settle(foot, width)] if foot else body

    def summary(self, frame: Frame) -> Line:
        """The stream that was waited for most, in one line; blind probes before everything else."""
        width = frame.size.width
        known = snapshot(frame)
        off = _off(known)
        if off is not None:
            return off.summary(frame)
        head: Line = ((f"{self.number} {self.name}  ", "title"),)
        if known.blind:
            return fit((*head, (_blind_words(known), "warn")), width)
        if not known.streams:
            return fit((*head, (NO_CALLS, "dim")), width)
        worst = max(known.streams, key=_waited)
        parts = [*_summary(worst, _busiest(known)), ((_streams(known.total), "dim"),)]
        return fit((*head, *fill(parts, width - line_cells(head))), width)

    def items(self, frame: Frame) -> int:
        """Streams that pass the filter."""
        return len(snapshot(frame).streams)


def _off(known: Snapshot) -> WaitingPane | None:
    """What stands in for the pane while there is no data; None when there is, or when that is the news."""
    if known.age_ns is not None:
        return None
    return waiting("streams", 3, shows.STREAMS, known.collector)


def _waited(stream: Stream) -> float:
    value = stream.wait_ms_per_s
    return value if value == value else -1.0


def _summary(stream: Stream, measured: Line) -> list[Line]:
    return [
        ((stream.name, "value"),),
        (("wait ", "label"), (f"{short_number(stream.wait_ms_per_s)} ms/s", "value")),
        (("bubble ", "label"), (bubble_words(stream.bubble_pct), "value")),
        measured,
        (("max wait ", "label"), (short_duration(stream.longest_ns("wait_max_ns")), "value")),
    ]


def _busiest(known: Snapshot) -> Line:
    """`SM 84 % measured` of the busiest GPU, by its number where there are several."""
    busy = [device for device in known.devices if device.sm_pct == device.sm_pct]
    if not busy:
        return ()
    words = device_words(max(busy, key=lambda device: device.sm_pct))
    return words if len(known.devices) > 1 else words[1:]


def _blind_words(known: Snapshot) -> str:
    return f"! probe blind: {known.blind}"


# -- the pane's parts --------------------------------------------------------------------------------------------


def _body(frame: Frame, known: Snapshot, height: int) -> list[Line]:
    blind: list[Line] = [((f" {_blind_words(known)}", "warn"),)] if known.blind else []
    if not known.total:
        return [_device_line(frame, known), *blind, *_nothing(known, frame.size.width)]
    if not known.streams:
        words = f'no stream matches "{clean(frame.state.filter)}"'
        return [_device_line(frame, known), *blind, ((f" {words}", "dim"),)]
    room = height - len(blind)
    if frame.state.maximized and room >= MIN_MAXIMIZED_LINES:
        return [*blind, *_maximized(frame, known, room)]
    return [*blind, *_table(frame, known, room)]


def _nothing(known: Snapshot, width: int) -> list[Line]:
    said = known.collector
    reason = said.reason if said is not None else ""
    return [(), *wrapped(reason, width, " ", "value"), ((f" {NO_CALLS}", "dim"),)]


def _device_line(frame: Frame, known: Snapshot) -> Line:
    """What was measured at the left, what was seen of the host at the right."""
    width = frame.size.width
    left: Line = ((" ", ""), *devices_words(known.devices, width - 1))
    return spread(left, _totals(frame, known, width - line_cells(left) - 2), width)


def _totals(frame: Frame, known: Snapshot, width: int) -> Line:
    """How many streams there are and what is launched on all of them."""
    if not known.total:
        return ()
    wanted = clean(frame.state.filter)
    filtered = f"{len(known.streams)} of " if wanted else ""
    share = known.graph_share_pct
    parts: list[Line] = [
        ((f"filter: {wanted}", "accent"),) if wanted else (),
        ((f"{filtered}{_streams(known.total)}", "label"),),
        (("kernels ", "label"), (f"{short_number(known.kernels_per_s)}/s", "value")),
        (("graphs ", "label"), (f"{short_number(known.graphs_per_s)}/s", "value")),
        ((f"{percent_words(share)} of launches", "dim"),) if share == share else (),
    ]
    return fill(parts, width)


def _streams(count: int) -> str:
    return f"{count} stream" if count == 1 else f"{count} streams"


@dataclass(frozen=True, slots=True)
class _Part:
    """The streams of a table that are in sight.

    Attributes:
        streams: they.
        first: place of the first one.
        chosen: place of the selected one.
        count: how many there are with those out of sight.
    """

    streams: Sequence[Stream]
    first: int
    chosen: int
    count: int

    @property
    def folded(self) -> list[Line]:
        """How many are out of sight, if any."""
        below = self.count - self.first - len(self.streams)
        return [more_line(self.first, below)] if self.first or below else []


def _in_sight(frame: Frame, known: Snapshot, room: int) -> _Part:
    """As many streams as have room, and a line for the others when there are more."""
    streams = known.streams
    shown = room - 1 if len(streams) > room > 1 else max(room, 1)
    chosen = min(max(frame.state.selected, 0), len(streams) - 1)
    first = first_shown(chosen, frame.state.scroll, len(streams), shown)
    return _Part(streams[first : first + shown], first, chosen, len(streams))


def _rows(frame: Frame, part: _Part, plan: Plan, drawn: Sequence[Line]) -> list[Line]:
    """One line for each stream in sight."""
    rows = enumerate(zip(part.streams, drawn, strict=True), part.first)
    return [
        table_row(stream, plan, frame.glyphs, selected=place == part.chosen, lane=lane)
        for place, (stream, lane) in rows
    ]


def _head(frame: Frame, plan: Plan) -> Line:
    sort = frame.state.sort if frame.state.sort in SORTS else SORTS[0]
    return table_head(plan, sort, axis(frame.span_ns, lane_cells(plan)))


def _table(frame: Frame, known: Snapshot, height: int) -> list[Line]:
    """One line per stream; with room to spare a lane under each, or the selected one in full at the bottom."""
    width = frame.size.width
    top = [_device_line(frame, known)] if height > 2 else []
    room = height - len(top) - 1
    count = len(known.streams)
    wanted = min(NUMBER_LINES + 2, room - 2) if frame.state.detail else 0
    under = 2 * count + 1 <= room - wanted
    part = _in_sight(frame, known, max((room - 1) // 2 if under else room - wanted, 1))
    plan = layout(width - 1, pids=known.pids > 1, lane_share=None if under else 0.0)
    cells = lane_cells(plan)
    rows = _rows(frame, part, plan, lanes(frame, part.streams, cells, known.interval_ns))
    lines = [*top, _head(frame, plan)] if room > 0 else top
    if under:
        lines.extend(_with_lanes(frame, known, part, rows))
    else:
        lines.extend([*rows, *part.folded])
    spare = height - len(lines)
    if spare >= NUMBER_LINES + 2:
        lines.append(())
    if wanted or spare >= NUMBER_LINES + 2:
        chosen = known.streams[part.chosen]
        lines.extend(detail_lines(frame, chosen, min(height - len(lines), NUMBER_LINES + HISTOGRAM_LINES)))
    return lines


def _with_lanes(frame: Frame, known: Snapshot, part: _Part, rows: Sequence[Line]) -> list[Line]:
    """Each row with the lane of its stream under it, then what the marks mean."""
    width = frame.size.width
    drawn = lanes(frame, part.streams, width - 4, known.interval_ns)
    lines: list[Line] = []
    for row, lane in zip(rows, drawn, strict=True):
        lines.extend([row, (("   ", ""), *lane)])
    return [*lines, _legend(frame)]


def _legend(frame: Frame) -> Line:
    return ((" ", ""), *legend(frame.size.width - 2, frame.glyphs, frame.span_ns))


def _maximized(frame: Frame, known: Snapshot, height: int) -> list[Line]:
    """Measured activity over the span, under it a lane per stream on the same time axis, then one in full."""
    width = frame.size.width
    plan = layout(width - 1, pids=known.pids > 1, lane_share=LANE_SHARE)
    cells = lane_cells(plan)
    top = _measured(frame, known, width - cells, height) if cells else [_device_line(frame, known)]
    key: list[Line] = [_legend(frame)] if cells else []
    room = height - len(top) - 1 - len(key)
    below = _selected(frame, known, height, room)
    part = _in_sight(frame, known, room - len(below))
    drawn = lanes(frame, part.streams, cells, known.interval_ns)
    rows = [*_rows(frame, part, plan, drawn), *part.folded]
    charts = _charts(frame, known, width - cells, room - len(rows) - len(below)) if cells else []
    return [*top, _head(frame, plan), *rows, *key, *charts, *below]


def _selected(frame: Frame, known: Snapshot, height: int, room: int) -> list[Line]:
    """The numbers of the selected stream, a blank line before them in a tall pane."""
    lines = _detail_height(frame.size.width, height, room - len(known.streams) - 1)
    if not lines:
        return []
    detail = detail_lines(frame, known.streams[_chosen(frame, known)], lines)
    return [(), *detail] if height >= FULL_DETAIL_LINES else detail


def _charts(frame: Frame, known: Snapshot, indent: int, room: int) -> list[Line]:
    """Waits and bubbles of the selected stream over time, where the lanes leave room for it."""
    height = min(room - 1, MAX_CHART_LINES)
    if height < MIN_CHART_LINES:
        return []
    stream = known.streams[_chosen(frame, known)]
    drawn = stream_charts(frame, stream, indent, height, known.interval_ns)
    return [(), *drawn] if drawn else []


def _measured(frame: Frame, known: Snapshot, indent: int, height: int) -> list[Line]:
    """The SM activity of each GPU over the lanes; where they do not all fit, their numbers in one line."""
    if not known.devices or len(known.devices) > min(MAX_DEVICE_LANES, height // 5):
        return [_device_line(frame, known)]
    note = _totals(frame, known, indent - MEASURED_CELLS)
    return device_lanes(frame, known.devices, indent, known.interval_ns, note)


def _chosen(frame: Frame, known: Snapshot) -> int:
    return min(max(frame.state.selected, 0), len(known.streams) - 1)


def _detail_height(width: int, height: int, spare: int) -> int:
    """Lines of the selected stream: in full in a tall pane, in short in a low one, more where lanes leave room."""
    full = HISTOGRAM_LINES if width >= BESIDE_CELLS else NUMBER_LINES + HISTOGRAM_LINES
    if height >= FULL_DETAIL_LINES:
        return full
    return max(BRIEF_LINES if height >= BRIEF_DETAIL_LINES else 0, min(spare, full))


def _foot(statuses: Sequence[Status], width: int) -> Line:
    """The reason that matters most and how many more there are: the collector's own trouble before its limits."""
    found = troubles(statuses)
    if not found:
        return ()
    first = min(found, key=lambda status: status.rank)
    line = trouble_line(
        first.text, first.remedy, len(found) - 1, width - 1, is_wrong=first.rank <= WRONG_RANK
    )
    return ((" ", ""), *line)
