"""What probing costs: the hits, and this process."""

from __future__ import annotations

import time

from opusmon.channels import COST
from opusmon.clock import Clock
from opusmon.collectors.cost import rss_b
from opusmon.collectors.ebpf.hit_price import ASSUMED
from opusmon.schema import Batch, StringTable

PERIOD_NS = 5_000_000_000


class Meter:
    """Makes `cost` rows: `calls` are probe hits, `call_ns` is hits x `hit_ns`, time taken from the watched threads.

    Args:
        name: the collector.
        clock: time of the rows.
        interval_ns: the tick; a row comes in the tick nearest to the end of its period.

    Attributes:
        hit_ns: what a hit is taken to cost.
    """

    def __init__(self, name: str, clock: Clock, interval_ns: int) -> None:
        self._name = name
        self._clock = clock
        self._period_ns = PERIOD_NS - interval_ns // 2
        self._since, self._cpu_ns = clock.now(), time.process_time_ns()
        self.hit_ns = ASSUMED.hit_ns(cheap=True)
        self.hits = 0
        self.lost = 0
        self.late = 0

    def due(self, strings: StringTable) -> Batch | None:
        """A row over the time since the last one; None while it is not due."""
        now = self._clock.now()
        dt_ns = now - self._since
        if dt_ns < self._period_ns:
            return None
        cpu_ns = time.process_time_ns()
        nan = float("nan")
        name = strings.intern(self._name)
        spent = cpu_ns - self._cpu_ns
        record = (
            now,
            name,
            dt_ns,
            spent,
            rss_b(),
            self.hits,
            self.hits * self.hit_ns,
            nan,
            0,
            self.late,
            self.lost,
        )
        self._since, self._cpu_ns = now, cpu_ns
        self.hits = self.lost = self.late = 0
        return Batch(COST, COST.rows([record]))
