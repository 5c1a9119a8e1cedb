"""A scripted HTTP/1.1 upstream that speaks Anthropic Messages and OpenAI, with every odd wire one can think of.

It is a bare asyncio server: what it sends is what the script says, byte for byte and at the script's times, and it
notes when each piece was sent and when each request came, in monotonic ns. A piece is bytes (sent at once), a number
(seconds to wait) or an `asyncio.Event` (waited for).

    async with FakeUpstream() as upstream:
        upstream.on("/v1/messages", Script(pieces=[START, 0.05, DELTA, *END]))
        ... requests to upstream.url ...
        upstream.seen[0].sent_at(DELTA) - upstream.seen[0].came
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Piece = bytes | float | asyncio.Event


# Events


def sse(body: object, name: str | None = None, eol: str = "\n") -> bytes:
    """One server-sent event; a name of None leaves the `event:` line out."""
    text = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
    lines = [f"event: {name}"] * (name is not None) + [f"data: {text}", "", ""]
    return eol.join(lines).encode()


def anthropic(body: dict, eol: str = "\n") -> bytes:
    """An event of the Messages API, named after its type."""
    return sse(body, body["type"], eol)


def start(
    usage: dict | None = None, model: str = "claude-test-1", ident: str = "msg_1", eol: str = "\n"
) -> bytes:
    message = {
        "id": ident,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 10, "output_tokens": 1} if usage is None else usage,
    }
    return anthropic({"type": "message_start", "message": message}, eol)


def block(index: int = 0, body: dict | None = None, eol: str = "\n") -> bytes:
    body = {"type": "text", "text": ""} if body is None else body
    return anthropic({"type": "content_block_start", "index": index, "content_block": body}, eol)


def delta(body: dict, index: int = 0, eol: str = "\n") -> bytes:
    return anthropic({"type": "content_block_delta", "index": index, "delta": body}, eol)


def text(words: str = "hello", index: int = 0, eol: str = "\n") -> bytes:
    return delta({"type": "text_delta", "text": words}, index, eol)


def thinking(words: str = "hmm", index: int = 0) -> bytes:
    return delta({"type": "thinking_delta", "thinking": words}, index)


def tool_input(part: str, index: int = 0) -> bytes:
    return delta({"type": "input_json_delta", "partial_json": part}, index)


def block_stop(index: int = 0, eol: str = "\n") -> bytes:
    return anthropic({"type": "content_block_stop", "index": index}, eol)


def message_delta(usage: dict | None = None, stop: str | None = "end_turn", eol: str = "\n") -> bytes:
    body = {"stop_reason": stop, "stop_sequence": None}
    return anthropic({"type": "message_delta", "delta": body, "usage": usage or {"output_tokens": 3}}, eol)


def message_stop(eol: str = "\n") -> bytes:
    return anthropic({"type": "message_stop"}, eol)


PING = anthropic({"type": "ping"})
COMMENT = b": keep-alive\n\n"
OVERLOADED = anthropic(
    {"type": "error", "error": {"details": None, "type": "overloaded_error", "message": "Overloaded"}}
)
STREAM: tuple[bytes, ...] = (
    start(),
    block(),
    text("one"),
    text("two"),
    text("three"),
    block_stop(),
    message_delta(),
    message_stop(),
)
"""A whole plain stream of the Messages API: three deltas, 10 tokens in, 3 out."""
MESSAGE = {
    "id": "msg_2",
    "type": "message",
    "role": "assistant",
    "model": "claude-test-1",
    "content": [{"type": "text", "text": "hello"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {
        "input_tokens": 10,
        "cache_read_input_tokens": 30,
        "cache_creation_input_tokens": 2,
        "output_tokens": 5,
    },
}
"""A whole message, not streamed."""


def chat(delta: dict | None = None, finish: str | None = None, **more: object) -> bytes:
    """A chunk of Chat Completions; without a delta it has no choices, as the one with the usage."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "gpt-test",
        "choices": choices,
    }
    return sse(body | more)


DONE = sse("[DONE]")
CHAT_USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 6,
    "total_tokens": 46,
    "prompt_tokens_details": {"cached_tokens": 30},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
CHAT_STREAM: tuple[bytes, ...] = (
    chat({"role": "assistant", "content": ""}),
    chat({"content": "one"}),
    chat({"content": "two"}),
    chat({}, "stop"),
    chat(usage=CHAT_USAGE),
    DONE,
)
"""A whole plain stream of Chat Completions: two deltas."""


def response_event(kind: str, **more: object) -> bytes:
    """An event of the Responses API."""
    return sse({"type": kind, "sequence_number": 0} | more, kind)


def response_body(status: str = "completed", **more: object) -> dict:
    """A response object; `usage` counts 40 tokens in, 30 of them cached, and 6 out."""
    usage = {
        "input_tokens": 40,
        "input_tokens_details": {"cached_tokens": 30, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 46,
    }
    body = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": status,
        "model": "gpt-test",
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": usage if status == "completed" else None,
    }
    return body | more


def output_text(words: str) -> bytes:
    return response_event(
        "response.output_text.delta", delta=words, item_id="m", output_index=0, content_index=0, logprobs=[]
    )


RESPONSES_STREAM: tuple[bytes, ...] = (
    response_event("response.created", response=response_body("in_progress")),
    output_text("one"),
    output_text("two"),
    response_event("response.completed", response=response_body()),
)
"""A whole plain stream of the Responses API: two deltas."""


# Bodies


def gzipped(pieces: Sequence[Piece], *, flush: bool = True) -> list[Piece]:
    """The pieces as one gzip body; with `flush` each can be read at once, without it all come with the last."""
    packer = zlib.compressobj(wbits=31)
    out: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            packed = packer.compress(piece) + (packer.flush(zlib.Z_SYNC_FLUSH) if flush else b"")
            out += [packed] if packed else []
        else:
            out.append(piece)
    return [*out, packer.flush()]


def one_by_one(body: bytes) -> list[Piece]:
    """Each byte a piece of its own."""
    return [body[index : index + 1] for index in range(len(body))]


@dataclass(frozen=True)
class Script:
    """What to answer.

    Attributes:
        pieces: the body, see the module.
        status: HTTP status.
        headers: besides the framing's; a content type of event streams is added where none is given.
        framing: chunked, a content length (of the whole body, or `length`), or the connection's end.
        end: clean; `reset` cuts the connection after the last piece, `fin` closes it without the framing's end,
            `hang` sends nothing more until the client goes.
        length: a content length that is not the body's.
        keep: keep the connection open for another request.
        before: bytes before the status line, such as a `103 Early Hints`.
        early: answer before the request's body is read.
        wait: an event to wait for before the status line.
    """

    pieces: Sequence[Piece] = ()
    status: int = 200
    headers: Sequence[tuple[str, str]] = ()
    framing: Literal["chunked", "length", "close"] = "chunked"
    end: Literal["clean", "reset", "fin", "hang"] = "clean"
    length: int | None = None
    keep: bool = True
    before: bytes = b""
    early: bool = False
    wait: asyncio.Event | None = None

    @classmethod
    def json(cls, body: object, status: int = 200, headers: Sequence[tuple[str, str]] = ()) -> Script:
        """A JSON answer."""
        content = json.dumps(body).encode()
        return cls([content], status, [("Content-Type", "application/json"), *headers], "length")

    @property
    def body(self) -> bytes:
        """What a plain client gets."""
        return b"".join(piece for piece in self.pieces if isinstance(piece, bytes))


@dataclass
class Seen:
    """A request as it came, and what was done with it; times are monotonic ns.

    Attributes:
        came: its headers were complete.
        sent: (time, piece) of each piece, noted before it was written.
        closed: the client closed the connection before the answer's end; 0 while it has not.
    """

    method: str
    target: str
    headers: list[tuple[str, str]]
    came: int
    body: bytes = b""
    sent: list[tuple[int, bytes]] = field(default_factory=list)
    closed: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def values(self, name: str) -> list[str]:
        """The values of a header, in order."""
        return [value for key, value in self.headers if key.lower() == name.lower()]

    def sent_at(self, piece: bytes) -> int:
        """When a piece was sent first."""
        return next(t for t, sent in self.sent if sent == piece)


class FakeUpstream:
    """The server; see the module."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.connections = 0
        self._scripts: dict[str, list[Script]] = {}
        self._arrived = asyncio.Condition()
        self._tasks: set[asyncio.Task] = set()

    def on(self, path: str, *scripts: Script) -> None:
        """Answer requests to a path with these in turn, the last one from then on."""
        self._scripts[path] = list(scripts)

    async def __aenter__(self) -> FakeUpstream:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def request(self, number: int = 0) -> Seen:
        """The request of that number, once it has come."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.seen) > number)
        return self.seen[number]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._one(reader, writer):
                    pass
        finally:
            writer.transport.abort() if task.cancelling() else writer.close()
            self._tasks.discard(task)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        seen = _parse(head)
        script = self._next(seen.target.partition("?")[0])
        async with self._arrived:
            self.seen.append(seen)
            self._arrived.notify_all()
        if not script.early:
            seen.body = await _read_body(reader, seen)
        watch = asyncio.create_task(_watch(reader, seen))
        try:
            await self._answer(writer, seen, script)
            if script.early:
                await seen.gone.wait()
            if script.end == "hang":
                await seen.gone.wait()
        finally:
            if not watch.done():
                watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        clean = script.end == "clean" and script.framing != "close" and not script.early
        return clean and script.keep and not seen.gone.is_set()

    def _next(self, path: str) -> Script:
        scripts = self._scripts.get(path)
        if not scripts:
            return Script.json({"error": "no script"}, 404)
        return scripts.pop(0) if len(scripts) > 1 else scripts[0]

    async def _answer(self, writer: asyncio.StreamWriter, seen: Seen, script: Script) -> None:
        if script.wait is not None:
            await _until(script.wait.wait(), seen)
        writer.write(script.before + _head(script, seen.method))
        if seen.method == "HEAD" or script.status in (204, 304):
            return
        for piece in script.pieces:
            if isinstance(piece, bytes):
                seen.sent.append((time.monotonic_ns(), piece))
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if script.framing == "chunked" else piece)
                await writer.drain()
            else:
                wait = piece.wait() if isinstance(piece, asyncio.Event) else asyncio.sleep(piece)
                await _until(wait, seen)
            if seen.gone.is_set():
                return
        await _end(writer, script)


async def _until(wait: object, seen: Seen) -> None:
    """Wait for something, or for the client to go."""
    tasks = {asyncio.ensure_future(wait), asyncio.ensure_future(seen.gone.wait())}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _end(writer: asyncio.StreamWriter, script: Script) -> None:
    if script.end == "clean" and script.framing == "chunked":
        writer.write(b"0\r\n\r\n")
    await writer.drain()
    if script.end == "reset":
        writer.transport.set_write_buffer_limits(0)
        await writer.drain()  # a reset throws away what has not been sent
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


def _head(script: Script, method: str) -> bytes:
    headers = list(script.headers)
    if not any(name.lower() == "content-type" for name, _ in headers) and script.status not in (204, 304):
        headers.append(("Content-Type", "text/event-stream"))
    if script.framing == "chunked" and script.status not in (204, 304):
        headers.append(("Transfer-Encoding", "chunked"))
    elif script.framing == "length":
        headers.append(("Content-Length", str(len(script.body) if script.length is None else script.length)))
    lines = [f"HTTP/1.1 {script.status} Scripted", *(f"{name}: {value}" for name, value in headers)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _parse(head: bytes) -> Seen:
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    method, target, _ = first.split(" ")
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    return Seen(method, target, headers, time.monotonic_ns())


async def _read_body(reader: asyncio.StreamReader, seen: Seen) -> bytes:
    if seen.values("transfer-encoding") != ["chunked"]:
        return await reader.readexactly(int((seen.values("content-length") or ["0"])[0]))
    body = bytearray()
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readuntil(b"\r\n")
    return bytes(body)


async def _watch(reader: asyncio.StreamReader, seen: Seen) -> None:
    """Notice that the client has closed the connection. Nothing else comes while an answer is under way."""
    with contextlib.suppress(ConnectionError):
        while seen_more := await reader.read(1 << 16):
            seen.body += seen_more
    seen.closed = time.monotonic_ns()
    seen.gone.set()
