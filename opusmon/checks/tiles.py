"""The tile part of `check kv-layout`: bank conflicts of FP8 and BF16, worked out and, on a GPU, measured."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from opusmon.checks import banks_counter, banks_gpu
from opusmon.checks.banks import ACCESSES, SWIZZLES, Access, Tile, TileError, access, parse_tile
from opusmon.checks.banks_gpu import Timing
from opusmon.checks.nvrtc import CannotMeasure
from opusmon.checks.result import Fact, Missing, Problem, Result, Table, Value, one_line
from opusmon.checks.target import TargetError
from opusmon.checks.worker import Options, Say
from opusmon.text import counted

PADS_B = (4, 8, 16)
"""Padding of a row that is tried against conflicts."""
WINDOWS = 2
"""Windows of the hardware counter that each pattern runs for; there is one a second."""
COUNT_S = 8.0
"""Longest that it runs for them."""

_COLUMNS = ("elem", "swizzle", "access", "width_b", "wavefronts", "ideal", "conflicts")
_MEASURED = ("measured_conflicts", "measured_cycles", "ns")


@dataclass(slots=True)
class Pattern:
    """One row of the table.

    Attributes:
        tile, access: what is read, and how.
        timing: None when it was not measured.
        counted: conflicts per load by the hardware's counter; None when it was not measured.
    """

    tile: Tile
    access: Access
    timing: Timing | None = None
    counted: float | None = None

    @property
    def label(self) -> str:
        """As `fp8, swizzle none, column`."""
        return f"{self.tile.element}, swizzle {self.tile.swizzle}, {self.access.kind}"


def look(result: Result, options: Options, say: Say) -> None:
    """Add what is to be said of a tile.

    Raises:
        TargetError: the tile, or the one pattern asked for, cannot be.
    """
    patterns = _patterns(options, result)
    about = f"computed: 32 banks of 4 bytes, tile {options['tile']}"
    try:
        about = f"{about}; measured on {_measure(patterns, options, result, say)}"
    except (CannotMeasure, RuntimeError) as error:
        # torch's own, where the GPU is full or lost: what was computed stands.
        result.not_measured.append(Missing("cycles, time and conflicts of the tile", one_line(error)))
    result.basis = "; ".join(filter(None, (result.basis, about)))
    result.tables.append(_table(str(options["tile"]), patterns))
    _say_fp8(result, patterns)
    if options.get("swizzle") and options.get("access"):
        result.problems += [_problem(one) for one in patterns if one.access.conflicts]


def _patterns(options: Options, result: Result) -> list[Pattern]:
    try:
        rows, cols = parse_tile(str(options["tile"]))
    except TileError as error:
        raise TargetError(str(error)) from error
    found, refused = [], []
    for element in options.get("elem") or ("bf16", "fp8"):
        for swizzle in [options["swizzle"]] if options.get("swizzle") else SWIZZLES:
            for kind in [options["access"]] if options.get("access") else ACCESSES:
                try:
                    pad_b = int(options.get("pad") or 0) if swizzle == "none" or options.get("swizzle") else 0
                    tile = Tile(rows, cols, element, swizzle, pad_b)
                    found.append(Pattern(tile, access(tile, kind, int(options.get("width") or 0))))
                except TileError as error:
                    refused.append(Missing(f"{element}, swizzle {swizzle}, {kind}", str(error)))
    if not found:
        raise TargetError(refused[0].why)
    result.not_measured += refused
    return found


def _measure(patterns: Sequence[Pattern], options: Options, result: Result, say: Say) -> str:
    """Time each pattern, then count its conflicts; returns the device."""
    gpu = banks_gpu.Gpu()
    for one in patterns:
        say(f"timing {one.label}")
        try:
            one.timing = gpu.measure(one.access)
        except CannotMeasure as error:
            result.not_measured.append(Missing(f"cycles of {one.label}", str(error)))
    timed = [one for one in patterns if one.timing is not None]
    if not options.get("recorder"):
        result.not_measured.append(Missing("conflicts by the hardware counter", "not asked for"))
        return gpu.describe()
    try:
        say("starting the collector of hardware counters")
        with banks_counter.counting(options["recorder"]) as counter:
            _count(timed, gpu, counter, result, say)
    except CannotMeasure as error:
        result.not_measured.append(Missing("conflicts by the hardware counter", str(error)))
    return gpu.describe()


def _count(
    patterns: Sequence[Pattern],
    gpu: banks_gpu.Gpu,
    counter: banks_counter.Counter,
    result: Result,
    say: Say,
) -> None:
    index = gpu.index
    known: dict[tuple[bool, int, tuple[int, ...]], float | None] = {}
    for one in patterns:
        same = (one.access.kind == "ldmatrix", one.access.width_b, one.access.addresses)
        if same not in known:
            say(f"counting conflicts of {one.label}")
            busy = gpu.keep_busy(
                one.access, lambda begin_ns: counter.windows(begin_ns, index) >= WINDOWS, COUNT_S
            )
            known[same] = counter.per_load(busy, index)
        one.counted = known[same]
        if one.counted is None:
            result.not_measured.append(
                Missing(f"counted conflicts of {one.label}", "no window of the counter lay within the run")
            )


def _table(tile: str, patterns: Sequence[Pattern]) -> Table:
    measured = any(one.timing is not None for one in patterns)
    rows: list[tuple[Value, ...]] = []
    for one in patterns:
        load = one.access
        row: tuple[Value, ...] = (
            one.tile.element,
            one.tile.swizzle,
            load.kind,
            load.width_b,
            load.wavefronts,
            load.ideal,
            load.conflicts,
        )
        if measured:
            timing = one.timing
            row += (one.counted, timing.cycles if timing else None, timing.ns if timing else None)
        rows.append(row)
    columns = (*_COLUMNS, *_MEASURED) if measured else _COLUMNS
    return Table(f"one load of a warp from a tile of {tile} in shared memory", columns, tuple(rows))


def _say_fp8(result: Result, patterns: Sequence[Pattern]) -> None:
    """The same pattern for both elements, side by side."""
    by_element = {(one.tile.element, one.tile.swizzle, one.access.kind): one for one in patterns}
    for (element, swizzle, kind), bf16 in by_element.items():
        fp8 = by_element.get(("fp8", swizzle, kind))
        if element != "bf16" or fp8 is None or fp8.access.wavefronts == bf16.access.wavefronts:
            continue
        result.facts.append(
            Fact(
                f"wavefronts_{kind}_{swizzle}",
                fp8.access.wavefronts,
                f"{kind}, swizzle {swizzle}: {fp8.access.wavefronts} wavefronts a load with FP8 and "
                f"{bf16.access.wavefronts} with BF16 (rows of {fp8.tile.row_b} and {bf16.tile.row_b} bytes)",
            )
        )
    if any(one.tile.element == "fp8" for one in patterns):
        result.facts.append(
            Fact(
                "ldmatrix_unit_b",
                2,
                "ldmatrix and its .trans move units of 16 bits: after it, transposed FP8 still needs bytes swapped "
                "between registers",
            )
        )


def _problem(one: Pattern) -> Problem:
    load = one.access
    return Problem(
        "bank_conflict",
        f"{one.label}: {load.wavefronts} wavefronts a load where {load.ideal} would do",
        change=_better(one),
        facts={"wavefronts": load.wavefronts, "ideal": load.ideal, "conflicts": load.conflicts},
    )


def _better(one: Pattern) -> str:
    """The swizzle or padding under which the same load takes the fewest wavefronts, of equals the widest; "" when none takes fewer."""
    ways: list[tuple[str, dict[str, Any]]] = [
        (f"swizzle {name}", {"swizzle": name, "pad_b": 0}) for name in reversed(SWIZZLES) if name != "none"
    ]
    ways += [(f"{pad_b} bytes of padding a row", {"swizzle": "none", "pad_b": pad_b}) for pad_b in PADS_B]
    best, change = one.access.wavefronts, ""
    for words, how in ways:
        with contextlib.suppress(TileError):
            found = access(replace(one.tile, **how), one.access.kind, one.access.width_b).wavefronts
            if found < best:
                best, change = found, f"{words}: {counted(found, 'wavefront')} a load"
    return change
