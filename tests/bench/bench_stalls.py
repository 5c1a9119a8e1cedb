"""What the stalls collector costs, and whether a flood of events freezes it.

Run as root, with nothing else on the machine: `python tests/bench/bench_stalls.py`. Four parts:
a generator that fills the ring in the kernel while an event loop drains it as the collector does; ns per call of the
stub libcuda; what the tracepoints cost threads that have nothing to do with CUDA; CPU and memory of the collector at
work. Medians; loops with and without probes take turns.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cuda_stub import Load, built

from opusmon.clock import SystemClock
from opusmon.collectors.ebpf import elf, maps, probes
from opusmon.collectors.ebpf.bcc_text import for_bcc
from opusmon.collectors.ebpf.libcuda import Scan, Scanner
from opusmon.collectors.ebpf.ring import Ring
from opusmon.collectors.ebpf.stall_maps import EVENT, RING_B, RING_PAGES, StallMaps, cflags
from opusmon.collectors.ebpf.stall_probes import StallProbes
from opusmon.collectors.ebpf.stall_rows import Interner, Sieve, from_event
from opusmon.collectors.stalls import LOOK_S, PRESSED_S, StallsCollector
from opusmon.schema import StringTable

NS, MS = 1_000_000_000, 1_000_000
ROUNDS, N = 5, 100_000
SECONDS = 5.0

GENERATOR = """
#include "portable.bpf.h"
struct event_t { u64 t, dur, stream, size; u32 kind, call, tgid, tid, rest[8]; char comm[16], by_comm[16]; };
RING_MAP(ring, PAGES);
PERCPU_ARRAY_MAP(counts, u64, 2);

static __always_inline void count(int slot)
{
    u64 *n = MAP_LOOKUP(counts, &slot);
    if (n)
        __sync_fetch_and_add(n, 1);
}

UPROBE int flood(struct pt_regs *ctx)
{
    u64 now = bpf_ktime_get_ns();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        struct event_t *e = RING_RESERVE(ring, struct event_t);
        if (!e) {
            count(1);
            continue;
        }
        __builtin_memset(e, 0, sizeof(*e));
        e->t = now;
        e->dur = now & 0xffffff;
        e->kind = 1 + (i & 3);
        e->tid = 100 + i;
        count(0);
        RING_SUBMIT(ring, e, BPF_RB_NO_WAKEUP);
    }
    return 0;
}
"""


def own_library() -> Path:
    """A copy of the stub that nobody else has probes on."""
    return Path(shutil.copy(built() / "libcuda.so.1", Path(tempfile.mkdtemp()) / "libcuda.so.1"))


def median(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)


# -- the flood


async def lag(seconds: float) -> list[float]:
    """How late a 5 ms timer fires, in seconds, while everything else runs."""
    late = []
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while (begun := loop.time()) < end:
        await asyncio.sleep(0.005)
        late.append(loop.time() - begun - 0.005)
    return late


async def drained(ring: Ring, done: asyncio.Event) -> tuple[int, int]:
    """Take, fold and make rows as the collector does; returns events taken and rows made."""
    sieve, interner, taken, made = Sieve(), Interner(StringTable()), 0, 0
    ticked = time.monotonic()
    while not done.is_set():
        await asyncio.sleep(PRESSED_S if ring.pressed else LOOK_S)
        events = ring.take()
        taken += len(events)
        stalls = [from_event(event, "", "") for event in sieve.admit(events)]
        if time.monotonic() - ticked > 1:
            ticked = time.monotonic()
            stalls += sieve.rest()
        batch = interner.batch(stalls, {})
        made += len(batch.rows) if batch is not None else 0
    return taken, made


def generate(load: Load, stop: threading.Event) -> None:
    """Hits that each make several events, at full speed."""
    while not stop.is_set():
        load.do("kernel 20000 7")


async def flood_for(seconds: float, load: Load, backend: probes.Backend) -> None:
    """Flood the ring, and print what became of it."""
    ring = Ring(backend.map_fd("ring"), RING_B, EVENT)
    stop, done = threading.Event(), asyncio.Event()
    producer = threading.Thread(target=generate, args=(load, stop))
    reader = asyncio.create_task(drained(ring, done))
    before = [maps.read_percpu(backend.map_fd("counts"), slot) for slot in (0, 1)]
    cpu, begun = time.process_time(), time.monotonic()
    producer.start()
    late = await lag(seconds)
    wall = time.monotonic() - begun
    cpu = time.process_time() - cpu
    made, lost = (maps.read_percpu(backend.map_fd("counts"), slot) - before[slot] for slot in (0, 1))
    stop.set()
    done.set()
    taken, rows = await reader
    await asyncio.to_thread(producer.join)
    print(
        f"flood: {(made + lost) / wall / 1e3:8.0f} k events/s made, {100 * lost / (made + lost):.2f} % lost (ring full at "
        f"{ring.peak() * 100:.0f} % peak), {taken / wall / 1e3:.0f} k/s read, {rows} rows; "
        f"loop lag {median(late) * 1e3:.2f} ms median, {max(late) * 1e3:.1f} ms worst; {100 * cpu / wall:.0f} % of a core"
    )
    ring.close()


def flood() -> None:
    """About one and two million events a second into a ring of the collector's size."""
    for each in (2, 8):
        flood_of(each)


def flood_of(each: int) -> None:
    """So many events for each hit of a probe."""
    backend = probes.BccBackend(for_bcc(GENERATOR), [f"-DPAGES={RING_PAGES}", f"-DEACH={each}"])
    with Load(own_library()) as load:
        path = next(iter(Scanner().scan(0).processes[load.pid])).path
        with Path(path).open("rb") as file:
            place = elf.functions(file, ["cuLaunchKernel"])["cuLaunchKernel"].address
        backend.attach(path, place, "flood")
        asyncio.run(flood_for(SECONDS, load, backend))
    backend.close()


# -- ns per call

CALLS = {
    "launch, entry and return": f"kernel {N} 17",
    "graph launch, entry": f"graph {N} 17",
    "asynchronous copy, entry": f"h2d {N} 100 17",
    "short wait, entry and return": f"wait {N} 17 0",
    "poll, return": f"poll {N} 17 0",
}


def ping_pong(count: int) -> float:
    """ns per switch between two processes that have nothing to do with CUDA."""
    there, back = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        for _ in range(count):
            os.read(there[0], 1)
            os.write(back[1], b"x")
        os._exit(0)
    begun = time.perf_counter_ns()
    for _ in range(count):
        os.write(there[1], b"x")
        os.read(back[0], 1)
    took = time.perf_counter_ns() - begun
    os.waitpid(child, 0)
    for end in (*there, *back):
        os.close(end)
    return took / count / 2


def faults(pages: int) -> float:
    """ns per page fault of a process that has nothing to do with CUDA."""
    memory = mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    begun = time.perf_counter_ns()
    for at in range(0, pages * mmap.PAGESIZE, mmap.PAGESIZE):
        memory[at] = 1
    took = time.perf_counter_ns() - begun
    memory.close()
    return took / pages


def bystanders() -> dict[str, Callable[[], float]]:
    """What threads of other programs do, and how to time it."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return {
        "switch of others": lambda: min(ping_pong(5_000) for _ in range(5)),
        "page fault of others": lambda: min(faults(5_000) for _ in range(5)),
    }


def per_hit() -> None:
    """Print ns per call with and without probes."""
    cpus = os.sched_getaffinity(0)
    ns: dict[tuple[str, bool], list[float]] = {}
    with Load(own_library()) as load:
        for _ in range(ROUNDS):
            others = bystanders()
            for probed in (False, True):
                backend = probes.load("stalls", cflags()) if probed else None
                if backend is not None:
                    setter = StallProbes(backend, StallMaps(backend), Scanner().open, 5 * MS, NS)
                    setter.follow(Scanner().scan(0), Scan())
                for name, timed in others.items():
                    ns.setdefault((name, probed), []).append(timed())
                os.sched_setaffinity(0, cpus)
                for name, command in CALLS.items():
                    ns.setdefault((name, probed), []).append(load.do(command) / N)
                if backend is not None:
                    setter.close()
    for name in (*CALLS, *others):
        off, on = (median(ns[name, probed]) for probed in (False, True))
        print(f"{name:<30}{off:8.0f} ns without {on:8.0f} ns with {on - off:8.0f} ns more")


# -- at work


async def at_work(seconds: float) -> None:
    """CPU and memory of the collector while a process launches, waits and sleeps at a usual rate."""
    collector = StallsCollector(StringTable(), SystemClock())
    rows = 0
    async for batch in collector.batches():
        if batch.channel.name == "stall":
            rows += len(batch.rows)
        if batch.channel.name == "cost":
            (row,) = batch.rows
            print(
                f"at work: {100 * row['cpu_ns'] / row['dt_ns']:.1f} % of a core, {row['rss_b'] / 2**20:.0f} MiB, "
                f"{row['calls'] / row['dt_ns'] * 1e9:.0f} hits/s, {100 * row['call_ns'] / row['dt_ns']:.2f} % of a core "
                f"taken from others by estimate, {rows / row['dt_ns'] * 1e9:.0f} rows/s"
            )
            seconds -= row["dt_ns"] / 1e9
            rows = 0
            if seconds < 0:
                break


def serving(load: Load, stop: threading.Event) -> None:
    """Some 2,000 launches and 100 waits of 6 ms a second."""
    while not stop.is_set():
        load.do("kernel 20 7")
        load.do(f"wait 1 7 {6 * MS}")


def work() -> None:
    """The collector, in this process, for ten seconds."""
    stop = threading.Event()
    with Load(own_library()) as load:
        thread = threading.Thread(target=serving, args=(load, stop))
        thread.start()
        asyncio.run(at_work(9))
        stop.set()
        thread.join()


if __name__ == "__main__":
    for part in sys.argv[1:] or ["flood", "per_hit", "work"]:
        {"flood": flood, "per_hit": per_hit, "work": work}[part]()
