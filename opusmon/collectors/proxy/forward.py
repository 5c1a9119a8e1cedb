"""Forwards one request and its answer, byte for byte and at once, and lets a flight look on."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import struct
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from opusmon.clock import Clock
from opusmon.collectors.proxy.body import Body
from opusmon.collectors.proxy.errors import Failure, failure
from opusmon.collectors.proxy.flight import Flight, Flights
from opusmon.collectors.proxy.rules import METHODS, Paths, forwardable, own_hosts

_OWN = ("Content-Type", "Server", "Date")
"""Headers aiohttp adds to an answer that lacks them."""
STALE_NS = 100_000_000
"""An idle connection that the upstream has closed shows it within a round trip, not later than this."""
_STALE_MOST = 8
"""After so many stale connections in a row the next failure counts."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Refusal(Exception):  # noqa: N818  (it reads as what happened)
    """A request that is not forwarded.

    Attributes:
        status: HTTP status of the answer.
        reason: what the answer says; also the name under which it is counted.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class _Answer(web.StreamResponse):
    """A response with the upstream's headers and no others."""

    async def _prepare_headers(self) -> None:
        absent = [name for name in _OWN if name not in self.headers]
        await super()._prepare_headers()
        for name in absent:
            self.headers.pop(name, None)


class Forwarder:
    """The server's handler.

    Args:
        session: to the upstream; follows no redirects, keeps no cookies, decodes nothing.
        upstream: base URL.
        paths: what is forwarded.
        flights: what looks on.
        clock: for the times.
        any_host: any `Host` will do: the socket cannot be reached from a browser.

    Attributes:
        stopping: opusmon is ending; requests cut off now are not the client's doing.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        upstream: str,
        paths: Paths,
        flights: Flights,
        clock: Clock,
        *,
        any_host: bool = False,
    ) -> None:
        self._session, self._upstream, self._paths = session, upstream, paths
        self._flights, self._clock, self._any_host = flights, clock, any_host
        self.stopping = False

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        path = request.raw_path.partition("?")[0]  # as it was sent, not normalised
        try:
            endpoint = self._admit(request, path)
        except Refusal as refusal:
            self._flights.refused[refusal.reason] += 1
            return _own_answer(refusal.status, refusal.reason)
        flight = self._flights.begin(request.method, endpoint, path, request.headers)
        try:
            return await self._serve(request, flight)
        except asyncio.CancelledError:
            self._gone(flight)
            raise
        finally:
            # Where an end was noted on the way, this does nothing.
            self._flights.end(flight, "cut")

    def _admit(self, request: web.BaseRequest, path: str) -> str:
        """The allow-list's entry for a request.

        Raises:
            Refusal: it is not to be forwarded.
        """
        if not self._any_host and not own_hosts(request.headers.getall("host", ())):
            raise Refusal(421, "opusmon answers to loopback host names only: use http://127.0.0.1")
        if request.method not in METHODS:
            raise Refusal(405, f"opusmon forwards {', '.join(sorted(METHODS))} only")
        endpoint = self._paths.match(path)
        if not endpoint:
            raise Refusal(
                404,
                "opusmon does not forward this path: allow it with --proxy-allow, or --allow of opusmon proxy",
            )
        return endpoint

    async def _serve(self, request: web.BaseRequest, flight: Flight) -> web.StreamResponse:
        try:
            await _go_on(request)
            upstream = await self._ask(request, flight)
        except (aiohttp.ClientError, OSError, web.RequestPayloadError) as error:
            return self._no_answer(request, flight, error)
        try:
            return await self._relay(request, upstream, flight)
        except BaseException:
            upstream.close()  # at once: the upstream must not go on generating for nobody
            raise

    async def _ask(self, request: web.BaseRequest, flight: Flight) -> aiohttp.ClientResponse:
        """Send the request; returns when the answer's headers have come."""

        def done() -> None:
            flight.body_done = True

        body = Body(request, lambda piece: self._flights.look(flight, flight.body.feed, piece), done)
        for _ in range(_STALE_MOST):
            try:
                response = await self._send(request, flight, body)
                break
            except (aiohttp.ClientError, OSError) as error:
                if not (_stale(error, flight, self._clock.now()) and body.again):
                    raise
        else:
            response = await self._send(request, flight, body)
        body.let_go()
        flight.headers_at = flight.last_byte = self._clock.now()
        return response

    async def _send(self, request: web.BaseRequest, flight: Flight, body: Body) -> aiohttp.ClientResponse:
        flight.sent, flight.reused = None, math.nan
        return await self._session.request(
            request.method,
            URL(self._upstream + request.raw_path, encoded=True),
            headers=forwardable(CIMultiDict(request.headers), request=True),
            data=body.parts(),
            allow_redirects=False,
            trace_request_ctx=flight,
        )

    async def _relay(
        self, request: web.BaseRequest, upstream: aiohttp.ClientResponse, flight: Flight
    ) -> web.StreamResponse:
        """Pass the answer on.

        Raises:
            ConnectionAbortedError: the upstream broke off; the client's connection is cut, not ended.
        """
        answer = _Answer(
            status=upstream.status,
            reason=upstream.reason,
            headers=forwardable(CIMultiDict(upstream.headers), request=False),
        )
        try:
            await answer.prepare(request)
            self._flights.look(flight, flight.head, upstream.status, upstream.headers)
            await self._pump(request, upstream, answer, flight)
            flight.ended_at = self._clock.now()
            await answer.write_eof()
            self._flights.end(flight, "clean")
        except _UpstreamLost as lost:
            flight.failed = lost.failure
            self._flights.end(flight, lost.failure.end)
            _cut(request)
            raise ConnectionAbortedError(lost.failure.words) from None
        except OSError:  # the client's side
            self._gone(flight)
            raise ConnectionAbortedError("the client has gone") from None
        return answer

    async def _pump(
        self,
        request: web.BaseRequest,
        upstream: aiohttp.ClientResponse,
        answer: web.StreamResponse,
        flight: Flight,
    ) -> None:
        """Copy the body; each piece goes out before it is looked at."""
        now, look, transport = self._clock.now, self._flights.look, request.transport
        content = upstream.content
        while True:
            try:
                chunk = await content.readany()
            except (aiohttp.ClientError, OSError) as error:
                raise _UpstreamLost(failure(error)) from None
            if not chunk:
                return
            read = now()
            await answer.write(chunk)
            waits = transport is None or transport.get_write_buffer_size() > 0
            held_ns = None if waits else now() - read
            look(flight, flight.chunk, read, chunk, held_ns)

    def _gone(self, flight: Flight) -> None:
        """The client has closed its connection, or opusmon is ending."""
        self._flights.end(flight, "stopped" if self.stopping else "client")

    def _no_answer(
        self, request: web.BaseRequest, flight: Flight, error: BaseException
    ) -> web.StreamResponse:
        """What the client gets when the upstream gave no answer at all."""
        if request.content.exception() is not None:
            self._gone(flight)
            return _own_answer(400, "the request's body broke off")
        why = flight.failed = failure(error)
        self._flights.end(flight, why.end)
        return _own_answer(why.status, f"the upstream gave no answer: {why.words}")


def _stale(error: BaseException, flight: Flight, now: int) -> bool:
    """Whether the upstream had closed an idle connection just as we took it, so that it has seen nothing of this.

    Such a request is sent again on another connection: the client, which has its own with us, could not know. One
    that was under way for longer, or on a connection of its own, may have been worked on and is not.
    """
    if flight.reused != 1.0 or isinstance(error, TimeoutError | aiohttp.ClientPayloadError):
        return False
    broken = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | ConnectionError)
    return broken and (flight.sent is None or now - flight.sent < STALE_NS)


class _UpstreamLost(Exception):  # noqa: N818
    def __init__(self, why: Failure) -> None:
        super().__init__(why.words)
        self.failure = why


def _own_answer(status: int, reason: str) -> web.Response:
    """An error of the proxy itself, in the envelope that both clients read; it quotes nothing of the request."""
    body = {"type": "error", "error": {"type": "opusmon_proxy", "message": f"opusmon proxy: {reason}"}}
    return web.Response(
        status=status,
        body=json.dumps(body).encode(),
        content_type="application/json",
        headers={"X-Opusmon-Proxy": "error", "Server": "opusmon"},
    )


async def _go_on(request: web.BaseRequest) -> None:
    """Answer `Expect: 100-continue`: the request is one that is forwarded."""
    if request.headers.get("expect", "").lower() == "100-continue" and request.version >= (1, 1):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0


def _cut(request: web.BaseRequest) -> None:
    """Make the close that follows an error to the client.

    A chunked body without its last chunk, or one shorter than its length, is one already. What ends with the
    connection (HTTP/1.0) needs a reset.
    """
    transport = request.transport
    if transport is None or request.version >= (1, 1):
        return
    sock: Any = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)


def tracing(clock: Clock) -> aiohttp.TraceConfig:
    """Tells flights when their request was sent and what connecting took."""
    trace = aiohttp.TraceConfig()

    def flight_of(context: SimpleNamespace) -> Flight:
        flight: Flight = context.trace_request_ctx
        return flight

    async def sent(_: object, context: SimpleNamespace, __: object) -> None:
        flight_of(context).sent = clock.now()

    async def connecting(_: object, context: SimpleNamespace, __: object) -> None:
        flight = flight_of(context)
        flight.connect_from, flight.reused = clock.now(), 0.0

    async def connected(_: object, context: SimpleNamespace, __: object) -> None:
        flight_of(context).connected(clock.now())

    async def resolving(_: object, context: SimpleNamespace, __: object) -> None:
        flight_of(context).dns_from = clock.now()

    async def resolved(_: object, context: SimpleNamespace, __: object) -> None:
        flight_of(context).resolved(clock.now())

    async def reused(_: object, context: SimpleNamespace, __: object) -> None:
        flight_of(context).reused = 1.0

    trace.on_request_headers_sent.append(sent)
    trace.on_connection_create_start.append(connecting)
    trace.on_connection_create_end.append(connected)
    trace.on_dns_resolvehost_start.append(resolving)
    trace.on_dns_resolvehost_end.append(resolved)
    trace.on_connection_reuseconn.append(reused)
    return trace
