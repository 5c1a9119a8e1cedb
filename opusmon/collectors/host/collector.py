"""The host collector: one reading a tick on a thread, because files under /proc can keep a reader waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

from opusmon.channels import CGROUP, HOST, PROCESS, STATUS
from opusmon.clock import NS, Clock
from opusmon.collectors.base import MIN_INTERVAL_NS, Unavailable, every, status_batch
from opusmon.collectors.crew import Crew, Round
from opusmon.collectors.host.cgroup_tree import hierarchies
from opusmon.collectors.host.cgroups import GroupRow, Groups
from opusmon.collectors.host.engines import Engines
from opusmon.collectors.host.files import read
from opusmon.collectors.host.machine import Machine
from opusmon.collectors.host.processes import Processes, ProcessRow
from opusmon.collectors.host.watchlist import MAX_PROCESSES, Seen, Watchlist
from opusmon.collectors.missing import Missing
from opusmon.collectors.notes import Key, Notes
from opusmon.collectors.process_names import OUTSIDE, Users, process_name
from opusmon.schema import Batch, Channel, StringTable

LOOK_NS = 5 * NS
STALE_NS = 2 * NS
_FIRST_WAIT_S = 1.0

_INIT_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO, fixed in the kernel since 3.8."""

_NO_SUCH_PROCESS = Missing("unavailable", "there is no such process, or it is hidden from this user")
_HELD_UP = "reading {} has not ended for over 2 s: a process or the machine is stuck"
_LOOK_FOR_STUCK = "ps -eo state,pid,wchan:32,comm | grep ^D"


class Looked(NamedTuple):
    """What a slow look found."""

    engines: dict[int, int]
    names: dict[int, str]
    hidden: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """What one turn found, before text is interned."""

    host: tuple[float, ...]
    processes: list[ProcessRow]
    groups: list[GroupRow]
    seen: dict[int, Seen]
    missing: dict[Key, Missing]


def _since_boot_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Reader:
    """Everything that is read in a turn; one thread at a time.

    Args:
        proc: the /proc folder.
        sys: the /sys folder.
        clock: time of the rows.
        since_boot_ns: time since boot, suspended time included.
    """

    def __init__(self, proc: Path, sys: Path, clock: Clock, since_boot_ns: Callable[[], int]) -> None:
        self._since_boot_ns = since_boot_ns
        self._machine = Machine(str(proc), str(sys), clock)
        self._processes = Processes(str(proc), clock, Users())
        self._groups = Groups(hierarchies(str(proc), str(sys)), clock)

    def read(self, pids: Mapping[int, str]) -> Reading:
        """Read the machine, these processes (with their names) and their groups."""
        host = self._machine.read()
        rows = self._processes.read(pids, self._since_boot_ns())
        lives = self._processes.lives
        groups = self._groups.read({life.cgroup: life.paths for life in lives.values() if life.paths})
        missing = self._machine.missing | self._processes.missing | self._groups.missing
        seen = {pid: Seen(life.born_at, life.started) for pid, life in lives.items()}
        return Reading(host, rows, groups, seen, missing)


class HostCollector:
    """The kernel's word on pressure, memory, control groups and the processes that serve. No root, no eBPF.

    Runs inside the main process. It is also a sink: processes in rows of `gpu_process` and `stream` are watched.

    Args:
        strings: text ids of the rows refer to it; pushed rows must use the same table.
        clock: time of the rows.
        interval_ns: tick; raised to 250 ms.
        only_pids: processes to report; empty for those on a GPU, those that use CUDA and known engines.
        proc: the /proc folder.
        sys: the /sys folder.
        since_boot_ns: time since boot, suspended time included.
    """

    name: ClassVar[str] = "host"
    channels: Sequence[Channel] = (HOST, CGROUP, PROCESS, STATUS)

    def __init__(
        self,
        strings: StringTable,
        clock: Clock,
        interval_ns: int = NS,
        only_pids: frozenset[int] = frozenset(),
        *,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        since_boot_ns: Callable[[], int] = _since_boot_ns,
    ) -> None:
        self.strings = strings
        self._clock = clock
        self._interval_ns = max(interval_ns, MIN_INTERVAL_NS)
        self._only_pids = only_pids
        self._proc, self._sys, self._since_boot_ns = proc, sys, since_boot_ns
        self._watched = Watchlist(strings, only_pids)
        self._read_round: Round | None = None
        self._look_round: Round | None = None

    @classmethod
    def probe(cls) -> Unavailable | None:
        """Whether there is a /proc."""
        return probe()

    def push(self, batch: Batch) -> None:
        """Learn which processes serve from rows of `gpu_process` and `stream`; other batches are ignored."""
        self._watched.push(batch)

    async def batches(self) -> AsyncIterator[Batch]:
        """Rows of all channels until closed."""
        self._begin()
        try:
            await self._first()
            async for _ in every(self._interval_ns, self._clock):
                for batch in await self._turn():
                    yield batch
        finally:
            self._crew.close()

    def _begin(self) -> None:
        """All counters start anew; what is known about who serves is kept."""
        self._crew = Crew("host", asyncio.get_running_loop())
        self._notes = Notes(self.name)
        self._said: dict[str, set[Key]] = {}
        self._engines = Engines(str(self._proc))
        self._reader = Reader(self._proc, self._sys, self._clock, self._since_boot_ns)
        self._names: Mapping[int, str] = {}
        self._asked: list[int] = []
        self._read_round = self._look_round = None
        self._read_at = 0
        self._looked_at: int | None = None
        self._watched.foreign = pid_namespace(self._proc) not in ("", _INIT_PID_NAMESPACE)

    async def _first(self) -> None:
        """Find out whom to watch, and begin all counters, so that the first turn has rates."""
        self._look()
        if self._look_round is not None:
            await self._look_round.wait(_FIRST_WAIT_S)
        self._take_look()
        self._read_round = self._post_read()
        await self._read_round.wait(_FIRST_WAIT_S)
        await asyncio.sleep(MIN_INTERVAL_NS / NS)
        self._take_reading()

    # A turn

    async def _turn(self) -> list[Batch]:
        self._look()
        round_ = self._read_round = self._read_round or self._post_read()
        await round_.wait(self._interval_ns / 2 / NS)
        reading = self._take_reading()
        batches = [] if reading is None else list(self._batches(reading))
        self._note_stale()
        now = self._clock.now()
        if said := self._notes.due(now):
            batches.append(status_batch(now, said, self.strings))
        return batches

    def _post_read(self) -> Round:
        self._read_at = self._clock.now()
        self._asked = self._watched.pids(self._read_at)
        pids = {pid: self._names.get(pid, "") for pid in self._asked}
        return self._crew.post([partial(self._reader.read, pids)])

    def _take_reading(self) -> Reading | None:
        """The reading under way, if it has ended."""
        if self._read_round is None or not self._read_round.done:
            return None
        reading: Reading = self._read_round.jobs[0].result()
        self._read_round = None
        self._watched.confirm(self._asked, reading.seen)
        return reading

    def _batches(self, reading: Reading) -> Iterator[Batch]:
        intern = self.strings.intern
        self._say("reading", reading.missing)
        self._sight(reading.seen, len(reading.groups))
        yield Batch(HOST, HOST.rows([reading.host]))
        if reading.processes:
            yield Batch(
                PROCESS,
                PROCESS.rows(
                    (p.t, p.pid, intern(p.name), intern(p.user), intern(p.cgroup), p.dt_ns, *p.values)
                    for p in reading.processes
                ),
            )
        if reading.groups:
            rows = ((g.t, intern(g.cgroup), g.dt_ns, *g.values) for g in reading.groups)
            yield Batch(CGROUP, CGROUP.rows(rows))

    # The slow look

    def _look(self) -> None:
        """Every 5 s: find engines, and ask the watched processes for their names."""
        self._take_look()
        now = self._clock.now()
        unnamed = set(self._watched.pids(now)) - self._names.keys()
        due = self._looked_at is None or now - self._looked_at >= LOOK_NS - self._interval_ns // 2 or unnamed
        if self._look_round is None and due:
            self._looked_at = now
            self._look_round = self._crew.post([partial(self._slowly, self._watched.pids(now))])

    def _take_look(self) -> None:
        """What the look under way found, if it has ended."""
        if self._look_round is not None and self._look_round.done:
            self._found(self._look_round.jobs[0].result())
            self._look_round = None

    def _slowly(self, pids: list[int]) -> Looked:
        """On a thread that may be left behind: command lines can keep their reader waiting."""
        engines = {} if self._only_pids else self._engines.look()
        names = {pid: process_name(pid, self._proc) for pid in {*pids, *engines}}
        names = {pid: "" if name == OUTSIDE else name for pid, name in names.items()}
        return Looked(engines, names, self._engines.hidden)

    def _found(self, looked: Looked) -> None:
        self._watched.engines, self._names = looked.engines, looked.names
        hidden = Missing(
            "no_permission",
            "processes of other users are hidden (/proc is mounted with hidepid): servers among them are not seen",
            "run opusmon as root",
        )
        self._say("look", {(PROCESS.name, "", "hidden"): hidden} if looked.hidden else {})

    # What it says about itself

    def _say(self, owner: str, reasons: Mapping[Key, Missing]) -> None:
        """Replace what a part of the collector has said before."""
        for key in self._said.get(owner, set()) - reasons.keys():
            self._notes.drop(key)
        for key, why in reasons.items():
            self._notes.put(key, why.state, why.reason, why.remedy)
        self._said[owner] = set(reasons)

    def _sight(self, seen: Collection[int], groups: int) -> None:
        """Say what is watched, and what is not."""
        words = (
            f"serving processes: {len(seen)}, control groups: {groups}"
            if seen
            else "no serving process is known"
        )
        self._notes.put(("", "", ""), "ok", words)
        reasons: dict[Key, Missing] = {}
        if left_out := self._watched.left_out(self._clock.now()):
            text = f"only {MAX_PROCESSES} processes are followed, {left_out} are not"
            reasons[PROCESS.name, "", "left out"] = Missing("sampled", text, "name those that matter: --pid")
        if self._watched.foreign and not self._only_pids:
            reasons[PROCESS.name, "", "pid namespace"] = Missing(
                "unavailable",
                "the driver and eBPF name processes by the host's pids, which mean nothing inside this container",
                "run the container with --pid=host",
            )
        for pid in self._only_pids.difference(seen):
            reasons[PROCESS.name, "", f"pid {pid}"] = _NO_SUCH_PROCESS
        self._say("sight", reasons)

    def _note_stale(self) -> None:
        now = self._clock.now()
        reasons: dict[Key, Missing] = {}
        if self._read_round is not None and now - self._read_at > STALE_NS:
            reasons["", "", "reading"] = Missing("stale", _HELD_UP.format("/proc"), _LOOK_FOR_STUCK)
        if self._look_round is not None and self._looked_at is not None and now - self._looked_at > STALE_NS:
            text = _HELD_UP.format("the name of a process")
            reasons[PROCESS.name, "name", ""] = Missing("stale", text, _LOOK_FOR_STUCK)
        self._say("stale", reasons)


def pid_namespace(proc: Path) -> str:
    """The kernel's name of our pid namespace, "" where it does not say."""
    try:
        return str((proc / "self/ns/pid").readlink())
    except OSError:
        return ""


def probe(proc: Path = Path("/proc")) -> Unavailable | None:
    """Why the host cannot be read; None when it can. Cheap, never raises."""
    if isinstance(read(f"{proc}/stat"), Missing):
        return Unavailable("/proc cannot be read here", "mount -t proc proc /proc")
    return None
