"""The collector contract."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from opusmon.channels import STATUS
from opusmon.clock import Clock
from opusmon.schema import Batch, Channel, StringTable

UNASKED = "runs only when asked for"
LEFT_OUT = "not asked for"
"""How the reasons of collectors begin that do not run because nobody wanted them to: nothing is wrong."""
MIN_INTERVAL_NS = 250_000_000
"""Shortest tick of every collector. GPM windows must stay over 200 ms, a late tick included, and CPU time comes in
hundredths of a second: shorter windows say little."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why a facility cannot be watched here.

    Attributes:
        reason: one sentence a tired person understands.
        remedy: the exact command or step that mends it, "" when nothing does.
    """

    reason: str
    remedy: str = ""


class UnavailableError(Exception):
    """A facility cannot be watched, or stopped being watchable as a whole; each collector raises its own kind.

    Attributes:
        why: reason and remedy.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.why = Unavailable(reason, remedy)


class Collector(Protocol):
    """A Source for one facility (NVML, eBPF, an engine's /metrics, a proxy).

    Attributes:
        name: as given to `--only`.
        channels: what it emits.
        strings: the table its text ids refer to.
    """

    name: ClassVar[str]
    channels: Sequence[Channel]
    strings: StringTable

    @classmethod
    def probe(cls) -> Unavailable | None:
        """Whether the facility can be watched here. Cheap, never raises."""
        ...

    def batches(self) -> AsyncIterator[Batch]:
        """What it sees, until closed. Raises when the facility is lost as a whole."""
        ...


@dataclass(frozen=True, slots=True)
class Status:
    """A `status` row in words; see `opusmon.channels.STATUS`."""

    collector: str
    state: str
    reason: str = ""
    remedy: str = ""
    channel: str = ""
    field: str = ""
    scope: str = ""


def status_batch(t: int, statuses: Sequence[Status], strings: StringTable) -> Batch:
    """Rows of `status` at time `t` (monotonic ns), one per entry of a non-empty sequence."""
    words = ("collector", "channel", "field", "scope", "state", "reason", "remedy")
    records = [(t, *(strings.intern(getattr(status, word)) for word in words)) for status in statuses]
    return Batch(STATUS, STATUS.rows(records))


@dataclass(frozen=True, slots=True)
class Tick:
    """One turn of `every`.

    Attributes:
        due: when it should have begun, monotonic ns.
        late: it began over half an interval late.
        missed: whole turns skipped before it.
    """

    due: int
    late: bool
    missed: int


async def every(interval_ns: int, clock: Clock, stop: asyncio.Event | None = None) -> AsyncIterator[Tick]:
    """Turns at absolute deadlines, so that drift does not add up; the first one is at once.

    A turn that would begin a whole interval late or more is skipped and counted in `missed`. There are no more turns,
    and no more waiting, once `stop` is set.
    """
    due = clock.now()
    missed = 0
    while True:
        wait_ns = due - clock.now()
        if wait_ns > 0:
            await (asyncio.sleep(wait_ns / 1e9) if stop is None else _set_within(wait_ns / 1e9, stop))
        if stop is not None and stop.is_set():
            return
        behind = clock.now() - due
        yield Tick(due, behind > interval_ns // 2, missed)
        due += interval_ns
        missed = max(0, (clock.now() - due) // interval_ns)
        due += interval_ns * missed


async def _set_within(limit_s: float, event: asyncio.Event) -> None:
    """Return when it is set, or the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
