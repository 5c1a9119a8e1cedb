"""Receives OTLP and makes a row of `request` of each span or event that is one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from opusmon.channels import COST, REQUEST, STATUS
from opusmon.clock import NS, Anchors, Clock
from opusmon.collectors.api.request import Keeper, Request, request_batch
from opusmon.collectors.base import MIN_INTERVAL_NS, Unavailable, UnavailableError, every, status_batch
from opusmon.collectors.cost import INTERVAL_NS as COST_NS
from opusmon.collectors.cost import CostMeter
from opusmon.collectors.notes import Notes
from opusmon.collectors.otlp.pairing import HOLD_S, Pairs
from opusmon.collectors.otlp.records import Record
from opusmon.collectors.otlp.spans import seen
from opusmon.schema import Batch, Channel, StringTable

if TYPE_CHECKING:
    from opusmon.collectors.otlp.receiver import Receiver

AHEAD_NS = 5 * NS
"""A sender whose clock is ahead by more than this is not believed; by less, its request has just ended."""
LATE_NS = 900 * NS
"""Older records are not taken: exporters try for minutes, not for hours."""


class OtlpUnavailable(UnavailableError):  # noqa: N818  (it reads as what happened)
    """It cannot listen where it was told to."""


class OtlpCollector:
    """An OTLP/HTTP endpoint on loopback. Run it in a process of its own.

    Rows of Claude Code come up to 6 s after they were received: a request's span and its events are sent apart, and
    make one row.

    Args:
        strings: text ids of the rows refer to it.
        clock: time of the rows.
        interval_ns: how often rows are handed on; raised to 250 ms.
        only_pids: not used: telemetry does not say which process sent it.
        listen: `127.0.0.1:PORT`, `[::1]:PORT` or `unix:/path`; loopback only.
        hold_s: how long a record of Claude Code waits for others of the same request.

    Attributes:
        address: where it listens, "" while it does not.
    """

    name: ClassVar[str] = "otlp"
    channels: Sequence[Channel] = (REQUEST, STATUS, COST)

    def __init__(
        self,
        strings: StringTable,
        clock: Clock,
        interval_ns: int = NS,
        only_pids: frozenset[int] = frozenset(),  # noqa: ARG002  (the collectors' common signature)
        *,
        listen: str = "127.0.0.1:4318",
        hold_s: float = HOLD_S,
    ) -> None:
        self.strings = strings
        self.address = ""
        self._clock = clock
        self._interval_ns = max(interval_ns, MIN_INTERVAL_NS)
        self._listen = listen
        self._anchors = Anchors()
        self._pairs = Pairs(round(hold_s * NS))
        self._keeper = Keeper()
        self._notes = Notes(self.name)
        self._number = 0
        self._stop = asyncio.Event()

    @classmethod
    def probe(cls) -> Unavailable | None:
        """Whether its server is installed; None when it is."""
        if find_spec("aiohttp") is None:
            return Unavailable("the aiohttp package is not installed", "pip install 'aiohttp>=3.9'")
        return None

    def stop(self) -> None:
        """End `batches` now; what was held for others of the same request comes as it is."""
        self._stop.set()

    async def batches(self) -> AsyncIterator[Batch]:
        """Rows of its channels until stopped or closed.

        Raises:
            OtlpUnavailable: it cannot listen there.
        """
        if why := self.probe():
            raise OtlpUnavailable(why.reason, why.remedy)
        self._read_clocks()
        receiver = await self._started()
        try:
            self.address = receiver.listen.text
            meter = CostMeter(self.name, self._clock, COST_NS, self._interval_ns)
            async for tick in every(self._interval_ns, self._clock, self._stop):
                meter.late += tick.late
                self._read_clocks()
                for batch in self._turn(receiver):
                    yield batch
                if spent := meter.due([receiver], self.strings):
                    yield spent
            self._pairs.release()
            for batch in self._turn(receiver):
                yield batch
        finally:
            self.address = ""
            await receiver.close()

    async def _started(self) -> Receiver:
        # Here, because these pull in aiohttp.
        from opusmon.collectors.otlp.receiver import Receiver
        from opusmon.collectors.proxy.errors import ProxyUnavailable
        from opusmon.collectors.proxy.rules import parse_listen

        try:
            receiver = Receiver(parse_listen(self._listen), self._clock, self.take)
            await receiver.start()
        except ProxyUnavailable as error:
            raise OtlpUnavailable(error.why.reason, error.why.remedy) from None
        return receiver

    def _read_clocks(self) -> None:
        if anchor := self._anchors.observe(self._clock.anchor()):
            self._anchors.add(anchor)

    def take(self, records: list[Record]) -> list[str]:
        """Take the records of one body.

        Returns:
            Why, for each that is rejected.
        """
        reasons = (self._take_one(record) for record in records)
        return [reason for reason in reasons if reason]

    def _take_one(self, record: Record) -> str:
        one = seen(record)
        if one is None:
            return "a record without times, or that ends before it starts"
        now, t = self._clock.now(), self._anchors.monotonic(one.end_ns)
        if t > now + AHEAD_NS:
            return "the sender's clock is ahead of this host's"
        if t < now - LATE_NS:
            return "a record of a request that ended over 15 minutes ago"
        one.request.t = min(t, now)
        return "" if self._pairs.add(one, now) else "too many requests are waiting"

    def _turn(self, receiver: Receiver) -> list[Batch]:
        now = self._clock.now()
        batches = []
        if ended := self._pairs.due(now):
            self._count(ended)
            batches.append(request_batch(ended, self.strings, self._keeper))
        self._note(receiver)
        if said := self._notes.due(now):
            batches.append(status_batch(now, said, self.strings))
        return batches

    def _count(self, requests: list[Request]) -> None:
        for request in requests:
            self._number += 1
            request.number = self._number

    def _note(self, receiver: Receiver) -> None:
        from opusmon.collectors.otlp.receiver import INSTALL, NO_PROTOBUF

        counts = receiver.counts
        self._notes.put(("", "", ""), "ok", f"takes OTLP/HTTP at {receiver.listen.text}")
        lacking = "telemetry has no time of single tokens"
        self._notes.put(("request", "tpot_ns", ""), "not_supported", lacking)
        self._notes.put(
            ("request", "outcome", ""),
            "ok",
            "the anthropic SDK calls a stream that was cut api_error, as it does an error event of that type: both read truncated",
        )
        if NO_PROTOBUF in counts.refused:
            reason = "protobuf bodies were refused: opentelemetry-proto is not installed"
            remedy = f"{INSTALL}, or OTEL_EXPORTER_OTLP_PROTOCOL=http/json at the sender"
            self._notes.put(("request", "", "protobuf"), "error", reason, remedy)
        for words in counts.refused - {NO_PROTOBUF}:
            self._notes.put(("", "", f"refused: {words}"), "ok", "some of what was sent so far")
        if counts.unreadable or counts.rejected:
            self._notes.put(
                ("request", "", "rejected"),
                "sampled",
                "some bodies were not OTLP, or some records had times that cannot be; their senders were told",
            )
        if counts.ignored:
            self._notes.put(("request", "", "left out"), *_left_out(counts.taken + counts.rejected > 0))


def _left_out(others: bool) -> tuple[str, str, str]:
    """State, reason and remedy once telemetry was left out; `others`: some was not. No counts: each would be a new text."""
    whose = "the anthropic SDK (span anthropic.messages.create) or of Claude Code"
    if others:
        return "ok", f"telemetry that is no request of {whose} is left out", ""
    reason = f"telemetry comes, but nothing of it is a request of {whose}: all of it is left out"
    return "not_supported", reason, "time other clients with --proxy URL"
