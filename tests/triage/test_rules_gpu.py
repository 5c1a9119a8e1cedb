"""HBM: bandwidth, how full, how soon."""

import pytest
from triage.session import GIB, NAN, Session, find, seconds, threshold, told

from opusmon.clock import NS
from opusmon.triage.severity import CRIT, NOTE, WARN

TOTAL_B = 140 * GIB


def one_gpu(n, row):
    session = Session()
    session.each_second("gpu", n, lambda t: {"gpu": 0, "gi": -1, "mem_total_b": TOTAL_B, **row(t)})
    return session


def over(*times):
    return lambda t: {"hbm_bw_pct": 97.25 if t in times else 88.0, "hbm_bw_bps": 4.5e12, "sm_util_pct": 99.0}


def test_bandwidth_takes_three_samples_in_a_row(monkeypatch):
    session = one_gpu(
        400, lambda t: {"hbm_bw_pct": 99.5 if t == 121 else over(120, 121, 122)(t)["hbm_bw_pct"]}
    )
    (found,) = find(monkeypatch, session, "hbm_bandwidth_saturated")
    assert (found.subject, found.severity, seconds(found), found.open) == ("gpu 0", WARN, (120, 122), False)
    assert found.title == "HBM bandwidth of gpu 0 at 99.5 % of its peak"
    assert told(found)["hbm_bw_pct"] == 99.5
    assert threshold(found, "hbm_bw_pct") == 95


def test_bandwidth_over_for_two_samples_or_just_under_is_no_finding(monkeypatch):
    assert find(monkeypatch, one_gpu(90, over(20, 21, 40, 60, 61)), "hbm_bandwidth_saturated") == []
    assert find(monkeypatch, one_gpu(90, lambda _: {"hbm_bw_pct": 94.9}), "hbm_bandwidth_saturated") == []


def test_a_missing_sample_neither_breaks_nor_makes_a_row(monkeypatch):
    def row(t):
        return {"hbm_bw_pct": NAN if t in (11, 30, 31) else 96.0 if t in (10, 12, 13, 29) else 50.0}

    (found,) = find(monkeypatch, one_gpu(90, row), "hbm_bandwidth_saturated")
    assert seconds(found) == (10, 13)


def test_samples_far_apart_are_no_row(monkeypatch):
    session = Session()
    for t in (1, 2, 10, 20, 21):
        session.add("gpu", t, gpu=0, gi=-1, hbm_bw_pct=99.0)
    assert find(monkeypatch, session, "hbm_bandwidth_saturated") == []


def test_what_is_over_ten_seconds_apart_is_two_findings(monkeypatch):
    times = (*range(100, 103), *range(112, 115), *range(125, 130))
    found = find(monkeypatch, one_gpu(200, over(*times)), "hbm_bandwidth_saturated")
    assert [seconds(one) for one in found] == [(100, 114), (125, 129)]


def test_what_still_holds_is_open(monkeypatch):
    (found,) = find(monkeypatch, one_gpu(130, over(*range(60, 131))), "hbm_bandwidth_saturated")
    assert seconds(found) == (60, 130)
    assert found.open


def test_each_gpu_and_instance_is_a_subject(monkeypatch):
    session = Session()
    session.each_second(
        "gpu",
        70,
        lambda _: [{"gpu": 0, "gi": 3, "hbm_bw_pct": 96.0}, {"gpu": 1, "gi": -1, "hbm_bw_pct": 97.0}],
    )
    found = find(monkeypatch, session, "hbm_bandwidth_saturated")
    assert [one.subject for one in found] == ["gpu 0 gi 3", "gpu 1"]


# -- full --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used_pct", "severity", "limit"),
    [(95.01, NOTE, 95), (97.9, NOTE, 95), (98.01, WARN, 98), (99.51, CRIT, 99.5)],
)
def test_full_by_how_full(monkeypatch, used_pct, severity, limit):
    session = one_gpu(
        100, lambda t: {"mem_used_b": TOTAL_B * used_pct / 100 if 40 <= t < 70 else TOTAL_B / 2}
    )
    (found,) = find(monkeypatch, session, "hbm_nearly_full")
    assert (found.severity, seconds(found)) == (severity, (40, 69))
    assert f"{140 * (1 - used_pct / 100):.1f} GiB left" in found.title
    assert threshold(found, "mem_used_pct") == limit


def test_an_engines_pool_at_90_percent_is_neither_full_nor_filling(monkeypatch):
    """It loads for 40 s, takes its pool at once and stays."""

    def row(t):
        share = 0.0 if t < 20 else min(0.5, (t - 20) / 80) if t < 60 else 0.9 + 0.0001 * (t % 3)
        return {"mem_used_b": TOTAL_B * share}

    assert find(monkeypatch, one_gpu(700, row), "hbm_nearly_full", "hbm_filling") == []


def test_a_model_that_loads_up_to_90_percent_is_not_filling(monkeypatch):
    """0.5 GB/s, the slowest load the limits are made for."""

    def row(t):
        return {"mem_used_b": min(0.5e9 * t, 0.9 * TOTAL_B)}

    assert find(monkeypatch, one_gpu(600, row), "hbm_filling") == []


# -- filling -----------------------------------------------------------------------------------------------------


def growing(gib_per_minute, start_pct=82.0, noise_b=0.0):
    def row(t):
        used_b = TOTAL_B * start_pct / 100 + gib_per_minute / 60 * GIB * t + noise_b * (-1) ** t
        return {"mem_used_b": min(used_b, TOTAL_B)}

    return row


def test_filling_says_how_soon(monkeypatch):
    """82 % of 140 GiB and 2 GiB a minute: after 122 s 118.9 GiB are used and 21.1 GiB last for 634 s."""
    (found,) = find(monkeypatch, one_gpu(122, growing(2, noise_b=0.01 * GIB)), "hbm_filling")
    assert (found.subject, found.severity, seconds(found)) == ("gpu 0", WARN, (120, 122))
    assert told(found)["time_left_s"] == pytest.approx(634, abs=2)
    assert told(found)["growth_bps"] == pytest.approx(2 * GIB / 60, rel=0.01)
    assert found.title == "HBM of gpu 0 full in 10m34s: 84.9 % used, 2.00 GiB more a minute"
    assert found.open


def test_filling_is_critical_minutes_before_the_end(monkeypatch):
    """Full at 756 s; 300 s before that it is critical."""
    (found,) = find(monkeypatch, one_gpu(460, growing(2)), "hbm_filling")
    assert (found.severity, seconds(found)) == (CRIT, (120, 460))
    assert told(found)["time_left_s"] == pytest.approx(756 - 460, abs=1)
    (earlier,) = find(monkeypatch, one_gpu(450, growing(2)), "hbm_filling")
    assert earlier.severity == WARN


def test_slow_growth_and_growth_far_from_full_are_none(monkeypatch):
    """0.4 GiB a minute fills the last 25 GiB in an hour; 2 GiB a minute from 30 % is normal."""
    assert find(monkeypatch, one_gpu(400, growing(0.4)), "hbm_filling") == []
    assert find(monkeypatch, one_gpu(400, growing(2, start_pct=30)), "hbm_filling") == []


def test_steps_and_saw_teeth_are_no_growth(monkeypatch):
    step = one_gpu(500, lambda t: {"mem_used_b": TOTAL_B * (0.82 if t < 200 else 0.92)})
    saw = one_gpu(500, lambda t: {"mem_used_b": TOTAL_B * (0.82 + 0.001 * (t % 60))})
    assert find(monkeypatch, step, "hbm_filling") == []
    assert find(monkeypatch, saw, "hbm_filling") == []


def test_growth_over_a_gap_is_none(monkeypatch):
    """What grew before an hour without samples says nothing about what grows now; two minutes later it is known."""
    session = Session()
    for t in (*range(1, 61), *range(3601, 3601 + 80)):
        grown = growing(2)(t if t <= 60 else t - 3540)
        session.add("gpu", t, gpu=0, gi=-1, mem_total_b=TOTAL_B, **grown)
    assert find(monkeypatch, session, "hbm_filling") == []


def test_limits_can_be_overridden(monkeypatch):
    from opusmon.triage.limits import overridden

    session = one_gpu(70, lambda _: {"hbm_bw_pct": 91.0})
    limits = overridden({"hbm_bw_pct": 90})
    (found,) = find(monkeypatch, session, "hbm_bandwidth_saturated", limits=limits)
    assert threshold(found, "hbm_bw_pct") == 90


def test_live_looks_at_the_last_minutes_only(monkeypatch):
    """The same rows, looked at as a live screen does."""
    from triage.session import MINE

    from opusmon.triage import run

    monkeypatch.setattr(run, "MODULES", MINE)
    view = one_gpu(400, over(*range(390, 401), 100, 101, 102)).view()
    (found,) = run.look(view, view.t1 - 120 * NS, view.t1, only=["hbm_bandwidth_saturated"])
    assert seconds(found) == (390, 400)
    assert found.open
