"""Rules over API latency: sessions built so that the figures are arithmetic, and the same found wherever pieces begin."""

import math
from pathlib import Path

import numpy as np
import pytest
from sessions import h200x2
from ui.fakelatency import END, ENGINE, MS, FakeLatency, serving
from ui.fakeview import T0

from opusmon.clock import NS, Anchors, ManualClock
from opusmon.recording import Recorder, Recording
from opusmon.schema import Batch, StringTable
from opusmon.slo import evaluate, judge_requests, tally
from opusmon.triage import rules_api, rules_api_shape, rules_api_slo, run
from opusmon.triage.bend import find_bend
from opusmon.triage.finding import merge
from opusmon.triage.instants import Windows, instants
from opusmon.triage.retries import first_starts
from opusmon.triage.scene import RULES, Scene
from opusmon.triage.severity import CRIT, NOTE, WARN
from opusmon.window import Window

PROXY = "proxy (sent upstream)"
LLAMA = f"engine {ENGINE} llama-70b"
NAMES = sorted(
    name for name, one in RULES.items() if one.find.__module__.startswith("opusmon.triage.rules_api")
)


@pytest.fixture(autouse=True)
def only_these(monkeypatch):
    monkeypatch.setattr(run, "MODULES", ("rules_api",))
    monkeypatch.setattr(run, "RULES", {name: RULES[name] for name in NAMES})


def find(view, name, end_s, start_s=0):
    scene = Scene(view, T0 + start_s * NS, T0 + end_s * NS)
    return merge(RULES[name].find(scene), RULES[name].join_ns)


def at(finding):
    """Range in seconds of the session."""
    return (finding.t0 - T0) / NS, (finding.t1 - T0) / NS


def numbers(finding):
    return {one.name: one.value for one in finding.evidence}


def steady(seconds, view=None, per_s=2, begin=0, **changes):
    """`per_s` good requests a second."""
    view = view or FakeLatency()
    for number in range(per_s * begin, per_s * seconds):
        view.request(T0 + (number + 1) * NS // per_s, **changes)
    return view


def test_the_rules_are_all_there():
    assert NAMES == [
        "kv_pressure",
        "latency_knee",
        "overloaded",
        "preemptions",
        "queue_growth",
        "rate_limit_near",
        "rate_limited",
        "request_errors",
        "retries_hide_latency",
        "saturated",
        "slo_burn_fast",
        "slo_burn_slow",
        "volatile_latency",
    ]
    assert rules_api.rules_api_slo is not None


def test_a_quiet_session_has_nothing():
    view = steady(400)
    for second in range(1, 401):
        view.scrape(T0 + second * NS, running=8, waiting=second % 2, kv_used_max_pct=60)
        view.bucket(T0 + second * NS, "ttft", 0.1, 0.25, 2)
    for second in range(0, 400, 60):
        view.slo("ttft_p95<800ms", T0 + second * NS)
        view.slo("errors<1%", T0 + second * NS)
    assert run.look(view, T0, T0 + 400 * NS) == []


def test_an_empty_session_has_nothing():
    view = FakeLatency()
    assert run.look(view, T0, T0 + 400 * NS) == []
    view.status("proxy", state="unavailable", reason="off")
    assert run.look(view, T0, T0 + 400 * NS) == []


# -- errors ------------------------------------------------------------------------------------------------------


def test_errors_by_outcome():
    view = steady(120)
    for number in range(10):
        view.request(T0 + (60 + number) * NS + 1, outcome="truncated")
    (found,) = find(view, "request_errors", 120)
    # 10 of 130 in the minute up to 70 s: 120 good ones and all of the bad.
    assert (found.subject, found.severity) == (f"{PROXY} truncated", WARN)
    assert at(found) == (60 + 1e-9, 69 + 1e-9)
    assert numbers(found)["count"] == 10
    assert numbers(found)["requests"] == 130
    assert numbers(found)["share_pct"] == pytest.approx(100 * 10 / 130)
    assert "7.69 % of requests end in truncated (10 of 130 in 60 s" in found.title
    assert found.open  # at 120 s the minute still holds nine of them
    assert not find(view, "request_errors", 180)[0].open


def test_two_errors_are_luck_and_three_of_three_are_not():
    view = FakeLatency()
    view.failed(T0 + 10 * NS, status=500, error="api_error")
    view.failed(T0 + 11 * NS, status=500, error="api_error")
    assert find(view, "request_errors", 60) == []
    view.failed(T0 + 12 * NS, status=500, error="api_error")
    (found,) = find(view, "request_errors", 60)
    assert (found.subject, found.severity, at(found)) == (f"{PROXY} HTTP 500", CRIT, (10, 12))
    assert numbers(found)["error"] == "api_error"
    assert "server likely failed" in found.cause


def test_what_clients_ask_wrongly_is_said_to_be_theirs():
    view = steady(30)
    for number in range(20):
        error = "invalid_request_error" if number % 3 else "request_too_large"
        view.failed(T0 + (5 + number) * NS + 1, status=400, error=error)
    (found,) = find(view, "request_errors", 30)
    assert "what clients ask for" in found.cause
    assert numbers(found)["error"] == "invalid_request_error"


def test_a_small_share_of_many_is_no_finding():
    view = steady(60, per_s=10)
    for number in range(4):
        view.request(T0 + (20 + number) * NS + 1, outcome="timeout")
    assert find(view, "request_errors", 60) == []  # 4 of 604: surely over 0.26 % only


@pytest.mark.parametrize("outcome", ["client_disconnect", "monitor_stopped"])
def test_what_was_broken_off_on_this_side_is_no_error(outcome):
    view = steady(60)
    for number in range(30):
        view.request(T0 + (20 + number) * NS + 1, outcome=outcome)
    assert find(view, "request_errors", 60) == []


def test_sources_are_not_mixed():
    view = steady(60)
    for number in range(6):
        view.request(T0 + (20 + number) * NS + 1, outcome="timeout")
        view.request(
            T0 + (20 + number) * NS + 2, outcome="timeout", source="canary", start="intended send time"
        )
    found = {one.subject: numbers(one) for one in find(view, "request_errors", 60)}
    assert set(found) == {f"{PROXY} timeout", "canary (intended send time) timeout"}
    assert found["canary (intended send time) timeout"]["requests"] == 6
    assert found["canary (intended send time) timeout"]["share_pct"] == 100
    assert found[f"{PROXY} timeout"]["count"] == 6


def test_engines_count_their_own_failures():
    view = FakeLatency()
    for second in range(1, 61):
        view.scrape(T0 + second * NS, finished=4, failed=2 if 30 <= second < 40 else 0)
    (found,) = find(view, "request_errors", 60)
    assert (found.subject, at(found)) == (f"{LLAMA} failed", (30, 39))
    # Worst at 40 s: 20 of 160; later windows hold as many of more.
    assert numbers(found)["share_pct"] == pytest.approx(12.5)


# -- refusals, limits, retries -----------------------------------------------------------------------------------


def test_refusals_are_told_apart_however_the_server_says_them():
    view = steady(60)
    for number in range(5):
        view.failed(T0 + (20 + number) * NS + 1, status=529)
        view.request(T0 + (20 + number) * NS + 2, outcome="stream_error_event", error="overloaded_error")
        view.failed(
            T0 + (30 + number) * NS + 1, status=429, error="rate_limit_error", retry_after_s=3 + number
        )
    (busy,) = find(view, "overloaded", 60)
    assert (busy.subject, numbers(busy)["count"], at(busy)) == (f"{PROXY} 529", 10, (20 + 1e-9, 24 + 2e-9))
    (limited,) = find(view, "rate_limited", 60)
    assert (limited.subject, numbers(limited)["count"]) == (f"{PROXY} 429", 5)
    assert numbers(limited)["retry_after_s"] == 7
    assert find(view, "request_errors", 60) == []


def test_the_tightest_limit_counts():
    view = FakeLatency()
    for second in range(1, 31):
        left = 100 - 4 * second if second <= 24 else 60
        view.request(
            T0 + second * NS,
            limit_requests=50,
            left_requests=45,
            limit_input_tokens=100_000,
            left_input_tokens=1000 * left,
        )
    (found,) = find(view, "rate_limit_near", 30)
    assert found.subject == f"{PROXY} claude-sonnet-5-5"
    assert at(found) == (21, 24)  # 16, 12, 8 and 4 % left
    assert (found.severity, numbers(found)["left_pct"]) == (WARN, pytest.approx(4))
    assert "4 % left of the limit of input tokens" in found.title
    assert not found.open


def test_limits_that_are_not_told_are_not_near():
    view = steady(30)
    view.request(T0 + 10 * NS, limit_requests=0, left_requests=0)
    view.request(T0 + 11 * NS, limit_requests=50, left_requests=10)  # 20 % is not under 20 %
    assert find(view, "rate_limit_near", 30) == []


def test_retries_hide_what_users_wait_for():
    view = steady(60, e2e_ns=1 * NS, ttft_ns=200 * MS)
    for number in range(20):
        begin = T0 + (20 + number) * NS
        view.failed(begin + 500 * MS + 1, e2e_ns=500 * MS, retry=0)
        view.failed(begin + 1_440 * MS + 1, e2e_ns=500 * MS, retry=1, retry_after_s=3.5)
        view.request(begin + 7_000 * MS + 1, e2e_ns=2 * NS, ttft_ns=300 * MS, retry=2)
    (found,) = find(view, "retries_hide_latency", 60)
    seen = numbers(found)
    # A chain takes 7 s from the first attempt to the end; the last attempt alone 2 s.
    assert seen["e2e_p95_s"] == pytest.approx(2)
    assert seen["e2e_p95_with_retries_s"] == pytest.approx(7)
    assert seen["ttft_p95_with_retries_s"] == pytest.approx(5.3)
    assert "E2E p95 7 s for users, 2 s per attempt" in found.title
    assert at(found)[0] == pytest.approx(21.44)


def test_few_retries_are_no_finding():
    view = steady(60, per_s=5)
    for number in range(6):
        view.request(T0 + (20 + number) * NS + 1, retry=1)  # 6 of 306: surely over 0.9 % only
    assert find(view, "retries_hide_latency", 60) == []
    assert find(steady(60, retry=math.nan), "retries_hide_latency", 60) == []


def test_a_retry_without_its_first_attempt_waited_for_itself_only():
    view = FakeLatency()
    view.failed(T0 + 10 * NS, e2e_ns=NS, model="other")
    view.request(T0 + 20 * NS, e2e_ns=NS, retry=1)
    view.failed(T0 + 21 * NS, e2e_ns=NS)
    view.request(T0 + 90 * NS, e2e_ns=NS, retry=1)  # 68 s after it
    rows = view.rows("request")
    assert first_starts(view.strings, rows).tolist() == [0, 0, 0, 0]


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


def bent(n=400, knee=8000, before=10_000, after=60_000, noise=0.1, seed=1):
    """TTFT of 100 ms and 10 us per token, 60 us past the knee."""
    rng = np.random.default_rng(seed)
    tokens = np.exp(rng.uniform(np.log(500), np.log(40_000), n))
    ttft = 100e6 + before * tokens + (after - before) * np.maximum(tokens - knee, 0)
    return tokens, ttft * np.exp(noise * rng.standard_normal(n))


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


# -- objectives --------------------------------------------------------------------------------------------------


def burning(slos=("ttft_p95<800ms",), seconds=900, bad=(300, 600), every=1):
    """Two requests a second; between two times one of them has its first token after 2 s."""
    view = FakeLatency()
    for second in range(1, seconds + 1):
        view.request(T0 + second * NS)
        slow = bad[0] <= second < bad[1] and second % every == 0
        view.request(T0 + second * NS + 1, ttft_ns=(2000 if slow else 200) * MS)
        if second % 60 == 1:
            for text in slos:
                view.slo(text, T0 + second * NS)
    return view


def test_a_fast_burn():
    (found,) = find(burning(slos=("ttft_p99<800ms",)), "slo_burn_fast", 900)
    assert (found.subject, found.severity) == (f"ttft_p99<800ms {PROXY}", CRIT)
    # The first bad one ends just after 300 s, the last one in the 5 s up to 600 s.
    assert at(found) == (300, 600)
    worst = numbers(found)
    assert worst["bad"] == 300
    assert worst["valid"] == 1199
    assert worst["burn_long"] == pytest.approx(100 * 300 / 1199)  # a quarter of the requests, and 1 % may be
    assert worst["burn_short"] == pytest.approx(50)  # half of those of the last 5 minutes


def test_what_burns_fast_is_not_said_to_burn_slowly_too():
    view = burning(slos=("ttft_p99<800ms",))
    before, after = find(view, "slo_burn_slow", 900)
    # It fires from a burn of 6 on, leaves the time over 14.4 to the other, and goes on where that ends.
    assert 6 < numbers(before)["burn_long"] < 14.6
    assert 14.4 < numbers(after)["burn_long"] < 22
    assert numbers(find(view, "slo_burn_fast", 900)[0])["burn_long"] > 25


def test_alerts_fire_when_they_fire_on_the_screen():
    view = burning(slos=("ttft_p99<800ms", "errors<2%/1d"))
    for second in range(200, 260):
        view.failed(T0 + second * NS + 2)
    scene = Scene(view, T0, T0 + 900 * NS)
    t = instants(scene)
    judged_fired = 0
    for one in rules_api_slo._watched(scene):
        judged = judge_requests(one.slo, view.rows("request"), view.strings.text)
        plain = tally(judged, T0, 5 * NS, 180)
        for place, alert in enumerate(one.alerts):
            fires, burn = rules_api_slo._fires(one.slo, one.edges, (t - one.known.first_t) // (5 * NS), alert)
            for n, when in enumerate(t.tolist()):
                check = evaluate(one.slo, plain, when, longest_ns=rules_api_slo.LONGEST_NS).checks[place]
                assert fires[n] == (check.state in ("page", "ticket"))
                assert burn[n] == pytest.approx(check.long.low)
                judged_fired += bool(fires[n])
    assert judged_fired > 20


def test_a_slow_burn():
    view = burning(slos=("ttft_p99<800ms/30d",), bad=(300, 900), every=3)  # then 1 in 6 is bad
    assert find(view, "slo_burn_fast", 900) == []
    (found,) = find(view, "slo_burn_slow", 900)
    assert (found.severity, found.open) == (CRIT, True)
    assert numbers(found)["burn_long"] == pytest.approx(100 * 200 / 1800, rel=0.01)


def test_without_an_objective_or_after_it_was_dropped_nothing_burns():
    assert find(burning(slos=()), "slo_burn_fast", 900) == []
    assert find(burning(slos=("nonsense",)), "slo_burn_fast", 900) == []
    view = burning(slos=("ttft_p99.5<800ms",), bad=(700, 900))
    assert find(view, "slo_burn_fast", 900)
    view._records["status"] = [row for row in view._records["status"] if row["t"] < T0 + 400 * NS]
    view._arrays.clear()
    assert find(view, "slo_burn_fast", 900) == []


def test_errors_and_the_engine_burn_by_themselves():
    view = FakeLatency()
    for second in range(1, 301):
        view.request(T0 + second * NS)
        view.scrape(T0 + second * NS, finished=4, failed=2, kv_used_max_pct=60)
        view.bucket(T0 + second * NS, "itl", 0.05, 0.1, 10)
        view.bucket(T0 + second * NS, "itl", 0.01, 0.025, 10)
        if second % 60 == 1:
            view.slo("errors<1%", T0 + second * NS)
            view.slo("itl_p98<50ms", T0 + second * NS)
    found = {one.subject: one for one in find(view, "slo_burn_fast", 300)}
    assert set(found) == {f"errors<1% {LLAMA}", f"itl_p98<50ms {LLAMA}"}
    assert numbers(found[f"errors<1% {LLAMA}"])["burn_long"] == pytest.approx(50)
    assert numbers(found[f"itl_p98<50ms {LLAMA}"])["burn_long"] == pytest.approx(25)


# -- the same wherever a look begins -----------------------------------------------------------------------------


def eventful():
    """Half an hour in which every rule has something to find, some of it over the edges of pieces."""
    view = burning(slos=("ttft_p98<800ms", "errors<2%/1d"), seconds=1800, bad=(560, 1250))
    rng = np.random.default_rng(2)
    for second in range(1, 1801):
        t = T0 + second * NS
        load = 1 + (second * 7) % 64 if second < 900 or second > 1500 else 64
        run_now = min(load, 25)
        view.scrape(
            t,
            running=run_now,
            waiting=(load - run_now) if not 1100 < second < 1260 else second - 1100,
            output_tps=40 * run_now * (1 + 0.03 * rng.standard_normal()),
            kv_used_max_pct=97 if 590 < second < 700 or 1190 < second < 1215 else 80,
            preemptions=1 if 1195 < second < 1205 else 0,
            failed=1 if 597 < second < 640 else 0,
        )
        if 580 < second < 700 or 1199 < second < 1230:
            view.failed(t + 7, status=529, e2e_ns=200 * MS)
            view.request(t + NS, retry=1, e2e_ns=NS // 2)
        if 595 < second < 606:
            view.failed(t + 9, status=429, error="rate_limit_error")
            view.request(t + 11, outcome="truncated")
        size, took = bent(n=1, seed=second)
        view.request(
            t + 13,
            source="otlp",
            start="API call",
            ttft_ns=float(took[0]),
            input_tokens=float(size[0]),
            cache_read_tokens=0,
            limit_requests=50,
            left_requests=5 if 590 < second < 610 else 40,
        )
    return view


def test_piece_borders_change_nothing(monkeypatch):
    view = eventful()
    t0, t1 = T0, T0 + 1790 * NS
    whole = run.look_over(view, t0, t1)
    assert {one.rule for one in whole} == set(NAMES)
    seen = {one.key for one in whole}
    for shift_s in (1, 7, 59):
        again = run.look_over(view, t0 - shift_s * NS, t1)
        assert again == whole
    for piece_s in (601, 367, 3600):
        monkeypatch.setattr(run, "PIECE_NS", piece_s * NS)
        again = run.look_over(view, t0, t1)
        assert {one.key for one in again} == seen
        assert again == whole


def test_live_looks_find_what_the_recording_has():
    view = eventful()
    whole = run.look_over(view, T0, T0 + 1790 * NS)
    for name in ("overloaded", "kv_pressure", "slo_burn_fast"):
        end = T0 + 690 * NS
        begin = end - RULES[name].lookback_ns
        live = merge(RULES[name].find(Scene(view, begin, end)), RULES[name].join_ns)
        assert live
        for one in live:
            (held,) = [f for f in whole if f.key == one.key and f.t0 <= one.t1 and one.t0 <= f.t1]
            assert held.t0 <= one.t0 <= one.t1 <= min(held.t1, end)
            assert begin <= one.t0


@pytest.mark.parametrize("file", [h200x2(), Path(__file__).parents[1] / "data" / "h200-streams.opusmon"])
def test_recordings_without_an_api_have_no_finding_about_one(file):
    with Recording.open(file) as recording:
        assert recording.t1 - recording.t0 > 40 * NS
        assert run.look_over(recording, recording.t0 - 1, recording.t1) == []


def test_a_recording_says_what_the_memory_said(tmp_path):
    """The same rows from a file: nothing is read that only a live window has."""
    view = serving()
    recorder = Recorder(tmp_path / "a.opusmon", strings=view.strings, clock=ManualClock())
    for name, channel in view.channels.items():
        recorder.push(Batch(channel, view.rows(name)))
    recorder.close()
    with Recording.open(tmp_path / "a.opusmon") as recording:
        stored = run.look_over(recording, T0, END)
        assert stored == run.look_over(view, T0, END) == run.look_over(Window.over(recording), T0, END)
    assert {one.rule for one in stored} == {"kv_pressure", "overloaded"}


def test_what_comes_in_late_is_seen():
    """The same range again with more rows, as when a paused screen is looked at while a file grows."""
    view = steady(60)
    assert find(view, "request_errors", 60) == []
    for number in range(10):
        view.request(T0 + (20 + number) * NS + 1, outcome="truncated")
    assert len(find(view, "request_errors", 60)) == 1


def test_windows_are_open_at_their_begin():
    rows_t = np.array([5, 10, 60, 65], np.int64) * NS
    windows = Windows(rows_t, np.array([65], np.int64) * NS)
    assert windows.sum(np.ones(4)).tolist() == [3]  # the row at 5 s is not in (5, 65]
    scene = Scene(FakeLatency(), 5 * NS, 15 * NS)
    assert instants(scene).tolist() == [10 * NS, 15 * NS]


def test_old_files_without_some_columns_find_nothing():
    class Bare:
        def __init__(self):
            self.strings, self.anchors = StringTable(), Anchors([])
            self.rows = np.zeros(3, dtype=[("t", "<i8"), ("source", "<u4")])
            self.rows["t"] = T0 + np.arange(1, 4) * NS
            self.channels = dict.fromkeys(("request", "engine", "engine_bucket", "status"), None)

        def query(self, channel, t0, t1):
            return self.rows[(self.rows["t"] > t0) & (self.rows["t"] <= t1)]

        latest = binned = None

    assert run.look(Bare(), T0, T0 + 120 * NS) == []
