"""The scenario table: figures by arithmetic, and causes planted or not."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ui.fakelatency import MS, FakeLatency
from ui.fakeview import T0

from opusmon.clock import NS
from opusmon.triage.finding import Finding
from opusmon.triage.scenarios import (
    Cause,
    _touching,
    _union,
    causes,
    main_cause,
    of_stalls,
    scenarios,
    table,
)
from opusmon.triage.scene import Scene
from opusmon.triage.severity import CRIT, NOTE, WARN


def finding(rule, begin_s, end_s, severity=WARN, subject="gpu 0"):
    return Finding(rule, subject, severity, T0 + begin_s * NS, T0 + end_s * NS, "", (), "", "")


def session(slow=(), seconds=600, **changes):
    """A request a second with its first token after 200 ms, 2 s in the seconds named; E2E a second more."""
    view = FakeLatency()
    for second in range(1, seconds + 1):
        ttft = (2000 if second in slow else 200) * MS
        fields = {"ttft_ns": ttft, "e2e_ns": ttft + NS, "input_tokens": 2000, "label": "chat"}
        view.request(T0 + second * NS + ttft + NS, **{**fields, **changes})
    return view


def look(view, given=(), seconds=620):
    return scenarios(Scene(view, T0, T0 + seconds * NS), list(given))


SLOW = frozenset(range(100, 110)) | frozenset(range(300, 310))


def test_figures():
    (one,) = look(session(SLOW))
    assert (one.source, one.group, one.size, one.latency, one.n) == (
        "proxy (sent upstream)",
        "chat",
        "1-4k",
        "ttft",
        600,
    )
    assert one.mean_ns == pytest.approx((580 * 200 + 20 * 2000) * MS / 600)
    assert one.p95_ns == 200 * MS  # 20 of 600 are 3.3 %
    assert one.volatility_pct == pytest.approx(100 * (200 / 260 - 1))
    assert (one.slow, one.rough, one.cause) == (20, False, None)


def test_a_planted_cause_is_named():
    found = [
        finding("xid", 100, 111),
        finding("xid", 300, 311),
        finding("clock_low", 0, 620),  # always
        finding("hbm", 450, 500),  # elsewhere
        finding("slo_burn_fast", 99, 112, CRIT),  # a symptom
    ]
    (one,) = look(session(SLOW), causes(found))
    assert one.slow == 20
    assert one.cause is not None
    assert (one.cause.name, one.cause.count, one.cause.slow) == ("xid (gpu 0)", 20, 20)
    # 22 s of 600 by 20 waits of 2 s, each touching for 24 of 600 s: 4 % by chance, twice 12.
    assert one.cause.lift == pytest.approx(600 / 26, rel=0.2)
    assert one.cause.chance <= 0.01


def test_what_always_holds_or_happens_elsewhere_is_no_cause():
    for given_cause in (finding("clock_low", 0, 620), finding("hbm", 450, 500), finding("xid", 103, 104)):
        (one,) = look(session(SLOW), causes([given_cause]))
        assert one.cause is None
        assert table([one])[-1].endswith("none found")


def test_long_requests_overlap_more_of_anything_and_that_proves_nothing():
    """Slow requests of 20 s, a pause of 100 ms every 15 s: all of them meet it, the quick ones rarely do."""
    rng = np.random.default_rng(4)
    begins = np.sort(rng.uniform(0, 3600, 800))
    slow = rng.random(800) < 0.05
    length = np.where(slow, 20.0, 0.2)
    spans = (np.stack((begins, begins + length), axis=1) * NS).astype(np.int64)
    pauses = np.arange(7.0, 3600, 15)
    cause = Cause("pause", (np.stack((pauses, pauses + 0.1), axis=1) * NS).astype(np.int64))
    assert main_cause(spans, slow, [cause]) is None


def test_one_episode_is_named_with_what_chance_alone_would_give():
    (one,) = look(session(range(100, 120), seconds=180), causes([finding("xid", 98, 128)]), seconds=200)
    assert one.cause is not None
    assert one.cause.name == "xid (gpu 0)"
    assert 0.01 < one.cause.chance < 0.25
    assert f"({100 * one.cause.chance:.0f} % of chance alone)" in table([one])[-1]
    (often,) = look(session(range(100, 120), seconds=180), causes([finding("xid", 40, 135)]), seconds=200)
    assert often.cause is None  # half of the time anyway


def test_what_holds_most_of_the_time_is_no_cause_however_sure():
    """On for 7 of 10 s at random; the slow ones always come then: 1.4 times chance, and surely no accident."""
    rng = np.random.default_rng(6)
    on = rng.random(600) < 0.7
    begins = np.arange(600) * 10 * NS
    cause = Cause("on", np.stack((begins[on], begins[on] + 9 * NS), axis=1))
    slow = np.zeros(600, np.bool_)
    slow[rng.choice(np.flatnonzero(on), 100, replace=False)] = True
    spans = np.stack((begins + 4 * NS, begins + 5 * NS), axis=1)
    assert main_cause(spans, slow, [cause]) is None


def test_causes_that_come_by_chance_are_rarely_named():
    named = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        begins = np.sort(rng.uniform(0, 1800, 600))
        slow = rng.random(600) < 0.08
        spans = (np.stack((begins, begins + np.where(slow, 3.0, 0.3)), axis=1) * NS).astype(np.int64)
        at = rng.uniform(0, 1800, 30)
        cause = Cause("noise", (np.stack((at, at + 2), axis=1) * NS).astype(np.int64))
        named += main_cause(spans, slow, [cause]) is not None
    assert named <= 3  # 1 % each


def test_sources_labels_and_sizes_are_kept_apart():
    view = session(SLOW)
    for second in range(1, 31):
        view.request(T0 + second * NS, label="batch", input_tokens=70_000, ttft_ns=NS)
        view.request(T0 + second * NS, label="", input_tokens=float("nan"), source="canary", start="API call")
    found = look(view)
    assert [(one.source.split()[0], one.group, one.size, one.n) for one in found] == [
        ("proxy", "batch", ">64k", 30),
        ("proxy", "chat", "1-4k", 600),
        ("canary", "claude-sonnet-5-5", "size unknown", 30),
    ]


def test_stalls_are_causes_by_process_and_kind():
    view = session(SLOW)
    for second in (101, 105, 301, 305):
        view.add("stall", T0 + second * NS + NS, kind="wait", process="vllm", pid=1, tid=1, dur_ns=5e8)
    view.add("stall", T0 + 50 * NS, kind="futex", process="vllm", pid=1, tid=1, dur_ns=float("nan"))
    scene = Scene(view, T0, T0 + 620 * NS)
    given_causes = of_stalls(scene)
    assert sorted(one.name for one in given_causes) == ["stall futex (vllm)", "stall wait (vllm)"]
    (one,) = scenarios(scene, given_causes)
    assert one.cause is not None
    assert one.cause.name == "stall wait (vllm)"
    assert one.cause.count >= 8  # each pause touches at least the two that wait then


def test_requests_that_are_not_streamed_are_judged_by_their_end():
    view = session(SLOW, ttft_ns=float("nan"), streaming=0)
    (one,) = look(view, causes([finding("xid", 100, 112), finding("xid", 300, 312)]))
    assert one.latency == "e2e"
    assert one.mean_ns == pytest.approx((580 * 1200 + 20 * 3000) * MS / 600)
    assert one.cause is not None


def test_table_and_json():
    view = session(SLOW)
    for second in range(1, 6):
        view.request(T0 + second * NS, label="few", input_tokens=10)
    found = look(view, causes([finding("xid", 100, 111), finding("xid", 300, 311)]))
    lines = table(found)
    assert lines[0] == "proxy (sent upstream), TTFT"
    assert lines[1].split() == [
        "group",
        "input",
        "n",
        "mean",
        "p95",
        "p95/mean",
        "main",
        "coincident",
        "cause",
    ]
    assert lines[2].startswith(
        "chat   1-4k           600   260 ms   200 ms     -23 %  xid (gpu 0): 20 of 20 slow"
    )
    assert "~200 ms" in lines[3]
    body = json.loads(json.dumps([one.to_json() for one in found], allow_nan=False))
    assert body[0]["cause"]["count"] == 20
    assert body[1]["cause"] is None
    assert body[1]["rough"] is True
    assert table([]) == []
    assert look(FakeLatency()) == []


def test_severity_decides_what_counts():
    given_findings = [finding("a", 0, 1, NOTE), finding("b", 0, 1, WARN), finding("b", 5, 6, WARN)]
    assert [one.name for one in causes(given_findings)] == ["a (gpu 0)", "b (gpu 0)"]
    (only,) = causes(given_findings, WARN)
    assert only.spans.tolist() == [[T0, T0 + NS], [T0 + 5 * NS, T0 + 6 * NS]]


span = st.tuples(st.integers(0, 100), st.integers(0, 30)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(span, min_size=1, max_size=12), st.lists(span, min_size=1, max_size=12))
def test_touching_is_what_it_says(spans, waits):
    begins, ends = _union(np.array(spans, np.int64), 0, 200)
    assert (begins[1:] > ends[:-1]).all()
    asked = np.array(waits, np.int64)
    found = _touching(begins, ends, asked[:, 0], asked[:, 1]).tolist()
    assert found == [any(a <= last and first <= b for a, b in spans) for first, last in waits]
