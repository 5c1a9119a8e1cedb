"""A secret planted everywhere a request and an answer have room for one is nowhere afterwards."""

import asyncio
import contextlib
import gzip
import os
import sys
import textwrap
from pathlib import Path

import fake_upstream as up
import pytest
from fake_upstream import FakeUpstream, Script
from proxyrun import fetch

SECRET = "s3cr3t-Zq81xKp4"
CHILD = """
import asyncio, sys, warnings, logging
from pathlib import Path
warnings.simplefilter("always")
from opusmon.clock import NS, SystemClock
from opusmon.collectors.proxy import serve_proxy
from opusmon.recording import Recorder
from opusmon.schema import StringTable

async def main(upstream, folder):
    clock, strings, stop = SystemClock(), StringTable(), asyncio.Event()
    rows = []
    recorder = Recorder(Path(folder, "session.opusmon"), strings=strings, clock=clock)
    def push(batch):
        recorder.push(batch)
        rows.append((batch.channel.name, batch.rows.tobytes()))
        for row in batch.rows:
            rows.append(tuple(strings.text(row[f.name]) if f.text else float(row[f.name]) for f in batch.channel.fields))
    asyncio.get_running_loop().add_reader(0, lambda: stop.set())
    await serve_proxy(push, strings, clock, upstream=upstream, listen="127.0.0.1:0", interval_ns=NS // 4,
                      drain_s=0.2, stop=stop, ready=lambda address: print(address, flush=True))
    recorder.close()
    Path(folder, "rows.txt").write_text(repr(rows))
    Path(folder, "strings.txt").write_text(repr(strings.since(0)))

asyncio.run(main(*sys.argv[1:]), debug=True)
"""

EVERYWHERE = {
    "Authorization": f"Bearer {SECRET}",
    "x-api-key": SECRET,
    "Cookie": f"session={SECRET}; {SECRET}=1",
    "X-Other": SECRET,
    "User-Agent": SECRET,
    "Content-Type": f"application/json; charset={SECRET}",
    "x-stainless-retry-count": SECRET,
    "If-None-Match": SECRET,
}
ANSWERED = [
    ("Set-Cookie", f"bad {SECRET} name=1; Expires={SECRET}"),
    ("Set-Cookie", f"a={SECRET}"),
    ("X-Other", SECRET),
    ("retry-after", SECRET),
    ("anthropic-ratelimit-requests-limit", SECRET),
    ("anthropic-organization-id", SECRET),
    ("Location", f"http://{SECRET}.invalid/"),
]
BODY = (f'{{"model":"m","stream":true,"system":"{SECRET}","messages":[{{"content":"{SECRET}"}}]}}').encode()


def scripts():
    """Answers with the secret in them, well made and badly made."""
    told = [up.start(), up.block(), up.text(SECRET), up.thinking(SECRET), up.tool_input(SECRET)]
    end = [
        up.block_stop(),
        up.message_delta({"output_tokens": 3, "note": SECRET, f"{SECRET}": "x"}),
        up.message_stop(),
    ]
    wrong = {"type": "error", "error": {"type": "api_error", "message": f"bad key {SECRET}"}}
    return [
        Script([*told, *end], headers=ANSWERED),
        Script(told, headers=ANSWERED, end="reset"),
        Script([up.sse(wrong, "error")], headers=ANSWERED),
        Script.json(wrong, 401, ANSWERED),
        Script.json(wrong, 200, ANSWERED),
        Script([b"data: {" + SECRET.encode() + b"\n\n", b"\xff" + SECRET.encode()], headers=ANSWERED),
        Script([gzip.compress(SECRET.encode())[:-3]], headers=[("Content-Encoding", "gzip"), *ANSWERED]),
        Script([b"x"], headers=[("Content-Encoding", SECRET), *ANSWERED]),
        Script([SECRET.encode()], headers=[("Content-Type", "text/html"), *ANSWERED]),
        Script(before=b"HTTP/9.9 " + SECRET.encode() + b"\r\n\r\n"),
        Script(before=b"HTTP/1.1 200 OK\r\n" + SECRET.encode() + b"\x00bad\r\n\r\n"),
        Script([*told], headers=ANSWERED, end="fin", framing="length", length=10**6),
    ]


async def send_garbage(port):
    """Requests that are refused or make no sense."""
    heads = [
        f"POST /v1/messages?key={SECRET} HTTP/1.1\r\nHost: {SECRET}.example\r\nContent-Length: 0\r\n\r\n",
        f"GET /{SECRET} HTTP/1.1\r\nHost: localhost\r\n\r\n",
        f"{SECRET} /v1/messages HTTP/1.1\r\nHost: localhost\r\n\r\n",
        f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{SECRET}\x01: x\r\n\r\n",
        f"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n{SECRET}\r\n",
        f"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nExpect: {SECRET}\r\nContent-Length: 1\r\n\r\nx",
        f"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: {SECRET}\r\n\r\n",
    ]
    for head in heads:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode())
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(1):
                await reader.readline()
        writer.close()


async def leave_early(port, seen):
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nAuthorization: {SECRET}\r\nContent-Length: 5\r\n\r\n{SECRET[:5]}"
    writer.write(head.encode())
    await seen()
    writer.close()


@pytest.fixture
async def child(tmp_path):
    """A proxy in a process of its own that writes down all it has, with its stderr in a file."""
    script = tmp_path / "child.py"
    script.write_text(textwrap.dedent(CHILD))
    async with FakeUpstream() as upstream:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
        with (tmp_path / "stderr.txt").open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(script), upstream.url, str(tmp_path),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=stderr,
                cwd=Path(__file__).parents[2], env=env | {"PYTHONASYNCIODEBUG": "1"},
            )  # fmt: skip
        address = (await process.stdout.readline()).decode().strip()
        yield upstream, int(address.rpartition(":")[2]), process, tmp_path
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_planted_secret_is_nowhere(child):
    upstream, port, process, folder = child
    upstream.on("/v1/messages", *scripts(), Script([*up.STREAM[:3]], end="hang"))
    url = f"http://127.0.0.1:{port}"
    for _ in scripts():
        with contextlib.suppress(OSError):
            await fetch(
                url, f"/v1/messages?api_key={SECRET}", BODY, headers=EVERYWHERE, allow_redirects=False
            )
    upstream.on(f"/v1/models/{SECRET}", Script.json({"error": {"type": "not_found_error"}}, 404))
    await fetch(url, f"/v1/models/{SECRET}", None, "GET")
    count = len(upstream.seen)
    assert count >= len(scripts())
    assert SECRET in str(upstream.seen[0].headers) + upstream.seen[0].target
    await leave_early(port, lambda: upstream.request(count))
    await send_garbage(port)
    await asyncio.sleep(0.6)  # two turns, so that the rows are given out while it runs
    process.stdin.write(b"stop\n")
    async with asyncio.timeout(20):
        await process.wait()
    texts = {path.name: path.read_text("latin-1") for path in folder.iterdir() if path.suffix != ".py"}
    assert set(texts) == {"rows.txt", "strings.txt", "stderr.txt", "session.opusmon"}
    assert "stream_error_event" in texts["session.opusmon"]
    assert "'/v1/messages'" in texts["rows.txt"]
    for outcome in (
        "upstream_http_error",
        "ok",
        "stream_error_event",
        "json_error_in_200",
        "truncated",
        "transport_error",
    ):
        assert f"'{outcome}'" in texts["strings.txt"], outcome
    found = [
        (name, line[max(0, line.lower().find(SECRET.lower()) - 200) :][:300])
        for name, text in texts.items()
        for line in text.splitlines()
        if SECRET.lower() in line.lower()
    ]
    assert found == []
    assert "Traceback" not in texts["stderr.txt"]
    assert "Warning" not in texts["stderr.txt"]
