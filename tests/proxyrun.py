"""A proxy before a scripted upstream, without the collector's turns: rows are there as soon as a request has ended."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import aiohttp
from fake_upstream import FakeUpstream

from opusmon.clock import SystemClock
from opusmon.collectors.api.request import request_batch
from opusmon.collectors.proxy.flight import Flights
from opusmon.collectors.proxy.rules import Listen, Paths
from opusmon.collectors.proxy.server import Server
from opusmon.schema import StringTable


def as_dicts(batch, strings):
    """Rows with their texts."""
    return [
        {"t": int(row["t"])}
        | {f.name: strings.text(row[f.name]) if f.text else row[f.name].item() for f in batch.channel.fields}
        for row in batch.rows
    ]


@dataclass
class Got:
    """An answer as a plain client saw it; times are monotonic ns."""

    status: int
    headers: object
    body: bytes
    began: int
    chunks: list[tuple[int, bytes]] = field(default_factory=list)
    broken: bool = False
    ended: int = 0

    def seen_at(self, piece: bytes) -> int:
        """When the last byte of a piece was there."""
        end = self.body.index(piece) + len(piece)
        had = 0
        for t, chunk in self.chunks:
            had += len(chunk)
            if had >= end:
                return t
        raise AssertionError("the piece never came")


async def fetch(url, path="/v1/messages", body=b'{"model":"m","stream":true}', method="POST", **options):
    """Send a request as a plain client does that decodes nothing, and note when what came."""
    headers = options.pop("headers", {"Content-Type": "application/json"})
    connector = options.pop("connector", None)
    async with aiohttp.ClientSession(
        auto_decompress=False, connector=connector, max_field_size=1 << 16
    ) as session:
        began = time.monotonic_ns()
        async with session.request(method, url + path, data=body, headers=headers, **options) as response:
            got = Got(response.status, response.headers.copy(), b"", began)
            try:
                async for chunk in response.content.iter_any():
                    got.chunks.append((time.monotonic_ns(), chunk))
            except aiohttp.ClientError:
                got.broken = True
            got.ended = time.monotonic_ns()
    got.body = b"".join(chunk for _, chunk in got.chunks)
    return got


async def raw(run, head, body=b"", limit_s=60):
    """Send bytes, get bytes until the proxy closes the connection; None when it was reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", run.listen.port)
    try:
        writer.write(head.replace("\n", "\r\n").encode() + body)
        async with asyncio.timeout(limit_s):
            return await reader.read()
    except ConnectionResetError:
        return None
    finally:
        writer.close()


def head(method="POST", target="/v1/messages", host="localhost", *more):
    """The head of a request on a connection of its own, for `raw`."""
    return "\n".join([f"{method} {target} HTTP/1.1", f"Host: {host}", "Connection: close", *more, "", ""])


async def until(condition, limit_s=60):
    """Wait until something is so."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  (it is no event of ours)
            await asyncio.sleep(0.005)


class Proxied:
    """A fake upstream with a proxy before it."""

    def __init__(self, *, listen=None, extra=(), upstream_path="", clock=None):
        self.clock = clock or SystemClock()
        self.upstream = FakeUpstream()
        self.flights = Flights(self.clock)
        self.strings = StringTable()
        self._listen = listen or Listen("127.0.0.1", 0)
        self._extra, self._upstream_path = extra, upstream_path

    async def __aenter__(self):
        await self.upstream.__aenter__()
        target = self.upstream.url + self._upstream_path
        self.server = Server(self._listen, target, Paths(self._extra), self.flights, self.clock)
        await self.server.start()
        self.listen = self.server.listen
        self.url = f"http://{self.listen.text}"
        return self

    async def __aexit__(self, *_):
        await self.server.close()
        await self.upstream.__aexit__()

    def open_rows(self):
        """The rows of requests in flight."""
        return [row for part in self.flights.open_rows(self.clock.now()) for row in part]

    async def rows(self):
        """The rows of requests that have ended, once none is in flight."""
        async with asyncio.timeout(20):
            await self.flights.idle.wait()
        done = self.flights.take()
        return as_dicts(request_batch(done, self.strings), self.strings) if done else []

    async def ask(self, *scripts, path="/v1/messages", **options):
        """Script the upstream, send one request through the proxy: what the client saw, and the row."""
        self.upstream.on(path.partition("?")[0], *scripts)
        got = await fetch(self.url, path, **options)
        (row,) = await self.rows()
        return got, row
