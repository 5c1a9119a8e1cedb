"""What watching costs: CPU time, memory, and calls into a driver."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

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


@dataclass(slots=True)
class CallCost:
    """What calls cost since this object was made: number, wall ns, and the longest one."""

    calls: int = 0
    call_ns: int = 0
    slowest_ns: int = 0
    slowest: str = ""

    def add(self, name: str, took_ns: int) -> None:
        """Count a call that took so long."""
        self.calls += 1
        self.call_ns += took_ns
        if took_ns > self.slowest_ns:
            self.slowest_ns, self.slowest = took_ns, name


class Metered(Protocol):
    """What keeps an account of its calls."""

    def take_cost(self) -> CallCost:
        """The account so far; a new one begins."""
        ...


class CostMeter:
    """Makes `cost` rows for a collector that calls into a driver.

    Args:
        name: the collector.
        clock: time of the rows.
        period_ns: how often a row is due, give or take half a tick.
        interval_ns: the tick.
        guest: it runs in another's process, whose row has the CPU time and memory.
    """

    def __init__(
        self, name: str, clock: Clock, period_ns: int, interval_ns: int, *, guest: bool = False
    ) -> None:
        self._name, self._clock, self._period_ns = name, clock, period_ns - interval_ns // 2
        self._guest = guest
        self._since, self._cpu_ns = clock.now(), time.process_time_ns()
        self.late = 0

    def due(self, edges: Iterable[Metered], strings: StringTable) -> Batch | None:
        """A row over the time since the last one; None while it is not due."""
        now = self._clock.now()
        dt_ns = now - self._since
        if dt_ns < self._period_ns:
            return None
        cpu_ns = time.process_time_ns()
        costs = [edge.take_cost() for edge in edges]
        worst = max(costs, key=lambda cost: cost.slowest_ns)
        calls, call_ns = sum(cost.calls for cost in costs), sum(cost.call_ns for cost in costs)
        words = (strings.intern(self._name), strings.intern(worst.slowest))
        nan = float("nan")
        spent, late = cpu_ns - self._cpu_ns, self.late
        self._since, self._cpu_ns, self.late = now, cpu_ns, 0
        own = (nan, nan) if self._guest else (spent, rss_b())
        head = (now, words[0], dt_ns, *own)
        return Batch(COST, COST.rows([(*head, calls, call_ns, worst.slowest_ns, words[1], late, 0)]))


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
