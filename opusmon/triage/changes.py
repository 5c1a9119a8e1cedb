"""Whether one series left its level, when, and by how much: pure numpy over the samples of a series.

A baseline gives level and scatter (median and a robust deviation); every later sample is expressed in these, cut at
`CAP` deviations so that one spike is no change, and sums over windows of many lengths are compared with what a
baseline's noise would give. The window that stands out most is fitted as one segment by least squares, which for one
change is the exact answer; the profile of that fit gives the bounds of the onset.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

Ints = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]
Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]

MIN_BASE = 10
"""Samples that a baseline takes: with fewer the deviation is a guess."""
MIN_ZONE = 4
"""Samples there must be to look for a change in."""
MIN_RUN = 4
"""A change lasts so many samples: fewer are a spike."""

CAP = 4.0
"""A sample counts at most so many deviations: a spike of any height does not make a change, and the first sample that
is clearly off is as good as the later ones, whatever shape the change has."""

THRESHOLD, THRESHOLD_SMALL = 4.9, 16.0
"""The score a change must reach is THRESHOLD + THRESHOLD_SMALL / (samples of the baseline).

Measured (`tests/bench/bench_explain.py`): with it, series of white, autocorrelated (0.5 and 0.8), heavy-tailed and
sparse noise that do not change give at most `FALSE_ALARMS` of false alarms, for baselines of 10 to 450 samples."""

FALSE_ALARMS = 5e-3
"""Chance that a series without a change is said to have one.

Measured over ten kinds of noise together: 0.2 to 4.6 of a thousand, at most 1.8 from baselines of 45 samples on. Most
of them are where neighbours correlate by 0.8 and the baseline has 10 or 20 samples: 14 to 34 of a thousand of these.
"""

OBVIOUS, OBVIOUS_RUN = 3.0, 5
"""So many samples in a row, each so many times as far off as any of the baseline, need no statistics."""

MIN_RELATIVE = 0.05
"""Differences under 5 % of the level are left out, however sure they are."""
MIN_EFFECT = 1.5
"""So are those of less than so many deviations: they are within the scatter."""

_PROFILE = 3.0
"""Onsets whose log likelihood is at most this below the best one are possible; 95 % for a change-point, where 1.9
would do for an ordinary parameter."""
_GROWTH = 1.35
"""Ratio of the window lengths looked at."""
_MOST_ALIKE = 0.97
_CROOKED = 0.38
"""A climb is where a line leaves less than this of the deviation: a saturating rise leaves 0.29, a late jump 0.8."""


@dataclass(frozen=True, slots=True)
class Shift:
    """A series left its level.

    Attributes:
        lo: the onset is after this time, ns on the axis of the samples.
        hi: and at most this.
        end: it was back after this time; None where it lasted until the last sample.
        before: level until the onset, in the unit of the series.
        after: level while it lasted.
        effect: their difference in deviations of the samples around their levels.
        score: how sure it is, in deviations of the sum; `threshold` is what it had to reach.
        ramp: the level did not jump but went on moving.
    """

    lo: int
    hi: int
    end: int | None
    before: float
    after: float
    effect: float
    score: float
    ramp: bool = False

    @property
    def onset(self) -> int:
        """The middle of the onset's bounds."""
        return (self.lo + self.hi) // 2


def threshold(n_base: int) -> float:
    """The score that a change must reach over a baseline of `n_base` samples."""
    return THRESHOLD + THRESHOLD_SMALL / n_base


def deviation(x: Floats, least: float = 0.0) -> float:
    """Robust standard deviation about the median: of MAD and the 10-90 % range the larger, at least `least`.

    The factors make both equal to the standard deviation of normal noise.
    """
    if not len(x):
        return least
    low, middle, high = np.percentile(x, (10, 50, 90))
    mad = 1.4826 * float(np.median(np.abs(x - middle)))
    return max(mad, float(high - low) / 2.5631, least)


def _noise(x: Floats, least: float) -> float:
    """Deviation of samples that may go on moving: no more than that of neighbours from each other."""
    if len(x) < MIN_RUN:
        return deviation(x, least)
    return max(min(deviation(x), deviation(np.diff(x)) / math.sqrt(2)), least)


def find_shift(t: Ints, x: Floats, n_base: int, dt_ns: int = 0, floor: float = 0.0) -> Shift | None:
    """The change of a series after its baseline; None where there is none, or too few samples.

    Args:
        t: times of the samples, ascending, ns, shape (n,).
        x: the samples, shape (n,); NaN are left out.
        n_base: the first so many samples are the baseline.
        dt_ns: each sample stands for [t - dt_ns, t]; 0 for an instant.
        floor: noise of the unit: no deviation is taken for smaller, no difference below twice of it for a change.
    """
    good = np.isfinite(x)
    n_base = int(np.count_nonzero(good[:n_base]))
    t, x = t[good], x[good]
    if not enough(n_base, len(x) - n_base) or float(np.ptp(x)) <= 2 * floor:
        return None
    score = _Scores.of(t, x, n_base, floor)
    segment = score.segment()
    if segment is None:
        return None
    return _described(t, x, score, segment, dt_ns, floor)


def enough(n_base: int, n_zone: int) -> bool:
    """Whether so many samples are enough to look for a change."""
    return n_base >= MIN_BASE and n_zone >= MIN_ZONE


@dataclass(frozen=True, slots=True)
class _Segment:
    """Samples [first, end) of the zone are off, from `core` on the most; `sign` says in which direction.

    The first one that is off is within [lo, hi].
    """

    first: int
    core: int
    end: int
    lo: int
    hi: int
    sign: float
    score: float


@dataclass(frozen=True, slots=True)
class _Scores:
    """The samples after the baseline in deviations of it.

    Attributes:
        y: shape (n_zone,).
        n_base: samples of the baseline.
        obvious: shape (n_zone,): 1 or -1 where a sample is far beyond all of the baseline, else 0.
        r: correlation of neighbours that the noise may have: 0 for white noise.
    """

    y: Floats
    obvious: Floats
    n_base: int
    r: float

    @classmethod
    def of(cls, t: Ints, x: Floats, n_base: int, floor: float) -> _Scores:
        """Express samples in the baseline's level and deviation; a steady trend of the baseline is taken off."""
        x = x - _trend(t, x, n_base, floor)
        base = x[:n_base]
        middle = float(np.median(base))
        least = max(floor, 0.005 * abs(middle), 1e-12)
        farthest = OBVIOUS * max(float(np.abs(base - middle).max()), least)
        obvious = np.where(np.abs(x - middle) >= farthest, np.sign(x - middle), 0.0)
        z = _surprise(x, base, middle, deviation(base, least))
        z -= z[:n_base].mean()
        z /= max(1.0, float(z[:n_base].std()))
        return cls(z[n_base:], obvious[n_base:], n_base, _correlation(z[:n_base]))

    def segment(self) -> _Segment | None:
        """The stretch that stands out, from its earliest part on."""
        found = self._strongest(len(self.y))
        if found is None:
            return None
        # A weaker movement in the same direction before the strongest one is where it began.
        for _ in range(3):
            earlier = self._strongest(found.first)
            if earlier is None or earlier.sign != found.sign:
                break
            found = _Segment(
                earlier.first, found.core, found.end, earlier.lo, earlier.hi, found.sign, found.score
            )
        return found

    def _strongest(self, n: int) -> _Segment | None:
        """The segment that stands out most among the first n samples, if it stands out enough."""
        if n < MIN_RUN:
            return None
        total = np.concatenate(([0.0], np.cumsum(self.y[:n])))
        best, first, end = 0.0, 0, 0
        for width in _widths(n):
            sums = total[width:] - total[:-width]
            place = int(np.argmax(np.abs(sums)))
            value = float(sums[place]) / math.sqrt(width * (1 + width / self.n_base) * _alike(self.r, width))
            if abs(value) > abs(best):
                best, first, end = value, place, place + width
        if abs(best) < threshold(self.n_base):
            sign, first = self._plain(n)
            if not sign:
                return None
            best, end = sign * threshold(self.n_base), first + OBVIOUS_RUN
        return self._fitted(math.copysign(1.0, best), first, end, n, abs(best))

    def _plain(self, n: int) -> tuple[float, int]:
        """Direction and first sample of a stretch that is obvious; 0 where there is none."""
        if n < OBVIOUS_RUN:
            return 0.0, 0
        runs = np.lib.stride_tricks.sliding_window_view(self.obvious[:n], OBVIOUS_RUN).sum(axis=1)
        place = int(np.argmax(np.abs(runs)))
        return (float(np.sign(runs[place])), place) if abs(runs[place]) == OBVIOUS_RUN else (0.0, 0)

    def _fitted(self, sign: float, first: int, end: int, n: int, score: float) -> _Segment:
        """Move the borders of a window to where least squares wants them: one of them at a time is exact."""
        total = np.concatenate(([0.0], np.cumsum(sign * self.y[:n])))
        for _ in range(3):
            gain = _gain(total[end] - total[:end], np.arange(end, 0, -1))
            first = int(np.argmax(gain))
            ahead = _gain(total[first + 1 :] - total[first], np.arange(1, n - first + 1))
            end = first + 1 + int(np.argmax(ahead))
        gain = _gain(total[end] - total[:end], np.arange(end, 0, -1))
        possible = np.flatnonzero(gain >= gain[first] - 2 * _PROFILE * _alike(self.r, end - first))
        return _Segment(first, first, end, int(possible[0]), max(first, int(possible[-1])), sign, score)


def _surprise(x: Floats, base: Floats, middle: float, scatter: float) -> Floats:
    """How far off each sample is: deviations from the middle, but no more than its place among the baseline's allows.

    The place, as a quantile of the normal distribution, makes skewed and spiky noise as harmless as normal noise.
    What lies beyond all of the baseline counts more by its distance, up to `CAP`.
    """
    order = np.sort(base)
    place = np.searchsorted(order, x, "left") + np.searchsorted(order, x, "right")
    score = _quantiles(len(base))[place]
    beyond = np.maximum(x - order[-1], 0.0) - np.maximum(order[0] - x, 0.0)
    score = np.clip(score + beyond / scatter, -CAP, CAP)
    z = (x - middle) / scatter
    limited: Floats = np.sign(z) * np.minimum(np.abs(z), np.abs(score))
    return limited


@lru_cache(maxsize=256)
def _quantiles(n: int) -> Floats:
    """Normal quantiles of the 2 n + 1 places that a value can have among n others, ties in the middle."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((place + 1) / (2 * n + 2)) for place in range(2 * n + 1)])


def _gain(sums: Floats, counts: Ints) -> Floats:
    """What least squares gains from a level of its own for so many samples of that sum; none for the other sign."""
    return np.where(sums > 0, sums * sums / counts, 0.0)


@lru_cache(maxsize=256)
def _widths(n: int) -> tuple[int, ...]:
    """Window lengths from `MIN_RUN` to n."""
    found = {MIN_RUN, n}
    width = float(MIN_RUN)
    while width < n:
        found.add(int(width))
        width *= _GROWTH
    return tuple(sorted(found))


def _correlation(z: Floats) -> float:
    """Correlation of neighbours that the noise may have: a standard error over the one seen, its bias taken off."""
    n = len(z)
    variance = float(np.dot(z, z))
    r = max(float(np.dot(z[1:], z[:-1])) / variance, 0.0) if variance > 0 else 0.0
    return min(r + 3 * r / n + 1 / math.sqrt(n), _MOST_ALIKE)


def _alike(r: float, width: int) -> float:
    """Variance of a sum of neighbours over that of independent samples: first-order autoregression, correlation r."""
    return (1 + r) / (1 - r) - 2 * r * (1 - r**width) / (width * (1 - r) ** 2)


def _trend(t: Ints, x: Floats, n_base: int, floor: float) -> Floats | float:
    """What a steady trend of the baseline adds to each sample; 0 where the baseline has none."""
    since_s = (t - t[n_base - 1]) / 1e9
    base_s, base = since_s[:n_base] - since_s[:n_base].mean(), x[:n_base]
    spread = float(np.dot(base_s, base_s))
    if spread <= 0:
        return 0.0
    slope = float(np.dot(base_s, base - base.mean())) / spread
    rest = base - base.mean() - slope * base_s
    risen = abs(slope) * float(np.ptp(base_s))
    scatter = max(float(rest.std()), floor)
    if risen < 4 * scatter or float(np.dot(rest, rest)) > 0.25 * float(np.sum((base - base.mean()) ** 2)):
        return 0.0
    trend: Floats = slope * since_s
    return trend


def _described(
    t: Ints, x: Floats, scores: _Scores, found: _Segment, dt_ns: int, floor: float
) -> Shift | None:
    """A segment in the unit of the series; None where the difference is too small to tell anybody."""
    n = scores.n_base
    old = np.concatenate((x[:n], x[n : n + found.lo]))
    new = x[n + found.core : n + found.end]
    before, after = float(np.median(old)), float(np.median(new))
    apart = abs(after - before)
    least = max(floor, 0.005 * abs(before), 1e-12)
    pooled = math.hypot(deviation(old, least), _noise(new, least)) / math.sqrt(2)
    large = apart >= max(2 * floor, MIN_RELATIVE * max(abs(before), abs(after)))
    if not large or apart < MIN_EFFECT * pooled or (after - before) * found.sign <= 0:
        return None
    found = _plausible(x[n:], found, before, after, pooled)
    lo, hi = _bounds(t, n, found, dt_ns, min(1.0, 4 * pooled / apart))
    ramp, lo = _ramp(t, x, scores, found, before, lo, dt_ns)
    last = found.end + MIN_RUN > len(scores.y)
    end = None if last else int(t[n + found.end - 1])
    return Shift(lo, hi, end, before, after, apart / pooled, found.score, ramp)


def _plausible(y: Floats, found: _Segment, before: float, after: float, pooled: float) -> _Segment:
    """Bounds without the samples that cannot be on the other side.

    The scores are cut, so the profile does not know how large a difference is. A sample three deviations from the
    new level is not yet at it, one three deviations from the old level has left it.
    """
    lo = hi = found.first
    while lo > found.lo and found.sign * (y[lo - 1] - after) >= -3 * pooled:
        lo -= 1
    while hi < found.hi and found.sign * (y[hi] - before) <= 3 * pooled:
        hi += 1
    return replace(found, lo=lo, hi=hi)


def _bounds(t: Ints, n_base: int, found: _Segment, dt_ns: int, share: float) -> tuple[int, int]:
    """Times between which the onset lies.

    A sample that is off shows a change in its own interval. One of which less than `share` lies after the change
    does not look off, so the change may be that much earlier.
    """
    place = n_base + found.lo
    own = int(t[place]) - dt_ns if dt_ns else int(t[place - 1])
    return min(own, int(t[place - 1])) - int(share * dt_ns), int(t[n_base + found.hi])


def _ramp(
    t: Ints, x: Floats, scores: _Scores, found: _Segment, before: float, lo: int, dt_ns: int
) -> tuple[bool, int]:
    """Whether the level went on moving, and then the lower bound of the onset: where its line leaves the old level."""
    first, end = scores.n_base + found.first, scores.n_base + found.end
    new = found.sign * (x[first:end] - before)
    if len(new) < 2 * MIN_RUN:
        return False, lo
    top = float(np.percentile(new, 90))
    reach = int(np.argmax(new >= 0.9 * top)) + 1
    if reach < 2 * MIN_RUN or float(np.median(new[: reach // 3])) > 0.5 * top:
        return False, lo
    times = (t[first : first + reach] - t[first]).astype(np.float64)
    slope, start = np.polyfit(times, new[:reach], 1)
    if slope <= 0:
        return False, lo
    rest = float((new[:reach] - start - slope * times).std())
    if rest > _CROOKED * float(new[:reach].std()):
        return False, lo
    # Two standard errors of where a fitted line has a given value, far from the middle of its points.
    error_ns = 4 * rest / slope * math.sqrt(_alike(scores.r, reach) / reach)
    crossing = int(t[first] - start / slope - error_ns - dt_ns)
    return True, max(min(lo, crossing), int(t[scores.n_base - 1]))
