"""Severities at and around every threshold, worked out by hand from the table."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusmon.channels import BY_NAME, CGROUP, HOST, PROCESS, STALL, WHOLE_CONTEXT
from opusmon.schema import StringTable
from opusmon.triage.severity import (
    CRIT,
    HOST_LIMITS,
    NONE,
    NOTE,
    STALL_LIMITS,
    WARN,
    distinct,
    host_severity,
    stall_severity,
    translate,
)

MS = 1e6
NS = 1e9
NAN = math.nan


def levels(*stalls):
    """Severities of stalls given as (kind, dur_ns, and more fields by name)."""
    strings = StringTable()
    rows = np.zeros(len(stalls), STALL.dtype)
    rows["code"] = rows["by_code"] = NAN
    rows["stream"] = WHOLE_CONTEXT
    for row, (kind, dur_ns, more) in zip(rows, stalls, strict=True):
        row["kind"], row["dur_ns"] = strings.intern(kind), dur_ns
        for name, value in more.items():
            row[name] = strings.intern(value) if isinstance(value, str) else value
    return stall_severity(rows, strings).tolist()


def level(kind, dur_ns=NAN, **more):
    return levels((kind, dur_ns, more))[0]


def test_every_kind_of_the_channel_has_limits():
    kinds = BY_NAME["stall"].by_name["kind"].help.split(", ")
    assert set(STALL_LIMITS) == set(kinds)


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("wait", [(4.9, NONE), (5, NOTE), (39.9, NOTE), (40, WARN), (199, WARN), (200, CRIT)]),
        ("off_cpu", [(4.9, NONE), (5, NOTE), (10, WARN), (99, WARN), (100, CRIT)]),
        ("run_queue", [(4.9, NONE), (5, NOTE), (10, WARN), (99, WARN), (100, CRIT)]),
        ("futex", [(4.9, NONE), (5, NOTE), (99, NOTE), (100, WARN), (1e6, WARN)]),
        ("alloc", [(0.1, NOTE), (9.9, NOTE), (10, WARN), (100, CRIT)]),
        ("free", [(0.1, NOTE), (9.9, NOTE), (10, WARN), (100, CRIT)]),
        ("module", [(0.1, NOTE), (9.9, NOTE), (10, WARN), (100, CRIT)]),
        ("jit", [(1, NOTE), (99, NOTE), (100, WARN), (1999, WARN), (2000, CRIT)]),
        ("init_in_capture", [(0.01, WARN), (1e6, WARN)]),
        ("tls", [(500, NOTE), (1000, WARN), (5000, CRIT)]),
        ("something new", [(4.9, NONE), (5, NOTE), (40, WARN), (200, CRIT)]),
    ],
)
def test_steps_by_duration(kind, steps):
    assert [level(kind, ms * MS) for ms, _ in steps] == [want for _, want in steps]


def test_page_faults_go_by_their_count_alone():
    counts = (1, 9_999, 10_000, 99_999, 100_000)
    assert [level("page_faults", 1e9, count=count) for count in counts] == [NOTE, NOTE, WARN, WARN, CRIT]


def test_of_folded_stalls_the_mean_counts_but_for_memory_and_modules_the_sum():
    for kind in ("wait", "off_cpu", "run_queue"):
        assert level(kind, 900 * MS, count=150) == NOTE  # 6 ms each
        assert level(kind, 900 * MS, count=1) == CRIT
        assert level(kind, 900 * MS, count=NAN) == CRIT
    for kind in ("alloc", "free", "module"):
        assert level(kind, 150 * MS, count=150) == CRIT  # 1 ms each, a tenth of a second of one thread
    mixed = [
        ("wait", 900 * MS, {"count": 150}),
        ("page_faults", NS, {"count": 20_000}),
        ("wait", 50 * MS, {"count": 1}),
    ]
    assert levels(*mixed) == [NOTE, WARN, WARN]


def test_a_page_fault_row_with_one_or_no_count():
    assert level("page_faults", 1e9, count=1) == NOTE
    assert level("page_faults", 1e9, count=NAN) == NOTE


def test_a_capture_is_bad_when_it_fails_whatever_it_took():
    assert level("capture", 9e9, code=0) == NONE
    assert level("capture", 9e9) == NONE
    assert [level("capture", 1, code=code) for code in (900, 901, 908, 1)] == [CRIT] * 4


@pytest.mark.parametrize(
    ("kind", "code", "want"),
    [
        ("wait", 700, CRIT),
        ("wait", 0, NOTE),
        ("alloc", 2, WARN),
        ("free", 1, CRIT),
        ("module", 209, CRIT),
        ("jit", 1, WARN),
        ("jit", -9, WARN),
        ("tls", 0, WARN),
        ("tls", -1, WARN),
        ("tls", 1, NOTE),
        ("init_in_capture", 901, CRIT),
    ],
)
def test_a_result_that_says_failure_counts_more_than_a_short_time(kind, code, want):
    assert level(kind, 6 * MS, code=code) == want


def test_what_a_thread_wished_for_is_a_note_and_a_lock_never_critical():
    for reason in ("sleep", "sleeping", "waiting for events", "waiting for a signal"):
        assert level("off_cpu", 9e9, reason=reason) == NOTE
    assert level("off_cpu", 9e9, reason="lock") == WARN
    assert level("off_cpu", 9e9, reason="I/O") == CRIT
    assert level("off_cpu", 1 * MS, reason="sleep") == NONE


def test_a_missing_duration_is_not_a_long_one():
    assert [level(kind) for kind in ("wait", "off_cpu", "capture")] == [NONE] * 3
    assert [level(kind) for kind in ("alloc", "jit", "init_in_capture")] == [NOTE, NOTE, WARN]


def test_many_at_once_are_as_one_by_one():
    stalls = [
        ("wait", 84 * MS, {}),
        ("capture", 1 * MS, {"code": 901}),
        ("off_cpu", 500 * MS, {"reason": "sleep"}),
        ("page_faults", 1e9, {"count": 20_000}),
        ("tls", 2e9, {"code": 1}),
    ]
    assert levels(*stalls) == [levels(stall)[0] for stall in stalls] == [WARN, CRIT, NOTE, WARN, WARN]
    assert levels() == []


@given(st.sampled_from([*STALL_LIMITS, "new"]), st.floats(0, 1e15), st.floats(0, 1e15))
def test_longer_is_never_better(kind, one, other):
    short, long = sorted((one, other))
    assert level(kind, short, count=short) <= level(kind, long, count=long)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_distinct_ids(values):
    assert distinct(np.array(values, np.uint32)) == sorted(set(values))


@given(
    st.lists(st.one_of(st.integers(0, 50), st.integers(0, 2**32 - 1))),
    st.dictionaries(st.one_of(st.integers(0, 50), st.integers(0, 2**32 - 1)), st.integers(-5, 20)),
)
def test_translation_is_a_look_up(values, table):
    got = translate(np.array(values, np.uint32), table, 99)
    assert got.tolist() == [table.get(value, 99) for value in values]


def test_host_figures():
    assert [host_severity("throttled_pct", value) for value in (0, 0.9, 1, 9, 10, NAN)] == [
        *(NONE, NONE, WARN, WARN, CRIT, NONE)
    ]
    assert host_severity("run_queue_per_cpu", 1.0) == NONE
    assert all(limits.warn < limits.crit and limits.why for limits in HOST_LIMITS.values())
    fields = {*HOST.by_name, *CGROUP.by_name, *PROCESS.by_name}
    derived = {"run_queue_per_cpu", "cgroup_mem_pct", "swap_bps"}
    assert set(HOST_LIMITS) - derived <= fields
    with pytest.raises(KeyError):
        host_severity("mood", 1)


def test_limits_grow():
    for limits in STALL_LIMITS.values():
        assert limits.note <= limits.warn <= limits.crit
        assert limits.why
