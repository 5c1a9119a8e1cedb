"""A Messages endpoint on loopback that does what a test tells it, and notes when, on the test's own clock."""

import asyncio
import json
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Seen:
    """A request as it arrived."""

    t: int
    connection: int
    headers: dict
    body: dict
    wrote: dict = field(default_factory=dict)

    @property
    def prompt(self):
        return self.body["messages"][0]["content"]


class Out:
    """Writes an answer; every event's time is kept in `seen.wrote` under its name."""

    def __init__(self, writer, seen):
        self._writer, self._seen = writer, seen

    async def head(self, status=200, kind="text/event-stream", chunked=True, **headers):
        lines = [f"HTTP/1.1 {status} X", f"content-type: {kind}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        lines += ["transfer-encoding: chunked"] if chunked else []
        self._seen.wrote["head"] = time.monotonic_ns()
        await self._send(("\r\n".join(lines) + "\r\n\r\n").encode())

    async def chunk(self, data):
        await self._send(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, mark, body, named=True):
        self._seen.wrote[mark] = time.monotonic_ns()
        name = f"event: {body['type']}\n" if named else ""
        await self.chunk(f"{name}data: {json.dumps(body)}\n\n".encode())

    async def end(self):
        await self._send(b"0\r\n\r\n")

    async def plain(self, status, body, kind="application/json", **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.head(status, kind, chunked=False, content_length=len(data), **headers)
        await self._send(data)

    def cut(self):
        self._writer.transport.abort()

    async def _send(self, data):
        self._writer.write(data)
        await self._writer.drain()


def start(model="m", tokens=10, **usage):
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": model, "content": []}
    usage = {"input_tokens": tokens, "output_tokens": 1, **usage}
    return {"type": "message_start", "message": {**message, "stop_reason": None, "usage": usage}}


def delta(text="x"):
    return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}


def end(output=3, **usage):
    return {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn"},
        "usage": {"output_tokens": output, **usage},
    }


STOP = {"type": "message_stop"}


async def good(seen, out, pause_s=0.0, named=True):
    """A whole answer of three tokens."""
    await out.head(request_id="req_1")
    await out.event("start", start(), named)
    await out.event("ping", {"type": "ping"}, named)
    for n in range(3):
        await asyncio.sleep(pause_s)
        await out.event(f"token{n}", delta(), named)
    await asyncio.sleep(pause_s)
    await out.event("usage", end(), named)
    await out.event("stop", STOP, named)
    await out.end()


class Server:
    """Attributes: seen, in order of arrival; url."""

    def __init__(self, answer):
        self._answer = answer
        self.seen = []
        self.connections = 0
        self.arrived = asyncio.Condition()

    async def wait_for(self, count):
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.seen) >= count)

    async def connected(self, reader, writer):
        self.connections += 1
        number = self.connections
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode("latin-1").split("\r\n")[1:-2]
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                seen = Seen(time.monotonic_ns(), number, headers, json.loads(body or b"{}"))
                async with self.arrived:
                    self.seen.append(seen)
                    self.arrived.notify_all()
                await self._answer(seen, Out(writer, seen))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(answer=good, ssl=None):
    """A server on a free port of loopback for as long as the block runs."""
    server = Server(answer)
    tasks = set()

    def connected(reader, writer):
        task = asyncio.ensure_future(server.connected(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listener = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=ssl)
    port = listener.sockets[0].getsockname()[1]
    server.port = port
    server.url = f"https://localhost:{port}" if ssl else f"http://127.0.0.1:{port}"
    try:
        yield server
    finally:
        listener.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
