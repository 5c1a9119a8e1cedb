"""The rules over sessions of real H200s: exactly what is true of them."""

from pathlib import Path

import pytest
from triage.session import cut, told

from opusmon.clock import NS
from opusmon.recording import Recording
from opusmon.triage.severity import NOTE
from opusmon.window import Window

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "tests/data/h200x2.opusmon"


def test_the_demo_is_capped_at_matmul_and_nothing_else(monkeypatch):
    """Dense matmul from 51 to 81 s pushed both GPUs against 700 W, by the driver's own counter for 30.3 s. The copies
    at 88 % of the bandwidth, one sample of 96.9 % among them, and even traffic over 18 links are no findings."""
    with Recording.open(DEMO) as recording:
        found = cut(monkeypatch, recording)
        assert [(one.rule, one.subject, one.severity, one.open) for one in found] == [
            ("throttled", "gpu 0 power cap", NOTE, False),
            ("throttled", "gpu 1 power cap", NOTE, False),
        ]
        for one in found:
            start_s, end_s = ((t - recording.t0) / NS for t in (one.t0, one.t1))
            assert (start_s, end_s) == (pytest.approx(51, abs=0.1), pytest.approx(81, abs=0.1))
            assert told(one)["sm_clock_mhz"] == 1470
            assert told(one)["max_sm_clock_mhz"] == 1980
            assert told(one)["power_mw"] == pytest.approx(690_000, rel=0.01)
            assert told(one)["held back"] == 100


def test_a_window_over_the_demo_says_the_same(monkeypatch):
    with Recording.open(DEMO) as recording:
        assert repr(cut(monkeypatch, Window.over(recording))) == repr(cut(monkeypatch, recording))


def test_counted_launches_of_a_gpu_that_is_busy_a_third_of_the_time_are_quiet(monkeypatch):
    """No channel for NVLink, host or events; launches only sampled at times."""
    with Recording.open(ROOT / "tests/data/h200-streams.opusmon") as recording:
        assert "nvlink" not in recording.counts() or not recording.counts()["nvlink"]
        assert cut(monkeypatch, recording) == []
