"""Numbers as text of a fixed width, with their units, so that numbers in one column line up.

NaN and infinities read "--": missing, never zero. A number too large for its column reads as a row of "#",
which nobody takes for a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MISSING = "--"

GIB = 1024**3
GB = 1e9
"""Rates are decimal, as the vendors' data sheets give them (an H200's 4.8 TB/s); memory is binary."""

_DURATIONS = (
    (86_400.0, "d"),
    (3_600.0, "h"),
    (60.0, "m"),
    (1.0, "s"),
    (1e-3, "ms"),
    (1e-6, "us"),
    (1e-9, "ns"),
)
_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float, width: int, decimals: int = 0, missing: str = MISSING) -> str:
    """A number, right-aligned in `width` cells.

    Args:
        value: NaN reads as `missing`.
        width: cells; 0 for no padding.
        decimals: digits after the point.
        missing: what to print for NaN.
    """
    if not math.isfinite(value):
        return missing.rjust(width)
    text = f"{value:.{decimals}f}"
    if text.startswith("-") and not text.strip("-0."):
        text = text[1:]
    return text.rjust(width) if not width or len(text) <= width else "#" * width


def percent(value: float, width: int = 3, missing: str = MISSING) -> str:
    """`" 71 %"`: whole per cent, `width` cells before the unit."""
    return f"{number(value, width, missing=missing)} %"


def gib(value_b: float, width: int = 5, decimals: int = 1) -> str:
    """Bytes as GiB without the unit: `" 97.9"`."""
    return number(value_b / GIB, width, decimals)


def gib_pair(used_b: float, total_b: float, width: int = 7) -> str:
    """`" 98/140 GiB"`: used of total, whole GiB, `width` cells before the unit."""
    pair = f"{number(used_b / GIB, 0)}/{number(total_b / GIB, 0)}"
    return f"{pair.rjust(width)} GiB"


def size(value_b: float) -> str:
    """Bytes with a binary unit, not padded: `"95.1 GiB"`, `"512 B"`."""
    if not math.isfinite(value_b):
        return MISSING
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(value_b) >= 1024**power:
            return f"{value_b / 1024**power:.1f} {unit}"
    return f"{value_b:.0f} B"


def gb_rate(value_bps: float, width: int = 5, decimals: int = 1) -> str:
    """Bytes per second as decimal GB/s without the unit: `" 99.8"`."""
    return number(value_bps / GB, width, decimals)


def rate(value_bps: float) -> str:
    """Bytes per second with a decimal unit, not padded: `"3.41 TB/s"`, `"99.8 GB/s"`, `"0 B/s"`."""
    if not math.isfinite(value_bps):
        return MISSING
    for scale, letter in _SCALES:
        if abs(value_bps) >= scale:
            return f"{value_bps / scale:.{2 if letter == 'T' else 1}f} {letter}B/s"
    return f"{value_bps:.0f} B/s"


def watts(value_mw: float, width: int = 4) -> str:
    """Milliwatts as whole watts: `" 612 W"`."""
    return f"{number(value_mw / 1000, width)} W"


def celsius(value_c: float, width: int = 3) -> str:
    """`" 63 C"`."""
    return f"{number(value_c, width)} C"


def megahertz(value_mhz: float, width: int = 4) -> str:
    """`"1830 MHz"`."""
    return f"{number(value_mhz, width)} MHz"


def duration(ns: float) -> str:
    """Nanoseconds in the unit that leaves one to three digits: `"84.2 ms"`, `"3.1 s"`, `"5 m"`, `"2.5 h"`."""
    if not math.isfinite(ns):
        return MISSING
    seconds = ns / 1e9
    if seconds == 0:
        return "0 s"
    scale, unit = next(((s, u) for s, u in _DURATIONS if abs(seconds) >= s), _DURATIONS[-1])
    return f"{seconds / scale:.1f}".removesuffix(".0") + f" {unit}"


def span(ns: int) -> str:
    """A span as typed by people, exact to the second: `"5m"`, `"1h30m"`, `"500ms"`."""
    if ns < 1_000_000_000:
        return f"{ns // 1_000_000}ms"
    seconds = ns // 1_000_000_000
    parts = (
        (seconds // 86_400, "d"),
        (seconds // 3_600 % 24, "h"),
        (seconds // 60 % 60, "m"),
        (seconds % 60, "s"),
    )
    return "".join(f"{count}{unit}" for count, unit in parts if count)


def list_some(numbers: Sequence[int], most: int = 4) -> str:
    """`"7 3 12"`, or `"1 2 3 4 +14"` when there are more than `most`."""
    shown = " ".join(map(str, numbers[:most]))
    return shown if len(numbers) <= most else f"{shown} +{len(numbers) - most}"
