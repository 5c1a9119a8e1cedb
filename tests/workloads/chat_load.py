"""A streaming chat load with its own clock: what a proxy in between says can be checked against it.

    python chat_load.py http://127.0.0.1:8788 MODEL > load.jsonl

Steps of rising concurrency, prompts of three sizes, one client that leaves early now and then. One JSON line per
request: when it was sent (CLOCK_MONOTONIC ns), its size, time to the first content and to the end by this client's
clock, chunks, and how it ended. Needs aiohttp.
"""

import argparse
import asyncio
import json
import random
import time

import aiohttp

WORDS = [
    "load",
    "burn",
    "clock",
    "sample",
    "trace",
    "stall",
    "queue",
    "token",
    "batch",
    "cache",
    "graph",
    "link",
    "lane",
    "bank",
]


def prompt(words, seed):
    pick = random.Random(seed)
    return " ".join(pick.choice(WORDS) for _ in range(words))


async def one(http, url, model, words, tokens, number, leave_after=None):
    body = {
        "model": model, "stream": True, "max_tokens": tokens, "temperature": 0.7,
        "messages": [{"role": "user", "content": prompt(words, number)}],
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    row = {"number": number, "words": words, "tokens": tokens, "t0": time.monotonic_ns(), "chunks": 0}
    try:
        async with http.post(
            f"{url}/v1/chat/completions", json=body, headers={"x-opusmon-label": f"w{words}"}
        ) as got:
            row["status"] = got.status
            async for line in got.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if event.get("usage"):
                    row["usage"] = event["usage"]
                delta = (event.get("choices") or [{}])[0].get("delta", {})
                if not delta.get("content"):
                    continue
                row["chunks"] += 1
                row.setdefault("ttft_ns", time.monotonic_ns() - row["t0"])
                if leave_after and row["chunks"] >= leave_after:
                    row["left"] = True
                    break
    except (aiohttp.ClientError, TimeoutError) as error:
        row["error"] = type(error).__name__
    row["e2e_ns"] = time.monotonic_ns() - row["t0"]
    print(json.dumps(row), flush=True)


async def worker(http, args, until, seed):
    pick = random.Random(seed)
    while time.monotonic() < until:
        words = pick.choice((60, 600, 3000))
        leave = 5 if pick.random() < 0.03 else None
        await one(http, args.url, args.model, words, pick.choice((32, 96)), pick.getrandbits(40), leave)


async def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--steps", default="1,4,16,48", help="concurrency of each step")
    parser.add_argument("--seconds", type=float, default=25, help="length of a step")
    args = parser.parse_args()
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        await one(http, args.url, args.model, 20, 4, 1)  # loads the model
        for step in map(int, args.steps.split(",")):
            until = time.monotonic() + args.seconds
            print(json.dumps({"step": step, "t0": time.monotonic_ns()}), flush=True)
            await asyncio.gather(*(worker(http, args, until, step * 1000 + n) for n in range(step)))


if __name__ == "__main__":
    asyncio.run(main())
