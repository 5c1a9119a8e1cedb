"""A pass-through proxy before an API: latency as clients see it, without a change to them but one variable."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.util import find_spec
from typing import ClassVar

from opusmon.channels import COST, REQUEST, REQUEST_OPEN, STATUS
from opusmon.clock import NS, Clock
from opusmon.collectors.base import MIN_INTERVAL_NS, Unavailable, every
from opusmon.schema import Batch, Channel, StringTable


class ProxyCollector:
    """Forwards requests to one upstream and makes a row of each. Run it in a process of its own.

    Args:
        strings: text ids of the rows refer to it.
        clock: time of the rows.
        interval_ns: how often rows are given out; raised to 250 ms.
        only_pids: not used: a request does not say which process sent it.
        upstream: base URL of the API.
        listen: `127.0.0.1:PORT`, `[::1]:PORT` or `unix:/path`; loopback only.
        allow: paths to forward beyond the usual ones, one by one or separated by commas; `/path/*` for all below it.
        drain_s: how long `stop` waits for requests in flight.

    Attributes:
        address: where it listens, "" while it does not.
    """

    name: ClassVar[str] = "proxy"
    channels: Sequence[Channel] = (REQUEST, REQUEST_OPEN, STATUS, COST)

    def __init__(
        self,
        strings: StringTable,
        clock: Clock,
        interval_ns: int = NS,
        only_pids: frozenset[int] = frozenset(),  # noqa: ARG002  (the collectors' common signature)
        *,
        upstream: str = "",
        listen: str = "127.0.0.1:8788",
        allow: str | Sequence[str] = (),
        drain_s: float = 0.0,
    ) -> None:
        self.strings = strings
        self._clock = clock
        self._interval_ns = max(interval_ns, MIN_INTERVAL_NS)
        self._upstream, self._listen, self._allow, self._drain_s = upstream, listen, allow, drain_s
        self._stop = asyncio.Event()
        self.address = ""

    @classmethod
    def probe(cls) -> Unavailable | None:
        """Whether what it is made of is installed."""
        if find_spec("aiohttp") is None:
            return Unavailable("the proxy needs aiohttp, which is not installed", "pip install aiohttp")
        return None

    def stop(self) -> None:
        """End `batches` now, after the requests in flight or `drain_s`; then come the rows that were not given out."""
        self._stop.set()

    async def batches(self) -> AsyncIterator[Batch]:
        """Rows until stopped or closed.

        Raises:
            ProxyUnavailable: the upstream or the address to listen on will not do.
        """
        # Here, because this pulls in aiohttp.
        from opusmon.collectors.proxy import rules
        from opusmon.collectors.proxy.flight import Flights
        from opusmon.collectors.proxy.server import Server, calm_gc
        from opusmon.collectors.proxy.turns import Turns

        flights = Flights(self._clock)
        upstream = rules.parse_upstream(self._upstream)
        paths = rules.Paths(rules.parse_allow(self._allow))
        server = Server(rules.parse_listen(self._listen), upstream, paths, flights, self._clock)
        try:
            await server.start()
            calm_gc()
            self.address = server.listen.text
            sight = f"forwards {self.address} to {upstream}"
            tls = upstream.startswith("https:")
            turns = Turns(
                self.name, self.strings, self._clock, self._interval_ns, flights, sight=sight, tls=tls
            )
            async for tick in every(self._interval_ns, self._clock, self._stop):
                for batch in turns.batches(tick):
                    yield batch
                    await asyncio.sleep(0)
            await server.drain(self._drain_s)
            await server.close()
            for batch in turns.batches():
                yield batch
        finally:
            self.address = ""
            await server.close()


async def serve_proxy(
    push: Callable[[Batch], None],
    strings: StringTable,
    clock: Clock,
    *,
    upstream: str,
    listen: str = "127.0.0.1:8788",
    allow: str | Sequence[str] = (),
    interval_ns: int = NS,
    drain_s: float = 10.0,
    stop: asyncio.Event,
    ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Run a proxy until `stop` is set, for the command of that name.

    Args:
        push: takes the batches: a recorder, a printer.
        strings: the table of the rows' texts.
        clock: time of the rows.
        upstream: base URL of the API.
        listen: see `ProxyCollector`.
        allow: see `ProxyCollector`.
        interval_ns: how often rows are given out.
        drain_s: how long requests in flight may go on after `stop`.
        stop: set by the caller, on SIGINT and SIGTERM.
        ready: called once with the address it listens on.

    Raises:
        ProxyUnavailable: it cannot run as asked; `why` has reason and remedy.
    """
    collector = ProxyCollector(
        strings, clock, interval_ns, upstream=upstream, listen=listen, allow=allow, drain_s=drain_s
    )
    stopping = asyncio.create_task(_stop_with(collector, stop))
    said = False
    try:
        async with contextlib.aclosing(collector.batches()) as batches:  # type: ignore[type-var]
            async for batch in batches:
                if not said:
                    said = True
                    ready(collector.address)
                push(batch)
    finally:
        stopping.cancel()


async def _stop_with(collector: ProxyCollector, stop: asyncio.Event) -> None:
    await stop.wait()
    collector.stop()
