"""The door: what a driver may say and still enter a row."""

from __future__ import annotations

import math

from opusmon.collectors.missing import Missing

NOT_AVAILABLE = frozenset({0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})
"""NVML_VALUE_NOT_AVAILABLE for 32 and 64 bits: "no value", written as a number."""

MAX_TEMP_C = 200.0
MAX_POWER_MW = 20e6
MAX_CLOCK_MHZ = 100_000.0
MAX_BPS = 1e14
MAX_LINK_BPS = 1e12
PCT_SLACK = 1.0
"""Percentages are rates over windows whose ends jitter: up to 101 is 100, beyond is nonsense."""

REFUSED = Missing("error", "the driver gave a value out of range; it was refused")
UNAVAILABLE = Missing("unavailable", "the driver answers 'not available' in place of a value")
NO_NUMBER = Missing("unavailable", "the driver gave no number for this window")


def bounded(value: float | Missing, high: float, low: float = 0.0) -> float | Missing:
    """`value` when it is a number in [low, high], otherwise why it is refused."""
    if isinstance(value, Missing):
        return value
    if value in NOT_AVAILABLE:
        return UNAVAILABLE
    if not math.isfinite(value):
        return NO_NUMBER
    return float(value) if low <= value <= high else REFUSED


def percent(value: float | Missing) -> float | Missing:
    """`value` as a percentage in [0, 100]; over 101 and below 0 are refused."""
    checked = bounded(value, 100.0 + PCT_SLACK)
    return checked if isinstance(checked, Missing) else min(checked, 100.0)


def scaled(value: float | Missing, factor: float) -> float | Missing:
    """`value` x `factor`."""
    return value if isinstance(value, Missing) else value * factor
