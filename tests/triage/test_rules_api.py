"""All rules over API latency together: none where nothing is wrong, the same found wherever pieces begin."""

from pathlib import Path

import numpy as np
import pytest
from sessions import h200x2
from ui.fakelatency import END, MS, FakeLatency, serving
from ui.fakeview import T0

from opusmon.clock import NS, Anchors, ManualClock
from opusmon.recording import Recorder, Recording
from opusmon.schema import Batch, StringTable
from opusmon.triage import rules_api, run
from opusmon.triage.finding import merge
from opusmon.triage.instants import Windows, instants
from opusmon.triage.scene import RULES, Scene
from opusmon.window import Window

from .api_session import bent, burning, find, steady

NAMES = sorted(
    name for name, one in RULES.items() if one.find.__module__.startswith("opusmon.triage.rules_api")
)


@pytest.fixture(autouse=True)
def only_these(monkeypatch):
    monkeypatch.setattr(run, "MODULES", ("rules_api",))
    monkeypatch.setattr(run, "RULES", {name: RULES[name] for name in NAMES})


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
