"""Ends of either side: an upstream that dies, hangs up or never answers, a client that goes, connections given up."""

import asyncio
import contextlib
import json
import math
import socket

import fake_upstream as up
import pytest
from fake_upstream import Script
from proxyrun import Proxied, fetch, head, raw, until

from opusmon.collectors.proxy.rules import Listen
from opusmon.collectors.proxy.server import Server

OK = Script.json(up.MESSAGE)


# Ends


@pytest.mark.parametrize("end", ["reset", "fin"])
@pytest.mark.parametrize("framing", ["chunked", "length"])
async def test_an_upstream_that_dies_is_a_broken_connection_not_an_end(end, framing):
    async with Proxied() as run:
        script = Script(up.STREAM[:4], framing=framing, length=10_000, end=end, keep=False)
        got, row = await run.ask(script)
    assert got.broken
    assert got.body == b"".join(up.STREAM[:4])  # what came before goes through
    assert (row["outcome"], row["chunks"]) == ("transport_error", 2)
    assert row["error"] in ("connection reset", "upstream's answer was cut")


async def test_an_error_event_before_the_cut_is_the_outcome():
    async with Proxied() as run:
        got, row = await run.ask(Script([*up.STREAM[:3], up.OVERLOADED], end="reset"))
    assert got.broken
    assert (row["outcome"], row["error"]) == ("stream_error_event", "overloaded_error")


async def test_an_http_1_0_client_gets_a_reset_when_the_upstream_dies():
    async with Proxied() as run:
        run.upstream.on("/v1/messages", Script(up.STREAM[:4], end="reset"))
        assert await raw(run, "POST /v1/messages HTTP/1.0\n\n") is None
        run.upstream.on("/v1/messages", Script(up.STREAM))
        answer = await raw(run, "POST /v1/messages HTTP/1.0\n\n")
        rows = await run.rows()
    assert answer.partition(b"\r\n\r\n")[2] == b"".join(up.STREAM)
    assert [row["outcome"] for row in rows] == ["transport_error", "ok"]


async def test_nobody_listens_upstream():
    async with Proxied() as run:
        with socket.socket() as sock:  # bound and not listening
            sock.bind(("127.0.0.1", 0))
            target = f"http://127.0.0.1:{sock.getsockname()[1]}"
            server = Server(Listen("127.0.0.1", 0), target, run.server._paths, run.flights, run.clock)
            await server.start()
            got = await fetch(f"http://{server.listen.text}")
            await server.close()
        (row,) = await run.rows()
    assert got.status == 502
    assert json.loads(got.body)["error"]["message"] == (
        "opusmon proxy: the upstream gave no answer: connection refused"
    )
    assert (row["outcome"], row["error"], row["own_ns"] != row["own_ns"]) == (
        "transport_error",
        "connection refused",
        True,
    )
    assert math.isnan(row["status"])


async def test_an_upstream_that_closes_without_an_answer():
    async with Proxied() as run:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        proxy = Server(
            Listen("127.0.0.1", 0), f"http://127.0.0.1:{port}", run.server._paths, run.flights, run.clock
        )
        await proxy.start()
        got = await fetch(f"http://{proxy.listen.text}")
        await proxy.close()
        server.close()
        (row,) = await run.rows()
    assert got.status == 502
    assert row["outcome"] == "transport_error"


async def test_an_upstream_that_does_not_speak_http():
    async with Proxied() as run:
        got, row = await run.ask(Script(before=b"SSH-2.0-OpenSSH\r\n"))
    assert (got.status, row["outcome"], row["error"]) == (
        502,
        "transport_error",
        "upstream's answer is not HTTP",
    )


async def test_an_upstream_that_does_not_speak_tls():
    async def plain(_, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with Proxied() as run, await asyncio.start_server(plain, "127.0.0.1", 0) as engine:
        target = f"https://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
        server = Server(Listen("127.0.0.1", 0), target, run.server._paths, run.flights, run.clock)
        await server.start()
        got = await fetch(f"http://{server.listen.text}")
        await server.close()
        (row,) = await run.rows()
    assert (got.status, row["outcome"], row["error"]) == (
        502,
        "transport_error",
        "upstream's TLS was refused",
    )


async def test_a_connect_that_hangs_is_a_timeout(monkeypatch):
    monkeypatch.setattr("opusmon.collectors.proxy.server.CONNECT_S", 0.05)
    async with Proxied() as run:
        with socket.socket() as full:  # a backlog that is full answers no further connection
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            others = [socket.socket() for _ in range(4)]
            for other in others:
                other.setblocking(False)
                other.connect_ex(full.getsockname())
            target = f"http://127.0.0.1:{full.getsockname()[1]}"
            server = Server(Listen("127.0.0.1", 0), target, run.server._paths, run.flights, run.clock)
            await server.start()
            got = await fetch(f"http://{server.listen.text}")
            await server.close()
            for other in others:
                other.close()
        (row,) = await run.rows()
    assert (got.status, row["outcome"], row["error"]) == (504, "timeout", "upstream timed out")
    assert math.isnan(row["status"])


@pytest.mark.parametrize("when", ["headers", "token", "middle"])
async def test_a_client_that_goes_ends_the_upstream_request_at_once(when):
    pieces = {"headers": [], "token": up.STREAM[:2], "middle": up.STREAM[:4]}[when]
    script = Script(pieces, end="hang", wait=asyncio.Event() if when == "headers" else None)
    async with Proxied() as run:
        run.upstream.on("/v1/messages", script)
        reader, writer = await asyncio.open_connection("127.0.0.1", run.listen.port)
        writer.write(head().replace("\n", "\r\n").encode())
        seen = await run.upstream.request()
        if pieces:
            async with asyncio.timeout(10):
                await reader.readuntil(pieces[-1])
        assert not seen.closed
        writer.close()
        async with asyncio.timeout(5):
            await seen.gone.wait()
        (row,) = await run.rows()
    assert row["outcome"] == "client_disconnect"
    if when == "headers":
        assert math.isnan(row["chunks"])
        assert math.isnan(row["status"])
    else:
        assert (row["chunks"], row["status"]) == ({"token": 0, "middle": 2}[when], 200)


async def test_a_client_that_goes_while_it_sends():
    async with Proxied() as run:
        run.upstream.on("/v1/messages", OK)
        _, writer = await asyncio.open_connection("127.0.0.1", run.listen.port)
        writer.write(
            head("POST", "/v1/messages", "localhost", "Content-Length: 1000").replace("\n", "\r\n").encode()
            + b"x" * 10
        )
        await run.upstream.request()
        assert run.open_rows()[0].phase == "sending"
        writer.close()
        (row,) = await run.rows()
    assert (row["outcome"], row["request_b"]) == ("client_disconnect", 10)


async def test_a_client_that_goes_after_the_last_event_has_got_all():
    async with Proxied() as run:
        run.upstream.on("/v1/messages", Script(up.STREAM, end="hang"))
        reader, writer = await asyncio.open_connection("127.0.0.1", run.listen.port)
        writer.write(head().replace("\n", "\r\n").encode())
        await reader.readuntil(up.STREAM[-1])
        writer.close()
        (row,) = await run.rows()
    assert row["outcome"] == "ok"


async def test_in_flight_rows_follow_the_request():
    gates = [asyncio.Event() for _ in range(3)]
    pieces = [up.start(), up.block(0, {"type": "thinking", "thinking": ""}), up.thinking(), gates[0], up.block(1),
              up.text("a", 1), gates[1], up.message_delta(), up.message_stop(), gates[2]]  # fmt: skip
    begin = asyncio.Event()
    phases = []

    def look():
        (row,) = run.open_rows()
        phases.append(row.phase)
        return row

    def reached(count, ending):
        rows = run.open_rows()
        return bool(rows) and rows[0].chunks == count and (not ending or rows[0].phase == "ending")

    async with Proxied() as run:
        run.upstream.on("/v1/messages", Script(pieces, wait=begin))
        task = asyncio.create_task(fetch(run.url, headers={"x-opusmon-label": "chat"}))
        await run.upstream.request()
        row = look()
        assert (row.model, row.label, row.endpoint) == ("m", "chat", "/v1/messages")
        assert row.no_token_ns <= row.age_ns
        assert math.isnan(row.ttft_ns)
        begin.set()
        for gate, count in zip(gates, (1, 2, 2), strict=True):
            await until(lambda gate=gate, count=count: reached(count, gate is gates[2]))
            row = look()
            assert row.ttft_ns <= row.age_ns
            assert row.silent_ns <= row.no_token_ns <= row.age_ns
            gate.set()
        await task
        assert run.open_rows() == []
    assert phases == ["waiting", "thinking", "answering", "ending"]


# Connections that the upstream has given up


class Quitter:
    """An upstream that answers `answers` requests on a connection and closes it at the next one, `after_s` later."""

    def __init__(self, answers, after_s=0.0):
        self.answers, self.after_s = answers, after_s
        self.bodies = []
        self.connections = 0

    async def __call__(self, reader, writer):
        self.connections += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            for n in range(self.answers + 1):
                await self._one(reader, writer, last=n == self.answers)
        writer.close()

    async def _one(self, reader, writer, *, last):
        text = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if last and not self.after_s:
            return
        length = [line for line in text.splitlines() if line.startswith("content-length:")]
        body = (
            await reader.readexactly(int(length[0].split(":")[1])) if length else await self._chunked(reader)
        )
        if last:
            await asyncio.sleep(self.after_s)
            return
        self.bodies.append(body)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()

    async def _chunked(self, reader):
        body = b""
        while size := int((await reader.readline()).strip(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
        return body


@contextlib.asynccontextmanager
async def before(upstream):
    """A proxy before an upstream of one's own making."""
    server = await asyncio.start_server(upstream, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    run = Proxied()
    async with run:
        run.server._forwarder._upstream = f"http://127.0.0.1:{port}"
        yield run
    server.close()


@pytest.mark.parametrize("size", [2, 300_000], ids=["small", "in pieces"])
async def test_a_connection_that_was_closed_while_idle_is_replaced_and_the_client_sees_nothing(size):
    upstream = Quitter(answers=1)
    async with before(upstream) as run:
        for n in range(4):
            body = bytes([65 + n]) * size
            got = await fetch(run.url, body=body)
            assert (got.status, got.body) == (200, b"{}")
            assert upstream.bodies[-1] == body
    assert upstream.connections == 4
    assert [row["outcome"] for row in await run.rows()] == ["ok"] * 4


async def test_a_request_that_may_have_been_worked_on_is_not_sent_twice():
    late = Quitter(answers=1, after_s=0.3)
    async with before(late) as run:
        assert (await fetch(run.url)).status == 200
        assert (await fetch(run.url)).status == 502
    assert late.connections == 1
    fresh = Quitter(answers=0)
    async with before(fresh) as run:
        assert (await fetch(run.url)).status == 502
    assert fresh.connections == 1


async def test_a_body_too_large_to_hold_is_not_sent_twice(monkeypatch):
    monkeypatch.setattr("opusmon.collectors.proxy.body.HELD_B", 1000)
    upstream = Quitter(answers=1)
    async with before(upstream) as run:
        assert (await fetch(run.url)).status == 200
        assert (await fetch(run.url, body=b"x" * 300_000)).status == 502
    assert upstream.connections == 1
