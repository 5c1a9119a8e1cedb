"""Stalls of one thread and reason that came together: how many, how long, and how bad the worst minute was.

Rows are judged a minute at a time, the minute beginning with each stall, all rows at once. What is said of a bout is
said of its worst minute, so that it does not matter where a look begins or ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from opusmon.clock import NS
from opusmon.schema import Rows
from opusmon.triage.episodes import Flags, Times
from opusmon.triage.scene import Scene
from opusmon.triage.severity import CRIT, WARN, Levels
from opusmon.triage.sustained import Floats, floats

MINUTE_NS = 60 * NS
OPEN_NS = 10 * NS
"""A bout whose last stall is at most so old still holds."""
FAILED = CRIT + 1
"""Level of a row that is critical even when it comes alone."""
_SEVERER = 1e15
"""Weight of a step of severity; times add up to less in a minute, 4,000 stalls a second of a minute each aside."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Of the rows of each of n minutes, shape (n,) each.

    Attributes:
        warn: how many are a `WARN` or worse.
        crit: how many are a `CRIT` or worse.
        failed: how many are `FAILED`.
        calls: calls, faults or stalls, those folded into one row counted.
        total_ns: time they took.
    """

    warn: Times
    crit: Times
    failed: Times
    calls: Floats
    total_ns: Floats


Grade = Callable[[Sums], Levels]
"""The severity of each minute, `NONE` for nothing to tell."""


@dataclass(frozen=True, slots=True)
class Bout:
    """Stalls that came together.

    Attributes:
        t0: the first began, monotonic ns.
        t1: the last ended.
        severity: of its worst minute; what follows is of that minute too.
        weight: for a finding.
        open: the last one is recent.
        rows: in time order.
        calls: how many there were, those folded into one row counted.
        total_ns: time they took; they may have taken longer where that is not known of all.
        span_ns: from the beginning of the first to the end of the last.
        longest_ns: the longest one; where several are folded into a row, their mean.
        worst: that row; of equals the last.
        longest_row_ns: the longest row, with all that is folded into it.
    """

    t0: int
    t1: int
    severity: int
    weight: float
    open: bool
    rows: Rows
    calls: int
    total_ns: float
    span_ns: int
    longest_ns: float
    worst: np.void
    longest_row_ns: float

    @property
    def share_pct(self) -> float:
        """Share of the time from the first to the last; NaN where that took none."""
        return 100 * self.total_ns / self.span_ns if self.span_ns > 0 else float("nan")

    @property
    def stack(self) -> int:
        """Text id of the most common stack, 0 for none; of equals the one known longest."""
        counts = Counter(self.rows["stack"].tolist())
        del counts[0]
        return max(counts, key=lambda one: (counts[one], -one), default=0)


@dataclass(frozen=True, slots=True)
class _Columns:
    """What is known of n stalls, sorted by group and time, shape (n,) each; a length that is missing is 0."""

    rows: Rows
    t: Times
    dur_ns: Floats
    each_ns: Floats
    begun: Times
    count: Floats

    @classmethod
    def of(cls, rows: Rows) -> _Columns:
        dur_ns, count = _or_0(floats(rows, "dur_ns")), np.fmax(floats(rows, "count"), 1.0)
        return cls(rows, rows["t"], dur_ns, dur_ns / count, begins(rows), count)

    def bout(self, scene: Scene, stretch: slice, minute: slice, severity: int, weight: float) -> Bout:
        """The bout of a stretch of rows, told by one of its minutes."""
        each = self.each_ns[minute]
        worst = minute.stop - 1 - int(each[::-1].argmax())
        t1 = int(self.t[stretch.stop - 1])
        return Bout(
            t0=max(int(self.begun[stretch].min()), scene.t0),
            t1=t1,
            severity=severity,
            weight=weight,
            open=scene.t1 - t1 <= OPEN_NS,
            rows=self.rows[minute],
            calls=int(self.count[minute].sum()),
            total_ns=float(self.dur_ns[minute].sum()),
            span_ns=int(self.t[minute.stop - 1]) - int(self.begun[minute].min()),
            longest_ns=float(self.each_ns[worst]),
            worst=self.rows[worst],
            longest_row_ns=float(self.dur_ns[minute].max()),
        )


def begins(rows: Rows) -> Times:
    """When each stall began, monotonic ns, shape (n,): where several are folded into one row, the first or later."""
    begun: Times = rows["t"] - _or_0(floats(rows, "dur_ns")).astype(np.int64)
    return begun


def _or_0(values: Floats) -> Floats:
    """Values, 0 where they are missing."""
    return np.where(np.isnan(values), 0.0, values)


def bouts(
    scene: Scene, rows: Rows, levels: Levels, by: Sequence[str | Flags], grade: Grade
) -> Iterator[Bout]:
    """Bouts among stalls, in no particular order.

    Args:
        scene: what is looked at.
        rows: of channel `stall`, in time order, shape (n,).
        levels: severity of each, or `FAILED`, shape (n,).
        by: fields, or values of one's own of shape (n,); only rows that have the same values come together.
        grade: how bad a minute is.
    """
    if not len(rows):
        return
    keys = [rows[one] if isinstance(one, str) else one for one in by]
    order = np.lexsort(keys[::-1])
    columns, levels = _Columns.of(rows[order]), levels[order]
    firsts, ends = _minutes(columns, [key[order] for key in keys])
    sums = _sums(columns, levels, ends)
    severity = grade(sums)
    told = severity > 0
    if not told.any():
        return
    covered = np.cumsum(np.bincount(np.flatnonzero(told), minlength=len(rows)) - _ended(ends, told)) > 0
    weight = np.where(told, severity * _SEVERER + sums.total_ns, -1)
    for first, last in _stretches(covered, firsts | _is_apart(columns)):
        at = first + int(weight[first : last + 1].argmax())
        minute = slice(at, int(ends[at]))
        yield columns.bout(scene, slice(first, last + 1), minute, int(severity[at]), float(weight[at]))


def _minutes(columns: _Columns, keys: Sequence[np.ndarray]) -> tuple[Flags, Times]:
    """Which rows are the first of their group, and where the minute ends that begins with each row, shape (n,)."""
    t, begun = columns.t, columns.begun
    firsts = np.ones(len(t), bool)
    firsts[1:] = False
    for key in keys:
        firsts[1:] |= key[1:] != key[:-1]
    # A time axis on which the groups lie one after another.
    origin = int(begun.min())
    offset = (np.cumsum(firsts) - 1) * (int(t.max()) - origin + 2 * MINUTE_NS)
    ends = np.searchsorted(t - origin + offset, begun - origin + offset + MINUTE_NS, side="right")
    return firsts, np.maximum(ends, np.arange(1, len(t) + 1))


def _sums(columns: _Columns, levels: Levels, ends: Times) -> Sums:
    warn, crit, failed = (_windows(levels >= least, ends).astype(np.int64) for least in (WARN, CRIT, FAILED))
    return Sums(warn, crit, failed, _windows(columns.count, ends), _windows(columns.dur_ns, ends))


def _windows(values: Floats | Flags, ends: Times) -> Floats:
    """Sum of values[i : ends[i]] for each i, shape (n,)."""
    total = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    sums: Floats = total[ends] - total[:-1]
    return sums


def _ended(ends: Times, told: Flags) -> Times:
    """How many of the minutes that are told end before each row, shape (n,)."""
    return np.bincount(ends[told], minlength=len(ends) + 1)[:-1]


def _is_apart(columns: _Columns) -> Flags:
    """Whether each stall began over a minute after the one before it had ended."""
    apart = np.zeros(len(columns.t), bool)
    apart[1:] = columns.begun[1:] - columns.t[:-1] > MINUTE_NS
    return apart


def _stretches(on: Flags, breaks: Flags) -> Iterator[tuple[int, int]]:
    """First and last index of each stretch of places that are on, begun anew at breaks."""
    joined = on[1:] & on[:-1] & ~breaks[1:]
    firsts = np.flatnonzero(on & ~np.append(False, joined))
    lasts = np.flatnonzero(on & ~np.append(joined, False))
    yield from zip(firsts.tolist(), lasts.tolist(), strict=True)
