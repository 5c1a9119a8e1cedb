"""The listening side: loopback address or unix socket, and the connections to the upstream."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import socket
import stat
from pathlib import Path

import aiohttp
from aiohttp import web

from opusmon.clock import Clock
from opusmon.collectors.proxy.errors import ProxyUnavailable
from opusmon.collectors.proxy.flight import Flights
from opusmon.collectors.proxy.forward import Forwarder, tracing
from opusmon.collectors.proxy.rules import Listen, Paths

CONNECT_S = 10.0
"""The only timeout of its own: streams may be silent for as long as they like."""
KEEP_ALIVE_S = 120.0
"""For idle clients; one that is closed too soon makes them connect anew."""
IDLE_S = 4.0
"""For idle connections to the upstream: servers close theirs after 5 s, and a request sent at that moment is lost."""
_CUT_S = 0.05
"""At the end, for requests that are just ending; then they are cut off."""
_HEADER_B = 65_536
_BACKLOG = 1024
_FILES = 65_536
_SKIPPED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""Headers aiohttp would add to a request that lacks them."""


class Server:
    """A proxy that runs.

    Args:
        listen: where.
        upstream: base URL.
        paths: what is forwarded.
        flights: what looks on.
        clock: for the times.

    Attributes:
        listen: where it does listen, with the port that was free.
    """

    def __init__(self, listen: Listen, upstream: str, paths: Paths, flights: Flights, clock: Clock) -> None:
        self.listen = listen
        self._upstream, self._paths, self._flights, self._clock = upstream, paths, flights, clock
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.ServerRunner | None = None
        self._forwarder: Forwarder | None = None
        self._socket_id: tuple[int, int] | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            ProxyUnavailable: the address is taken, or may not be used.
        """
        _hush()
        _more_files()
        sock = listening_socket(self.listen)
        if self.listen.path:
            self._socket_id = _identity(self.listen.path)
        else:
            self.listen = Listen(self.listen.host, int(sock.getsockname()[1]))
        if self._upstream in (f"http://{self.listen.text}", f"http://localhost:{self.listen.port}"):
            sock.close()
            raise ProxyUnavailable(
                "the upstream is the proxy itself", "name the engine's address as the upstream"
            )
        self._session = _session(self._clock)
        self._forwarder = Forwarder(
            self._session,
            self._upstream,
            self._paths,
            self._flights,
            self._clock,
            any_host=bool(self.listen.path),
        )
        self._runner = web.ServerRunner(_server(self._forwarder), shutdown_timeout=_CUT_S)
        await self._runner.setup()
        await web.SockSite(self._runner, sock, backlog=_BACKLOG).start()

    async def drain(self, limit_s: float) -> None:
        """Take no new connections, and wait for the requests in flight, for at most so long."""
        if self._runner is None:
            return
        for site in list(self._runner.sites):
            await site.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._flights.idle.wait()

    async def close(self) -> None:
        """End it; what is still in flight is cut off."""
        if self._forwarder is not None:
            self._forwarder.stopping = True
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()
        self._runner = self._session = None
        # Handlers have been cancelled; each notes how its request ended when it gets its turn.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CUT_S):
                await self._flights.idle.wait()
        if self._socket_id is not None:
            _unlink(Path(self.listen.path), self._socket_id)


def _server(forwarder: Forwarder) -> web.Server:
    return web.Server(
        forwarder,
        handler_cancellation=True,  # a client that goes takes its upstream request along, at once
        access_log=None,
        logger=_silent(),
        auto_decompress=False,
        keepalive_timeout=KEEP_ALIVE_S,
        max_line_size=_HEADER_B,
        max_field_size=_HEADER_B,
    )


def _session(clock: Clock) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=_SKIPPED,
        trust_env=False,
        max_line_size=_HEADER_B,
        max_field_size=_HEADER_B,
        trace_configs=[tracing(clock)],
    )


def _silent() -> logging.Logger:
    """A logger that keeps nothing: what aiohttp logs may quote headers and URLs."""
    logger = logging.getLogger("opusmon.proxy")
    logger.setLevel(logging.CRITICAL + 1)
    return logger


def _hush() -> None:
    """The same for the loggers that aiohttp's client and parsers use; this process is the proxy's."""
    for name in ("aiohttp.client", "aiohttp.internal", "aiohttp.server", "aiohttp.web"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _more_files() -> None:
    """Each request takes two file descriptors, and the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def calm_gc() -> None:
    """Leave what lives for ever out of garbage collection, and collect less often.

    A full collection walks all modules' objects and holds every stream up for 20-30 ms (measured: the p99 of the time
    added to first tokens fell from 27 ms to 4 ms).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def listening_socket(listen: Listen) -> socket.socket:
    """A bound socket; a unix one is for its owner only (0600).

    Raises:
        ProxyUnavailable: the address is taken, or may not be used.
    """
    try:
        return _bound_unix(Path(listen.path)) if listen.path else _bound_tcp(listen)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            who = f"fuser {listen.path}" if listen.path else f"ss -ltnp 'sport = :{listen.port}'"
            raise ProxyUnavailable(
                f"{listen.text} is in use", f"choose another address; {who} says who has it"
            ) from None
        text = (error.strerror or type(error).__name__).lower()
        raise ProxyUnavailable(f"cannot listen on {listen.text}: {text}", "choose another address") from None


def _bound_tcp(listen: Listen) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in listen.host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((listen.host, listen.port))
        sock.listen(_BACKLOG)  # here, so that a port in use is known now
    except BaseException:
        sock.close()
        raise
    return sock


def _bound_unix(path: Path) -> socket.socket:
    _clear(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        sock.bind(str(path))
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(before)
    return sock


def _clear(path: Path) -> None:
    """Remove a socket that nobody listens on.

    Raises:
        OSError: somebody does, or it is something else.
    """
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise OSError(errno.EEXIST, "it exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(1)
        refused = trial.connect_ex(str(path)) == errno.ECONNREFUSED
    if not refused:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    path.unlink()


def _identity(path: str) -> tuple[int, int]:
    info = Path(path).lstat()
    return info.st_dev, info.st_ino


def _unlink(path: Path, socket_id: tuple[int, int]) -> None:
    """Remove our socket, unless another took its place."""
    with contextlib.suppress(OSError):
        if _identity(str(path)) == socket_id:
            path.unlink()
