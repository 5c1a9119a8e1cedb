"""One threshold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limit:
    """A threshold of a rule.

    Attributes:
        value: in `unit`.
        unit: "" for none.
        why: where the number is from: a specification, a measurement, a published practice.
    """

    value: float
    unit: str
    why: str
