"""What the proxy adds: time to the first delta and per chunk against direct, paired in one run, and CPU per chunk.

`python tests/bench/bench_proxy.py [--streams 1,64,256] [--rounds 3] [--soak 100000]`, with nothing else on the machine.
As in use: the upstream and the load on core 0, the proxy (`ProxyCollector`, rows and all) on core 1. Each stream has 60
chunks, 30 ms apart (over 64 streams further, so that the load itself keeps up); starts are spread; direct streams, those
through a bare relay of bytes and those through the proxy take turns, so that all meet the same machine. "first" are the
requests for which the proxy had to connect to the upstream. A chunk carries the time it was sent; what is added is the
difference of the medians. On a busy machine, `chrt -f 5` before it takes the other processes out of the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import fake_upstream as up

CHUNKS = 60
KINDS = ("direct", "relay", "proxy")
MARK = b'"text_delta", "text": "'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = json.dumps(
    {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x" * 4000}]}
).encode()


def pin(core):
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setaffinity(0, {core % os.cpu_count()})


class Upstream(asyncio.Protocol):
    """Answers any request with a stream; as bare as asyncio gets."""

    def connection_made(self, transport):
        self.transport = transport
        self.had = b""

    def data_received(self, data):
        self.had += data
        head, found, body = self.had.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(
            next(
                line.split(b":")[1]
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length")
            )
        )
        if len(body) >= length:
            self.had = b""
            self.send(HEAD + framed(up.start()))
            self.gap_s = float(told(head, b"x-gap"))
            asyncio.get_running_loop().call_later(self.gap_s, self.chunk, int(told(head, b"x-chunks")))

    def chunk(self, left):
        if left:
            self.send(framed(up.text(f"{time.monotonic_ns():020d}")))
            asyncio.get_running_loop().call_later(self.gap_s, self.chunk, left - 1)
        else:
            self.send(framed(up.message_delta() + up.message_stop()) + b"0\r\n\r\n")

    def send(self, data):
        if not self.transport.is_closing():
            self.transport.write(data)


def told(head, name):
    """A header of our own load; the last one ends the head."""
    return head.partition(name + b": ")[2].partition(b"\r\n")[0]


def framed(piece):
    return b"%x\r\n%b\r\n" % (len(piece), piece)


class Client(asyncio.Protocol):
    """Sends one request after another on one connection and notes how old each chunk is when it comes."""

    def __init__(self, port, kind, results, gap_s, chunks=CHUNKS):
        self.request = (
            f"POST /v1/messages HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(BODY)}\r\nx-gap: {gap_s:g}\r\nx-chunks: {chunks}\r\n\r\n"
        ).encode() + BODY
        self.kind, self.results, self.what = kind, results, "first"
        self.gap_ns = int(gap_s * 1e9)

    def connection_made(self, transport):
        self.transport = transport

    def ask(self):
        self.first, self.tail = True, b""
        self.done = asyncio.get_running_loop().create_future()
        self.began = time.monotonic_ns()
        self.transport.write(self.request)
        return self.done

    def data_received(self, data):
        now = time.monotonic_ns()
        data = self.tail + data
        end = 0
        while (place := data.find(MARK, end)) >= 0 and len(data) >= place + len(MARK) + 20:
            end = place + len(MARK) + 20
            sent = int(data[end - 20 : end])
            if self.first:
                self.first = False
                self.results.append((self.kind, self.what, now - self.began - self.gap_ns))
            else:
                self.results.append((self.kind, "chunk", now - sent))
        self.tail = data[max(end, len(data) - 60) :]
        if data.endswith(b"0\r\n\r\n"):
            self.tail = b""
            self.done.set_result(None)

    def connection_lost(self, exc):
        if not self.done.done():
            self.done.set_exception(ConnectionError("lost"))


async def serve(pipe):
    pin(0)
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", 0, backlog=1024)
    pipe.send(server.sockets[0].getsockname()[1])
    await asyncio.Event().wait()


async def proxy(pipe, target):
    pin(1)
    from opusmon.clock import NS, SystemClock
    from opusmon.collectors.cost import rss_b
    from opusmon.collectors.proxy import ProxyCollector
    from opusmon.schema import StringTable

    strings = StringTable()
    collector = ProxyCollector(
        strings, SystemClock(), NS, upstream=f"http://127.0.0.1:{target}", listen="127.0.0.1:0"
    )
    own, rows, told = [], 0, False
    async for batch in collector.batches():
        if not told:
            pipe.send(int(collector.address.rpartition(":")[2]))
            told = True
        if batch.channel.name == "request":
            rows += len(batch.rows)
            own += batch.rows["own_ns"].tolist()
        while pipe.poll():
            pipe.recv()
            pipe.send((time.process_time(), rows, statistics.median(own or [0]), rss_b() / 1e6, len(strings)))
            own = []


class Relay(asyncio.Protocol):
    """Passes bytes on and understands nothing: what a second hop costs on this machine, whatever it does."""

    def __init__(self, target, peer=None):
        self.target, self.peer, self.early = target, peer, []

    def connection_made(self, transport):
        self.transport = transport
        if self.peer is None:
            self.opening = asyncio.ensure_future(self.open())

    async def open(self):
        loop = asyncio.get_running_loop()
        _, self.peer = await loop.create_connection(
            lambda: Relay(self.target, self), "127.0.0.1", self.target
        )
        for data in self.early:
            self.peer.transport.write(data)

    def data_received(self, data):
        if self.peer is None:
            self.early.append(data)
        else:
            self.peer.transport.write(data)

    def connection_lost(self, _):
        if self.peer is not None:
            self.peer.transport.close()


async def relay(pipe, target):
    pin(1)
    server = await asyncio.get_running_loop().create_server(
        lambda: Relay(target), "127.0.0.1", 0, backlog=1024
    )
    pipe.send(server.sockets[0].getsockname()[1])
    await asyncio.Event().wait()


async def load(ports, streams, rounds):
    """Results of `rounds` requests on each of `streams` connections of each kind."""
    results = []
    loop = asyncio.get_running_loop()
    clients = []
    gap_s = max(0.03, streams * 0.0004)
    for number in range(streams * len(KINDS)):
        kind = KINDS[number % len(KINDS)]
        _, client = await loop.create_connection(
            lambda kind=kind: Client(ports[kind], kind, results, gap_s), "127.0.0.1", ports[kind]
        )
        clients.append(client)
    spread_s = CHUNKS * gap_s
    lost = 0

    async def one(number, client):
        nonlocal lost
        await asyncio.sleep(spread_s * number / len(clients))
        for turn in range(rounds + 1):
            client.what = "ttft" if turn else "first"
            try:
                await client.ask()
            except ConnectionError:
                lost += 1
                return

    await asyncio.gather(*(client.ask() for client in clients[: len(KINDS)]))
    results.clear()
    await asyncio.gather(*(one(number, client) for number, client in enumerate(clients)))
    for client in clients:
        client.transport.close()
    return results, lost


async def soak(port, count):
    """Send so many short requests over 16 connections; how many got no whole answer, and seconds."""
    loop, left, lost = asyncio.get_running_loop(), count, 0

    async def one():
        nonlocal left, lost
        _, client = await loop.create_connection(
            lambda: Client(port, "proxy", deque(maxlen=1), 0, 2), "127.0.0.1", port
        )
        while left > 0:
            left -= 1
            try:
                await client.ask()
            except ConnectionError:
                lost += 1
                return
        client.transport.close()

    began = time.monotonic()
    await asyncio.gather(*(one() for _ in range(16)))
    return lost, time.monotonic() - began


def p(values, q):
    return statistics.quantiles(values, n=100)[q - 1] / 1e6 if len(values) > 1 else float("nan")


def child(target, *words):
    ours, theirs = mp.Pipe()
    process = mp.get_context("fork").Process(target=lambda: asyncio.run(target(theirs, *words)), daemon=True)
    process.start()
    return ours, ours.recv(), process


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--streams", default="1,64,256")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--soak", type=int, default=0, help="send so many short requests instead")
    options = arguments.parse_args()
    _, direct, serving = child(serve)
    control, through, proxying = child(proxy, direct)
    _, relayed, relaying = child(relay, direct)
    pin(0)
    for part in range(5 if options.soak else 0):
        lost, took_s = asyncio.run(soak(through, options.soak // 5))
        time.sleep(1.2)
        control.send("mark")
        _, rows, _, rss_mb, texts = control.recv()
        print(
            f"soak {part + 1}/5: lost {lost}, {options.soak // 5 / took_s:.0f} requests/s; rows so far {rows},"
            f" proxy {rss_mb:.1f} MB, {texts} texts",
            flush=True,
        )
    for streams in () if options.soak else map(int, options.streams.split(",")):
        rounds = options.rounds if streams > 1 else 10
        control.send("mark")
        cpu0, *_ = control.recv()
        results, lost = asyncio.run(
            load({"direct": direct, "relay": relayed, "proxy": through}, streams, rounds)
        )
        control.send("mark")
        cpu1, rows, own, *_ = control.recv()
        sets = {
            (kind, what): [ns for k, w, ns in results if (k, w) == (kind, what)]
            for kind in KINDS
            for what in ("first", "ttft", "chunk")
        }
        line = f"{streams:>4} streams:"
        for what in ("ttft", "first", "chunk"):
            d, t = sets["direct", what], sets["proxy", what]
            floor = p(sets["relay", what], 50) - p(d, 50)
            line += f"  {what} direct p50 {p(d, 50):.2f} p99 {p(d, 99):.2f} ms, added p50 {p(t, 50) - p(d, 50):+.2f} p99 {p(t, 99) - p(d, 99):+.2f} ms (x{p(t, 50) / p(d, 50):.1f}; bare relay {floor:+.2f});"
        chunks = len(sets["proxy", "chunk"]) + len(sets["proxy", "ttft"])
        print(
            f"{line}  CPU {(cpu1 - cpu0) / chunks * 1e6:.0f} us per chunk; own_ns says {own / 1e6:.2f} ms; lost {lost}; rows {rows}",
            flush=True,
        )
    for process in (proxying, relaying, serving):
        process.terminate()
        process.join()


if __name__ == "__main__":
    main()
