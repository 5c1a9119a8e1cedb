"""How bad a stall is, and how bad the host's figures are: thresholds in two tables, each with its reason.

What the thresholds lean on:

* MLPerf Inference 5.0 allows 40 ms per output token (interactive) and 200 ms (server), and 2 s to the first token,
  at p99, for Llama 2 70B. These are what readers feel, so they bound waits.
* A decode step takes 10 to 20 ms. A thread that launches and is kept from it for a whole step leaves the GPU
  without work; for ten steps is an outage of its own.
* `cuMemAlloc`, `cuMemFree` and module loading wait for the device and belong before serving, so each one counts.
* A thread with nothing to do sleeps, also in futex: such stalls never become critical by their length.

The collector's own threshold (5 ms unless told otherwise) decides what becomes a row at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from opusmon.schema import Rows, StringTable

Levels = np.ndarray[tuple[Any, ...], np.dtype[np.int8]]
Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]
Ids = np.ndarray[tuple[Any, ...], np.dtype[np.integer]]

NONE, NOTE, WARN, CRIT = range(4)
"""Nothing of note; worth knowing; needs a look; needs a person."""

_MS = 1e6
_S = 1e9


@dataclass(frozen=True, slots=True)
class StallLimits:
    """From where on a kind of stall is how bad.

    Attributes:
        note: least value of a `NOTE`, in ns or, with `counted`, rows folded into one.
        warn: likewise of a `WARN`.
        crit: likewise of a `CRIT`.
        why: the reason of the thresholds, to be shown.
        least: level of every such stall, whatever its value.
        failed: level of one whose code says that the call failed.
        success: the code of success.
        most: level that no value leads beyond.
        counted: the value is field `count`, not `dur_ns`.
        summed: of several stalls folded into one row the sum counts, not the mean: it was taken from one thread in
            one interval.
    """

    note: float
    warn: float
    crit: float
    why: str
    least: int = NONE
    failed: int = CRIT
    success: float = 0.0
    most: int = CRIT
    counted: bool = False
    summed: bool = False


_STEP_WHY = "a decode step is 10-20 ms; its GPU runs out of work"
_SYNC_WHY = "it waits for the device; its place is before serving"

STALL_LIMITS: Mapping[str, StallLimits] = {
    "wait": StallLimits(
        5 * _MS,
        40 * _MS,
        200 * _MS,
        "MLPerf per token: 40 ms interactive, 200 ms server",
    ),
    "off_cpu": StallLimits(5 * _MS, 10 * _MS, 100 * _MS, _STEP_WHY),
    "run_queue": StallLimits(5 * _MS, 10 * _MS, 100 * _MS, _STEP_WHY),
    "futex": StallLimits(
        5 * _MS, 100 * _MS, inf, "a lock held elsewhere, or a thread with nothing to do", most=WARN
    ),
    # A minor fault costs about a microsecond with its page: 1 % and 10 % of a core.
    "page_faults": StallLimits(
        0, 10_000, 100_000, "a fault takes about 1 us: 10,000 are 10 ms of work", NOTE, counted=True
    ),
    # torch frees its caches and tries again when memory is out: a warning, not yet a failure.
    "alloc": StallLimits(0, 10 * _MS, 100 * _MS, _SYNC_WHY, NOTE, failed=WARN, summed=True),
    "free": StallLimits(0, 10 * _MS, 100 * _MS, _SYNC_WHY, NOTE, summed=True),
    "module": StallLimits(0, 10 * _MS, 100 * _MS, _SYNC_WHY, NOTE, summed=True),
    "jit": StallLimits(
        0, 100 * _MS, 2 * _S, "compiling while serving; MLPerf: 2 s to a first token", NOTE, WARN
    ),
    "capture": StallLimits(inf, inf, inf, "a capture that fails leaves the engine without its graph"),
    "init_in_capture": StallLimits(0, 0, inf, "it can break the capture", WARN),
    # A lost connection is tried again by every client; 5 s is the usual limit for connecting.
    "tls": StallLimits(0, 1 * _S, 5 * _S, "clients give a connection about 5 s", NOTE, WARN, success=1.0),
}
"""By kind of stall, as in channel `stall`."""

OTHER_LIMITS = StallLimits(5 * _MS, 40 * _MS, 200 * _MS, "a kind that this version does not know")

REASON_CAPS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (NOTE, ("sleep", "waiting for events", "waiting for a signal")),
    (WARN, ("lock",)),
)
"""The most that a reason beginning with these words can be: what the thread itself wished for is a note; a lock
may be waited for by a thread with nothing to do."""

_LUT_LIMIT = 1 << 20


def distinct(values: Ids) -> list[int]:
    """The different ids of a column, ascending; quick for the small ids that string tables give.

    Args:
        values: whole numbers >= 0, any shape.
    """
    if not values.size:
        return []
    top = int(values.max())
    if top >= _LUT_LIMIT:
        return [int(value) for value in np.unique(values)]
    seen = np.zeros(top + 1, dtype=np.bool_)
    seen[values] = True
    return [int(value) for value in np.flatnonzero(seen)]


def translate(values: Ids, table: Mapping[int, int], other: int) -> Levels:
    """Small numbers for ids.

    Args:
        values: ids, shape (n,).
        table: the number of each id, -128 to 127.
        other: the number of ids that are not in it.

    Returns:
        Shape (n,).
    """
    if not values.size or max(table, default=0) >= _LUT_LIMIT or int(values.max()) >= _LUT_LIMIT:
        out = np.full(len(values), other, dtype=np.int8)
        for number, small in table.items():
            out[values == number] = small
        return out
    lut = np.full(max(int(values.max()), max(table, default=0)) + 1, other, dtype=np.int8)
    for number, small in table.items():
        lut[number] = small
    return lut[values]


def stall_severity(rows: Rows, strings: StringTable) -> Levels:
    """The severity of stalls, `NONE` to `CRIT`, shape (n,).

    Args:
        rows: of channel `stall`, shape (n,).
        strings: the table of their texts.
    """
    known = tuple(STALL_LIMITS)
    limits = (*STALL_LIMITS.values(), OTHER_LIMITS)
    names = {number: strings.text(number) for number in distinct(rows["kind"])}
    table = {number: known.index(name) for number, name in names.items() if name in STALL_LIMITS}
    kind = translate(rows["kind"], table, len(known))
    value = _values(rows, kind, limits)
    levels = np.array([limit.least for limit in limits], np.int8)[kind]
    for level, thresholds in enumerate(zip(*((x.note, x.warn, x.crit) for x in limits), strict=True), NOTE):
        np.maximum(levels, level, out=levels, where=value >= np.array(thresholds)[kind])
    np.minimum(levels, np.array([limit.most for limit in limits], np.int8)[kind], out=levels)
    _cap_by_reason(levels, rows["reason"], strings)
    code = rows["code"]
    failed = ~np.isnan(code) & (code != np.array([limit.success for limit in limits], np.float32)[kind])
    np.maximum(levels, np.array([limit.failed for limit in limits], np.int8)[kind], out=levels, where=failed)
    return levels


def _values(rows: Rows, kind: Levels, limits: tuple[StallLimits, ...]) -> Floats:
    """What the thresholds apply to, shape (n,); `kind` is the place of each row's kind in `limits`."""
    counted = np.array([limit.counted for limit in limits])[kind]
    summed = np.array([limit.summed for limit in limits])[kind]
    return np.where(counted, rows["count"], np.where(summed, rows["dur_ns"], each_ns(rows)))


def each_ns(rows: Rows) -> Floats:
    """How long each stall took, ns, shape (n,): the mean in a row that folds several; NaN where not known."""
    count = rows["count"]
    if not (count > 1).any():
        return np.asarray(rows["dur_ns"], np.float64)
    return np.asarray(rows["dur_ns"] / np.where(count > 1, count, 1), np.float64)


def _cap_by_reason(levels: Levels, reasons: Ids, strings: StringTable) -> None:
    """Apply `REASON_CAPS` in place."""
    for number in distinct(reasons):
        words = strings.text(number).lower()
        for cap, begins in REASON_CAPS:
            if words.startswith(begins):
                np.minimum(levels, cap, out=levels, where=reasons == number)


# -- the host ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostLimits:
    """From where on a figure of the host is a `WARN` and a `CRIT`, and why."""

    warn: float
    crit: float
    why: str


_MIB = 1024**2

HOST_LIMITS: Mapping[str, HostLimits] = {
    "run_queue_per_cpu": HostLimits(
        1.5, 3.0, "over 1, tasks wait for a CPU; a single sample is up and down by one or two"
    ),
    "psi_cpu_some_pct": HostLimits(15, 40, "time in which a task that could run did not"),
    # The kernel's documentation watches for 150 ms a second, Android's low-memory killer for 70 ms.
    "psi_memory_some_pct": HostLimits(7, 15, "time in which a task waited for memory"),
    "psi_io_some_pct": HostLimits(15, 40, "time in which a task waited for storage"),
    # A throttled group stands still for the rest of its 100 ms period: a decode step, or ten, each second.
    "throttled_pct": HostLimits(1, 10, "time in which the CPU limit held the group back"),
    "cgroup_mem_pct": HostLimits(95, 99, "at 100 % the kernel reclaims, then kills"),
    "swap_bps": HostLimits(1 * _MIB, 50 * _MIB, "pages that come and go keep threads waiting"),
    "cpu_iowait_pct": HostLimits(20, 50, "CPUs idle because of storage"),
    "cpu_steal_pct": HostLimits(3, 10, "the hypervisor runs others on these CPUs"),
    "run_delay_pct": HostLimits(5, 20, "time in which the process's main thread waited for a CPU"),
}
"""By figure. Where no source is named the thresholds are this project's own choice."""


def host_severity(figure: str, value: float) -> int:
    """`NONE`, `WARN` or `CRIT` for a figure of `HOST_LIMITS`; a missing value (NaN) is `NONE`.

    Raises:
        KeyError: there is no such figure.
    """
    limits = HOST_LIMITS[figure]
    if value >= limits.crit:
        return CRIT
    return WARN if value >= limits.warn else NONE
