"""Keeps probes whose hits are many within a budget: on all the time while it suffices, else in bursts.

Nothing is extrapolated. While the probes are off, what they count is unknown and is shown so. One budget is for all
groups of a collector together: `divided` says what each may spend.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Generic, TypeVar

MAX_EVERY = 60
"""The longest cycle, in intervals: once a minute at 1 s. Beyond `MAX_EVERY` budgets (240,000 launches a second of the
cheap kind at the default budget) the budget is exceeded, so that the burst is not put off for ever."""

Group = TypeVar("Group")
_SLACK = 1 + 1e-9
"""A group that is allowed exactly what it takes must not fail by rounding."""


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

    def allow(self, budget_pct: float) -> None:
        """Change the budget, in percent of one core: from the next measurement on."""
        self._budget = budget_pct / 100

    def measured(self, hits: int, dt_ns: int, hit_ns: int) -> None:
        """The probes were on throughout an interval of `dt_ns` and were hit so often: decide how to go on."""
        share = hits * hit_ns / dt_ns
        whole = (hits + self._around) * hit_ns / dt_ns
        self.every = 1 if share <= self._budget * _SLACK else self._cycle(whole)
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


class Budget(Generic[Group]):
    """One budget for several groups of probes: each has its part, and what it does not need goes to the others.

    Args:
        budget_pct: what all of them may cost together, in percent of one core.
        parts: what is due to each, in any unit.
    """

    def __init__(self, budget_pct: float, parts: Mapping[Group, float]) -> None:
        self._budget_pct, self._parts = budget_pct, parts
        self._wants_pct: dict[Group, float] = dict.fromkeys(parts, 0.0)

    def saw(self, group: Group, hits: int, dt_ns: int, hit_ns: int) -> None:
        """Its probes were on throughout `dt_ns` and were hit so often: what it would cost were it always on."""
        self._wants_pct[group] = 100 * hits * hit_ns / dt_ns

    def allowed_pct(self, group: Group) -> float:
        """What it may spend, in percent of one core, when the others are as they were last seen."""
        return divided(self._budget_pct, self._wants_pct, self._parts)[group]


def divided(
    budget_pct: float, wants_pct: Mapping[Group, float], parts: Mapping[Group, float]
) -> dict[Group, float]:
    """Divide a budget by fixed parts; what a group does not want goes to those that want more.

    Args:
        budget_pct: of all groups together.
        wants_pct: what each would cost were it always on.
        parts: what is due to each, in any unit.

    Returns:
        What each may spend, in percent of one core; together the budget.
    """
    allowed: dict[Group, float] = {}
    others, left = dict(parts), budget_pct
    while others:
        whole = sum(others.values())
        due = {group: left * part / whole for group, part in others.items()}
        modest = [group for group in others if wants_pct[group] < due[group]]
        if len(modest) in (0, len(others)):
            return {**allowed, **due}
        for group in modest:
            allowed[group] = wants_pct[group]
            left -= wants_pct[group]
            del others[group]
    return allowed
