"""One GET against a real HTTP server that behaves well, badly and worse, and the addresses it takes."""

from __future__ import annotations

import asyncio
import gzip
import socket
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from opusmon.collectors.engine.address import AddressError, parse
from opusmon.collectors.engine.fetch import Fetcher
from opusmon.collectors.engine.trouble import FetchError

from .engine_server import SECRET, Script, free_port, serving


@asynccontextmanager
async def raw(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """Serve bytes; the port."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await talk(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def sends(data: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return talk


async def said(port: int, total_s: float = 2.0, max_b: int = 8 * 2**20) -> FetchError:
    """The error that asking gives."""
    async with asyncio.timeout(10), Fetcher(total_s=total_s, max_b=max_b) as fetcher:
        with pytest.raises(FetchError) as caught:
            await fetcher.get(f"http://127.0.0.1:{port}/metrics?key={SECRET}")
    assert SECRET not in repr(caught.value) + caught.value.reason + caught.value.remedy
    return caught.value


# --- one GET


async def test_a_request_carries_nothing_but_itself() -> None:
    script = Script()
    script.answers["/metrics"] = "x 1\n"
    async with serving(script) as port, Fetcher() as fetcher:
        assert await fetcher.get(f"http://127.0.0.1:{port}/metrics") == "x 1\n"
    assert set(script.headers) == {"Host", "Accept", "Accept-Encoding", "User-Agent"}
    assert script.headers["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("deflate", zlib.compress)],
)
async def test_a_compressed_page_is_unpacked(encoding: str, pack: Callable[[bytes], bytes]) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=pack(b"x 1\n" * 50_000), headers={"Content-Encoding": encoding})

    script = Script()
    script.answers["/metrics"] = answer
    async with serving(script) as port, Fetcher() as fetcher:
        assert await fetcher.get(f"http://127.0.0.1:{port}/metrics") == "x 1\n" * 50_000


async def test_a_bomb_goes_off_at_the_limit() -> None:
    """64 MiB of nothing in 64 kB: no more than the limit is unpacked."""
    bomb = gzip.compress(bytes(64 * 2**20))

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})

    script = Script()
    script.answers["/metrics"] = answer
    async with serving(script) as port:
        assert (await said(port)).reason == "its page is over 8 MiB"


async def test_an_endless_page_is_given_up_at_the_limit() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x 1\n" * 10_000)

    script = Script()
    script.answers["/metrics"] = answer
    async with serving(script) as port:
        assert (await said(port, max_b=2**20)).reason == "its page is over 1 MiB"


async def test_a_slow_drip_is_given_up_in_time() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x 1\n")
            await asyncio.sleep(0.02)

    script = Script()
    script.answers["/metrics"] = answer
    async with serving(script) as port:
        began = time.monotonic()
        assert (await said(port, total_s=0.3)).reason == "no whole answer within 0.3 s"
        assert time.monotonic() - began < 10


async def test_silence_is_given_up_in_time() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with raw(talk) as port:
        assert (await said(port, total_s=0.2)).reason == "no whole answer within 0.2 s"


async def test_nobody_there() -> None:
    error = await said(free_port())
    assert (error.reason, error.refused) == ("nothing listens there", True)


OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it closed the connection without an answer"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "it does not speak HTTP"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n4\r\nx 1\n\r\n400\r\ny ", "its answer is cut short"),
        (OK + b"Content-Length: 400\r\n\r\nx 1\n", "its answer is cut short"),
        (OK + b"Content-Encoding: gzip\r\n\r\nx 1\n", "its compressed answer is damaged"),
        (
            OK + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(b"x 1\n" * 99)[:-12],
            "its compressed answer is cut short",
        ),
        (
            OK + b"Content-Encoding: br\r\n\r\nx 1\n",
            "it compresses its answer in a way that was not asked for",
        ),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n", "it answers HTTP 500"),
        (
            b"HTTP/1.1 302 F\r\nLocation: http://10.0.0.1/\r\nContent-Length: 0\r\n\r\n",
            "it redirects (HTTP 302), which is not followed",
        ),
        (b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", "it wants a key (HTTP 401); opusmon sends none"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 0\r\n\r\n",
            "it answers HTML or JSON, not metrics",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
async def test_bad_answers_are_named(data: bytes, reason: str) -> None:
    async with raw(sends(data)) as port:
        assert (await said(port)).reason == reason


async def test_a_connection_reset_is_named() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"Content-Length: 400\r\n\r\nx 1\n")
        await writer.drain()
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    async with raw(talk) as port:
        assert (await said(port)).reason in ("its answer is cut short", "the connection broke")


# --- addresses


@pytest.mark.parametrize(
    ("text", "label", "url"),
    [
        ("http://10.0.0.5:8000", "10.0.0.5:8000/metrics", "http://10.0.0.5:8000/metrics"),
        ("localhost:8000/", "localhost:8000/metrics", "http://localhost:8000/metrics"),
        ("https://gpu-7/v1/metrics", "gpu-7:443/v1/metrics", "https://gpu-7:443/v1/metrics"),
        ("http://[::1]:8080", "[::1]:8080/metrics", "http://[::1]:8080/metrics"),
        (f"http://h:1/m?k={SECRET}#{SECRET}", "h:1/m", f"http://h:1/m?k={SECRET}"),
    ],
)
def test_addresses(text: str, label: str, url: str) -> None:
    address = parse(text)
    path = address.path or "/metrics"
    assert (address.label(path), address.url(path)) == (label, url)
    assert SECRET not in repr(address)


@pytest.mark.parametrize(
    "text",
    [
        f"http://me:{SECRET}@h:1",
        f"http://{SECRET}@h:1",
        "ftp://h",
        "file:///etc/passwd",
        "",
        "http://",
        "h:99999",
        "h:0",
        "http://[::1",
        "http://a b:1",
    ],
)
def test_what_is_no_address_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse(text)
    assert SECRET not in str(caught.value)
