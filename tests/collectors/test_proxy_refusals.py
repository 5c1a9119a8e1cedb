"""What the proxy does not forward, the socket it listens on, and how it stops."""

import asyncio
import contextlib
import socket
import stat

import aiohttp
import fake_upstream as up
import pytest
from fake_upstream import Script
from proxyrun import Proxied, fetch, head, raw, until

from opusmon.collectors.proxy.errors import ProxyUnavailable
from opusmon.collectors.proxy.rules import Listen, parse_listen
from opusmon.collectors.proxy.server import Server, listening_socket

OK = Script.json(up.MESSAGE)


# Refusals


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "10.0.0.1:8788", "localhost.evil", "", "[fe80::1]"]
)
async def test_foreign_hosts_are_refused(host):
    async with Proxied() as run:
        answer = await raw(run, head("POST", "/v1/messages", host))
        assert run.upstream.seen == []
        assert sum(run.flights.refused.values()) == 1
    assert answer.startswith(b"HTTP/1.1 421 ")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:9", "127.0.0.1:8788", "127.9.9.9", "[::1]:8788", "app.localhost"]
)
async def test_own_hosts_are_answered(host):
    async with Proxied() as run:
        run.upstream.on("/v1/models", Script.json({}))
        assert (await raw(run, head("GET", "/v1/models", host))).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("target", ["/", "/v1/files", "/v1/messages/", "/v1/models/../files", "/v1/models/%2e%2e/files",
    "/metrics", "http://evil.example/v1/messages", "//evil.example/v1/messages", "/v1/messages;x", "/V1/messages"])  # fmt: skip
async def test_other_paths_are_refused(target):
    async with Proxied() as run:
        answer = await raw(run, head("GET", target))
        assert run.upstream.seen == []
        assert await run.rows() == []
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"--allow" in answer


@pytest.mark.parametrize("method", ["CONNECT", "TRACE", "PUT"])
async def test_other_methods_are_refused(method):
    async with Proxied() as run:
        target = "evil.example:443" if method == "CONNECT" else "/v1/messages"
        answer = await raw(run, head(method, target))
    assert answer.startswith((b"HTTP/1.1 405 ", b"HTTP/1.1 404 "))


async def test_allowed_paths_and_an_upstream_below_a_path():
    async with Proxied(extra=("/v1/rerank", "/api/*"), upstream_path="/base") as run:
        run.upstream.on("/base/v1/rerank", Script.json({}))
        run.upstream.on("/base/api/x/y", Script.json({}))
        assert (await fetch(run.url, "/v1/rerank")).status == 200
        assert (await fetch(run.url, "/api/x/y?q=1")).status == 200
        rows = await run.rows()
    assert [row["endpoint"] for row in rows] == ["/v1/rerank", "/api/*"]


async def test_garbage_is_answered_and_no_row():
    async with Proxied() as run:
        assert (await raw(run, "\x00\x01 garbage\n\n")).startswith(b"HTTP/1.0 400 ")
        smuggled = head(
            "POST", "/v1/messages", "localhost", "Content-Length: 5", "Transfer-Encoding: chunked"
        )
        assert (await raw(run, smuggled, b"0\r\n\r\n")).startswith(b"HTTP/1.0 400 ")
        assert await run.rows() == []


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
async def test_an_upgrade_is_not_taken_up_and_the_request_goes_on(protocol):
    """curl --http2 and Java's client ask for h2c with every plain request, bodies and all."""
    more = [
        "Connection: Upgrade, HTTP2-Settings",
        f"Upgrade: {protocol}",
        "HTTP2-Settings: AAMAAABkAAQAAP__",
        "Content-Length: 13",
    ]
    async with Proxied() as run:
        run.upstream.on("/v1/messages", OK)
        reader, writer = await asyncio.open_connection("127.0.0.1", run.listen.port)
        text = "\n".join(["POST /v1/messages HTTP/1.1", "Host: localhost", *more, "", ""])
        writer.write(text.replace("\n", "\r\n").encode() + b'{"model":"m"}')
        async with asyncio.timeout(5):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        seen = run.upstream.seen[0]
        (row,) = await run.rows()
    assert seen.body == b'{"model":"m"}'
    assert [name for name, _ in seen.headers] == ["Host", "Content-Length"]
    assert row["outcome"] == "ok"


# The socket


async def test_a_unix_socket_is_the_owners_only_and_goes_away(tmp_path):
    path = tmp_path / "proxy.sock"
    async with Proxied(listen=Listen(path=str(path))) as run:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        run.upstream.on("/v1/messages", Script(up.STREAM))
        got = await fetch("http://any.name", connector=aiohttp.UnixConnector(str(path)))
        assert got.body == b"".join(up.STREAM)
        with pytest.raises(ProxyUnavailable, match="in use"):
            listening_socket(Listen(path=str(path)))
    assert not path.exists()


async def test_a_dead_socket_is_replaced_and_another_file_is_not(tmp_path):
    path = tmp_path / "proxy.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listening_socket(Listen(path=str(path))).close()
    path.unlink()
    path.write_text("precious")
    with pytest.raises(ProxyUnavailable, match="it exists and is not a socket"):
        listening_socket(Listen(path=str(path)))
    assert path.read_text() == "precious"


def test_the_longest_path_of_a_socket_is_the_kernels(tmp_path):
    longest = str(tmp_path / "x").ljust(107, "x")
    listening_socket(parse_listen(f"unix:{longest}")).close()
    with pytest.raises(ProxyUnavailable, match="107 bytes at most"):
        parse_listen(f"unix:{longest}x")


async def test_a_busy_port_is_one_line_with_a_remedy():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ProxyUnavailable) as caught:
            listening_socket(Listen("127.0.0.1", port))
    why = caught.value.why
    assert why.reason == f"127.0.0.1:{port} is in use"
    assert f"ss -ltnp 'sport = :{port}'" in why.remedy
    assert "\n" not in why.reason + why.remedy


async def test_a_proxy_before_itself_is_refused():
    async with Proxied() as run:
        listen = Listen("127.0.0.1", 0)
        free = socket.socket()
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        listen = Listen("127.0.0.1", port)
        server = Server(listen, f"http://127.0.0.1:{port}", run.server._paths, run.flights, run.clock)
        with pytest.raises(ProxyUnavailable, match="itself"):
            await server.start()
        await server.close()


async def test_stopping_cuts_what_is_in_flight_and_does_not_blame_the_client():
    async with Proxied() as run:
        run.upstream.on("/v1/messages", Script(up.STREAM[:4], end="hang"))
        reader, writer = await asyncio.open_connection("127.0.0.1", run.listen.port)
        writer.write(head().replace("\n", "\r\n").encode())
        await reader.readuntil(up.STREAM[3])
        await run.server.close()
        with contextlib.suppress(ConnectionError):
            assert not (await reader.read()).endswith(b"0\r\n\r\n")
        writer.close()
        (row,) = await run.rows()
    assert (row["outcome"], row["error"], row["chunks"]) == ("monitor_stopped", "", 2)


async def test_stopping_while_the_body_is_sent_does_not_blame_the_client_either():
    async with Proxied() as run:
        run.upstream.on("/v1/messages", Script(up.STREAM))
        _, writer = await asyncio.open_connection("127.0.0.1", run.listen.port)
        text = head("POST", "/v1/messages", "localhost", "Content-Length: 1000")
        writer.write(text.replace("\n", "\r\n").encode() + b"x" * 10)
        await until(lambda: run.open_rows())
        await run.server.close()
        writer.close()
        (row,) = await run.rows()
    assert row["outcome"] == "monitor_stopped"


async def test_an_answer_that_was_all_there_is_ok_though_opusmon_stopped():
    async with Proxied() as run:
        run.upstream.on("/v1/messages", Script(up.STREAM, end="hang"))
        reader, writer = await asyncio.open_connection("127.0.0.1", run.listen.port)
        writer.write(head().replace("\n", "\r\n").encode())
        await reader.readuntil(up.STREAM[-1])
        await run.server.close()
        writer.close()
        (row,) = await run.rows()
    assert (row["outcome"], row["output_tokens"]) == ("ok", 3)


async def test_draining_waits_for_what_is_in_flight():
    gate = asyncio.Event()
    async with Proxied() as run:
        run.upstream.on("/v1/messages", Script([*up.STREAM[:4], gate, *up.STREAM[4:]]))
        task = asyncio.create_task(fetch(run.url))
        await run.upstream.request()
        drain = asyncio.create_task(run.server.drain(10))
        await until(lambda: not run.server._runner.sites)
        with pytest.raises(aiohttp.ClientConnectorError):
            await fetch(run.url, "/v1/models", None, "GET")
        assert not drain.done()
        gate.set()
        await drain
        got = await task
        (row,) = [row for row in await run.rows() if row["endpoint"] == "/v1/messages"]
    assert got.body == b"".join(up.STREAM)
    assert row["outcome"] == "ok"
