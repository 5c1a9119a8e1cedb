"""One GPU as a block of lines: its numbers, and its histories under them."""

from __future__ import annotations

import math

from opusmon.ui import units
from opusmon.ui.glyphs import Glyphs
from opusmon.ui.panes.gpu_charts import Drawing, chart_lines
from opusmon.ui.panes.gpu_deep import deep_line
from opusmon.ui.panes.gpu_flags import (
    HBM_BW_HIGH_PCT,
    HBM_USED_HIGH_PCT,
    IDLE_BIT,
    MEM_TEMP_HIGH_C,
    TEMP_HIGH_C,
    Flag,
    flags_line,
    hbm_used_pct,
)
from opusmon.ui.panes.gpu_links import errors_line, hot_line, links_strip, total_bps
from opusmon.ui.panes.gpu_state import Gpu, bandwidth_field, has_gpm
from opusmon.ui.text import Line, Span, cells, cut, fill, join, line_cells, restyle
from opusmon.ui.widgets.chart import bar

MIN_BLOCK_CELLS = 49
"""Below this the numbers of a block no longer fit."""
WIDE_CELLS = 100
"""From here on both directions of NVLink share a line."""
_KEPT_WHEN_STALE = frozenset({"warn", "bad", "select", "title"})
_DRAWN_BLANKS = frozenset({"select", "mark", *(f"heat{n}" for n in range(8))})
"""Styles under which a blank is visible."""


def settle(line: Line, width: int) -> Line:
    """Cut or pad a line to exactly `width` cells with as few changes of style as possible.

    A terminal is sent a colour at every change, so blanks take the style of what stands before them, where that
    does not show.
    """
    out: list[Span] = []
    text, style, left = "", "", width
    for part, name in line:
        size = len(part) if part.isascii() else cells(part)
        is_cut = size > left
        if is_cut:
            part = cut(part, left)
            size = cells(part)
        left -= size
        if name == style or (part.isspace() and _is_free(style, name)):
            text += part
        elif part:
            if text and not (text.isspace() and not out and _is_free(style, name)):
                out.append((text, style))
                text = ""
            text, style = text + part, name
        if is_cut:
            break
    return _filled(out, text, style, left)


def _is_free(style: str, other: str) -> bool:
    """Blanks look the same in both styles."""
    return style not in _DRAWN_BLANKS and other not in _DRAWN_BLANKS


def _filled(out: list[Span], text: str, style: str, left: int) -> Line:
    """The spans, the last one, and `left` blanks."""
    if left > 0 and style not in _DRAWN_BLANKS:
        text, left = text + " " * left, 0
    if text:
        out.append((text, style))
    if left > 0:
        out.append((" " * left, ""))
    return tuple(out)


def stale_flag(gpu: Gpu) -> tuple[Flag, ...]:
    """`stale 4.2 s`, when it is."""
    return (Flag(1, f"stale {units.duration(gpu.age_ns or 0)}"),) if gpu.stale else ()


def number_lines(gpu: Gpu, width: int) -> int:
    """Lines the numbers of a block take."""
    if gpu.gone:
        return 1
    links = (1 if width >= WIDE_CELLS else 2) if _has_links(gpu) else 0
    return (3 if width >= _power_cells(gpu) else 4) + links + (gpu.deep is not None)


def block_lines(gpu: Gpu, width: int) -> int:
    """Least lines a block needs: its numbers and one line of history."""
    return 1 if gpu.gone else number_lines(gpu, width) + 1


def block(gpu: Gpu, width: int, height: int, drawn: Drawing, *, selected: bool) -> list[Line]:
    """A GPU in full: its numbers, then its histories in the lines that are left.

    Args:
        gpu: what is shown.
        width: cells.
        height: lines; exactly this many come back unless the GPU is gone.
        drawn: characters and histories.
        selected: mark it as selected.
    """
    mark = (drawn.glyphs.select if selected else " ", "select" if selected else "")
    if gpu.gone:
        return [(mark, (f"!! {gpu.gone}", "bad"))]
    first: Line = (
        mark,
        (f"{gpu.gpu} {gpu.name or 'GPU'}  ", "title"),
        *_memory(gpu, 16 if width < WIDE_CELLS else 24, drawn.glyphs),
    )
    flags = flags_line([*stale_flag(gpu), *gpu.flags], width - line_cells(first) - 2)
    lines = [join([first, flags]), *_numbers(gpu, width, drawn.glyphs)]
    lines.extend(chart_lines(gpu, width, height - len(lines), drawn))
    lines.extend([()] * (height - len(lines)))
    return [aged(gpu, line) for line in lines[:height]]


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
        *bar(share / 100, bar_cells, glyphs, "warn" if style == "warn" else "series4"),
        (f" {pair} {units.percent(share, 3, gpu.missing('mem_used_b'))}", style),
    )


def alarm_style(value: float, limit: float, style: str = "value") -> str:
    """Style of a number: dim when missing, "warn" above the limit, else `style`."""
    if value != value:  # NaN
        return "dim"
    return "warn" if value > limit else style


def _numbers(gpu: Gpu, width: int, glyphs: Glyphs) -> list[Line]:
    work = join([_bandwidth(gpu), _compute(gpu)])
    power, pcie = _power(gpu), _pcie(gpu)
    lines: list[Line] = [work, join([power, pcie])]
    if width < _power_cells(gpu):
        lines = [join([_bandwidth(gpu), pcie]), _compute(gpu), power]
    if _has_links(gpu):
        lines.extend(_nvlink(gpu, width, glyphs))
    if gpu.deep is not None:
        lines.append(deep_line(gpu.deep))
    return [(("  ", ""), *line) for line in lines]


def _has_links(gpu: Gpu) -> bool:
    return len(gpu.links) > 0 or gpu.device.get("links", 0) > 0


def _power_cells(gpu: Gpu) -> int:
    """Cells of the line with power, temperatures, clock and PCIe on it."""
    return 63 if math.isnan(gpu["mem_temp_c"]) else 74


def _labelled(label: str, text: str, value: float, limit: float = math.inf) -> Line:
    return ((f"{label} ", "label"), (text, alarm_style(value, limit)))


def _percent(gpu: Gpu, label: str, field: str, limit: float = math.inf) -> Line:
    return _labelled(label, units.percent(gpu[field], 3, gpu.missing(field)), gpu[field], limit)


def _bandwidth(gpu: Gpu) -> Line:
    """`bw  71 %  3.42 TB/s`; before Hopper `mem busy  42 %`, which is no bandwidth."""
    if bandwidth_field(gpu) == "mem_busy_pct":
        if not math.isnan(gpu.dcgm_bw_pct):
            return _labelled(
                "bw", f"{units.percent(gpu.dcgm_bw_pct)} (dcgm)", gpu.dcgm_bw_pct, HBM_BW_HIGH_PCT
            )
        return _percent(gpu, "mem busy", "mem_busy_pct")
    share = units.percent(gpu["hbm_bw_pct"], 3, gpu.missing("hbm_bw_pct"))
    speed = units.number(gpu["hbm_bw_bps"] / 1e12, 5, 2, gpu.missing("hbm_bw_bps"))
    return _labelled("bw", f"{share} {speed} TB/s", gpu["hbm_bw_pct"], HBM_BW_HIGH_PCT)


def _pcie(gpu: Gpu) -> Line:
    tx, rx = (units.gb_rate(gpu[field], 4) for field in ("pcie_tx_bps", "pcie_rx_bps"))
    known = not (math.isnan(gpu["pcie_tx_bps"]) and math.isnan(gpu["pcie_rx_bps"]))
    return (("PCIe ", "label"), (f"tx {tx} rx {rx} GB/s", "value" if known else "dim"))


def _compute(gpu: Gpu) -> Line:
    if math.isnan(gpu["sm_util_pct"]) and not math.isnan(gpu["gpu_busy_pct"]) and not has_gpm(gpu):
        return join([_percent(gpu, "gpu busy", "gpu_busy_pct"), (("SM, occ, tensor not measured", "dim"),)])
    return join(
        [
            _percent(gpu, "SM", "sm_util_pct"),
            _percent(gpu, "occ", "sm_occupancy_pct"),
            _percent(gpu, "tensor", "tensor_pct"),
        ]
    )


def is_throttled(gpu: Gpu) -> bool:
    """Something other than idleness holds the clock back."""
    mask = gpu["throttle_mask"]
    return math.isfinite(mask) and mask > 0 and bool(int(mask) & ~IDLE_BIT)


def _of(limit: float, scale: float) -> str:
    """`/700`: the limit of a number, when it is known."""
    return f"/{units.number(limit * scale, 0)}" if limit > 0 and math.isfinite(limit) else ""


def _power(gpu: Gpu) -> Line:
    """`612/700 W   63 C  HBM  70 C  1830/1980 MHz`; power and clock stand out while something caps them."""
    watts = units.number(gpu["power_mw"] / 1000, 4, missing=gpu.missing("power_mw"))
    clock = units.number(gpu["sm_clock_mhz"], 4, missing=gpu.missing("sm_clock_mhz"))
    style = "warn" if is_throttled(gpu) else "value"
    parts: list[Line] = [
        (
            (
                f"{watts}{_of(gpu.device.get('power_limit_mw', math.nan), 1e-3)} W",
                alarm_style(gpu["power_mw"], math.inf, style),
            ),
        ),
        ((units.celsius(gpu["temp_c"]), alarm_style(gpu["temp_c"], TEMP_HIGH_C)),),
    ]
    if not math.isnan(gpu["mem_temp_c"]):
        parts.append(_labelled("HBM", units.celsius(gpu["mem_temp_c"]), gpu["mem_temp_c"], MEM_TEMP_HIGH_C))
    highest = _of(gpu.device.get("max_sm_clock_mhz", math.nan), 1)
    parts.append(((f"{clock}{highest} MHz", alarm_style(gpu["sm_clock_mhz"], math.inf, style)),))
    return join(parts)


def nvlink_bps(gpu: Gpu, direction: str) -> float:
    """Traffic of all links, bytes per second: from the `gpu` row, else the sum of the links."""
    value = gpu[f"nvlink_{direction}_bps"]
    return total_bps(gpu.links, direction) if value != value else value  # NaN


def _nvlink(gpu: Gpu, width: int, glyphs: Glyphs) -> list[Line]:
    """What leaves and what comes in, per link and in all, one under the other or side by side."""
    if not len(gpu.links):
        lines: list[Line] = [(("NVLink ", "label"), (gpu.missing("tx_bps", "nvlink"), "dim"))]
        return lines if width >= WIDE_CELLS else [*lines, ()]
    tx, rx = (_direction(gpu, direction, glyphs) for direction in ("tx", "rx"))
    hot_tx, hot_rx = (hot_line(gpu.links, direction) for direction in ("tx", "rx"))
    errors = errors_line(gpu.links)
    if width >= WIDE_CELLS:
        return [fill([(("NVLink ", "label"), *tx), rx, _both(hot_tx, hot_rx), errors], width - 2)]
    return [
        fill([(("NVLink ", "label"), *tx), hot_tx], width - 2),
        fill([(("       ", ""), *rx), hot_rx, errors], width - 2),
    ]


def _both(hot_tx: Line, hot_rx: Line) -> Line:
    """The hot links of both directions, said once where they are the same."""
    if not hot_tx or not hot_rx:
        return (*hot_tx, *hot_rx)
    if hot_tx == hot_rx:
        return hot_tx
    return ((f"{hot_tx[0][0]} | {hot_rx[0][0]}", "accent"),)


def _direction(gpu: Gpu, direction: str, glyphs: Glyphs) -> Line:
    value = nvlink_bps(gpu, direction)
    return (
        (f"{direction} ", "label"),
        *links_strip(gpu.links, direction, glyphs),
        (f" {units.gb_rate(value)} GB/s", alarm_style(value, math.inf, "value" if value > 0 else "dim")),
    )
