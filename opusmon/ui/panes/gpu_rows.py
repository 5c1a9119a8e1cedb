"""One GPU as a block of lines: numbers at the left, bandwidth history at the right."""

from __future__ import annotations

import math
from dataclasses import dataclass

from opusmon.ui import units
from opusmon.ui.glyphs import Glyphs
from opusmon.ui.panes.gpu_flags import (
    HBM_BW_HIGH_PCT,
    HBM_USED_HIGH_PCT,
    MEM_TEMP_HIGH_C,
    TEMP_HIGH_C,
    Flag,
    flags_line,
    hbm_used_pct,
)
from opusmon.ui.panes.gpu_links import hot_line, links_strip, total_bps
from opusmon.ui.panes.gpu_state import Gpu
from opusmon.ui.panes.history import Floats
from opusmon.ui.text import Line, fill, fit, join, line_cells, pad, restyle
from opusmon.ui.widgets.chart import bar, chart

LEFT_CELLS = 47
"""The numbers of a block; the history gets what is right of them."""
MIN_CHART_CELLS = 12
_KEPT_WHEN_STALE = frozenset({"warn", "bad", "select", "title"})


@dataclass(frozen=True, slots=True)
class Drawing:
    """What rows are drawn with.

    Attributes:
        glyphs: the characters.
        histories: bandwidth history by (gpu, gi), see `bandwidth_field`.
        span: the span as words, "5m".
        selected: index of the selected row, -1 for none.
    """

    glyphs: Glyphs
    histories: dict[tuple[int, int], Floats]
    span: str
    selected: int = -1


def bandwidth_field(gpu: Gpu) -> str:
    """`hbm_bw_pct`, or `mem_busy_pct` where the GPU only gives that (before Hopper)."""
    only_busy = math.isnan(gpu["hbm_bw_pct"]) and not math.isnan(gpu["mem_busy_pct"])
    return "mem_busy_pct" if only_busy and not _has_gpm(gpu) else "hbm_bw_pct"


def _has_gpm(gpu: Gpu) -> bool:
    """The device gives GPM metrics: one that is missing now is missing, and nothing else stands in for it."""
    return gpu.device.get("gpm", math.nan) == 1


def stale_flag(gpu: Gpu) -> tuple[Flag, ...]:
    """`stale 4.2 s`, when it is."""
    return (Flag(1, f"stale {units.duration(gpu.age_ns or 0)}"),) if gpu.stale else ()


def block_lines(gpu: Gpu) -> int:
    """Least lines a block needs."""
    if gpu.gone:
        return 1
    return 6 if gpu.links or gpu.device.get("links", 0) > 0 else 4


def block(
    gpu: Gpu, width: int, height: int, drawing: Drawing, *, selected: bool, history: bool = True
) -> list[Line]:
    """A GPU in full: numbers at the left, bandwidth history at the right.

    Args:
        gpu: what is shown.
        width: cells.
        height: lines, at least `block_lines(gpu)`.
        drawing: characters and histories.
        selected: mark it as selected.
        history: draw the bandwidth history.
    """
    mark = (drawing.glyphs.select if selected else " ", "select" if selected else "")
    head: Line = (mark, (f"{gpu.gpu} ", "title"), (f"{gpu.name or 'GPU'}  ", "title"))
    if gpu.gone:
        return [fit((mark, (f"!! {gpu.gone}", "bad")), width)]
    first = (*head, *_memory(gpu, 16 if width < 100 else 24, drawing.glyphs))
    flags = flags_line([*stale_flag(gpu), *gpu.flags], width - line_cells(first) - 2)
    lines = [join([first, flags])]
    body = [_body_line(line) for line in _numbers(gpu, drawing.glyphs)]
    body.extend([()] * (height - 1 - len(body)))
    room = width - LEFT_CELLS - 3
    if history and room >= MIN_CHART_CELLS:
        picture = _chart(gpu, room, height - 1, drawing)
        body = [
            (*fit(left, LEFT_CELLS), ("  ", ""), *right) for left, right in zip(body, picture, strict=False)
        ]
    lines.extend(body)
    return [fit(aged(gpu, line), width) for line in lines[:height]]


def _body_line(line: Line) -> Line:
    return (("  ", ""), *line)


def aged(gpu: Gpu, line: Line) -> Line:
    """The line, dim when the GPU is stale; flags keep their style."""
    return restyle(line, "dim", _KEPT_WHEN_STALE) if gpu.stale else line


def _memory(gpu: Gpu, bar_cells: int, glyphs: Glyphs) -> Line:
    share = hbm_used_pct(gpu.row)
    style = alarm_style(share, HBM_USED_HIGH_PCT)
    pair = units.gib_pair(gpu["mem_used_b"], gpu["mem_total_b"])
    kind = "unified" if gpu.unified else "HBM"
    return (
        (f"{kind} ", "label"),
        *bar(share / 100, bar_cells, glyphs, "warn" if style == "warn" else "series1"),
        (f" {pair}", "value"),
        (f" {units.percent(share, 3, gpu.missing('mem_used_b'))}", style),
    )


def alarm_style(value: float, limit: float, style: str = "value") -> str:
    """Style of a number: dim when missing, "warn" above the limit, else `style`."""
    if math.isnan(value):
        return "dim"
    return "warn" if value > limit else style


def _numbers(gpu: Gpu, glyphs: Glyphs) -> list[Line]:
    lines = [_bandwidth(gpu), _compute(gpu), _power(gpu)]
    if gpu.links or gpu.device.get("links", 0) > 0:
        lines.extend(_nvlink(gpu, glyphs))
    return lines


def _labelled(label: str, text: str, value: float, limit: float = math.inf) -> Line:
    return ((f"{label} ", "label"), (text, alarm_style(value, limit)))


def _percent(gpu: Gpu, label: str, field: str, limit: float = math.inf) -> Line:
    return _labelled(label, units.percent(gpu[field], 3, gpu.missing(field)), gpu[field], limit)


def _bandwidth(gpu: Gpu) -> Line:
    """`bw  71 %  3.42 TB/s  PCIe tx  0.2 rx  2.7 GB/s`; before Hopper `mem busy  42 %`, which is no bandwidth."""
    if bandwidth_field(gpu) == "mem_busy_pct":
        first = _percent(gpu, "mem busy", "mem_busy_pct")
    else:
        speed = pad(units.rate(gpu["hbm_bw_bps"]), 10, ">")
        first = (
            *_percent(gpu, "bw", "hbm_bw_pct", HBM_BW_HIGH_PCT),
            (speed, alarm_style(gpu["hbm_bw_bps"], math.inf)),
        )
    tx, rx = (units.gb_rate(gpu[field], 4) for field in ("pcie_tx_bps", "pcie_rx_bps"))
    pcie: Line = (
        ("PCIe tx ", "label"),
        (tx, alarm_style(gpu["pcie_tx_bps"], math.inf)),
        (" rx ", "label"),
        (rx, alarm_style(gpu["pcie_rx_bps"], math.inf)),
        (" GB/s", "label"),
    )
    return join([first, pcie])


def _compute(gpu: Gpu) -> Line:
    if math.isnan(gpu["sm_util_pct"]) and not math.isnan(gpu["gpu_busy_pct"]) and not _has_gpm(gpu):
        return join([_percent(gpu, "gpu busy", "gpu_busy_pct"), (("SM, occ, tensor not measured", "dim"),)])
    return join(
        [
            _percent(gpu, "SM", "sm_util_pct"),
            _percent(gpu, "occ", "sm_occupancy_pct"),
            _percent(gpu, "tensor", "tensor_pct"),
        ]
    )


def _power(gpu: Gpu) -> Line:
    limit = gpu.device.get("power_limit_mw", math.nan)
    watts = units.number(gpu["power_mw"] / 1000, 4, missing=gpu.missing("power_mw"))
    of = "" if math.isnan(limit) else f"/{units.number(limit / 1000, 0)}"
    parts: list[Line] = [
        ((f"{watts}{of} W", alarm_style(gpu["power_mw"], math.inf)),),
        ((units.celsius(gpu["temp_c"]), alarm_style(gpu["temp_c"], TEMP_HIGH_C)),),
    ]
    if not math.isnan(gpu["mem_temp_c"]):
        parts.append(_labelled("HBM", units.celsius(gpu["mem_temp_c"]), gpu["mem_temp_c"], MEM_TEMP_HIGH_C))
    parts.append(((units.megahertz(gpu["sm_clock_mhz"]), alarm_style(gpu["sm_clock_mhz"], math.inf)),))
    return join(parts)


def nvlink_bps(gpu: Gpu, direction: str) -> float:
    """Traffic of all links, bytes per second: from the `gpu` row, else the sum of the links."""
    value = gpu[f"nvlink_{direction}_bps"]
    return total_bps(gpu.links, direction) if math.isnan(value) else value


def _nvlink(gpu: Gpu, glyphs: Glyphs) -> list[Line]:
    if not gpu.links:
        return [(("NVLink ", "label"), (gpu.missing("tx_bps", "nvlink"), "dim")), ()]
    lines: list[Line] = []
    for label, direction in (("NVLink tx ", "tx"), ("GB/s   rx ", "rx")):
        value = nvlink_bps(gpu, direction)
        cells = links_strip(gpu.links, direction, glyphs)
        line: Line = ((label, "label"), *cells, (f" {units.gb_rate(value)}", alarm_style(value, math.inf)))
        lines.append(fill([line, hot_line(gpu.links, direction)], LEFT_CELLS - 2, " "))
    return lines


def _chart(gpu: Gpu, width: int, height: int, drawing: Drawing) -> list[Line]:
    """The bandwidth history, with its scale in words above it."""
    field = bandwidth_field(gpu)
    values = drawing.histories.get((gpu.gpu, gpu.gi))
    words = "bw" if field == "hbm_bw_pct" else "mem busy"
    label = fit(((f"{words} 0-100 %, last {drawing.span}", "dim"),), width)
    rows = height - 1 if height > 2 else height
    picture = chart(
        () if values is None else values,
        width,
        rows,
        0.0,
        100.0,
        drawing.glyphs,
        alarm=HBM_BW_HIGH_PCT if field == "hbm_bw_pct" else math.inf,
    )
    return [label, *picture] if height > 2 else picture
