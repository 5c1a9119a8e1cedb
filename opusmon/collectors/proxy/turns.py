"""What the proxy's flights become, turn by turn: batches of every channel it fills."""

from __future__ import annotations

from collections.abc import Iterator

from opusmon.clock import NS, Clock
from opusmon.collectors.api.request import Keeper, open_batch, request_batch
from opusmon.collectors.base import Tick, status_batch
from opusmon.collectors.cost import CostMeter
from opusmon.collectors.notes import Notes
from opusmon.collectors.proxy.flight import MAX_OPEN, Flights
from opusmon.schema import Batch, StringTable

OPEN_NS = NS
COST_NS = 5 * NS
_PART = 64
"""Rows made in one go: 64 take 1 ms, and requests wait meanwhile."""


class Turns:
    """Makes the batches of a turn.

    Args:
        name: the collector's.
        strings: the session's table.
        clock: for the times.
        interval_ns: between two turns.
        flights: what is looked at.
        sight: what runs, in words.
        tls: the upstream is reached by TLS.
    """

    def __init__(
        self,
        name: str,
        strings: StringTable,
        clock: Clock,
        interval_ns: int,
        flights: Flights,
        *,
        sight: str,
        tls: bool,
    ) -> None:
        self._name, self._strings, self._clock, self._flights = name, strings, clock, flights
        self._half_ns = interval_ns // 2
        self._keeper = Keeper()
        self._notes = Notes(name)
        self._opened_at: int | None = None
        self._meter = CostMeter(name, clock, COST_NS, interval_ns)
        self._fixed_notes(sight, tls)

    def batches(self, tick: Tick | None = None) -> Iterator[Batch]:
        """What there is to say now; whoever takes it lets requests pass between two batches."""
        now = self._clock.now()
        self._meter.late += tick is not None and tick.late
        while done := self._flights.take(_PART * 4):
            yield request_batch(done, self._strings, self._keeper)
        if self._opened_at is None or now - self._opened_at >= OPEN_NS - self._half_ns:
            self._opened_at = now
            for rows in self._flights.open_rows(now, _PART):
                yield open_batch(rows, self._strings, self._keeper)
        self._note()
        if said := self._notes.due(now):
            yield status_batch(now, said, self._strings)
        if cost := self._meter.due([self._flights], self._strings):
            yield cost

    def _fixed_notes(self, sight: str, tls: bool) -> None:
        put = self._notes.put
        put(("", "", ""), "ok", sight)
        reason = "is part of connect_ns" if tls else "the upstream is reached without TLS"
        put(("request", "tls_ns", ""), "not_supported", reason)
        put(("request", "late_ns", ""), "not_supported", "a client does not say when it meant to send")

    def _note(self) -> None:
        flights = self._flights
        for why, count in flights.unseen.items():
            remedy = "clients that send accept-encoding: gzip are seen" if why.startswith("encoding") else ""
            reason = f"not observed: {why} (forwarded unchanged, answers so far: {count})"
            self._notes.put(("request", "", why), "not_supported", reason, remedy)
        for why, count in flights.refused.items():
            self._notes.put(("", "", f"refused: {why}"), "ok", f"requests refused so far: {count}; {why}")
        if self._keeper.dropped:
            reason = f"ids and usage texts left out so far: {self._keeper.dropped}; they are kept for some failed and slow requests per minute"
            self._notes.put(("request", "id", ""), "sampled", reason)
        if flights.dropped:
            reason = f"rows lost so far because nobody took them: {flights.dropped}"
            self._notes.put(("request", "", ""), "error", reason)
        if len(flights) > MAX_OPEN:
            self._notes.put(("request_open", "", ""), "sampled", f"only the {MAX_OPEN} oldest have rows")
        else:
            self._notes.drop(("request_open", "", ""))
