"""One GPU with the whole screen: the history of every field, and its links as a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from opusmon.channels import GPU, L2
from opusmon.ui import units
from opusmon.ui.panes.base import Frame
from opusmon.ui.panes.gpu_charts import Drawing
from opusmon.ui.panes.gpu_flags import HBM_BW_HIGH_PCT, MEM_TEMP_HIGH_C, TEMP_HIGH_C
from opusmon.ui.panes.gpu_links import LINK_SPEED_BPS, links_matrix
from opusmon.ui.panes.gpu_process import process_lines, read_processes
from opusmon.ui.panes.gpu_rows import block, number_lines
from opusmon.ui.panes.gpu_state import Gpu
from opusmon.ui.panes.history import Floats, histories
from opusmon.ui.text import Line, fit, spread
from opusmon.ui.widgets.chart import chart

MIN_PANEL_CELLS = 38
MIN_PANEL_LINES = 3
MIN_ROOM_LINES = 8
"""With less under the numbers there is no room for processes."""
MAX_PANEL_LINES = 9
_GAP = 2

PCIE_BPS = 63.0e9
"""PCIe 5.0 x16 in one direction, as an H200 has it; a faster link is drawn at the edge."""
POWER_MW = 700e3
CLOCK_MHZ = 1980.0
LINKS = 18
"""Scales used only where the device does not say: an H200's."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One history.

    Attributes:
        title: of the field.
        field: of the channel.
        top: value at the upper edge, given the GPU.
        show: a value in words, with its unit.
        alarm: values from here on stand out, given the GPU's `top`.
        style: of the marks.
        channel: it is a field of.
    """

    title: str
    field: str
    top: Callable[[Gpu], float]
    show: Callable[[float], str]
    alarm: float = math.inf
    style: str = "series0"
    channel: str = "gpu"


def _top(value: float) -> Callable[[Gpu], float]:
    return lambda _: value


def _device(field: str, scale: float, otherwise: float) -> Callable[[Gpu], float]:
    def top(gpu: Gpu) -> float:
        value = gpu.device.get(field, math.nan) * scale
        return value if value > 0 else otherwise

    return top


def _nvlink_top(gpu: Gpu) -> float:
    return sum(gpu.links.speed_bps) or LINKS * LINK_SPEED_BPS


def _hbm_top(gpu: Gpu) -> float:
    """The theoretical bandwidth: memory clock x 2 x bus width; 4.8 TB/s where the device does not say."""
    peak = gpu["mem_clock_mhz"] * 2e6 * gpu.device.get("bus_width_bits", math.nan) / 8
    return peak if peak > 0 else 4.8e12


def _memory_top(gpu: Gpu) -> float:
    total = gpu["mem_total_b"]
    return total if total > 0 else math.inf


def _percent(value: float) -> str:
    return units.percent(value, 0)


def _watts(value: float) -> str:
    return units.watts(value, 0)


def _celsius(value: float) -> str:
    return units.celsius(value, 0)


def _megahertz(value: float) -> str:
    return units.megahertz(value, 0)


PANELS: tuple[Panel, ...] = (
    Panel("HBM bandwidth", "hbm_bw_pct", _top(100.0), _percent, HBM_BW_HIGH_PCT),
    Panel("L2 hit rate", "l2_hit_pct", _top(100.0), _percent, channel="l2"),
    Panel("L2 lookups hit", "l2_lookup_hit_pct", _top(100.0), _percent, channel="l2"),
    Panel("HBM read", "hbm_read_bps", _hbm_top, units.rate, channel="l2"),
    Panel("HBM write", "hbm_write_bps", _hbm_top, units.rate, channel="l2"),
    Panel("HBM used", "mem_used_b", _memory_top, units.size, math.inf, "series4"),
    Panel("SM utilisation", "sm_util_pct", _top(100.0), _percent),
    Panel("SM occupancy", "sm_occupancy_pct", _top(100.0), _percent),
    Panel("tensor pipes", "tensor_pct", _top(100.0), _percent),
    Panel("power", "power_mw", _device("power_limit_mw", 1.0, POWER_MW), _watts, math.inf, "series4"),
    Panel("temperature", "temp_c", _top(110.0), _celsius, TEMP_HIGH_C, "series4"),
    Panel("HBM temperature", "mem_temp_c", _top(110.0), _celsius, MEM_TEMP_HIGH_C, "series4"),
    Panel("SM clock", "sm_clock_mhz", _device("max_sm_clock_mhz", 1.0, CLOCK_MHZ), _megahertz),
    Panel("NVLink tx", "nvlink_tx_bps", _nvlink_top, units.rate, math.inf, "series2"),
    Panel("NVLink rx", "nvlink_rx_bps", _nvlink_top, units.rate, math.inf, "series2"),
    Panel("PCIe tx", "pcie_tx_bps", _top(PCIE_BPS), units.rate, math.inf, "series2"),
    Panel("PCIe rx", "pcie_rx_bps", _top(PCIE_BPS), units.rate, math.inf, "series2"),
    Panel("memory busy", "mem_busy_pct", _top(100.0), _percent),
    Panel("GPU busy", "gpu_busy_pct", _top(100.0), _percent),
)


def detail_lines(frame: Frame, gpu: Gpu, height: int, interval_ns: int, drawn: Drawing) -> list[Line]:
    """The numbers of a GPU, its histories, its links, its processes; what does not fit is left out.

    Args:
        frame: what, when and how wide.
        gpu: the selected one.
        height: lines there are.
        interval_ns: between rows.
        drawn: for the numbers.
    """
    width = frame.size.width
    if gpu.gone:
        return block(gpu, width, 1, drawn, selected=True)
    head = block(gpu, width, min(number_lines(gpu, width), height), drawn, selected=True)
    room = height - len(head)
    below = _processes(frame, gpu, room)
    room -= len(below)
    matrix = list(links_matrix(gpu.links, width, frame.glyphs)) if len(gpu.links) else []
    said = any(gpu.links.down) or any(gpu.links.grown)  # else the strips above say enough in a small pane
    if room - len(matrix) < (MIN_PANEL_LINES if said else 2 * len(matrix)):
        matrix = []
    panels = _panels(frame, gpu, room - len(matrix), interval_ns)
    blank: list[Line] = [()] if below and room - len(matrix) - len(panels) > 0 else []
    return [*head, *panels, *matrix, *blank, *below]


def _processes(frame: Frame, gpu: Gpu, room: int) -> list[Line]:
    """The processes of a GPU in at most a quarter of the room, but at least a heading and one of them."""
    found = [
        process
        for process in read_processes(frame)
        if process.gpu == gpu.gpu and (not gpu.is_mig or process.gi == gpu.gi)
    ]
    if not found or room < MIN_ROOM_LINES:
        return []
    return list(process_lines(frame, min(len(found) + 1, max(room // 4, 2)), found, selectable=False))


def _panels(frame: Frame, gpu: Gpu, height: int, interval_ns: int) -> list[Line]:
    width = frame.size.width
    across = max(1, min(4, (width + _GAP) // (MIN_PANEL_CELLS + _GAP)))
    cells = (width - _GAP * (across - 1)) // across
    columns = cells * frame.glyphs.columns_per_cell
    found = _found(frame, gpu, columns, interval_ns)
    measured = [
        panel for panel in PANELS if panel.field in found and (found[panel.field] == found[panel.field]).any()
    ]
    rows = min(-(-len(measured) // across), height // MIN_PANEL_LINES)
    if rows <= 0:
        return []
    shown = measured[: rows * across]
    hidden = len(measured) - len(shown)
    lines = min((height - bool(hidden)) // rows, MAX_PANEL_LINES)
    if hidden and lines < MIN_PANEL_LINES:  # no line to spare: the last one is shared
        lines = MIN_PANEL_LINES
    panels = [_panel(frame, gpu, panel, found[panel.field], cells, lines) for panel in shown]
    grid = [panels[first : first + across] for first in range(0, len(panels), across)]
    out = list(chain.from_iterable(_beside(row, cells) for row in grid))
    if hidden and len(out) < height:
        out.append(((f" +{hidden} more histories: a taller terminal shows them", "dim"),))
    elif hidden:
        out[-1] = fit((*fit(out[-1], width - 9), (f" +{hidden} more", "dim")), width)
    return out


def _found(frame: Frame, gpu: Gpu, columns: int, interval_ns: int) -> dict[str, Floats]:
    """Histories of all panels, by field."""
    keys: dict[str, tuple[tuple[str, ...], tuple[int, ...], int]] = {
        "gpu": (GPU.key, (gpu.gpu, gpu.gi), interval_ns)
    }
    if gpu.deep is not None:
        keys["l2"] = (L2.key, (gpu.gpu,), max(gpu.deep.every_ns, interval_ns))
    found: dict[str, Floats] = {}
    for channel, (key, series, step_ns) in keys.items():
        fields = [panel.field for panel in PANELS if panel.channel == channel]
        found |= histories(frame, channel, fields, key, columns, step_ns).get(series, {})
    return found


def _now(gpu: Gpu, panel: Panel) -> float:
    if panel.channel == "l2":
        return gpu.deep[panel.field] if gpu.deep is not None else math.nan
    return gpu[panel.field]


def _beside(panels: Sequence[Sequence[Line]], cells: int) -> Iterator[Line]:
    """Panels of one row, side by side."""
    for parts in zip_longest(*panels, fillvalue=()):
        line: Line = ()
        for part in parts:
            line = (*line, *((" " * _GAP, ""),), *fit(part, cells)) if line else fit(part, cells)
        yield line


def _panel(frame: Frame, gpu: Gpu, panel: Panel, values: Floats, width: int, height: int) -> list[Line]:
    """A heading with the value now and the scale, and the history under it."""
    top = panel.top(gpu)
    now: Line = ((f"{panel.title} ", "label"), (panel.show(_now(gpu, panel)), "value"))
    scale: Line = ((f"of {panel.show(top)}", "dim"),)
    picture = chart(
        values,
        width,
        height - 1,
        0.0,
        top,
        frame.glyphs,
        style=panel.style,
        alarm=panel.alarm,
        mode="line",
    )
    return [spread(now, scale, width), *picture]
