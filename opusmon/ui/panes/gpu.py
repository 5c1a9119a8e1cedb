"""The gpu pane: HBM, bandwidth, SMs, power, NVLink and PCIe of every GPU, and the processes on them.

A few GPUs are drawn as blocks, many as a table; `detail` opens the selected one under the table, `maximized`
gives it the whole screen. What is missing says why at the foot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from opusmon.channels import GPU
from opusmon.ui.panes.base import Frame, first_shown
from opusmon.ui.panes.gpu_detail import detail_lines
from opusmon.ui.panes.gpu_flags import flags_line, hbm_used_pct
from opusmon.ui.panes.gpu_process import SORTS, more_line, process_lines, read_processes
from opusmon.ui.panes.gpu_rows import LEFT_CELLS, Drawing, bandwidth_field, block, block_lines, stale_flag
from opusmon.ui.panes.gpu_state import Gpu, Reason, Snapshot, count_gpus, read_age, snapshot
from opusmon.ui.panes.gpu_table import BUSY_MARK, Column, layout, table_head, table_row
from opusmon.ui.panes.history import Floats, histories
from opusmon.ui.text import Line, fit, fit_lines, join, line_cells, restyle
from opusmon.ui.units import duration, percent, span

BUSY_NOTE = f"{BUSY_MARK} share of time memory was busy, not bandwidth"
L2_NOTE = "L2: not reported by NVML"
MIN_BLOCK_CELLS = LEFT_CELLS + 2
MAX_BLOCK_LINES = 14
"""A taller history says nothing more."""
MIN_PROCESS_LINES = 3


class GpuPane:
    """The pane itself; it keeps nothing between frames."""

    name: ClassVar[str] = "gpu"
    number: ClassVar[int] = 2
    channel: ClassVar[str] = "gpu"
    sorts: ClassVar[tuple[str, ...]] = SORTS

    def title(self, frame: Frame) -> str:
        """`2 gpu  NVML 1 s  age 0.4 s`; the age turns into "stale" when rows fail to come."""
        head = f"{self.number} {self.name}"
        age = read_age(frame)
        if age is None:
            return f"{head}  NVML no sample"
        word = "stale" if age.stale else "age"
        return f"{head}  NVML {duration(age.interval_ns)}  {word} {age.age_ns / 1e9:.1f} s"

    def render(self, frame: Frame) -> list[Line]:
        """Exactly `size.height` lines of exactly `size.width` cells."""
        width, height = frame.size.width, frame.size.height
        if width <= 0 or height <= 0:
            return fit_lines((), width, height)
        known = snapshot(frame)
        foot = _foot(frame, known)
        room = height - 1 if foot and height > 2 else height
        body = fit_lines(_body(frame, known, room), width, room)
        return body if room == height else [*body, fit(foot, width)]

    def summary(self, frame: Frame) -> Line:
        """The worst GPU in one line: its flags first, then its bandwidth and memory."""
        width = frame.size.width
        known = snapshot(frame)
        head: Line = ((f"{self.number} {self.name}  ", "title"),)
        if not known.gpus:
            return fit((*head, (_nothing(known), "dim")), width)
        worst = max(known.gpus, key=_badness)
        return fit((*head, *_summary(worst, width - line_cells(head))), width)

    def items(self, frame: Frame) -> int:
        """GPUs and MIG instances; the processes while those are shown."""
        if frame.state.processes:
            return len(read_processes(frame))
        return count_gpus(frame)


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
        gpu = known.gpus[chosen]
        drawing = _drawing(frame, known, LEFT_CELLS, chosen)
        return detail_lines(frame, gpu, height, known.interval_ns, drawing)
    needed = _block_needs(known.gpus)
    fits = frame.size.width >= MIN_BLOCK_CELLS and sum(needed) <= height
    if fits and not frame.state.detail:
        return _blocks(frame, known, height, chosen)
    return _table(frame, known, height, chosen)


def _block_needs(gpus: Sequence[Gpu]) -> list[int]:
    """Lines each entry needs in a list of blocks: a block for a device, one line for a MIG instance."""
    return [1 if gpu.is_mig else block_lines(gpu) for gpu in gpus]


def _drawing(frame: Frame, known: Snapshot, taken: int, selected: int) -> Drawing:
    """Histories for as many columns as are left beside `taken` cells of numbers."""
    fields = sorted({bandwidth_field(gpu) for gpu in known.gpus if gpu.row})
    columns = max(frame.size.width - taken - 3, 0) * frame.glyphs.columns_per_cell
    found = histories(frame, "gpu", fields, GPU.key, columns, known.interval_ns)
    chosen: dict[tuple[int, int], Floats] = {}
    for gpu in known.gpus:
        series = found.get((gpu.gpu, gpu.gi), {})
        if bandwidth_field(gpu) in series:
            chosen[gpu.gpu, gpu.gi] = series[bandwidth_field(gpu)]
    return Drawing(frame.glyphs, chosen, span(frame.span_ns), selected)


def _blocks(frame: Frame, known: Snapshot, height: int, chosen: int) -> list[Line]:
    """Blocks one under another; what is left goes to the processes, then to taller histories."""
    gpus = known.gpus
    needed = _block_needs(gpus)
    spare = height - sum(needed)
    processes = read_processes(frame)
    listed = min(len(processes) + 1, spare) if processes and spare >= MIN_PROCESS_LINES else 0
    spare -= listed
    devices = sum(not gpu.is_mig for gpu in gpus)
    taller = min(spare // max(devices, 1), MAX_BLOCK_LINES - 6)
    drawing = _drawing(frame, known, LEFT_CELLS, chosen)
    plan = _plan(frame, gpus)
    lines: list[Line] = []
    for place, (gpu, least) in enumerate(zip(gpus, needed, strict=True)):
        marked = place == chosen and len(gpus) > 1
        if gpu.is_mig:
            lines.append(table_row(gpu, plan, drawing, selected=marked))
        else:
            tall = least if gpu.gone else least + taller
            lines.extend(block(gpu, frame.size.width, tall, drawing, selected=marked))
    if listed:
        lines.extend([()] * min(height - len(lines) - listed, 1))
        lines.extend(process_lines(frame, listed, processes, selectable=False))
    return lines


def _plan(frame: Frame, gpus: Sequence[Gpu]) -> list[tuple[Column, int]]:
    names = len({gpu.name for gpu in gpus if not gpu.is_mig}) > 1
    return layout(frame.size.width - 1, names=names, mig=any(gpu.is_mig for gpu in gpus))


def _table(frame: Frame, known: Snapshot, height: int, chosen: int) -> list[Line]:
    """One line each; under them the selected one in full, or the processes, as there is room."""
    gpus = known.gpus
    below = block_lines(gpus[chosen]) if frame.state.detail else 0
    if below and height - below < MIN_PROCESS_LINES:
        return block(
            gpus[chosen], frame.size.width, height, _drawing(frame, known, LEFT_CELLS, chosen), selected=True
        )
    drawing = _drawing(frame, known, 0, chosen)
    lines = _rows(frame, known, height - below, drawing)
    spare = height - len(lines)
    processes = read_processes(frame) if not below and spare >= MIN_PROCESS_LINES else []
    if below or (not processes and spare >= block_lines(gpus[chosen]) and len(lines) > len(gpus)):
        full = block(gpus[chosen], frame.size.width, min(spare, MAX_BLOCK_LINES), drawing, selected=True)
        return [*lines, *full]
    if processes:
        room = min(spare, len(processes) + 1)
        lines.extend([()] * min(spare - room, 1))
        lines.extend(process_lines(frame, room, processes, selectable=False))
    return lines


def _rows(frame: Frame, known: Snapshot, height: int, drawing: Drawing) -> list[Line]:
    """The table of GPUs in at most `height` lines, scrolled so that the selected one is in sight."""
    gpus = known.gpus
    plan = _plan(frame, gpus)
    room = max(height - 1, 1)
    shown = room - 1 if len(gpus) > room > 1 else room
    first = first_shown(drawing.selected, frame.state.scroll, len(gpus), shown)
    part = gpus[first : first + shown]
    rows = [
        table_row(gpu, plan, drawing, selected=place == drawing.selected)
        for place, gpu in enumerate(part, first)
    ]
    head = [table_head(plan)] if height > 1 else []
    folded = len(gpus) - len(part)
    return [*head, *rows, *([more_line(first, folded - first)] if folded and room > 1 else [])]


def _with_processes(frame: Frame, known: Snapshot, height: int) -> list[Line]:
    """The GPUs in at most half of the lines, then every process."""
    unselected = replace(frame, state=replace(frame.state, selected=0, scroll=0))
    lines = _rows(unselected, known, min(len(known.gpus) + 1, height // 2), _drawing(frame, known, 0, -1))
    lines = lines if height > 4 else []
    lines.extend(process_lines(frame, height - len(lines), read_processes(frame), selectable=True))
    return lines


def _foot(frame: Frame, known: Snapshot) -> Line:
    """The reason that matters most, how many more there are, and what NVML cannot say at all."""
    distinct = list({reason.text: reason for reason in known.reasons if reason.text}.values())
    parts: list[Line] = []
    if distinct:
        parts.append(_reason(distinct[0], len(distinct) - 1))
    if len(known.gpus) > 1 and any(bandwidth_field(gpu) == "mem_busy_pct" for gpu in known.gpus):
        parts.append(((BUSY_NOTE, "dim"),))
    if "l2" not in frame.view.channels:
        parts.append(((L2_NOTE, "dim"),))
    line = join(parts, "   ")
    return ((" ", ""), *line) if line else ()


def _reason(reason: Reason, others: int) -> Line:
    wrong = reason.rank <= 2  # error, unavailable or restarting: something broke; the others are limits
    where = " ".join(word for word in (reason.scope, reason.field) if word)
    words = f"{where}: {reason.text}" if where else reason.text
    line: Line = ((f"! {words}" if wrong else words, "warn" if wrong else "dim"),)
    if reason.remedy:
        line = (*line, (f" ({reason.remedy})", "key" if wrong else "dim"))
    return (*line, (f"  +{others} more", "dim")) if others else line
