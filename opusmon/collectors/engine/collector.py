"""The engine collector: finds inference engines on this host, scrapes them, and says why it finds none."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from opusmon.channels import COST, ENGINE, ENGINE_BUCKET, STATUS
from opusmon.channels import DCGM as DCGM_CHANNEL
from opusmon.clock import NS, Clock
from opusmon.collectors.base import MIN_INTERVAL_NS, Unavailable, every, status_batch
from opusmon.collectors.cost import CallCost, CostMeter
from opusmon.collectors.engine import explain
from opusmon.collectors.engine.address import Address, AddressError, parse
from opusmon.collectors.engine.discover import SCAN_NS, Candidate, Questions, View, look
from opusmon.collectors.engine.kinds import BY_NAME as KINDS_BY_NAME
from opusmon.collectors.engine.kinds import DCGM
from opusmon.collectors.engine.lazy import LazyFetcher
from opusmon.collectors.engine.rows import batches, dcgm_batch
from opusmon.collectors.engine.target import Outcome, Target
from opusmon.collectors.engine.trouble import Getter
from opusmon.collectors.notes import Key, Notes
from opusmon.schema import Batch, Channel, StringTable

MAX_TARGETS = 32
FORGET_NS = 600 * NS
"""A discovered engine that has been gone for this long is no longer waited for."""
_REPORT_NS = NS
_QUEUE = 256


class EngineCollector:
    """What inference engines say about themselves on their metrics pages.

    Each engine has a task of its own: a slow or dead one delays no other, and is asked less and less often, up to
    every 30 s. Rows come from one GET per engine and interval; nothing is sent but that.

    Args:
        strings: text ids of the rows refer to it.
        clock: time of the rows.
        interval_ns: between scrapes of one engine; raised to 250 ms, and for an engine whose page takes long to make.
        only_pids: discovered engines to report, by the process that listens; named ones are always reported.
        urls: engines to scrape wherever they are, such as `http://10.0.0.5:8000`.
        discover: look for engines on this host, on loopback only.
        proc: the /proc folder.
        scan_ns: between looks at it.
    """

    name: ClassVar[str] = "engine"
    channels: Sequence[Channel] = (ENGINE, ENGINE_BUCKET, DCGM_CHANNEL, STATUS, COST)

    def __init__(
        self,
        strings: StringTable,
        clock: Clock,
        interval_ns: int = NS,
        only_pids: frozenset[int] = frozenset(),
        *,
        urls: Sequence[str] = (),
        discover: bool = True,
        proc: Path = Path("/proc"),
        scan_ns: int = SCAN_NS,
    ) -> None:
        self.strings = strings
        self._clock = clock
        self._interval_ns = max(interval_ns, MIN_INTERVAL_NS)
        self._only_pids = only_pids
        self._discover = discover
        self._proc = proc
        self._scan_ns = scan_ns
        self._notes = Notes(self.name)
        self._held: dict[str, set[Key]] = {}
        self._named = list(self._parse(urls))
        self._found: dict[int, tuple[Target, int]] = {}
        self._refused: dict[int, Target] = {}
        self._questions = Questions()
        self._tasks: set[asyncio.Task[None]] = set()
        self._crash: BaseException | None = None

    @classmethod
    def probe(cls) -> Unavailable | None:
        """Whether there is an HTTP client. Cheap, never raises, asks nothing over the network."""
        if find_spec("aiohttp") is None:
            return Unavailable(
                "Python has no aiohttp, which asks engines for their metrics", "pip install aiohttp"
            )
        return None

    async def batches(self) -> AsyncIterator[Batch]:
        """Rows of all channels until closed."""
        self._queue: asyncio.Queue[Batch | None] = asyncio.Queue(_QUEUE)
        self._meter = CostMeter(self.name, self._clock, 5 * NS, _REPORT_NS, guest=True)
        self._cost = CallCost()
        self._crash = None
        async with LazyFetcher() as fetcher:
            for target in (*self._named, *(target for target, _ in self._found.values())):
                self._spawn(self._follow(target, fetcher))
            if self._discover:
                self._spawn(self._seek(fetcher))
            self._spawn(self._report())
            try:
                while True:
                    batch = await self._queue.get()
                    if self._crash is not None:
                        raise self._crash
                    if batch is not None:
                        yield batch
            finally:
                await self._end()

    def take_cost(self) -> CallCost:
        """The account of scrapes and questions so far; a new one begins."""
        taken, self._cost = self._cost, CallCost()
        return taken

    def _parse(self, urls: Sequence[str]) -> Iterable[Target]:
        """Targets of the named URLs; one that cannot be used is a note that repeats none of it."""
        labels: set[str] = set()
        for number, url in enumerate(urls, 1):
            try:
                target = Target(parse(url), self._clock)
                if target.label in labels:
                    raise AddressError("it differs from another one in its scheme or query only")
            except AddressError as error:
                remedy = "Correct it: --engine http://HOST:PORT"
                self._notes.put(("engine", "", f"--engine URL {number}"), "unavailable", str(error), remedy)
                continue
            labels.add(target.label)
            yield target

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task that fails by a fault of ours ends the collector; it must not fall silent."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crash = error
            if not self._queue.full():
                self._queue.put_nowait(None)

    async def _end(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _report(self) -> None:
        """Reasons and costs, whether or not an engine answers."""
        async for _ in every(_REPORT_NS, self._clock):
            await self._say()
            cost = self._meter.due([self], self.strings)
            if cost is not None:
                await self._queue.put(cost)

    async def _say(self) -> None:
        now = self._clock.now()
        statuses = self._notes.due(now)
        if statuses:
            await self._queue.put(status_batch(now, statuses, self.strings))

    async def _follow(self, target: Target, getter: Getter) -> None:
        """Scrape one engine until it is forgotten."""
        async for tick in every(self._interval_ns, self._clock):
            if target.forgotten:
                return
            if target.gone or self._clock.now() < target.due - self._interval_ns // 4:
                continue
            self._meter.late += tick.late
            await self._turn(target, getter)

    async def _turn(self, target: Target, getter: Getter) -> None:
        outcome = await self._try(target, getter)
        await self._publish(target, outcome)

    async def _try(self, target: Target, getter: Getter) -> Outcome:
        label = target.label
        outcome = await target.turn(getter, self._interval_ns)
        self._cost.add(label, outcome.took_ns)
        return outcome

    async def _publish(self, target: Target, outcome: Outcome) -> None:
        self._hold(target, outcome)
        if outcome.scrape is not None:
            for batch in batches(outcome.scrape, outcome.entries, self.strings):
                await self._queue.put(batch)
        if outcome.shares:
            await self._queue.put(dcgm_batch(self._clock.now(), target.label, outcome.shares, self.strings))
        await self._say()

    def _hold(self, target: Target, outcome: Outcome) -> None:
        """Make the notes of an engine those of its last turn.

        What is missing from its rows is told by windows only, so it stays said while the engine does not answer, and
        in the window of a restart.
        """
        kept = self._held.get(target.place, set())
        keys = {note[0] for note in outcome.notes}
        if outcome.scrape is None or any(entry.values.get("restarts") != 0 for entry in outcome.entries):
            keys |= {key for key in kept if key[1]}
        for key in kept - keys:
            self._notes.drop(key)
        for note in outcome.notes:
            self._notes.put(*note)
        self._held[target.place] = keys

    async def _seek(self, getter: Getter) -> None:
        """Look for engines on this host, again and again."""
        async for _ in every(self._scan_ns, self._clock):
            view = await asyncio.to_thread(look, self._proc, (os.getpid(), os.getppid()), self._only_pids)
            self._refresh(view)
            due = self._questions.due(view, self._clock.now(), self._taken())
            await asyncio.gather(*(self._ask(candidate, getter) for candidate in due))
            self._explain(view)
            await self._say()

    def _taken(self) -> set[int]:
        """Ports of this host that are followed already."""
        return self._found.keys() | {one.address.port for one in self._named if one.address.local}

    def _refresh(self, view: View) -> None:
        """Notice engines that have gone, come back or been started anew."""
        now = self._clock.now()
        pids = {one.listener.port: one.pid for one in view.candidates}
        for target in self._named:
            if target.address.local:
                target.meet(pids.get(target.address.port, 0))
        for port in self._refused.keys() - view.ports:
            self._drop(self._refused.pop(port))
        for port, (target, seen) in list(self._found.items()):
            if port in view.ports:
                target.meet(pids.get(port, 0))
                self._found[port] = (target, now)
            elif now - seen > FORGET_NS:
                target.forgotten = True
                del self._found[port]
                self._drop(target)
            elif not target.gone:
                target.gone = True
                note = (("engine", "", target.label), "unavailable", "it has gone: nothing listens there", "")
                self._hold(target, Outcome(notes=[note]))

    def _drop(self, target: Target) -> None:
        for key in self._held.pop(target.place, set()):
            self._notes.drop(key)

    async def _ask(self, candidate: Candidate, getter: Getter) -> None:
        """Ask a listener whether it is an engine, and follow it if so."""
        turns = self._questions.asked(candidate, self._clock.now()) % len(candidate.paths)
        paths = candidate.paths[turns:] + candidate.paths[:turns]
        listener = candidate.listener
        address = Address("http", listener.loopback, listener.port, pid=candidate.pid)
        target = Target(address, self._clock, paths, KINDS_BY_NAME.get(candidate.kind))
        outcome = await self._try(target, getter)
        engine_or_dcgm = target.answered or target.kind is DCGM
        if engine_or_dcgm:
            self._questions.settle(candidate)
        if engine_or_dcgm and len(self._found) < MAX_TARGETS:
            self._found[listener.port] = (target, self._clock.now())
            self._spawn(self._follow(target, getter))
        elif target.kind is not None or candidate.kind:
            self._refused[listener.port] = target
        if target.kind is not None or candidate.kind:
            await self._publish(target, outcome)  # of other programs not a word

    def _explain(self, view: View) -> None:
        """Say why nothing was found, or that something cannot be reached."""
        key: Key = ("engine", "", "")
        why = None if self._found or self._named else explain.nothing(view)
        if why is None:
            self._notes.drop(key)
        else:
            self._notes.put(key, "unavailable", why.reason, why.remedy)
