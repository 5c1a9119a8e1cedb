"""`opusmon probe` and `opusmon proxy`: real processes, real clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import anthropic
import fake_upstream as up
import httpx2
import pytest
from collectors.canary_server import good, serving
from fake_upstream import FakeUpstream, Script
from proxyrun import Proxied

from opusmon.cli.requests import how_to_reach
from opusmon.collectors.proxy.rules import Listen
from opusmon.recording import Recording

from .api_runs import (
    ASKED,
    KEY,
    LIMIT_S,
    LOCAL,
    ended,
    free_port,
    kept,
    listening,
    nowhere,
    nowhere_in,
    opusmon,
    recordings,
    rows,
    running,
)

# -- probe -------------------------------------------------------------------------------------------------------


async def test_probe_prints_a_line_per_request_and_a_summary(tmp_path: Path) -> None:
    async with serving() as server:
        done = await opusmon(tmp_path, "probe", "--base-url", server.url, "--model", "m", "--count", "3")
        assert len([seen for seen in server.seen if seen.body]) == 3
    assert done.status == 0
    *lines, last = done.out.splitlines()
    assert [line.split()[:3] for line in lines] == [[str(n), "ok", "HTTP"] for n in (1, 2, 3)]
    assert "connect" in lines[0]
    assert "reused connection" in lines[1]
    assert last.startswith("3 of 3 ok  TTFT p50 ")
    (announced,) = done.err.splitlines()
    assert "3 requests one after another, at most" in announced
    assert announced.endswith("with the key of ANTHROPIC_API_KEY")
    assert recordings(tmp_path) == []


async def test_probe_keeps_its_requests_and_its_key_to_itself(here, tmp_path: Path) -> None:
    path = tmp_path / "p.opusmon"
    async with serving() as server:
        words = ("--base-url", server.url, "--model", "m", "--count", "2", "--max-tokens", "7")
        done = await here("probe", *words, "--json", "-o", path)
        asked = [seen for seen in server.seen if seen.body]
        assert [seen.body["max_tokens"] for seen in asked] == [7, 7]
        assert KEY in json.dumps(asked[0].headers)  # it was sent where it belongs
    assert done.status == 0
    told = [json.loads(line) for line in done.out.splitlines()]
    assert [(one["number"], one["outcome"], one["output_tokens"]) for one in told] == [
        (1, "ok", 3),
        (2, "ok", 3),
    ]
    assert done.err.splitlines()[-1] == f"opusmon: 2 requests in {path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    nowhere(KEY, path, done.out, done.err)
    dumped = await here("dump", path, "--channel", "request", "--format", "ndjson")
    read = [json.loads(line) for line in dumped.out.splitlines()]
    assert [(one["t"], one["ttft_ns"]) for one in read] == [(one["t"], one["ttft_ns"]) for one in told]
    assert all(one["time"].startswith("20") for one in read)


async def test_a_sweep_is_a_table_or_json(here, tmp_path: Path) -> None:
    path = tmp_path / "s.opusmon"
    async with serving() as server:
        words = ("probe", "--base-url", server.url, "--model", "m", "--repeats", "2")
        table = await here(*words, "--sweep", "96,192")
        body = await here(*words, "--sweep", "96,128", "--json", "-o", path)
    assert (table.status, body.status) == (0, 0)
    told = [line.split()[1:4] for line in table.err.splitlines()[1:]]
    assert told == [["sweep", size, str(n)] for n, size in enumerate(("96:", "192:") * 2, 1)]
    assert "TTFT p50" in table.out
    assert "knee: none" in table.out
    said = json.loads(body.out)
    assert [(point["size"], point["n"]) for point in said["points"]] == [(96, 2), (128, 2)]
    assert [one["outcome"] for one in rows(path, "request")] == ["ok"] * 4
    nowhere(KEY, path, table.out, table.err, body.out, body.err)


async def test_an_endpoint_that_is_not_there_is_an_error(here) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    counted = await here("probe", "--base-url", url, "--model", "m", "--count", "1")
    swept = await here("probe", "--base-url", url, "--model", "m", "--sweep", "96,128,192", "--json")
    for done in (counted, swept):
        assert done.status == 1
        assert "Traceback" not in done.err
    line, last = counted.out.splitlines()
    assert "transport_error (connect_error)  not connected" in line
    assert last.startswith("0 of 1 ok")


async def test_an_endpoint_that_refuses_is_an_error(here, tmp_path: Path) -> None:
    async def refuse(seen, out) -> None:
        await out.plain(
            401, {"type": "error", "error": {"type": "authentication_error", "message": f"no: {KEY}"}}
        )

    path = tmp_path / "p.opusmon"
    async with serving(refuse) as server:
        words = ("probe", "--base-url", server.url, "--model", "m", "--count", "1", "-o", path)
        done = await here(*words)
    assert done.status == 1
    assert "upstream_http_error (authentication_error)  HTTP 401" in done.out
    assert [one["status"] for one in rows(path, "request")] == [401]
    nowhere(KEY, path, done.out, done.err)  # not even when the server says it back


@pytest.mark.parametrize(
    ("how", "line"),
    [(("--count", "9"), "2 of 2 ok"), (("--sweep", "500,1000"), "ended early: it was interrupted")],
    ids=["count", "sweep"],
)
async def test_ctrl_c_keeps_and_sums_up_what_was_answered(
    tmp_path: Path, how: tuple[str, ...], line: str
) -> None:
    async def slowly(seen, out) -> None:
        if len(asked) == 2:
            third.set()
            await asyncio.sleep(60)
        if seen.body:
            asked.append(seen)
        await good(seen, out)

    asked: list[object] = []
    third = asyncio.Event()
    path = tmp_path / "p.opusmon"
    async with serving(slowly) as server:
        words = ("probe", "--base-url", server.url, "--model", "m", *how, "-o", path)
        async with running(tmp_path, *words) as process:
            async with asyncio.timeout(LIMIT_S):
                await third.wait()
            process.send_signal(signal.SIGINT)
            done = await ended(process)
    assert done.status == 1
    assert "Traceback" not in done.err
    assert [one["outcome"] for one in rows(path, "request")] == ["ok", "ok"]
    assert line in done.out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--base-url", "nonsense"), "not an http address"),
        (("--base-url", "http://10.1.2.3:8000"), "would show the key"),
        (("--base-url", f"http://user:{KEY}@127.0.0.1"), "holds credentials"),
        (("--base-url", f"{LOCAL}/?key={KEY}"), "has a query"),
        (("--base-url", LOCAL, "--model", ""), "no model to ask"),
        (("--base-url", LOCAL, "--count", "0"), "give 1 to 1000"),
        (("--base-url", LOCAL, "--max-tokens", "0"), "give 1 or more"),
        (("--base-url", LOCAL, "--sweep", "1x"), "write lengths in tokens, as 1k,4k,16k"),
        (("--base-url", LOCAL, "--sweep", ","), "write lengths in tokens"),
        (("--base-url", LOCAL, "--sweep", "1"), "prompt lengths out of range"),
        (("--base-url", LOCAL, "--sweep", "\u0663k"), "write lengths in tokens"),
    ],
)
async def test_what_cannot_be_probed_is_one_line(here, words: tuple[str, ...], line: str) -> None:
    done = await here("probe", "--model", "m", *words)
    assert line in done.problem
    assert "at most" not in done.err.removesuffix(
        f"{done.problem}\n"
    )  # nothing is announced that is not sent
    nowhere_in(KEY, done.out, done.err)


async def test_a_file_that_cannot_be_made_is_said_before_tokens_are_spent(here, tmp_path: Path) -> None:
    path = tmp_path / "p.opusmon"
    path.touch()
    async with serving() as server:
        words = ("probe", "--base-url", server.url, "--model", "m", "--count", "1", "-o", path)
        done = await here(*words)
        assert "exists already" in done.problem
        done = await here(*words[:-1], "/dev/null/x/p.opusmon")
        assert done.problem.endswith("cannot be made: /dev/null is no folder that you may write to")
        assert server.seen == []


# -- proxy -------------------------------------------------------------------------------------------------------


async def test_a_real_client_through_the_proxy_and_ctrl_c(tmp_path: Path) -> None:
    path, port = tmp_path / "p.opusmon", free_port()
    async with FakeUpstream() as upstream:
        upstream.on("/v1/messages", Script(up.STREAM), Script.json(up.MESSAGE))
        words = ("proxy", "--upstream", upstream.url, "--listen", f"127.0.0.1:{port}", "-o", path)
        async with running(tmp_path, *words) as process:
            await listening(port)
            client = anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", api_key=KEY)
            async with client:
                async with client.messages.stream(**ASKED) as stream:
                    heard = [word async for word in stream.text_stream]
                message = await client.messages.create(**ASKED)
            await kept(path, lambda: len(rows(path, "request")) == 2)
            process.send_signal(signal.SIGINT)
            done = await ended(process)
        assert KEY in str(upstream.seen[0].headers)
    assert (heard, message.content[0].text) == (["one", "two", "three"], "hello")
    assert (done.status, done.out) == (0, "")
    said = done.err.splitlines()
    assert f"export ANTHROPIC_BASE_URL=http://127.0.0.1:{port}" in said[0]
    assert said[1] == f"opusmon: recording to {path}; ctrl+c stops"
    assert said[2].endswith(f"MB in {path}")
    assert len(said) == 3
    names = ("source", "outcome", "model", "streaming", "output_tokens")
    assert [tuple(one[name] for name in names) for one in rows(path, "request")] == [
        ("proxy", "ok", "claude-test-1", 1, 3),
        ("proxy", "ok", "claude-test-1", 0, 5),
    ]
    with Recording.open(path) as recording:
        assert recording.finished
    assert recordings(tmp_path) == ["p.opusmon"]
    for secret in (KEY, "SECRET-PROMPT", "hello"):
        nowhere(secret, path, done.err)


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def at_the_terminal(pid: int) -> None:
    os.kill(pid, signal.SIGINT)


def politely(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


def as_a_service(pid: int) -> None:
    """As systemd does: every process of the unit at once."""
    for one in (*children(pid), pid):
        os.kill(one, signal.SIGTERM)


@pytest.mark.parametrize("stop", [at_the_terminal, politely, as_a_service])
async def test_what_ended_just_before_the_end_has_a_row_and_what_is_in_flight_too(
    tmp_path: Path, stop: Callable[[int], None]
) -> None:
    path, port = tmp_path / "p.opusmon", free_port()
    async with FakeUpstream() as upstream, aiohttp.ClientSession() as client:
        upstream.on("/v1/messages", Script(up.STREAM))
        upstream.on("/v1/responses", Script(up.RESPONSES_STREAM[:2], end="hang"))
        words = ("proxy", "--upstream", upstream.url, "--listen", f"127.0.0.1:{port}", "-o", path)
        async with running(tmp_path, *words) as process:
            await listening(port)
            url = f"http://127.0.0.1:{port}/v1"
            hanging = await client.post(f"{url}/responses", json={"stream": True})
            await hanging.content.readuntil(b"one")
            for _ in range(3):
                async with client.post(f"{url}/messages", json=ASKED | {"stream": True}) as answer:
                    await answer.read()
            (child,) = children(process.pid)
            began = time.monotonic()
            stop(process.pid)
            with pytest.raises(aiohttp.ClientPayloadError):
                await hanging.read()
            held_s = time.monotonic() - began
            done = await ended(process)
        async with asyncio.timeout(LIMIT_S):
            await upstream.seen[0].gone.wait()
    assert (done.status, held_s < 3) == (0, True)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    found = sorted((one["endpoint"], one["outcome"], one["error"]) for one in rows(path, "request"))
    assert found == [("/v1/messages", "ok", "")] * 3 + [("/v1/responses", "monitor_stopped", "")]
    (cut,) = (one for one in rows(path, "request") if one["outcome"] == "monitor_stopped")
    assert (cut["status"], cut["chunks"]) == (200, 1)
    with Recording.open(path) as recording:
        assert recording.finished


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1:8788", "http://127.0.0.1:8788"),
        ("8788", "http://127.0.0.1:8788"),
        ("localhost:80", "http://127.0.0.1:80"),
        ("[::1]:8788", "http://[::1]:8788"),
    ],
)
def test_clients_are_told_a_url_that_works(address: str, url: str) -> None:
    assert how_to_reach(address).endswith(f"export ANTHROPIC_BASE_URL={url}")


def test_no_url_is_told_where_there_is_none() -> None:
    assert "http" not in how_to_reach("127.0.0.1:0")


async def test_the_sdk_reaches_a_unix_socket_as_it_is_told(tmp_path: Path) -> None:
    """With a base URL of unix:/path the SDK ends with `unsupported protocol`."""
    path = tmp_path / "p.sock"
    told = how_to_reach(f"unix:{path}")
    assert "ANTHROPIC_BASE_URL" not in told
    transport = eval(told.partition("http_client=")[2], {"anthropic": anthropic, "httpx2": httpx2})

    def ask() -> str:
        with anthropic.Anthropic(api_key=KEY, base_url="http://localhost", http_client=transport) as client:
            return str(client.messages.create(**ASKED).stop_reason)

    async with Proxied(listen=Listen(path=str(path))) as run:
        run.upstream.on("/v1/messages", Script.json(up.MESSAGE))
        assert await asyncio.to_thread(ask) == "end_turn"


async def test_what_cannot_be_proxied_is_one_line(tmp_path: Path) -> None:
    cases = {
        ("--upstream", "nonsense"): "the upstream is no http or https URL",
        ("--upstream", LOCAL, "--listen", "nonsense"): "'nonsense' is no address to listen on",
        ("--upstream", LOCAL, "--listen", "127.0.0.1:99999"): "is no address to listen on",
        ("--upstream", LOCAL, "--retain-size", "soon"): "'soon' is not a size",
        ("--upstream", LOCAL, "--duration", "soon"): "'soon' is not a duration",
        ("--upstream", LOCAL, "-o", "/dev/null/x.opusmon"): "/dev/null",
    }
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases["--upstream", LOCAL, "--listen", f"127.0.0.1:{port}"] = f"127.0.0.1:{port} is in use"
        files = (("-o", tmp_path / f"{n}.opusmon") for n in range(len(cases)))
        runs = (opusmon(tmp_path, "proxy", *file, *words) for file, words in zip(files, cases, strict=True))
        done = await asyncio.gather(*runs)
    for one, line in zip(done, cases.values(), strict=True):
        assert line in one.problem
    assert done[-1].err.count("is in use") == 1
    assert recordings(tmp_path) == []  # the same words work once the port is free
