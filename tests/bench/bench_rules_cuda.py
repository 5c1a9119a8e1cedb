"""What the rules about streams and stalls cost live: median CPU time of a look at two minutes, printed.

Run: python tests/bench/bench_rules_cuda.py. Eight GPUs, 100 streams of four processes, 1,000 stalls of 40 threads. In
the quiet session nothing is to be found; in the bad one the launching threads of a process are kept off their CPUs, and
two of its streams show it; in the worst one nearly every thread has nearly every stall.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from opusmon.channels import BY_NAME, WHOLE_GPU
from opusmon.clock import NS, Anchors
from opusmon.schema import Batch, StringTable, sort_rows
from opusmon.triage import run
from opusmon.triage.scene import RULES
from opusmon.window import Window

RULE_MODULES = ("rules_cuda", "rules_stalls", "rules_stall_events")
SECONDS, GPUS, STREAMS, PROCESSES, STALLS = 120, 8, 100, 4, 1_000
T0 = 1_000 * NS
LOOKS = 60
KINDS = {
    "wait": "waiting for the GPU",
    "off_cpu": "I/O",
    "run_queue": "preempted",
    "futex": "lock",
    "alloc": "after warm-up",
    "module": "after warm-up",
    "jit": "compiled",
    "tls": "slow",
    "capture": "aborted: invalidated by an earlier error",
}


IDLE = {"wait": "waiting for the GPU", "off_cpu": "sleep", "futex": "lock"}
STARVED = {"run_queue": "preempted", "off_cpu": "I/O", "wait": "waiting for the GPU"}
SESSIONS = {"quiet": (0, IDLE, 40, 0.5), "bad": (50, STARVED, 8, 1.5), "worst": (10, KINDS, 40, 2.0)}
"""By name: which streams are bad, kinds, threads and decades of the stalls."""


def blank(channel: str, count: int) -> np.ndarray:
    """Rows whose floats are missing."""
    rows = np.zeros(count, BY_NAME[channel].dtype)
    for field in BY_NAME[channel].fields:
        if field.dtype in ("<f4", "<f8"):
            rows[field.name] = np.nan
    return rows


def stream_rows(strings: StringTable, every: int) -> np.ndarray:
    """A row of each stream a second; one of `every` is slow and gappy, and another one waited for (0 for none)."""
    rows = blank("stream", SECONDS * STREAMS)
    stream = np.tile(np.arange(STREAMS), SECONDS)
    rows["t"] = T0 + np.repeat(np.arange(1, SECONDS + 1), STREAMS) * NS
    rows["pid"], rows["stream"], rows["dt_ns"] = 100 + stream % PROCESSES, 0x55D000000000 + 64 * stream, NS
    rows["process"] = rows["thread"] = strings.intern("vllm")
    rows["launches"], rows["graph_launches"], rows["copies"], rows["waits"] = 1000, 50, 10, 50
    rows["timed_launches"], rows["bubbles"] = 100, 50
    noise = np.random.default_rng(1).uniform(0.9, 1.1, len(rows))
    worse = (stream % every == 0) if every else np.zeros(len(rows), bool)
    waited = (stream % every == 1) if every else worse
    rows["launch_call_ns"] = noise * np.where(worse, 25e3, 9e3)
    rows["bubble_ns"] = noise * np.where(worse, 400e6, 100e6)
    rows["wait_ns"] = noise * np.where(waited, 950e6, 500e6)
    return rows


def gpu_rows() -> np.ndarray:
    """Half of the GPUs are busy; every process has two of them."""
    rows = blank("gpu", SECONDS * GPUS)
    rows["t"] = T0 + np.repeat(np.arange(1, SECONDS + 1), GPUS) * NS - NS // 3
    rows["gpu"], rows["gi"], rows["dt_ns"] = np.tile(np.arange(GPUS), SECONDS), WHOLE_GPU, NS
    rows["sm_util_pct"] = rows["gpu_busy_pct"] = np.where(rows["gpu"] % 2, 97, 30)
    return rows


def stall_rows(strings: StringTable, kinds: dict[str, str], threads: int, decades: float) -> np.ndarray:
    """Stalls of some kinds and threads, from 5 ms on over so many decades."""
    random = np.random.default_rng(2)
    rows = blank("stall", STALLS)
    which = random.integers(0, len(kinds), STALLS)
    thread = random.integers(0, threads, STALLS)
    rows["t"] = T0 + random.integers(1, SECONDS * NS, STALLS)
    rows["kind"] = np.array([strings.intern(kind) for kind in kinds])[which]
    rows["reason"] = np.array([strings.intern(reason) for reason in kinds.values()])[which]
    rows["pid"], rows["tid"], rows["count"] = 100 + thread % PROCESSES, 1000 + thread, 1
    rows["process"], rows["thread"] = strings.intern("vllm"), strings.intern("worker")
    rows["dur_ns"] = 5e6 * 10 ** random.uniform(0, decades, STALLS)
    rows["code"] = np.where(rows["kind"] == strings.intern("capture"), 901, 0)
    rows["stack"] = strings.intern("main;run;step;cuLaunchKernel")
    return rows


def engine_rows(strings: StringTable) -> np.ndarray:
    """An engine with work to do."""
    rows = blank("engine", SECONDS)
    rows["t"], rows["dt_ns"] = T0 + np.arange(1, SECONDS + 1) * NS, NS
    rows["engine"], rows["running"] = strings.intern("127.0.0.1:8000"), 8
    return rows


def process_rows() -> np.ndarray:
    """GPUs 0 and 2 of one process, 1 and 3 of the next, and so on."""
    rows = blank("gpu_process", SECONDS // 5 * GPUS)
    rows["t"] = T0 + np.repeat(np.arange(1, SECONDS, 5), GPUS) * NS
    rows["gpu"] = np.tile(np.arange(GPUS), SECONDS // 5)
    rows["pid"], rows["gi"] = 100 + rows["gpu"] % PROCESSES, WHOLE_GPU
    return rows


def window(name: str) -> Window:
    """A session of two minutes in memory."""
    every, kinds, threads, decades = SESSIONS[name]
    strings = StringTable()
    view = Window(strings, Anchors(), cap_b=1 << 28)
    parts = {
        "stream": stream_rows(strings, every),
        "gpu": gpu_rows(),
        "gpu_process": process_rows(),
        "stall": stall_rows(strings, kinds, threads, decades),
        "engine": engine_rows(strings),
    }
    for name, rows in parts.items():
        view.push(Batch(BY_NAME[name], sort_rows(rows)))
    return view


def look_ms(view: Window, only: list[str]) -> tuple[float, float, int]:
    """Median and least CPU time of a look, ms, and how much it found."""
    times = []
    for _ in range(LOOKS):
        begin = time.thread_time()
        found = run.look(view, T0, T0 + SECONDS * NS, only=only)
        times.append((time.thread_time() - begin) * 1e3)
    return statistics.median(times), min(times), len(found)


def main() -> None:
    """Print them."""
    run.rules()
    mine = [name for name, one in RULES.items() if one.find.__module__.rpartition(".")[2] in RULE_MODULES]
    for name in SESSIONS:
        view = window(name)
        whole_ms, best_ms, found = look_ms(view, mine)
        of = f"{len(mine)} rules together (limit 5 ms), {found} findings"
        print(f"{name}: median {whole_ms:.2f} ms, least {best_ms:.2f} ms for {of}")
        for one in mine:
            one_ms, _, found = look_ms(view, [one])
            print(f"  {one:26} {one_ms:6.2f} ms {found:4} findings")


if __name__ == "__main__":
    main()
