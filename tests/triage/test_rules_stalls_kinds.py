"""The rules about captures, compilers, loading, memory, page faults and TLS: planted events, and what is no finding."""

import pytest

from opusmon.clock import NS
from opusmon.triage.severity import CRIT, NOTE, WARN

from .cuda_session import MS, PID, PROCESS, THREAD, TID, CudaSession
from .session import T0, seconds, told

NAN = float("nan")

# -- captures

ABORT = {
    "kind": "capture",
    "call": "cuStreamEndCapture",
    "reason": "aborted: invalidated by an earlier error",
    "dur_ns": 31 * MS,
    "code": 901,
    "by_tid": TID + 11,
    "by_thread": "nccl",
    "by_call": "cuMemAlloc_v2",
    "by_code": 900,
    "before": "cuLaunchKernel x3 on 0x7; cuMemAlloc_v2",
    "stack": "main;capture_end;cuStreamEndCapture",
}
BY = f"cuMemAlloc_v2 in thread nccl {TID + 11}"


@pytest.mark.parametrize("at", [30, 599.99, 600.01])
def test_an_aborted_capture_with_its_culprit(at):
    session = CudaSession()
    session.stall(at, **ABORT)
    session.stall(700, "capture", code=0, dur_ns=20 * MS, reason="ended")
    (finding,) = session.find("capture_aborted")
    assert (finding.subject, finding.severity) == (f"{THREAD}: 901 by cuMemAlloc_v2 in thread nccl", CRIT)
    assert seconds(finding) == (pytest.approx(at - 0.031), at)
    assert finding.title == f"{THREAD}: graph capture failed with 901, broken by {BY}"
    assert told(finding) == {
        "code": 901,
        "reason": "aborted: invalidated by an earlier error",
        "count": 1,
        "by": BY,
        "by_code": 900,
        "before": "cuLaunchKernel x3 on 0x7; cuMemAlloc_v2",
        "stack": "main;capture_end;cuStreamEndCapture",
    }
    assert not finding.open
    assert BY in finding.cause


def test_a_series_of_aborts_is_one_finding_and_another_culprit_another():
    session = CudaSession()
    for n in range(17):
        session.stall(595 + n / 2, **ABORT)
    session.stall(603.2, **{**ABORT, "by_tid": 0, "by_thread": "", "by_call": "", "by_code": NAN})
    series, single = session.find("capture_aborted")
    assert (told(series)["count"], seconds(series)[1]) == (17, 603)
    assert series.title.endswith(", 17 times in 8.03 s")
    assert single.subject == f"{THREAD}: 901"
    assert single.cause.endswith("which one was not seen")


@pytest.mark.parametrize(
    ("told_of", "cause", "change"),
    [
        ({}, "no thread may call that while another captures", "mode thread_local"),
        ({"by_tid": TID}, "cuMemAlloc_v2 in the capturing thread", "take that call out"),
        ({"code": 904}, "a side stream", "wait for it before the capture ends"),
        ({"code": 905, "by_tid": TID}, "a stream outside of the capture", "join the capture first"),
        ({"code": 906, "by_tid": TID}, "the default stream", "on the capturing stream"),
    ],
)
def test_what_helps_depends_on_who_broke_the_capture_and_how(told_of, cause, change):
    session = CudaSession()
    session.stall(30, **{**ABORT, **told_of})
    (finding,) = session.find("capture_aborted")
    assert cause in finding.cause
    assert change in finding.next
    # Where the capturing thread itself is at fault that mode does not help.
    assert ("thread_local" in finding.next) == (told_of == {})


def test_threads_of_one_name_that_break_captures_are_told_together():
    session = CudaSession()
    for n in range(4):
        session.stall(100 + n, **{**ABORT, "by_tid": TID + 11 + n % 3})
    session.stall(104, **{**ABORT, "by_thread": "loader"})
    session.stall(105, **{**ABORT, "by_tid": TID, "by_call": "cuStreamSynchronize"})
    found = {finding.subject: finding for finding in session.find("capture_aborted")}
    pool, loader, own = (
        f"{THREAD}: 901 by {by}"
        for by in (
            "cuMemAlloc_v2 in thread nccl",
            "cuMemAlloc_v2 in thread loader",
            "cuStreamSynchronize in the capturing thread",
        )
    )
    assert set(found) == {pool, loader, own}
    assert (told(found[pool])["count"], told(found[pool])["by"]) == (4, "cuMemAlloc_v2 in 3 threads nccl")
    assert told(found[loader])["by"] == f"cuMemAlloc_v2 in thread loader {TID + 11}"
    assert found[own].title.endswith("broken by cuStreamSynchronize in the capturing thread")


def test_captures_that_end_well_or_of_unknown_result_are_none():
    session = CudaSession()
    for n, code in enumerate((0, NAN)):
        session.stall(10 + n, **{**ABORT, "code": code})
    assert session.find("capture_aborted") == []


def test_first_use_inside_a_capture():
    session = CudaSession()
    call = {"call": "cuLibraryLoadData", "reason": "loading of code while a capture is open"}
    session.stall(20, "init_in_capture", dur_ns=3 * MS, code=0, **call)
    (finding,) = session.find("init_in_capture")
    assert (finding.severity, finding.subject) == (WARN, f"{THREAD}: cuLibraryLoadData")
    assert finding.title == f"{THREAD}: cuLibraryLoadData inside a graph capture, once, 3 ms"
    assert told(finding)["reason"] == "loading of code while a capture is open"


# -- compilers

JIT = {
    "kind": "jit",
    "call": "ptxas",
    "reason": "compiled",
    "thread": "ptxas",
    "tid": 9999,
    "dur_ns": 412 * MS,
    "code": 0,
}


def aged(session, seconds_of_age, until=60):
    for t_s in range(until):
        session.add("process", t_s, pid=PID, name="vllm", age_ns=(seconds_of_age + t_s) * NS)


def active(session, first, last):
    for t_s in range(first, last + 1):
        session.stream(t_s, launches=500)


@pytest.mark.parametrize(
    ("dur_ms", "code", "severity"), [(99, 0, NOTE), (412, 0, WARN), (2000, 0, CRIT), (50, 1, WARN)]
)
def test_compiling_while_serving(dur_ms, code, severity):
    session = CudaSession()
    aged(session, 400)
    session.stall(40, **{**JIT, "dur_ns": dur_ms * MS, "code": code})
    (finding,) = session.find("jit_while_serving")
    assert (finding.subject, finding.severity) == (PROCESS, severity)
    assert finding.title.startswith(f"{PROCESS} compiled code while serving: ptxas once, ")
    assert seconds(finding) == (pytest.approx(40 - dur_ms / 1000), 40)


def test_compilers_of_one_minute_are_one_finding():
    session = CudaSession()
    aged(session, 400)
    for n in range(8):
        session.stall(10 + n, **{**JIT, "tid": 9000 + n, "call": "cicc" if n == 3 else "ptxas"})
    (finding,) = session.find("jit_while_serving")
    assert told(finding)["count"] == 8
    assert (
        finding.title
        == f"{PROCESS} compiled code while serving: ptxas 8 times in 7.41 s, 3.3 s in all, longest 412 ms"
    )


@pytest.mark.parametrize(
    ("age_s", "launched", "severity"),
    [
        (100, (0, 0), None),  # starting
        (250, (0, 0), None),  # 290 s old by then
        (261, (0, 0), WARN),  # just 300 s old when the compiler began
        (10, (5, 35), WARN),  # young, but it launched for half a minute without anything slow
        (10, (30, 39), None),  # launched for 10 s
        (None, (5, 35), WARN),
        (None, (30, 39), None),
        (None, None, NOTE),  # nothing is known
    ],
)
def test_compiling_while_a_process_starts_is_none(age_s, launched, severity):
    session = CudaSession()
    if age_s is not None:
        aged(session, age_s)
    if launched is not None:
        active(session, *launched)
    session.stall(40, **JIT)
    assert [f.severity for f in session.find("jit_while_serving")] == ([severity] if severity else [])


@pytest.mark.parametrize(("at", "severities"), [(80, [WARN]), (90, [WARN]), (91, [])])
def test_launching_long_enough_counts_for_a_minute(at, severities):
    session = CudaSession()
    active(session, 5, 30)
    session.stall(at, **{**JIT, "dur_ns": 100 * MS})
    assert [f.severity for f in session.find("jit_while_serving")] == severities


def test_a_warm_up_that_launches_and_compiles_in_turn_is_none():
    session = CudaSession()
    active(session, 1, 100)
    for n in range(1, 100, 5):
        session.stall(n, **JIT)
    assert session.find("jit_while_serving") == []


# -- code and memory after warm-up: the collector tells only those


def slow(session, at, kind, call, *, ms, count=1, code=0, **fields):
    """Calls of a second, added up."""
    for t_s in at:
        session.stall(
            t_s, kind, call=call, reason="after warm-up", dur_ns=ms * MS, count=count, code=code, **fields
        )


@pytest.mark.parametrize(
    ("seconds_of_it", "ms", "count", "severity"),
    [
        (5, 9, 3, None),
        (1, 10, 3, NOTE),
        (3, 10, 3, WARN),
        (1, 100, 1, WARN),
        (3, 100, 1, CRIT),
        (33, 1, 3, None),
        (34, 1, 3, NOTE),
        (10, 5, 100, WARN),
    ],
)
@pytest.mark.parametrize(
    ("rule", "kind", "call"),
    [
        ("module_while_serving", "module", "cuLibraryLoadData"),
        ("allocation_while_serving", "alloc", "cuMemCreate"),
        ("allocation_while_serving", "free", "cuMemFree_v2"),
    ],
)
def test_how_much_loading_and_allocating_is_too_much(rule, kind, call, seconds_of_it, ms, count, severity):
    session = CudaSession()
    slow(session, range(580, 580 + seconds_of_it), kind, call, ms=ms, count=count)
    session.gpu(range(0, 700, 5), 50)
    found = session.find(rule)
    assert [f.severity for f in found] == ([severity] if severity else [])
    assert all(f.subject == THREAD and call in f.title for f in found)


def test_a_storm_of_allocations_is_told_in_numbers():
    session = CudaSession()
    slow(
        session, range(598, 604), "alloc", "cuMemAlloc_v2", ms=30, count=40, stack="main;malloc;cuMemAlloc_v2"
    )
    slow(session, range(598, 604), "free", "cuMemFree_v2", ms=20, count=40)
    (finding,) = session.find("allocation_while_serving")
    assert finding.severity == WARN
    assert finding.title == (
        f"{THREAD} took or freed GPU memory after warm-up: cuMemAlloc_v2 480 times in 5.03 s, 300 ms in all"
    )
    values = told(finding)
    assert (values["calls_per_minute"], values["total_ns"], values["worst_second_ns"]) == (
        480,
        300 * MS,
        30 * MS,
    )
    assert values["stack"] == "main;malloc;cuMemAlloc_v2"


def test_memory_that_is_out_is_said():
    session = CudaSession()
    slow(session, [20], "alloc", "cuMemAlloc_v2", ms=1, code=2)
    (finding,) = session.find("allocation_while_serving")
    assert finding.severity == NOTE
    assert finding.title.endswith("once, 1 ms, failed with CUDA error 2")
    assert "memory is short" in finding.cause


# -- page faults


@pytest.mark.parametrize(
    ("seconds_of_it", "per_s", "severity"),
    [(1, 25_000, NOTE), (2, 25_000, NOTE), (3, 25_000, WARN), (2, 120_000, NOTE), (3, 120_000, CRIT)],
)
def test_a_storm_of_page_faults(seconds_of_it, per_s, severity):
    session = CudaSession()
    aged(session, 1000)
    for t_s in range(20, 20 + seconds_of_it):
        session.stall(
            t_s, "page_faults", tid=PID, thread="", dur_ns=NS, count=per_s, reason="over 20,000 a second"
        )
    (finding,) = session.find("page_fault_storm")
    assert (finding.severity, seconds(finding)) == (severity, (19, 19 + seconds_of_it))
    assert finding.title == f"{PROCESS} met {per_s:,} page faults a second"
    assert f"pidstat -r -p {PID} 1" in finding.next


def test_page_faults_of_loading_a_model_are_none():
    session = CudaSession()
    aged(session, 5)
    for t_s in range(20, 30):
        session.stall(t_s, "page_faults", tid=PID, thread="", dur_ns=NS, count=200_000)
    assert session.find("page_fault_storm") == []


# -- TLS


@pytest.mark.parametrize(
    ("handshakes", "severity"),
    [
        ([(600, 1)], None),  # slower than what the collector calls slow, that is all
        ([(1000, 1)], NOTE),
        ([(2, -1)], NOTE),
        ([(2, -1), (3, 0)], NOTE),
        ([(2, -1), (3, 0), (1200, 1)], WARN),
        ([(5000, 1)] * 3, CRIT),
        ([(600, 1)] * 20, None),
    ],
)
def test_handshakes_that_fail_or_take_long(handshakes, severity):
    session = CudaSession()
    for n, (ms, code) in enumerate(handshakes):
        words = "slow" if code == 1 else "failed: the connection ended without success"
        session.stall(590 + 3 * n, "tls", call="SSL_do_handshake", reason=words, dur_ns=ms * MS, code=code)
    found = session.find("tls_handshakes")
    assert [f.severity for f in found] == ([severity] if severity else [])
    for finding in found:
        failed = sum(code != 1 for _, code in handshakes)
        assert f"{failed} failed, {len(handshakes) - failed} slow" in finding.title
        assert told(finding)["failed"] == failed


def test_nothing_of_this_in_a_session_of_quiet_rows():
    """One of each, short and single, of a process that has just begun."""
    session = CudaSession()
    aged(session, 1)
    session.stall(10, "capture", code=0, dur_ns=20 * MS)
    session.stall(11, **{**JIT, "dur_ns": 30 * MS})
    session.stall(12, "tls", code=1, dur_ns=600 * MS)
    session.stall(13, "page_faults", tid=PID, dur_ns=NS, count=21_000)
    slow(session, [14], "alloc", "cuMemAllocAsync", ms=6)
    slow(session, [15], "module", "cuModuleGetFunction", ms=2)
    for rule in (
        *("capture_aborted", "init_in_capture", "jit_while_serving", "module_while_serving"),
        *("allocation_while_serving", "page_fault_storm", "tls_handshakes"),
    ):
        assert session.find(rule) == []
    assert session.view().t1 == T0 + 59 * NS
