"""A heat map as text: a pure function from counts over time and value to lines.

Colour and the ink of the character grow together, so it reads without colour. The scale is logarithmic: one slow
request among a thousand quick ones must be seen. Time without a measurement is marked, and is not an empty cell.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from opusmon.ui.glyphs import Glyphs
from opusmon.ui.text import Line, Span
from opusmon.ui.widgets.chart import Flags, Floats, Steps, resample

LEVELS = 8
"""Steps of ink and colour, the first one is empty."""


def heatmap(grid: Floats, width: int, glyphs: Glyphs, *, top: float) -> list[Line]:
    """Draw counts, the first row of the grid at the bottom, the oldest column at the left.

    Args:
        grid: shape (lines, columns), counts of at least 0; a column of NaN was not measured. More columns than `width`
            share cells, of which the largest count is drawn.
        width: cells.
        glyphs: the characters.
        top: the count that is drawn with the most ink, over 0; more than that looks the same.

    Returns:
        As many lines as the grid has rows, of `width` cells.
    """
    lines = grid.shape[0]
    if width <= 0 or not lines:
        return [()] * lines
    cells = resample(grid, width)
    steps = levels(cells, top)
    unknown = np.isnan(cells).all(axis=0)
    drawn = [_line(row, glyphs) for row in steps[::-1]]
    if unknown.any():
        drawn[-1] = _marked(steps[0], np.asarray(unknown), glyphs)
    return drawn


def levels(counts: Floats, top: float) -> Steps:
    """The step 0 to 7 of each count; only nothing at all is 0, and only `top` and more is 7. NaN is 0."""
    known = np.where(np.isnan(counts), 0.0, counts)
    share = np.log1p(np.maximum(known, 0.0)) / np.log1p(max(top, 1e-9))
    steps = 1 + np.floor(np.minimum(share, 1.0) * (LEVELS - 2) + 1e-9).astype(np.int64)
    return np.where(known > 0, steps, 0)


def _line(row: Steps, glyphs: Glyphs) -> Line:
    """Runs of one step as one span each."""
    edges = [0, *(np.flatnonzero(row[1:] != row[:-1]) + 1).tolist(), len(row)]
    steps = row.tolist()
    return tuple(_run(steps[begin], end - begin, glyphs) for begin, end in pairwise(edges))


def _run(step: int, count: int, glyphs: Glyphs) -> Span:
    return (" " * count, "") if step == 0 else (glyphs.shades[step] * count, f"heat{step}")


def _marked(row: Steps, unknown: Flags, glyphs: Glyphs) -> Line:
    """The lowest row: cells without a measurement have the mark of a missing value."""
    return tuple(
        (glyphs.unknown, "dim") if missing else _run(step, 1, glyphs)
        for step, missing in zip(row.tolist(), unknown.tolist(), strict=True)
    )
