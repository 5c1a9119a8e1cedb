"""Parts of the stalls collector that need no kernel: tables beside the source, the ring, folding, words, rows."""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusmon.channels import STALL, WHOLE_CONTEXT
from opusmon.clock import ManualClock
from opusmon.collectors.ebpf import stall_maps as kernel
from opusmon.collectors.ebpf import stall_words as words
from opusmon.collectors.ebpf.libcuda import Scan
from opusmon.collectors.ebpf.ring import BUSY, DISCARDED, Ring, entry, parse
from opusmon.collectors.ebpf.source_text import whole
from opusmon.collectors.ebpf.stall_cost import FILTER_NS, StallMeter
from opusmon.collectors.ebpf.stall_notes import Sight, statements
from opusmon.collectors.ebpf.stall_ration import Ration
from opusmon.collectors.ebpf.stall_rows import (
    FEW,
    MAX_TEXTS,
    MOST,
    SINGLE,
    Interner,
    Sieve,
    Stall,
    from_event,
    is_urgent,
    of_pids,
)
from opusmon.collectors.ebpf.stall_tracepoints import POINTS
from opusmon.collectors.ebpf.symbols import CALLS, STALL_ENTRIES, TLS_ENTRIES
from opusmon.cuda_codes import CAPTURE_CODES
from opusmon.schema import StringTable

NS, MS = 1_000_000_000, 1_000_000
SOURCE = whole("stalls")

# -- the source and the tables that speak of it


def test_every_program_is_in_the_source() -> None:
    had = set(re.findall(r"^UPROBE int (\w+)\(struct pt_regs", SOURCE, re.MULTILINE))
    had |= {f"on_{name}" for name in re.findall(r"^ON\((\w+),", SOURCE, re.MULTILINE)}
    wanted = {
        program
        for entry in (*STALL_ENTRIES.values(), *TLS_ENTRIES.values())
        for program in (entry.program, entry.on_return)
    }
    assert wanted - {""} == had
    points = set(re.findall(r"^TRACEPOINT int (\w+)\(", SOURCE, re.MULTILINE))
    assert points == {program for point in POINTS for program in point.programs}


def test_numbers_of_calls_are_those_of_the_source() -> None:
    body = re.search(r"enum \{\n    cuStreamSynchronize = 1,(.*?)\};", SOURCE, re.DOTALL)
    assert body is not None
    assert ("", "cuStreamSynchronize", *re.findall(r"(\w+),", body[1])) == CALLS


def test_numbers_of_kinds_flags_and_counts_are_those_of_the_source() -> None:
    assert "enum { WAIT = 1, OFF_CPU, RUN_QUEUE, FUTEX, JIT, CAPTURE, INIT, TLS };" in SOURCE
    assert len(words.KINDS) == kernel.TLS + 1
    assert (
        f"NOT_BEGUN = {kernel.NOT_BEGUN}, NO_BEGIN = {kernel.NO_BEGIN}, CODE_KNOWN = {kernel.CODE_KNOWN}"
        in SOURCE
    )
    assert f"OF_CUDA = {kernel.OF_CUDA}, OF_TLS = {kernel.OF_TLS}" in SOURCE
    slots = re.search(r"enum \{ (HIT_LAUNCH.*?), SLOTS \}", SOURCE)
    assert slots is not None
    names = [name.lower().removeprefix("hit_") for name in slots[1].split(", ")]
    assert names == ["launch", "poll", "always", "switch", "other", "lost_ring", "lost_map", "lost_read"]
    assert list(kernel.Counts.__dataclass_fields__)[:3] == names[:3]


def test_structures_are_as_large_as_the_kernels() -> None:
    sizes = {"EVENT": 112, "PROC": 72, "SLOW": 72, "SLOW_KEY": 16, "RECENT": 264}
    assert {name: getattr(kernel, name).itemsize for name in sizes} == sizes


def test_variants_of_the_per_thread_stream_have_their_own_programs() -> None:
    for symbol, one in STALL_ENTRIES.items():
        if one.program:
            assert symbol.endswith(("_ptsz", "_ptds")) == one.program.endswith("_pt")


def test_flags_by_machine() -> None:
    assert {"-DSTREAM_ON_STACK=24", "-DSYSCALL_AT=120", "-DSYSCALL_FUTEX=202"} <= set(kernel.cflags("x86_64"))
    assert {"-DSTREAM_ON_STACK=0", "-DSYSCALL_AT=280", "-DSYSCALL_FUTEX=98"} <= set(kernel.cflags("aarch64"))
    assert words.SYSCALLS["x86_64"][202] == words.SYSCALLS["aarch64"][98] == "futex"


# -- the ring

RECORD = np.dtype([("t", "<u8"), ("n", "<u4")])


def lay(entries: list[tuple[int, int]]) -> np.ndarray[Any, Any]:
    """Entries of (value, flags) as they lie in a ring."""
    made = np.zeros(len(entries), entry(RECORD))
    for index, (value, flags) in enumerate(entries):
        made[index] = (RECORD.itemsize | flags, (value, value % 1000))
    return np.frombuffer(made.tobytes(), np.uint8)


def test_an_entry_is_padded_to_eight_bytes() -> None:
    assert RECORD.itemsize == 12
    assert entry(RECORD).itemsize == 24
    assert entry(kernel.EVENT).itemsize == 120


def test_records_up_to_the_first_one_that_is_not_submitted() -> None:
    data = lay([(1, 0), (2, DISCARDED), (3, 0), (4, BUSY), (5, 0)])
    records, used, foreign = parse(data, RECORD)
    assert records["t"].tolist() == [1, 3]
    assert (used, foreign) == (3 * 24, 0)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.sampled_from([0, 0, 0, DISCARDED, BUSY])), max_size=40))
def test_whatever_the_flags_nothing_is_lost_or_doubled(entries: list[tuple[int, int]]) -> None:
    ready = next((at for at, (_, flags) in enumerate(entries) if flags == BUSY), len(entries))
    records, used, foreign = parse(lay(entries), RECORD)
    assert records["t"].tolist() == [value for value, flags in entries[:ready] if not flags]
    assert (used, foreign) == (24 * ready, 0)


@given(st.binary(max_size=400))
def test_no_bytes_break_the_parser_and_it_gets_on(data: bytes) -> None:
    records, used, foreign = parse(np.frombuffer(data, np.uint8), RECORD)
    assert 0 <= used <= len(data)
    assert len(records) * 24 <= used
    if foreign:
        assert used >= min(8, len(data))


def test_entries_of_another_length_are_skipped_and_counted() -> None:
    foreign = struct.pack("<II40s", 40, 0, b"x" * 40)
    data = np.frombuffer(foreign + lay([(7, 0)]).tobytes(), np.uint8)
    records, used, count = parse(data, RECORD)
    assert (len(records), used, count) == (0, 48, 1)
    assert parse(data[used:], RECORD)[0]["t"].tolist() == [7]


class FakeRing:
    """A file laid out as the kernel maps a ring buffer: two pages of positions, then the data, here only once."""

    def __init__(self, size_b: int) -> None:
        self.size_b = size_b
        self.fd = os.memfd_create("ring")
        os.ftruncate(self.fd, 2 * mmap.PAGESIZE + 2 * size_b)
        self.map = mmap.mmap(self.fd, 2 * mmap.PAGESIZE + 2 * size_b)
        self.produced = 0

    def put(self, value: int) -> None:
        raw = lay([(value, 0)]).tobytes()
        for at, byte in enumerate(raw):
            place = (self.produced + at) % self.size_b
            for copy in (0, self.size_b):
                self.map[2 * mmap.PAGESIZE + copy + place] = byte
        self.produced += len(raw)
        self.map[mmap.PAGESIZE : mmap.PAGESIZE + 8] = struct.pack("<Q", self.produced)

    @property
    def consumed(self) -> int:
        return int(struct.unpack_from("<Q", self.map)[0])


def test_a_ring_is_read_round_and_round_in_bounded_batches() -> None:
    fake = FakeRing(mmap.PAGESIZE)  # 4096 is no multiple of 24: records wrap
    ring = Ring(fake.fd, fake.size_b, RECORD)
    seen: list[int] = []
    for value in range(1000):
        fake.put(value)
        if value % 100 == 99:
            seen += ring.take(60)["t"].tolist()
            assert fake.consumed == 24 * len(seen)
            seen += ring.take()["t"].tolist()
    assert seen == list(range(1000))
    assert ring.peak() == pytest.approx(100 * 24 / 4096)
    assert ring.foreign == 0
    ring.close()
    os.close(fake.fd)


def test_a_look_leaves_the_records_in_the_ring() -> None:
    fake = FakeRing(mmap.PAGESIZE)
    ring = Ring(fake.fd, fake.size_b, RECORD)
    assert len(ring.peek(9)) == 0
    for value in range(7):
        fake.put(value)
    assert ring.peek(4)["t"].tolist() == [0, 1, 2, 3]
    assert fake.consumed == 0
    assert ring.take()["t"].tolist() == list(range(7))
    assert (fake.consumed, len(ring.peek(9))) == (7 * 24, 0)
    ring.close()
    os.close(fake.fd)


# -- folding


def events(*rows: tuple[int, int, int, int]) -> np.ndarray[Any, Any]:
    """Events of (time, duration, kind, thread)."""
    made = np.zeros(len(rows), kernel.EVENT)
    for index, (t, dur, kind, tid) in enumerate(rows):
        made[index]["t"], made[index]["dur"], made[index]["kind"], made[index]["tid"] = t, dur, kind, tid
        made[index]["tgid"], made[index]["comm"] = tid // 100 * 100, b"worker"
    return made


@pytest.mark.parametrize(
    ("kinds", "urgent"),
    [
        ([], False),
        ([kernel.WAIT, kernel.OFF_CPU, kernel.RUN_QUEUE, kernel.FUTEX], False),
        ([kernel.WAIT] * (FEW - 1), False),
        ([kernel.WAIT] * FEW, True),
        *(([kernel.WAIT, kind], True) for kind in (kernel.JIT, kernel.CAPTURE, kernel.INIT, kernel.TLS)),
    ],
)
def test_what_is_read_at_once(kinds: list[int], urgent: bool) -> None:
    assert is_urgent(events(*((1, 5, kind, 101) for kind in kinds))) is urgent


def test_the_longest_of_each_thread_and_kind_stay_single() -> None:
    sieve = Sieve()
    flood = events(*((t, 1000 + t, kernel.WAIT, 101) for t in range(100)), (200, 1, kernel.WAIT, 102))
    kept = sieve.admit(flood)
    assert sorted(kept["t"].tolist()) == [*range(100 - SINGLE, 100), 200]
    (rest,) = sieve.rest()
    assert (rest.kind, rest.pid, rest.tid, rest.thread) == ("wait", 100, 101, "worker")
    assert (rest.count, rest.t) == (100 - SINGLE, 99 - SINGLE)
    assert rest.dur_ns == sum(1000 + t for t in range(100 - SINGLE))
    assert sieve.rest() == []
    assert len(sieve.admit(flood)) == SINGLE + 1  # a new interval


@given(
    st.lists(
        st.lists(
            st.tuples(
                st.integers(0, 10**6), st.integers(0, 10**9), st.sampled_from([1, 2, 3, 6]), st.integers(1, 3)
            ),
            max_size=60,
        ),
        max_size=4,
    )
)
def test_folding_loses_no_event_and_no_nanosecond(batches: list[list[tuple[int, int, int, int]]]) -> None:
    sieve = Sieve()
    kept = [sieve.admit(events(*batch)) for batch in batches]
    rest = sieve.rest()
    single = sum(len(part) for part in kept)
    assert single + sum(row.count for row in rest) == sum(map(len, batches))
    total = sum(int(part["dur"].sum()) for part in kept) + sum(row.dur_ns for row in rest)
    assert total == sum(dur for batch in batches for _, dur, _, _ in batch)
    assert len(rest) == len({(row.tid, row.kind) for row in rest})


def test_beyond_a_bound_the_shortest_are_dropped_and_counted() -> None:
    sieve = Sieve()
    many = events(*((t, t, kernel.WAIT, t) for t in range(MOST + 500)))
    kept = sieve.admit(many)
    assert kept["t"].tolist() == list(range(500, MOST + 500))
    assert sieve.dropped == 500
    assert len(sieve.admit(many[:10])) == 0
    assert sieve.dropped == 510
    sieve.rest()
    assert sieve.dropped == 0


def test_events_of_the_asked_processes() -> None:
    some = events((1, 1, 1, 100), (2, 1, 1, 200), (3, 1, 1, 300))
    assert of_pids(some, {300, 100})["t"].tolist() == [1, 3]
    assert len(of_pids(some, ())) == 3


def test_a_flood_of_a_million_is_folded_within_a_blink() -> None:
    """Bounded work: what comes out does not grow with what comes in."""
    many = np.resize(events(*((t, t, 1 + t % 4, 100 + t % 7) for t in range(2800))), 65_536)
    sieve = Sieve()
    assert len(sieve.admit(many)) == 28 * SINGLE
    assert len(sieve.rest()) == 28


# -- words


def test_codes_of_captures() -> None:
    assert sorted(CAPTURE_CODES) == list(range(900, 909))
    assert words.capture(0, 0) == "ended"
    assert words.capture(0, kernel.NO_BEGIN) == "ended; its begin was not seen"
    assert words.capture(904, 0) == "aborted: a forked stream was not joined"
    assert words.capture(700, 0) == "aborted: CUDA error 700"
    assert words.capture(900, kernel.NOT_BEGUN).startswith("did not begin: not permitted")


@pytest.mark.parametrize(
    ("raw", "known", "code", "reason"),
    [
        (0, True, 0, "compiled"),
        (3 << 8, True, 3, "failed with exit status 3"),
        (9, True, -9, "killed by signal 9"),
        (0x80 | 11, True, -11, "killed by signal 11"),  # it left a core
        (0, False, math.nan, "compiled; exit status not known"),
    ],
)
def test_how_a_program_ended(raw: int, known: bool, code: float, reason: str) -> None:
    status, said = words.exit_status(raw, known)
    assert said == reason
    assert status == code or (math.isnan(status) and math.isnan(code))


def test_sequences_are_folded_and_begin_with_the_oldest() -> None:
    recent = np.zeros(1, kernel.RECENT)[0]
    number = {name: at for at, name in enumerate(CALLS)}
    for at, run in enumerate(
        [(number["cuLaunchKernel"], 3, 7), (number["cuMemAlloc_v2"], 1, 2**64 - 1), (999, 2, 0)]
    ):
        recent["runs"][at] = run
    recent["n"] = 3
    assert words.sequence(recent) == "cuLaunchKernel x3 on 0x7; cuMemAlloc_v2; ? x2 on 0x0"
    recent["n"] = 17  # the first place was taken again
    assert words.sequence(recent).split("; ")[-1] == "cuLaunchKernel x3 on 0x7"
    recent["n"] = 0
    assert words.sequence(recent) == ""


@pytest.mark.parametrize(
    ("state", "number", "call", "reason"),
    [
        (1, 202, "futex", "lock"),
        (1, 232, "epoll_wait", "waiting for events"),
        (1, 7, "poll", "waiting for events"),
        (2, 7, "", "uninterruptible: I/O, page fault or driver"),  # error code of a page fault
        (2, 0, "read", "I/O"),
        (1, 0, "read", "pipe, socket or terminal"),
        (2, 16, "ioctl", "driver call"),
        (1, 45, "recvfrom", "network"),
        (1, 230, "clock_nanosleep", "sleep"),
        (1, -1, "", "sleeping"),
        (4, 202, "futex", "stopped or traced"),
        (1, 999, "", "sleeping"),
    ],
)
def test_why_a_thread_is_blocked(state: int, number: int, call: str, reason: str) -> None:
    assert words.syscall(number, state, "x86_64") == call
    assert words.blocked(state, call) == reason


def test_why_a_thread_waits_for_a_cpu() -> None:
    assert words.queued(0x100, "") == "preempted"
    assert words.queued(0, "") == "preempted"
    assert words.queued(0, "sched_yield") == "yielded"
    assert words.queued(1, "futex") == "woken, no CPU was free"


def event(**fields: Any) -> np.void:
    made = np.zeros(1, kernel.EVENT)[0]
    made["stream"], made["size"], made["syscall"] = WHOLE_CONTEXT, kernel.UNKNOWN, -1
    made["t"], made["dur"], made["tgid"], made["tid"], made["comm"] = 9 * NS, 20 * MS, 10, 11, b"th\xffread"
    for name, value in fields.items():
        made[name] = value
    return made


def test_events_in_words() -> None:
    row = from_event(event(kind=kernel.RUN_QUEUE, state=1, call=1), "", "f (lib)")
    assert (row.kind, row.reason, row.stack) == (
        "run_queue",
        "woken, no CPU was free, inside cuStreamSynchronize",
        "",
    )
    assert math.isnan(row.code)
    assert row.thread == "th\N{REPLACEMENT CHARACTER}read"
    row = from_event(
        event(kind=kernel.CAPTURE, code=901, by_tid=5, by_call=38, by_code=900, by_comm=b"w"), "x", ""
    )
    assert (row.by_tid, row.by_thread, row.by_call, row.by_code, row.before) == (
        5,
        "w",
        "cuEventQuery",
        900,
        "x",
    )
    row = from_event(event(kind=kernel.TLS, code=-1, dur=kernel.UNKNOWN), "", "")
    assert (row.kind, row.reason) == ("tls", "failed: the connection ended without success")
    assert math.isnan(row.dur_ns)
    assert math.isnan(row.size_b)
    assert from_event(event(kind=77), "", "").kind == ""


def test_rows_are_of_the_channel_and_in_order() -> None:
    strings = StringTable()
    interner = Interner(strings)
    stalls = [
        Stall(5, "jit", 10, 12, "ptxas", "ptxas", "compiled", 1.0, code=0.0),
        Stall(3, "tls", 20, 20, "main", stack="a;b"),
        Stall(4, "page_faults", 30, 30, ""),
    ]
    batch = interner.batch(stalls, {10: strings.intern("serve"), 20: 0, 30: strings.intern("old")})
    assert batch is not None
    assert batch.channel is STALL
    assert batch.rows["t"].tolist() == [3, 4, 5]
    assert [strings.text(row["process"]) for row in batch.rows] == ["main", "old", "serve"]
    assert [strings.text(row["thread"]) for row in batch.rows] == ["main", "old", "ptxas"]
    assert [strings.text(row["stack"]) for row in batch.rows] == ["a;b", "", ""]
    assert batch.rows["by_code"].tolist() != batch.rows["by_code"].tolist()  # NaN
    assert interner.batch([], {}) is None


def test_a_session_keeps_a_bounded_number_of_long_texts() -> None:
    strings = StringTable()
    interner = Interner(strings)
    interner.batch([Stall(t, "wait", 1, 1, "x", stack=f"f{t};g") for t in range(MAX_TEXTS)], {})
    assert not interner.full
    batch = interner.batch(
        [Stall(1, "wait", 1, 1, "x", stack="new"), Stall(2, "wait", 1, 1, "x", stack="f7;g")], {}
    )
    assert batch is not None
    assert interner.full
    assert [strings.text(row["stack"]) for row in batch.rows] == ["", "f7;g"]
    said = statements(Sight(Scan(), Scan(), None, Ration(1.0), 0.0, 0, True, NS))
    assert said["stall", "stack", ""][0] == "unavailable"


def test_a_wait_that_does_not_end_is_told_in_steps() -> None:
    key = ("stall", "dur_ns", "pid 7 thread 8")
    for age_s, said in ((10, 10), (29, 10), (30, 30), (5000, 3600)):
        wait = kernel.OpenWait(7, 8, CALLS.index("cuStreamSynchronize"), age_s * NS)
        sight = Sight(Scan(), Scan(), None, Ration(1.0), 0.0, 0, False, NS, [wait])
        state, reason, _ = statements(sight)[key]
        assert state == "stale"
        assert reason.startswith(f"cuStreamSynchronize has not returned for over {said} s")


# -- cost


def test_frequent_hits_cost_less() -> None:
    clock = ManualClock(0)
    meter = StallMeter("stalls", clock, NS)
    meter.hit_ns = 1_234
    meter.add(kernel.Counts(launch=10, poll=1, always=4, filtered=1000, other=5, lost_ring=2, lost_map=1))
    clock.advance(5 * NS)
    batch = meter.due(StringTable())
    assert batch is not None
    row = batch.rows[0]
    assert (row["calls"], row["call_ns"], row["dropped"]) == (1020, 20 * 1_234 + 1000 * FILTER_NS, 3)
    clock.advance(5 * NS)
    batch = meter.due(StringTable())
    assert batch is not None
    assert batch.rows["call_ns"].tolist() == [0]
