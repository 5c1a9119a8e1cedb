"""Charts as text: pure functions from values to lines.

Every scale is given by the caller and never follows the data, so a flat line at 3 % looks like 3 %. A missing
value (NaN) leaves a hole; a measured zero is drawn as the lowest mark. Where several values share a column the
largest one is drawn: a peak is what the reader looks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from opusmon.ui.glyphs import Glyphs
from opusmon.ui.text import Line, Span

Values = Sequence[float] | np.ndarray[tuple[Any, ...], np.dtype[np.floating]]
Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]
Steps = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]
Flags = np.ndarray[tuple[Any, ...], np.dtype[np.bool_]]
Characters = np.ndarray[tuple[Any, ...], np.dtype[np.str_]]
Mode = Literal["area", "line"]

_BRAILLE = 0x2800
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], dtype=np.int64)
"""Bit of each dot of a braille cell, by row from the top and by column (Unicode's dot numbering)."""
_CELLS = np.array([" ", *(chr(_BRAILLE + dots) for dots in range(1, 256))])
"""Every braille cell by its dots; the empty one is a blank, as some fonts draw its eight empty dots."""
_AREA = _CELLS[[int(_DOTS[4 - a :, 0].sum() + _DOTS[4 - b :, 1].sum()) for a in range(5) for b in range(5)]]
"""The cell whose left column is filled to `a` dots and its right one to `b`, at a * 5 + b."""


def resample(values: Values, columns: int) -> Floats:
    """Exactly `columns` values: the maximum of each group when there are more, repeats when there are fewer.

    Args:
        values: shape (..., n), NaN where missing.
        columns: > 0.

    Returns:
        Shape (..., columns). A group is NaN only when all of it is; no values at all give all NaN.
    """
    array = np.asarray(values, dtype=np.float64)
    count = array.shape[-1]
    if count == columns:
        return array
    if not count:
        return np.full((*array.shape[:-1], columns), np.nan)
    places = np.arange(columns) * count // columns
    if count < columns:
        return array[..., places]
    return np.fmax.reduceat(array, places, axis=-1)


def fractions(values: Values, lo: float, hi: float) -> Floats:
    """Values as a share of the scale, clipped to 0..1, NaN where missing; same shape."""
    array = np.asarray(values, dtype=np.float64)
    if not hi > lo:
        return np.where(np.isnan(array), np.nan, 0.0)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.clip((array - lo) / (hi - lo), 0.0, 1.0)


def chart(
    values: Values,
    width: int,
    height: int,
    lo: float,
    hi: float,
    glyphs: Glyphs,
    *,
    style: str = "series0",
    alarm: float = float("inf"),
    alarm_style: str = "warn",
    mode: Mode = "area",
) -> list[Line]:
    """Draw values over time, oldest at the left.

    Args:
        values: shape (n,), NaN where missing.
        width: cells.
        height: lines.
        lo: value at the lower edge.
        hi: value at the upper edge; what is outside is drawn at the edge.
        glyphs: braille draws 2 x 4 dots per cell, the others 1 x `len(levels)` steps.
        style: of the marks.
        alarm: columns that reach this value take `alarm_style`.
        alarm_style: a style name.
        mode: "area" fills down to the lower edge, "line" joins neighbours.

    Returns:
        `height` lines of `width` cells.
    """
    if width <= 0 or height <= 0:
        return [()] * max(height, 0)
    per_cell = glyphs.columns_per_cell
    sampled = resample(values, width * per_cell)
    steps = 4 if glyphs.dots else len(glyphs.levels)
    heights = _heights(fractions(sampled, lo, hi), height * steps)
    rows = _braille(heights, height, mode) if glyphs.dots else _levels(heights, height, glyphs.levels, mode)
    hot: Flags = np.asarray((sampled >= alarm).reshape(width, per_cell).any(axis=1))
    return [_coloured(row, hot, style, alarm_style) for row in rows]


def _heights(shares: Floats, steps: int) -> Steps:
    """Filled steps of each column, 1..steps; 0 where missing."""
    missing = np.isnan(shares)
    filled = np.ceil(np.where(missing, 0.0, shares) * steps - 1e-9)
    heights: Steps = np.where(missing, 0, np.maximum(filled, 1)).astype(np.int64)
    return heights


def _lower(heights: Steps) -> Steps:
    """First filled step of each column of a line: its own height or its left neighbour's, whichever is lower."""
    before = np.concatenate([heights[:1], heights[:-1]])
    before = np.where(before == 0, heights, before)
    lower: Steps = np.minimum(heights - 1, before)
    return lower


def _braille(heights: Steps, height: int, mode: Mode) -> list[str]:
    if mode == "area":
        ground = np.arange(height)[::-1, None] * 4
        part = np.clip(heights - ground, 0, 4)
        return _rows_of(_AREA[part[:, ::2] * 5 + part[:, 1::2]])
    level = np.arange(height * 4)[::-1, None]
    dots = (level < np.maximum(heights, _neighbour_top(heights))) & (level >= _lower(heights))
    cells = dots.reshape(height, 4, -1, 2)
    return _rows_of(_CELLS[np.einsum("hrwc,rc->hw", cells, _DOTS)])


def _rows_of(characters: Characters) -> list[str]:
    """Rows of single characters as text."""
    return ["".join(row) for row in characters.tolist()]


def _neighbour_top(heights: Steps) -> Steps:
    """Where a falling line must begin: just under its left neighbour; 0 beside a hole."""
    before = np.concatenate([heights[:1], heights[:-1]])
    return np.where((before > 0) & (heights > 0), before - 1, 0)


def _levels(heights: Steps, height: int, levels: str, mode: Mode) -> list[str]:
    steps = len(levels)
    ground = np.arange(height)[::-1, None] * steps
    part = np.clip(heights - ground, 0, steps)
    if mode == "line":
        part = np.where(heights - ground > steps, 0, part)
    return _rows_of(np.array([" ", *levels])[part])


def _coloured(row: str, hot: Flags, style: str, alarm_style: str) -> Line:
    if not hot.any():
        return ((row, style),)
    edges = [0, *(np.flatnonzero(hot[1:] != hot[:-1]) + 1).tolist(), len(row)]
    runs = ((a, b) for a, b in pairwise(edges) if b > a)
    return tuple((row[a:b], alarm_style if hot[a] else style) for a, b in runs)


def spark(values: Values, width: int, lo: float, hi: float, glyphs: Glyphs) -> str:
    """One row of a chart as text; see `chart`."""
    return sparks(np.asarray(values, dtype=np.float64)[None], width, lo, hi, glyphs)[0]


def sparks(values: Floats, width: int, lo: float, hi: float, glyphs: Glyphs) -> list[str]:
    """One row of a chart for each of many series, drawn in one go; see `chart`.

    Args:
        values: shape (series, n), NaN where missing.
        width: cells of each.
        lo: value at the lower edge.
        hi: value at the upper edge.
        glyphs: the characters.
    """
    count = len(values)
    if width <= 0 or not count:
        return [""] * count
    steps = 4 if glyphs.dots else len(glyphs.levels)
    sampled = resample(values, width * glyphs.columns_per_cell)
    heights = _heights(fractions(sampled, lo, hi), steps).reshape(-1)
    draw = _braille(heights, 1, "area") if glyphs.dots else _levels(heights, 1, glyphs.levels, "area")
    return [draw[0][place * width : (place + 1) * width] for place in range(count)]


def bar(fraction: float, width: int, glyphs: Glyphs, style: str = "series0") -> Line:
    """A bar filled from the left; the rest is track. A missing fraction (NaN) is an empty row of "?".

    Anything above zero shows at least the smallest part, and only a full bar shows no track.
    """
    if width <= 0:
        return ()
    if fraction != fraction:  # NaN
        return ((glyphs.unknown * width, "dim"),)
    parts = len(glyphs.bar_parts)
    total = width * parts
    filled = round(min(max(fraction, 0.0), 1.0) * total)
    if fraction > 0:
        filled = max(filled, 1)
    if fraction < 1:
        filled = min(filled, total - 1)
    whole, rest = divmod(filled, parts)
    text = glyphs.bar_parts[-1] * whole + (glyphs.bar_parts[rest - 1] if rest else "")
    spans: tuple[Span, ...] = ((text, style), (glyphs.track * (width - len(text)), "dim"))
    return tuple(span for span in spans if span[0])


def strip(shares: Sequence[float], glyphs: Glyphs) -> str:
    """One cell per value 0..1: idle for a measured zero, unknown for NaN, else one of the levels."""
    return "".join(_strip_cells(shares, glyphs))


def _strip_cells(shares: Sequence[float], glyphs: Glyphs) -> Iterator[str]:
    top = len(glyphs.levels)
    for share in shares:
        if share != share:  # NaN
            yield glyphs.unknown
        elif share <= 0:
            yield glyphs.idle
        else:
            yield glyphs.levels[min(int(min(share, 1.0) * top), top - 1)]
