"""Size, seek, open and write cost of a recording of 24 h, 2 GPUs, 36 links, one row each per second.

    python tests/bench/bench_recording.py [HOURS]

The floor for a seek is the raw SELECT of the same blobs, without decoding.
"""

from __future__ import annotations

import random
import resource
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from opusmon.channels import GPU, NVLINK
from opusmon.clock import NS, ManualClock
from opusmon.recording import Recorder, Recording, store
from opusmon.recording.stage import Stage
from opusmon.schema import Batch, Channel, Rows, StringTable

BLOCK_S = 600


def gpu_rows(rng: np.random.Generator, start_s: int, seconds: int) -> Rows:
    """Noisy gauges on two GPUs; totals and error counts that rest."""
    rows = _grid(GPU, start_s, seconds, 2)
    rows["gpu"] = np.tile([0, 1], seconds)
    rows["gi"] = -1
    rows["dt_ns"] = NS + rng.integers(-50_000, 50_000, len(rows))
    rows["mem_total_b"], rows["mem_reserved_b"] = 150e9, 600e6
    rows["mem_used_b"] = 98e9 + rng.integers(0, 200, len(rows)) * 2**20
    noisy = [
        "hbm_bw_pct",
        "hbm_bw_bps",
        "mem_busy_pct",
        "gpu_busy_pct",
        "sm_util_pct",
        "sm_occupancy_pct",
        "tensor_pct",
        "pcie_tx_bps",
        "pcie_rx_bps",
        "nvlink_tx_bps",
        "nvlink_rx_bps",
        "power_mw",
    ]
    for name in noisy:
        rows[name] = rng.normal(60, 10, len(rows))
    for name in ("temp_c", "mem_temp_c", "sm_clock_mhz"):
        rows[name] = rng.integers(60, 66, len(rows))
    return rows


def nvlink_rows(rng: np.random.Generator, start_s: int, seconds: int) -> Rows:
    """Noisy traffic on 18 links of two GPUs."""
    rows = _grid(NVLINK, start_s, seconds, 36)
    rows["gpu"] = np.tile(np.repeat([0, 1], 18), seconds)
    rows["link"] = np.tile(np.arange(18), 2 * seconds)
    rows["tx_bps"] = rng.normal(5e9, 1e9, len(rows))
    rows["rx_bps"] = rng.normal(5e9, 1e9, len(rows))
    rows["state"], rows["speed_bps"] = 1, 26.5e9
    return rows


def _grid(channel: Channel, start_s: int, seconds: int, series: int) -> Rows:
    rows = np.zeros(seconds * series, channel.dtype)
    rows["t"] = np.repeat((start_s + 1 + np.arange(seconds)) * NS + 123_456, series)
    return rows


def batches(hours: float) -> Iterator[list[Batch]]:
    """The session second by second: one list is what one transaction takes."""
    rng = np.random.default_rng(7)
    for start_s in range(0, int(hours * 3600), BLOCK_S):
        gpu, link = gpu_rows(rng, start_s, BLOCK_S), nvlink_rows(rng, start_s, BLOCK_S)
        for s in range(BLOCK_S):
            yield [Batch(GPU, gpu[2 * s : 2 * s + 2]), Batch(NVLINK, link[36 * s : 36 * s + 36])]


def generate(path: Path, hours: float) -> float:
    """Write the file through the writer's own stage, one transaction per second; CPU seconds it took."""
    connection, _ = store.create(path)
    stage = Stage(StringTable())
    before = time.process_time()
    for second in batches(hours):
        stage.build(second).apply(connection)
    stage.finish([("closed", "0")]).apply(connection)
    store.finish(connection)
    return time.process_time() - before


def quantiles(call: Callable[[], object], times: int) -> tuple[float, float]:
    """Median and 99th percentile of the wall time of a call, ms."""
    taken = []
    for _ in range(times):
        before = time.perf_counter()
        call()
        taken.append((time.perf_counter() - before) * 1e3)
    return statistics.median(taken), float(np.percentile(taken, 99))


def push_us(folder: Path) -> tuple[float, float]:
    """Median and 99th percentile of `push`, us."""
    recorder = Recorder(folder / "push.opusmon", strings=StringTable(), clock=ManualClock())
    rng = np.random.default_rng(1)
    each = [Batch(GPU, gpu_rows(rng, s, 1)) for s in range(2000)]
    taken = []
    for batch in each:
        before = time.perf_counter()
        recorder.push(batch)
        taken.append((time.perf_counter() - before) * 1e6)
    recorder.close()
    return statistics.median(taken), float(np.percentile(taken, 99))


def main() -> None:
    hours = float(sys.argv[1]) if len(sys.argv) > 1 else 24.0
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "bench.opusmon"
        cpu_s = generate(path, hours)
        size = path.stat().st_size
        print(f"size          {size / 1e6:8.1f} MB  ({size / hours * 24 / 1e6:.1f} MB per 24 h)")
        with sqlite3.connect(path) as raw:
            for table in ("chunk", "rollup"):
                n, b = raw.execute(f"SELECT count(*), sum(length(data)) FROM {table}").fetchone()
                print(f"  {table:10}  {b / 1e6:8.1f} MB in {n} rows")
        print(
            f"write         {cpu_s / hours:8.2f} s CPU per session-hour ({cpu_s / hours / 36:.3f} % of a core)"
        )
        print("push          {:8.2f} us median {:8.2f} us p99".format(*push_us(Path(name))))
        print(
            "open          {:8.2f} ms median {:8.2f} ms p99".format(
                *quantiles(lambda: Recording.open(path).close(), 30)
            )
        )
        recording = Recording.open(path)
        end = recording.t1
        randoms = random.Random(3)
        connection = sqlite3.connect(path)

        def floor() -> None:
            t = randoms.randrange(60 * NS, end)
            connection.execute(
                "SELECT data FROM chunk WHERE channel=1 AND t0>? AND t0<=?", (t - 60 * NS, t)
            ).fetchall()

        def seek(channel: str) -> None:
            t = randoms.randrange(60 * NS, end)
            recording.query(channel, t - 60 * NS, t)

        low = quantiles(floor, 300)
        for channel in ("gpu", "nvlink"):
            got = quantiles(lambda channel=channel: seek(channel), 300)
            print(
                f"seek {channel:8} {got[0]:8.2f} ms median {got[1]:8.2f} ms p99   {got[0] / low[0]:.1f} x raw SELECT"
            )
        print(f"  raw SELECT  {low[0]:8.2f} ms median {low[1]:8.2f} ms p99")
        redraw = quantiles(lambda: recording.query("gpu", end - 300 * NS, end), 50)
        print(f"redraw 300 s  {redraw[0]:8.2f} ms median (cached)")
        for fields, step in ((["power_mw"], 300), (["power_mw"], 10), (list(GPU.values), 600)):
            before = time.perf_counter()
            with Recording.open(path) as fresh:
                fresh.binned("gpu", fields, 0, end, step * NS)
            cold = (time.perf_counter() - before) * 1e3
            warm = quantiles(lambda f=fields, s=step: recording.binned("gpu", f, 0, end, s * NS), 10)
            print(
                f"binned all    {cold:8.1f} ms cold {warm[0]:8.1f} ms again   ({len(fields)} fields, step {step} s)"
            )
        before = time.perf_counter()
        with Recording.open(path) as fresh:
            fresh.binned("nvlink", ["tx_bps"], 0, end, 300 * NS)
        print(f"binned nvlink {(time.perf_counter() - before) * 1e3:8.1f} ms cold")
        print(f"peak RSS      {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:8.1f} MiB")


if __name__ == "__main__":
    main()
