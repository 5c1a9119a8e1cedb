"""Launch calls are timed from entry to return: a libcuda whose launches take as long as they are told to.

Run with `OPUSMON_BPF=bcc` it does all of this by bcc, as the other tests of the collector.
"""

from __future__ import annotations

import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_stub import Load
from needs import lacking, needs

from opusmon.clock import SystemClock
from opusmon.collectors.ebpf import probes
from opusmon.collectors.ebpf.attach import Libraries
from opusmon.collectors.ebpf.libcuda import Scanner
from opusmon.collectors.ebpf.names import Names
from opusmon.collectors.ebpf.source_text import whole
from opusmon.collectors.ebpf.stream_rows import Coverage, bin_edges_ns
from opusmon.collectors.ebpf.stream_table import StreamTable, cflags
from opusmon.collectors.ebpf.stream_timing import TimedLaunches
from opusmon.collectors.ebpf.symbols import ENTRIES
from opusmon.collectors.streams import StreamsCollector
from opusmon.schema import Batch, Rows, StringTable

needs("root", "gcc")
if why := StreamsCollector.probe():
    lacking("root", f"probes cannot be set here: {why.reason}")

MS, US = 1_000_000, 1_000
OWN_NS = 30 * US
"""A call that took so much longer than asked is slow: the caller sees how many there can be."""

LIBRARY = """
#include <stdint.h>
#include <time.h>
static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}
int64_t stub_wait_ns;
void stub_set_code(int code) {}
/* A call takes stub_wait_ns, or as many ns as the handle of its stream says, less its last digit. */
static int take(uint64_t stream)
{
    uint64_t ns = stub_wait_ns ? stub_wait_ns : stream / 10 * 10;
    for (uint64_t end = now() + ns; now() < end;)
        ;
    return 0;
}
struct config { unsigned grid[3], block[3], shared; uint64_t stream; };
#define STACK(name) int name(void *f, int a, int b, int c, int d, int e, int g, int h, uint64_t s) { return take(s); }
#define CONFIG(name) int name(const struct config *c) { return take(c->stream); }
#define GRAPH(name) int name(void *g, uint64_t s) { return take(s); }
STACK(cuLaunchKernel)
STACK(cuLaunchKernel_ptsz)
STACK(cuLaunchCooperativeKernel)
CONFIG(cuLaunchKernelEx)
CONFIG(cuLaunchKernelEx_ptsz)
GRAPH(cuGraphLaunch)
GRAPH(cuGraphLaunch_ptsz)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file to be mapped."""
    folder = tmp_path_factory.mktemp("timed")
    (folder / "source.c").write_text(LIBRARY)
    flags = ["-O0", "-shared", "-fPIC", "-fno-omit-frame-pointer", "-fcf-protection=none"]
    place = folder / "libcuda.so.1"
    subprocess.run(["gcc", *flags, str(folder / "source.c"), "-o", str(place)], check=True)
    return place


class Timing:
    """The probes of launch calls on one library, read as the collector does."""

    def __init__(self, load: Load) -> None:
        self.backend = probes.load("streams", cflags())
        scanner = Scanner(only_pids=frozenset({load.pid}))
        found = scanner.scan(0)
        self.libraries = TimedLaunches(self.backend, scanner.open)
        self.libraries.follow(found)
        self.others = Libraries(self.backend, ENTRIES, scanner.open)
        self.others.on.add("launch")
        self.others.follow(found)
        self.table = StreamTable(self.backend, Names(StringTable()), frozenset())

    def read(self) -> Rows:
        """Rows of all streams since the reading before, as if launches had been counted throughout."""
        batch = self.table.read(SystemClock().now(), 1, Coverage(1, polls=True))
        assert batch is not None
        return batch.rows

    def close(self) -> None:
        self.backend.close()
        self.libraries.close()
        self.others.close()


@pytest.fixture(scope="module")
def load(library: Path) -> Iterator[Load]:
    with Load(library) as it:
        yield it


@pytest.fixture(scope="module")
def probed(load: Load) -> Iterator[Timing]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "not a bytes object", DeprecationWarning)  # bcc, of its own caller
        it = Timing(load)
    yield it
    it.close()


@pytest.fixture
def timing(load: Load, probed: Timing) -> Timing:
    """The probes, between bursts, after all that other tests did."""
    probed.table.time_calls(False)
    load.do("graph 1 7")
    probed.read()
    return probed


def of(rows: Rows, stream: int) -> np.void:
    (row,) = rows[rows["stream"] == stream]
    return row


def test_each_kind_of_launch_is_timed_on_its_stream(load: Load, timing: Timing) -> None:
    timing.table.time_calls(True)
    kinds = ("kernel", "kernel_ptsz", "coop", "ex", "ex_ptsz", "graph", "graph_ptsz")
    took = {}
    for digit, kind in enumerate(kinds, 1):
        took[kind] = load.do(f"{kind} 53 {100 * US + digit}")
    rows = timing.read()
    for digit, kind in enumerate(kinds, 1):
        row = of(rows, 100 * US + digit)
        assert row["timed_launches"] == row["launches"] + row["graph_launches"] == 53
        assert 100 * US <= row["launch_call_ns"] <= took[kind] / 53  # the caller's view bounds it from above
        assert row["launch_call_ns"] <= row["launch_call_max_ns"] <= took[kind] - 52 * 100 * US
    assert of(rows, 100 * US + 1)["launches"] == 53  # both programs ran at the same place


def test_mean_and_longest_are_of_the_interval(load: Load, timing: Timing) -> None:
    timing.table.time_calls(True)
    load.do(f"graph 3 {20 * MS}")
    assert of(timing.read(), 20 * MS)["launch_call_max_ns"] >= 20 * MS
    took = load.do(f"graph 1 {20 * MS}")
    row = of(timing.read(), 20 * MS)
    assert row["timed_launches"] == 1
    assert 20 * MS <= row["launch_call_ns"] == row["launch_call_max_ns"] <= took
    for took_ms in (30, 3, 2):  # the kernel keeps two places for the longest, for two intervals in turn
        took = load.do(f"call cuGraphLaunch 1 {20 * MS} 0 0 {took_ms * MS}")
        row = of(timing.read(), 20 * MS)
        assert row["launch_call_max_ns"] <= took
    row = of(timing.read(), 20 * MS)
    assert row["timed_launches"] == 0
    assert np.isnan(row["launch_call_ns"])
    assert np.isnan(row["launch_call_max_ns"])


def test_calls_that_a_burst_did_not_see_whole_are_not_timed(load: Load, timing: Timing) -> None:
    table, long = timing.table, 300 * MS
    load.do(f"graph 2 {10 * US}")  # before any burst
    assert of(timing.read(), 10 * US)["timed_launches"] == 0
    began = time.monotonic()
    send(load, f"graph 1 {long}")
    while time.monotonic() - began < 0.1:  # the call is under way now
        pass
    table.time_calls(True)
    answer(load)
    load.do(f"graph 3 {10 * US}")
    rows = timing.read()
    assert of(rows, long)["timed_launches"] == 0  # its entry was not seen
    assert of(rows, 10 * US)["timed_launches"] == 3
    began = time.monotonic()
    send(load, f"graph 1 {long}")
    while time.monotonic() - began < 0.1:
        pass
    table.time_calls(False)
    table.time_calls(True)
    answer(load)
    assert of(timing.read(), long)["timed_launches"] == 0  # its entry was of the burst before
    table.time_calls(False)
    load.do(f"graph 2 {10 * US}")
    assert of(timing.read(), 10 * US)["timed_launches"] == 0


def send(load: Load, command: str) -> None:
    """Begin a command; `answer` waits for its end."""
    pipe = load._process.stdin
    assert pipe is not None
    pipe.write(f"{command}\n")
    pipe.flush()


def answer(load: Load) -> int:
    return int(load._line())


def test_times_are_sorted_into_bins_when_asked(load: Load, timing: Timing) -> None:
    timing.table.time_calls(True)
    load.do(f"graph 5 {50 * US}")
    assert not counts_of(timing).sum()
    timing.table.time_calls(True, binned=True)
    extra = load.do(f"graph 101 {50 * US}") - 101 * 50 * US  # of probes and of a busy machine, over all calls
    load.do(f"ex 7 {5 * MS}")
    keys, counts = timing.table.call_bins()
    assert set(keys["pid"].tolist()) == {load.pid}
    edges = bin_edges_ns()
    starts, ends = edges[keys["bin"]], edges[keys["bin"] + 1]
    assert counts.sum() == 108
    assert counts[ends > 5 * MS].sum() >= 7
    assert counts[ends <= 50 * US].sum() == 0
    assert counts[starts >= 50 * US + OWN_NS].sum() <= 7 + extra / OWN_NS
    other = StreamTable(timing.backend, Names(StringTable()), frozenset({load.pid + 1}))
    assert not len(other.call_bins()[0])


def test_threads_that_share_a_stream_are_timed_each(load: Load, timing: Timing) -> None:
    timing.table.time_calls(True, binned=True)
    before = counts_of(timing).sum()
    load.do(f"threads 113 {10 * US} 7")
    row = of(timing.read(), 10 * US)
    assert row["timed_launches"] == 7 * 113
    assert counts_of(timing).sum() - before == 7 * 113


def counts_of(timing: Timing) -> np.ndarray:
    return timing.table.call_bins()[1]


def test_the_kernel_and_we_agree_on_the_bins(library: Path) -> None:
    """Durations on both sides of edges cannot be planted to the ns; so the C code is run on its own."""
    source = whole("streams")
    begin, end = (
        source.index("#define FIRST_OCTAVE"),
        source.index("static __always_inline int begin_timing("),
    )
    functions = source[
        source.index("static __always_inline u32 octave_of") : source.index(
            "static __always_inline void count_in_bin"
        )
    ]
    program = f"""
    #include <stdio.h>
    typedef unsigned long long u64; typedef unsigned u32;
    {source[begin:end]}
    {functions}
    int main(void) {{ u64 ns; while (scanf("%llu", &ns) == 1) printf("%u\\n", call_bin_of(ns)); }}
    """
    place = library.with_name("bins")
    subprocess.run(["gcc", "-x", "c", "-", "-o", str(place)], input=program, text=True, check=True)
    edges = bin_edges_ns()
    starts = edges[1:-1].astype(np.int64)
    values = [*starts.tolist(), *(starts - 1).tolist(), 0, 2**40, 2**63]
    said = subprocess.run(
        [str(place)], input="\n".join(map(str, values)), text=True, capture_output=True, check=True
    )
    bins = np.array(said.stdout.split(), np.int64)
    expected = np.searchsorted(edges, np.array(values, np.float64), "right") - 1
    assert bins.tolist() == expected.tolist()


class Own:
    """The collector in this process, over the library of one process only."""

    def __init__(self, pid: int) -> None:
        self.strings = StringTable()
        self.batches: list[Batch] = []
        self._source = StreamsCollector(self.strings, SystemClock(), 250 * MS, frozenset({pid})).batches()

    async def until(self, ready: Callable[[], Any], limit_s: float = 60.0) -> Any:
        """Read on until `ready()` is true; returns what it said."""
        deadline = time.monotonic() + limit_s
        while not (said := ready()):
            assert time.monotonic() < deadline, f"not seen in {limit_s} s; it said: {self.reasons()}"
            self.batches.append(await anext(self._source))
        return said

    def timed(self, stream: int) -> np.void | None:
        """A row of a stream whose launches were timed."""
        return next((row for row in self.rows(stream) if row["timed_launches"] > 0), None)

    def untimed(self, stream: int) -> np.void | None:
        """A row of a stream whose launches were not."""
        rows = [row for row in self.rows(stream) if row["graph_launches"] > 0]
        return next((row for row in rows if row["timed_launches"] == 0), None)

    def rows(self, stream: int) -> list[np.void]:
        found = [row for batch in self.batches if batch.channel.name == "stream" for row in batch.rows]
        return [row for row in found if row["stream"] == stream]

    def reasons(self) -> list[tuple[str, str, str]]:
        """Field, state and reason of the status rows so far."""
        rows = [row for batch in self.batches if batch.channel.name == "status" for row in batch.rows]
        text = self.strings.text
        return [(text(row["field"]), text(row["state"]), text(row["reason"])) for row in rows]

    async def close(self) -> None:
        await self._source.aclose()  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:not a bytes object:DeprecationWarning")  # bcc, of its own caller
async def test_the_collector_times_launch_calls_and_says_when_only_in_bursts(load: Load) -> None:
    it = Own(load.pid)
    try:
        await it.until(lambda: any("probes are on 1 libcuda file" in words for *_, words in it.reasons()))
        row = await it.until(lambda: load.do(f"graph 7 {2 * MS}") and it.timed(2 * MS))
        assert row["timed_launches"] % 7 == 0
        assert 2 * MS <= row["launch_call_ns"] <= row["launch_call_max_ns"]
        assert not [words for field, _, words in it.reasons() if field == "launch_call_ns"]
        load.do("graph 8000 10")  # 16,000 hits of 1.5 us: 24 ms, for 2.4 s at 1 %
        burst = "launch calls are timed for 0.25 s of every"
        await it.until(lambda: any(words.startswith(burst) for *_, words in it.reasons()))
        row = await it.until(lambda: load.do(f"graph 11 {20 * US}") and it.untimed(20 * US))
        assert row["graph_launches"] % 11 == 0
        assert np.isnan([row["launch_call_ns"], row["launch_call_max_ns"]]).all()
        await it.until(lambda: ("launch_call_ns", "ok", "") in it.reasons(), 30)
        await it.until(lambda: load.do(f"graph 1 {30 * US}") and it.timed(30 * US))
    finally:
        await it.close()
