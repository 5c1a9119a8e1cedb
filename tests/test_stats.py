"""Rollups, newest rows, percentiles and rates, against arithmetic done by hand or row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording.samples import MIXED, POWER, mixed_batches

from opusmon import stats
from opusmon.clock import NS
from opusmon.schema import Channel, Field, Rows

NAN = float("nan")


def power_rows(*points: tuple[int, int, float]) -> Rows:
    return POWER.rows(points)


def test_a_bin_holds_min_max_mean_and_count_per_key() -> None:
    rows = power_rows((1, 0, 10.0), (4, 0, 30.0), (4, 1, 7.0), (9, 0, NAN), (10, 0, 5.0))
    out = stats.rollup(rows, POWER, ["power_mw"], 10)
    assert out.dtype.names == ("t", "gpu", "n", "power_mw_min", "power_mw_max", "power_mw_mean", "power_mw_n")
    assert out.tolist() == [
        (0, 0, 3, 10.0, 30.0, 20.0, 2),
        (0, 1, 1, 7.0, 7.0, 7.0, 1),
        (10, 0, 1, 5.0, 5.0, 5.0, 1),
    ]


def test_bins_before_zero_are_floored() -> None:
    out = stats.rollup(power_rows((-1, 0, 1.0), (-10, 0, 3.0), (-11, 0, 9.0)), POWER, ["power_mw"], 10)
    assert out["t"].tolist() == [-20, -10]
    assert out["power_mw_mean"].tolist() == [9.0, 2.0]


def test_a_bin_of_missing_values_is_nan_with_count_zero() -> None:
    (row,) = stats.rollup(power_rows((1, 0, NAN), (2, 0, NAN)), POWER, ["power_mw"], 10)
    assert (row["n"], row["power_mw_n"]) == (2, 0)
    assert all(math.isnan(row[f"power_mw_{s}"]) for s in ("min", "max", "mean"))


def test_no_rows_give_no_bins_and_no_fields_give_counts() -> None:
    assert len(stats.rollup(power_rows(), POWER, ["power_mw"], 10)) == 0
    assert stats.rollup(power_rows((1, 0, 1.0), (2, 0, 1.0)), POWER, [], 10).tolist() == [(0, 0, 2)]


@pytest.mark.parametrize(("fields", "step"), [(["volts"], 10), (["power_mw"], 0), (["power_mw"], -5)])
def test_wrong_fields_and_steps_are_refused(fields: list[str], step: int) -> None:
    with pytest.raises(ValueError, match=r"volts|bin"):
        stats.rollup(power_rows((1, 0, 1.0)), POWER, fields, step)


def test_keys_that_do_not_fit_one_integer_still_group() -> None:
    rows = np.zeros(4, MIXED.dtype)
    rows["t"] = [1, 2, 3, 4]
    rows["gpu"] = [-32768, 32767, 32767, -32768]
    rows["stream"] = [2**64 - 1, 0, 2**64 - 1, 2**64 - 1]
    out = stats.rollup(rows, MIXED, [], NS)
    assert out.tolist() == [(0, -32768, 2**64 - 1, 2), (0, 32767, 0, 1), (0, 32767, 2**64 - 1, 1)]


def test_a_narrow_key_may_span_its_whole_range() -> None:
    out = stats.rollup(power_rows((1, 32767, 1.0), (1, -32768, 2.0), (1, 5, 3.0)), POWER, ["power_mw"], 10)
    assert out["gpu"].tolist() == [-32768, 5, 32767]


def by_hand(rows: Rows, channel: Channel, field: str, step: int) -> dict[tuple[int, ...], list[float]]:
    """Values per bin and key, row by row."""
    groups: dict[tuple[int, ...], list[float]] = {}
    for row in rows:
        key = (int(row["t"]) // step * step, *(int(row[name]) for name in channel.key))
        groups.setdefault(key, []).append(float(row[field]))
    return groups


@settings(max_examples=40, deadline=None)
@given(
    mixed_batches(),
    st.sampled_from([1, 7 * NS, 10 * NS, 600 * NS]),
    st.sampled_from(["f4", "f8", "i8", "u4"]),
)
def test_rollup_equals_a_loop_over_rows(batches: list, step: int, field: str) -> None:
    rows = np.concatenate([batch.rows for batch in batches])
    out = stats.rollup(rows, MIXED, [field], step)
    expected = by_hand(rows, MIXED, field, step)
    assert [tuple(row)[:3] for row in out.tolist()] == sorted(expected)
    for row in out:
        values = expected[(int(row["t"]), int(row["gpu"]), int(row["stream"]))]
        numbers = [value for value in values if not math.isnan(value)]
        assert (row["n"], row[f"{field}_n"]) == (len(values), len(numbers))
        if numbers:
            assert (row[f"{field}_min"], row[f"{field}_max"]) == (min(numbers), max(numbers))
            assert row[f"{field}_mean"] == pytest.approx(sum(numbers) / len(numbers), rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(mixed_batches(), st.sampled_from([10, 60, 1200]))
def test_merging_partial_bins_equals_one_rollup(batches: list, step_s: int) -> None:
    fields = ["f4", "i8"]
    rows = np.concatenate([batch.rows for batch in batches])
    parts = [stats.rollup(batch.rows, MIXED, fields, 10 * NS) for batch in batches]
    merged = stats.merge_rollups(parts, step_s * NS)
    expected = stats.rollup(rows, MIXED, fields, step_s * NS)
    assert merged.dtype == expected.dtype
    for name in merged.dtype.names or ():
        np.testing.assert_allclose(merged[name], expected[name], rtol=1e-9, atol=1e-3 if "i8" in name else 0)


def test_merging_weighs_means_by_count() -> None:
    one = stats.rollup(power_rows((1, 0, 10.0), (2, 0, 10.0), (3, 0, 10.0)), POWER, ["power_mw"], 10)
    two = stats.rollup(power_rows((4, 0, 50.0), (5, 0, NAN)), POWER, ["power_mw"], 10)
    assert stats.merge_rollups([one, two]).tolist() == [(0, 0, 5, 10.0, 50.0, 20.0, 4)]


def test_latest_is_the_newest_row_per_key_and_of_ties_the_last() -> None:
    rows = power_rows((1, 1, 1.0), (5, 0, 2.0), (5, 0, 3.0), (9, 1, 4.0))
    assert stats.latest(rows, ("gpu",)).tolist() == [(5, 0, 3.0), (9, 1, 4.0)]
    assert stats.latest(rows, ()).tolist() == [(9, 1, 4.0)]
    assert len(stats.latest(power_rows(), ("gpu",))) == 0


def test_percentile_ignores_missing_values() -> None:
    assert stats.percentile(np.array([1.0, NAN, 3.0]), 50) == 2.0
    assert stats.percentile(np.array([0.0, 10.0]), 95) == pytest.approx(9.5)
    assert math.isnan(stats.percentile(np.array([NAN]), 50))


def test_rate_is_per_second_and_never_negative() -> None:
    t = np.array([0, NS, 3 * NS, 4 * NS, 4 * NS, 5 * NS])
    out = stats.rate(t, np.array([10.0, 20.0, 60.0, 5.0, 6.0, NAN]))
    assert out[1:3].tolist() == [10.0, 20.0]
    assert np.isnan(out[[0, 3, 4, 5]]).all()


def test_a_key_called_n_is_refused() -> None:
    channel = Channel("c", "gauge", (Field("n", "<i2"),), key=("n",))
    with pytest.raises(ValueError, match="key"):
        stats.rollup_dtype(channel, [])
