"""Rates of cumulative counters."""

from __future__ import annotations

import math

import numpy as np

from opusmon.collectors.gpu.fields import Floats
from opusmon.collectors.gpu.limits import MAX_LINK_BPS, NO_NUMBER
from opusmon.collectors.missing import FIRST, WENT_BACK, Missing

KIB = 1024


class CounterRate:
    """Rates between two readings.

    Args:
        most: rates above this, in units per second, are refused.

    Attributes:
        dt_ns: between the last two readings.
    """

    def __init__(self, most: float = MAX_LINK_BPS) -> None:
        self.dt_ns = 0
        self._most = most
        self._values: Floats | None = None
        self._at = 0

    def update(self, values: Floats, at: int, factor: float) -> tuple[Floats, Missing | None]:
        """Rates since the last reading and why the first missing one is.

        Args:
            values: counters, NaN where missing.
            at: monotonic ns of this reading.
            factor: units per count.
        """
        before, self._values = self._values, values
        dt_ns, self._at = at - self._at, at
        self.dt_ns = 0 if before is None else dt_ns
        if before is None or dt_ns <= 0:
            return np.full(len(values), math.nan), FIRST
        rates = (values - before) * (factor * 1e9 / dt_ns)
        back = rates < 0
        rates[back | (rates > self._most)] = math.nan
        if back.any():
            return rates, WENT_BACK
        return rates, (NO_NUMBER if np.isnan(rates).any() else None)
