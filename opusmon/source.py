"""Merge collectors into one stream of batches that outlives any of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Protocol

from opusmon.channels import KEYFRAME_NS
from opusmon.clock import Clock
from opusmon.collectors.base import Status, Unavailable, status_batch
from opusmon.schema import Batch, Channel, StringTable
from opusmon.worker import SourceLost, WorkerSource

BACKOFF_S = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Waits before a lost source is started again; a source that ran for a minute begins anew."""
_STEADY_NS = 60_000_000_000
_QUEUE = 1024


class Source(Protocol):
    """Anything with channels and batches: a collector, a child process, another host."""

    @property
    def name(self) -> str:
        """What its `status` rows call it."""
        ...

    @property
    def channels(self) -> Sequence[Channel]:
        """What it emits."""
        ...

    def batches(self) -> AsyncIterator[Batch]:
        """What it sees, until closed."""
        ...


class LiveSource:
    """Runs sources side by side; one that dies becomes a `status` row and is started again with back-off.

    Args:
        sources: what to run.
        absent: collectors that cannot run here, with the reason; said in `status` rows every 60 s.
        strings: the session's table.
        stated: said at the start and every 60 s, so that it is known at every instant of the recording.
        backoff_s: waits before restarts.
    """

    name = "live"

    def __init__(
        self,
        sources: Sequence[Source],
        strings: StringTable,
        clock: Clock,
        *,
        absent: Mapping[str, Unavailable] | None = None,
        stated: Sequence[Status] = (),
        backoff_s: Sequence[float] = BACKOFF_S,
    ) -> None:
        self.strings = strings
        self._sources = tuple(sources)
        self._clock = clock
        self._backoff_s = tuple(backoff_s)
        self._held = {
            name: Status(name, "unavailable", why.reason, why.remedy) for name, why in (absent or {}).items()
        }
        self._stated = tuple(stated)
        self._queue: asyncio.Queue[Batch] = asyncio.Queue(_QUEUE)

    @property
    def channels(self) -> Sequence[Channel]:
        """The channels of all sources, each once."""
        return tuple(
            {channel.name: channel for source in self._sources for channel in source.channels}.values()
        )

    def lost(self) -> Mapping[str, str]:
        """Sources that watch the host and do not run now, by name, with why."""
        return {name: _words(status) for name in self._watching() if (status := self._held.get(name))}

    def gave_up(self) -> str:
        """Why nothing will come: the reasons, once every source that watches the host says it cannot run."""
        held = [self._held.get(name) for name in self._watching()]
        if any(status is None or status.state != "unavailable" for status in held):
            return ""
        return "; ".join(_words(status) for status in held if status)

    def _watching(self) -> Sequence[str]:
        return [source.name for source in self._sources if source.name != "cost"]

    async def batches(self) -> AsyncIterator[Batch]:
        """The batches of all sources as they come, until closed."""
        tasks = [asyncio.create_task(self._keyframes())]
        tasks += [asyncio.create_task(self._supervise(source)) for source in self._sources]
        try:
            while True:
                yield await self._queue.get()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def rest(self) -> Iterator[Batch]:
        """What came after `batches` was closed: what was waiting, and the last rows of the sources."""
        while not self._queue.empty():
            yield self._queue.get_nowait()
        for source in self._sources:
            if isinstance(source, WorkerSource):
                last, source.last = source.last, []
                yield from last

    async def _supervise(self, source: Source) -> None:
        """Run a source for ever."""
        failures = 0
        while True:
            began = self._clock.now()
            why = Unavailable(f"the {source.name} collector ended")
            final = False
            try:
                async with contextlib.aclosing(source.batches()) as batches:  # type: ignore[type-var]
                    async for batch in batches:
                        self._held.pop(source.name, None)
                        await self._queue.put(batch)
            except SourceLost as lost:
                why, final = lost.why, lost.final
            except Exception as error:  # (a collector never takes the app down; its reason is shown)
                why = Unavailable(
                    f"the {source.name} collector failed: {type(error).__name__}: {error}"[:300]
                )
            failures = 0 if self._clock.now() - began > _STEADY_NS else failures
            wait_s = self._backoff_s[-1 if final else min(failures, len(self._backoff_s) - 1)]
            failures += 1
            await self._lost(source.name, why, final, wait_s)
            await asyncio.sleep(wait_s)

    async def _lost(self, name: str, why: Unavailable, final: bool, wait_s: float) -> None:
        state = "unavailable" if final else "restarting"
        reason = why.reason if final else f"{why.reason}; starting it again in {wait_s:g} s"
        status = self._held[name] = Status(name, state, reason, why.remedy)
        await self._queue.put(status_batch(self._clock.now(), [status], self.strings))

    async def _keyframes(self) -> None:
        """Repeat what is unavailable, so that it is known at every instant of the recording."""
        while True:
            if said := [*self._held.values(), *self._stated]:
                await self._queue.put(status_batch(self._clock.now(), said, self.strings))
            await asyncio.sleep(KEYFRAME_NS / 1e9)


def _words(status: Status) -> str:
    return f"{status.collector}: {status.reason}. {status.remedy}".strip(". ")
