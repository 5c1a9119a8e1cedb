"""Quantiles from buckets and from observations: bounds that always hold, and words for what is not a value."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusmon.quantiles import (
    NONE,
    Buckets,
    buckets,
    enough,
    mean,
    merge,
    quantile,
    quantile_of,
    share_at_most,
)

INF = math.inf


def of(*brackets: tuple[float, float, float]) -> Buckets:
    lo, hi, count = zip(*brackets, strict=True)
    return buckets(np.array(lo), np.array(hi), np.array(count))


LATENCY = of((0, 0.1, 10), (0.1, 0.5, 50), (0.5, 1, 30), (1, INF, 10))


@pytest.mark.parametrize(
    ("q", "kind", "value", "lo", "hi"),
    [
        (0.05, "at_most", 0.1, 0.0, 0.1),
        (0.10, "at_most", 0.1, 0.0, 0.1),
        (0.35, "interpolated", 0.3, 0.1, 0.5),  # 25 of the 50 in (0.1, 0.5]
        (0.60, "interpolated", 0.5, 0.1, 0.5),  # the last one in it
        (0.75, "interpolated", 0.75, 0.5, 1.0),
        (0.95, "over", 1.0, 1.0, INF),
        (1.00, "over", 1.0, 1.0, INF),
    ],
)
def test_quantile_of_buckets(q: float, kind: str, value: float, lo: float, hi: float) -> None:
    answer = quantile(LATENCY, q)
    assert (answer.kind, answer.lo, answer.hi, answer.n) == (kind, lo, hi, 100)
    assert answer.value == pytest.approx(value)


def test_the_rank_does_not_slip_by_a_rounding_error() -> None:
    """0.07 * 100 is 7.000000000000001; the seventh of 100 lies in the first bucket."""
    assert quantile(of((0, 1, 7), (1, 2, 93)), 0.07).hi == 1


def test_no_observations_is_no_number() -> None:
    for answer in (
        quantile(merge([]), 0.5),
        quantile_of(np.array([]), 0.5),
        quantile_of(np.array([np.nan]), 0.5),
    ):
        assert answer == NONE or (answer.kind == "none" and math.isnan(answer.value))
    assert math.isnan(mean(0, 0))
    assert all(map(math.isnan, share_at_most(merge([]), 1)))


def test_a_bucket_at_or_below_zero_is_a_bound() -> None:
    """SGLang's queue time has a bucket le="0.0"."""
    zero = of((-INF, 0, 9), (0, 0.001, 1))
    assert (quantile(zero, 0.5).kind, quantile(zero, 0.5).value) == ("at_most", 0.0)
    assert (quantile(zero, 1.0).kind, quantile(zero, 1.0).value) == ("at_most", 0.001)


def test_buckets_are_added_before_the_quantile() -> None:
    """One rank fast, one slow: the mean of their p50s (0.25 + 4.5) / 2 is nobody's latency."""
    fast, slow = of((0, 0.5, 90), (0.5, 1, 0)), of((4, 5, 10))
    both = merge([fast, slow])
    assert (both.n, quantile(both, 0.5).hi, quantile(both, 0.95).lo) == (100, 0.5, 4)


def test_equal_brackets_become_one_and_senseless_ones_none() -> None:
    found = of((0, 1, 2), (0, 1, 3), (1, 2, 0), (2, 2, 5), (3, 2, 5), (5, 6, np.nan), (7, 8, -1))
    assert (found.lo.tolist(), found.hi.tolist(), found.count.tolist()) == ([0], [1], [5])


def test_buckets_are_in_the_order_of_their_upper_edges() -> None:
    found = of((0, 4, 1), (2, 3, 1), (1, 3, 1), (3, INF, 1))
    assert list(zip(found.lo.tolist(), found.hi.tolist(), strict=True)) == [(1, 3), (2, 3), (0, 4), (3, INF)]


def test_share_at_most_is_a_bracket_off_the_edges() -> None:
    assert share_at_most(LATENCY, 0.5) == (0.6, 0.6)
    assert share_at_most(LATENCY, 0.8) == (0.6, 0.9)
    assert share_at_most(LATENCY, 5) == (0.9, 1.0)


def test_single_observations_are_exact() -> None:
    values = np.arange(1, 101, dtype=float)
    assert [quantile_of(values, q).value for q in (0, 0.5, 0.95, 0.99, 1)] == [1, 50, 95, 99, 100]
    assert quantile_of(values, 0.5).kind == "exact"


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
def test_a_quantile_outside_its_range_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match="quantile"):
        quantile(LATENCY, q)
    with pytest.raises(ValueError, match="quantile"):
        quantile_of(np.array([1.0]), q)


def test_enough_samples() -> None:
    assert [enough(n, q) for n, q in ((100, 0.99), (99, 0.99), (20, 0.95), (19, 0.95), (1000, 0.999))] == [
        True,
        False,
        True,
        False,
        True,
    ]


edges_of = st.lists(st.floats(0.001, 100), min_size=1, max_size=8, unique=True).map(sorted)


def histogram(values: np.ndarray, edges: list[float]) -> Buckets:
    """Count as Prometheus does: (lo, hi]."""
    lo, hi = np.array([0.0, *edges]), np.array([*edges, INF])
    count = np.array([((values > a) & (values <= b)).sum() for a, b in zip(lo, hi, strict=True)])
    return buckets(lo, hi, count)


@given(
    st.lists(st.floats(0.0001, 200), min_size=1, max_size=60),
    st.lists(st.floats(0.0001, 200), max_size=60),
    edges_of,
    edges_of,
    st.floats(0, 1),
)
def test_the_truth_lies_within_the_bounds(
    one: list[float], two: list[float], edges_one: list[float], edges_two: list[float], q: float
) -> None:
    """Whatever the observations and even when two servers have different edges."""
    both = merge([histogram(np.array(one), edges_one), histogram(np.array(two), edges_two)])
    answer = quantile(both, q)
    truth = quantile_of(np.array([*one, *two]), q).value
    assert answer.n == len(one) + len(two)
    assert answer.lo < truth <= answer.hi
    assert answer.lo <= answer.value <= answer.hi


@given(st.lists(st.floats(0.0001, 200), min_size=1, max_size=60), edges_of, st.floats(0.001, 150))
def test_the_share_lies_within_its_bounds(values: list[float], edges: list[float], limit: float) -> None:
    low, high = share_at_most(histogram(np.array(values), edges), limit)
    truth = sum(value <= limit for value in values) / len(values)
    assert low - 1e-12 <= truth <= high + 1e-12
