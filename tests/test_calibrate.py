"""What `opusmon calibrate` concludes from times of launch calls, and that it measures them."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from cuda_stub import Load
from hypothesis import given
from hypothesis import strategies as st
from needs import lacking, needs

from opusmon import calibrate
from opusmon.calibrate import (
    Calibration,
    CalibrationError,
    ProcessCalls,
    document,
    order_ranks,
    propose,
    render,
    toml_line,
)
from opusmon.clock import NS, SystemClock
from opusmon.collectors import streams
from opusmon.collectors.base import Unavailable
from opusmon.collectors.ebpf import probes
from opusmon.collectors.ebpf.stream_rows import bin_edges_ns
from opusmon.collectors.ebpf.stream_timing import LaunchTimes
from opusmon.quantiles import Buckets, buckets, merge

US, MS = 1_000.0, 1_000_000


def binned(*groups: tuple[int, float]) -> Buckets:
    """Calls as the kernel sorts them: so many of so many ns each."""
    edges = bin_edges_ns()
    at = np.array([int(np.searchsorted(edges, ns, "right")) - 1 for _, ns in groups], np.int64)
    return buckets(edges[at], edges[at + 1], np.array([count for count, _ in groups]))


@pytest.mark.parametrize(
    ("count", "quantile"),
    [(9_999, None), (10_000, 0.99), (99_999, 0.99), (100_000, 0.999), (999_999, 0.999), (1_000_000, 0.9999)],
)
def test_the_highest_quantile_that_a_hundred_calls_lie_beyond(count: int, quantile: float | None) -> None:
    found = propose(binned((count, 4 * US)))
    assert found.samples == count
    if quantile is None:
        assert math.isnan(found.threshold_ns)
        assert math.isnan(found.quantile)
        assert found.reason == "too few launch calls: 9,999 were timed, p99 takes 10,000"
        assert toml_line(found) == ""
    else:
        assert (found.quantile, found.reason) == (quantile, "")


def test_the_threshold_is_the_upper_edge_of_the_bin_of_the_quantile() -> None:
    # Of 100,000 calls, 500 take 14 us: p99.9, the 99,900th, is among them. 14,000 lies in [13824, 14336) = 2^13 x 27/16.
    found = propose(binned((99_500, 4.1 * US), (450, 14 * US), (50, 3 * MS)))
    assert (found.quantile, found.threshold_ns, found.beyond) == (0.999, 14_336, 50)
    assert toml_line(found) == "launch_call_us = 14.4"
    # 1.96 sqrt(100,000 x 0.999 x 0.001) = 19.6: ranks 99,880 and 99,921 are of the same bin
    assert order_ranks(100_000, 0.999) == (99_880, 99_921)
    assert (found.low_ns, found.high_ns) == (13_824, 14_336)
    # ... and with 90 calls beyond 14 us, the 99,921st is of those of 3 ms, in [2883584, 3014656) = 2^21 x 22/16
    found = propose(binned((99_500, 4.1 * US), (410, 14 * US), (90, 3 * MS)))
    assert (found.threshold_ns, found.low_ns, found.high_ns) == (14_336, 13_824, 3_014_656)


def test_calls_beyond_all_bins_are_no_threshold() -> None:
    found = propose(binned((20_000, 2.0**37)))
    assert math.isnan(found.threshold_ns)
    assert "longer than can be told apart" in found.reason


@given(st.integers(10_000, 10_000_000), st.sampled_from(calibrate.CANDIDATES))
def test_the_interval_covers_the_quantile_as_it_says(n: int, q: float) -> None:
    """P(X_(low) <= true quantile < X_(high)) is the sum of binomial probabilities of low to high - 1."""
    low, high = order_ranks(n, q)
    if n * (1 - q) < 100:
        return
    k = np.arange(low, high)
    log_choose = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in k])
    covered = np.exp(log_choose + k * math.log(q) + (n - k) * math.log1p(-q)).sum()
    assert 0.945 < covered < 0.97


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1, 1e10)), min_size=1, max_size=20))
def test_no_more_calls_than_the_quantile_leaves_lie_beyond_the_threshold(
    groups: list[tuple[int, float]],
) -> None:
    calls = binned(*groups)
    found = propose(calls)
    assert found.samples == sum(count for count, _ in groups)
    if not found.reason:
        assert found.beyond <= found.samples * (1 - found.quantile) + 1e-6
        assert found.low_ns < found.threshold_ns <= found.high_ns
        taken = float(toml_line(found).removeprefix("launch_call_us = ")) * US
        assert found.threshold_ns <= taken * (1 + 1e-9)
        assert taken - found.threshold_ns <= 100


def calibrated(*calls: Buckets) -> Calibration:
    processes = [ProcessCalls(4242 + at, "vllm\x1b[31m", one) for at, one in enumerate(calls)]
    return Calibration(30.0, 10.0, 3, processes, propose(merge(calls)))


def test_text_and_json() -> None:
    it = calibrated(binned((99_500, 4.1 * US), (450, 14 * US), (50, 3 * MS)), binned((50, 4.1 * US)))
    text = render(it)
    assert text.splitlines() == [
        "100,050 launch calls of 2 processes, timed for 10 s of 30 s",
        "  4242 vllm?[31m  100,000 calls  p50 <= 4.35 us  p99 <= 4.35 us  p99.9 <= 14.3 us  p99.99 <= 3.01 ms",
        "  4243 vllm?[31m  50 calls  p50 <= 4.35 us",
        "  all  100,050 calls  p50 <= 4.35 us  p99 <= 4.35 us  p99.9 <= 14.3 us  p99.99 <= 3.01 ms",
        "3 more could not be kept",
        "Proposed: p99.9 of these calls, 50 of them are beyond it; 95 % interval 13.8 us to 14.3 us, if calls are independent.",
        "    launch_call_us = 14.4",
        "Times run from entry to return and include some 0.8 us that the probes take themselves.",
    ]
    said = json.loads(json.dumps(document(it), allow_nan=False))
    assert said["proposal"]["threshold_ns"] == 14_336
    assert said["proposal"]["toml"] == "launch_call_us = 14.4"
    assert sum(row["count"] for row in said["processes"][0]["bins"]) == 100_000


def test_too_few_calls_propose_nothing() -> None:
    it = calibrated(binned((123, 4.1 * US)))
    assert "No threshold is proposed: too few launch calls: 123 were timed, p99 takes 10,000." in render(it)
    said = json.loads(json.dumps(document(it), allow_nan=False))
    assert said["proposal"]["threshold_ns"] is None
    assert said["proposal"]["toml"] == ""
    assert "0 launch calls of 0 processes" in render(calibrated())


async def test_where_no_probe_can_be_set_the_reason_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "probe", lambda: Unavailable("privileges: not root", "sudo opusmon"))
    with pytest.raises(CalibrationError, match=r"^privileges: not root \(sudo opusmon\)$"):
        await calibrate.measure(1.0)


# -- on a library


LIBRARY = """
#include <stdint.h>
#include <time.h>
static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}
int cuGraphLaunch(void *g, uint64_t stream) /* takes as many ns as the handle of its stream says */
{
    for (uint64_t end = now() + stream; now() < end;)
        ;
    return 0;
}
"""


@pytest.fixture
def load(tmp_path: Path):
    needs("root", "gcc")
    if why := streams.probe():
        lacking("root", f"probes cannot be set here: {why.reason}")
    place = tmp_path / "libcuda.so.1"
    flags = ["-O0", "-shared", "-fPIC", "-fno-omit-frame-pointer", "-fcf-protection=none"]
    subprocess.run(["gcc", *flags, "-x", "c", "-", "-o", str(place)], input=LIBRARY, text=True, check=True)
    with Load(place) as it:
        yield it


@pytest.mark.filterwarnings("ignore:not a bytes object:DeprecationWarning")
def test_every_call_is_in_its_bin(load: Load) -> None:
    times = LaunchTimes(SystemClock(), frozenset({load.pid}), 100.0)
    try:
        times.begin(probes.load)
        load.do("graph 10007 5000")
        load.do("graph 211 700000")
        times.turn()
        (calls,) = times.bins().values()
        assert (calls.n, times.lost, times.name(load.pid)) == (10_007 + 211, 0, "cuda_load")
        assert calls.count[calls.hi > 700_000].sum() >= 211
        assert calls.count[calls.hi <= 5_000].sum() == 0
        assert calls.count[calls.hi <= 100_000].sum() > 9_900  # a busy machine may take some from their CPU
        found = propose(calls)
        assert (found.quantile, found.samples) == (0.99, 10_218)
        assert found.threshold_ns > 700_000
    finally:
        times.close()


@pytest.mark.filterwarnings("ignore:not a bytes object:DeprecationWarning")
def test_over_the_budget_calls_are_timed_in_bursts(load: Load) -> None:
    clock = FakeClock()
    times = LaunchTimes(clock, frozenset({load.pid}), 1.0)
    try:
        times.begin(probes.load)
        load.do("graph 7001 10")  # 14,002 hits of 1.5 us: 2.1 % of a second, so one of three
        timed, seconds = [], []
        for _ in range(4):
            clock.t += NS
            times.turn()
            timed.append(sum(calls.n for calls in times.bins().values()))
            seconds.append(times.timed_ns / NS)
            load.do("graph 101 10")
        assert timed == [7001, 7001, 7001, 7001 + 101]
        assert seconds == [1, 1, 1, 2]
    finally:
        times.close()


class FakeClock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.t = 10**15

    def now(self) -> int:
        return self.t


@pytest.mark.filterwarnings("ignore:not a bytes object:DeprecationWarning")  # bcc, of its own caller
async def test_measure(load: Load) -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            load.do("graph 211 5000")

    worker = threading.Thread(target=work)
    worker.start()
    try:
        it = await calibrate.measure(0.5, frozenset({load.pid}), budget_pct=100.0)
    finally:
        stop.set()
        await asyncio.to_thread(worker.join)
    assert [(one.pid, one.name) for one in it.processes] == [(load.pid, "cuda_load")]
    assert it.proposal.samples >= 211
    assert it.calls.count[it.calls.hi <= 5_000].sum() == 0
    assert 0.5 <= it.timed_s <= it.seconds + 0.1  # set before the clock of the whole is read, removed after


async def test_a_process_without_cuda_is_said(load: Load) -> None:
    del load
    with pytest.raises(CalibrationError, match=r"none of the processes 1 maps libcuda \(Start the server"):
        await calibrate.measure(1.0, frozenset({1}))
