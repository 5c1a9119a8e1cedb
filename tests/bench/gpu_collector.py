"""CPU of the GPU collector on the stub: `python tests/bench/gpu_collector.py [GPUS] [SECONDS] [COSTS] [MS]`.

Prints per cent of one core over every 5 s, the slowest call, and the medians; the stub library's own work is
included. COSTS is `none`, `real` (calls burn the time measured on an idle H200) or `load` (with its memory busy).
MS is the interval. The process shows what it costs: its resident memory at the start and the end is printed.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from nvml_stub import Stub

from opusmon.clock import SystemClock
from opusmon.collectors.gpu import GpuCollector
from opusmon.schema import StringTable


async def measure(seconds: float, interval_ms: int) -> None:
    """Consume batches and print what the cost rows say."""
    strings = StringTable()
    shares, sizes, slowest = [], [], []
    end = time.monotonic() + seconds
    async for batch in GpuCollector(strings, SystemClock(), interval_ms * 1_000_000).batches():
        if batch.channel.name == "cost":
            row = batch.rows[0]
            shares.append(100 * row["cpu_ns"] / row["dt_ns"])
            sizes.append(row["rss_b"] / 1e6)
            slowest.append(row["slowest_ns"] / 1e6)
            rate = row["calls"] / row["dt_ns"] * 1e9
            name = strings.text(row["slowest"])
            print(
                f"cpu {shares[-1]:.2f} %  calls/s {rate:.0f}  rss {sizes[-1]:.1f} MB"
                f"  slowest {slowest[-1]:.1f} ms {name}",
                flush=True,
            )
        if time.monotonic() > end:
            break
    later = slice(1, None) if len(shares) > 1 else slice(None)
    print(
        f"median {statistics.median(shares[later]):.2f} % of a core, least {min(shares[later]):.2f} %;"
        f" slowest call {statistics.median(slowest[later]):.1f} ms; rss {sizes[0]:.1f} to {sizes[-1]:.1f} MB;"
        f" {len(strings)} strings"
    )


def main() -> None:
    """Run the measurement in a child that sees the stub."""
    gpus, seconds, costs, interval_ms = (*sys.argv[1:], *("8", "26", "none", "1000")[len(sys.argv) - 1 :])
    if os.environ.get("NVML_STUB_CONFIG"):
        asyncio.run(measure(float(seconds), int(interval_ms)))
        return
    with tempfile.TemporaryDirectory() as folder:
        stub = Stub(Path(folder)).build()
        processes = [f"proc {gpu} {os.getpid()} 1000000 55 c" for gpu in range(int(gpus))]
        stub.configure(devices=int(gpus), lines=[f"costs {costs}", *processes])
        command = [sys.executable, __file__, gpus, seconds, costs, interval_ms]
        subprocess.run(command, env=stub.env(), check=True)


if __name__ == "__main__":
    main()
