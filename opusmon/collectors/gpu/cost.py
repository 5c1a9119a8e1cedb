"""What the collector itself costs: CPU, memory and NVML calls."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from opusmon.channels import COST
from opusmon.clock import Clock
from opusmon.collectors.gpu.nvml import Nvml
from opusmon.schema import Batch, StringTable

STATM = Path("/proc/self/statm")


def resident_b(path: Path = STATM) -> float:
    """Resident memory of this process in bytes."""
    return int(path.read_text(encoding="ascii").split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))


class CostMeter:
    """Makes `cost` rows.

    Args:
        name: the collector.
        clock: time of the rows.
        period_ns: how often a row is due, give or take half a tick.
        interval_ns: the tick.
    """

    def __init__(self, name: str, clock: Clock, period_ns: int, interval_ns: int) -> None:
        self._name, self._clock, self._period_ns = name, clock, period_ns - interval_ns // 2
        self._since, self._cpu_ns = clock.now(), time.process_time_ns()
        self.late = 0

    def due(self, edges: Iterable[Nvml], strings: StringTable) -> Batch | None:
        """A row over the time since the last one; None while it is not due."""
        now = self._clock.now()
        dt_ns = now - self._since
        if dt_ns < self._period_ns:
            return None
        cpu_ns = time.process_time_ns()
        costs = [edge.take_cost() for edge in edges]
        slowest = max(costs, key=lambda cost: cost.slowest_ns)
        calls, call_ns = sum(cost.calls for cost in costs), sum(cost.call_ns for cost in costs)
        words = (strings.intern(self._name), strings.intern(slowest.slowest))
        spent, late = cpu_ns - self._cpu_ns, self.late
        self._since, self._cpu_ns, self.late = now, cpu_ns, 0
        record = (
            now,
            words[0],
            dt_ns,
            spent,
            resident_b(),
            calls,
            call_ns,
            slowest.slowest_ns,
            words[1],
            late,
            0,
        )
        return Batch(COST, COST.rows([record]))
