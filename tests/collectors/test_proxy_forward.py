"""Forwarding itself: headers, methods, bodies of any size and either framing, ends of either side, refusals."""

import asyncio
import contextlib
import hashlib
import json
import math
import os
import socket
import stat

import aiohttp
import fake_upstream as up
import pytest
from fake_upstream import Script
from proxyrun import Proxied, fetch

from opusmon.collectors.proxy.errors import ProxyUnavailable
from opusmon.collectors.proxy.rules import Listen
from opusmon.collectors.proxy.server import Server, listening_socket

OK = Script.json(up.MESSAGE)


async def raw(run, head, body=b"", limit_s=10):
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
    return "\n".join([f"{method} {target} HTTP/1.1", f"Host: {host}", "Connection: close", *more, "", ""])


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


async def until(condition, limit_s=10):
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  (it is no event of ours)
            await asyncio.sleep(0.005)


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
    assert json.loads(got.body)["error"]["message"] == "opusmon proxy: connection refused"
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
    with pytest.raises(ProxyUnavailable, match="in use"):
        listening_socket(Listen(path=str(path)))
    assert path.read_text() == "precious"


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


async def test_a_failure_of_the_onlooker_does_not_reach_the_client(monkeypatch):
    def fail(*_):
        raise RuntimeError("secret words")

    async with Proxied() as run:
        monkeypatch.setattr("opusmon.collectors.api.anthropic_stream.AnthropicReading.event", fail)
        got, row = await run.ask(Script(up.STREAM))
        assert run.flights.unseen == {"opusmon failed on it: RuntimeError": 1}
    assert got.body == b"".join(up.STREAM)
    assert (row["outcome"], math.isnan(row["output_tokens"])) == ("ok", True)


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
