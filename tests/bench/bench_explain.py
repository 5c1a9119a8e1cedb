"""What a comparison costs and how often it errs: `python tests/bench/bench_explain.py [SEED]`.

Writes a session of 2 GPUs (36 links, 10 streams, 10 processes, an engine with histograms, 20 requests and 20 stalls a
second) for 20 minutes and explains the last 10; the same for 24 hours of gauges. Then false alarms of series that do
not change, by kind of noise and length of the baseline, and how often a planted onset lies within its bounds.
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from triage.explain_session import T0, Planted, ns, nvlink, stream

from opusmon.clock import NS, ManualClock
from opusmon.recording import Recorder, Recording
from opusmon.schema import Batch
from opusmon.triage.changes import find_shift
from opusmon.triage.explain import explain
from opusmon.triage.sequence import render
from opusmon.window import Window


def session(seconds: int, events: bool) -> Planted:
    """The session in memory."""
    planted = Planted(seconds, 1)
    for gpu in range(2):
        nvlink(planted, gpu, range(18) if gpu else (7,), seconds * 0.6, noise=0.02)
        planted.tick()
        names = (
            "hbm_bw_pct",
            "sm_util_pct",
            "power_mw",
            "temp_c",
            "sm_clock_mhz",
            "tensor_pct",
            "mem_used_b",
        )
        columns = {name: planted.level(60, noise=0.05) for name in names}
        planted.sampled("gpu", gpu=gpu, gi=-1, **columns)
    for n in range(10):
        stream(planted, seconds * 0.61 if n == 3 else None, pid=1000 + n // 3, handle=n + 3)
        names = ("cpu_pct", "rss_b", "threads", "fds", "run_delay_pct", "minor_faults_per_s")
        planted.sampled(
            "process", pid=1000 + n, name="vllm", **{f: planted.level(50, noise=0.05) for f in names}
        )
    planted.tick().sampled(
        "host", cpu_busy_pct=planted.level(30, noise=0.05), load1=planted.level(3, noise=0.02)
    )
    if events:
        _events(planted, seconds)
    return planted


def _events(planted: Planted, seconds: int) -> None:
    rng = planted.rng
    planted.requests(20, lambda t: 0.4 + 0.64 * (t > seconds * 0.62) + 0.02 * rng.normal(size=len(t)))
    t = np.sort(rng.uniform(0, seconds, 20 * seconds))
    planted.channel(
        "stall", t=t, kind="wait", pid=1000, process="vllm", dur_ns=rng.uniform(5e6, 2e7, len(t)), count=1
    )
    for metric in ("ttft", "itl", "e2e", "queue", "prefill", "decode", "tpot"):
        for lo in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2):
            columns = {"engine": "h:1", "model": "m", "metric": metric, "lo_s": lo, "hi_s": 2 * lo}
            count = rng.poisson(10, seconds)
            planted.channel("engine_bucket", t=np.arange(1, seconds + 1), dt_ns=NS, count=count, **columns)


def written(planted: Planted, path: Path) -> None:
    """Write it to a file, a minute at a time, as a recorder would."""
    recorder = Recorder(path, strings=planted.strings, clock=ManualClock(T0, 10**18), flush_ns=1)
    window = planted.window
    for begin in range(window.t0 - 1, window.t1, 60 * NS):
        for name, channel in window.channels.items():
            rows = window.query(name, begin, begin + 60 * NS)
            if len(rows):
                recorder.push(Batch(channel, rows))
        time.sleep(0.005)
    recorder.close()


def cost(seconds: int, events: bool, folder: Path) -> None:
    """Time and memory of explaining the second half of a session."""
    path = folder / f"{seconds}.opusmon"
    written(session(seconds, events), path)
    times = []
    for _ in range(3):
        with Recording.open(path) as recording:
            begin = time.perf_counter()
            told = explain(Window.over(recording), ns(seconds / 2), ns(seconds))
            times.append(time.perf_counter() - begin)
    size_mb = path.stat().st_size / 1e6
    print(f"{seconds} s, {size_mb:.1f} MB: {statistics.median(times):.2f} s for {told.compared} series")
    print(render(told, 110))


def _autoregressive(rng: np.random.Generator, n: int, r: float) -> np.ndarray:
    noise = rng.normal(size=n)
    for k in range(1, n):
        noise[k] += r * noise[k - 1]
    return noise + 20


NOISES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda rng, n: rng.normal(10, 1, n),
    "AR 0.5": lambda rng, n: _autoregressive(rng, n, 0.5),
    "AR 0.8": lambda rng, n: _autoregressive(rng, n, 0.8),
    "t3": lambda rng, n: rng.standard_t(3, n) + 10,
    "lognormal": lambda rng, n: rng.lognormal(0, 1, n),
    "Poisson 1": lambda rng, n: rng.poisson(1, n).astype(float),
    "Poisson 0.03": lambda rng, n: rng.poisson(0.03, n).astype(float),
    "sparse": lambda rng, n: (rng.random(n) < 0.05) * rng.lognormal(3, 1, n),
    "uniform": lambda rng, n: rng.random(n),
    "two levels": lambda rng, n: (rng.random(n) < 0.5) * 10.0 + rng.normal(size=n),
}


def false_alarms(rng: np.random.Generator, each: int = 500) -> None:
    """Series said to change, of a thousand that do not."""
    for n_base, n_zone in ((10, 16), (20, 30), (45, 75), (150, 250), (450, 750)):
        t = np.arange(n_base + n_zone) * NS
        found = {
            name: sum(find_shift(t, make(rng, len(t)), n_base, NS, 1e-3) is not None for _ in range(each))
            for name, make in NOISES.items()
        }
        rate = 1000 * sum(found.values()) / (each * len(NOISES))
        worst = max(found, key=lambda name: found[name])
        print(
            f"baseline {n_base}: {rate:.1f} of 1,000; most in {worst}, {1000 * found[worst] / each:.0f} of 1,000"
        )


def coverage(rng: np.random.Generator, each: int = 200) -> None:
    """Share of planted steps found, and of their onsets within the bounds."""
    for size in (4, 6, 10, 30, 200):
        found = inside = 0
        widths = []
        for _ in range(each):
            onset = 46 + 60 * rng.random()
            share = np.clip(np.arange(1, 121) - onset, 0, 1)
            x = 20 + size * share + rng.normal(size=120)
            shift = find_shift(np.arange(1, 121) * NS, x, 45, NS)
            if shift is not None:
                found += 1
                inside += shift.lo <= onset * NS <= shift.hi
                widths.append((shift.hi - shift.lo) / 2 / NS)
        print(
            f"step of {size} deviations: {100 * found / each:.0f} % found, {100 * inside / max(found, 1):.1f} % of onsets"
            f" within +-{statistics.median(widths):.2f} s"
        )


if __name__ == "__main__":
    generator = np.random.default_rng(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    with tempfile.TemporaryDirectory() as folder:
        cost(1200, True, Path(folder))
        print(
            f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB, making the session included"
        )
    coverage(generator)
    false_alarms(generator)
