"""What rows of channel `request` mean: latencies that count, size classes, how they ended. Pure numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from opusmon.schema import Rows, StringTable

Array = np.ndarray[tuple[Any, ...], np.dtype[Any]]
Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]
Ints = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]
Flags = np.ndarray[tuple[Any, ...], np.dtype[np.bool_]]

MAX_NS = 1e18
"""Thirty years: no request takes that long."""
LIMITS = ("requests", "input_tokens", "output_tokens")
"""Rate limits that answers tell: fields `limit_*` and `left_*`."""
SIZE_CLASSES = (("<1k", 1e3), ("1-4k", 4e3), ("4-16k", 16e3), ("16-64k", 64e3), (">64k", math.inf))
"""Input tokens, cache included, and the first number that is of the next class."""
UNKNOWN_SIZE = "size unknown"
BROKEN_OFF = ("client_disconnect", "monitor_stopped")
"""Outcomes of requests that the client, or the end of opusmon itself, broke off: they say nothing against the server."""


def positive(values: Array) -> Floats:
    """Numbers that can be a duration: NaN where they are negative or infinite, as in a damaged file."""
    with np.errstate(invalid="ignore"):
        numbers = values.astype(np.float64)
        return np.where((numbers >= 0) & (numbers < MAX_NS), numbers, np.nan)


def finished_ns(strings: StringTable, rows: Rows, field: str) -> Floats:
    """A latency of requests, NaN where the answer did not get that far: the end of a failure is no E2E."""
    values = positive(rows[f"{field}_ns"])
    if field == "e2e":
        values[~ended(strings, rows, "ok")] = np.nan
    return values


def ended(strings: StringTable, rows: Rows, outcome: str) -> Flags:
    """Which requests ended in this way, shape (n,)."""
    ids = rows["outcome"]
    return np.isin(ids, [number for number in np.unique(ids).tolist() if strings.text(number) == outcome])


def size_class(tokens: Floats) -> Array:
    """Number of the size class of each input, one more than there are classes where it is not known."""
    edges = np.array([limit for _, limit in SIZE_CLASSES[:-1]])
    return np.where(np.isnan(tokens), len(SIZE_CLASSES), np.searchsorted(edges, tokens, side="right"))


def status_codes(status: Array) -> Ints:
    """HTTP status of each request as a whole number, 0 where there is none."""
    known = (status >= 100) & (status < 1000)
    return np.where(known, status, 0).astype(np.int64)
