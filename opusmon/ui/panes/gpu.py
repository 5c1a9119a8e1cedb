"""The gpu pane: HBM, bandwidth, SMs, power, NVLink and PCIe of every GPU, and the processes on them.

A few GPUs are drawn as blocks, many as a table; `detail` opens the selected one under the table, `maximized`
gives it the whole screen. What is missing says why at the foot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from opusmon.collectors import shows
from opusmon.ui.panes.base import Frame, first_shown
from opusmon.ui.panes.gpu_charts import FIELDS, GUTTER_CELLS, Drawing, drawing
from opusmon.ui.panes.gpu_deep import deep_note
from opusmon.ui.panes.gpu_detail import detail_lines
from opusmon.ui.panes.gpu_flags import flags_line, hbm_used_pct
from opusmon.ui.panes.gpu_process import SORTS, more_line, process_lines, read_processes
from opusmon.ui.panes.gpu_rows import MIN_BLOCK_CELLS, block, block_lines, number_lines, settle, stale_flag
from opusmon.ui.panes.gpu_state import Gpu, Reason, Snapshot, bandwidth_field, snapshot, statuses
from opusmon.ui.panes.gpu_table import BUSY_MARK, Column, history_cells, layout, table_head, table_row
from opusmon.ui.panes.statuses import trouble_line
from opusmon.ui.panes.waiting import WaitingPane
from opusmon.ui.text import Line, fit, fit_lines, join, line_cells, restyle, shorten
from opusmon.ui.units import duration, percent, span

BUSY_NOTE = f"{BUSY_MARK} share of time memory was busy, not bandwidth"
LATE_INTERVALS = 1.5
"""A newest row older than this many intervals is worth saying in the title."""
MAX_BLOCK_LINES = 14
"""Of the selected GPU under the table."""
MIN_PROCESS_LINES = 3
MIN_LISTED_LINES = 8
"""Lines the process table gets when it is asked for, if it fills them, before the GPUs get more than one line each."""


class GpuPane:
    """The pane itself; it keeps nothing between frames."""

    name: ClassVar[str] = "gpu"
    number: ClassVar[int] = 2
    channel: ClassVar[str] = "gpu"
    sorts: ClassVar[tuple[str, ...]] = SORTS

    def title(self, frame: Frame) -> str:
        """`2 gpu  NVML 1 s  history 5m`; the age of the newest row is added when rows fail to come.

        It stays the same from second to second, so that the frame's edge need not be drawn anew.
        """
        known = snapshot(frame)
        off = _off(known)
        if off is not None:
            return off.title(frame)
        head = f"{self.number} {self.name}  NVML"
        if known.age_ns is None:
            return f"{head} no sample"
        interval, history = _rounded(known.cadence_ns), f"history {span(frame.span_ns)}"
        if any(gpu.deep for gpu in known.gpus):
            history = f"deep CUPTI  {history}"
        if known.age_ns <= LATE_INTERVALS * max(known.interval_ns, known.cadence_ns):
            return f"{head} {interval}  {history}"
        return f"{head} {interval}  {'stale' if known.stale else 'age'} {known.age_ns / 1e9:.1f} s  {history}"

    def render(self, frame: Frame) -> list[Line]:
        """Exactly `size.height` lines of exactly `size.width` cells."""
        width, height = frame.size.width, frame.size.height
        if width <= 0 or height <= 0:
            return fit_lines((), width, height)
        known = snapshot(frame)
        off = _off(known)
        if off is not None:
            return off.render(frame)
        foot = _foot(frame, known)
        room = height - 1 if foot and height > 2 else height
        body = [settle(line, width) for line in _body(frame, known, room)[:room]]
        body.extend([settle((), width)] * (room - len(body)))
        return body if room == height else [*body, settle(foot, width)]

    def summary(self, frame: Frame) -> Line:
        """The worst GPU in one line: its flags first, then its bandwidth and memory."""
        width = frame.size.width
        known = snapshot(frame)
        off = _off(known)
        if off is not None:
            return off.summary(frame)
        head: Line = ((f"{self.number} {self.name}  ", "title"),)
        if not known.gpus:
            return fit((*head, (_nothing(known), "dim")), width)
        worst = max(known.gpus, key=_badness)
        return fit((*head, *_summary(worst, width - line_cells(head))), width)

    def items(self, frame: Frame) -> int:
        """GPUs and MIG instances; the processes while those are shown."""
        if frame.state.processes:
            return len(read_processes(frame))
        return len(snapshot(frame).gpus)


def _off(known: Snapshot) -> WaitingPane | None:
    """What stands in for the pane while there is no GPU to show and the collector as a whole says why."""
    if known.gpus:
        return None
    said = next((one for one in known.reasons if not (one.channel or one.field or one.scope)), None)
    return WaitingPane("gpu", 2, shows.GPU, said.text, said.remedy) if said is not None else None


def _rounded(interval_ns: int) -> str:
    """An interval as people write it: `1 s`, `250 ms`, `1.3 s`; what is within 5 % of a round number is that."""
    digits = f"{interval_ns:.1e}"
    scale = 10.0 ** int(digits[4:])
    near = min(
        (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0), key=lambda step: abs(step * scale - interval_ns)
    )
    exact = abs(near * scale - interval_ns) <= 0.05 * interval_ns
    return duration(near * scale if exact else float(digits))


def _nothing(known: Snapshot) -> str:
    return known.reasons[0].text if known.reasons else "no sample yet at this time"


def _badness(gpu: Gpu) -> tuple[int, float, float]:
    worst = 3 if gpu.gone else max((flag.severity for flag in gpu.flags), default=0)
    pressure = max((v for v in (gpu["hbm_bw_pct"], gpu["sm_util_pct"]) if not math.isnan(v)), default=-1.0)
    return worst, pressure, -gpu.gpu


def _summary(gpu: Gpu, width: int) -> Line:
    if gpu.gone:
        return ((f"!! {gpu.gone}", "bad"),)
    field = bandwidth_field(gpu)
    used = hbm_used_pct(gpu.row)
    numbers = join(
        [
            ((f"GPU {gpu.gpu}" + (f" gi {gpu.gi}" if gpu.is_mig else ""), "label"),),
            (("HBM ", "label"), (percent(used, 0), "value")),
            (("bw " if field == "hbm_bw_pct" else "mem busy ", "label"), (percent(gpu[field], 0), "value")),
            ()
            if math.isnan(gpu["sm_util_pct"])
            else (("SM ", "label"), (percent(gpu["sm_util_pct"], 0), "value")),
        ]
    )
    flags = flags_line([*stale_flag(gpu), *gpu.flags], max(width - line_cells(numbers) - 2, 0))
    line = join([numbers, flags])
    return restyle(line, "dim", frozenset({"warn", "bad"})) if gpu.stale else line


def _body(frame: Frame, known: Snapshot, height: int) -> list[Line]:
    if not known.gpus:
        return [((" no sample yet at this time", "dim"),)]
    chosen = min(max(frame.state.selected, 0), len(known.gpus) - 1)
    if frame.state.processes:
        return _with_processes(frame, known, height)
    if frame.state.maximized:
        numbers = Drawing(frame.glyphs, {}, chosen)
        return detail_lines(frame, known.gpus[chosen], height, known.interval_ns, numbers)
    width = frame.size.width
    fits = width >= MIN_BLOCK_CELLS and sum(_needs(known.gpus, width)) <= height
    if fits and not frame.state.detail:
        return _blocks(frame, known, height, chosen)
    return _table(frame, known, height, chosen)


def _needs(gpus: Sequence[Gpu], width: int, *, history: bool = True) -> list[int]:
    """Lines each entry needs in a list of blocks: a block for a device, one line for a MIG instance."""
    lines = block_lines if history else number_lines
    return [1 if gpu.is_mig else lines(gpu, width) for gpu in gpus]


def _blocks(frame: Frame, known: Snapshot, height: int, chosen: int) -> list[Line]:
    """Blocks one under another; what is left goes to the processes, but at most half of it, and to the histories."""
    needed = _needs(known.gpus, frame.size.width)
    spare = height - sum(needed)
    processes = read_processes(frame)
    listed = min(len(processes) + 1, max(spare // 2, MIN_PROCESS_LINES)) if processes else 0
    listed = listed if spare >= listed else 0
    devices = sum(not (gpu.is_mig or gpu.gone) for gpu in known.gpus)
    taller = (spare - listed) // max(devices, 1)
    heights = [
        least if gpu.is_mig or gpu.gone else least + taller
        for gpu, least in zip(known.gpus, needed, strict=True)
    ]
    drawn = drawing(frame, known, GUTTER_CELLS, chosen, FIELDS)
    lines = _stacked(frame, known, heights, drawn)
    lines.extend([()] * min(height - len(lines) - listed, 1))
    lines.extend(process_lines(frame, listed, processes, selectable=False))
    return lines


def _stacked(frame: Frame, known: Snapshot, heights: Sequence[int], drawn: Drawing) -> list[Line]:
    """A block for every device, a table row for every MIG instance."""
    instances = [gpu for gpu in known.gpus if gpu.is_mig]
    plan = _plan(frame, known.gpus) if instances else []
    drawn = drawn.with_sparks(instances, history_cells(plan))
    lines: list[Line] = []
    for place, (gpu, tall) in enumerate(zip(known.gpus, heights, strict=True)):
        marked = place == drawn.selected and len(known.gpus) > 1
        if gpu.is_mig:
            lines.append(table_row(gpu, plan, drawn, selected=marked))
        else:
            lines.extend(block(gpu, frame.size.width, tall, drawn, selected=marked))
    return lines


def _plan(frame: Frame, gpus: Sequence[Gpu]) -> list[tuple[Column, int]]:
    names = len({gpu.name for gpu in gpus if not gpu.is_mig}) > 1
    flagged = any(gpu.flags or gpu.stale for gpu in gpus)
    return layout(frame.size.width - 1, names=names, mig=any(gpu.is_mig for gpu in gpus), flagged=flagged)


def _table(frame: Frame, known: Snapshot, height: int, chosen: int) -> list[Line]:
    """One line each; under them the processes, and the selected one in full where that leaves room for it."""
    gpu, width = known.gpus[chosen], frame.size.width
    wanted = block_lines(gpu, width)
    kept = wanted if frame.state.detail else 0
    if kept and height - kept < MIN_PROCESS_LINES:
        return block(gpu, width, height, drawing(frame, known, GUTTER_CELLS, chosen, FIELDS), selected=True)
    rows = min(len(known.gpus) + 1, height - kept)
    spare = height - rows - kept
    processes = read_processes(frame) if spare >= MIN_PROCESS_LINES else []
    listed = min(spare, len(processes) + 1) if processes else 0
    room = min(height - rows - listed, MAX_BLOCK_LINES)
    is_open = kept or (room >= wanted and width >= MIN_BLOCK_CELLS and rows > len(known.gpus))
    lines = _rows(frame, known, rows, chosen)
    if is_open:
        lines.extend(
            block(gpu, width, room, drawing(frame, known, GUTTER_CELLS, chosen, FIELDS), selected=True)
        )
    lines.extend([()] * min(height - len(lines) - listed, 1))
    lines.extend(process_lines(frame, listed, processes, selectable=False))
    return lines


def _rows(frame: Frame, known: Snapshot, height: int, chosen: int) -> list[Line]:
    """The table of GPUs in at most `height` lines, scrolled so that the selected one is in sight."""
    gpus = known.gpus
    plan = _plan(frame, gpus)
    room = max(height - 1, 1)
    shown = room - 1 if len(gpus) > room > 1 else room
    first = first_shown(chosen, frame.state.scroll, len(gpus), shown)
    part = gpus[first : first + shown]
    drawn = _with_sparks(frame, known, part, plan)
    rows = [table_row(gpu, plan, drawn, selected=place == chosen) for place, gpu in enumerate(part, first)]
    head = [table_head(plan)] if height > 1 else []
    folded = len(gpus) - len(part)
    if not folded or room <= 1:
        return [*head, *rows]
    hidden = (*gpus[:first], *gpus[first + shown :])
    return [*head, *rows, _folded_line(hidden, first, frame.size.width)]


def _folded_line(hidden: Sequence[Gpu], above: int, width: int) -> Line:
    """How many GPUs are out of sight, and what is wrong with the worst of them."""
    line = more_line(above, len(hidden) - above)
    worst = max(hidden, key=_badness)
    if worst.gone:
        return (*line, (f"   !! {worst.gone}", "bad"))
    if not worst.flags:
        return line
    line = (*line, (f"   GPU {worst.gpu} ", "label"))
    return (*line, *flags_line(worst.flags, width - line_cells(line)))


def _with_sparks(
    frame: Frame, known: Snapshot, gpus: Sequence[Gpu], plan: Sequence[tuple[Column, int]]
) -> Drawing:
    """What table rows are drawn with: as much history as their column has room for."""
    cells = history_cells(plan)
    return drawing(frame, known, frame.size.width - cells, -1).with_sparks(gpus, cells)


def _with_processes(frame: Frame, known: Snapshot, height: int) -> list[Line]:
    """The GPUs by their numbers, as one line each where there is less room, then every process."""
    width = frame.size.width
    needed = _needs(known.gpus, width, history=False)
    processes = read_processes(frame)
    listed = min(len(processes) + 1, MIN_LISTED_LINES)
    if width >= MIN_BLOCK_CELLS and sum(needed) + listed <= height:
        lines = _stacked(frame, known, needed, Drawing(frame.glyphs, {}))
    else:
        unselected = replace(frame, state=replace(frame.state, selected=0, scroll=0))
        room = min(len(known.gpus) + 1, height // 2)
        lines = _rows(unselected, known, room, -1) if height > 4 else []
    lines.extend(process_lines(frame, height - len(lines), processes, selectable=True))
    return lines


def _foot(frame: Frame, known: Snapshot) -> Line:
    """The reason that matters most, how many more there are, and what NVML cannot say at all."""
    reasons = [reason for reason in known.reasons if reason.text]
    parts: list[Line] = []
    width = frame.size.width - 1
    if reasons:
        parts.append(_reason(reasons[0], len(reasons) - 1, width))
    if len(known.gpus) > 1 and any(bandwidth_field(gpu) == "mem_busy_pct" for gpu in known.gpus):
        parts.append(((BUSY_NOTE, "dim"),))
    if not any(gpu.deep for gpu in known.gpus):
        parts.append(deep_note(statuses(frame), short=bool(parts)))
    line = shorten(join(parts, "   "), width)
    return ((" ", ""), *line) if line else ()


def _reason(reason: Reason, others: int, width: int) -> Line:
    where = " ".join(word for word in (reason.scope, reason.field) if word)
    words = f"{where}: {reason.text}" if where else reason.text
    wrong = reason.rank <= 2  # error, unavailable or restarting: something broke; the others are limits
    return trouble_line(words, reason.remedy, others, width, is_wrong=wrong)
