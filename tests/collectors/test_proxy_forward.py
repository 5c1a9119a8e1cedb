"""Forwarding itself: headers, methods, bodies of any size and either framing."""

import asyncio
import hashlib
import math
import os
import socket

import aiohttp
import fake_upstream as up
import pytest
from fake_upstream import Script
from proxyrun import Proxied, fetch, head, raw

OK = Script.json(up.MESSAGE)


# Headers


async def test_request_headers_go_on_in_order_and_repeated_ones_stay_apart():
    sent = [
        ("X-B", "1"),
        ("anthropic-beta", "a"),
        ("X-A", "2"),
        ("anthropic-beta", "b"),
        ("Authorization", "Bearer k"),
        ("x-opusmon-label", "batch"),
        ("X-Empty", ""),
    ]
    async with Proxied() as run:
        run.upstream.on("/v1/messages", OK)
        await raw(
            run,
            head("POST", "/v1/messages?beta=true&x=%2F%20+", "localhost:1", *(f"{k}: {v}" for k, v in sent)),
        )
        seen = run.upstream.seen[0]
        (row,) = await run.rows()
    assert seen.target == "/v1/messages?beta=true&x=%2F%20+"
    assert [pair for pair in seen.headers if pair[0] not in ("Host", "Content-Length")] == sent
    assert seen.values("host") == [f"127.0.0.1:{run.upstream.port}"]
    assert (row["label"], row["endpoint"]) == ("batch", "/v1/messages")


async def test_what_concerns_one_connection_only_does_not_go_on():
    gone = ["Connection: keep-alive, X-Hop", "Keep-Alive: 5", "X-Hop: 1", "TE: trailers", "Upgrade: h2c", "Trailer: X",
            "Proxy-Authorization: Basic x", "Proxy-Connection: close"]  # fmt: skip
    async with Proxied() as run:
        run.upstream.on(
            "/v1/messages",
            Script([b"{}"], headers=[("Content-Type", "application/json"), ("Connection", "X-Mine"), ("X-Mine", "1"), ("X-Kept", "1")]),
        )  # fmt: skip
        got = await fetch(run.url, headers=dict(line.split(": ") for line in gone) | {"X-Kept": "1"})
        names = {name.lower() for name, _ in run.upstream.seen[0].headers}
    lost = {line.split(":")[0].lower() for line in gone}
    assert names.isdisjoint(lost)
    assert "x-kept" in names
    assert "X-Mine" not in got.headers
    assert got.headers["X-Kept"] == "1"


async def test_response_headers_and_reason_come_through_and_none_is_added():
    headers = [
        ("Set-Cookie", "a=1"),
        ("request-id", "req_1"),
        ("Set-Cookie", "b=2"),
        ("Content-Type", "application/json"),
    ]
    async with Proxied() as run:
        run.upstream.on("/v1/messages", Script([b"{}"], headers=headers, framing="length"))
        answer = await raw(run, head())
    lines = answer.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 200 Scripted"
    wanted = [f"{name}: {value}" for name, value in headers]
    assert lines[1:] == [*wanted, "Content-Length: 2", "Connection: close"]


async def test_date_and_server_of_the_upstream_are_not_doubled():
    headers = [("Date", "Sun, 06 Nov 1994 08:49:37 GMT"), ("Server", "engine/1")]
    async with Proxied() as run:
        got, _ = await run.ask(Script(up.STREAM, headers=headers))
    assert got.headers.getall("Date") == ["Sun, 06 Nov 1994 08:49:37 GMT"]
    assert got.headers.getall("Server") == ["engine/1"]


async def test_no_header_is_invented_for_the_upstream():
    async with Proxied() as run:
        run.upstream.on("/v1/models", Script.json({}))
        await raw(run, head("GET", "/v1/models"))
        seen = run.upstream.seen[0]
    assert [name for name, _ in seen.headers] == ["Host"]


async def test_header_bytes_that_are_not_ascii():
    async with Proxied() as run:
        run.upstream.on("/v1/messages", OK)
        answer = await raw(
            run, head("POST", "/v1/messages", "localhost", "X-Name: caf\u00e9", "Content-Length: 0")
        )
        seen = run.upstream.seen[0]
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert seen.values("x-name")[0].encode("latin-1").decode() == "caf\u00e9"


async def test_long_headers_pass():
    async with Proxied() as run:
        got, _ = await run.ask(
            Script(up.STREAM, headers=[("X-Long", "y" * 30_000)]), headers={"Cookie": "x" * 30_000}
        )
        assert run.upstream.seen[0].values("cookie") == ["x" * 30_000]
    assert got.headers["X-Long"] == "y" * 30_000


# Methods and bodies


@pytest.mark.parametrize("status", [204, 304, 200])
async def test_head_and_bodiless_answers(status):
    script = Script([b"x" * 10] if status == 200 else [], status, framing="length", headers=[("ETag", '"1"')])
    async with Proxied() as run:
        run.upstream.on("/v1/models", script)
        got = await fetch(run.url, "/v1/models", None, "HEAD" if status == 200 else "GET")
        (row,) = await run.rows()
    assert (got.status, got.body, got.headers["ETag"]) == (status, b"", '"1"')
    assert got.headers.get("Content-Length") == ("10" if status == 200 else None)
    assert (row["outcome"], row["status"], row["response_b"]) == ("ok", status, 0)


async def test_preflight_is_the_upstreams_business():
    async with Proxied() as run:
        run.upstream.on(
            "/v1/messages", Script([], 204, [("Access-Control-Allow-Origin", "*")], framing="length")
        )
        got = await fetch(run.url, body=None, method="OPTIONS", headers={"Origin": "http://localhost:3000"})
        (row,) = await run.rows()
    assert (got.status, got.headers["Access-Control-Allow-Origin"]) == (204, "*")
    assert row["outcome"] == "ok"


async def test_expect_100_continue_is_answered_before_the_body_is_sent():
    async with Proxied() as run:
        run.upstream.on("/v1/messages", OK)
        reader, writer = await asyncio.open_connection("127.0.0.1", run.listen.port)
        async with asyncio.timeout(10):
            writer.write(
                head("POST", "/v1/messages", "localhost", "Expect: 100-continue", "Content-Length: 2")
                .replace("\n", "\r\n")
                .encode()
            )
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"{}")
            assert b" 200 Scripted\r\n" in await reader.read()
        writer.close()
        seen = run.upstream.seen[0]
    assert (seen.body, seen.values("expect")) == (b"{}", [])


async def test_expect_is_not_answered_for_what_is_refused():
    async with Proxied() as run:
        reader, writer = await asyncio.open_connection("127.0.0.1", run.listen.port)
        text = head("POST", "/admin", "localhost", "Expect: 100-continue", "Content-Length: 2")
        writer.write(text.replace("\n", "\r\n").encode())
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"HTTP/1.1 404 ")
        writer.close()


@pytest.mark.parametrize("chunked", [False, True])
async def test_large_bodies_both_ways(chunked):
    size = 24 << 20
    piece = os.urandom(1 << 20)
    digest = hashlib.sha256(piece * 24).hexdigest()

    async def body():
        for _ in range(24):
            yield piece

    headers = {"Content-Type": "application/json"} | ({} if chunked else {"Content-Length": str(size)})
    async with Proxied() as run:
        script = Script(
            [piece] * 24,
            headers=[("Content-Type", "application/json")],
            framing="chunked" if chunked else "length",
        )
        got, row = await run.ask(script, body=body(), headers=headers)
        seen = run.upstream.seen[0]
    assert hashlib.sha256(seen.body).hexdigest() == hashlib.sha256(got.body).hexdigest() == digest
    assert seen.values("content-length") == ([] if chunked else [str(size)])
    assert (row["request_b"], row["response_b"], row["outcome"]) == (size, size, "ok")
    assert run.flights.unseen == {"answer too large to look into": 1}


async def test_a_slow_client_slows_the_upstream_down_and_is_not_called_our_own_time():
    piece = bytes(1 << 16)
    async with Proxied() as run:
        run.upstream.on("/v1/messages", Script([piece] * 512, headers=[("Content-Type", "application/json")]))
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", run.listen.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
        writer.write(head().replace("\n", "\r\n").encode())
        seen = await run.upstream.request()
        await _settled(lambda: len(seen.sent))
        assert len(seen.sent) < 400  # 32 MiB do not fit anywhere on the way
        open_row = run.open_rows()[0]
        assert open_row.silent_ns >= 0
        async with asyncio.timeout(20):
            body = (await reader.read()).partition(b"\r\n\r\n")[2]
        writer.close()
        (row,) = await run.rows()
    assert len(body) > len(piece) * 512
    assert row["response_b"] == len(piece) * 512
    assert row["own_chunk_ns"] < row["e2e_ns"] / 10


async def _settled(count):
    """Wait until a number no longer grows."""
    last = -1
    while count() != last or last == 0:
        last = count()
        await asyncio.sleep(0.15)


async def test_an_answer_that_comes_before_the_body_is_sent():
    async with Proxied() as run:
        run.upstream.on(
            "/v1/messages",
            Script([b"{}"], 413, [("Content-Type", "application/json")], framing="length", early=True),
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", run.listen.port)
        writer.write(
            head("POST", "/v1/messages", "localhost", "Content-Length: 100000000")
            .replace("\n", "\r\n")
            .encode()
        )
        writer.write(b"x" * 10_000)
        async with asyncio.timeout(10):
            assert b" 413 " in await reader.readuntil(b"\r\n")
        writer.close()
        (row,) = await run.rows()
    assert (row["outcome"], row["status"]) == ("upstream_http_error", 413)


async def test_connections_are_used_again_and_it_is_said():
    async with Proxied() as run:
        run.upstream.on("/v1/messages", OK)
        async with aiohttp.ClientSession() as session:
            for _ in range(3):
                async with session.post(run.url + "/v1/messages", data=b"{}") as response:
                    assert (await response.json())["id"] == "msg_2"
        rows = await run.rows()
        assert run.upstream.connections == 1
    assert [row["reused"] for row in rows] == [0, 1, 1]
    assert [math.isnan(row["connect_ns"]) for row in rows] == [False, True, True]
    assert [row["number"] for row in rows] == [1, 2, 3]


async def test_pipelined_requests_are_answered_in_order():
    async with Proxied() as run:
        run.upstream.on("/v1/models", Script.json({"n": 1}), Script.json({"n": 2}))
        one = "GET /v1/models HTTP/1.1\nHost: localhost\n\n"
        answer = await raw(run, one + head("GET", "/v1/models"))
    assert answer.index(b'{"n": 1}') < answer.index(b'{"n": 2}')


async def test_a_failure_of_the_onlooker_does_not_reach_the_client(monkeypatch):
    def fail(*_):
        raise RuntimeError("secret words")

    async with Proxied() as run:
        monkeypatch.setattr("opusmon.collectors.api.anthropic_stream.AnthropicReading.event", fail)
        got, row = await run.ask(Script(up.STREAM))
        assert run.flights.unseen == {"opusmon failed on it: RuntimeError": 1}
    assert got.body == b"".join(up.STREAM)
    assert (row["outcome"], math.isnan(row["output_tokens"])) == ("ok", True)
