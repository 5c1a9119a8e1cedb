"""The processes on the GPUs, as a table that can be sorted and filtered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from opusmon.clock import NS
from opusmon.ui import units
from opusmon.ui.panes.base import Frame, first_shown
from opusmon.ui.panes.gpu_state import LOOKBACK_NS, records
from opusmon.ui.panes.memo import FrameMemo
from opusmon.ui.text import Align, Line, clean, columns, fit

SORTS = ("mem", "sm", "pid", "name", "user", "gpu")
_SAME_SCAN_NS = NS
"""Rows this much older than the newest of their GPU are from an earlier scan: the process has ended."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process on a GPU at the playhead; `mem_b` in bytes, `sm_pct` in per cent, NaN where missing."""

    gpu: int
    gi: int
    pid: int
    name: str
    user: str
    mem_b: float
    sm_pct: float


def _largest_first(value: float) -> float:
    return math.inf if math.isnan(value) else -value


_KEYS: dict[str, Callable[[Process], tuple[float | str, ...]]] = {
    "mem": lambda process: (_largest_first(process.mem_b), process.gpu, process.pid),
    "sm": lambda process: (_largest_first(process.sm_pct), process.gpu, process.pid),
    "pid": lambda process: (process.pid, process.gpu),
    "name": lambda process: (process.name.lower(), process.gpu, process.pid),
    "user": lambda process: (process.user.lower(), process.gpu, process.pid),
    "gpu": lambda process: (process.gpu, process.gi, _largest_first(process.mem_b), process.pid),
}


def _read_processes(frame: Frame) -> list[Process]:
    """The processes at the playhead that pass the filter, in the order chosen."""
    rows = records(frame.view.latest("gpu_process", frame.t, LOOKBACK_NS))
    newest: dict[float, float] = {}
    for row in rows:
        newest[row["gpu"]] = max(newest.get(row["gpu"], 0), row["t"])
    text = frame.view.strings.text
    found = [
        Process(
            gpu=int(row["gpu"]),
            gi=int(row.get("gi", -1)),
            pid=int(row["pid"]),
            name=clean(text(int(row.get("name", 0)))),
            user=clean(text(int(row.get("user", 0)))),
            mem_b=row.get("mem_b", math.nan),
            sm_pct=row.get("sm_pct", math.nan),
        )
        for row in rows
        if row["t"] > newest[row["gpu"]] - _SAME_SCAN_NS
    ]
    wanted = frame.state.filter.lower()
    if wanted:
        found = [item for item in found if wanted in f"{item.pid} {item.user} {item.name}".lower()]
    return sorted(found, key=_KEYS.get(frame.state.sort, _KEYS["mem"]))


read_processes = FrameMemo(_read_processes)
"""The processes at the playhead, read once per frame."""


def process_lines(frame: Frame, height: int, processes: list[Process], *, selectable: bool) -> Iterator[Line]:
    """The table, heading first: as many processes as fit, then how many more there are.

    Args:
        frame: what and how.
        height: lines, heading included.
        processes: from `read_processes`.
        selectable: the selection moves in this table.
    """
    room = height - 1
    if room < 1:
        return
    yield _heading(frame)
    if not processes:
        words = (
            f'no process matches "{clean(frame.state.filter)}"'
            if frame.state.filter
            else "no process on a GPU"
        )
        yield ((f" {words}", "dim"),)
        return
    folded = len(processes) > room
    shown = room - 1 if folded and room > 1 else room
    first = first_shown(frame.state.selected, frame.state.scroll, len(processes), shown) if selectable else 0
    chosen = min(frame.state.selected, len(processes) - 1) if selectable else -1
    for place, process in enumerate(processes[first : first + shown], first):
        yield _row(process, frame.size.width, frame.glyphs.select if place == chosen else "")
    if folded and room > 1:
        yield more_line(first, len(processes) - first - shown)


def more_line(above: int, below: int) -> Line:
    """`+3 above  +12 more`: what scrolled out of sight."""
    words = [f"+{count} {where}" for count, where in ((above, "above"), (below, "more")) if count > 0]
    return ((f" {'  '.join(words)}", "dim"),)


def _heading(frame: Frame) -> Line:
    sort = frame.state.sort if frame.state.sort in SORTS else SORTS[0]
    titles = (("pid", ">"), ("user", "<"), ("gpu", "<"), ("mem", ">"), ("sm", ">"), ("name", "<"))
    cells = [
        (_title(title, sort), width, align)
        for (title, align), width in zip(titles, _widths(frame.size.width), strict=True)
    ]
    note = f"filter: {clean(frame.state.filter)}" if frame.state.filter else ""
    line = ((" ", ""), *columns([(spans, width, _as_align(align)) for spans, width, align in cells]))
    return (*line, (note, "accent")) if note else line


def _as_align(align: str) -> Align:
    return ">" if align == ">" else "<"


def _title(title: str, sort: str) -> Line:
    words = {"mem": "GiB", "sm": "SM%", "name": "PROCESS"}.get(title, title.upper())
    return ((f"{words}*", "accent"),) if title == sort else ((words, "label"),)


def _widths(width: int) -> tuple[int, ...]:
    """Cells of pid, user, gpu, memory, SM share and name."""
    room = width - 1
    fixed = (8, 8 if room < 100 else 12, 5, 7, 4)
    return (*fixed, max(room - sum(fixed) - len(fixed), 8))


@lru_cache(maxsize=512)
def _row(process: Process, width: int, mark: str) -> Line:
    """A process in one line: drawn once, as its numbers change every five seconds only."""
    widths = _widths(width)
    where = str(process.gpu) if process.gi < 0 else f"{process.gpu}/{process.gi}"
    name: Line = ((process.name, ""),) if process.name else (("(not visible from here)", "dim"),)
    cells: list[tuple[Line, int, Align]] = [
        (((str(process.pid), "value"),), widths[0], ">"),
        (((process.user or "?", "label"),), widths[1], "<"),
        (((where, "title"),), widths[2], "<"),
        (((units.gib(process.mem_b, widths[3]), _style(process.mem_b)),), widths[3], ">"),
        (((units.number(process.sm_pct, widths[4]), _style(process.sm_pct)),), widths[4], ">"),
        (fit(name, widths[5]), widths[5], "<"),
    ]
    return ((mark or " ", "select" if mark else ""), *columns(cells))


def _style(value: float) -> str:
    return "dim" if math.isnan(value) else "value"
