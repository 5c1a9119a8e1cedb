"""Quantiles with their bounds, from histogram buckets or from single observations: pure numpy.

A histogram does not hold the observations, only how many lie in (lo, hi]. So a quantile of one is a bracket; a value
inside it is interpolated and says so, and where the bracket has an open end there is only the bound to tell.
Quantiles are never averaged: add the buckets first (`merge`), then ask.

The q-quantile of n observations is the ceil(q * n)-th smallest, for buckets and for observations alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Array = np.ndarray[tuple[Any, ...], np.dtype[Any]]
Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]
Kind = Literal["none", "exact", "interpolated", "at_most", "over"]

NAN = float("nan")
_SLACK = 1e-9
"""0.07 * 100 is 7.000000000000001: the rank must stay 7."""


@dataclass(frozen=True, slots=True)
class Quantile:
    """An answer, and how much it is worth.

    Attributes:
        value: the number to print, in the unit of the observations; NaN for "none". For "at_most" it is `hi`, for
            "over" it is `lo`: print them as "<= value" and "> value", and never draw them as a measurement.
        lo: the true value is over this (equal to it when exact).
        hi: and at most this; infinite for "over".
        kind: "none" without observations, "exact" from single observations, "interpolated" inside a bucket,
            "at_most" in the first bucket, "over" in the last one.
        n: observations it rests on.
    """

    value: float
    lo: float
    hi: float
    kind: Kind
    n: float


NONE = Quantile(NAN, NAN, NAN, "none", 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Buckets:
    """Counts of observations in (lo, hi], sorted by (hi, lo); equal brackets appear once, empty ones not at all.

    Make them with `buckets` or `merge`. Brackets may overlap: two servers may use different edges.

    Attributes:
        lo: lower edges, shape (k,); at most 0 in the first bucket of a histogram of durations.
        hi: upper edges, shape (k,); infinite in the last bucket.
        count: observations, shape (k,), all positive.
    """

    lo: Floats
    hi: Floats
    count: Floats

    @property
    def n(self) -> float:
        """Observations in all of them."""
        return float(self.count.sum())


def buckets(lo: Array, hi: Array, count: Array) -> Buckets:
    """Buckets from columns of equal length in any order, such as `lo_s`, `hi_s` and `count` of `engine_bucket` rows.

    Counts of equal brackets are added: rows of several scrapes, ranks or engines become one histogram. Rows whose
    count is not a positive number, or whose bracket is not one, are left out.
    """
    low, high, number = (np.asarray(column, np.float64) for column in (lo, hi, count))
    good = (number > 0) & np.isfinite(number) & (low < high)
    low, high, number = low[good], high[good], number[good]
    order = np.lexsort((low, high))
    low, high, number = low[order], high[order], number[order]
    if not len(low):
        return Buckets(low, high, number)
    new = np.concatenate(([True], (low[1:] != low[:-1]) | (high[1:] != high[:-1])))
    starts = np.flatnonzero(new)
    return Buckets(low[starts], high[starts], np.add.reduceat(number, starts))


def merge(parts: Sequence[Buckets]) -> Buckets:
    """One histogram from several, which may have different edges; none gives an empty one."""
    columns = [(part.lo, part.hi, part.count) for part in parts] or [(np.empty(0),) * 3]
    lo, hi, count = (np.concatenate(column) for column in zip(*columns, strict=True))
    return buckets(lo, hi, count)


def quantile(given: Buckets, q: float) -> Quantile:
    """The q-quantile of a histogram, q in [0, 1].

    The bounds always hold: the k-th smallest observation lies between the k-th smallest lower edge and the k-th
    smallest upper edge. The value between them is linear interpolation, as in Prometheus.

    Raises:
        ValueError: q is outside [0, 1].
    """
    n = given.n
    rank = _rank(q, n)
    if n <= 0:
        return NONE
    lo = _edge_at(given.lo, given.count, rank)
    hi = _edge_at(given.hi, given.count, rank)
    if math.isinf(hi):
        return Quantile(lo, lo, hi, "over", n)
    if lo <= 0:
        return Quantile(hi, lo, hi, "at_most", n)
    value = min(max(_interpolate(given, q * n), lo), hi)
    return Quantile(value, lo, hi, "interpolated", n)


def quantile_of(values: Array, q: float) -> Quantile:
    """The q-quantile of single observations, q in [0, 1]; NaN among them are left out.

    Raises:
        ValueError: q is outside [0, 1].
    """
    numbers = np.asarray(values, np.float64)
    numbers = numbers[~np.isnan(numbers)]
    n = len(numbers)
    rank = _rank(q, n)
    if not n:
        return NONE
    value = float(np.partition(numbers, rank - 1)[rank - 1])
    return Quantile(value, value, value, "exact", float(n))


def mean(total: float, n: float) -> float:
    """Sum over number; NaN without observations."""
    return total / n if n > 0 else NAN


def share_at_most(given: Buckets, limit: float) -> tuple[float, float]:
    """Bounds of the share (0-1) of observations that are at most `limit`; equal where `limit` is an edge.

    Both are NaN without observations.
    """
    n = given.n
    if n <= 0:
        return NAN, NAN
    surely = float(given.count[given.hi <= limit].sum())
    perhaps = float(given.count[given.lo < limit].sum())
    return surely / n, perhaps / n


def enough(n: float, q: float) -> bool:
    """Whether one observation at least is expected beyond the q-quantile: 20 for p95, 100 for p99; else grey it."""
    return n * (1.0 - q) >= 1.0 - _SLACK


def _rank(q: float, n: float) -> int:
    """Place of the q-quantile among n observations, from 1."""
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"a quantile of {q}")
    return max(1, math.ceil(q * n - _SLACK))


def _edge_at(edges: Floats, count: Floats, rank: int) -> float:
    """The rank-th smallest edge, where each edge stands `count` times."""
    order = np.argsort(edges, kind="stable")
    place = int(np.searchsorted(np.cumsum(count[order]), rank - _SLACK))
    return float(edges[order[min(place, len(order) - 1)]])


def _interpolate(given: Buckets, rank: float) -> float:
    """Where the sum of the buckets, each spread evenly over its bracket, reaches `rank` observations."""
    edges = np.unique(np.concatenate((given.lo, given.hi)))
    edges = edges[np.isfinite(edges)]
    width = given.hi - given.lo
    with np.errstate(invalid="ignore"):
        filled = np.clip((edges[:, None] - given.lo) / width, 0.0, 1.0)
    at_edge = np.where(np.isfinite(width), filled, edges[:, None] >= given.hi) @ given.count
    return float(np.interp(rank, at_edge, edges))
