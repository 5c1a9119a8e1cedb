"""NVLink links as a strip of cells by traffic, and as a matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from opusmon.ui.glyphs import Glyphs
from opusmon.ui.panes.gpu_state import Gpu, Link
from opusmon.ui.text import Line, pad
from opusmon.ui.units import MISSING, gb_rate, list_some, number, rate
from opusmon.ui.widgets.chart import strip

STRIP_CELLS = 18
"""Links of an H200; more are folded into as many cells."""
LINK_SPEED_BPS = 26.562e9
"""NVLink 4 per link and direction, as NVML field 164 gives it on an H200; used only where it gives none."""
HOT_SHARE = 0.05
"""A link below this share of its line rate is not called hot."""
EVEN_SHARE = 0.5
"""Links that carry at least this share of the busiest one share the load evenly."""
_CELL = 6
_LABEL = 8


def total_bps(links: Sequence[Link], direction: str) -> float:
    """Traffic of all links in bytes per second, "tx" or "rx"; NaN when none of them is known."""
    known = [rate for link in links if not math.isnan(rate := _rate(link, direction))]
    return sum(known) if known else math.nan


def hot_links(links: Sequence[Link], direction: str) -> list[int]:
    """Links with traffic worth naming in a direction ("tx" or "rx"), busiest first."""
    ranked = sorted((-_or_zero(_share(link, direction)), link.number) for link in links)
    return [link for share, link in ranked if -share >= HOT_SHARE]


def hot_line(links: Sequence[Link], direction: str, most: int = 3) -> Line:
    """`hot 7 3 12`; "all" when every link carries about the same; empty when no link is hot."""
    hot = hot_links(links, direction)
    shares = [_or_zero(_share(link, direction)) for link in links]
    even = len(hot) == len(links) > most and min(shares) > EVEN_SHARE * max(shares)
    return (("hot ", "label"), ("all" if even else list_some(hot, most), "accent")) if hot else ()


def links_strip(links: Sequence[Link], direction: str, glyphs: Glyphs, width: int = STRIP_CELLS) -> Line:
    """One cell per link by its share of the line rate: `_` idle, `x` down, `e` errors at rest, `?` unknown.

    Args:
        links: by number.
        direction: "tx" or "rx".
        glyphs: the characters.
        width: most cells; when there are more links, neighbours share a cell and the worst one shows.
    """
    cells = [_strip_cell(group, direction, glyphs) for group in _folded(links, width)]
    return tuple(
        ("".join(text for text, _ in run), style) for style, run in groupby(cells, key=lambda cell: cell[1])
    )


def links_matrix(gpu: Gpu, width: int, glyphs: Glyphs) -> Iterator[Line]:
    """A column per link: number, TX and RX in GB/s with a level, state, errors; wrapped to the width."""
    per_line = max((width - _LABEL) // _CELL, 1)
    yield (
        ("NVLink  ", "title"),
        ("tx ", "label"),
        (rate(total_bps(gpu.links, "tx")), "value"),
        ("  rx ", "label"),
        (rate(total_bps(gpu.links, "rx")), "value"),
        ("  GB/s per link", "label"),
    )
    for first in range(0, len(gpu.links), per_line):
        part = gpu.links[first : first + per_line]
        yield _matrix_row("link", ((str(link.number), "label") for link in part))
        yield _matrix_row("tx", (_traffic(link, "tx", glyphs) for link in part))
        yield _matrix_row("rx", (_traffic(link, "rx", glyphs) for link in part))
        yield _matrix_row("state", (("DOWN!!", "bad") if link.down else ("up", "dim") for link in part))
        yield _matrix_row("errors", (_errors(link) for link in part))


def _matrix_row(label: str, cells: Iterator[tuple[str, str]]) -> Line:
    return ((pad(label, _LABEL), "label"), *((pad(text, _CELL, ">"), style) for text, style in cells))


def _traffic(link: Link, direction: str, glyphs: Glyphs) -> tuple[str, str]:
    value = _rate(link, direction)
    style = "value" if _or_zero(_share(link, direction)) >= HOT_SHARE else "dim"
    return f"{gb_rate(value, 4)}{strip([_share(link, direction)], glyphs)}", style


def _errors(link: Link) -> tuple[str, str]:
    if math.isnan(link.errors):
        return MISSING, "dim"
    return (f"{number(link.errors, 0)} !", "warn") if link.errors > 0 else ("0", "dim")


def _rate(link: Link, direction: str) -> float:
    return link.tx_bps if direction == "tx" else link.rx_bps


def _share(link: Link, direction: str) -> float:
    speed = link.speed_bps if link.speed_bps > 0 else LINK_SPEED_BPS
    return _rate(link, direction) / speed


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def _folded(links: Sequence[Link], width: int) -> list[Sequence[Link]]:
    count = min(len(links), max(width, 0))
    edges = [place * len(links) // count for place in range(count + 1)] if count else []
    return [links[a:b] for a, b in pairwise(edges)]


def _strip_cell(links: Sequence[Link], direction: str, glyphs: Glyphs) -> tuple[str, str]:
    if any(link.down for link in links):
        return "x", "bad"
    if any(link.errors > 0 for link in links):
        return "e", "warn"
    share = max(
        (_share(link, direction) for link in links), key=lambda value: -1 if math.isnan(value) else value
    )
    return strip([share], glyphs), "series2" if share > 0 else "dim"
