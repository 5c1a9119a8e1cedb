"""Rules over requests: errors, refusals, limits, retries, and the objectives they burn."""

import math

import pytest
from ui.fakelatency import MS, FakeLatency
from ui.fakeview import T0

from opusmon.clock import NS
from opusmon.slo import evaluate, judge_requests, tally
from opusmon.triage import rules_api_slo
from opusmon.triage.instants import instants
from opusmon.triage.retries import first_starts
from opusmon.triage.scene import Scene
from opusmon.triage.severity import CRIT, WARN

from .api_session import LLAMA, PROXY, at, burning, find, numbers, steady

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


def test_of_requests_that_are_not_streamed_it_is_said_that_there_is_no_ttft():
    view = steady(60, ttft_ns=math.nan)
    for number in range(20):
        view.request(T0 + (20 + number) * NS + 1, retry=1, ttft_ns=math.nan)
    (found,) = find(view, "retries_hide_latency", 60)
    missing = {one["name"] for one in found.to_json()["evidence"] if one["value"] is None}
    assert missing == {"ttft_p95_s", "ttft_p95_with_retries_s"}


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


# -- objectives --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("slow", "failed", "cause", "look"),
    [
        (300, 0, "likely TTFT over 800 ms for more", "slowest requests"),
        (0, 300, "errors, which are bad in this objective too, for more", "failed requests"),
        (
            100,
            200,
            "errors, which are bad in this objective too, more than TTFT over 800 ms, for",
            "failed requests",
        ),
        (200, 100, "likely TTFT over 800 ms, more than errors, for more", "slowest requests"),
    ],
)
def test_the_cause_of_a_burn_is_what_most_of_the_bad_requests_were(slow, failed, cause, look):
    """A server that refuses everything within a millisecond breaks an objective about TTFT, and is not slow."""
    view = burning(slos=("ttft_p99<800ms",), bad=(300, 300 + slow))
    for second in range(300 + slow, 300 + slow + failed):
        view.failed(T0 + second * NS + 2, status=503)
    (found,) = find(view, "slo_burn_fast", 900)
    seen = numbers(found)
    assert seen["bad"] == 300
    assert seen.get("failed", 0) == failed
    assert found.cause.startswith(cause)
    assert ("none was bad for its TTFT alone" in found.cause) == (not slow)
    assert look in found.next
