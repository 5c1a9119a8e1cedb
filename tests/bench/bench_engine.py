"""What a scrape costs: `python tests/bench/bench_engine.py`.

Parsing, and the whole way from text to rows, of a vLLM page of about 560 kB (26 data-parallel engines); the parser of
prometheus_client on the same page; a GET over loopback; and one look through this host's /proc.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable

from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from opusmon.collectors.engine.deltas import Deltas
from opusmon.collectors.engine.discover import look
from opusmon.collectors.engine.fetch import Fetcher
from opusmon.collectors.engine.figures import collapse, figures
from opusmon.collectors.engine.kinds import VLLM, WANTED
from opusmon.collectors.engine.page import Reader
from opusmon.collectors.engine.rows import Scrape, batches
from opusmon.collectors.engine.vocabulary import counters
from opusmon.schema import StringTable

ENGINES = 26
NS = 10**9
EDGES = [0.001 * 1.5**place for place in range(22)]
NAMES = [pick.names[0] for pick in VLLM.latencies.values()]


def page(seen: int) -> str:
    """After so many observations in each bucket."""
    lines = []
    for name in (*NAMES, "vllm:iteration_tokens_total"):
        lines += [f"# HELP {name} Histogram.", f"# TYPE {name} histogram"]
        for engine in range(ENGINES):
            labels = f'engine="{engine}",model_name="meta-llama/Llama-3.1-70B-Instruct"'
            for place, edge in enumerate([*EDGES, "+Inf"], 1):
                lines.append(f'{name}_bucket{{{labels},le="{edge}"}} {float(seen * place)}')
            lines.append(f"{name}_count{{{labels}}} {float(seen * 23)}")
            lines.append(f"{name}_sum{{{labels}}} {seen * 2.5}")
    return "\n".join(lines) + "\n"


def median_ms(work: Callable[[], object], times: int = 7) -> float:
    """Median of several runs in ms."""
    spent = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        spent.append(time.perf_counter() - begin)
    return statistics.median(spent) * 1e3


class Engine:
    """Scrapes again and again, and each page has more observations."""

    def __init__(self) -> None:
        self.reader, self.deltas, self.strings = Reader(WANTED), Deltas(counters(VLLM)), StringTable()
        self.pages = [page(seen) for seen in range(1, 12)]

    def scrape(self) -> int:
        samples = collapse(self.reader.read(self.pages.pop(0)).samples, VLLM.copy_labels)
        entries = figures(VLLM, samples, self.deltas.advance(samples), NS)
        return sum(len(batch.rows) for batch in batches(Scrape(1, NS, 1, "x", VLLM), entries, self.strings))


async def fetching(text: str) -> float:
    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(text=text)

    server = web.ServerRunner(web.Server(answer))
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{server.addresses[0][1]}/metrics"
    spent = []
    async with Fetcher() as fetcher:
        for _ in range(20):
            begin = time.perf_counter()
            await fetcher.get(url)
            spent.append(time.perf_counter() - begin)
    await server.cleanup()
    return statistics.median(spent) * 1e3


def main() -> None:
    text, reader = page(1), Reader(WANTED)
    print(f"page of {len(text):,} B, {text.count(chr(10)):,} lines")
    theirs = median_ms(lambda: [family.samples for family in text_string_to_metric_families(text)])
    first = median_ms(lambda: Reader(WANTED).read(text))
    again = median_ms(lambda: reader.read(text))
    print(f"prometheus_client    {theirs:8.1f} ms")
    print(f"ours, first page     {first:8.1f} ms   {theirs / first:5.1f} x as fast")
    print(f"ours, later pages    {again:8.1f} ms   {theirs / again:5.1f} x as fast")
    engine = Engine()
    print(f"text to rows, first  {median_ms(engine.scrape, 1):8.1f} ms")
    print(f"text to rows, later  {median_ms(engine.scrape):8.1f} ms")
    print(f"GET over loopback    {asyncio.run(fetching(text)):8.1f} ms, both sides in this process")
    print(f"a look through /proc {median_ms(look):8.1f} ms")


if __name__ == "__main__":
    main()
