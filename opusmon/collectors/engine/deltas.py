"""What counters gained between two scrapes, and whether the engine was started anew in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from opusmon.collectors.engine.kinds import START_TIME
from opusmon.collectors.engine.page import Labels, Samples

START_TOLERANCE_S = 2.0
"""A start time made from the boot time moves with the clock; a restart takes longer than this."""
_KEPT = 20_000
"""So many series are remembered at least; above it those that are gone from the page are forgotten."""


@dataclass(frozen=True, slots=True)
class Step:
    """From one scrape to the next.

    Attributes:
        first: there was no scrape before.
        restarted: counters went back, or say that they were made anew; nothing is known of this window.
        gains: growth of the samples on the page; empty in those two cases.
    """

    first: bool = False
    restarted: bool = False
    gains: Samples = field(default_factory=dict)


class Deltas:
    """Remembers the last value of each counter of one engine.

    A series that was not there before began at 0, because engines make the series of a label when they first need
    it. One that is missing from a page is remembered, so that its return is no gift.

    Args:
        counters: sample names that only grow; `_created` and the start of the process are always looked at.
    """

    def __init__(self, counters: frozenset[str]) -> None:
        self._counters = counters
        self._last: dict[tuple[str, Labels], float] = {}
        self._begun = False

    def advance(self, samples: Samples) -> Step:
        """Compare with the scrape before.

        Args:
            samples: those of the page, gauges included; the growth of a gauge means nothing.
        """
        first, restarted = not self._begun, self._restarted(samples)
        gains = {} if first or restarted else self._gains(samples)
        if restarted:
            self._last.clear()
        self._begun = True
        self._remember(samples)
        return Step(first, restarted and not first, gains)

    def _gains(self, samples: Samples) -> Samples:
        last = self._last
        return {
            name: {labels: value - last.get((name, labels), 0.0) for labels, value in series.items()}
            for name, series in samples.items()
        }

    def _remember(self, samples: Samples) -> None:
        now = {(name, labels): value for name, series in samples.items() for labels, value in series.items()}
        if len(self._last) > max(_KEPT, 2 * len(now)):
            self._last.clear()
        self._last.update(now)

    def _restarted(self, samples: Samples) -> bool:
        return any(
            _went_back(name, before, value)
            for name, labels, value in self._watched(samples)
            if (before := self._last.get((name, labels))) is not None
        )

    def _watched(self, samples: Samples) -> Iterator[tuple[str, Labels, float]]:
        """Samples that only grow, or only change when made anew."""
        for name, series in samples.items():
            if name in self._counters or name == START_TIME or name.endswith("_created"):
                for labels, value in series.items():
                    yield name, labels, value


def _went_back(name: str, before: float, value: float) -> bool:
    if name == START_TIME:
        return abs(value - before) > START_TOLERANCE_S
    if name.endswith("_created"):
        return value != before
    return value < before
