"""Stalls: what keeps the threads that feed a GPU from doing so, by probes on libcuda, libssl and the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

from opusmon.channels import COST, STALL, STATUS
from opusmon.clock import NS, Clock
from opusmon.collectors import streams
from opusmon.collectors.base import MIN_INTERVAL_NS, Tick, Unavailable, every, status_batch
from opusmon.collectors.ebpf import probes, tracefs
from opusmon.collectors.ebpf.errands import Errands
from opusmon.collectors.ebpf.hit_price import ASSUMED, price_of
from opusmon.collectors.ebpf.libcuda import LIBSSL, Scan, Scanner
from opusmon.collectors.ebpf.maps import Table
from opusmon.collectors.ebpf.names import Names
from opusmon.collectors.ebpf.ring import Ring
from opusmon.collectors.ebpf.stacks import Symboliser
from opusmon.collectors.ebpf.stall_cost import StallMeter
from opusmon.collectors.ebpf.stall_faults import Faults
from opusmon.collectors.ebpf.stall_maps import (
    CAPTURE,
    EVENT,
    RING_B,
    Counts,
    OpenWait,
    StallMaps,
    cflags,
    is_capturing,
)
from opusmon.collectors.ebpf.stall_notes import Sight, statements
from opusmon.collectors.ebpf.stall_probes import StallProbes
from opusmon.collectors.ebpf.stall_ration import GROUPS, Ration, Sampled
from opusmon.collectors.ebpf.stall_rows import (
    FEW,
    Interner,
    Sieve,
    Stall,
    from_event,
    from_slow,
    is_urgent,
    of_pids,
)
from opusmon.collectors.ebpf.stall_warm import AFTER_NS, QUIET_NS, Lives
from opusmon.collectors.ebpf.stall_words import sequence
from opusmon.collectors.facilities import Host
from opusmon.collectors.notes import Key, Notes
from opusmon.schema import Batch, Channel, StringTable

SCAN_NS = 2 * NS
LOOK_S, PRESSED_S = 0.05, 0.002
"""The ring is looked at so often, the second while it fills quickly: at a million events a second it is a quarter full
after 17 ms."""
KEPT_NS = 200_000_000
"""Events that are not urgent stay in the ring so long: what comes in ones and twos costs 0.6 ms each time."""

NEEDS = streams.NEEDS
"""Facilities it needs; the same probes on the same files."""


def probe(host: Host | None = None) -> Unavailable | None:
    """What this host lacks, with the commands that mend it; None when nothing. Cheap, never raises."""
    return streams.probe(host)


class StallsCollector:
    """Waits, scheduling, locks, page faults, memory and code, compilers, captures, TLS. Run it in a child process, as root.

    Nothing goes to user space per launch. Launches and polls are watched within a budget, and whenever graphs are
    captured (for 30 s in a row at most). A thread counts from its first call that is probed.

    A row is made when a stall ends; a wait that has not ended for 10 s is a status. Rows beyond 20 of one thread and
    kind in an interval are folded into one: its `count` is theirs, its `dur_ns` their sum. The call that broke a
    capture is named where it is a launch, wait, poll, allocation, loading of code or creation of a context; of several
    captures open at once in a process, the first such call is named for each that it broke. `stack` is then that call's.

    Args:
        strings: text ids of the rows refer to it.
        clock: time of the rows.
        interval_ns: tick; raised to 250 ms.
        only_pids: processes to report, empty for all that use CUDA; their TLS handshakes are reported even if they
            do not use CUDA.
        threshold_ns: shorter waits, and shorter times off the CPU, are not reported.
        tls_threshold_ns: faster handshakes that succeed are not reported.
        faults_per_s: page faults a second that make a storm.
        warm_quiet_ns: see `stall_warm.is_warm`.
        warm_after_ns: see `stall_warm.is_warm`.
        budget_pct: what watching launches may cost, and likewise watching polls, in percent of one core.
        make_backend: loads the BPF programs of a source, from its name and compiler flags.
    """

    name: ClassVar[str] = "stalls"
    channels: Sequence[Channel] = (STALL, STATUS, COST)

    def __init__(
        self,
        strings: StringTable,
        clock: Clock,
        interval_ns: int = NS,
        only_pids: frozenset[int] = frozenset(),
        *,
        threshold_ns: int = 5_000_000,
        tls_threshold_ns: int = 500_000_000,
        faults_per_s: float = 20_000,
        warm_quiet_ns: int = QUIET_NS,
        warm_after_ns: int = AFTER_NS,
        budget_pct: float = 1.0,
        make_backend: Callable[[str, Sequence[str]], probes.Backend] = probes.load,
    ) -> None:
        self.strings = strings
        self._clock = clock
        self._interval_ns = max(interval_ns, MIN_INTERVAL_NS)
        self._only_pids = only_pids
        self._thresholds = (threshold_ns, tls_threshold_ns)
        self._make_backend = make_backend
        self._scanner = Scanner(only_pids=only_pids)
        self._tls_scanner = Scanner(library=LIBSSL)
        self._symboliser = Symboliser(self._scanner.open)
        self._notes = Notes(self.name)
        self._noted: set[Key] = set()
        self._names = Names(strings)
        self._interner = Interner(strings)
        self._sieve = Sieve()
        self._lives = Lives(warm_quiet_ns, warm_after_ns)
        self._faults = Faults(faults_per_s)
        self._ration = Ration(budget_pct)
        self._price = ASSUMED
        self._scan, self._tls_scan = Scan(), Scan()
        self._scanned_at: int | None = None
        self._probes: StallProbes | None = None
        self._maps: StallMaps | None = None
        self._ring: Ring | None = None
        self._read_at = 0
        self._drained_at = 0
        self._lost = 0
        self._open: list[OpenWait] = []
        self._stalls: list[Stall] = []
        self._switching: set[Sampled] = set()

    @classmethod
    def probe(cls) -> Unavailable | None:
        """What this host lacks; None when nothing."""
        return probe()

    async def batches(self) -> AsyncIterator[Batch]:
        """Rows of all channels until closed.

        Raises:
            ProbesUnavailable: the probes cannot be compiled or loaded.
        """
        tracefs.ensure()  # what comes of it is seen at each tracepoint
        self._errands = Errands("ebpf")
        self._reading = ThreadPoolExecutor(1, "symbols")
        self._meter = StallMeter(self.name, self._clock, self._interval_ns)
        try:
            await self._look()
            async for tick in every(self._interval_ns, self._clock):
                for batch in await self._turn(tick):
                    yield batch
        finally:
            self._close()

    def _close(self) -> None:
        """Remove the probes; the kernel takes 0.2 s for all, or about 0.1 s for each where it removes one at a time."""
        self._errands.cancel()
        self._reading.shutdown(wait=True, cancel_futures=True)
        self._symboliser.close()
        if self._ring is not None:
            self._ring.close()
        self._errands.close(self._probes.close if self._probes is not None else None)

    # A turn

    async def _turn(self, tick: Tick) -> list[Batch]:
        now = self._clock.now()
        self._meter.late += tick.late
        self._errands.reap()
        found: list[Batch | None] = []
        if self._maps is not None:
            found.append(await self._rows(self._maps, now))
        if self._scanned_at is not None and now - self._scanned_at >= SCAN_NS - self._interval_ns // 2:
            self._scanned_at = None
            self._errands.start(self._look())
        self._note()
        if said := self._notes.due(now):
            found.append(status_batch(now, said, self.strings))
        found.append(self._meter.due(self.strings))
        return [batch for batch in found if batch is not None]

    async def _rows(self, maps: StallMaps, now: int) -> Batch | None:
        """Rows of the interval that ends now; probes go on or off for the next one."""
        counts = maps.counts()
        slow = maps.slow()
        processes = maps.processes()
        await self._drain(maps)
        self._meter.lost += self._sieve.dropped
        self._meter.hit_ns = self._price.hit_ns(cheap=self._probes is None or self._probes.cheap)
        self._meter.add(counts)
        self._lost += counts.lost + self._sieve.dropped
        self._stalls.extend(self._sieve.rest())
        await self._add_slow(maps, slow, now)
        self._stalls.extend(self._of_processes(processes, now))
        if any(is_capturing(proc, now) for proc in processes.values()):
            self._ration.hold.saw(now)
        self._open = maps.open_waits(now, self._only_pids)
        self._switch(counts, now)
        self._read_at = now
        stalls, self._stalls = self._stalls, []
        pids = {stall.pid for stall in stalls} | self._scan.processes.keys()
        return self._interner.batch(stalls, self._names.processes(pids, now))

    def _of_processes(self, processes: dict[int, Any], now: int) -> list[Stall]:
        """Storms of page faults; and who was active, for the next interval's judgement of warmth."""
        for pid, proc in processes.items():
            self._lives.active(pid, int(proc["active_at"]), now)
        self._lives.keep(processes)
        faults = {pid: int(proc["faults"]) for pid, proc in processes.items() if self._reports(pid)}
        return self._faults.storms(faults, now)

    async def _add_slow(self, maps: StallMaps, slow: tuple[Table, Table], now: int) -> None:
        """Memory and code of processes that are warm. Allocation in stream order is cheap: only long sums of it."""
        due = []
        for key, value in zip(*slow, strict=True):
            pid, stall = int(value["tgid"]), from_slow(key, value)
            warm = self._lives.slow(pid, stall.t, now)
            cheap = stall.call == "cuMemAllocAsync" and stall.dur_ns < self._thresholds[0]
            if warm and not cheap and self._reports(pid):
                due.append((stall, int(value["stack"])))
        if due:
            self._stalls.extend(await self._read(self._with_stacks, maps, due, now))

    def _with_stacks(self, maps: StallMaps, stalls: Sequence[tuple[Stall, int]], now: int) -> list[Stall]:
        return [replace(stall, stack=self._stack(maps, stall.pid, number, now)) for stall, number in stalls]

    def _reports(self, pid: int) -> bool:
        return not self._only_pids or pid in self._only_pids

    # The ring

    async def _drain(self, maps: StallMaps) -> None:
        """Take what is in the ring, while the processes live whose stacks it names."""
        if self._ring is None:
            return
        now = self._drained_at = self._clock.now()
        events = self._sieve.admit(of_pids(self._ring.take(), self._only_pids))
        if not len(events):
            return
        if (events["kind"] == CAPTURE).any():
            self._ration.hold.saw(now)
        # The list may be another one by the time the answer is there.
        described = await self._read(self._described, maps, events, now)
        self._stalls.extend(described)

    def _described(self, maps: StallMaps, events: Table, now: int) -> list[Stall]:
        """Events with their stacks and sequences. Reads files."""
        aborted = ((events["kind"] == CAPTURE) & (events["code"] != 0)).any()
        before = {t: sequence(recent) for t, recent in maps.sequences().items()} if aborted else {}
        return [
            from_event(
                event,
                before.get(int(event["t"]), ""),
                self._stack(maps, int(event["tgid"]), int(event["stack"]), now),
            )
            for event in events
        ]

    def _stack(self, maps: StallMaps, pid: int, number: int, now: int) -> str:
        return self._symboliser.text(pid, maps.stack(number), now)

    async def _drains(self, maps: StallMaps) -> None:
        assert self._ring is not None  # noqa: S101  (it was made before)
        while True:
            await asyncio.sleep(PRESSED_S if self._ring.pressed else LOOK_S)
            if self._clock.now() - self._drained_at >= KEPT_NS or is_urgent(self._ring.peek(FEW)):
                await self._drain(maps)

    # The budget

    def _switch(self, counts: Counts, now: int) -> None:
        """Set or remove the probes of a group, which the kernel takes its time for."""
        assert self._probes is not None  # noqa: S101  (the maps came with them)
        for group in GROUPS:
            hits = counts.launch if group == "launch" else counts.poll
            wanted = self._ration.wanted(group, hits, self._read_at, now, self._meter.hit_ns)
            if wanted != self._probes.is_on(group) and group not in self._switching:
                self._switching.add(group)
                self._errands.start(self._set(self._probes, group, wanted))

    async def _set(self, setter: StallProbes, group: Sampled, on: bool) -> None:
        self._ration.since[group] = None
        await self._errands.run(setter.switch, group, on)
        self._ration.since[group] = self._clock.now() if on else None
        self._switching.discard(group)

    # Work on the side

    async def _look(self) -> None:
        """Find the processes that matter, and probe the libraries that are new."""
        now = self._clock.now()
        self._scan = await self._errands.run(self._scanner.scan, now)
        pids = self._scan.processes.keys() | self._only_pids
        self._tls_scan = await self._errands.run(self._tls_scanner.scan, now, pids)
        if self._scan.processes or self._tls_scan.processes:
            if self._probes is None:
                self._probes = await self._errands.run(self._load)
            await self._errands.run(self._probes.follow, self._scan, self._tls_scan)
            if self._maps is None:
                self._begin(self._probes)
        self._scanned_at = now

    def _load(self) -> StallProbes:
        backend = self._make_backend(self.name, cflags())
        return StallProbes(backend, StallMaps(backend), self._scanner.open, *self._thresholds)

    def _begin(self, setter: StallProbes) -> None:
        """All probes are set: from now on nothing is missed."""
        self._ring = Ring(setter.backend.map_fd("ring"), RING_B, EVENT)
        self._read_at = self._clock.now()
        self._ration.since = dict.fromkeys(GROUPS, self._read_at)
        self._maps = setter.maps
        self._errands.start(self._find_price(setter.backend))
        self._errands.start(self._drains(setter.maps))

    async def _find_price(self, backend: probes.Backend) -> None:
        self._price = await self._errands.run(price_of, backend)

    async def _read(self, function: Callable[..., Any], *words: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._reading, function, *words)

    def _note(self) -> None:
        said = statements(self._sight())
        for key in self._noted - said.keys():
            self._notes.drop(key)
        for key, words in said.items():
            self._notes.put(key, *words)
        self._noted = set(said)

    def _sight(self) -> Sight:
        return Sight(
            self._scan,
            self._tls_scan,
            self._probes,
            self._ration,
            self._ring.peak() if self._ring is not None else 0.0,
            self._lost,
            self._interner.full,
            self._interval_ns,
            self._open,
            self._price,
        )
