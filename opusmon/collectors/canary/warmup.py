"""A first request to ourselves: what the client loads when it is first used must not count as the server's time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from opusmon.clock import Clock
from opusmon.collectors.canary.endpoint import CanaryConfig
from opusmon.collectors.canary.exchange import Client

_ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    b'data: {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x"}}\n\n'
    b'data: {"type": "message_stop"}\n\n'
)


async def warm_up(config: CanaryConfig, clock: Clock) -> None:
    """Ask a server of our own on loopback once, without a key; some 0.1 s. One that cannot be is no harm."""
    try:
        server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    except OSError:
        return  # the first request is slower then, and its own_ns says so
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = Client(replace(config, base_url=f"http://localhost:{port}", env={}, timeout_s=5.0), clock)
        try:
            await client.ask("", 0)
        finally:
            await client.close()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(_ANSWER)
        await writer.drain()
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
        pass
    finally:
        writer.close()
