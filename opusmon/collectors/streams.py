"""CUDA streams: what the host does to them, by probes on libcuda, without touching the processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal

from opusmon.channels import COST, STATUS, STREAM
from opusmon.clock import NS, Clock
from opusmon.collectors import facilities_ebpf as ebpf
from opusmon.collectors.base import MIN_INTERVAL_NS, Tick, Unavailable, every, status_batch
from opusmon.collectors.ebpf import probes
from opusmon.collectors.ebpf.attach import Libraries
from opusmon.collectors.ebpf.budget import Budget, Bursts
from opusmon.collectors.ebpf.errands import Errands
from opusmon.collectors.ebpf.hit_price import ASSUMED, price_of
from opusmon.collectors.ebpf.libcuda import Scan, Scanner
from opusmon.collectors.ebpf.meter import Meter
from opusmon.collectors.ebpf.names import Names
from opusmon.collectors.ebpf.stream_rows import Coverage
from opusmon.collectors.ebpf.stream_table import StreamTable, cflags
from opusmon.collectors.ebpf.stream_timing import BURST_NS, TimedBursts, TimedLaunches
from opusmon.collectors.ebpf.symbols import ENTRIES
from opusmon.collectors.facilities import Host, lacking
from opusmon.collectors.notes import Notes, hidden
from opusmon.schema import Batch, Channel, StringTable
from opusmon.text import counted

NEEDS = (
    ebpf.lockdown,
    ebpf.kernel_options,
    ebpf.perf_event_paranoid,
    ebpf.libbpf,
    ebpf.privileges,
)
"""Privileges last: the command that gives them also starts opusmon. bcc and headers stand in for libbpf."""

SCAN_NS = 2 * NS
MARGIN_NS = 100_000_000
"""Probes for a burst are set so long before its interval begins; setting them takes some 5 ms."""

_Sampled = Literal["launch", "poll"]
_SAMPLED: Mapping[_Sampled, tuple[str, str]] = {
    "launch": ("launches", "kernel launches"),
    "poll": ("not_ready", "polls"),
}
"""Group to the field that is missing between bursts, and what is counted."""
_PARTS: Mapping[_Sampled | Literal["timing"], float] = {"launch": 0.7, "poll": 0.15, "timing": 0.15}
"""Of the budget. Timing gets little though a call has two hits: of times a sample will do, and it is short."""


def probe(host: Host | None = None) -> Unavailable | None:
    """What this host lacks, with the commands that mend it; None when nothing. Cheap, never raises."""
    missing = lacking(NEEDS, host or Host())
    if not missing:
        return None
    reason = "; ".join(f"{one.name}: {one.found}, {one.reason}" for one in missing)
    commands = [one.remedy for one in missing if one.remedy and not one.remedy[0].isupper()]
    steps = [one.remedy for one in missing if one.remedy[:1].isupper()]
    return Unavailable(reason, " && ".join(dict.fromkeys(commands)) or " ".join(dict.fromkeys(steps)))


class StreamsCollector:
    """Launches, copies and waits per process and stream. Run it in a child process, as root.

    Probes are loaded and set when the first process that maps libcuda is found, and stay set on each such file.
    Kernel launches and polls can be so many that counting them costs more than the budget; then they are counted in
    one interval of every N, and are NaN in the others. Launch calls are timed from entry to return, in bursts of
    0.25 s likewise: those that began and ended within one. Their time includes what the probes themselves take of it,
    0.8 us measured.

    Args:
        strings: text ids of the rows refer to it.
        clock: time of the rows.
        interval_ns: tick; raised to 250 ms.
        only_pids: processes to report, empty for all.
        launch_budget_pct: what counting launches, counting polls and timing launch calls may cost together, in
            percent of one core; see `_PARTS`.
        make_backend: loads the BPF programs of a source, from its name and compiler flags.
    """

    name: ClassVar[str] = "streams"
    channels: Sequence[Channel] = (STREAM, STATUS, COST)

    def __init__(
        self,
        strings: StringTable,
        clock: Clock,
        interval_ns: int = NS,
        only_pids: frozenset[int] = frozenset(),
        *,
        launch_budget_pct: float = 1.0,
        make_backend: Callable[[str, Sequence[str]], probes.Backend] = probes.load,
    ) -> None:
        self.strings = strings
        self._clock = clock
        self._interval_ns = max(interval_ns, MIN_INTERVAL_NS)
        self._only_pids = only_pids
        self._budget_pct = launch_budget_pct
        self._make_backend = make_backend
        self._scanner = Scanner(only_pids=only_pids)
        self._notes = Notes(self.name)
        self._price = ASSUMED
        self._budget = Budget(launch_budget_pct, _PARTS)
        self._bursts: dict[_Sampled, Bursts] = {group: Bursts(launch_budget_pct) for group in _SAMPLED}
        self._since: dict[_Sampled, int | None] = dict.fromkeys(_SAMPLED)
        self._timing: TimedBursts | None = None
        self._scan = Scan()
        self._scanned_at: int | None = None
        self._backend: probes.Backend | None = None
        self._libraries: Libraries | None = None
        self._timed: TimedLaunches | None = None
        self._table: StreamTable | None = None
        self._read_at = 0

    @classmethod
    def probe(cls) -> Unavailable | None:
        """What this host lacks; None when nothing."""
        return probe()

    async def batches(self) -> AsyncIterator[Batch]:
        """Rows of all channels until closed.

        Raises:
            ProbesUnavailable: the probes cannot be loaded.
        """
        self._errands = Errands("ebpf")
        self._meter = Meter(self.name, self._clock, self._interval_ns)
        try:
            await self._look()
            async for tick in every(self._interval_ns, self._clock):
                for batch in self._turn(tick):
                    yield batch
        finally:
            self._close()

    def _close(self) -> None:
        """Remove the probes; the kernel takes 0.2 s for all, or about 0.1 s for each where it removes one at a time."""
        self._errands.close(self._release)

    def _release(self) -> None:
        if self._backend is not None:
            self._backend.close()
        for libraries in (self._libraries, self._timed):
            if libraries is not None:
                libraries.close()

    # A turn

    def _turn(self, tick: Tick) -> Iterator[Batch]:
        now = self._clock.now()
        self._meter.late += tick.late
        self._errands.reap()
        if self._table is not None:
            yield from self._streams(self._table, now, tick)
        if self._scanned_at is not None and now - self._scanned_at >= SCAN_NS - self._interval_ns // 2:
            self._scanned_at = None
            self._errands.start(self._look())
        self._note()
        if said := self._notes.due(now):
            yield status_batch(now, said, self.strings)
        if cost := self._meter.due(self.strings):
            yield cost

    def _streams(self, table: StreamTable, now: int, tick: Tick) -> Iterator[Batch]:
        dt_ns = now - self._read_at
        covered = {group: self._covered(group) for group in _SAMPLED}
        launches_since = self._since["launch"] if covered["launch"] else None
        batch = table.read(now, dt_ns, Coverage(launches_since, covered["poll"]))
        hits = table.hits()
        self._read_at = now
        self._meter.hits += hits.total
        self._meter.hit_ns = self._hit_ns("launch")
        self._meter.lost += hits.lost
        for group in _SAMPLED:
            if covered[group]:
                self._budget.saw(group, getattr(hits, group), dt_ns, self._hit_ns(group))
        for group in _SAMPLED:
            self._ration(group, getattr(hits, group), dt_ns, covered[group], tick.due + self._interval_ns)
        if batch is not None:
            yield batch

    def _covered(self, group: _Sampled) -> bool:
        since = self._since[group]
        return since is not None and since <= self._read_at

    # The budget

    def _hit_ns(self, group: _Sampled) -> int:
        cheap = self._libraries is None or self._libraries.cheap
        return self._price.hit_ns(cheap=cheap) if group == "launch" else self._price.pair_ns(cheap=cheap)

    def _ration(self, group: _Sampled, count: int, dt_ns: int, covered: bool, next_due: int) -> None:
        """Decide whether a group of probes stays on, and set or remove it."""
        bursts = self._bursts[group]
        if covered:
            bursts.allow(self._budget.allowed_pct(group))
            bursts.measured(count, dt_ns, self._hit_ns(group))
            if not bursts.wanted:
                self._errands.start(self._switch_off(group))
        else:
            bursts.passed(count)
        if bursts.soon:
            margin = min(MARGIN_NS, self._interval_ns // 4)
            self._errands.start(self._switch_on(group, (next_due - margin - self._clock.now()) / NS))

    def _allow_timing(self, hits: int, dt_ns: int, hit_ns: int) -> float:
        self._budget.saw("timing", hits, dt_ns, hit_ns)
        return self._budget.allowed_pct("timing")

    async def _switch_off(self, group: _Sampled) -> None:
        assert self._libraries is not None  # noqa: S101  (it was on)
        self._since[group] = None
        self._tell()
        await self._errands.run(self._libraries.switch, group, False)

    async def _switch_on(self, group: _Sampled, wait_s: float) -> None:
        assert self._libraries is not None  # noqa: S101  (it was on before)
        await asyncio.sleep(max(0.0, wait_s))
        await self._errands.run(self._libraries.switch, group, True)
        self._since[group] = self._clock.now()
        self._tell()

    def _tell(self) -> None:
        if self._table is not None:
            self._table.count_launches(self._since["launch"])

    # Work on the side

    async def _look(self) -> None:
        """Find the processes that use CUDA, and probe the libraries that are new."""
        now = self._clock.now()
        self._scan = await self._errands.run(self._scanner.scan, now)
        if self._scan.processes:
            libraries = self._libraries or await self._load()
            await self._errands.run(libraries.follow, self._scan)
            if self._timed is not None:
                await self._errands.run(self._timed.follow, self._scan)
            if self._table is None:
                self._begin()
        self._scanned_at = now

    async def _load(self) -> Libraries:
        self._backend = await self._errands.run(self._make_backend, self.name, cflags())
        self._libraries = Libraries(self._backend, ENTRIES, self._scanner.open)
        self._libraries.on |= {"launch", "poll"}
        self._timed = TimedLaunches(self._backend, self._scanner.open)
        return self._libraries

    def _begin(self) -> None:
        """All probes are set: from now on the counts are complete."""
        assert self._backend is not None  # noqa: S101  (the libraries came with it)
        self._table = StreamTable(self._backend, Names(self.strings), self._only_pids)
        self._read_at = self._clock.now()
        self._since = dict.fromkeys(_SAMPLED, self._read_at)
        self._tell()
        if self._timed is not None:
            words = (self._timed, self._table, self._clock, self._errands.run, self._allow_timing)
            self._timing = TimedBursts(*words)
        self._errands.start(self._find_price(self._backend))
        if self._timing is not None:
            self._errands.start(self._timing.run())

    async def _find_price(self, backend: probes.Backend) -> None:
        self._price = await self._errands.run(price_of, backend)
        if self._timing is not None:
            self._timing.price = self._price

    # What it says about itself

    def _note(self) -> None:
        self._notes.put(("", "", ""), "ok", self._sight())
        if self._scan.hidden:
            self._notes.put(("", "", "hidden"), *hidden(self._scan.hidden))
        else:
            self._notes.drop(("", "", "hidden"))
        if self._backend is not None:
            self._notes.put(("cost", "call_ns", ""), "ok", self._price.words())
        for libraries in (self._timed, self._libraries):
            for path, reason in (libraries.refused if libraries is not None else {}).items():
                self._notes.put(("stream", "", path), "error", reason)
        for group in _SAMPLED:
            every_s = self._interval_ns * self._bursts[group].every / NS
            field, words = _SAMPLED[group]
            self._note_bursts(field, f"{words} are counted", "counting", self._interval_ns / NS, every_s)
        cycle_s = self._timing.cycle_ns / NS if self._timing is not None else 0.0
        self._note_bursts("launch_call_ns", "launch calls are timed", "timing", BURST_NS / NS, cycle_s)

    def _sight(self) -> str:
        processes = len(self._scan.processes)
        if not processes:
            return "no process maps libcuda"
        files = self._libraries.probed if self._libraries is not None else 0
        words = "1 process maps" if processes == 1 else f"{processes} processes map"
        origin = f"; loaded by {self._backend.origin}" if self._backend is not None else ""
        return f"probes are on {counted(files, 'libcuda file')}, {words} one{origin}"

    def _note_bursts(self, field: str, words: str, doing: str, burst_s: float, every_s: float) -> None:
        if every_s <= burst_s:
            self._notes.drop(("stream", field, ""))
            return
        burst = f"{words} for {burst_s:g} s of every {every_s:.3g} s"
        dear = f"{doing} all would cost too much of the {self._budget_pct:g} % of a core that probes may take"
        self._notes.put(("stream", field, ""), "sampled", f"{burst}: {dear}")
