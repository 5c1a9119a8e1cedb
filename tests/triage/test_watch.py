"""The rules at work on a session as it grows: what they say early, and that in the end they say what a look over the
whole file says, whatever the steps."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sessions import DATA, h200x2

from opusmon.channels import BY_NAME
from opusmon.clock import NS, Anchors
from opusmon.recording import Recording
from opusmon.schema import Batch
from opusmon.triage import run, watch
from opusmon.triage.finding import Finding
from opusmon.triage.limits import overridden
from opusmon.triage.scene import RULES
from opusmon.triage.severity import CRIT, NOTE, WARN
from opusmon.triage.watch import Watch
from opusmon.window import Window

from .cuda_session import MS, CudaSession
from .session import T0
from .test_rules_cuda_pieces import planted
from .test_rules_host import CALM

STREAMS = DATA / "h200-streams.opusmon"
SECONDS = 400
MODELS = {"source": "proxy", "start": "sent upstream", "endpoint": "/v1/messages", "model": "llama"}


def night() -> CudaSession:
    """Something of everything: memory bandwidth, clocks, an XID, CPUs, a queue, errors, an objective, stalls."""
    session = CudaSession()
    random = np.random.default_rng(5)
    for t in range(0, SECONDS, 60):
        session.add("gpu_device", t + 0.5, gpu=0, gi=-1, max_sm_clock_mhz=1980, power_limit_mw=700_000)
        session.add("status", t + 0.6, collector="slo", state="ok", reason="ttft_p95<800ms", scope="ttft")
    for t in range(1, SECONDS + 1):
        hot, capped = 100 <= t < 160 or t >= 350, 150 <= t < 230
        session.add(
            "gpu",
            t,
            gpu=0,
            gi=-1,
            hbm_bw_pct=97 + random.uniform(0, 2) if hot else 60.0,
            sm_util_pct=90.0,
            gpu_busy_pct=90.0,
            throttle_mask=4 if capped else 0,
            throttle_power_ns=NS * max(0, min(t, 230) - 150),
            sm_clock_mhz=1500 + t if capped else 1980,
            mem_used_b=(100 + t / 20) * 2**30,
            mem_total_b=140 * 2**30,
        )
        busy = 70 <= t < 90 or 300 <= t < 330
        session.add("host", t, **{**CALM, "psi_cpu_some_pct": 20.0 + t / 100 if busy else 2.0})
        queue = 40 if 200 <= t < 260 else 0
        session.add("engine", t, engine="127.0.0.1:8000/metrics", model="llama", running=8, waiting=queue)
        for part in range(4):
            slow = 200 <= t < 260
            fields = {
                **MODELS,
                "ttft_ns": (2000 if slow else 200) * MS,
                "e2e_ns": (3000 if slow else 1200) * MS,
                "outcome": "upstream_http_error" if slow and part == 0 else "ok",
                "status": 529 if slow and part == 0 else 200,
            }
            session.add("request", t + part / 4, **fields, number=4 * t + part)
        if t % 9 == 0 or 120 <= t < 140:
            session.stall(t + random.uniform(0, 0.9), "wait", dur_ns=int(random.uniform(20, 400)) * MS)
    session.add("gpu_event", 250.4, gpu=0, gi=-1, kind="xid", code=79, detail="XID 79")
    return session


@pytest.fixture(scope="module")
def views() -> dict[str, Window]:
    """The recordings of real GPUs, and two sessions made row by row."""
    recorded = {"h200x2": h200x2(), "streams": STREAMS}
    made = {"night": night().view(), "planted": planted(1).view()}
    return made | {name: Window.over(Recording.open(path)) for name, path in recorded.items()}


@pytest.fixture(scope="module")
def whole(views: dict[str, Window]) -> dict[str, list[Finding]]:
    """What is found in each when all of it is there."""
    return {name: run.look_over(view, view.t0 - 1, view.t1) for name, view in views.items()}


def advance(watch: Watch, view: Window, t: int) -> None:
    """All the looks that the screen takes to reach an instant."""
    while not watch.advance(view.t0, t):
        pass


def ends(view: Window, steps_s: list[float]) -> list[int]:
    """Ends of looks that are so far apart, the steps over and over, up to the session's end."""
    found = [view.t0]
    for step_s in itertools.cycle(steps_s):
        if found[-1] == view.t1:
            return found
        found.append(min(view.t1, found[-1] + round(step_s * NS)))
    return found


def shown(findings: list[Finding]) -> list[str]:
    """As text: a threshold that is missing is not equal to itself."""
    return list(map(repr, findings))


def outline(findings: list[Finding]) -> list[tuple[object, ...]]:
    return [(one.rule, one.subject, one.severity, one.t0, one.t1, one.open) for one in findings]


# -- whatever the steps ------------------------------------------------------------------------------------------


@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    name=st.sampled_from(["h200x2", "streams", "night", "planted"]),
    steps_s=st.lists(st.floats(0.3, 30), min_size=1, max_size=8).filter(lambda it: sum(it) > 3 * len(it)),
)
def test_it_ends_with_what_a_look_over_the_whole_finds(
    views: dict[str, Window], whole: dict[str, list[Finding]], name: str, steps_s: list[float]
) -> None:
    view = views[name]
    live = Watch(view)
    for t in ends(view, steps_s):
        advance(live, view, t)
    assert shown(live.findings) == shown(whole[name])


@pytest.mark.parametrize(("name", "step_s"), [("streams", 0.3), ("night", 1.0), ("night", 30.0)])
def test_and_with_steps_that_are_all_alike(
    views: dict[str, Window], whole: dict[str, list[Finding]], name: str, step_s: float
) -> None:
    view = views[name]
    live = Watch(view)
    for t in ends(view, [step_s]):
        advance(live, view, t)
    assert shown(live.findings) == shown(whole[name])


def test_what_there_is_to_find(whole: dict[str, list[Finding]]) -> None:
    """The property above says something only where there is something: rules of every pane, some of it open."""
    assert [(one.rule, one.open) for one in whole["h200x2"]] == [("throttled", False)] * 2
    assert whole["streams"] == []
    rules = {one.rule for one in whole["night"]}
    assert rules >= {"hbm_bandwidth_saturated", "throttled", "xid", "cpu_saturated", "overloaded"}
    assert {one.open for one in whole["night"]} == {True, False}
    assert {one.severity for one in whole["night"]} == {NOTE, WARN, CRIT}
    assert len(whole["planted"]) > 20


def test_rows_that_come_late_are_seen_all_the_same(
    views: dict[str, Window], whole: dict[str, list[Finding]]
) -> None:
    """Collectors send what they saw at the end of their turn: rows of one channel come after newer ones of another."""
    view = views["night"]
    late_s = {"request": 1.7, "stall": 0.9, "gpu": 0.4, "engine": 1.2, "gpu_event": 2.5}
    came = []
    for name in view.channels:
        rows = view.query(name, 0, view.t1)
        came += [(int(rows["t"][n]) + late_s.get(name, 0) * NS, name, n, rows) for n in range(len(rows))]
    came.sort(key=lambda one: one[:3])
    growing = Window(view.strings, Anchors(), keep_ns=10**15, cap_b=2**40)
    live = Watch(growing)
    looked = 0
    for t, name, n, rows in came:
        growing.push(Batch(BY_NAME[name], rows[n : n + 1]))
        if t > looked + NS:
            looked = t
            advance(live, growing, growing.t1)
    advance(live, growing, growing.t1)
    # The numbers of the worst moment may be those of a look that lacked its last rows; what it is, since when, and
    # how bad, is the same.
    assert outline(live.findings) == outline(whole["night"])


# -- while it goes on --------------------------------------------------------------------------------------------


def saturated(first: int, last: int, seconds: int = SECONDS) -> Window:
    """A GPU whose memory bandwidth is at its limit for a while: longer than the rules look back."""
    session = CudaSession()
    for t in range(1, seconds + 1):
        session.add("gpu", t, gpu=0, gi=-1, hbm_bw_pct=97.0 if first <= t <= last else 40.0)
    return session.view()


def at(t_s: float) -> int:
    return T0 + round(t_s * NS)


def test_a_finding_keeps_its_begin_while_it_lasts_and_closes_when_it_ends() -> None:
    view = saturated(50, 349)
    live = Watch(view)
    for t_s in range(1, SECONDS + 1):
        advance(live, view, at(t_s))
        told = [(one.t0, one.t1, one.open) for one in live.findings]
        if t_s < 52:  # three samples in a row
            assert told == []
        elif t_s < 350:
            assert told == [(at(50), at(t_s), True)]
            assert live.worst(at(t_s)) == live.worst(at(t_s + 5)) == (1, WARN)
        else:
            assert told == [(at(50), at(349), False)]
            assert live.worst(at(t_s)) == (0, 0)
    assert live.worst(at(49.9)) == (0, 0)
    assert live.worst(at(50)) == live.worst(at(349)) == (1, WARN)


def test_one_that_comes_back_within_ten_seconds_is_the_same_and_later_is_another() -> None:
    session = CudaSession()
    for t in range(1, 200):
        on = 50 <= t < 60 or 65 <= t < 80 or 120 <= t < 130
        session.add("gpu", t, gpu=0, gi=-1, hbm_bw_pct=97.0 if on else 40.0)
    view = session.view()
    live = Watch(view)
    for t_s in range(1, 200):
        advance(live, view, at(t_s))
    assert [(one.t0, one.t1) for one in live.findings] == [(at(50), at(79)), (at(120), at(129))]


def test_the_version_grows_exactly_when_the_findings_change(views: dict[str, Window]) -> None:
    view = views["night"]
    live = Watch(view)
    before, version, changes = shown([]), 0, 0
    for t in ends(view, [2.5]):
        advance(live, view, t)
        if (now := shown(live.findings)) != before:
            changes += 1
            assert live.version > version
        else:
            assert live.version == version
        before, version = now, live.version
    assert changes > 20


def test_nothing_new_costs_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    view = saturated(50, 100)
    live = Watch(view)
    assert live.until is None
    advance(live, view, view.t1)
    assert live.until == view.t1
    found = shown(live.findings)

    def looked(*_: object) -> None:
        raise AssertionError("it looked again")

    monkeypatch.setattr(watch, "run_rule", looked)
    assert live.advance(view.t0, view.t1)
    assert live.advance(view.t0, view.t1 - NS)
    assert shown(live.findings) == found


def test_a_long_session_is_looked_at_two_minutes_at_a_time() -> None:
    view = saturated(230, 430, seconds=500)
    live = Watch(view)
    assert not live.advance(view.t0, view.t1)
    assert live.until == view.t0 - 1 + 120 * NS
    assert live.findings == []
    assert not live.advance(view.t0, view.t1)
    assert not live.advance(view.t0, view.t1)
    assert [(one.t0, one.open) for one in live.findings] == [(at(230), True)]
    assert not live.advance(view.t0, view.t1)
    assert live.advance(view.t0, view.t1)
    assert [(one.t0, one.t1, one.open) for one in live.findings] == [(at(230), at(430), False)]


class Counted:
    """A view that counts the rows of `gpu` that it gives."""

    def __init__(self, view: Window) -> None:
        self._view = view
        self.rows = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._view, name)

    def query(self, channel: str, t0: int, t1: int) -> np.ndarray:
        rows = self._view.query(channel, t0, t1)
        self.rows += len(rows) if channel == "gpu" else 0
        return rows


def test_rows_are_read_once_while_it_catches_up_and_as_they_are_at_the_end() -> None:
    view = Counted(saturated(50, 1450, seconds=1500))
    live = Watch(view)
    while (live.until or 0) < at(1300):
        live.advance(view.t0, at(1440))
    assert 1300 <= view.rows <= 1440
    advance(live, view, at(1440))
    view.rows = 0
    # One a second from here on; a row may come late that belongs before the last ones, so those are read again.
    assert live.advance(view.t0, at(1441))
    assert view.rows > 1


def test_what_was_found_stays_when_retention_has_taken_its_rows() -> None:
    view = saturated(50, 60)
    live = Watch(view)
    for t_s in range(1, SECONDS + 1):
        live.advance(max(view.t0, at(t_s - 60)), at(t_s))
    assert [(one.t0, one.t1, one.open) for one in live.findings] == [(at(50), at(60), False)]


def test_what_held_when_its_rows_went_is_closed() -> None:
    """Nothing is known of it any more: it must not be shown as holding for ever."""
    view = saturated(50, 349)
    live = Watch(view)
    advance(live, view, at(60))
    assert [one.open for one in live.findings] == [True]
    version = live.version
    while not live.advance(at(380), at(400)):
        pass
    assert [(one.t0, one.t1, one.open) for one in live.findings] == [(at(50), at(60), False)]
    assert live.version > version


def test_changed_limits_are_those_it_uses() -> None:
    view = saturated(50, 100)
    live = Watch(view, overridden({"hbm_bw_pct": 98}))
    advance(live, view, view.t1)
    assert live.findings == []


# -- bounded -----------------------------------------------------------------------------------------------------


def ever_wrong(scene: object, name: str = "ever_wrong") -> Finding:
    """A new finding in each look, on a subject of its own."""
    t = scene.t1  # type: ignore[attr-defined]
    return Finding(name, f"at {t}", NOTE, t, t, "t", (), "c", "n")


def test_a_night_in_which_everything_is_wrong_does_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view = saturated(50, 60)
    shape = RULES["hbm_bandwidth_saturated"]
    wrong = {
        name: replace(shape, name=name, find=lambda scene, name=name: iter([ever_wrong(scene, name)]))
        for name in ("ever_wrong", "also_wrong")
    }
    monkeypatch.setattr(watch, "rules", lambda: wrong)
    monkeypatch.setattr(watch, "KEEP", 50)
    live = Watch(view)
    for t_s in range(1, 200):
        advance(live, view, at(t_s))
        assert len(live.findings) <= 50
        assert all(len(held) <= 50 for held in live._by_rule.values())
    assert [one.t0 for one in live.findings] == sorted(one.t0 for one in live.findings)
    assert live.findings[-1].t0 == at(199)  # the newest are those kept
    assert live.findings[0].t0 == at(175)


@pytest.mark.parametrize(("cost_ms", "pace_s"), [(0, 0), (10, 0.5), (100, 5), (1000, 10)])
def test_looking_is_paced_to_two_percent_of_a_core_and_comes_within_ten_seconds(cost_ms, pace_s):
    """A look that costs 100 ms is 2 % of a core every 5 s."""
    spent = iter([7 * NS, 7 * NS + cost_ms * MS])
    view = night().view()
    triage = Watch(view, spent=lambda: next(spent))
    triage.advance(view.t0, view.t0 + NS)
    assert triage.pace_ns == pace_s * NS
