"""A server whose metrics pages are what a test says."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

SECRET = "hunter2-sk-ant-XYZZY"
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Script:
    """A server whose answers can be changed while it runs.

    Attributes:
        answers: path to what is answered there; text is a page.
        asked: path and time of each request.
        headers: of the last request.
        called: there was a request.
    """

    def __init__(self) -> None:
        self.answers: dict[str, str | Answer] = {}
        self.asked: list[tuple[str, float]] = []
        self.headers: dict[str, str] = {}
        self.called = asyncio.Event()

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append((request.path_qs, time.monotonic()))
        self.headers = dict(request.headers)
        self.called.set()
        answer = self.answers.get(request.path)
        if answer is None:
            return web.Response(status=404, text="no such thing: " + SECRET)
        if isinstance(answer, str):
            return web.Response(text=answer, content_type="text/plain", headers={"X-Secret": SECRET})
        return await answer(request)  # type: ignore[arg-type]


@asynccontextmanager
async def serving(script: Script, port: int = 0) -> AsyncIterator[int]:
    """Serve on loopback; the port."""
    server = web.ServerRunner(web.Server(script), shutdown_timeout=0.1)
    await server.setup()
    site = web.TCPSite(server, "127.0.0.1", port)
    await site.start()
    try:
        yield server.addresses[0][1]
    finally:
        await server.cleanup()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
