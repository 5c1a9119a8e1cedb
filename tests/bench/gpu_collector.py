"""CPU of the GPU collector on the stub: `python tests/bench/gpu_collector.py [GPUS] [SECONDS]`.

Prints per cent of one core over every 5 s and the median; the stub library's own work is included.
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


async def measure(seconds: float) -> None:
    """Consume batches and print what the cost rows say."""
    strings = StringTable()
    shares, calls = [], []
    end = time.monotonic() + seconds
    async for batch in GpuCollector(strings, SystemClock()).batches():
        if batch.channel.name == "cost":
            row = batch.rows[0]
            shares.append(100 * row["cpu_ns"] / row["dt_ns"])
            calls.append(row["calls"] / row["dt_ns"] * 1e9)
            print(
                f"cpu {shares[-1]:.2f} %  calls/s {calls[-1]:.0f}  rss {row['rss_b'] / 1e6:.1f} MB",
                flush=True,
            )
        if time.monotonic() > end:
            break
    print(f"median {statistics.median(shares[1:] or shares):.2f} % of a core")


def main() -> None:
    """Run the measurement in a child that sees the stub."""
    if os.environ.get("NVML_STUB_CONFIG"):
        asyncio.run(measure(float(sys.argv[2])))
        return
    gpus, seconds = (sys.argv[1:] + ["8", "26"][len(sys.argv) - 1 :])[:2]
    with tempfile.TemporaryDirectory() as folder:
        stub = Stub(Path(folder)).build()
        stub.configure(
            devices=int(gpus), lines=[f"proc {gpu} {os.getpid()} 1000000 55 c" for gpu in range(int(gpus))]
        )
        subprocess.run([sys.executable, __file__, gpus, seconds], env=stub.env(), check=True)


if __name__ == "__main__":
    main()
