"""L2 and HBM traffic from the hardware counters, device-wide, at a price: `--deep`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from opusmon.channels import COST, L2, STATUS
from opusmon.clock import NS, Clock
from opusmon.collectors import facilities_gpu as gpu
from opusmon.collectors.base import Unavailable, every, status_batch
from opusmon.collectors.cost import CallCost, CostMeter
from opusmon.collectors.facilities import Host, lacking
from opusmon.collectors.notes import Notes
from opusmon.schema import Batch, Channel, StringTable
from opusmon.text import counted

NEEDS = (gpu.driver, gpu.profiling)
COST_NS = 5 * NS
WINDOW_NS = 20_000_000
"""Sampled at a time: each hardware sample in it costs 0.1 to 0.5 ms to decode."""
MAX_PERIOD_NS = 30 * NS


def next_period(period_ns: int, cpu_ns: int, budget_pct: float, shortest_ns: int) -> int:
    """How long to wait until the next decode, so that decoding stays within its share of a core.

    Args:
        period_ns: how long the last wait was.
        cpu_ns: what the decode after it cost.
        budget_pct: share of one core, in percent.
        shortest_ns: the interval asked for.
    """
    affordable = int(cpu_ns / (budget_pct / 100))
    # Half of the way, so that one expensive decode does not make the screen stale for long.
    return min(MAX_PERIOD_NS, max(shortest_ns, (period_ns + affordable) // 2))


class L2Collector:
    """Samples the counters of every GPU. Run it in a child process: the library may crash its caller.

    Args:
        strings: text ids of the rows refer to it.
        clock: time of the rows.
        interval_ns: shortest time between rows; raised to 1 s.
        only_pids: ignored: the counters are the whole device's.
        deep: the user has asked for it.
        budget_pct: what decoding may cost, in percent of one core.
        bank_conflicts: sample shared-memory bank conflicts instead; they do not fit into a pass with the rest.
    """

    name: ClassVar[str] = "l2"
    channels: Sequence[Channel] = (L2, STATUS, COST)

    def __init__(
        self,
        strings: StringTable,
        clock: Clock,
        interval_ns: int = NS,
        only_pids: frozenset[int] = frozenset(),
        *,
        deep: bool = True,
        budget_pct: float = 1.0,
        bank_conflicts: bool = False,
    ) -> None:
        del only_pids, deep
        self.strings = strings
        self._clock = clock
        self._shortest_ns = max(interval_ns, NS)
        self._budget_pct = budget_pct
        self._banks = bank_conflicts
        self._notes = Notes(self.name)
        self._cost = CallCost()
        self._source = ""

    @classmethod
    def probe(cls) -> Unavailable | None:
        """What this host lacks; None when nothing is known to be missing."""
        missing = lacking(NEEDS, Host())
        if not missing:
            return None
        return Unavailable("; ".join(f"{one.name}: {one.reason}" for one in missing), missing[0].remedy)

    def take_cost(self) -> CallCost:
        """The account of calls so far; a new one begins."""
        taken, self._cost = self._cost, CallCost()
        return taken

    async def batches(self) -> AsyncIterator[Batch]:
        """A row per GPU and decode until closed.

        Raises:
            L2Unavailable: no GPU can be sampled.
            CuptiError: the library failed later on.
        """
        from opusmon.collectors.l2 import devices

        pool = ThreadPoolExecutor(1, "cupti")  # the library is for one thread, and its calls block
        meter = CostMeter(self.name, self._clock, COST_NS, self._shortest_ns)
        opened: list[devices.Device] = []

        async def aside(function: Callable[..., Any], *words: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(pool, function, *words)

        try:
            opened, refused = await aside(self._open, devices)
            self._note(refused, len(opened))
            period_ns, last = self._shortest_ns, self._clock.now()
            async for tick in every(self._shortest_ns, self._clock):
                meter.late += tick.late
                if tick.due - last >= period_ns - self._shortest_ns // 2:
                    last = tick.due
                    # The library decodes on threads of its own: what counts is the process.
                    began = time.process_time_ns()
                    readings = await aside(_round, opened)
                    cpu_ns = time.process_time_ns() - began
                    period_ns = next_period(period_ns, cpu_ns, self._budget_pct, self._shortest_ns)
                    for batch in self._rows(readings):
                        yield batch
                for batch in self._account(meter):
                    yield batch
        finally:
            for device in opened:
                pool.submit(device.close)
            pool.shutdown(wait=True)

    def _open(self, devices: Any) -> Any:
        lib, found = devices.load()
        self._source = f"CUPTI {found.cuda[0]}.{found.cuda[1]} PM sampling"
        opened, refused = devices.open_devices(lib, lambda: self._cost, banks=self._banks)
        if not opened:
            why = next(iter(refused.values()), Unavailable("the driver shows no GPU", "nvidia-smi"))
            raise devices.L2Unavailable(why.reason, why.remedy)
        return opened, refused

    def _note(self, refused: dict[int, Unavailable], sampled: int) -> None:
        self._notes.put(("", "", ""), "ok", f"{self._source} of {counted(sampled, 'GPU')}")
        for index, why in refused.items():
            self._notes.put(("l2", "", f"gpu {index}"), "unavailable", why.reason, why.remedy)
        if not self._banks:
            self._notes.put(
                ("l2", "bank_conflicts_per_s", ""),
                "unavailable",
                "not asked for: they take the place of the rest",
            )

    def _rows(self, readings: Sequence[Any]) -> Iterator[Batch]:
        from opusmon.collectors.l2 import metrics

        offset_ns = self._clock.anchor().offset_ns
        source = self.strings.intern(self._source)
        records = [
            metrics.record(
                one.end_wall_ns - offset_ns, one.device, one.dt_ns, source, metrics.fields(one.values)
            )
            for one in readings
        ]
        lost = [one.device for one in readings if one.overflow]
        for one in readings:
            key = ("l2", "", f"gpu {one.device}")
            if one.device in lost:
                self._notes.put(key, "error", "the hardware's buffer ran over: some samples are missing")
            else:
                self._notes.drop(key)
        if records:
            yield Batch(L2, L2.rows(records))

    def _account(self, meter: CostMeter) -> Iterator[Batch]:
        now = self._clock.now()
        if said := self._notes.due(now):
            yield status_batch(now, said, self.strings)
        if cost := meter.due([self], self.strings):
            yield cost


def _round(opened: Sequence[Any]) -> list[Any]:
    """One window of all devices at a time."""
    for device in opened:
        device.start()
    time.sleep(WINDOW_NS / 1e9)
    return [reading for device in opened if (reading := device.finish()) is not None]
