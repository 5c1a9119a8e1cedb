"""What the streams collector costs: ns per hit on the watched thread, CPU and memory of the worker.

Run as root, with nothing else on the machine: `python tests/bench/bench_streams.py`. The load is the stub libcuda,
whose functions begin as the driver's do. Loops with and without probes take turns; medians over the rounds.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cuda_stub import Load
from cuda_stub.watch import Watch

from opusmon.clock import SystemClock
from opusmon.collectors.ebpf import probes
from opusmon.collectors.ebpf.attach import Libraries
from opusmon.collectors.ebpf.libcuda import Scanner
from opusmon.collectors.ebpf.names import Names
from opusmon.collectors.ebpf.stream_rows import Coverage
from opusmon.collectors.ebpf.stream_table import StreamTable, cflags
from opusmon.collectors.ebpf.stream_timing import TimedLaunches
from opusmon.collectors.ebpf.symbols import ENTRIES
from opusmon.collectors.streams import StreamsCollector
from opusmon.schema import StringTable

N, ROUNDS = 200_000, 5
CALLS = {
    "kernel launch (stack)": f"kernel {N} 17",
    "kernel launch (config)": f"ex {N} 17",
    "graph launch": f"graph {N} 17",
    "asynchronous copy": f"h2d {N} 100 17",
    "wait, entry and return": f"wait {N} 17 0",
    "poll, entry and return": f"poll {N} 17 0",
}


def timed(action: Callable[[], object]) -> float:
    """Seconds an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def per_hit() -> None:
    """Print ns per call with and without probes."""
    backend = probes.load("streams", cflags())
    scanner = Scanner()
    with Load() as load:
        ns: dict[tuple[str, bool], list[float]] = {}
        attach, detach = [], []
        for _ in range(ROUNDS):
            libraries = Libraries(backend, ENTRIES, scanner.open)
            libraries.on |= {"launch", "poll"}
            for name, command in CALLS.items():
                ns.setdefault((name, False), []).append(load.do(command) / N)
            found = scanner.scan(time.monotonic_ns())
            attach.append(timed(lambda it=libraries, scan=found: it.follow(scan)))
            for name, command in CALLS.items():
                ns.setdefault((name, True), []).append(load.do(command) / N)
            detach.append(
                timed(
                    lambda it=libraries: [it.switch(group, False) for group in ("launch", "poll", "always")]
                )
            )
            libraries.close()
    for name in CALLS:
        off, on = (statistics.median(ns[name, probed]) for probed in (False, True))
        print(f"{name:<26}{off:8.0f} ns without {on:8.0f} ns with {on - off:8.0f} ns per call")
    print(
        f"attach {statistics.median(attach) * 1e3:.0f} ms, detach {statistics.median(detach) * 1e3:.0f} ms, per library"
    )
    backend.close()


def per_timed_call() -> None:
    """Print what timing a launch call costs, alone and beside counting, and how much of it is in the time measured."""
    backend = probes.load("streams", cflags())
    scanner, clock = Scanner(), SystemClock()
    with Load() as load:
        found = scanner.scan(clock.now())
        table = StreamTable(backend, Names(StringTable()), frozenset({load.pid}))
        timed, counted = TimedLaunches(backend, scanner.open), Libraries(backend, ENTRIES, scanner.open)
        counted.on = set()
        timed.follow(found)
        table.time_calls(True)
        for name in ("timed", "timed and counted"):
            cost, own = [], []
            for _ in range(ROUNDS):
                cost.append(load.do(f"kernel {N} 17") / N)
                batch = table.read(clock.now(), 1, Coverage(1, polls=True))
                own += batch.rows["launch_call_ns"].tolist() if batch is not None else []
            words = f"{statistics.median(cost):.0f} ns per call, {statistics.median(own):.0f} ns of them in its time"
            print(f"kernel launch, {name:18} {words}")
            counted.on = {"launch"}
            counted.follow(found)
    backend.close()


async def at_work(seconds: float, streams: int) -> None:
    """Print CPU share and memory of a collector over a load on many streams, from its own `cost` rows."""
    strings = StringTable()
    with Load() as load:
        stop = threading.Event()

        def keep_busy() -> None:
            while not stop.is_set():
                for stream in range(streams):
                    load.do(f"graph 3 {stream + 16}")
                time.sleep(0.2)

        thread = threading.Thread(target=keep_busy)
        thread.start()
        began = time.monotonic()
        async for batch in StreamsCollector(strings, SystemClock()).batches():
            if batch.channel.name == "cost" and time.monotonic() - began > seconds / 2:
                row = batch.rows[-1]
                share = row["cpu_ns"] / row["dt_ns"] * 100
                print(
                    f"{streams} streams: {share:.2f} % of a core, {row['rss_b'] / 1e6:.0f} MB, {row['calls']:.0f} hits"
                )
            if time.monotonic() - began > seconds:
                break
        stop.set()
        thread.join()


def within_budget(launches: int = 2_800_000) -> None:
    """Print what a loop with 10 us of work per launch loses to the collector at its default settings, in about 28 s."""
    command = f"paced {launches} 17 10000"
    with Load() as load:
        before = load.do(f"paced {launches // 4} 17 10000") * 4
        watch = Watch("1s")
        watch.until(lambda: watch.files == 1)
        took: list[int] = []
        thread = threading.Thread(target=lambda: took.append(load.do(command)))
        thread.start()
        watch.until(lambda: not thread.is_alive(), 120)
        print(f"launch-bound loop: {(took[0] / before - 1) * 100:+.2f} % time; {watch.reasons()[-1][2]}")
        watch.close()


if __name__ == "__main__":
    per_hit()
    per_timed_call()
    within_budget()
    asyncio.run(at_work(16, 16))
