"""When each phase of one HTTP request began and ended: name lookup, connect, TLS, sending, headers.

The HTTP library reports its steps but looks the name up inside its connect step, so the lookup is done and timed
here, by a network backend of our own. A connection that is open already has none of the first three phases.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import httpcore2
import httpx2

KEEP_OPEN_S = 30.0
_NAN = float("nan")
_Option = tuple[int, int, int] | tuple[int, int, bytes | bytearray] | tuple[int, int, None, int]
_CURRENT: ContextVar[Phases | None] = ContextVar("phases", default=None)


@dataclass(slots=True)
class Phases:
    """What was seen of one request.

    Args:
        now: monotonic ns.

    Attributes:
        stage: the step it is in or failed in: idle, dns, connect, tls, sending, waiting, reading.
        dns_ns: name lookup; NaN for an address written in digits, and where a connection was reused.
        connect_ns: TCP connect, addresses that failed before included.
        tls_ns: TLS handshake.
        sent_at: when the first byte of the request was handed to the kernel; None before.
        headers_at: when the response headers were complete; None before.
        request_b: bytes of the request's body; NaN before it was made.
        response_b: bytes of the response's body so far, as they were on the wire.
        byte_at: when the last of them came, or the headers; None before.
    """

    now: Callable[[], int]
    stage: str = "idle"
    dns_ns: float = _NAN
    connect_ns: float = _NAN
    tls_ns: float = _NAN
    sent_at: int | None = None
    headers_at: int | None = None
    request_b: float = _NAN
    response_b: int = 0
    byte_at: int | None = None
    _opened: bool = False
    _began: int = 0
    _looked_up: int = 0

    @property
    def reused(self) -> float:
        """1 when it went over an open connection, 0 over a new one, NaN when it never went out."""
        return _NAN if self.sent_at is None else float(not self._opened)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Requests of this task are timed here."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def looked_up(self, took_ns: int) -> None:
        """The name lookup has ended."""
        self.dns_ns = took_ns
        self._looked_up += took_ns

    async def trace(self, name: str, _: Mapping[str, Any]) -> None:
        """A step of the HTTP library: "connection.start_tls.complete" and so on; HTTP/1.1 and HTTP/2 alike."""
        step = name.partition(".")[2]
        self.stage = _STAGES.get(step, self.stage)
        mark = _MARKS.get(step)
        if mark is not None:
            mark(self, self.now())

    def connecting(self, t: int) -> None:
        """A new connection is opened from `t` on."""
        self._opened, self._began = True, t

    def connected(self, t: int) -> None:
        """It is open; the lookup was a part of that step."""
        self.connect_ns = t - self._began - self._looked_up

    def securing(self, t: int) -> None:
        """The TLS handshake begins."""
        self._began = t

    def secured(self, t: int) -> None:
        """It has ended."""
        self.tls_ns = t - self._began

    def sending(self, t: int) -> None:
        """The request leaves."""
        self.sent_at = t if self.sent_at is None else self.sent_at

    def answered(self, t: int) -> None:
        """The response's headers are here."""
        self.headers_at = self.byte_at = t

    def received(self, size_b: int) -> None:
        """A part of the body is here."""
        self.response_b += size_b
        self.byte_at = self.now()


_MARKS: dict[str, Callable[[Phases, int], None]] = {
    "connect_tcp.started": Phases.connecting,
    "connect_tcp.complete": Phases.connected,
    "start_tls.started": Phases.securing,
    "start_tls.complete": Phases.secured,
    "send_request_headers.started": Phases.sending,
    "receive_response_headers.complete": Phases.answered,
}
_STAGES = {
    "connect_tcp.started": "connect",
    "start_tls.started": "tls",
    "send_request_headers.started": "sending",
    "receive_response_headers.started": "waiting",
    "receive_response_headers.complete": "reading",
}


class LookupBackend(httpcore2.AsyncNetworkBackend):
    """Looks names up itself, so that it can be timed, then tries the addresses one after another."""

    def __init__(self) -> None:
        self._inner = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  (the library's signature)
        local_address: str | None = None,
        socket_options: Iterable[_Option] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect to a host by name.

        Raises:
            httpcore2.ConnectError: no such name, or no address answered.
            httpcore2.ConnectTimeout: neither within `timeout` seconds, lookup included.
        """
        try:
            async with asyncio.timeout(timeout):
                addresses = await _addresses(host, port)
                return await self._first(addresses, port, local_address, socket_options)
        except TimeoutError:
            raise httpcore2.ConnectTimeout from None

    async def _first(
        self, addresses: list[str], port: int, local: str | None, options: Iterable[_Option] | None
    ) -> httpcore2.AsyncNetworkStream:
        last: Exception = httpcore2.ConnectError()
        for address in addresses:
            try:
                return await self._inner.connect_tcp(address, port, None, local, options)
            except httpcore2.ConnectError as error:
                last = error
        raise last

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await self._inner.sleep(seconds)


async def _addresses(host: str, port: int) -> list[str]:
    """The addresses of a host, in the resolver's order, each once; the time it took is noted."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return [host]
    phases = _CURRENT.get()
    if phases is not None:
        phases.stage, began = "dns", phases.now()
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:  # socket.gaierror among them
        raise httpcore2.ConnectError from error
    if phases is not None:
        phases.looked_up(phases.now() - began)
        phases.stage = "connect"
    return list(dict.fromkeys(str(one[4][0]) for one in found))


class TimedTransport(httpx2.AsyncBaseTransport):
    """Sends requests over HTTP/1.1 and notes their phases in the `Phases` of the calling task.

    No proxy of the environment is used: its time would be taken for the server's. Certificates are checked against
    the system's store, or SSL_CERT_FILE.
    """

    def __init__(self) -> None:
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=ssl.create_default_context(),
            max_connections=16,
            max_keepalive_connections=2,
            keepalive_expiry=KEEP_OPEN_S,
            network_backend=LookupBackend(),
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send one request; its response's body is still to be read."""
        phases = _CURRENT.get()
        extensions = dict(request.extensions)
        if phases is not None:
            extensions["trace"] = phases.trace
            phases.request_b = float(request.headers.get("content-length", "nan"))
        answer = await self._pool.handle_async_request(_lower(request, extensions))
        body = _Counted(answer.stream, phases)
        return httpx2.Response(
            answer.status, headers=answer.headers, stream=body, extensions=dict(answer.extensions)
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._pool.aclose()


def _lower(request: httpx2.Request, extensions: dict[str, Any]) -> httpcore2.Request:
    url = request.url
    return httpcore2.Request(
        method=request.method,
        url=httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
        headers=request.headers.raw,
        content=request.stream,
        extensions=extensions,
    )


@dataclass
class _Counted(httpx2.AsyncByteStream):
    """A response's body that counts its bytes before they are decompressed."""

    inner: Any
    phases: Phases | None = field(default=None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self.inner:
            if self.phases is not None:
                self.phases.received(len(part))
            yield part

    async def aclose(self) -> None:
        """Let the connection go."""
        await self.inner.aclose()


TRANSPORT_ERRORS: tuple[type[Exception], ...] = (
    httpx2.HTTPError,
    httpcore2.NetworkError,
    httpcore2.ProtocolError,
)
"""What a body that is cut short raises."""
TIMEOUTS: tuple[type[Exception], ...] = (TimeoutError, httpx2.TimeoutException, httpcore2.TimeoutException)
"""What a server that does not answer in time raises."""
