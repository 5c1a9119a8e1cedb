"""A GPU beside those who use it."""

import pytest
from triage.session import NAN, Session, find, seconds, told

from opusmon.clock import NS
from opusmon.triage.severity import NOTE, WARN

# -- launches that nobody sees -----------------------------------------------------------------------------------


def watched(n=300, *, state="ok", busy=(60, 200), launches=(), fields=None):
    """A GPU that is busy in a range; stream rows at `launches`."""
    session = Session()
    for t in range(1, n, 60):
        session.add("status", t, collector="streams", state=state)
        session.add("status", t, collector="streams", channel="stream", scope="hidden", state="no_permission")
    session.each_second(
        "gpu", n, lambda t: {"gpu": 0, "gi": -1, "gpu_busy_pct": 80.0 if busy[0] <= t <= busy[1] else 0.0}
    )
    for t in launches:
        zeros = {"launches": 0, "graph_launches": 0, "copies": 0, "waits": 0}
        session.add("stream", t + 0.3, pid=7, stream=3, **{**zeros, **(fields or {"launches": 5})})
    session.add("gpu_process", 100, gpu=0, gi=-1, pid=42, name="trainer", sm_pct=70)
    return session


def test_busy_without_a_launch(monkeypatch):
    """The last launch is at 80.3 s: 15 s later the range begins."""
    (found,) = find(monkeypatch, watched(launches=range(60, 81)), "gpu_busy_blind")
    assert (found.subject, found.severity, seconds(found)) == ("gpu 0", NOTE, (96, 200))
    assert found.title == "GPU 0 busy 80 % of the time, but no launch is seen on this host"


def test_who_holds_the_gpu_is_told(monkeypatch):
    (found,) = find(monkeypatch, watched(busy=(60, 110)), "gpu_busy_blind")
    assert seconds(found) == (60, 110)
    assert told(found)["process"] == "trainer 42"


@pytest.mark.parametrize(
    "fields",
    [{"graph_launches": 1}, {"copies": 1}, {"waits": 1}, {"launches": NAN}],
    ids=["graph", "copy", "wait", "only sampled"],
)
def test_any_sign_of_use_is_enough(monkeypatch, fields):
    assert find(monkeypatch, watched(launches=range(0, 300, 10), fields=fields), "gpu_busy_blind") == []


def test_without_probes_nothing_is_said(monkeypatch):
    assert find(monkeypatch, watched(state="unavailable"), "gpu_busy_blind") == []
    alone = Session()
    alone.each_second("gpu", 90, lambda _: {"gpu": 0, "gi": -1, "gpu_busy_pct": 99.0})
    assert find(monkeypatch, alone, "gpu_busy_blind") == []


def test_probes_that_come_and_go(monkeypatch):
    """On from 90 s on: 15 s later it can be said that nothing was launched. Off at 150 s: from then on it cannot."""
    session = watched(n=60, busy=(0, 0), state="unavailable")
    for t in range(61, 250):
        session.add("gpu", t, gpu=0, gi=-1, gpu_busy_pct=80.0)
    session.add("status", 90, collector="streams", state="ok")
    session.add("status", 150, collector="streams", state="restarting")
    (found,) = find(monkeypatch, session, "gpu_busy_blind")
    assert seconds(found) == (105, 149)


def test_rows_without_activity_are_no_sign(monkeypatch):
    idle = {"launches": 0}
    (found,) = find(monkeypatch, watched(launches=range(300), fields=idle), "gpu_busy_blind")
    assert seconds(found) == (60, 200)


def test_idle_gpus_need_no_launches(monkeypatch):
    assert find(monkeypatch, watched(busy=(400, 400)), "gpu_busy_blind") == []


# -- requests that wait ------------------------------------------------------------------------------------------

WHO = "engine 127.0.0.1:8000/metrics (llama)"


def served(waiting, sm_pct, n=200, gpus=2, **more):
    session = Session()
    names = {"engine": "127.0.0.1:8000/metrics", "model": "llama"}
    session.each_second("engine", n, lambda t: {**names, "waiting": waiting(t), "running": 4, **more})
    session.each_second(
        "gpu",
        n,
        lambda t: [{"gpu": g, "gi": -1, "sm_util_pct": sm_pct(t) if g else 1.0} for g in range(gpus)],
    )
    return session


def test_requests_wait_and_no_gpu_works(monkeypatch):
    session = served(lambda t: 30 + t if 70 <= t <= 110 else 0, lambda t: 85.0 if t < 80 else 3.0)
    (found,) = find(monkeypatch, session, "gpu_idle_requests_wait")
    # A reading of the GPUs counts for 2.5 s: those of 78 and 79 s are over the limit until 81 s.
    assert (found.subject, found.severity, seconds(found)) == (WHO, WARN, (82, 110))
    assert found.title == f"140 waiting ({WHO}) while no GPU is over 3 % busy"
    assert told(found)["running"] == 4


def test_waiting_at_a_gpu_that_works_and_idling_without_requests_are_fine(monkeypatch):
    assert find(monkeypatch, served(lambda _: 9, lambda _: 70.0), "gpu_idle_requests_wait") == []
    assert find(monkeypatch, served(lambda _: 0, lambda _: 0.0), "gpu_idle_requests_wait") == []
    assert find(monkeypatch, served(lambda _: NAN, lambda _: 0.0), "gpu_idle_requests_wait") == []


def test_gpus_that_are_not_measured_say_nothing(monkeypatch):
    session = Session()
    session.each_second("engine", 90, lambda _: {"engine": "e", "waiting": 9})
    session.each_second("gpu", 90, lambda _: {"gpu": 0, "gi": -1})
    assert find(monkeypatch, session, "gpu_idle_requests_wait") == []


def test_before_hopper_the_busy_time_stands_in(monkeypatch):
    session = Session()
    session.each_second("engine", 90, lambda _: {"engine": "e", "waiting": 9})
    session.each_second("gpu", 90, lambda t: {"gpu": 0, "gi": -1, "gpu_busy_pct": 50.0 if t < 40 else 0.0})
    (found,) = find(monkeypatch, session, "gpu_idle_requests_wait")
    assert seconds(found) == (42, 90)


def test_requests_the_proxy_sees_without_a_token(monkeypatch):
    """Four in flight, two of them without a first token for 2 s or more; the engine says that nothing waits."""
    session = served(lambda _: 0, lambda _: 2.0)
    for t in range(50, 81):
        for number, (age_s, ttft_ns) in enumerate(((0.5, NAN), (2.0, NAN), (30.0, NAN), (30.0, 1e9))):
            session.add(
                "request_open",
                t,
                source="proxy",
                number=number,
                phase="waiting",
                ttft_ns=ttft_ns,
                no_token_ns=age_s * NS,
            )
    (found,) = find(monkeypatch, session, "gpu_idle_requests_wait")
    assert (found.subject, seconds(found)) == ("requests seen by the proxy", (50, 80))
    assert told(found)["waiting"] == 2


def test_a_proxy_before_a_server_elsewhere_says_nothing_about_these_gpus(monkeypatch):
    session = Session()
    session.each_second("gpu", 90, lambda _: {"gpu": 0, "gi": -1, "sm_util_pct": 0.0})
    session.add("engine", 1, engine="e", waiting=0)
    for t in range(30, 80):
        session.add("request_open", t, source="proxy", number=1, ttft_ns=NAN, no_token_ns=9 * NS)
    assert find(monkeypatch, session, "gpu_idle_requests_wait") == []


# -- the cache ---------------------------------------------------------------------------------------------------


def cached(hit, wait_ms, n=400, field="l2_hit_pct", **stream):
    session = Session()
    session.each_second("l2", n, lambda t: {"gpu": 0, field: hit(t), "hbm_read_bps": 2e12})
    session.each_second(
        "stream", n, lambda t: {"pid": 7, "stream": 3, "waits": 10, "wait_ns": 10e6 * wait_ms(t), **stream}
    )
    return session


def test_misses_rise_and_waits_take_longer(monkeypatch):
    """70 to 30 % hits and 2 to 4 ms a wait at 200 s. Over the last 10 s: 52 % misses at 205 s and 200/140 as long;
    50 % and 1.5 times are both passed at 205 s. The minute before catches up from 211 s on."""
    session = cached(lambda t: 70.0 if t <= 200 else 30.0, lambda t: 2 if t <= 200 else 4)
    (found,) = find(monkeypatch, session, "l2_misses_slow")
    assert (found.subject, found.severity) == ("gpu 0", WARN)
    # Misses (30 (10-k) + 70 k) / 10 >= 50 and waits (2 (10-k) + 4 k) / 20 >= 1.5: both from k = 5 on.
    assert seconds(found)[0] == 205
    # j seconds of the minute before are new: 4 / (2 + 2 j / 60) >= 1.5 up to j = 20, at 200 + 10 + 20 s.
    assert seconds(found)[1] == 230
    assert told(found)["l2 misses"] == pytest.approx(70)
    assert told(found)["hbm_read_bps"] == 2e12


def test_without_a_minute_before_there_is_nothing_to_compare_with(monkeypatch):
    early = cached(lambda t: 70.0 if t <= 40 else 30.0, lambda t: 2 if t <= 40 else 4, n=69)
    assert find(monkeypatch, early, "l2_misses_slow") == []


def test_launch_calls_count_as_well(monkeypatch):
    session = cached(lambda t: 70.0 if t <= 200 else 30.0, lambda _: 2)
    session.each_second(
        "stream",
        400,
        lambda t: {"pid": 7, "stream": 9, "timed_launches": 50, "launch_call_ns": 5e3 if t <= 200 else 20e3},
    )
    (found,) = find(monkeypatch, session, "l2_misses_slow")
    assert "launch calls take 4.0 times as long" in found.title


def test_misses_alone_and_waits_alone_are_none(monkeypatch):
    assert (
        find(monkeypatch, cached(lambda t: 70.0 if t <= 200 else 30.0, lambda _: 2), "l2_misses_slow") == []
    )
    assert find(monkeypatch, cached(lambda _: 30.0, lambda t: 2 if t <= 200 else 9), "l2_misses_slow") == []
    few = cached(lambda t: 95.0 if t <= 200 else 60.0, lambda t: 2 if t <= 200 else 9)
    assert find(monkeypatch, few, "l2_misses_slow") == []


def test_the_other_measure_of_misses(monkeypatch):
    session = cached(
        lambda t: 0.2 if t <= 200 else 0.8, lambda t: 2 if t <= 200 else 6, field="l2_to_hbm_ratio"
    )
    (found,) = find(monkeypatch, session, "l2_misses_slow")
    assert told(found)["l2_to_hbm_ratio"] == pytest.approx(80)
