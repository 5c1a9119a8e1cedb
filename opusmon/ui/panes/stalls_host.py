"""The host in one line: half of all stalls are its. Worst first, with "!" where a figure is over its threshold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from opusmon.channels import CGROUP, HOST, PROCESS
from opusmon.clock import NS
from opusmon.schema import Channel, Rows, conform
from opusmon.triage.severity import HOST_LIMITS, host_severity
from opusmon.ui import units
from opusmon.ui.panes.base import View
from opusmon.ui.panes.stalls_words import MARKS
from opusmon.ui.panes.statuses import read_statuses, whole
from opusmon.ui.text import Line, clean, fill, line_cells

COLLECTOR = "host"
LOOKBACK_NS = 10 * NS
"""Figures older than this are not shown."""
NO_FIGURES = "no figures"
_NOT_RECORDED = "this session has none at this time"
_NAME_CELLS = 18


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of the host.

    Attributes:
        name: a key of `HOST_LIMITS`.
        value: in the unit of the name; finite.
        label: what it is called.
        words: the value with its unit.
        whose: the group or process it is of, "" for the host.
    """

    name: str
    value: float
    label: str
    words: str
    whose: str = ""

    @property
    def level(self) -> int:
        """Its severity."""
        return host_severity(self.name, self.value)

    @property
    def excess(self) -> float:
        """How many times the first threshold it is."""
        return self.value / HOST_LIMITS[self.name].warn


def host_line(view: View, t: int, width: int) -> Line:
    """What the host had at `t` in at most `width` cells; where nothing is known the reason."""
    figures = read_figures(view, t)
    head: Line = ((" host ", "label"),)
    if not figures:
        return ((" host: ", "label"), (_why_none(view, t), "dim"))
    parts = [_part(figure) for figure in worst_first(figures)]
    return (*head, *fill(parts, width - line_cells(head)))


def has_figures(view: View, t: int) -> bool:
    """There is something to say about the host at `t`."""
    return len(view.latest(HOST.name, t, LOOKBACK_NS)) > 0


def _why_none(view: View, t: int) -> str:
    said = whole(read_statuses(view, t, COLLECTOR))
    if said is None or said.is_ok:
        return f"{NO_FIGURES}: {_NOT_RECORDED}"
    return f"{NO_FIGURES}: {said.why}" + (f" ({said.remedy})" if said.remedy else "")


def worst_first(figures: list[Figure]) -> list[Figure]:
    """Those over a threshold by severity and by how far they are over it, then the others in their own order."""
    over = [figure for figure in figures if figure.level]
    rest = [figure for figure in figures if not figure.level]
    return [*sorted(over, key=lambda figure: (-figure.level, -figure.excess)), *rest]


def _part(figure: Figure) -> Line:
    mark, style = MARKS[figure.level]
    whose = f" {figure.whose}" if figure.whose and figure.level else ""
    value = f"{figure.words} {mark}" if figure.level else figure.words
    return ((f"{figure.label} ", "label"), (value, style if figure.level else "value"), (whose, "label"))


# -- reading -----------------------------------------------------------------------------------------------------


def read_figures(view: View, t: int) -> list[Figure]:
    """The figures known at `t`, in the order they are shown in while nothing is wrong."""
    found = [*_host_figures(view, t), *_cgroup_figures(view, t), *_process_figures(view, t)]
    return [figure for figure in found if math.isfinite(figure.value)]


def _latest(view: View, channel: Channel, t: int) -> Rows:
    if channel.name not in view.channels:
        return np.empty(0, dtype=channel.dtype)
    return conform(view.latest(channel.name, t, LOOKBACK_NS), channel)


def _percent(name: str, value: float, label: str, whose: str = "") -> Figure:
    digits = 1 if 0 < value < 9.95 else 0
    return Figure(name, value, label, f"{units.number(value, 0, digits)} %", whose)


def _host_figures(view: View, t: int) -> Iterator[Figure]:
    rows = _latest(view, HOST, t)
    if not len(rows):
        return
    row = rows[-1]
    cpus, runnable = float(row["cpus"]), float(row["runnable"])
    per_cpu = runnable / cpus if cpus > 0 else math.nan
    on = f" on {units.number(cpus, 0)} CPU{'s' if cpus != 1 else ''}"
    yield Figure("run_queue_per_cpu", per_cpu, "run queue", f"{units.number(runnable, 0)}{on}")
    for what, label in (("cpu", "PSI cpu"), ("memory", "PSI mem"), ("io", "PSI io")):
        name = f"psi_{what}_some_pct"
        yield _percent(name, float(row[name]), label)
    swapped = float(row["swap_in_bps"]) + float(row["swap_out_bps"])
    yield Figure("swap_bps", swapped, "swap", units.rate(swapped))
    yield _percent("cpu_iowait_pct", float(row["cpu_iowait_pct"]), "iowait")
    yield _percent("cpu_steal_pct", float(row["cpu_steal_pct"]), "steal")


def _cgroup_figures(view: View, t: int) -> Iterator[Figure]:
    """The worst group for each figure."""
    rows = _latest(view, CGROUP, t)
    if not len(rows):
        return
    full_pct = 100 * rows["mem_used_b"] / np.where(rows["mem_limit_b"] > 0, rows["mem_limit_b"], np.nan)
    for name, label, values in (
        ("throttled_pct", "throttled", rows["throttled_pct"]),
        ("cgroup_mem_pct", "cgroup mem", full_pct),
    ):
        place = _largest(values.astype(np.float64))
        if place is not None:
            whose = _tail(clean(view.strings.text(rows["cgroup"][place])))
            yield _percent(name, float(values[place]), label, whose)


def _process_figures(view: View, t: int) -> Iterator[Figure]:
    """The process whose main thread waited longest for a CPU."""
    rows = _latest(view, PROCESS, t)
    place = _largest(rows["run_delay_pct"].astype(np.float64))
    if place is not None:
        whose = clean(view.strings.text(rows["name"][place]), _NAME_CELLS)
        yield _percent("run_delay_pct", float(rows["run_delay_pct"][place]), "run delay", whose)


def _largest(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> int | None:
    known = np.flatnonzero(~np.isnan(values))
    return int(known[np.argmax(values[known])]) if len(known) else None


def _tail(path: str) -> str:
    """The end of a path of a control group: what tells it from others."""
    name = path.rstrip("/").rpartition("/")[2] or path
    return name if len(name) <= _NAME_CELLS else f"~{name[-_NAME_CELLS + 1 :]}"
