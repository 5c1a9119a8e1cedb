"""Keeps probes whose hits are many within a budget: on all the time while it suffices, else in bursts.

Nothing is extrapolated. While the probes are off, what they count is unknown and is shown so.
"""

from __future__ import annotations

import math

CHEAP_HIT_NS, DEAR_HIT_NS = 1_500, 8_000
"""What a counted hit costs the thread that makes it: measured 1.2-1.7 us per launch on H200 hosts where the kernel
emulates the first instruction, 7.7 us where it has to single-step it."""

MAX_EVERY = 60
"""The longest cycle, in intervals: once a minute at 1 s."""


class Bursts:
    """Decides, once per interval, whether a group of probes is to be on in the next one.

    Args:
        budget_pct: share of one core that the hits may cost, in percent.
    """

    def __init__(self, budget_pct: float) -> None:
        self._budget = budget_pct / 100
        self.every = 1
        """On for one interval of so many; 1 is always on."""
        self.off_left = 0
        """Whole intervals still to pass with the probes off."""
        self._around = 0
        """Hits outside the interval that counts, in this cycle: while probes are being set and removed."""

    @property
    def wanted(self) -> bool:
        """Whether the probes are to be on now."""
        return self.off_left == 0

    @property
    def soon(self) -> bool:
        """The interval that begins now is the last one with the probes off: set them before it ends."""
        return self.off_left == 1

    def measured(self, hits: int, dt_ns: int, hit_ns: int) -> None:
        """The probes were on throughout an interval of `dt_ns` and were hit so often: decide how to go on."""
        share = hits * hit_ns / dt_ns
        whole = (hits + self._around) * hit_ns / dt_ns
        self.every = 1 if share <= self._budget else self._cycle(whole)
        self.off_left = self.every - 1
        self._around = 0

    def _cycle(self, share: float) -> int:
        if share >= self._budget * MAX_EVERY:
            return MAX_EVERY
        return max(2, math.ceil(share / self._budget))

    def passed(self, hits: int = 0) -> None:
        """An interval with the probes off, or not on throughout, has ended; there were `hits` all the same."""
        self._around += hits
        self.off_left = max(0, self.off_left - 1)
