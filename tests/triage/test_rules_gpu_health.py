"""What holds a GPU back, what its driver reports, and what its memory counts."""

import pytest
from triage.session import NAN, Session, find, seconds, told

from opusmon.clock import NS
from opusmon.triage.severity import CRIT, NOTE, WARN


def one_gpu(n, row, *, device=True):
    session = Session()
    for t in range(0, n, 60) if device else ():
        session.add("gpu_device", t + 0.5, gpu=0, gi=-1, max_sm_clock_mhz=1980, power_limit_mw=700_000)
    calm = {"gpu": 0, "gi": -1, "throttle_mask": 0, "sm_clock_mhz": 1980, "sm_util_pct": 90.0}
    session.each_second("gpu", n, lambda t: {**calm, **row(t)})
    return session


# -- throttling --------------------------------------------------------------------------------------------------


def held(field, bit, first, last, *, share=1.0, clock=1500):
    """A reason from `first` to `last`, its counter and its bit."""

    def row(t):
        on = first <= t <= last
        ns = share * NS * min(max(t - first + 1, 0), last - first + 1)
        return {
            field: 4 * NS + ns,
            "throttle_mask": bit if on else 0,
            "sm_clock_mhz": clock + t if on else 1980,
        }

    return row


@pytest.mark.parametrize(
    ("field", "bit", "words", "severity"),
    [
        ("throttle_power_ns", 0x4, "power cap", NOTE),
        ("throttle_sync_ns", 0x10, "sync boost", NOTE),
        ("throttle_sw_thermal_ns", 0x20, "software thermal limit", WARN),
        ("throttle_hw_thermal_ns", 0x40, "hardware thermal limit", CRIT),
        ("throttle_brake_ns", 0x80, "power brake", CRIT),
    ],
)
def test_throttled_by_reason(monkeypatch, field, bit, words, severity):
    (found,) = find(monkeypatch, one_gpu(150, held(field, bit, 30, 70)), "throttled")
    assert (found.subject, found.severity, seconds(found)) == (f"gpu 0 {words}", severity, (30, 70))
    assert found.title == f"GPU 0 held back by the {words}: SM clock 1530 of 1980 MHz"
    assert told(found)["held back"] == 100
    assert told(found)["max_sm_clock_mhz"] == 1980


def test_hardware_slowdown_is_told_without_its_cause_only(monkeypatch):
    slowdown = find(
        monkeypatch, one_gpu(90, lambda t: {"throttle_mask": 0x8 if 20 <= t < 25 else 0}), "throttled"
    )
    assert [(one.subject, one.severity, seconds(one)) for one in slowdown] == [
        ("gpu 0 hardware slowdown", CRIT, (20, 24))
    ]
    both = find(
        monkeypatch, one_gpu(90, lambda t: {"throttle_mask": 0x48 if 20 <= t < 25 else 0}), "throttled"
    )
    assert [one.subject for one in both] == ["gpu 0 hardware thermal limit"]


def test_a_power_cap_for_five_minutes_is_a_warning(monkeypatch):
    long = find(monkeypatch, one_gpu(700, held("throttle_power_ns", 0x4, 100, 400)), "throttled")
    assert [(one.severity, seconds(one)) for one in long] == [(WARN, (100, 400))]
    shorter = find(monkeypatch, one_gpu(700, held("throttle_power_ns", 0x4, 100, 399)), "throttled")
    assert [(one.severity, seconds(one)) for one in shorter] == [(NOTE, (100, 399))]


def test_a_pause_of_half_a_minute_does_not_make_a_long_cap_two_short_ones(monkeypatch):
    def row(t):
        return {"throttle_mask": 0x4 if 50 <= t <= 200 or 230 <= t <= 360 else 0}

    (found,) = find(monkeypatch, one_gpu(500, row), "throttled")
    assert (found.severity, seconds(found)) == (WARN, (50, 360))
    apart = one_gpu(500, lambda t: {"throttle_mask": 0x4 if 50 <= t <= 200 or 231 <= t <= 360 else 0})
    assert [one.severity for one in find(monkeypatch, apart, "throttled")] == [NOTE, NOTE]


def test_counters_tell_what_the_mask_misses(monkeypatch):
    """20 % of each second under the cap and never at the instant of a sample; at 5 % it is no finding."""
    counted = one_gpu(90, lambda t: {"throttle_power_ns": 0.2 * NS * min(t, 60)})
    (found,) = find(monkeypatch, counted, "throttled")
    assert seconds(found) == (2, 60)
    assert told(found)["held back"] == pytest.approx(20)
    assert find(monkeypatch, one_gpu(90, lambda t: {"throttle_power_ns": 0.05 * NS * t}), "throttled") == []


def test_a_hardware_limit_counts_however_short(monkeypatch):
    """20 ms, in one sample: its counter is read every 5 s and repeated between."""
    session = one_gpu(90, lambda t: {"throttle_brake_ns": 20e6 if t >= 35 else 0.0})
    (found,) = find(monkeypatch, session, "throttled")
    assert (found.subject, found.severity, seconds(found)) == ("gpu 0 power brake", CRIT, (35, 35))


def test_idle_application_clocks_missing_and_restarted_counters_are_no_throttling(monkeypatch):
    for row in (
        lambda _: {"throttle_mask": 0x1},
        lambda _: {"throttle_mask": 0x2},
        lambda _: {"throttle_mask": NAN},
        lambda t: {"throttle_power_ns": 5e12 if t < 40 else 0.0},
    ):
        assert find(monkeypatch, one_gpu(90, row), "throttled") == []


# -- clocks ------------------------------------------------------------------------------------------------------


def test_low_clocks_at_work_without_a_reason(monkeypatch):
    """1410 of 1980 MHz are 71 %; 75 % are 1485."""
    session = one_gpu(200, lambda t: {"sm_clock_mhz": 1410 if 50 <= t <= 80 else 1485})
    (found,) = find(monkeypatch, session, "clocks_low")
    assert (found.severity, seconds(found)) == (WARN, (50, 80))
    assert found.title == "GPU 0 works at 1410 of 1980 MHz, and the driver names no reason"


@pytest.mark.parametrize(
    "row",
    [
        lambda _: {"throttle_mask": 0x4},
        lambda _: {"throttle_mask": 0x2},
        lambda _: {"throttle_mask": NAN},
        lambda _: {"sm_util_pct": 30.0},
        lambda _: {"sm_util_pct": NAN},
        lambda t: {"throttle_power_ns": 1e8 * t},
        lambda _: {"sm_clock_mhz": NAN},
        lambda t: {"sm_clock_mhz": 900 if t % 3 else 1980},
    ],
    ids=["power cap", "app clocks", "no mask", "half idle", "no load", "counter", "no clock", "two in a row"],
)
def test_low_clocks_that_are_explained_or_not_known(monkeypatch, row):
    assert find(monkeypatch, one_gpu(90, lambda t: {"sm_clock_mhz": 900, **row(t)}), "clocks_low") == []


def test_low_clocks_need_the_highest_one(monkeypatch):
    session = one_gpu(90, lambda _: {"sm_clock_mhz": 900}, device=False)
    assert find(monkeypatch, session, "clocks_low") == []


# -- events ------------------------------------------------------------------------------------------------------


def event(session, t, kind, code=NAN, detail="", gpu=0, gi=-1):
    session.add("gpu_event", t, gpu=gpu, gi=gi, kind=kind, code=code, detail=detail)


@pytest.mark.parametrize(
    ("code", "severity"),
    [(13, WARN), (31, WARN), (45, NOTE), (48, CRIT), (79, CRIT), (94, WARN), (95, CRIT), (777, WARN)],
)
def test_xid_by_what_it_asks_for(monkeypatch, code, severity):
    session = Session()
    event(session, 70.25, "xid", code, "what happened: do this; or that")
    event(session, 70.5, "throttle_on", 4, "software power cap")
    (found,) = find(monkeypatch, session, "xid")
    assert (found.subject, found.severity, seconds(found)) == (f"gpu 0 xid {code}", severity, (70.25, 70.25))
    assert (found.title, found.cause, found.next) == (
        f"XID {code} on gpu 0: what happened",
        "what happened",
        "do this; or that",
    )


def test_every_xid_in_the_collectors_table_that_asks_for_a_part_or_a_reboot_is_critical():
    from opusmon.collectors.gpu import xid
    from opusmon.triage.limits_gpu import XID_OTHER, XID_SEVERITY

    assert set(XID_SEVERITY) <= set(xid.MEANINGS)
    for code, (_, todo) in xid.MEANINGS.items():
        if todo in (xid._RMA, xid._REBOOT):
            assert XID_SEVERITY.get(code, XID_OTHER) == CRIT, code
        if todo == xid._APP:
            assert XID_SEVERITY.get(code, XID_OTHER) == WARN, code


def test_what_the_driver_asks_for(monkeypatch):
    session = Session()
    event(session, 5, "recovery", 0, "no recovery needed any more")
    event(session, 10, "recovery", 2, "reboot the host")
    event(
        session, 100, "unavailable", NAN, "the driver says the GPU is unavailable: reset it or reboot", gpu=1
    )
    found = find(monkeypatch, session, "driver_asks_for_recovery")
    assert [(one.subject, one.severity, seconds(one)[0]) for one in found] == [
        ("gpu 0", CRIT, 10),
        ("gpu 1", CRIT, 100),
    ]


def status(session, t, state, scope="gpu 0", channel="gpu", field="", reason=""):
    session.add(
        "status",
        t,
        collector="gpu",
        channel=channel,
        field=field,
        scope=scope,
        state=state,
        reason=reason,
        remedy="r",
    )


def test_lost_and_back(monkeypatch):
    """The status repeats itself every 60 s, and mends with "ok"."""
    session = Session()
    status(session, 1, "ok", scope="", channel="")
    event(session, 30, "lost", 15, "GPU is lost")
    for t in range(30, 400, 60):
        status(session, t, "error", reason="GPU is lost")
        status(session, t, "error", channel="nvlink", reason="GPU is lost")
        status(session, t, "not_supported", scope="gpu 1", reason="no links", channel="nvlink")
    event(session, 400, "back", NAN, "the GPU answers again")
    status(session, 400, "ok")
    (found,) = find(monkeypatch, session, "gpu_lost")
    assert (found.subject, found.severity, seconds(found), found.open) == ("gpu 0", CRIT, (30, 390), False)
    assert found.title == "gpu 0 does not answer: GPU is lost"


def test_a_gpu_that_stays_lost_is_open(monkeypatch):
    session = Session()
    event(session, 30, "lost", 15, "GPU is lost")
    for t in range(30, 300, 60):
        status(session, t, "stale", reason="nvmlDeviceGetMemoryInfo has not returned for 30 s")
    session.each_second("gpu", 310, lambda _: {"gpu": 1, "gi": -1})
    (found,) = find(monkeypatch, session, "gpu_lost")
    assert found.open
    assert seconds(found) == (30, 270)


def test_a_missing_field_is_no_lost_gpu(monkeypatch):
    session = Session()
    status(session, 5, "unavailable", field="mem_temp_c")
    status(session, 5, "not_supported")
    status(session, 5, "no_permission")
    session.add(
        "status",
        5,
        collector="l2",
        channel="gpu",
        scope="gpu 0",
        state="error",
        reason="of another collector",
    )
    assert find(monkeypatch, session, "gpu_lost") == []


# -- memory errors -----------------------------------------------------------------------------------------------


def test_uncorrected_errors_are_critical_when_they_grow(monkeypatch):
    """Two from before the session are a warning for as long as it lasts."""
    grown = one_gpu(200, lambda t: {"ecc_uncorrected": 2 if t < 90 else 5})
    (found,) = find(monkeypatch, grown, "ecc_uncorrected")
    assert (found.subject, found.severity, seconds(found)) == ("gpu 0", CRIT, (1, 200))
    assert found.title == "GPU 0: 5 uncorrectable memory errors since the driver loaded"
    (old,) = find(monkeypatch, one_gpu(200, lambda _: {"ecc_uncorrected": 2}), "ecc_uncorrected")
    assert (old.severity, seconds(old), old.open) == (WARN, (1, 200), True)


def test_no_errors_missing_errors_and_corrected_ones_are_none(monkeypatch):
    for row in ({"ecc_uncorrected": 0}, {}, {"ecc_corrected": 50, "ecc_uncorrected": 0}):
        assert find(monkeypatch, one_gpu(70, lambda _, row=row: row), "ecc_uncorrected") == []


def replaying(per_s, between, n=300):
    """A GPU that counts so many replays a second in a range, on 1000 from before."""
    first, last = between
    return one_gpu(n, lambda t: {"pcie_replays": 1000 + per_s * min(max(t - first, 0), last - first)})


def test_nine_replays_in_a_minute_are_too_many_and_eight_are_not(monkeypatch):
    (found,) = find(monkeypatch, replaying(1, (100, 109)), "pcie_replays")
    assert (found.subject, found.severity, seconds(found)) == ("gpu 0", WARN, (109, 160))
    assert found.title == "GPU 0 sends packets again over PCIe: 9 in a minute"
    assert told(found) == {"replays in a minute": 9, "pcie_replays": 1009}
    assert find(monkeypatch, replaying(1, (100, 108)), "pcie_replays") == []
    assert find(monkeypatch, replaying(0.1, (0, 300)), "pcie_replays") == []


def test_replays_from_before_the_session_and_missing_ones_are_none(monkeypatch):
    for row in ({"pcie_replays": 5000}, {"pcie_replays": NAN}, {}):
        assert find(monkeypatch, one_gpu(70, lambda _, row=row: row), "pcie_replays") == []


def test_row_remaps(monkeypatch):
    session = one_gpu(
        200,
        lambda t: {
            "remap_pending": float(t >= 50),
            "remap_failed": float(120 <= t < 130),
            "remapped_uncorrectable": 1,
        },
    )
    found = find(monkeypatch, session, "row_remap")
    assert [(one.subject, one.severity, seconds(one)) for one in found] == [
        ("gpu 0 remap pending", WARN, (50, 200)),
        ("gpu 0 remap failed", CRIT, (120, 129)),
    ]
    assert (
        find(monkeypatch, one_gpu(70, lambda _: {"remap_pending": 0, "remap_failed": NAN}), "row_remap") == []
    )
