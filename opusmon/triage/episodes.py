"""When a condition held: with so many samples in a row, hysteresis, and gaps that end it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Times = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]
Flags = np.ndarray[tuple[Any, ...], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Episode:
    """A stretch of samples over which a condition held.

    Attributes:
        first: index of the first sample of it.
        last: index of the last one.
        open: it had not ended by the last sample there is.
    """

    first: int
    last: int
    open: bool

    @property
    def slice(self) -> slice:
        """For indexing the samples."""
        return slice(self.first, self.last + 1)


def episodes(t: Times, on: Flags, off: Flags | None = None, *, count: int = 1, gap_ns: int) -> list[Episode]:
    """Stretches that begin with `count` samples in a row that are on, and go on until one is off.

    A sample that is neither on nor off (between the two thresholds, or missing) neither begins nor ends one, but
    breaks the row at its beginning.

    Args:
        t: times of the samples, ascending, shape (n,), ns.
        on: the condition begins to hold, shape (n,).
        off: it no longer holds; by default wherever it is not on.
        count: samples in a row that it takes to begin.
        gap_ns: without a sample for longer than this nothing is known, and it has ended.
    """
    ends = ~on if off is None else off
    found: list[Episode] = []
    row = 0
    first = last = -1
    for n in range(len(t)):
        if n and t[n] - t[n - 1] > gap_ns:
            if first >= 0:
                found.append(Episode(first, last, open=False))
            first, row = -1, 0
        row = row + 1 if on[n] else 0
        if first >= 0:
            if ends[n]:
                found.append(Episode(first, last, open=False))
                first = -1
            elif on[n]:
                last = n
        elif row >= count:
            first, last = n - count + 1, n
    if first >= 0:
        found.append(Episode(first, last, open=True))
    return found
