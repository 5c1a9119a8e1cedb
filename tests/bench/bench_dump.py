"""Rows per second of a dump, and its memory, for the widest channel: `python tests/bench/bench_dump.py [ROWS]`."""

from __future__ import annotations

import io
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from opusmon.channels import GPU
from opusmon.clock import Anchor, Anchors
from opusmon.export.rows import FORMATS, dump
from opusmon.schema import Batch, Channel, StringTable

CHUNK_ROWS = 4_000


class Nowhere(io.StringIO):
    """A stream that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)


@dataclass
class Source:
    """So many rows of `gpu`, made chunk by chunk."""

    rows: int

    channels: ClassVar = {"gpu": GPU}
    strings = StringTable()
    anchors = Anchors(Anchor(i * 60 * 10**9, 1_795_961_001 * 10**9 + i * 60 * 10**9) for i in range(1440))

    def batches(self, t0: int, t1: int, channels: Sequence[Channel] | None = None) -> Iterator[Batch]:
        values = np.random.default_rng(1).random(CHUNK_ROWS) * 100
        for start in range(0, self.rows, CHUNK_ROWS):
            rows = np.zeros(CHUNK_ROWS, GPU.dtype)
            for name in GPU.values:
                rows[name] = values
            rows["t"] = (np.arange(CHUNK_ROWS) + start) * 10**8
            yield Batch(GPU, rows)


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 40_000
    for fmt in FORMATS:
        rates = []
        for _ in range(3):
            begin = time.perf_counter()
            written = dump(Source(rows), "gpu", -1, 2**62, fmt, Nowhere())
            rates.append(written / (time.perf_counter() - begin))
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{fmt:<7}{statistics.median(rates):>10,.0f} rows/s of {len(GPU.fields)} fields, peak RSS {peak_mb:.0f} MB"
        )


if __name__ == "__main__":
    main()
