"""Rules over engines: queues, KV cache, preemptions, saturation; and over the shape of latency."""

import math

import numpy as np
import pytest
from ui.fakelatency import MS, FakeLatency
from ui.fakeview import T0

from opusmon.clock import NS
from opusmon.triage import rules_api_shape
from opusmon.triage.bend import find_bend
from opusmon.triage.severity import CRIT, NOTE, WARN

from .api_session import LLAMA, PROXY, at, bent, find, numbers, steady

# -- engines -----------------------------------------------------------------------------------------------------


def growing(rate=1.0, served=4, seconds=120, begin=30, end=100):
    view = FakeLatency()
    for second in range(1, seconds + 1):
        waiting = rate * min(max(second - begin, 0), end - begin)
        view.scrape(T0 + second * NS, running=64, waiting=waiting, finished=served, kv_used_max_pct=60)
    return view


def test_a_queue_that_grows():
    """One more waits each second from 31 to 100 s; means over 10 s rise for the last time in the minute to 125 s."""
    (found,) = find(growing(seconds=200), "queue_growth", 200)
    seen = numbers(found)
    assert seen["waiting"] == pytest.approx(70)
    assert seen["waiting_before"] == pytest.approx(40.5)  # mean of 36 to 45
    assert seen["served_per_s"] == pytest.approx(4)
    assert seen["arrivals_per_s"] == pytest.approx(4 + (70 - 36) / 59)
    assert seen["queue_wait_s"] == pytest.approx(70 / 4)
    assert (found.subject, found.severity, found.open) == (LLAMA, WARN, False)
    assert at(found) == (6, 125)  # the first minute whose means rise is that to 65 s


def test_a_queue_that_is_served_by_nobody():
    (found,) = find(growing(served=0), "queue_growth", 120)
    assert found.severity == CRIT
    assert "nothing is served" in found.title


@pytest.mark.parametrize("view", [growing(rate=0), growing(rate=0.1), growing(rate=-1, seconds=60)])
def test_queues_that_do_not_grow(view):
    assert find(view, "queue_growth", 120) == []


def test_a_long_queue_that_goes_up_and_down_does_not_grow():
    rng = np.random.default_rng(3)
    view = FakeLatency()
    for second in range(1, 601):
        view.scrape(
            T0 + second * NS, running=64, waiting=40 + int(8 * rng.standard_normal()), kv_used_max_pct=60
        )
    assert find(view, "queue_growth", 600) == []


def test_queue_lengths_that_are_missing_say_nothing():
    view = growing()
    for second in range(30, 90):
        view._records["engine"][second]["waiting"] = math.nan
    view._arrays.clear()
    assert find(view, "queue_growth", 120) == []


def test_kv_pressure():
    view = FakeLatency()
    for second in range(1, 61):
        full = 97.5 if 20 <= second <= 30 else 95 if second == 31 else 94.9
        view.scrape(T0 + second * NS, kv_used_max_pct=full, waiting=3 if second == 25 else 0)
    (found,) = find(view, "kv_pressure", 60)
    assert (found.severity, at(found)) == (WARN, (20, 31))
    assert "97.5 % full, 3 requests wait" in found.title
    calm = FakeLatency()
    for second in range(1, 61):
        calm.scrape(T0 + second * NS, kv_used_max_pct=97 if second % 3 else 90, waiting=0)
    assert find(calm, "kv_pressure", 60) == []  # never three in a row
    for second in range(61, 70):
        calm.scrape(T0 + second * NS, kv_used_max_pct=97, waiting=0)
    (note,) = find(calm, "kv_pressure", 70)
    assert (note.severity, note.open) == (NOTE, True)


def test_preemptions():
    view = FakeLatency()
    for second in range(1, 121):
        view.scrape(
            T0 + second * NS, finished=4, preemptions=1 if second in (30, 40, 50) else 0, kv_used_max_pct=60
        )
    (found,) = find(view, "preemptions", 120)
    assert (found.severity, at(found), numbers(found)["preemptions"]) == (WARN, (30, 50), 3)
    assert numbers(found)["share_pct"] == pytest.approx(100 * 3 / 240) or numbers(found)["finished"] < 240
    view.scrape(T0 + 51 * NS, finished=4, preemptions=30, kv_used_max_pct=60)
    (worse,) = find(view, "preemptions", 120)
    assert (worse.severity, numbers(worse)["preemptions"]) == (CRIT, 33)
    del view._records["engine"][-1], view._records["engine"][49]
    view._arrays.clear()
    assert find(view, "preemptions", 120) == []


def loads(cap=25, rate=40.0, top=64, seconds=640, retro=0.0):
    """A load that goes up and down in steps; `cap` requests run at once, each makes `rate` tokens/s."""
    view = FakeLatency()
    rng = np.random.default_rng(7)
    for second in range(1, seconds + 1):
        load = 1 + (second * 7) % top if second < seconds - 90 else top
        run_now = min(load, cap)
        tps = run_now * rate * (1 - retro * max(load - cap, 0)) * (1 + 0.03 * rng.standard_normal())
        view.scrape(
            T0 + second * NS,
            running=run_now,
            waiting=load - run_now,
            output_tps=tps,
            kv_used_max_pct=60,
            e2e_n=run_now / 5,
            e2e_sum_s=load,
        )
    return view


def test_an_engine_past_its_knee():
    (found,) = find(loads(), "saturated", 640)
    seen = numbers(found)
    assert (found.subject, found.severity) == (LLAMA, WARN)
    assert found.open
    assert seen["load"] == pytest.approx(64)
    assert seen["curve"] == "flat-top"
    assert seen["running_at_knee"] == pytest.approx(25, abs=1)
    assert seen["knee_low"] < 25.5
    assert seen["knee_high"] > 24.5
    assert seen["gain_of_twice_the_load_pct"] == pytest.approx(0)
    assert seen["little_ratio"] == pytest.approx(1)  # N requests for a second each is N s of E2E a second
    assert "knee at 2" in found.title


def test_an_engine_that_does_worse_the_more_it_has():
    (found,) = find(loads(retro=0.012), "saturated", 640)
    assert found.severity == CRIT
    assert numbers(found)["under_peak_pct"] > 5


def test_engines_that_are_not_saturated():
    assert find(loads(cap=1000), "saturated", 640) == []  # no limit seen
    steady_load = loads(top=1)
    assert find(steady_load, "saturated", 640) == []  # no curve to see
    rising = loads(cap=1000)
    for row in rising._records["engine"]:
        row["output_tps"] *= 1 / (1 + 0.02 * (row["running"] - 1))
    rising._arrays.clear()
    assert find(rising, "saturated", 640) == []  # past the knee at 49, but twice the load would add 28 %
    low = loads()
    for second in range(641, 760):
        low.scrape(T0 + second * NS, running=10, waiting=0, output_tps=400, kv_used_max_pct=60)
    assert find(low, "saturated", 760, start_s=700) == []  # back below the knee


# -- shape -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_bend_is_found_where_it_is(seed):
    bend = find_bend(*bent(seed=seed))
    assert bend.low_tokens <= 8000 * 1.1
    assert bend.high_tokens >= 8000 * 0.9
    assert bend.tokens == pytest.approx(8000, rel=0.35)
    assert bend.after_ns == pytest.approx(60_000, rel=0.3)
    assert bend.agreed == 1
    assert bend.n == 400


def test_straight_lines_do_not_bend():
    assert sum(find_bend(*bent(after=10_000, noise=0.25, seed=seed)) is not None for seed in range(100)) == 0


def test_a_bend_that_hardly_matters_is_none():
    # The longest inputs, 38,000 tokens, take 560 instead of 480 ms: sure, and no trouble.
    assert find_bend(*bent(knee=30_000, after=20_000, noise=0.005)) is None


def test_too_little_to_bend():
    assert find_bend(*bent(n=39)) is None
    tokens, ttft = bent()
    assert find_bend(np.round(tokens / 20_000) * 20_000 + 1, ttft) is None  # three lengths
    assert find_bend(tokens * math.nan, ttft) is None


def test_the_knee_of_ttft_is_found_without_what_the_cache_gave():
    view = FakeLatency()
    tokens, ttft = bent()
    for number, (size, took) in enumerate(zip(tokens, ttft, strict=True)):
        cached = 5_000 * (number % 3)
        view.request(
            T0 + (100 + number) * NS,
            ttft_ns=took,
            input_tokens=size + cached,
            cache_read_tokens=cached,
            label="x",
        )
    (found,) = find(view, "latency_knee", 560)
    assert (found.severity, found.subject) == (NOTE, PROXY)
    assert numbers(found)["knee_tokens"] == pytest.approx(8000, rel=0.35)
    assert numbers(found)["slope_ratio"] > 3
    assert found.t1 % (60 * NS) == 0


def test_volatility_by_label():
    view = FakeLatency()
    for number in range(400):
        slow = number % 10 == 0
        view.request(T0 + (number + 1) * NS, label="chat", ttft_ns=(20 if slow else 1) * 100 * MS)
        view.request(T0 + (number + 1) * NS, label="batch", ttft_ns=100 * MS * (1 + number % 3))
    (found,) = find(view, "volatile_latency", 420)
    # A tenth takes 2 s, the others 100 ms: mean 290 ms, p95 2 s.
    assert found.subject == f"{PROXY} label chat"
    assert numbers(found)["p95_over_mean"] == pytest.approx(2 / 0.29, rel=0.02)
    assert found.severity == WARN
    assert numbers(found)["p95_s"] == pytest.approx(2)


def test_exponential_times_are_as_volatile_as_a_queue_makes_them():
    rng = np.random.default_rng(5)
    view = FakeLatency()
    for number, took in enumerate(rng.exponential(300e6, 500)):
        view.request(T0 + (number + 1) * NS, ttft_ns=took)
    assert find(view, "volatile_latency", 520) == []


def test_what_was_fitted_once_is_not_fitted_again(monkeypatch):
    view = steady(400)
    calls = []
    memo = rules_api_shape.Memo(lambda scene, t: calls.append(t) or {})
    monkeypatch.setattr(rules_api_shape, "_SCATTERS", memo)
    for end in range(300, 335):
        find(view, "volatile_latency", end, start_s=end - 180)
    assert len(calls) == len(set(calls)) == 4  # the minutes at 140, 200, 260 and 320 s
    find(steady(400), "volatile_latency", 329, start_s=149)
    assert len(calls) == 6
