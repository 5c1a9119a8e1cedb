"""What the main process itself costs: its CPU time and memory."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar

from opusmon.channels import COST
from opusmon.clock import NS, Clock
from opusmon.collectors.base import Unavailable, every
from opusmon.schema import Batch, Channel, StringTable

INTERVAL_NS = 5 * NS
_STATM = Path("/proc/self/statm")


def rss_b() -> float:
    """Resident memory of this process in bytes; NaN where /proc does not say."""
    try:
        return float(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return float("nan")


class SelfCost:
    """A `cost` row for the main process every 5 s.

    Args:
        name: what the row is called: "screen" or "record".
    """

    name: ClassVar[str] = "cost"
    channels: Sequence[Channel] = (COST,)

    def __init__(self, strings: StringTable, clock: Clock, process: str = "screen") -> None:
        self.strings = strings
        self._clock = clock
        self._process = process

    @classmethod
    def probe(cls) -> Unavailable | None:
        """It always runs."""
        return None

    async def batches(self) -> AsyncIterator[Batch]:
        """One row per interval; the first covers the first interval."""
        nan = float("nan")
        last_t, last_cpu = self._clock.now(), time.process_time_ns()
        async for tick in every(INTERVAL_NS, self._clock):
            now, cpu = self._clock.now(), time.process_time_ns()
            if now - last_t < INTERVAL_NS // 2:
                continue
            name = self.strings.intern(self._process)
            row = (now, name, now - last_t, cpu - last_cpu, rss_b(), nan, nan, nan, 0, float(tick.late), nan)
            yield Batch(COST, COST.rows([row]))
            last_t, last_cpu = now, cpu
