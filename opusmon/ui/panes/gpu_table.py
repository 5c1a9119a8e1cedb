"""Many GPUs as a table, one line each: which columns fit, and what is in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opusmon.ui import units
from opusmon.ui.panes.gpu_charts import Drawing
from opusmon.ui.panes.gpu_flags import (
    HBM_BW_HIGH_PCT,
    HBM_USED_HIGH_PCT,
    TEMP_HIGH_C,
    flags_line,
    hbm_used_pct,
)
from opusmon.ui.panes.gpu_links import links_strip
from opusmon.ui.panes.gpu_rows import aged, alarm_style, nvlink_bps, stale_flag
from opusmon.ui.panes.gpu_state import Gpu, bandwidth_field
from opusmon.ui.text import Align, Line, Span, columns, pad
from opusmon.ui.widgets.chart import bar

BUSY_MARK = "*"

Cell = Callable[[Gpu, Drawing, int], Line]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of GPUs.

    Attributes:
        title: its heading, with the unit.
        width: least cells.
        rank: the lower, the earlier it gets room.
        cell: draws it, given its width.
        align: of heading and cell.
        grow: most cells it takes when there is room to spare.
    """

    title: str
    width: int
    rank: int
    cell: Cell
    align: Align = ">"
    grow: int = 0


def _plain(field: str, scale: float, decimals: int, limit: float = math.inf) -> Cell:
    def cell(gpu: Gpu, drawing: Drawing, width: int) -> Line:
        del drawing
        value = gpu[field]
        text = units.number(value * scale, width, decimals, gpu.missing(field))
        return ((text, alarm_style(value, limit)),)

    return cell


def _pair_of_rates(tx_bps: float, rx_bps: float, width: int) -> Line:
    """TX and RX in GB/s, side by side under one heading."""
    cells = (width - 1) // 2
    return (
        (units.gb_rate(tx_bps, width - 1 - cells), alarm_style(tx_bps, math.inf)),
        (" ", ""),
        (units.gb_rate(rx_bps, cells), alarm_style(rx_bps, math.inf)),
    )


def _nvlink_cell(gpu: Gpu, drawing: Drawing, width: int) -> Line:
    del drawing
    return _pair_of_rates(nvlink_bps(gpu, "tx"), nvlink_bps(gpu, "rx"), width)


def _pcie_cell(gpu: Gpu, drawing: Drawing, width: int) -> Line:
    del drawing
    return _pair_of_rates(gpu["pcie_tx_bps"], gpu["pcie_rx_bps"], width)


def _strip_of(direction: str) -> Cell:
    def cell(gpu: Gpu, drawing: Drawing, width: int) -> Line:
        return links_strip(gpu.links, direction, drawing.glyphs, width)

    return cell


def _index_cell(gpu: Gpu, drawing: Drawing, width: int) -> Line:
    del drawing, width
    return ((f"{gpu.gpu:>2}" if not gpu.is_mig else f"  gi{gpu.gi}", "label" if gpu.is_mig else "title"),)


def _name_cell(gpu: Gpu, drawing: Drawing, width: int) -> Line:
    del drawing, width
    return ((gpu.name, "label"),)


def _bar_cell(gpu: Gpu, drawing: Drawing, width: int) -> Line:
    share = hbm_used_pct(gpu.row)
    return bar(share / 100, width, drawing.glyphs, "warn" if share > HBM_USED_HIGH_PCT else "series4")


def _pair_cell(gpu: Gpu, drawing: Drawing, width: int) -> Line:
    del drawing
    share = hbm_used_pct(gpu.row)
    pair = units.gib_pair(gpu["mem_used_b"], gpu["mem_total_b"], width).removesuffix(" GiB")
    return ((pair, alarm_style(share, HBM_USED_HIGH_PCT)),)


def _bw_cell(gpu: Gpu, drawing: Drawing, width: int) -> Line:
    """Bandwidth; a trailing `BUSY_MARK` for a GPU that only says how long its memory was busy."""
    del drawing
    field = bandwidth_field(gpu)
    value = gpu[field]
    if field == "mem_busy_pct":
        return ((units.number(value, width - 1), "dim"), (BUSY_MARK, "dim"))
    return (
        (
            units.number(value, width - 1, missing=gpu.missing(field)),
            alarm_style(value, HBM_BW_HIGH_PCT),
        ),
        (" ", ""),
    )


def _history_cell(gpu: Gpu, drawing: Drawing, width: int) -> Line:
    return ((drawing.sparks.get((gpu.gpu, gpu.gi), " " * width), "series0"),)


def _flags_cell(gpu: Gpu, drawing: Drawing, width: int) -> Line:
    del drawing
    return flags_line([*stale_flag(gpu), *gpu.flags], width)


TABLE: tuple[Column, ...] = (
    Column("GPU", 3, 0, _index_cell, "<"),
    Column("", 6, 12, _name_cell, "<", 16),
    Column("HBM", 5, 9, _bar_cell, "<", 16),
    Column("GiB", 7, 1, _pair_cell),
    Column("bw%", 4, 2, _bw_cell),
    Column("TB/s", 4, 11, _plain("hbm_bw_bps", 1e-12, 2)),
    Column("history", 7, 10, _history_cell, "<", 400),
    Column("SM%", 3, 3, _plain("sm_util_pct", 1, 0)),
    Column("occ%", 4, 15, _plain("sm_occupancy_pct", 1, 0)),
    Column("tens%", 5, 16, _plain("tensor_pct", 1, 0)),
    Column("W", 4, 4, _plain("power_mw", 1e-3, 0)),
    Column("C", 3, 5, _plain("temp_c", 1, 0, TEMP_HIGH_C)),
    Column("MHz", 4, 14, _plain("sm_clock_mhz", 1, 0)),
    Column("PCIe tx rx GB/s", 15, 19, _pcie_cell),
    Column("NVL tx rx GB/s", 14, 6, _nvlink_cell),
    Column("links tx", 18, 17, _strip_of("tx"), "<"),
    Column("links rx", 18, 18, _strip_of("rx"), "<"),
    Column("flags", 9, 8, _flags_cell, "<", 26),
)
_GROWTH = ("flags", "HBM", "", "history")
"""Who gets the room to spare, in turn."""
FLAGGED_RANK = 2.5
"""Of the flags while there are any."""
_NARROW_CELLS = 60
"""Below this, flags make do with their least width."""
_USEFUL = {"flags": 14, "HBM": 8, "history": 8}
"""What these want before a column of lower importance gets any room."""


def _order(flagged: bool) -> list[int]:
    """Columns by importance: what is wrong comes right after memory and bandwidth, when something is."""
    ranks = [FLAGGED_RANK if flagged and column.title == "flags" else column.rank for column in TABLE]
    return sorted(range(len(TABLE)), key=lambda place: ranks[place])


def layout(width: int, *, names: bool, mig: bool, flagged: bool = False) -> list[tuple[Column, int]]:
    """The columns that fit in `width` cells and their widths, in the order of `TABLE`.

    Args:
        width: cells of a row, without the selection mark.
        names: devices differ in name, or there is room for it anyway.
        mig: leave room for the indented names of MIG instances.
        flagged: something is wrong with one of them, which a narrow table must say as well.
    """
    chosen: dict[int, int] = {}
    left = width + 1
    for place in _order(flagged):
        column = TABLE[place]
        useful = 0 if flagged and width < _NARROW_CELLS else _USEFUL.get(column.title, 0)
        least = max(column.width, useful) if column.rank >= 8 else column.width
        least = max(least, 6) if mig and column.rank == 0 else least
        if (column.title == "" and not names and left < 60) or least + 1 > left:
            continue
        chosen[place] = least
        left -= least + 1
    for title in _GROWTH:
        place = next(place for place, column in enumerate(TABLE) if column.title == title)
        if place in chosen and left > 0:
            more = min(left, max(TABLE[place].grow - chosen[place], 0))
            chosen[place] += more
            left -= more
    return [(TABLE[place], cells) for place, cells in sorted(chosen.items())]


def table_head(plan: Sequence[tuple[Column, int]]) -> Line:
    """The headings."""
    cells = [
        ((((pad(column.title, cells, column.align)), "label"),), cells, column.align)
        for column, cells in plan
    ]
    return ((" ", ""), *columns(cells))


def history_cells(plan: Sequence[tuple[Column, int]]) -> int:
    """Width of the history in a table, 0 when it has none."""
    return next((cells for column, cells in plan if column.title == "history"), 0)


def table_row(gpu: Gpu, plan: Sequence[tuple[Column, int]], drawn: Drawing, *, selected: bool) -> Line:
    """One GPU in one line."""
    mark = (drawn.glyphs.select if selected else " ", "select" if selected else "")
    if gpu.gone:
        return (mark, (f"!! {gpu.gone}", "bad"))
    row: list[Span] = []
    for column, cells in plan:
        spans = column.cell(gpu, drawn, cells)
        if row:
            row.append((" ", ""))
        if len(spans) == 1 and len(spans[0][0]) == cells and spans[0][0].isascii():
            row.append(spans[0])
        else:
            row.extend(columns([(spans, cells, column.align)]))
    return (mark, *aged(gpu, tuple(row)))
