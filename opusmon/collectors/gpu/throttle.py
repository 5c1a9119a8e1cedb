"""Clocks event reasons: why a GPU runs slower than it could."""

from __future__ import annotations

NAMES = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal limit",
    0x40: "hardware thermal limit",
    0x80: "external power brake",
    0x100: "display clock setting",
}
"""Bit -> name, from the nvmlClocksEventReasons constants of nvml.h."""

HARMLESS = 0x1 | 0x2
"""Idle and application clocks: chosen, not imposed; they are no events."""


def names(mask: int) -> str:
    """The reasons of a mask, comma separated; an unknown bit is shown as a number."""
    bits = [1 << place for place in range(mask.bit_length()) if mask >> place & 1]
    return ", ".join(NAMES.get(bit, f"reason {bit:#x}") for bit in bits)


def changes(before: int, after: int) -> tuple[int, int]:
    """Bits that came on and bits that went off, without the harmless ones."""
    changed = (before ^ after) & ~HARMLESS
    return changed & after, changed & before
