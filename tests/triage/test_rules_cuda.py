"""The rules about streams: planted launches, graphs, gaps and waits; and real sessions, of which little is true."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sessions import h200x2

from opusmon.clock import NS
from opusmon.recording import Recording
from opusmon.triage import limits_cuda, run
from opusmon.triage.graph_use import Use, fallbacks
from opusmon.triage.severity import CRIT, NOTE, WARN
from opusmon.window import Window

from .cuda_session import HANDLE, MS, PID, PROCESS, SUBJECT, US, CudaSession
from .session import seconds, told

NAN = float("nan")


# -- launch_latency


def timed(session, second, call_us, **fields):
    fields = {
        "launches": 4000,
        "timed_launches": 1000,
        "launch_call_ns": call_us * US,
        "launch_call_max_ns": 90 * US,
    } | fields
    session.stream(second, **fields)


def test_slow_launch_calls_three_times_in_a_row():
    session = CudaSession()
    for second in range(1, 701):
        timed(session, second, {597: 13.0, 598: 21.4, 599: 20.0, 600: 12.9}.get(second, 10.8))
    (finding,) = session.find("launch_latency")
    assert (finding.subject, finding.severity, seconds(finding)) == (SUBJECT, WARN, (597, 600))
    assert finding.title == f"Launch calls of {SUBJECT} take 21.4 us on average, over 12.8 us"
    assert told(finding) == {
        "launch_call_ns": 21_400,
        "launch_call_max_ns": 90_000,
        "share_pct": pytest.approx(8.56),  # 4000 calls of 21.4 us
        "timed_launches": 1000,
        "thread": "worker-0",
    }
    assert (finding.evidence[0].threshold, finding.pane, finding.open) == (12_800, "streams", False)


def test_twice_in_a_row_is_none_and_neither_is_the_limit_itself():
    session = CudaSession()
    for second in range(1, 61):
        timed(session, second, {10: 20, 11: 20, 13: 20, 14: 20, 30: 12.8, 31: 12.8, 32: 12.8}.get(second, 10))
    assert session.find("launch_latency") == []


def test_samples_without_a_timed_call_neither_break_the_row_nor_count():
    """Calls are timed in bursts, here 1 s of 15: what lies between is not known."""
    session = CudaSession()
    for second in range(1, 101):
        if second % 15 == 0:
            timed(session, second, 30 if second in (30, 45, 60) else 10)
        else:
            timed(session, second, NAN, timed_launches=0)
    (finding,) = session.find("launch_latency")
    assert seconds(finding) == (30, 60)


def test_launches_that_were_never_timed_are_nothing():
    session = CudaSession()
    for second in range(1, 101):
        timed(session, second, 50, timed_launches=0)
    assert session.find("launch_latency") == []


@pytest.mark.parametrize(
    ("call_us", "busy_pct", "severity"),
    [(20, 30, WARN), (100, 30, CRIT), (99, 30, WARN), (500, 80, NOTE), (500, 79, CRIT), (20, None, WARN)],
)
def test_a_full_queue_explains_launch_calls_that_wait(call_us, busy_pct, severity):
    session = CudaSession()
    for second in range(1, 11):
        timed(session, second, call_us)
    if busy_pct is not None:
        session.gpu(range(11), busy_pct)
    (finding,) = session.find("launch_latency")
    assert finding.severity == severity
    assert finding.open


@pytest.mark.parametrize(
    ("launches", "severity"), [(147, NOTE), (999, NOTE), (1000, WARN), (4000, WARN), (NAN, WARN)]
)
def test_few_calls_hold_nothing_up(launches, severity):
    """1000 calls of 20 us take 2 % of a second; where they were not counted that is not known."""
    session = CudaSession()
    for second in range(1, 11):
        timed(session, second, 20, launches=launches)
    (finding,) = session.find("launch_latency")
    assert finding.severity == severity
    assert ("one at a time" in finding.cause) == (severity == NOTE)


def test_each_stream_for_itself():
    session = CudaSession()
    for second in range(1, 31):
        for stream in range(40):
            timed(
                session,
                second,
                20 + stream if stream in (3, 7) and second < 20 else 9,
                stream=HANDLE + stream,
            )
    found = session.find("launch_latency")
    assert [f.subject for f in found] == [f"vllm {PID} stream {HANDLE + n:#x}" for n in (3, 7)]
    assert [told(f)["launch_call_ns"] for f in found] == [23_000, 27_000]


# -- graph_fallback


def decode(session, second, graphs, plain, **fields):
    session.stream(second, graph_launches=graphs, launches=plain, **fields)


@pytest.mark.parametrize("change", [30, 597, 600, 604, 655])
def test_graphs_give_way_to_plain_launches(change):
    session = CudaSession()
    for second in range(1, 701):
        eager = second >= change
        decode(session, second, 2 if eager else 50, 9000 if eager else 1200)
        decode(session, second, 0, 100, stream=HANDLE + 1)
    (finding,) = session.find("graph_fallback")
    assert (finding.subject, finding.severity) == (PROCESS, WARN)
    assert seconds(finding) == (change - 1, change + 4)
    assert "50 to 2 graphs/s, 1300 to 9100 launches/s" in finding.title
    shares = told(finding)
    assert shares["graph_share_before_pct"] == pytest.approx(100 * 50 / 1350)
    assert shares["graph_share_after_pct"] == pytest.approx(100 * 2 / 9102)


@pytest.mark.parametrize(
    ("graphs", "plain"), [(0, 0), (5, 120), (50, 12_000), (0, 1200), (10, 1200), (100, 2400)]
)
def test_less_load_and_more_plain_work_are_no_fallback(graphs, plain):
    session = CudaSession()
    for second in range(1, 61):
        decode(session, second, *((graphs, plain) if second >= 30 else (50, 1200)))
    assert session.find("graph_fallback") == []


def test_two_samples_that_are_off_do_not_hide_it_nor_make_it():
    session = CudaSession()
    for second in range(1, 101):
        eager = (second >= 50) != (second in (53, 20, 21))
        decode(session, second, 0 if eager else 50, 9000 if eager else 1200)
    (finding,) = session.find("graph_fallback")
    assert seconds(finding)[0] == 49


def test_where_launches_were_not_counted_nothing_is_known():
    session = CudaSession()
    for second in range(1, 61):
        decode(session, second, 0 if second >= 30 else 50, NAN)
    assert session.find("graph_fallback") == []


def test_launches_counted_at_times_are_enough():
    session = CudaSession()
    for second in range(1, 401):
        eager = second >= 200
        counted = second % 15 == 0
        decode(session, second, 0 if eager else 50, (9000 if eager else 1200) if counted else NAN)
    (finding,) = session.find("graph_fallback")
    assert seconds(finding) == (209, 270)


@given(st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e5)), max_size=40))
def test_any_use_of_graphs_is_judged_without_error(rates):
    rows = np.zeros(len(rates), [("t", "<i8"), ("dt_ns", "<i8")])
    rows["t"] = np.arange(len(rates)) * NS
    plain, graphs = np.array(rates, float).reshape(-1, 2).T
    keep = plain + graphs > 0
    for one in fallbacks(Use(rows[keep], plain[keep], graphs[keep]), least_per_s=1, fall=0.25, rise=1.5):
        assert one.share[1] <= 0.25 * one.share[0]
        assert one.plain[1] >= 1.5 * one.plain[0]


# -- pipeline_bubbles


def stepping(session, second, bubble_ms, steps=50, **fields):
    session.stream(
        second,
        graph_launches=steps,
        bubbles=steps,
        bubble_ns=bubble_ms * MS,
        bubble_max_ns=30 * MS,
        **fields,
    )


def test_gaps_between_steps_while_the_gpu_is_idle():
    session = CudaSession()
    for second in range(1, 701):
        stepping(session, second, {599: 300, 600: 410, 601: 250}.get(second, 120))
    session.gpu(range(701), 40)
    (finding,) = session.find("pipeline_bubbles")
    assert (finding.subject, finding.severity, seconds(finding)) == (SUBJECT, WARN, (599, 601))
    assert finding.title == f"{SUBJECT} leaves the GPU without work 41 % of the time, GPU 40 % busy"
    values = told(finding)
    assert (values["bubble_pct"], values["gpu_busy_pct"]) == (41, 40)
    assert values["bubble_mean_ns"] == pytest.approx(8.2 * MS)


@pytest.mark.parametrize(
    ("bubble_ms", "steps", "busy_pct"),
    [
        (249, 50, 40),  # under a quarter
        (410, 50, 50),  # another stream keeps the GPU busy
        (990, 11, 1),  # pauses of 90 ms: no work
        (410, 50, None),  # nothing is known of the GPU
        (NAN, 50, 10),
    ],
)
def test_other_gaps_are_none(bubble_ms, steps, busy_pct):
    session = CudaSession()
    for second in range(1, 61):
        stepping(session, second, bubble_ms, steps)
    if busy_pct is not None:
        session.gpu(range(61), busy_pct)
    assert session.find("pipeline_bubbles") == []


def test_the_gpus_of_the_process_count_where_they_are_known():
    session = CudaSession()
    for second in range(1, 31):
        stepping(session, second, 500)
    session.gpu(range(31), 99, gpu=0)
    session.gpu(range(31), 20, gpu=1)
    assert session.find("pipeline_bubbles") == []
    for second in range(0, 31, 5):
        session.add("gpu_process", second, gpu=1, pid=PID, gi=-1)
        session.add("gpu_process", second, gpu=0, pid=PID + 1, gi=-1)
    (finding,) = session.find("pipeline_bubbles")
    assert told(finding)["gpu_busy_pct"] == 20


# -- waits


def waiting(session, second, wait_ms, **fields):
    session.stream(second, waits=20, wait_ns=wait_ms * MS, wait_max_ns=60 * MS, **fields)


@pytest.mark.parametrize(
    ("wait_ms", "busy_pct", "found"),
    [
        (920, 97, "gpu_bound"),
        (800, 80, "gpu_bound"),
        (799, 97, None),
        (920, 50, None),
        (920, 79, None),
        (920, 21, None),
        (920, 20, "wait_on_idle_gpu"),
        (920, 0, "wait_on_idle_gpu"),
        (700, 0, None),
        (920, None, None),
        (NAN, 97, None),
    ],
)
def test_waits_are_fine_while_the_gpu_works(wait_ms, busy_pct, found):
    session = CudaSession()
    for second in range(1, 21):
        waiting(session, second, wait_ms)
    if busy_pct is not None:
        session.gpu(range(21), busy_pct)
    both = {rule: session.find(rule) for rule in ("gpu_bound", "wait_on_idle_gpu")}
    assert [rule for rule, findings in both.items() if findings] == ([found] if found else [])
    if found:
        (finding,) = both[found]
        assert finding.severity == (NOTE if found == "gpu_bound" else WARN)
        assert (finding.subject, seconds(finding), finding.open) == (SUBJECT, (1, 20), True)
        assert told(finding)["wait_pct"] == wait_ms / 10
        assert f"waits {wait_ms // 10} % of the time" in finding.title


@pytest.mark.parametrize(
    ("wait_ms", "counted"), [(1000, ""), (1160, "waits that ended in the interval, all threads")]
)
def test_more_than_all_of_the_time_in_waits_is_explained(wait_ms, counted):
    session = CudaSession()
    for second in range(1, 21):
        waiting(session, second, wait_ms)
    session.gpu(range(21), 99)
    (finding,) = session.find("gpu_bound")
    (share,) = [one for one in finding.evidence if one.name == "wait_pct"]
    assert (share.value, share.source) == (wait_ms / 10, counted)


def test_a_long_wait_that_ends_in_one_sample_is_not_three_in_a_row():
    session = CudaSession()
    for second in range(1, 21):
        waiting(session, second, 4000 if second == 10 else 0)
    session.gpu(range(21), 99)
    assert session.find("gpu_bound") == []


def test_samples_of_a_gpu_that_say_nothing_neither_break_the_row_nor_count():
    session = CudaSession()
    for second in range(1, 8):
        waiting(session, second, 900 if second < 6 else 0)
    session.gpu((0, 1, 3, 5, 6, 7), 99)
    session.gpu((2, 4), NAN)
    (finding,) = session.find("gpu_bound")
    assert seconds(finding) == (1, 5)
    assert not finding.open  # it ended two seconds ago
    session.gpu((1,), NAN)
    assert session.find("gpu_bound") == []


def test_a_gpu_of_which_nothing_has_come_for_long_is_unknown():
    session = CudaSession()
    for second in range(1, 41):
        waiting(session, second, 950)
    session.gpu(range(11), 99)
    (finding,) = session.find("gpu_bound")
    assert seconds(finding) == (1, 15)
    assert not finding.open


# -- real sessions

RULES = (
    *("launch_latency", "graph_fallback", "pipeline_bubbles", "gpu_bound", "wait_on_idle_gpu"),
    *("stalled_thread", "capture_aborted", "init_in_capture", "jit_while_serving", "module_while_serving"),
    *("allocation_while_serving", "page_fault_storm", "tls_handshakes"),
)


@pytest.mark.parametrize("file", [h200x2(), Path(__file__).parents[1] / "data" / "h200-streams.opusmon"])
def test_nothing_of_this_is_true_of_real_sessions_that_were_well(file):
    """A load that pauses 90 ms between rounds and then launches without ever waiting: neither gaps nor waits of note."""
    assert set(RULES) <= set(run.rules())
    with Recording.open(file) as recording:
        for shift in (1, 7, 59):
            found = run.look_over(
                Window.over(recording), recording.t0 - shift * NS, recording.t1, only=list(RULES)
            )
            assert found == []


def test_the_pauses_of_a_real_session_are_gaps_once_they_are_let_count():
    """The load of h200-streams pauses 90 ms eleven times a second on one stream, and says so itself."""
    with Recording.open(Path(__file__).parents[1] / "data" / "h200-streams.opusmon") as recording:
        limits = {name: limit.value for name, limit in limits_cuda.LIMITS.items()} | {"bubble_mean_ms": 100}
        (finding,) = run.look_over(
            Window.over(recording), recording.t0, recording.t1, limits, only=["pipeline_bubbles"]
        )
        assert finding.subject == "python3 542 stream 0x2eb54090"
        assert [round((t - recording.t0) / NS, 1) for t in (finding.t0, finding.t1)] == [9.4, 17.4]
        assert told(finding)["bubble_mean_ns"] == pytest.approx(90.6 * MS, rel=0.01)


def test_limits_can_be_changed():
    session = CudaSession()
    for second in range(1, 5):
        timed(session, second, 12)
    assert session.find("launch_latency") == []
    assert len(session.find("launch_latency", launch_call_us=11)) == 1
    assert session.find("launch_latency", launch_call_us=11, launch_in_a_row=5) == []


def test_every_limit_says_why():
    for name, limit in limits_cuda.LIMITS.items():
        assert limit.why, name
