"""Runs GpuCollector and prints its rows as ndjson on stdout until stdin ends.

The one argument is JSON: interval_ms, slow_ms, reprobe_ms, only_pids. An unusable facility is a row of channel "error".
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from typing import Any

from opusmon.clock import SystemClock
from opusmon.collectors.gpu import Cadence, CollectorUnavailable, GpuCollector
from opusmon.schema import Batch, StringTable


def say(row: dict[str, Any]) -> None:
    """Print one row; NaN becomes null."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    sys.stdout.write(json.dumps(plain) + "\n")


def show(batch: Batch, strings: StringTable) -> None:
    """Print the rows of a batch with their text."""
    names = batch.rows.dtype.names
    for record in batch.rows.tolist():
        row = dict(zip(names, record, strict=True))
        for field in batch.channel.fields:
            if field.text:
                row[field.name] = strings.text(row[field.name])
        row = {("of" if k == "channel" else k): v for k, v in row.items()}
        say({"channel": batch.channel.name, **row})
    sys.stdout.flush()


async def run(options: dict[str, Any]) -> None:
    """Collect until cancelled."""
    strings = StringTable()
    cadence = Cadence(
        slow_ns=int(options.get("slow_ms", 5000) * 1e6),
        reprobe_ns=int(options.get("reprobe_ms", 30000) * 1e6),
    )
    interval_ns = int(options.get("interval_ms", 1000) * 1e6)
    collector = GpuCollector(
        strings, SystemClock(), interval_ns, frozenset(options.get("only_pids", ())), cadence=cadence
    )
    stream = collector.batches()
    try:
        async for batch in stream:
            show(batch, strings)
    except CollectorUnavailable as error:
        say({"channel": "error", "reason": error.why.reason, "remedy": error.why.remedy})
        sys.stdout.flush()
    finally:
        await stream.aclose()


async def main() -> None:
    """Run until stdin ends or the collector does."""
    task = asyncio.create_task(run(json.loads(sys.argv[1])))
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
