"""NVLink links: what is known of them at the playhead, a strip of cells by traffic, and a matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from opusmon.schema import Rows
from opusmon.ui.glyphs import Glyphs
from opusmon.ui.panes.gpu_flags import BAD, WARN, Flag
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
ERROR_FIELDS = ("crc_errors", "replay_errors", "recovery_errors")
_CELL = 6
_LABEL = 8


@dataclass(frozen=True, slots=True)
class Links:
    """The NVLink links of one GPU at the playhead, one entry each in every column.

    Attributes:
        numbers: link numbers, ascending.
        tx_bps: bytes per second from the GPU, NaN where missing.
        rx_bps: bytes per second to the GPU.
        speed_bps: line rate in one direction, the usual one where it is not given.
        down: not usable.
        errors: of all kinds, counted since the driver loaded; NaN when unknown.
        grown: errors that were counted within the span.
        kinds: errors of all links by kind, those that are not zero: (("crc", 12.0),).
    """

    numbers: tuple[int, ...] = ()
    tx_bps: tuple[float, ...] = ()
    rx_bps: tuple[float, ...] = ()
    speed_bps: tuple[float, ...] = ()
    down: tuple[bool, ...] = ()
    errors: tuple[float, ...] = ()
    grown: tuple[float, ...] = ()
    kinds: tuple[tuple[str, float], ...] = ()

    def __len__(self) -> int:
        return len(self.numbers)

    def traffic(self, direction: str) -> tuple[float, ...]:
        """Bytes per second of each link, "tx" or "rx"."""
        return self.tx_bps if direction == "tx" else self.rx_bps

    def shares(self, direction: str) -> list[float]:
        """Share of its line rate that each link carries, "tx" or "rx"; NaN where unknown."""
        return [bps / speed for bps, speed in zip(self.traffic(direction), self.speed_bps, strict=True)]


NO_LINKS = Links()


def _column(rows: Rows, name: str) -> np.ndarray[tuple[Any, ...], np.dtype[np.float64]]:
    """A field as float64, all NaN where the rows (of an older recording) do not have it."""
    if name not in (rows.dtype.names or ()):
        return np.full(len(rows), np.nan)
    return rows[name].astype(np.float64)


def any_errors(rows: Rows) -> bool:
    """Some link has counted an error since the driver loaded."""
    return bool(len(rows)) and any(bool((_column(rows, name) > 0).any()) for name in ERROR_FIELDS)


def read_links(rows: Rows, before: Mapping[tuple[int, int], float]) -> dict[int, Links]:
    """The links of every GPU.

    Args:
        rows: the newest `nvlink` row of each link.
        before: errors of all kinds near the start of the span by (gpu, link); a link that is not in it, or whose
            count went back since (the driver was loaded anew), counts as grown only from a known zero.
    """
    if not len(rows):
        return {}
    ordered = rows[np.lexsort((rows["link"], rows["gpu"]))]
    gpus = ordered["gpu"]
    starts = [0, *(np.flatnonzero(gpus[1:] != gpus[:-1]) + 1).tolist(), len(ordered)]
    numbers, tx_bps, rx_bps, speed_bps, down, errors, grown = _columns(ordered, before)
    wrong = any_errors(ordered)
    return {
        int(gpus[a]): Links(
            numbers[a:b],
            tx_bps[a:b],
            rx_bps[a:b],
            speed_bps[a:b],
            down[a:b],
            errors[a:b],
            grown[a:b],
            _kinds(ordered[a:b]) if wrong else (),
        )
        for a, b in pairwise(starts)
    }


def _columns(
    rows: Rows, before: Mapping[tuple[int, int], float]
) -> tuple[
    tuple[int, ...],
    tuple[float, ...],
    tuple[float, ...],
    tuple[float, ...],
    tuple[bool, ...],
    tuple[float, ...],
    tuple[float, ...],
]:
    """The columns of `Links`, of all GPUs one after another."""
    speed = _column(rows, "speed_bps")
    numbers = tuple(rows["link"].tolist())
    errors = error_counts(rows)
    grown = [0.0] * len(rows)
    if before:
        keys = zip(rows["gpu"].tolist(), numbers, strict=True)
        grown = [_grown(now, before.get(key, math.nan)) for key, now in zip(keys, errors, strict=True)]
    return (
        numbers,
        tuple(_column(rows, "tx_bps").tolist()),
        tuple(_column(rows, "rx_bps").tolist()),
        tuple(np.where(speed > 0, speed, LINK_SPEED_BPS).tolist()),
        tuple((_column(rows, "state") == 0).tolist()),
        errors,
        tuple(grown),
    )


def _grown(now: float, then: float) -> float:
    return now - then if now > then else 0.0


def error_counts(rows: Rows, suffix: str = "") -> tuple[float, ...]:
    """Errors of all kinds of each row; NaN where no kind is known. `suffix` as in "crc_errors_min" of a rollup."""
    counts = np.stack([_column(rows, f"{name}{suffix}") for name in ERROR_FIELDS])
    unknown = np.isnan(counts)
    total = np.where(unknown, 0.0, counts).sum(axis=0)
    return tuple(np.where(unknown.all(axis=0), np.nan, total).tolist())


def _kinds(rows: Rows) -> tuple[tuple[str, float], ...]:
    totals = ((name.removesuffix("_errors"), float(np.nansum(_column(rows, name)))) for name in ERROR_FIELDS)
    return tuple((kind, total) for kind, total in totals if total > 0)


def link_flags(links: Links) -> Iterator[Flag]:
    """Flags of the links: which are down, which have counted errors within the span."""
    down = [number for number, is_down in zip(links.numbers, links.down, strict=True) if is_down]
    if down and len(down) == len(links):
        yield Flag(WARN, f"all {len(down)} links inactive")  # no bridge fitted, or all of them failed
    elif down:
        yield Flag(BAD, f"link {list_some(down, 3)} down")
    wrong = [number for number, grown in zip(links.numbers, links.grown, strict=True) if grown > 0]
    if wrong:
        yield Flag(WARN, f"link {list_some(wrong, 3)} err +{number(sum(links.grown), 0)}")


def errors_line(links: Links) -> Line:
    """`crc 12 since load`: what was counted since the driver loaded; empty when nothing was."""
    words = "  ".join(f"{kind} {number(count, 0)}" for kind, count in links.kinds)
    return ((f"{words} since load", "dim"),) if words else ()


def total_bps(links: Links, direction: str) -> float:
    """Traffic of all links in bytes per second, "tx" or "rx"; NaN when none of them is known."""
    known = [bps for bps in links.traffic(direction) if bps == bps]  # not NaN
    return sum(known) if known else math.nan


def hot_links(links: Links, direction: str) -> list[int]:
    """Links with traffic worth naming in a direction ("tx" or "rx"), busiest first."""
    shares = links.shares(direction)
    ranked = sorted(
        (-share, link) for share, link in zip(shares, links.numbers, strict=True) if share >= HOT_SHARE
    )
    return [link for _, link in ranked]


def hot_line(links: Links, direction: str, most: int = 3) -> Line:
    """`hot 7 3 12`; "all" when every link carries about the same; empty when no link is hot."""
    hot = hot_links(links, direction)
    if not hot:
        return ()
    shares = links.shares(direction)
    even = len(hot) == len(links) > most and min(shares) > EVEN_SHARE * max(shares)
    return ((f"hot {'all' if even else list_some(hot, most)}", "accent"),)


def links_strip(links: Links, direction: str, glyphs: Glyphs, width: int = STRIP_CELLS) -> Line:
    """One cell per link by its share of the line rate: `_` idle, `x` down, `e` errors in the span, `?` unknown.

    Args:
        links: of one GPU.
        direction: "tx" or "rx".
        glyphs: the characters.
        width: most cells; when there are more links, neighbours share a cell and the worst one shows.
    """
    if not len(links) or width <= 0:
        return ()
    shares = links.shares(direction)
    plain = len(links) <= width and not any(links.down) and not any(links.grown)
    if plain:
        text = strip(shares, glyphs)
        return ((text, "series2" if max(map(_or_zero, shares)) > 0 else "dim"),)
    cells = [_strip_cell(links, group, shares, glyphs) for group in _folded(len(links), width)]
    return tuple(
        ("".join(text for text, _ in run), style) for style, run in groupby(cells, key=lambda cell: cell[1])
    )


def _folded(count: int, width: int) -> list[range]:
    shown = min(count, width)
    edges = [place * count // shown for place in range(shown + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def _strip_cell(links: Links, group: range, shares: Sequence[float], glyphs: Glyphs) -> tuple[str, str]:
    if any(links.down[place] for place in group):
        return "x", "bad"
    if any(links.grown[place] > 0 for place in group):
        return "e", "warn"
    share = max((shares[place] for place in group), key=lambda value: -1 if math.isnan(value) else value)
    return strip([share], glyphs), "series2" if share > 0 else "dim"


def links_matrix(links: Links, width: int, glyphs: Glyphs) -> Iterator[Line]:
    """A column per link: number, TX and RX in GB/s with a level; state and errors where something is to be said."""
    per_line = max((width - _LABEL) // _CELL, 1)
    trouble = any(links.down) or any(count != 0 for count in links.errors)
    calm = "" if trouble else f"   {len(links)} links up, no errors"
    totals = f"tx {rate(total_bps(links, 'tx'))}  rx {rate(total_bps(links, 'rx'))}"
    yield (("NVLink  ", "title"), (totals, "value"), (f"  GB/s per link{calm}", "dim"))
    for first in range(0, len(links), per_line):
        part = range(first, min(first + per_line, len(links)))
        yield _matrix_row("link", ((str(links.numbers[place]), "label") for place in part))
        yield _matrix_row("tx", _traffic(links, part, "tx", glyphs))
        yield _matrix_row("rx", _traffic(links, part, "rx", glyphs))
        if trouble:
            yield _matrix_row(
                "state", (("DOWN!!", "bad") if links.down[place] else ("up", "dim") for place in part)
            )
            yield _matrix_row("errors", (_errors(links.errors[place], links.grown[place]) for place in part))


def _matrix_row(label: str, cells: Iterator[tuple[str, str]]) -> Line:
    return ((pad(label, _LABEL), "label"), *((pad(text, _CELL, ">"), style) for text, style in cells))


def _traffic(links: Links, part: range, direction: str, glyphs: Glyphs) -> Iterator[tuple[str, str]]:
    shares, speeds = links.shares(direction), links.traffic(direction)
    marks = strip([shares[place] for place in part], glyphs)
    for place, mark in zip(part, marks, strict=True):
        style = "value" if _or_zero(shares[place]) >= HOT_SHARE else "dim"
        yield f"{gb_rate(speeds[place], 4)}{mark}", style


def _errors(count: float, grown: float) -> tuple[str, str]:
    if math.isnan(count):
        return MISSING, "dim"
    return (f"+{number(grown, 0)} !", "warn") if grown > 0 else (number(count, 0), "dim")


def _or_zero(value: float) -> float:
    return 0.0 if value != value else value  # NaN
