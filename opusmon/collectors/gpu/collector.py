"""The GPU collector: devices in NVML order, gathered once per tick; one that hangs holds up no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, ClassVar

from opusmon.channels import (
    COST,
    GPU,
    GPU_DEVICE,
    GPU_EVENT,
    GPU_PROCESS,
    KEYFRAME_NS,
    NVLINK,
    STATUS,
)
from opusmon.clock import NS, Clock
from opusmon.collectors.base import MIN_INTERVAL_NS, Status, Tick, Unavailable, every, status_batch
from opusmon.collectors.cost import CostMeter
from opusmon.collectors.crew import Crew, Job, Round
from opusmon.collectors.gpu.board import Board
from opusmon.collectors.gpu.device import Device, Surroundings
from opusmon.collectors.gpu.events import Waiter
from opusmon.collectors.gpu.gpm import MIN_WINDOW_NS
from opusmon.collectors.gpu.nvml import (
    FACILITY_LOST,
    CollectorUnavailable,
    Nvml,
    load,
    missing,
    start,
    why_not,
)
from opusmon.collectors.gpu.probe import probe
from opusmon.collectors.gpu.reading import DeviceFacts, Event, Reading, scope
from opusmon.collectors.missing import Missing
from opusmon.collectors.notes import Key
from opusmon.collectors.process_names import Users
from opusmon.schema import Batch, Channel, Rows, StringTable, join_rows

STALE_NS = 2 * NS
STALE_STEPS_S = (2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
"""Ages that a status row names: few, so that a long hang does not fill the string table."""


@dataclass(frozen=True, slots=True)
class Cadence:
    """How often things happen that are not on every tick.

    Attributes:
        slow_ns: processes, error counts, link states, MIG instances, cost rows.
        reprobe_ns: lost devices are tried again and devices are counted.
    """

    slow_ns: int = 5 * NS
    reprobe_ns: int = 30 * NS


@dataclass(slots=True)
class Seat:
    """A device, the poll in progress and what it said last."""

    device: Device
    job: Job | None = None
    facts: tuple[DeviceFacts, ...] = ()
    facts_at: int = 0
    polled_at: int = 0


class GpuCollector:
    """NVIDIA GPUs through NVML. Run it in a child process: the driver can block its caller.

    Args:
        strings: text ids of the rows refer to it.
        clock: time of the rows.
        interval_ns: tick; raised to 250 ms, below which GPM windows give nothing.
        only_pids: processes to report in `gpu_process`, empty for all.
        cadence: how often slow values are read.
    """

    name: ClassVar[str] = "gpu"
    channels: Sequence[Channel] = (GPU, GPU_DEVICE, NVLINK, GPU_PROCESS, GPU_EVENT, STATUS, COST)

    def __init__(
        self,
        strings: StringTable,
        clock: Clock,
        interval_ns: int = NS,
        only_pids: frozenset[int] = frozenset(),
        *,
        cadence: Cadence | None = None,
    ) -> None:
        self.strings = strings
        self._clock = clock
        self._interval_ns = max(interval_ns, MIN_INTERVAL_NS)
        self._only_pids = only_pids
        self._cadence = cadence or Cadence()
        self._board = Board(self.name)
        self._seats: list[Seat] = []
        self._turns = 0

    @classmethod
    def probe(cls) -> Unavailable | None:
        """Whether a driver and the binding are here. Loads neither."""
        return probe()

    async def batches(self) -> AsyncIterator[Batch]:
        """Rows of all channels until closed.

        Raises:
            CollectorUnavailable: NVML cannot be used, or stopped working as a whole.
        """
        self._module = load()
        self._crew = Crew("gpu", asyncio.get_running_loop())
        self._counting: Round | None = None
        self._edge = Nvml(self._module)
        self._cost = CostMeter(self.name, self._clock, self._cadence.slow_ns, self._interval_ns)
        self._waiter: Waiter | None = None
        try:
            async for batch in self._started():
                yield batch
            async for tick in every(self._interval_ns, self._clock):
                for batch in await self._turn(tick):
                    yield batch
        finally:
            self._close()

    # Start and end

    async def _started(self) -> AsyncIterator[Batch]:
        """Initialise; while the driver keeps us waiting, say so."""
        start_up = self._crew.post([self._initialise])
        while not await start_up.wait(STALE_NS / NS):
            if stale := self._stale(self._edge):
                self._board.add("control", ("", "", ""), stale)
                now = self._clock.now()
                if said := self._board.due(now):
                    yield status_batch(now, said, self.strings)
        self._around, count = start_up.jobs[0].result()
        self._board.update("control", {})
        self._seat(count)
        self._counted_at = self._clock.now()
        for batch in await self._first():
            yield batch
        await asyncio.sleep(MIN_INTERVAL_NS / NS)

    def _initialise(self) -> tuple[Surroundings, int]:
        """On a thread of the crew: load the library, count devices, begin to wait for events."""
        start(self._edge)
        count = self._edge.call("nvmlDeviceGetCount")
        if isinstance(count, Missing):
            raise why_not(count, self._edge)
        if count == 0:
            raise CollectorUnavailable(
                "the NVIDIA driver sees no GPU", "check nvidia-smi -L; in a container run it with --gpus all"
            )
        driver = self._edge.call("nvmlSystemGetDriverVersion")
        self._waiter = waiter = Waiter(Nvml(self._module), self._clock)
        around = Surroundings(
            self._clock,
            "" if isinstance(driver, Missing) else driver,
            waiter,
            Users(),
            self._only_pids,
            self._cadence.slow_ns,
            self._cadence.reprobe_ns,
        )
        return around, count

    async def _first(self) -> list[Batch]:
        """Open the devices: what they are, and what cannot be had."""
        batches = await self._gather(Tick(self._clock.now(), late=False, missed=0))
        opened = [seat for seat in self._seats if seat.device.lost is None]
        if not opened:
            failed = self._seats[0].device.lost
            raise why_not(failed, self._edge) if failed else CollectorUnavailable("no GPU answers")
        return batches

    def _seat(self, count: int) -> None:
        for index in range(len(self._seats), count):
            self._seats.append(Seat(Device(Nvml(self._module), index, self._around)))

    def _close(self) -> None:
        """End promptly: threads inside the driver are left behind, and then so is the library."""
        busy = self._edge.current is not None or any(seat.job and not seat.job.done for seat in self._seats)
        quiet = self._waiter is None or self._waiter.close(1.0)
        if quiet and not busy and self._waiter is not None:
            self._crew.run_last(self._shut_down, 1.0)
        self._crew.close()

    def _shut_down(self) -> None:
        for seat in self._seats:
            seat.device.close()
        self._edge.call("nvmlShutdown")

    # A tick

    async def _turn(self, tick: Tick) -> list[Batch]:
        self._cost.late += tick.late
        batches = await self._gather(tick)
        await self._recount()
        self._check_all_lost()
        return batches

    async def _gather(self, tick: Tick) -> list[Batch]:
        """Poll every free device and collect what is ready by the deadline; late answers come with the next tick."""
        readings = self._ready()
        polls = self._submit()
        deadline_s = (tick.due + self._interval_ns // 2 - self._clock.now()) / NS
        if polls is not None:
            await polls.wait(max(deadline_s, 0.05))
        readings += self._ready()
        self._note_stale()
        self._turns += 1
        return self._batches(readings)

    def _submit(self) -> Round | None:
        """Have every device whose last poll has returned polled; slow reads are spread over the ticks."""
        slow_every = max(1, round(self._cadence.slow_ns / self._interval_ns))
        now = self._clock.now()
        free = [s for s in self._seats if s.job is None and now - s.polled_at >= MIN_WINDOW_NS]
        if not free:
            return None
        turns = [
            partial(seat.device.turn, (self._turns + seat.device.index) % slow_every == 0) for seat in free
        ]
        polls = self._crew.post(turns)
        for seat, job in zip(free, polls.jobs, strict=True):
            seat.polled_at, seat.job = now, job
        return polls

    def _ready(self) -> list[Reading]:
        return [reading for seat in self._seats if (reading := self._take(seat)) is not None]

    def _take(self, seat: Seat) -> Reading | None:
        if seat.job is None or not seat.job.done:
            return None
        reading: Reading = seat.job.result()
        seat.job = None
        fatal = reading.codes & FACILITY_LOST
        if fatal:
            raise why_not(missing(min(fatal), "NVML"), self._edge)
        self._board.update(scope(seat.device.index), reading.missing)
        if reading.facts:
            facts = tuple(reading.facts)
            seat.facts_at = seat.facts_at if facts == seat.facts else 0
            seat.facts = facts
        return reading

    async def _recount(self) -> None:
        """Every 30 s: devices that appeared or are no longer listed."""
        now = self._clock.now()
        if now - self._counted_at < self._cadence.reprobe_ns or (self._counting and not self._counting.done):
            return
        self._counted_at = now
        self._counting = self._crew.post([lambda: self._edge.call("nvmlDeviceGetCount")])
        if not await self._counting.wait(self._interval_ns / 4 / NS):
            return
        count = self._counting.jobs[0].result()
        if isinstance(count, Missing):
            return
        self._seat(count)
        for seat in self._seats:
            seat.device.listed = seat.device.index < count

    def _check_all_lost(self) -> None:
        """Once every device stayed lost over a new try, only initialising NVML again can help."""
        devices = [seat.device for seat in self._seats]
        if all(device.lost is not None and device.failed_probes > 0 for device in devices):
            why = devices[0].lost
            raise CollectorUnavailable("every GPU is lost", why.remedy if why else "")

    # Stale

    def _stale(self, edge: Nvml) -> Missing | None:
        """What to say about a call that does not return; None while it is young."""
        current = edge.current
        if current is None:
            return None
        age_ns = self._clock.now() - current[1]
        if age_ns < STALE_NS:
            return None
        seconds = max(step for step in STALE_STEPS_S if step * NS <= age_ns)
        remedy = "look for 'NVRM: Xid' in dmesg; a GPU stuck in the driver needs a reset or a reboot"
        return Missing("stale", f"{current[0]} has not returned for {seconds} s", remedy)

    def _note_stale(self) -> None:
        for seat in self._seats:
            stale = self._stale(seat.device.nvml) if seat.job is not None else None
            if stale is not None:
                where = scope(seat.device.index)
                self._board.add(where, ("gpu", "", where), stale)
        reasons: dict[Key, Missing] = {}
        if self._waiter is not None:
            why = self._stale(self._waiter.nvml) or self._waiter.failure
            reasons = {("gpu_event", "", scope(gpu)): no for gpu, no in self._waiter.refused.items()}
            if why:
                reasons["gpu_event", "", ""] = why
        self._board.update("events", reasons)

    # Rows

    def _batches(self, readings: list[Reading]) -> list[Batch]:
        """One batch per channel."""
        now = self._clock.now()
        links = [reading.nvlink for reading in readings if reading.nvlink is not None]
        parts: list[tuple[Channel, Rows | list[Any]]] = [
            (GPU_DEVICE, list(self._facts_due(now))),
            (GPU, [record for reading in readings for record in reading.gpu]),
            (NVLINK, join_rows(links, NVLINK) if links else []),
            (GPU_PROCESS, [self._words(row, (4, 5, 6)) for reading in readings for row in reading.processes]),
            (GPU_EVENT, [self._words(event, (3, 5)) for event in self._events(readings)]),
        ]
        batches = [Batch(channel, _rows(channel, part)) for channel, part in parts if len(part)]
        statuses: list[Status] = self._board.due(now)
        if statuses:
            batches.append(status_batch(now, statuses, self.strings))
        cost = self._cost.due(self._edges(), self.strings)
        return [*batches, cost] if cost else batches

    def _edges(self) -> list[Nvml]:
        return [self._edge, *(seat.device.nvml for seat in self._seats)]

    def _events(self, readings: list[Reading]) -> list[Event]:
        waited = self._waiter.drain() if self._waiter else []
        for event in waited:
            if event.kind == "mig" and 0 <= event.gpu < len(self._seats):
                self._seats[event.gpu].device.refresh_mig = True
        return [*waited, *(event for reading in readings for event in reading.events)]

    def _facts_due(self, now: int) -> Iterator[tuple[Any, ...]]:
        """Devices that changed, and all of them every 60 s."""
        for seat in self._seats:
            if not seat.facts or (seat.facts_at and now - seat.facts_at < KEYFRAME_NS):
                continue
            seat.facts_at = now
            for facts in seat.facts:
                yield (now, *self._words(facts, (2, 3, 4, 5)))

    def _words(self, row: Any, places: Iterable[int]) -> tuple[Any, ...]:
        """A row in words as a record: the text at `places` becomes ids."""
        record = list(astuple(row))
        for place in places:
            record[place] = self.strings.intern(record[place])
        return tuple(record)


def _rows(channel: Channel, part: Any) -> Rows:
    return channel.rows(part) if isinstance(part, list) else part
