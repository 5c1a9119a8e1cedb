"""Attempts of one request put together: how long users waited who were refused at first.

A proxy sees attempts, not requests. A retry belongs to that failed attempt of the same model, label and endpoint whose
next one was due nearest to it: likely, not surely, the same request.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np

from opusmon.clock import NS
from opusmon.request_rows import ended, positive
from opusmon.schema import Rows, StringTable

Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]

CHAIN_NS = 60 * NS
"""A retry begins at most so long after the attempt before it has ended: backoff is 8 s, `retry-after` more."""
MAX_RETRIES = 4
BACKOFF_S = 0.44
"""Mean wait of the SDK before the first retry, twice that before each further one: 0.5 s x (1 - 0.25 x random)."""
SEARCHED = 8
"""Attempts looked at that are due later than the retry began."""


class _Failed:
    """Failed attempts of one kind, by the time at which their next attempt is due."""

    def __init__(self) -> None:
        self._due: list[float] = []
        self._attempts: list[tuple[float, float]] = []

    def add(self, end: float, begin: float, due: float) -> None:
        """An attempt that ended at `end`; the first one of its request began at `begin`."""
        place = bisect_right(self._due, due)
        self._due.insert(place, due)
        self._attempts.insert(place, (end, begin))

    def begin_of(self, start: float) -> float | None:
        """When the request began whose next attempt started at `start`: of the attempt that was due nearest to it."""
        place = bisect_right(self._due, start)
        near = range(max(place - 1, 0), min(place + SEARCHED, len(self._due)))
        fit = [n for n in near if 0 <= start - self._attempts[n][0] <= CHAIN_NS]
        best = min(fit, key=lambda n: abs(self._due[n] - start), default=None)
        return self._attempts[best][1] if best is not None else None


def first_starts(strings: StringTable, rows: Rows) -> Floats:
    """How long before each request its first attempt began, ns, shape (n,); 0 for what is no retry.

    Args:
        strings: the table of their texts.
        rows: requests of one source in time order, shape (n,).
    """
    waited = np.zeros(len(rows))
    fine = ended(strings, rows, "ok") | ended(strings, rows, "client_disconnect")
    took = positive(rows["e2e_ns"])
    retry = np.nan_to_num(rows["retry"].astype(np.float64), nan=0.0)
    asked_s = rows["retry_after_s"].astype(np.float64)
    failed: dict[tuple[int, ...], _Failed] = {}
    for n in np.flatnonzero((~fine | (retry > 0)) & ~np.isnan(took)).tolist():
        end, attempt = int(rows["t"][n]), int(retry[n])
        name = tuple(int(rows[field][n]) for field in ("endpoint", "model", "label"))
        start = end - float(took[n])
        before = failed[*name, attempt - 1].begin_of(start) if (*name, attempt - 1) in failed else None
        begin = start if before is None else before
        waited[n] = start - begin
        if not fine[n] and attempt < MAX_RETRIES:
            wait_s = float(asked_s[n]) if asked_s[n] > 0 else BACKOFF_S * 2**attempt
            failed.setdefault((*name, attempt), _Failed()).add(end, begin, end + wait_s * NS)
    return waited
