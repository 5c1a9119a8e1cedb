"""CUDA streams: what the host does to them, by probes on libcuda, without touching the processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Literal

from opusmon.channels import COST, STATUS, STREAM
from opusmon.clock import NS, Clock
from opusmon.collectors import facilities_ebpf as ebpf
from opusmon.collectors.base import Tick, Unavailable, every, status_batch
from opusmon.collectors.ebpf import probes
from opusmon.collectors.ebpf.attach import Libraries
from opusmon.collectors.ebpf.budget import CHEAP_HIT_NS, DEAR_HIT_NS, Bursts
from opusmon.collectors.ebpf.libcuda import Scan, Scanner
from opusmon.collectors.ebpf.meter import Meter
from opusmon.collectors.ebpf.names import Names
from opusmon.collectors.ebpf.notes import Notes
from opusmon.collectors.ebpf.stream_rows import Coverage
from opusmon.collectors.ebpf.stream_table import Hits, StreamTable, cflags
from opusmon.collectors.ebpf.symbols import ENTRIES
from opusmon.collectors.facilities import Facility, Host, lacking
from opusmon.schema import Batch, Channel, StringTable

NEEDS = (
    ebpf.lockdown,
    ebpf.kernel_options,
    ebpf.perf_event_paranoid,
    ebpf.tracefs,
    ebpf.bcc,
    ebpf.headers,
    ebpf.privileges,
)
"""Privileges last: the command that gives them also starts opusmon."""

MIN_INTERVAL_NS = 250_000_000
SCAN_NS = 2 * NS
MARGIN_NS = 100_000_000
"""Probes for a burst are set so long before its interval begins; setting them takes some 5 ms."""

_Sampled = Literal["launch", "poll"]
_SAMPLED: dict[_Sampled, tuple[str, str]] = {
    "launch": ("launches", "kernel launches"),
    "poll": ("not_ready", "polls"),
}


def probe(host: Host | None = None) -> Unavailable | None:
    """What this host lacks, with the commands that mend it; None when nothing. Cheap, never raises."""
    view = host or Host()
    missing = [one for one in lacking(NEEDS, view) if not _brought_along(one, view)]
    if not missing:
        return None
    reason = "; ".join(f"{one.name}: {one.found}, {one.reason}" for one in missing)
    commands = [one.remedy for one in missing if one.remedy and not one.remedy[0].isupper()]
    steps = [one.remedy for one in missing if one.remedy[:1].isupper()]
    return Unavailable(reason, " && ".join(dict.fromkeys(commands)) or " ".join(dict.fromkeys(steps)))


def _brought_along(facility: Facility, host: Host) -> bool:
    """A bcc on the module path and headers named in the environment do as well as installed ones."""
    if facility.name == "bcc for Python":
        found = any(host.exists(f"{folder}/bcc/table.py") for folder in host.module_paths)
        return found and host.library("libbcc.so.0") is not None
    given = host.env.get("BCC_KERNEL_SOURCE", "")
    return facility.name == "kernel headers" and bool(given) and host.exists(f"{given}/include")


class StreamsCollector:
    """Launches, copies and waits per process and stream. Run it in a child process, as root.

    Probes are compiled and set when the first process that maps libcuda is found, and stay set on each such file.
    Kernel launches and polls can be so many that counting them costs more than the budget; then they are counted in
    one interval of every N, and are NaN in the others.

    Args:
        strings: text ids of the rows refer to it.
        clock: time of the rows.
        interval_ns: tick; raised to 250 ms.
        only_pids: processes to report, empty for all.
        launch_budget_pct: what counting launches may cost, and likewise counting polls, in percent of one core.
        make_backend: loads the BPF programs from source and compiler flags.
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
        make_backend: Callable[[str, Sequence[str]], probes.Backend] = probes.BccBackend,
    ) -> None:
        self.strings = strings
        self._clock = clock
        self._interval_ns = max(interval_ns, MIN_INTERVAL_NS)
        self._only_pids = only_pids
        self._budget_pct = launch_budget_pct
        self._make_backend = make_backend
        self._scanner = Scanner(only_pids=only_pids)
        self._notes = Notes(self.name)
        self._bursts: dict[_Sampled, Bursts] = {group: Bursts(launch_budget_pct) for group in _SAMPLED}
        self._since: dict[_Sampled, int | None] = dict.fromkeys(_SAMPLED)
        self._scan = Scan()
        self._scanned_at: int | None = None
        self._backend: probes.Backend | None = None
        self._libraries: Libraries | None = None
        self._table: StreamTable | None = None
        self._read_at = 0
        self._jobs: set[asyncio.Task[None]] = set()

    @classmethod
    def probe(cls) -> Unavailable | None:
        """What this host lacks; None when nothing."""
        return probe()

    async def batches(self) -> AsyncIterator[Batch]:
        """Rows of all channels until closed.

        Raises:
            ProbesUnavailable: the probes cannot be compiled or loaded.
        """
        self._pool = ThreadPoolExecutor(1, "ebpf")  # the backend is for one thread, and its calls block
        self._meter = Meter(self.name, self._clock, self._interval_ns)
        try:
            await self._look()
            async for tick in every(self._interval_ns, self._clock):
                for batch in self._turn(tick):
                    yield batch
        finally:
            self._close()

    def _close(self) -> None:
        """Remove the probes; the kernel takes about 0.1 s for each."""
        for job in self._jobs:
            job.cancel()
        self._pool.submit(self._release)
        self._pool.shutdown(wait=True)

    def _release(self) -> None:
        if self._backend is not None:
            self._backend.close()
        if self._libraries is not None:
            self._libraries.close()

    # A turn

    def _turn(self, tick: Tick) -> Iterator[Batch]:
        now = self._clock.now()
        self._meter.late += tick.late
        self._reap()
        if self._table is not None:
            yield from self._streams(self._table, now, tick)
        if self._scanned_at is not None and now - self._scanned_at >= SCAN_NS - self._interval_ns // 2:
            self._scanned_at = None
            self._start(self._look())
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
        self._meter.lost += hits.lost
        for group in _SAMPLED:
            self._ration(group, hits, dt_ns, covered[group], tick.due + self._interval_ns)
        if batch is not None:
            yield batch

    def _covered(self, group: _Sampled) -> bool:
        since = self._since[group]
        return since is not None and since <= self._read_at

    # The budget

    def _ration(self, group: _Sampled, hits: Hits, dt_ns: int, covered: bool, next_due: int) -> None:
        """Decide whether a group of probes stays on, and set or remove it."""
        bursts, count = self._bursts[group], getattr(hits, group)
        if covered:
            dear = self._libraries is not None and not self._libraries.cheap
            bursts.measured(count, dt_ns, DEAR_HIT_NS if dear else CHEAP_HIT_NS)
            if not bursts.wanted:
                self._start(self._switch_off(group))
        else:
            bursts.passed(count)
        if bursts.soon:
            margin = min(MARGIN_NS, self._interval_ns // 4)
            self._start(self._switch_on(group, (next_due - margin - self._clock.now()) / NS))

    async def _switch_off(self, group: _Sampled) -> None:
        assert self._libraries is not None  # noqa: S101  (it was on)
        self._since[group] = None
        self._tell()
        await self._aside(self._libraries.switch, group, False)

    async def _switch_on(self, group: _Sampled, wait_s: float) -> None:
        assert self._libraries is not None  # noqa: S101  (it was on before)
        await asyncio.sleep(max(0.0, wait_s))
        await self._aside(self._libraries.switch, group, True)
        self._since[group] = self._clock.now()
        self._tell()

    def _tell(self) -> None:
        if self._table is not None:
            self._table.count_launches(self._since["launch"])

    # Work on the side

    async def _look(self) -> None:
        """Find the processes that use CUDA, and probe the libraries that are new."""
        now = self._clock.now()
        self._scan = await self._aside(self._scanner.scan, now)
        if self._scan.processes:
            libraries = self._libraries or await self._load()
            await self._aside(libraries.follow, self._scan)
            if self._table is None:
                self._begin()
        self._scanned_at = now

    async def _load(self) -> Libraries:
        text = probes.source("streams.bpf.c")
        self._backend = await self._aside(self._make_backend, text, cflags())
        self._libraries = Libraries(self._backend, ENTRIES, self._scanner.open)
        self._libraries.on |= _SAMPLED.keys()
        return self._libraries

    def _begin(self) -> None:
        """All probes are set: from now on the counts are complete."""
        assert self._backend is not None  # noqa: S101  (the libraries came with it)
        self._table = StreamTable(self._backend, Names(self.strings), self._only_pids)
        self._read_at = self._clock.now()
        self._since = dict.fromkeys(_SAMPLED, self._read_at)
        self._tell()

    async def _aside(self, function: Callable[..., Any], *words: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *words)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._jobs.add(asyncio.create_task(work))

    def _reap(self) -> None:
        """Forget finished jobs; the failure of one ends the collector."""
        done = {job for job in self._jobs if job.done()}
        self._jobs -= done
        for job in done:
            job.result()

    # What it says about itself

    def _note(self) -> None:
        self._notes.put(("", "", ""), "ok", self._sight())
        self._notes.put(
            ("stream", "launch_call_ns", ""), "not_supported", "a probe on every return would cost too much"
        )
        hidden = self._scan.hidden
        if hidden:
            text = f"processes that may not be looked into: {hidden}"
            self._notes.put(("", "", "hidden"), "no_permission", text)
        else:
            self._notes.drop(("", "", "hidden"))
        for path, reason in (self._libraries.refused if self._libraries else {}).items():
            self._notes.put(("stream", "", path), "error", reason)
        for group in _SAMPLED:
            self._note_bursts(group)

    def _sight(self) -> str:
        processes = len(self._scan.processes)
        if not processes:
            return "no process maps libcuda"
        files = self._libraries.probed if self._libraries is not None else 0
        words = "1 process maps" if processes == 1 else f"{processes} processes map"
        return f"probes are on {files} libcuda file{'s' if files != 1 else ''}, {words} one"

    def _note_bursts(self, group: _Sampled) -> None:
        field, words = _SAMPLED[group]
        interval_s, n = self._interval_ns / NS, self._bursts[group].every
        if n == 1:
            self._notes.drop(("stream", field, ""))
            return
        reason = f"{words} are counted for {interval_s:g} s of every {n * interval_s:g} s: counting all would cost over {self._budget_pct:g} % of a core"
        self._notes.put(("stream", field, ""), "sampled", reason)
