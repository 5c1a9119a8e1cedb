"""A row being filled, and the growth of counters between two readings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from opusmon.collectors.missing import FIRST, WENT_BACK, Missing
from opusmon.collectors.notes import Key
from opusmon.schema import Channel

Answer = float | Missing
"""A number, or why there is none."""


@dataclass(slots=True)
class Row:
    """Numbers of one row by field name, and why the others are missing."""

    values: dict[str, float] = field(default_factory=dict)
    missing: dict[str, Missing] = field(default_factory=dict)

    def put(self, name: str, answer: Answer) -> None:
        """Set a field, or say why it has no value."""
        if isinstance(answer, Missing):
            self.missing[name] = answer
        else:
            self.values[name] = answer

    def put_all(self, names: Iterable[str], why: Missing) -> None:
        """None of these fields has a value."""
        self.missing.update(dict.fromkeys(names, why))

    def record(self, columns: Iterable[str]) -> list[float]:
        """The values in column order, NaN where there is none."""
        return [self.values.get(name, math.nan) for name in columns]

    def reasons(self, channel: Channel, scope: str = "") -> dict[Key, Missing]:
        """`missing` with status keys."""
        return {(channel.name, name, scope): why for name, why in self.missing.items()}


class Rates:
    """Growth per second of named counters. A counter that went back begins a new series: it has no rate once."""

    __slots__ = ("_at", "_before")

    def __init__(self) -> None:
        self._before: Mapping[str, int] = {}
        self._at = 0

    def update(self, counters: Mapping[str, int], at: int) -> dict[str, Answer]:
        """Take a reading.

        Args:
            counters: cumulative numbers by name.
            at: monotonic ns of the reading.

        Returns:
            The rate of each counter since the reading before, or why it has none.
        """
        before, self._before = self._before, counters
        passed_ns, self._at = at - self._at, at
        return {name: _rate(before.get(name), now, passed_ns) for name, now in counters.items()}


def _rate(before: int | None, now: int, passed_ns: int) -> Answer:
    if before is None or passed_ns <= 0:
        return FIRST
    return WENT_BACK if now < before else (now - before) * 1e9 / passed_ns


def scaled(answer: Answer, factor: float) -> Answer:
    """A number in other units; a missing one stays missing."""
    return answer if isinstance(answer, Missing) else answer * factor


def total(answers: Iterable[Answer]) -> Answer:
    """Sum of those that have begun; missing when one went back, and when none has begun."""
    out, begun, any_at_all = 0.0, False, False
    for answer in answers:
        any_at_all = True
        if not isinstance(answer, Missing):
            out, begun = out + answer, True
        elif answer is not FIRST:
            return answer
    return out if begun or not any_at_all else FIRST
