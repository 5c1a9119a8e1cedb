"""The time of launch calls: probes of their own beside those that count, for they come and go on their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from opusmon.clock import NS, Clock
from opusmon.collectors.ebpf.attach import Libraries, Open
from opusmon.collectors.ebpf.budget import Bursts
from opusmon.collectors.ebpf.errors import ProbesUnavailable
from opusmon.collectors.ebpf.hit_price import ASSUMED
from opusmon.collectors.ebpf.libcuda import Scanner
from opusmon.collectors.ebpf.names import Names
from opusmon.collectors.ebpf.probes import Backend
from opusmon.collectors.ebpf.stream_rows import bin_edges_ns
from opusmon.collectors.ebpf.stream_table import StreamTable, cflags
from opusmon.collectors.ebpf.symbols import TIMED_ENTRIES
from opusmon.quantiles import Buckets, buckets
from opusmon.schema import StringTable


class TimedLaunches(Libraries):
    """Entry and return of each launch function of every library, `TIMED_ENTRIES`. Its calls block, as its base's.

    Args:
        backend: sets the probes; they may be at places that have others.
        open_mapped: gives a descriptor of the file behind a mapping.
    """

    def __init__(self, backend: Backend, open_mapped: Open) -> None:
        super().__init__(backend, TIMED_ENTRIES, open_mapped)
        self.on = {"launch"}

    def set_all(self) -> None:
        """Set all of them; some 10 ms."""
        self.switch("launch", True)

    def remove_some(self) -> bool:
        """Remove as many probes as go in 0.1 s; returns whether there were any. One by one, 16 take 1.7 s."""
        self.on.discard("launch")
        for library in self._libraries.values():
            if links := library.links.get("launch"):
                some = links[: self._backend.at_once]
                del links[: len(some)]
                self._backend.detach(*some)
                return True
        return False


BURST_NS = 250_000_000
"""Calls are timed for so long at a time: a second would cost a launch-bound server a quarter of it."""
PIECE_NS = NS
"""While they can be timed all the time, the cost is looked at so often."""
MAX_CYCLE_NS = 120 * NS
"""From burst to burst at most. 240,000 launches a second of the cheap kind need that long at the default budget."""


class TimedBursts:
    """Times launch calls all the time while the budget allows it, and in bursts of `BURST_NS` when it does not.

    Args:
        launches: the probes; they are on.
        table: where calls are added up.
        clock: monotonic time.
        aside: runs a blocking function of the backend on its thread.
        allowed_pct: told hits, the time they took (ns) and what one costs (ns), says how much of a core they may take.

    Attributes:
        price: what a hit costs.
        cycle_ns: from the begin of a burst to that of the next one; 0 while calls are timed all the time.
    """

    def __init__(
        self,
        launches: TimedLaunches,
        table: StreamTable,
        clock: Clock,
        aside: Callable[..., Awaitable[Any]],
        allowed_pct: Callable[[int, int, int], float],
    ) -> None:
        self._launches, self._table, self._clock = launches, table, clock
        self._aside, self._allowed_pct = aside, allowed_pct
        self.price = ASSUMED
        self.cycle_ns = 0

    async def run(self) -> None:
        """Burst after burst, until cancelled."""
        while True:
            began, before = self._clock.now(), self._table.timing_hits()
            await self._aside(self._launches.set_all)
            self._table.time_calls(True)
            began, before, allowed = await self._while_affordable(began, before)
            self._table.time_calls(False)
            self.cycle_ns = self._cycle_ns(before, allowed)
            while await self._aside(self._launches.remove_some):
                pass  # what else is to be done gets its turn between two
            # There were hits while they were being removed, and that may have taken longer than all of the cycle.
            self.cycle_ns = max(self._cycle_ns(before, allowed), self._clock.now() - began)
            await asyncio.sleep(max(0, began + self.cycle_ns - self._clock.now()) / NS)

    async def _while_affordable(self, began: int, before: int) -> tuple[int, int, float]:
        """Go on for a burst at least; returns begin of the dear piece, hits by then, and what would be allowed."""
        piece_ns = BURST_NS
        while True:
            await asyncio.sleep(piece_ns / NS)
            now, hits = self._clock.now(), self._table.timing_hits()
            dt_ns = max(now - began, 1)
            allowed = self._allowed_pct(hits - before, dt_ns, self._hit_ns)
            if 100 * (hits - before) * self._hit_ns / dt_ns > allowed:
                return began, before, allowed
            began, before, piece_ns = now, hits, PIECE_NS
            self.cycle_ns = 0

    def _cycle_ns(self, before: int, allowed_pct: float) -> int:
        return cycle_ns((self._table.timing_hits() - before) * self._hit_ns, allowed_pct)

    @property
    def _hit_ns(self) -> int:
        return self.price.pair_ns(cheap=self._launches.cheap)


def cycle_ns(cost_ns: float, allowed_pct: float) -> int:
    """How long a burst of that cost has to last for, its pause included, so that it keeps within what is allowed."""
    if cost_ns >= MAX_CYCLE_NS * allowed_pct / 100:
        return MAX_CYCLE_NS
    return max(round(cost_ns * 100 / allowed_pct), 2 * BURST_NS)


class LaunchTimes:
    """Launch calls of running processes in bins by their time, for a calibration. Its calls block: one thread for all.

    Args:
        clock: monotonic time.
        only_pids: processes to watch, all of them when empty.
        budget_pct: what the probes may take, in percent of one core.

    Attributes:
        timed_ns: how long calls have been timed.
        lost: calls that could not be kept.
    """

    def __init__(self, clock: Clock, only_pids: frozenset[int], budget_pct: float) -> None:
        self._clock = clock
        self._pids = only_pids
        self._bursts = Bursts(budget_pct)
        self._strings = StringTable()
        self._names = Names(self._strings)
        self._scanner = Scanner(only_pids=only_pids)
        self._backend: Backend | None = None
        self._turned_at = 0
        self.timed_ns = 0
        self.lost = 0

    def begin(self, make_backend: Callable[[str, Sequence[str]], Backend]) -> None:
        """Set the probes.

        Args:
            make_backend: loads the BPF programs of a source, from its name and compiler flags.

        Raises:
            ProbesUnavailable: none of the processes uses CUDA, or the probes cannot be set.
        """
        found = self._scanner.scan(self._clock.now())
        if not found.processes:
            who = " ".join(str(pid) for pid in sorted(self._pids))
            reason = f"none of the processes {who} maps libcuda" if who else "no process maps libcuda"
            raise ProbesUnavailable(reason, "Start the server, give it requests, and try again")
        self._backend = make_backend("streams", cflags())
        self._launches = TimedLaunches(self._backend, self._scanner.open)
        self._launches.follow(found)
        if not self._launches.probed:
            path, reason = next(iter(self._launches.refused.items()), ("libcuda", "cannot be probed"))
            raise ProbesUnavailable(f"{path}: {reason}")
        self._table = StreamTable(self._backend, self._names, self._pids)
        self._switch(True)
        self._turned_at = self._clock.now()

    def turn(self) -> None:
        """Account for the time since the turn before; look for new processes; begin or end a burst."""
        was_on, dt_ns = self._bursts.wanted, self._clock.now() - self._turned_at
        hits = self._table.hits()
        self.lost += hits.lost
        if was_on:
            self.timed_ns += dt_ns
            self._bursts.measured(hits.timing, dt_ns, ASSUMED.pair_ns(cheap=self._launches.cheap))
        else:
            self._bursts.passed(hits.timing)
        if self._bursts.wanted != was_on:
            self._switch(not was_on)
        self._launches.follow(self._scanner.scan(self._clock.now()))
        self._turned_at = self._clock.now()

    def _switch(self, on: bool) -> None:
        if on:
            self._launches.set_all()
            self._table.time_calls(True, binned=True)
            return
        self._table.time_calls(False)
        while self._launches.remove_some():
            pass

    def bins(self) -> dict[int, Buckets]:
        """Process to its calls, in ns."""
        keys, counts = self._table.call_bins()
        edges, found = bin_edges_ns(), {}
        for pid in sorted(set(keys["pid"].tolist())):
            own = keys["pid"] == pid
            at = keys["bin"][own].astype(int)
            found[pid] = buckets(edges[at], edges[at + 1], counts[own])
        return found

    def name(self, pid: int) -> str:
        """Name of a process, "" when it has ended."""
        return self._strings.text(self._names.processes([pid], self._clock.now())[pid])

    def close(self) -> None:
        """Remove the probes. Harmless when they were never set."""
        if self._backend is not None:
            self._backend.close()
            self._launches.close()
            self._backend = None
