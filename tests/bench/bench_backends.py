"""libbpf beside bcc: time to load, memory of the worker, ns per hit on the watched thread.

Run as root, with nothing else on the machine: `python tests/bench/bench_backends.py`. The load is the stub libcuda,
whose functions begin with push, as the driver's do. Backends take turns; medians over the rounds. Needs clang, libbpf
and bcc: the programs of the second table are compiled here for both.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import bpf_objects
from cuda_stub import Load, built
from cuda_stub.watch import Watch

from opusmon.collectors.ebpf import elf, prebuilt
from opusmon.collectors.ebpf.bcc_text import for_bcc
from opusmon.collectors.ebpf.libbpf import LibbpfBackend
from opusmon.collectors.ebpf.probes import VARIABLE, Backend, BccBackend

ROUNDS, N = 7, 200_000
SOURCE = """#include "portable.bpf.h"
PERCPU_ARRAY_MAP(counts, u64, 1);
LRU_HASH_MAP(calls, u64, u64, 1024);
UPROBE int nothing(struct pt_regs *ctx) { return 0; }
UPROBE int counted(struct pt_regs *ctx)
{
    int zero = 0;
    u64 *n = MAP_LOOKUP(counts, &zero);
    if (n)
        __sync_fetch_and_add(n, 1);
    return 0;
}
UPROBE int begun(struct pt_regs *ctx)
{
    u64 id = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns();
    MAP_UPDATE(calls, &id, &now);
    return 0;
}
UPROBE int ended(struct pt_regs *ctx)
{
    u64 id = bpf_get_current_pid_tgid();
    u64 *start = MAP_LOOKUP(calls, &id);
    int zero = 0;
    u64 *n = MAP_LOOKUP(counts, &zero);
    if (start && n)
        __sync_fetch_and_add(n, bpf_ktime_get_ns() - *start);
    MAP_DELETE(calls, &id);
    return 0;
}
"""
KINDS = {
    "entry, empty": ("nothing", ""),
    "entry, counted": ("counted", ""),
    "return, empty": ("", "nothing"),
    "entry and return, empty": ("nothing", "nothing"),
    "entry and return, timed": ("begun", "ended"),
}
LOADING = """
import time, sys, re
from opusmon.collectors.ebpf import probes
from opusmon.collectors.ebpf.stream_table import cflags
start = time.perf_counter()
backend = probes.load("streams", cflags())
took = time.perf_counter() - start
print(took)
"""


def memory(pid: int) -> tuple[float, float]:
    """RSS and PSS in MB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    rss, pss = (re.search(rf"^{word}:\s+(\d+) kB", text, re.MULTILINE) for word in ("Rss", "Pss"))
    assert rss is not None
    assert pss is not None
    return int(rss[1]) / 1e3, int(pss[1]) / 1e3


def loading() -> None:
    """Print how long each takes to load, in a fresh process."""
    took: dict[str, list[float]] = {"libbpf": [], "bcc": []}
    for _ in range(ROUNDS):
        for kind, times in took.items():
            words = [sys.executable, "-c", LOADING]
            done = subprocess.run(
                words, env={**os.environ, VARIABLE: kind}, capture_output=True, text=True, check=True
            )
            times.append(float(done.stdout))
    libbpf, bcc = (statistics.median(took[kind]) * 1e3 for kind in ("libbpf", "bcc"))
    print(f"load all programs of streams: libbpf {libbpf:.0f} ms, bcc {bcc:.0f} ms: {bcc / libbpf:.0f} times")


def worker() -> None:
    """Print memory of `opusmon stream --only streams` at work: before it loads, and with all probes set."""
    for kind in ("libbpf", "bcc"):
        os.environ[VARIABLE] = kind
        start = time.perf_counter()
        watch = Watch("1s")
        watch.until(lambda it=watch: it.said("no process maps libcuda"))
        before = memory(watch.process.pid)
        with Load():
            watch.until(lambda it=watch: it.files == 1)
            rss, pss = memory(watch.process.pid)
            print(
                f"worker, {kind}: RSS {rss:.0f} MB, PSS {pss:.0f} MB; without programs {before[0]:.0f} and {before[1]:.0f} MB; "
                f"start to first rows {time.perf_counter() - start:.1f} s"
            )
            watch.close()
        del os.environ[VARIABLE]


def backends() -> dict[str, Backend]:
    """The same small programs in each."""
    (folder := Path(built()) / "bench").mkdir(exist_ok=True)
    (folder / "hits.bpf.c").write_text(SOURCE, encoding="utf-8")
    bpf_objects.SOURCES["hits"] = lambda _: []
    content = bpf_objects.compiled("hits", os.uname().machine, folder)
    prebuilt.find = lambda *_: prebuilt.Compiled("hits.bpf.o", content)
    return {
        "libbpf": LibbpfBackend("hits"),
        "libbpf, uprobe_multi": LibbpfBackend("hits", by_multi=True),
        "bcc": BccBackend(for_bcc(SOURCE)),
    }


def per_hit() -> None:
    """Print ns per call of a function with one probe, or a pair, above what the call takes without."""
    library = built() / "libcuda.so.1"
    with library.open("rb") as file:
        address = elf.functions(file, ["cuLaunchKernel"])["cuLaunchKernel"].address
    made = backends()
    ns: dict[tuple[str, str], list[float]] = {}
    ends: dict[str, list[float]] = {name: [] for name in made}
    with Load() as load:
        for _ in range(ROUNDS):
            for kind, (at_entry, at_return) in KINDS.items():
                bare = load.do(f"kernel {N} 17") / N
                for name, backend in made.items():
                    place = str(library)
                    links = [backend.attach(place, address, at_return, on_return=True)] if at_return else []
                    links += [backend.attach(place, address, at_entry)] if at_entry else []
                    ns.setdefault((kind, name), []).append(load.do(f"kernel {N} 17") / N - bare)
                    ends[name].append(
                        timed(lambda it=backend, them=links: [it.detach(link) for link in them]) / len(links)
                    )
    for kind in KINDS:
        print(
            f"{kind:<26}" + "   ".join(f"{name} {statistics.median(ns[kind, name]):.0f} ns" for name in made)
        )
    print(
        "detach                    "
        + "   ".join(f"{name} {statistics.median(t) * 1e3:.0f} ms" for name, t in ends.items())
    )
    for backend in made.values():
        backend.close()


def timed(action: Callable[[], object]) -> float:
    """Seconds an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)  # bcc wants bytes
    loading()
    worker()
    per_hit()
