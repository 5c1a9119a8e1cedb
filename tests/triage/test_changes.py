"""Onset, levels and certainty of a change in one series, and what is no change."""

import numpy as np
import pytest

from opusmon.triage.changes import FALSE_ALARMS, deviation, find_shift, threshold

S = 10**9


def stamps(n):
    return np.arange(1, n + 1, dtype=np.int64) * S


def stepped(n_base=40, n_zone=40, at=50, before=100.0, after=200.0, noise=1.0, seed=1):
    """Samples 0..at-1 at one level, the rest at another."""
    x = np.where(np.arange(n_base + n_zone) < at, before, after)
    return stamps(n_base + n_zone), x + np.random.default_rng(seed).normal(0, noise, n_base + n_zone), n_base


def test_a_step_is_found_with_its_levels_and_the_sample_it_began_in():
    shift = find_shift(*stepped(), dt_ns=0)
    assert shift is not None
    # Sample 49 (t = 50 s) is the last at the old level, sample 50 (51 s) the first at the new one.
    assert (shift.lo, shift.hi) == (50 * S, 51 * S)
    assert shift.before == pytest.approx(100, abs=0.5)
    assert shift.after == pytest.approx(200, abs=0.5)
    assert shift.effect == pytest.approx(100, rel=0.35)
    assert shift.end is None
    assert not shift.ramp


def test_a_sample_that_is_a_mean_over_its_interval_may_hide_the_beginning():
    shift = find_shift(*stepped(), dt_ns=S)
    # The change lies in (50, 51] s, or in the last part of the second before, too short to be seen.
    assert 49.5 * S <= shift.lo < 50 * S
    assert shift.hi == 51 * S


def test_a_fall_is_found_as_well():
    shift = find_shift(*stepped(after=20.0))
    assert (shift.lo, shift.hi) == (50 * S, 51 * S)
    assert shift.after == pytest.approx(20, abs=0.5)


def test_what_comes_back_has_an_end():
    t, x, n = stepped()
    x[62:] = 100 + np.random.default_rng(2).normal(0, 1, 18)
    shift = find_shift(t, x, n)
    assert (shift.lo, shift.hi, shift.end) == (50 * S, 51 * S, 62 * S)


def test_missing_samples_widen_the_bounds():
    t, x, n = stepped()
    x[45:55] = np.nan
    shift = find_shift(t, x, n)
    assert (shift.lo, shift.hi) == (45 * S, 56 * S)


def test_a_constant_that_jumps_needs_no_noise():
    t, x, n = stepped(before=0.0, after=1.0, noise=0.0)
    shift = find_shift(t, x, n, floor=0.05)
    assert (shift.before, shift.after, shift.lo, shift.hi) == (0, 1, 50 * S, 51 * S)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_spike_is_no_change(width):
    t, x, n = stepped(after=100.0)
    x[60 : 60 + width] = 1e6
    assert find_shift(t, x, n) is None


def test_five_samples_far_beyond_anything_seen_are_one_even_in_a_wandering_series():
    rng = np.random.default_rng(4)
    noise = rng.normal(size=60)
    for k in range(1, 60):
        noise[k] += 0.9 * noise[k - 1]
    x = 100 + noise
    x[50:56] = 1000
    shift = find_shift(stamps(60), x, 30)
    assert (shift.lo, shift.hi) == (50 * S, 51 * S)


def test_differences_under_five_per_cent_or_twice_the_floor_are_left_out():
    assert find_shift(*stepped(after=104.0, noise=0.01)) is None
    assert find_shift(*stepped(after=106.0, noise=0.01)) is not None
    assert find_shift(*stepped(before=1.0, after=2.9, noise=0.01), floor=1.0) is None
    assert find_shift(*stepped(before=1.0, after=3.2, noise=0.01), floor=1.0) is not None


def test_too_few_samples_say_nothing():
    t, x, _ = stepped()
    assert find_shift(t[41:], x[41:], 9) is None
    assert find_shift(t[:53], x[:53], 50) is None
    assert find_shift(t, np.full(80, np.nan), 40) is None


def test_a_steady_growth_that_goes_on_is_no_change_and_its_end_is():
    t = stamps(100)
    x = 1000 + 5.0 * np.arange(100) + np.random.default_rng(6).normal(0, 1, 100)
    assert find_shift(t, x, 50) is None
    x[70:] = x[70] + np.random.default_rng(7).normal(0, 1, 30)
    shift = find_shift(t, x, 50)
    assert shift is None or shift.hi >= 70 * S


def test_a_climb_is_said_to_be_one_and_begins_where_it_leaves_the_level():
    t = stamps(120)
    x = 100 + np.clip(np.arange(120) - 69, 0, None) * 4.0 + np.random.default_rng(5).normal(0, 1, 120)
    shift = find_shift(t, x, 50)
    assert shift.ramp
    assert shift.lo <= 70 * S <= shift.hi
    assert shift.hi - shift.lo < 6 * S


def test_a_weaker_movement_in_the_same_direction_is_the_beginning():
    t, x, n = stepped(n_base=60, n_zone=60, at=75, after=120.0)
    x[100:] += 400
    shift = find_shift(t, x, n)
    assert (shift.lo, shift.hi) == (75 * S, 76 * S)


def test_the_onset_is_within_its_bounds_in_95_of_100_seeds():
    """A step at any time within a second, samples that are means of their second, noise a fifth of the step."""
    inside = found = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        onset = 45 + 30 * rng.random()
        share = np.clip(np.arange(1, 101) - onset, 0, 1)
        x = 50 + 10 * share + rng.normal(0, 2, 100)
        shift = find_shift(stamps(100), x, 40, S)
        if shift is not None:
            found += 1
            inside += shift.lo <= onset * S <= shift.hi
    assert found >= 190
    assert inside >= 0.95 * found


def _autoregressive(rng, n, r=0.5):
    noise = rng.normal(size=n)
    for k in range(1, n):
        noise[k] += r * noise[k - 1]
    return noise + 20


NOISES = {
    "normal": lambda rng, n: rng.normal(10, 1, n),
    "autoregressive": _autoregressive,
    "heavy tails": lambda rng, n: rng.standard_t(3, n) + 20,
    "skewed": lambda rng, n: rng.lognormal(0, 1, n),
    "rare counts": lambda rng, n: rng.poisson(0.05, n).astype(float),
    "two levels": lambda rng, n: (rng.random(n) < 0.5) * 10.0 + rng.normal(0, 1, n),
}


def test_of_series_that_do_not_change_no_more_are_said_to_than_stated():
    rng = np.random.default_rng(11)
    series = [(make(rng, 120), make(rng, 30)) for make in NOISES.values() for _ in range(170)]
    long = sum(find_shift(stamps(120), x, 45, S, 1e-3) is not None for x, _ in series)
    short = sum(find_shift(stamps(30), x, 12, S, 1e-3) is not None for _, x in series)
    # Twice the expectation, for a count of a few.
    assert long <= 2 * FALSE_ALARMS * len(series)
    assert short <= 2 * FALSE_ALARMS * len(series)


def test_deviation_is_that_of_normal_noise_and_ignores_spikes():
    x = np.random.default_rng(3).normal(5, 2, 20_000)
    assert deviation(x) == pytest.approx(2, rel=0.03)
    x[:200] = 1e9
    assert deviation(x) == pytest.approx(2, rel=0.06)
    assert deviation(np.full(9, 7.0)) == 0
    assert deviation(np.full(9, 7.0), 0.5) == 0.5


def test_a_short_baseline_has_to_be_more_sure():
    assert threshold(10) > threshold(100) > threshold(1000) > 4.9
