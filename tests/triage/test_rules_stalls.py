"""The rule about threads that are kept from launching: who, how often, how long, why; and what is no stall."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusmon.channels import STALL
from opusmon.clock import NS
from opusmon.triage.scene import Scene
from opusmon.triage.severity import CRIT, NOTE, WARN
from opusmon.triage.stall_bouts import bouts

from .cuda_session import MS, PID, THREAD, TID, CudaSession
from .session import T0, seconds, told

RUN_QUEUE = {"kind": "run_queue", "reason": "preempted"}
IO = {"kind": "off_cpu", "call": "pread64", "reason": "I/O"}
LOCK = {"kind": "futex", "call": "futex", "reason": "lock"}
WAIT = {"kind": "wait", "call": "cuStreamSynchronize", "reason": "waiting for the GPU", "code": 0}


def stalls(session, at, **fields):
    """A stall at each time: seconds to its length in ms."""
    for t_s, dur_ms in at.items():
        session.stall(t_s, dur_ns=dur_ms * MS, **fields)


def serving(session, seconds, running=8, waiting=0):
    for t_s in seconds:
        session.add("engine", t_s, engine="127.0.0.1:8000", running=running, waiting=waiting)


# -- one thread and reason


def test_what_is_told_of_a_bout():
    session = CudaSession()
    stack = "main;run;step;forward;cuLaunchKernel"
    stalls(session, {595 + n: 20 for n in range(9)}, **RUN_QUEUE, stack=stack)
    stalls(session, {604: 80}, **RUN_QUEUE, stack="main;other")
    stalls(session, {600.5: 6, 601.5: 6}, **RUN_QUEUE)
    (finding,) = session.find("stalled_thread")
    assert (finding.subject, finding.severity) == (f"{THREAD}: preempted", WARN)
    assert (finding.t0, finding.t1) == (T0 + 595 * NS - 20 * MS, T0 + 604 * NS)
    assert finding.title == (
        f"{THREAD} ready but not running (preempted) 12 times in 9.02 s, 272 ms in all, longest 80 ms"
    )
    share = 100 * 272 / 9020
    assert told(finding) == {
        "longest_ns": 80 * MS,
        "count": 12,
        "total_ns": 272 * MS,
        "share_pct": pytest.approx(share),
        "stack": "step;forward;cuLaunchKernel",
    }
    assert finding.evidence[0].threshold == 10 * MS
    assert (finding.pane, finding.open) == ("stalls", True)


@pytest.mark.parametrize(
    ("at", "severity"),
    [
        ({10: 99}, None),  # alone
        ({10: 9.9, 11: 9.9, 12: 9.9}, None),  # under a step
        ({10: 10, 11: 10}, None),
        ({10: 10, 11: 10, 12: 10}, NOTE),
        ({10: 10, 40: 10, 69: 10}, NOTE),  # within a minute
        ({10: 10, 40: 10, 71: 10}, None),  # not within a minute
        ({10 + n: 10 for n in range(9)}, NOTE),
        ({10 + n: 10 for n in range(10)}, WARN),
        ({10: 100}, WARN),
        ({10: 100, 30: 100}, WARN),
        ({10: 100, 30: 100, 50: 100}, CRIT),
        ({10: 2999}, WARN),
        ({10: 3000}, CRIT),  # a twentieth of the minute
        ({10 + n / 20: 6 for n in range(500)}, NOTE),  # 3 s of short ones
        ({10 + n / 20: 6 for n in range(499)}, None),
    ],
)
def test_how_bad_a_minute_of_them_is(at, severity):
    session = CudaSession()
    stalls(session, at, **RUN_QUEUE)
    session.gpu(range(0, 120, 10), 0)
    assert [f.severity for f in session.find("stalled_thread")] == ([severity] if severity else [])


def test_one_finding_for_each_thread_and_reason():
    session = CudaSession()
    many = {10 + n: 50 for n in range(12)}
    stalls(session, many, **RUN_QUEUE)
    stalls(session, many, **{**RUN_QUEUE, "reason": "woken, no CPU was free"})
    stalls(session, many, **RUN_QUEUE, tid=TID + 1, thread="worker-1")
    stalls(session, many, **IO, pid=77, tid=77, process="python3")
    found = session.find("stalled_thread")
    assert sorted(f.subject for f in found) == [
        "python3 77: I/O",
        f"{THREAD}: preempted",
        f"{THREAD}: woken, no CPU was free",
        f"vllm {PID} worker-1 {TID + 1}: preempted",
    ]
    assert {told(f)["count"] for f in found} == {12}


def test_hours_of_it_are_told_by_the_worst_minute():
    session = CudaSession()
    stalls(session, dict.fromkeys(range(5, 1900, 5), 20), **RUN_QUEUE)
    stalls(session, {1001 + n: 30 for n in range(10)}, **RUN_QUEUE)
    (finding,) = session.find("stalled_thread")
    assert (seconds(finding)[1], finding.severity) == (1895, WARN)
    assert seconds(finding)[0] == pytest.approx(4.98)
    # The minute that begins with a stall holds twelve of the even ones (thirteen begin within 60 s of the end of the
    # first), and the ten beside them.
    values = told(finding)
    assert values["count"] == 22
    assert values["total_ns"] == (12 * 20 + 10 * 30) * MS


def test_bouts_apart_are_findings_apart():
    session = CudaSession()
    stalls(session, dict.fromkeys((100, 101, 102, 161, 300, 301), 150), **IO)
    found = session.find("stalled_thread")
    assert [(round(seconds(f)[0]), seconds(f)[1], f.severity) for f in found] == [
        (100, 161, CRIT),
        (300, 301, WARN),
    ]


def test_folded_rows_count_with_those_beside_them():
    session = CudaSession()
    stalls(session, {10 + n / 25: 12 for n in range(20)}, **RUN_QUEUE)
    session.stall(10.9, "run_queue", reason="shorter ones, folded", count=25, dur_ns=150 * MS)
    (finding,) = session.find("stalled_thread")
    values = told(finding)
    assert (values["count"], values["total_ns"], values["longest_ns"]) == (45, 390 * MS, 12 * MS)


def test_folded_rows_of_unknown_reason_are_nothing():
    session = CudaSession()
    session.stall(10, "off_cpu", reason="shorter ones, folded", count=50, dur_ns=5000 * MS)
    stalls(session, {12: 5000}, **IO, tid=TID + 1)
    assert [f.subject for f in session.find("stalled_thread")] == [f"vllm {PID} worker-0 {TID + 1}: I/O"]
    session.stall(80, "off_cpu", reason="sleep", dur_ns=5 * MS)
    session.stall(80.5, "off_cpu", reason="shorter ones, folded", count=50, dur_ns=5000 * MS)
    assert len(session.find("stalled_thread")) == 1


# -- what is no stall


@pytest.mark.parametrize(
    "reason", ["sleep", "sleeping", "waiting for events", "waiting for a signal, inside cuLaunchKernel"]
)
def test_what_a_thread_wished_for_itself(reason):
    session = CudaSession()
    serving(session, range(60))
    stalls(session, {10 + n: 900 for n in range(20)}, kind="off_cpu", reason=reason)
    assert session.find("stalled_thread") == []


def test_sleeping_inside_a_wait_for_the_gpu_is_that_wait():
    session = CudaSession()
    stalls(
        session,
        {10 + n: 900 for n in range(20)},
        kind="off_cpu",
        reason="driver call, inside cuStreamSynchronize",
    )
    assert session.find("stalled_thread") == []
    stalls(
        session, {40 + n: 900 for n in range(20)}, kind="off_cpu", reason="driver call, inside cuLaunchKernel"
    )
    assert [f.severity for f in session.find("stalled_thread")] == [CRIT]


@pytest.mark.parametrize(
    "reason", ["lock", "network", "pipe, socket or terminal", "waiting for a child process"]
)
@pytest.mark.parametrize(
    ("running", "active", "severity"),
    [
        (8, False, {"lock": WARN}),
        (0, True, None),  # nobody waits for an answer
        (math.nan, True, {"lock": NOTE}),  # not known whether there was work
        (math.nan, False, None),
        (None, True, {"lock": NOTE}),
        (None, False, None),
    ],
)
def test_waiting_for_others_counts_while_there_is_work(reason, running, active, severity):
    session = CudaSession()
    if running is not None:
        serving(session, range(60), running, math.nan if math.isnan(running) else 0)
    for t_s in range(60):
        session.stream(t_s, launches=100 if active else 0)
    kind = "futex" if reason == "lock" else "off_cpu"
    stalls(session, {10 + n: 400 for n in range(20)}, kind=kind, reason=reason)
    found = [f.severity for f in session.find("stalled_thread")]
    if severity is None:
        assert found == []
    elif severity["lock"] == NOTE:
        assert found == [NOTE]
    else:
        assert found == [WARN if reason == "lock" else CRIT]


def test_a_queue_is_work_too_and_old_figures_are_none():
    session = CudaSession()
    serving(session, range(20), running=0, waiting=3)
    stalls(session, {10 + n: 400 for n in range(30)}, **LOCK)
    (finding,) = session.find("stalled_thread")
    assert seconds(finding) == (pytest.approx(9.6), 29)  # the engine was last heard of at 19 s


@pytest.mark.parametrize(
    ("busy_pct", "severity"), [(97, None), (80, None), (33, None), (31, CRIT), (5, CRIT), (None, NOTE)]
)
def test_waiting_for_a_gpu_that_works_is_no_stall(busy_pct, severity):
    session = CudaSession()
    stalls(session, {10 + n: 400 for n in range(20)}, **WAIT)
    if busy_pct is not None:
        session.gpu(range(40), busy_pct)
    assert [f.severity for f in session.find("stalled_thread")] == ([severity] if severity else [])


def test_a_wait_that_fails_is_critical_even_alone():
    session = CudaSession()
    session.gpu(range(40), 99)
    session.stall(
        20, "wait", dur_ns=6 * MS, code=700, reason="waiting for the GPU, failed with CUDA error 700"
    )
    (finding,) = session.find("stalled_thread")
    assert finding.severity == CRIT
    assert finding.title == f"{THREAD} waiting for the GPU, failed with CUDA error 700 once, 6 ms"


def test_a_name_from_outside_is_one_printable_line():
    session = CudaSession()
    stalls(session, {10: 5000}, **RUN_QUEUE, process="ev\x1b[31mil\n", thread="\u202ew")
    (finding,) = session.find("stalled_thread")
    assert finding.subject == f"ev?[31mil? {PID} ?w {TID}: preempted"


# -- bouts against a plain count


@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(1, 2), st.integers(0, 90), st.integers(1, 3)), max_size=30
    )
)
def test_bouts_are_the_minutes_that_are_graded(planted):
    rows = np.zeros(len(planted), STALL.dtype)
    for row, (t_s, tid, dur_s, count) in zip(rows, sorted(planted), strict=True):
        row["t"], row["tid"], row["dur_ns"], row["count"] = T0 + t_s * NS, tid, dur_s * NS, count

    def grade(sums):
        return np.where(sums.calls >= 4, 3, 0).astype(np.int8)

    scene = Scene(CudaSession().view(), T0 - 100 * NS, T0 + 400 * NS)
    found = list(bouts(scene, rows, np.zeros(len(rows), np.int8), ("tid",), grade))
    windows = []
    for first in range(len(rows)):
        own = rows[first:][rows[first:]["tid"] == rows["tid"][first]]
        begin = int(own["t"][0] - own["dur_ns"][0])
        within = own[(own["t"] <= begin + 60 * NS) | (np.arange(len(own)) == 0)]
        if within["count"].sum() >= 4:
            windows.append((int(own["tid"][0]), int(within["t"][0]), int(within["t"][-1]), within))
    for tid, t0, t1, within in windows:
        covering = [b for b in found if b.rows["tid"][0] == tid and b.t0 <= t0 and t1 <= b.t1]
        assert covering
        assert max(b.total_ns for b in covering) >= within["dur_ns"].sum()
    for one in found:
        assert one.calls >= 4
        assert any(np.array_equal(one.rows, within) for _, _, _, within in windows)
