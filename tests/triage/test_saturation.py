"""The saturation model against the published example, known curves, and Little's law."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ui.fakelatency import ENGINE, FakeLatency
from ui.fakeview import T0

from opusmon.channels import ENGINE as CHANNEL
from opusmon.clock import NS
from opusmon.triage.curves import KINDS, Points
from opusmon.triage.saturation import Curve, fit, little, of_rows, of_scene
from opusmon.triage.scene import Scene

NAN = math.nan


def usl(n, slope, sigma, kappa):
    return slope * n / (1 + sigma * (n - 1) + kappa * n * (n - 1))


def sampled(curve, noise=0.05, each=10, top=64, seed=1):
    """Throughput of loads 1 to `top`, `each` samples of every one, with a relative error."""
    rng = np.random.default_rng(seed)
    load = np.repeat(np.arange(1.0, top + 1), each)
    return load, curve(load) * (1 + noise * rng.standard_normal(len(load)))


# -- the published example ---------------------------------------------------------------------------------------


def test_the_published_example():
    """Queue depth, streams, tokens/s: the knee is at 16 streams, and a deeper queue gains nothing."""
    found, why = fit(running=[4, 16, 16], waiting=[8, 32, 64], throughput=[152, 598, 601])
    assert why == ""
    assert found.curve.kind == "flat-top"
    assert found.knee_running == 16
    assert found.knee == pytest.approx(48, rel=0.02)  # 16 streams and a queue of 32
    assert found.curve.top == pytest.approx(600, rel=0.01)
    assert found.deeper_pct == pytest.approx(100 * (601 / 598 - 1))  # 0.5 %: nothing
    assert found.gain_pct == pytest.approx(0)
    assert found.past_knee
    assert any("16 of them running; a deeper queue brought 0.5 % more" in line for line in found.lines())
    assert math.isnan(found.knee_low)  # three samples say nothing of how sure that is
    assert math.isnan(found.little.ratio)


def test_at_its_second_point_the_example_is_at_the_knee_and_at_its_first_below():
    at_knee, _ = fit([4, 16, 16], [8, 32, 64], [152, 598, 601], now=(16, 32, 598))
    below, _ = fit([4, 16, 16], [8, 32, 64], [152, 598, 601], now=(4, 8, 152))
    assert at_knee.past_knee
    assert not below.past_knee
    assert below.gain_pct == pytest.approx(100)


# -- known curves ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "kappa"), [(0.0, 0.002), (0.08, 0.0), (0.03, 0.0005), (0.0, 0.0)])
@pytest.mark.parametrize("seed", range(4))
def test_no_law_within_bounds_is_closer_than_the_fitted_one(sigma, kappa, seed):
    """Nor is one of 90,000: noise pulls the best one to a bound, where a step must not be wasted."""
    rng = np.random.default_rng(seed)
    load = np.arange(1.0, 33)
    rate = usl(load, 40, sigma, kappa) * (1 + 0.1 * rng.standard_normal(len(load)))
    points = Points(load, load, rate, np.full(len(load), 1 / len(load)))
    fitted, errors = KINDS["usl"](points, rate[None, :])
    tried = usl(load, 1, np.linspace(0, 0.3, 300)[:, None, None], np.linspace(0, 0.01, 300)[None, :, None])
    slope = (tried @ rate) / (tried**2).sum(axis=-1)  # the best one for each
    least = np.mean((slope[:, :, None] * tried - rate) ** 2, axis=-1).min()
    assert errors[0] <= least * (1 + 1e-9)
    assert 0 <= fitted[0, 1] <= 1
    assert fitted[0, 2] >= 0


@pytest.mark.parametrize(
    ("slope", "sigma", "kappa"), [(40, 0.03, 0.0005), (100, 0.02, 0), (5, 0, 0.002), (1e5, 0.3, 0.01)]
)
def test_the_scalability_law_is_recovered(slope, sigma, kappa):
    load, rate = sampled(lambda n: usl(n, slope, sigma, kappa), noise=0.02)
    found, _ = fit(load, 0 * load, rate)
    assert found.curve.kind == "usl"
    assert found.curve.slope == pytest.approx(slope, rel=0.1)
    assert found.curve.sigma == pytest.approx(sigma, abs=0.01 + 0.1 * sigma)
    assert found.curve.kappa == pytest.approx(kappa, abs=2e-5 + 0.1 * kappa)
    truth = Curve("usl", slope, sigma=sigma, kappa=kappa)
    if truth.knee < 60:
        assert found.knee == pytest.approx(truth.knee, rel=0.1)
        assert found.knee_low <= truth.knee * 1.03
        assert found.knee_high >= truth.knee * 0.97


CISCO = """955.16 1878.91 2688.01 3548.68 4315.54 5130.43 5931.37 6531.08 7219.8 7867.61 8278.71 8646.7 9047.84
9426.55 9645.37 9897.24 10097.6 10240.5 10532.39 10798.52 11151.43 11518.63 11806 12089.37 12075.41 12177.29 12211.41
12158.93 12155.27 12118.04 12140.4 12074.39"""
"""Queries per second of MySQL at 1 to 32 threads: the measurements in Schwartz, Practical Scalability Analysis with
the Universal Scalability Law (2015)."""


def test_the_measurements_of_a_book_give_the_coefficients_of_the_book():
    rate = np.array(CISCO.split(), float)
    threads = np.arange(1.0, 33)
    found, _ = fit(threads, 0 * threads, rate)
    assert found.curve.kind == "usl"
    assert found.curve.slope == pytest.approx(995.6486, rel=1e-4)
    assert found.curve.sigma == pytest.approx(0.02671591, rel=1e-3)
    assert found.curve.kappa == pytest.approx(7.690945e-4, rel=1e-3)
    assert int(found.curve.peak) == 35
    assert float(found.curve.at(found.curve.peak)) == pytest.approx(12_341, rel=2e-4)


def test_a_cap_on_the_batch_is_a_flat_top():
    load, rate = sampled(lambda n: np.minimum(40 * n, 1000))
    found, _ = fit(np.minimum(load, 25), np.maximum(load - 25, 0), rate)
    assert found.curve.kind == "flat-top"
    assert found.knee == pytest.approx(25, rel=0.03)
    assert found.knee_running == pytest.approx(25, abs=0.8)
    assert found.knee_low <= 25 <= found.knee_high or found.knee_high - found.knee_low < 1
    assert found.agreed == 1


def test_no_limit_seen_is_no_knee():
    load, rate = sampled(lambda n: 40 * n)
    found, _ = fit(load, 0 * load, rate)
    assert found.curve.kind == "linear"
    assert found.knee == math.inf
    assert not found.past_knee
    assert found.gain_pct == pytest.approx(100)
    assert "not reached" in found.lines()[1]


def test_straight_lines_with_noise_are_not_bent():
    found = [fit(load, 0 * load, rate, resamples=0)[0] for load, rate in map(noisy_line, range(60))]
    assert sum(one.past_knee for one in found) == 0


def noisy_line(seed):
    return sampled(lambda n: 40 * n, noise=0.1, seed=seed)


def test_where_throughput_falls_again():
    load, rate = sampled(lambda n: usl(n, 40, 0.02, 0.002), noise=0.02)
    found, _ = fit(load, 0 * load, rate, now=(64, 0, float(rate[-1])))
    peak = math.sqrt(0.98 / 0.002)
    assert found.curve.peak == pytest.approx(peak, rel=0.05)
    best, here = usl(peak, 40, 0.02, 0.002), usl(64, 40, 0.02, 0.002)
    assert found.loss_pct == pytest.approx(100 * (1 - here / best), abs=2)
    assert found.gain_pct < 0
    at_peak, _ = fit(load, 0 * load, rate, now=(peak, 0, best))
    assert at_peak.loss_pct == pytest.approx(0, abs=0.5)


def test_the_knee_is_where_power_is_greatest():
    for curve in (
        Curve("usl", 40, sigma=0.03, kappa=0.0005),
        Curve("usl", 40, sigma=0, kappa=0.0005),
        Curve("flat-top", 40, top=1000),
    ):
        n = np.linspace(1, 200, 200_000)
        assert curve.knee == pytest.approx(n[np.argmax(curve.at(n) ** 2 / n)], rel=1e-3)
    assert Curve("usl", 40, sigma=0.05).knee == pytest.approx(19)  # 1 / sigma - 1
    assert Curve("usl", 40).knee == math.inf
    assert Curve("usl", 40, sigma=1, kappa=1).knee == 1


# -- what cannot be fitted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("running", "waiting", "rate", "words"),
    [
        ([], [], [], "no sample"),
        ([NAN, 1], [0, 0], [1, NAN], "no sample"),
        ([0, 0], [0, 0], [0, 0], "no sample"),
        ([8] * 50, [0] * 50, [400] * 50, "stayed between 8 and 8"),
        ([8, 9, 10], [0, 0, 0], [400, 410, 420], "stayed between 8 and 10"),
        ([1, 2, 4], [0, 0, 0], [0, 0, 0], "nothing was finished"),
    ],
)
def test_what_cannot_be_fitted_says_why(running, waiting, rate, words):
    found, why = fit(running, waiting, rate)
    assert found is None
    assert words in why


numbers = st.floats(0, 1e6) | st.sampled_from([NAN, math.inf, -1.0, 0.0])


@given(st.lists(st.tuples(numbers, numbers, numbers), max_size=40))
@settings(max_examples=60, deadline=None)
def test_nothing_that_a_file_can_hold_breaks_it(rows):
    columns = np.array(rows, np.float64).reshape(-1, 3).T
    found, why = fit(*columns)
    assert (found is None) == bool(why)
    if found is not None:
        assert found.curve.slope > 0
        assert found.lines()


# -- recordings --------------------------------------------------------------------------------------------------


def recording(seconds=300):
    """One to 40 requests in the system, at most 16 running; each takes 2 s, so N = X R gives N / 2 a second."""
    view = FakeLatency()
    for second in range(1, seconds + 1):
        load = 40 if second > seconds - 40 else 1 + second % 40
        view.scrape(
            T0 + second * NS,
            running=min(load, 16),
            waiting=max(load - 16, 0),
            output_tps=38.0 * min(load, 16),
            finished=load / 2,
            e2e_n=load / 2,
            e2e_sum_s=load,
        )
    return view


def test_a_recording():
    view = recording()
    ((key, (found, why)),) = of_scene(Scene(view, T0, T0 + 300 * NS)).items()
    assert why == ""
    assert view.strings.text(key[0]) == ENGINE
    assert found.knee_running == pytest.approx(16)
    assert (found.load, found.running) == (40, 16)
    assert found.throughput == pytest.approx(608)
    assert found.little.ratio == pytest.approx(1)
    assert "Little's law" in found.lines()[-1]


def test_littles_law_shows_figures_that_do_not_belong_together():
    rows = recording().rows("engine").copy()
    rows["e2e_sum_s"] /= 3
    assert little(rows).ratio == pytest.approx(1 / 3)
    rows["e2e_sum_s"] = NAN
    assert math.isnan(little(rows).ratio)
    assert math.isnan(little(np.empty(0, CHANNEL.dtype)).ratio)


def test_an_engine_that_went_silent_has_no_operating_point():
    rows = recording().rows("engine")
    found, why = of_rows(rows, T0 + 400 * NS)
    assert found is None
    assert "of late" in why


def test_the_same_samples_give_the_same_answer():
    load, rate = sampled(lambda n: usl(n, 40, 0.03, 0.0005))
    assert fit(load, 0 * load, rate) == fit(load, 0 * load, rate)
    shuffled = np.random.default_rng(9).permutation(len(load))
    again, _ = fit(load[shuffled], 0 * load, rate[shuffled], now=(64.0, 0.0, float(rate[-1])))
    assert again.curve.sigma == pytest.approx(fit(load, 0 * load, rate)[0].curve.sigma, rel=1e-6)
