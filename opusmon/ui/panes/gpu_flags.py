"""What is wrong with a GPU, as flags: a severity with its letters, and a word or two."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from opusmon.ui.text import Line, Span, join, line_cells
from opusmon.ui.units import list_some, number

WARN = 1
BAD = 2
_LETTERS = {WARN: ("!", "warn"), BAD: ("!!", "bad")}

HBM_BW_HIGH_PCT = 95.0
"""Copy kernels top out at 90-95 % of the theoretical bandwidth: above it, memory is the limit."""
HBM_USED_HIGH_PCT = 95.0
"""Engines reserve up to 90-95 % on purpose; above it an allocation is likely to fail."""
TEMP_HIGH_C = 85.0
"""Data-centre parts give 85-87 C as the highest operating temperature of the core, before they slow down."""
MEM_TEMP_HIGH_C = 95.0
"""The highest operating temperature of HBM that the same parts give."""

THROTTLES: tuple[tuple[int, str, int], ...] = (
    (0x08, "hw-slow", BAD),
    (0x40, "hw-therm", BAD),
    (0x80, "pwr-brake", BAD),
    (0x20, "sw-therm", WARN),
    (0x04, "pwr-cap", WARN),
    (0x10, "sync", WARN),
    (0x02, "app-clk", WARN),
    (0x100, "disp-clk", WARN),
)
"""NVML clocks event reasons (`nvmlClocksEventReason*` in nvml.h) with our word for them. 0x01, idle, is not one."""

IDLE_BIT = 0x01
_HW_SLOW_BIT = 0x08
_HW_CAUSES = 0xC0
_KNOWN_BITS = IDLE_BIT | sum(bit for bit, _, _ in THROTTLES)


@dataclass(frozen=True, slots=True)
class Flag:
    """One thing that is wrong.

    Attributes:
        severity: `WARN` or `BAD`.
        words: short.
    """

    severity: int
    words: str


def throttle_flags(mask: float) -> Iterator[Flag]:
    """Flags of a clocks event reason mask, worst first; NaN and "idle" give none."""
    if not math.isfinite(mask) or mask < 0:
        return
    bits = int(mask)
    if bits & _HW_CAUSES:
        bits &= ~_HW_SLOW_BIT  # the driver sets it together with its cause
    for bit, words, severity in THROTTLES:
        if bits & bit:
            yield Flag(severity, words)
    if bits & ~_KNOWN_BITS:
        yield Flag(WARN, f"throttle {bits & ~_KNOWN_BITS:#x}")


def gpu_flags(row: Mapping[str, float], xids: Sequence[int] = ()) -> Iterator[Flag]:
    """Flags of a `gpu` row, and of the XIDs in sight."""
    if xids:
        yield Flag(BAD, f"xid {list_some(xids, 2)}")
    yield from _memory_faults(row)
    yield from throttle_flags(row.get("throttle_mask", math.nan))
    yield from _over(row, "temp_c", TEMP_HIGH_C, "hot", "C")
    yield from _over(row, "mem_temp_c", MEM_TEMP_HIGH_C, "hbm hot", "C")
    if hbm_used_pct(row) > HBM_USED_HIGH_PCT:
        yield Flag(WARN, f"hbm {number(hbm_used_pct(row), 0)} %")
    yield from _over(row, "hbm_bw_pct", HBM_BW_HIGH_PCT, "bw", "%")


def hbm_used_pct(row: Mapping[str, float]) -> float:
    """Memory in use, per cent of the total; NaN where either is missing or the total is 0."""
    total = row.get("mem_total_b", math.nan)
    return 100.0 * row.get("mem_used_b", math.nan) / total if total > 0 else math.nan


def flag_spans(flag: Flag) -> Line:
    """A flag with its letters: `!! link 7 down`."""
    letters, style = _LETTERS[flag.severity]
    return ((f"{letters} {flag.words}", style),)


def flags_line(flags: Sequence[Flag], width: int) -> Line:
    """As many flags as fit, worst first, and how many more there are: `!! link 7 down  ! pwr-cap  +2`."""
    for count in range(len(flags), 0, -1):
        rest: Span | None = (f"+{len(flags) - count}", "warn") if count < len(flags) else None
        line = join([*map(flag_spans, flags[:count]), (rest,) if rest else ()])
        if line_cells(line) <= width:
            return line
    if not flags:
        return ()
    letters, style = _LETTERS[flags[0].severity]
    return ((f"{letters} {flags[0].words}"[: max(width, 0)], style),)


def _memory_faults(row: Mapping[str, float]) -> Iterator[Flag]:
    if row.get("remap_failed", 0.0) > 0:
        yield Flag(BAD, "row remap failed")
    if row.get("ecc_uncorrected", 0.0) > 0:
        yield Flag(BAD, f"ecc {number(row['ecc_uncorrected'], 0)} uncorrected")
    if row.get("remap_pending", 0.0) > 0:
        yield Flag(WARN, "row remap needs reset")
    if row.get("remapped_uncorrectable", 0.0) > 0:
        yield Flag(WARN, f"{number(row['remapped_uncorrectable'], 0)} rows remapped")
    if row.get("ecc_corrected", 0.0) > 0:
        yield Flag(WARN, f"ecc {number(row['ecc_corrected'], 0)} corrected")


def _over(row: Mapping[str, float], field: str, limit: float, words: str, unit: str) -> Iterator[Flag]:
    value = row.get(field, math.nan)
    if value > limit:
        yield Flag(WARN, f"{words} {number(value, 0)} {unit}")
