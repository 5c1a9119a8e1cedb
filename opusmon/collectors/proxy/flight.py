"""One request on its way: what is noted while it is forwarded, and the row it becomes."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from opusmon.clock import Clock
from opusmon.collectors.api.asked import Asked, BodyWatch
from opusmon.collectors.api.limits import fill_limits
from opusmon.collectors.api.observer import End, Observer
from opusmon.collectors.api.request import NAN, OpenRequest, Phase, Request, word
from opusmon.collectors.cost import CallCost
from opusmon.collectors.proxy.errors import Failure

SOURCE = "proxy"
START = "sent upstream"
MAX_DONE = 65_536
"""Rows kept between two turns of the collector; more are counted and dropped."""
MAX_OPEN = 1024
"""Requests in flight that get a row each, the oldest ones."""


class Hold:
    """How long chunks were held here, leaving out those that waited for a slow client."""

    __slots__ = ("count", "first_ns", "total_ns")

    def __init__(self) -> None:
        self.count = 0
        self.total_ns = 0
        self.first_ns = NAN

    def add(self, ns: int) -> None:
        """A chunk was passed on `ns` after it was read."""
        self.count += 1
        self.total_ns += ns

    @property
    def mean_ns(self) -> float:
        """NaN without any."""
        return self.total_ns / self.count if self.count else NAN


class Flight:
    """What is known of one request.

    Args:
        number: of the request in this session.
        method: of the request.
        endpoint: the entry of the allow-list that its path matched.
        path: without its query, for choosing what reads the answer.
        headers: of the request, case-insensitive; only the label and the retry count are read.
        t: when it came, monotonic ns.
    """

    def __init__(
        self, number: int, method: str, endpoint: str, path: str, headers: Mapping[str, str], t: int
    ) -> None:
        self.number, self.endpoint = number, endpoint
        self.label = word(headers.get("x-opusmon-label"))
        retry = headers.get("x-stainless-retry-count", "")
        self.retry = float(retry) if retry.isascii() and retry.isdigit() and len(retry) < 6 else NAN
        self.arrived = t
        self.sent: int | None = None
        self.headers_at: int | None = None
        self.last_byte: int | None = None
        self.ended_at: int | None = None
        self.connect_from: int | None = None
        self.connect_ns = self.dns_ns = NAN
        self.dns_from: int | None = None
        self.reused = NAN
        self.body = BodyWatch()
        self.body_done = False
        self.observer = Observer(method, path)
        self.hold = Hold()
        self.response_b = 0
        self.status = NAN
        self._asked: Asked | None = None
        self._headers: Mapping[str, str] = {}
        self.failed: Failure | None = None

    @property
    def start(self) -> int:
        """Where its clocks start: sent upstream, or come here while it is not."""
        return self.arrived if self.sent is None else self.sent

    def resolved(self, t: int) -> None:
        """The upstream's name has been looked up."""
        self.dns_ns = NAN if self.dns_from is None else t - self.dns_from

    def connected(self, t: int) -> None:
        """A connection was made; looking up the name is not part of the figure, TLS is."""
        if self.connect_from is not None:
            self.connect_ns = t - self.connect_from - (0.0 if math.isnan(self.dns_ns) else self.dns_ns)

    def asked(self) -> Asked:
        """What the request asks for, once its body has been sent: looked for when it is first wanted, not before."""
        if self._asked is None and self.body_done:
            self._asked = self.body.asked()
        return self._asked or Asked()

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """The response's headers have been passed on."""
        self.status, self._headers = status, headers
        self.observer.head(status, headers, self.asked().stream)

    def chunk(self, t: int, chunk: bytes, held_ns: int | None) -> None:
        """A piece of the response was passed on.

        Args:
            t: when it was read, monotonic ns.
            chunk: as it was on the wire.
            held_ns: time until it was passed on; None when it waits for a slow client.
        """
        self.last_byte = t
        self.response_b += len(chunk)
        reading = self.observer.reading
        had = self.observer.streaming and reading is not None and reading.timeline.chunks > 0
        self.observer.feed(t, chunk)
        if held_ns is None:
            return
        self.hold.add(held_ns)
        has = reading is not None and reading.timeline.chunks > 0
        if (has and not had) if self.observer.streaming else self.hold.count == 1:
            self.hold.first_ns = held_ns

    def finish(self, t: int) -> None:
        """Nothing more will come."""
        self.body_done = True
        self.observer.finish(t)

    def open_row(self, t: int) -> OpenRequest:
        """The request as it stands at `t` (monotonic ns)."""
        reading = self.observer.reading if not self.observer.blind else None
        timeline = reading.timeline if reading is not None and self.observer.streaming else None
        row = OpenRequest(t, SOURCE, START, self.number, self.endpoint, self._model(), self.label)
        row.phase = self._phase()
        row.age_ns = max(0, t - self.start)
        row.silent_ns = max(0, t - (self.last_byte or self.start))
        if timeline is not None:
            row.chunks = timeline.chunks
            row.no_token_ns = max(0, t - (timeline.last_token or self.start))
            if timeline.first_token is not None:
                row.ttft_ns = timeline.first_token - self.start
        elif not self.observer.blind:
            row.no_token_ns = row.age_ns
        return row

    def row(self, t: int, wall_ns: int, end: End) -> Request:
        """The request as it ended at `t` (monotonic ns, and as wall time)."""
        row = Request(t, SOURCE, START, self.number, self.endpoint, self._model(), self.label)
        row.status, row.retry = self.status, self.retry
        row.outcome = self.observer.outcome(end)
        if self.failed is not None and row.outcome in ("timeout", "transport_error"):
            row.error = self.failed.words
        start = self.start
        row.e2e_ns = max(0, t - start)
        row.request_b, row.response_b = self.body.size_b, self.response_b
        row.dns_ns, row.connect_ns, row.reused = self.dns_ns, self.connect_ns, self.reused
        if self.headers_at is not None:
            row.headers_ns = self.headers_at - start
            row.id = word(self._headers.get("request-id") or self._headers.get("x-request-id"))
            fill_limits(row, self._headers, wall_ns)
            self.observer.fill(row)
        reading = self.observer.reading
        if self.observer.streaming and reading is not None and not self.observer.blind:
            reading.timeline.fill(row, start)
        row.own_ns, row.own_chunk_ns = self._own_ns(), self.hold.mean_ns
        return row

    def _own_ns(self) -> float:
        """From the request's arrival to its sending, connecting left out, and the hold of the first delta."""
        if self.sent is None:
            return NAN
        connect = sum(part for part in (self.connect_ns, self.dns_ns) if not math.isnan(part))
        return max(0.0, self.sent - self.arrived - connect) + self.hold.first_ns

    def _model(self) -> str:
        reading = self.observer.reading
        return self.asked().model or (reading.model if reading is not None else "")

    def _phase(self) -> Phase:
        reading = self.observer.reading
        if self.headers_at is None and not self.body_done:
            return "sending"
        if reading is None:
            return "waiting" if self.headers_at is None else "answering"
        return "ending" if reading.finished else reading.timeline.phase


class Flights:
    """All requests: those in flight, those that ended since the last turn, and what went wrong in looking at them.

    Args:
        clock: for the times.

    Attributes:
        refused: requests not forwarded, by reason.
        unseen: answers that could not be looked into, by reason.
        idle: set while none is in flight.
        dropped: rows lost because nobody took them.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[int, Flight] = {}
        self._done: deque[Request] = deque()
        self._number = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.refused: Counter[str] = Counter()
        self.unseen: Counter[str] = Counter()
        self.dropped = 0
        self._cost = CallCost()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, method: str, endpoint: str, path: str, headers: Mapping[str, str]) -> Flight:
        """A request came."""
        self._number += 1
        flight = Flight(self._number, method, endpoint, path, headers, self._clock.now())
        self._open[flight.number] = flight
        self.idle.clear()
        return flight

    def look(self, flight: Flight, action: Callable[..., object], *values: object) -> None:
        """Do what only watches; its failure ends the watching of this request and nothing else."""
        try:
            action(*values)
        except Exception as error:  # (forwarding comes first; the reason is said in `status`)
            flight.observer.blind = f"opusmon failed on it: {type(error).__name__}"

    def end(self, flight: Flight, end: End) -> None:
        """It ended; does not raise, whatever the answer was."""
        if self._open.pop(flight.number, None) is None:
            return
        if not self._open:
            self.idle.set()
        now = self._clock.anchor()
        t = now.t if flight.ended_at is None else flight.ended_at
        self.look(flight, flight.finish, t)
        self.look(flight, lambda: self._add(flight.row(t, now.wall_ns, end), flight.hold))
        if flight.observer.blind:
            self.unseen[flight.observer.blind] += 1

    def _add(self, row: Request, hold: Hold) -> None:
        self._cost.add("request", hold.total_ns)
        if len(self._done) < MAX_DONE:
            self._done.append(row)
        else:
            self.dropped += 1

    def take_cost(self) -> CallCost:
        """Requests that ended and the time their chunks were held, since the last call."""
        cost, self._cost = self._cost, CallCost()
        return cost

    def take(self, limit: int = MAX_DONE) -> list[Request]:
        """The requests that ended since they were last taken, the first `limit` of them."""
        return [self._done.popleft() for _ in range(min(limit, len(self._done)))]

    def open_rows(self, t: int, part: int = MAX_OPEN) -> Iterator[list[OpenRequest]]:
        """Those in flight at `t` (monotonic ns), the oldest `MAX_OPEN`, so many at a time.

        Those that end before their part is asked for have no row.
        """
        oldest = list(islice(self._open.values(), MAX_OPEN))
        for start in range(0, len(oldest), part):
            alive = [flight for flight in oldest[start : start + part] if flight.number in self._open]
            if alive:
                yield [flight.open_row(t) for flight in alive]
