"""The other side of small_server.py: a steady stream of requests, a relay that can be slow, loads beside it.

    python drill_load.py requests http://127.0.0.1:8788 --seconds 40 [--per-s 4] [--long-after S]
    python drill_load.py relay 8001 8000 --slow-file PATH
    python drill_load.py copy --seconds 30       copies within GPU 0
    python drill_load.py peer --seconds 30       copies from GPU 0 to GPU 1
    python drill_load.py spin --seconds 30 --cpus 2,3 --count 4

Prints when what it does begins, CLOCK_MONOTONIC ns. Requests need aiohttp, the loads torch.
"""

import argparse
import asyncio
import json
import os
import random
import time
from pathlib import Path

SLOW_S = 1.6


async def requests(args):
    import aiohttp

    pick = random.Random(7)
    began = time.monotonic()
    print(json.dumps({"begins": "requests", "t": time.monotonic_ns()}), flush=True)
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        asyncio.TaskGroup() as all_of_them,
    ):
        while (now := time.monotonic() - began) < args.seconds:
            words = pick.choice((150, 300, 600)) * (8 if args.long_after and now > args.long_after else 1)
            all_of_them.create_task(one(http, args.url, words, pick.choice((60, 120, 240))))
            await asyncio.sleep(pick.expovariate(args.per_s))


async def one(http, url, words, tokens):
    import aiohttp

    body = {
        "model": "small", "stream": True, "max_tokens": tokens,
        "messages": [{"role": "user", "content": "word " * words}],
    }  # fmt: skip
    try:
        async with http.post(f"{url}/v1/messages", json=body) as answer:
            async for _ in answer.content:
                pass
    except aiohttp.ClientError as error:
        print(json.dumps({"failed": type(error).__name__, "t": time.monotonic_ns()}), flush=True)


async def relay(args):
    async def meet(reader, writer):
        there, back = await asyncio.open_connection("127.0.0.1", args.to_port)
        await asyncio.gather(pump(reader, back, slow=True), pump(there, writer, slow=False))

    async def pump(reader, writer, *, slow):
        try:
            while data := await reader.read(65536):
                if slow and args.slow_file.exists():
                    await asyncio.sleep(SLOW_S)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(meet, "127.0.0.1", args.from_port)
    await server.serve_forever()


def copies(seconds, device):
    import torch

    a = torch.ones(1 << 29, device="cuda:0")
    b = torch.empty_like(a, device=device)
    torch.cuda.synchronize()
    print(json.dumps({"begins": f"copies to {device}", "t": time.monotonic_ns()}), flush=True)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(20):
            b.copy_(a)
        torch.cuda.synchronize("cuda:0")


def spin(args):
    cpus = {int(cpu) for cpu in args.cpus.split(",")}
    print(json.dumps({"begins": "busy loops", "t": time.monotonic_ns()}), flush=True)
    for _ in range(args.count - 1):
        if os.fork() == 0:
            break
    os.sched_setaffinity(0, cpus)
    until = time.monotonic() + args.seconds
    while time.monotonic() < until:
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    asked = verbs.add_parser("requests")
    asked.add_argument("url")
    asked.add_argument("--per-s", type=float, default=4.0)
    asked.add_argument("--long-after", type=float)
    way = verbs.add_parser("relay")
    way.add_argument("from_port", type=int)
    way.add_argument("to_port", type=int)
    way.add_argument("--slow-file", type=Path, required=True)
    loops = verbs.add_parser("spin")
    loops.add_argument("--cpus", required=True)
    loops.add_argument("--count", type=int, default=4)
    for one_of_them in (asked, loops, verbs.add_parser("copy"), verbs.add_parser("peer")):
        one_of_them.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    if args.verb in ("copy", "peer"):
        copies(args.seconds, {"copy": "cuda:0", "peer": "cuda:1"}[args.verb])
    elif args.verb == "spin":
        spin(args)
    else:
        asyncio.run({"requests": requests, "relay": relay}[args.verb](args))


if __name__ == "__main__":
    main()
