"""The engine collector against a real HTTP server that behaves well, badly and worse."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import socket
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from needs import needs

from opusmon.channels import ENGINE, ENGINE_BUCKET
from opusmon.clock import ManualClock, SystemClock
from opusmon.collectors.base import Collector
from opusmon.collectors.engine import EngineCollector
from opusmon.collectors.engine.address import AddressError, parse
from opusmon.collectors.engine.fetch import Fetcher
from opusmon.collectors.engine.target import Target
from opusmon.collectors.engine.trouble import FetchError
from opusmon.schema import Batch, StringTable

PAGES = Path(__file__).parents[1] / "data" / "engine_pages"
SECRET = "hunter2-sk-ant-XYZZY"
NS = 10**9
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def page(name: str) -> str:
    return (PAGES / f"{name}.prom").read_text()


class Script:
    """A server whose answers can be changed while it runs.

    Attributes:
        answers: path to what is answered there; text is a page.
        asked: path and time of each request.
        headers: of the last request.
        called: there was a request.
    """

    def __init__(self) -> None:
        self.answers: dict[str, str | Answer] = {}
        self.asked: list[tuple[str, float]] = []
        self.headers: dict[str, str] = {}
        self.called = asyncio.Event()

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append((request.path_qs, time.monotonic()))
        self.headers = dict(request.headers)
        self.called.set()
        answer = self.answers.get(request.path)
        if answer is None:
            return web.Response(status=404, text="no such thing: " + SECRET)
        if isinstance(answer, str):
            return web.Response(text=answer, content_type="text/plain", headers={"X-Secret": SECRET})
        return await answer(request)  # type: ignore[arg-type]


@asynccontextmanager
async def serving(script: Script, port: int = 0) -> AsyncIterator[int]:
    """Serve on loopback; the port."""
    server = web.ServerRunner(web.Server(script), shutdown_timeout=0.1)
    await server.setup()
    site = web.TCPSite(server, "127.0.0.1", port)
    await site.start()
    try:
        yield server.addresses[0][1]
    finally:
        await server.cleanup()


@asynccontextmanager
async def raw(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """Serve bytes; the port."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await talk(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def sends(data: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return talk


async def said(port: int, total_s: float = 2.0, max_b: int = 8 * 2**20) -> FetchError:
    """The error that asking gives."""
    async with asyncio.timeout(10), Fetcher(total_s=total_s, max_b=max_b) as fetcher:
        with pytest.raises(FetchError) as caught:
            await fetcher.get(f"http://127.0.0.1:{port}/metrics?key={SECRET}")
    assert SECRET not in repr(caught.value) + caught.value.reason + caught.value.remedy
    return caught.value


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


# --- one GET


async def test_a_request_carries_nothing_but_itself() -> None:
    script = Script()
    script.answers["/metrics"] = "x 1\n"
    async with serving(script) as port, Fetcher() as fetcher:
        assert await fetcher.get(f"http://127.0.0.1:{port}/metrics") == "x 1\n"
    assert set(script.headers) == {"Host", "Accept", "Accept-Encoding", "User-Agent"}
    assert script.headers["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("deflate", zlib.compress)],
)
async def test_a_compressed_page_is_unpacked(encoding: str, pack: Callable[[bytes], bytes]) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=pack(b"x 1\n" * 50_000), headers={"Content-Encoding": encoding})

    script = Script()
    script.answers["/metrics"] = answer
    async with serving(script) as port, Fetcher() as fetcher:
        assert await fetcher.get(f"http://127.0.0.1:{port}/metrics") == "x 1\n" * 50_000


async def test_a_bomb_goes_off_at_the_limit() -> None:
    """64 MiB of nothing in 64 kB: no more than the limit is unpacked."""
    bomb = gzip.compress(bytes(64 * 2**20))

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})

    script = Script()
    script.answers["/metrics"] = answer
    async with serving(script) as port:
        assert (await said(port)).reason == "its page is over 8 MiB"


async def test_an_endless_page_is_given_up_at_the_limit() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x 1\n" * 10_000)

    script = Script()
    script.answers["/metrics"] = answer
    async with serving(script) as port:
        assert (await said(port, max_b=2**20)).reason == "its page is over 1 MiB"


async def test_a_slow_drip_is_given_up_in_time() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x 1\n")
            await asyncio.sleep(0.02)

    script = Script()
    script.answers["/metrics"] = answer
    async with serving(script) as port:
        began = time.monotonic()
        assert (await said(port, total_s=0.3)).reason == "no whole answer within 0.3 s"
        assert time.monotonic() - began < 1.0


async def test_silence_is_given_up_in_time() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with raw(talk) as port:
        assert (await said(port, total_s=0.2)).reason == "no whole answer within 0.2 s"


async def test_nobody_there() -> None:
    error = await said(free_port())
    assert (error.reason, error.refused) == ("nothing listens there", True)


OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it closed the connection without an answer"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "it does not speak HTTP"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n4\r\nx 1\n\r\n400\r\ny ", "its answer is cut short"),
        (OK + b"Content-Length: 400\r\n\r\nx 1\n", "its answer is cut short"),
        (OK + b"Content-Encoding: gzip\r\n\r\nx 1\n", "its compressed answer is damaged"),
        (
            OK + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(b"x 1\n" * 99)[:-12],
            "its compressed answer is cut short",
        ),
        (
            OK + b"Content-Encoding: br\r\n\r\nx 1\n",
            "it compresses its answer in a way that was not asked for",
        ),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n", "it answers HTTP 500"),
        (
            b"HTTP/1.1 302 F\r\nLocation: http://10.0.0.1/\r\nContent-Length: 0\r\n\r\n",
            "it redirects (HTTP 302), which is not followed",
        ),
        (b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", "it wants a key (HTTP 401); opusmon sends none"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 0\r\n\r\n",
            "it answers HTML or JSON, not metrics",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
async def test_bad_answers_are_named(data: bytes, reason: str) -> None:
    async with raw(sends(data)) as port:
        assert (await said(port)).reason == reason


async def test_a_connection_reset_is_named() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"Content-Length: 400\r\n\r\nx 1\n")
        await writer.drain()
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    async with raw(talk) as port:
        assert (await said(port)).reason in ("its answer is cut short", "the connection broke")


# --- addresses


@pytest.mark.parametrize(
    ("text", "label", "url"),
    [
        ("http://10.0.0.5:8000", "10.0.0.5:8000/metrics", "http://10.0.0.5:8000/metrics"),
        ("localhost:8000/", "localhost:8000/metrics", "http://localhost:8000/metrics"),
        ("https://gpu-7/v1/metrics", "gpu-7:443/v1/metrics", "https://gpu-7:443/v1/metrics"),
        ("http://[::1]:8080", "[::1]:8080/metrics", "http://[::1]:8080/metrics"),
        (f"http://h:1/m?k={SECRET}#{SECRET}", "h:1/m", f"http://h:1/m?k={SECRET}"),
    ],
)
def test_addresses(text: str, label: str, url: str) -> None:
    address = parse(text)
    path = address.path or "/metrics"
    assert (address.label(path), address.url(path)) == (label, url)
    assert SECRET not in repr(address)


@pytest.mark.parametrize(
    "text",
    [
        f"http://me:{SECRET}@h:1",
        f"http://{SECRET}@h:1",
        "ftp://h",
        "file:///etc/passwd",
        "",
        "http://",
        "h:99999",
        "h:0",
        "http://[::1",
        "http://a b:1",
    ],
)
def test_what_is_no_address_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse(text)
    assert SECRET not in str(caught.value)


# --- one engine


class Answers:
    """Gives these texts one after the other; an error is raised."""

    def __init__(self, clock: ManualClock, *texts: str | FetchError) -> None:
        self.clock = clock
        self.texts = list(texts)
        self.urls: list[str] = []

    async def get(self, url: str) -> str:
        self.urls.append(url)
        self.clock.advance(5_000_000)
        text = self.texts.pop(0)
        if isinstance(text, FetchError):
            raise text
        return text


def counting(tokens: int, *, model: str = "m") -> str:
    return f'vllm:generation_tokens_total{{model_name="{model}",engine="0"}} {tokens}\n'


async def test_counts_cover_the_time_since_the_last_good_scrape() -> None:
    """One scrape fails in between: the window is longer, nothing is lost."""
    clock = ManualClock(100 * NS)
    target = Target(parse("h:1"), clock)
    answers = Answers(clock, counting(100), FetchError("it answers HTTP 500", status=500), counting(160))
    first = await target.turn(answers, NS)
    clock.advance(NS)
    failed = await target.turn(answers, NS)
    clock.advance(2 * NS)
    second = await target.turn(answers, NS)
    assert first.scrape is not None
    assert (first.scrape.dt_ns, first.scrape.t, first.scrape.scrape_ns) == (
        0,
        100 * NS + 5_000_000,
        5_000_000,
    )
    assert failed.scrape is None
    assert failed.notes == [
        (("engine", "", "h:1/metrics"), "stale", "it answers HTTP 500", failed.notes[0][3])
    ]
    assert second.scrape is not None
    assert second.scrape.dt_ns == 3 * NS + 10_000_000
    assert second.entries[0].values["output_tps"] == pytest.approx(60 / 3.01)


async def test_an_engine_that_does_not_answer_is_asked_less_and_less() -> None:
    clock = ManualClock(NS)
    target = Target(parse("h:1"), clock)
    waits = []
    for _ in range(8):
        await target.turn(Answers(clock, FetchError("nothing listens there", refused=True)), NS)
        waits.append((target.due - clock.t + 5_000_000) // NS)
    assert waits == [2, 4, 8, 16, 30, 30, 30, 30]
    await target.turn(Answers(clock, counting(1)), NS)
    assert target.due - clock.t < NS


async def test_an_engine_whose_page_takes_long_is_asked_less_often() -> None:
    """A tenth of its time at most: what takes 200 ms is asked every 2 s."""

    class Slow(Answers):
        async def get(self, url: str) -> str:
            self.clock.advance(195_000_000)
            return await super().get(url)

    clock = ManualClock()
    target = Target(parse("h:1"), clock)
    outcome = await target.turn(Slow(clock, counting(1)), NS)
    assert target.due == 2 * NS
    assert ("engine", "scrape_ns", "h:1/metrics") in [note[0] for note in outcome.notes]


async def test_the_page_of_trtllm_is_found_at_its_other_path() -> None:
    """Its /metrics is JSON. The path that was named is never left."""
    clock = ManualClock()
    json = FetchError("it answers HTML or JSON, not metrics", status=200)
    target, answers = Target(parse("h:1"), clock), Answers(clock, json, page("trtllm"), page("trtllm"))
    for _ in range(3):
        outcome = await target.turn(answers, NS)
    assert [url.removeprefix("http://h:1") for url in answers.urls] == ["/metrics"] + [
        "/prometheus/metrics"
    ] * 2
    assert outcome.scrape is not None
    assert (outcome.scrape.label, outcome.scrape.kind.name) == ("h:1/prometheus/metrics", "trtllm")
    named, answers = Target(parse("h:1/metrics"), clock), Answers(clock, json, json)
    for _ in range(2):
        await named.turn(answers, NS)
    assert set(answers.urls) == {"http://h:1/metrics"}


async def test_another_engine_at_the_same_place_begins_anew() -> None:
    clock = ManualClock()
    target = Target(parse("h:1"), clock)
    answers = Answers(clock, counting(100), page("llamacpp"), page("llamacpp"))
    outcomes = [await target.turn(answers, NS) for _ in range(3)]
    assert [one.scrape.kind.name for one in outcomes if one.scrape] == ["vllm", "llamacpp", "llamacpp"]
    assert [one.scrape.dt_ns == 0 for one in outcomes if one.scrape] == [True, True, False]


# --- the collector


def collector(*urls: str, **options: object) -> EngineCollector:
    options.setdefault("discover", False)
    return EngineCollector(StringTable(), SystemClock(), NS // 4, urls=urls, **options)  # type: ignore[arg-type]


async def until(
    source: EngineCollector, enough: Callable[[list[Batch]], bool], limit_s: float = 8.0
) -> list[Batch]:
    """Batches until that is true of them."""
    seen: list[Batch] = []
    async with asyncio.timeout(limit_s), aclosing(source.batches()) as stream:
        async for batch in stream:
            seen.append(batch)
            if enough(seen):
                break
    return seen


def rows(seen: list[Batch], channel: str) -> list[np.void]:
    return [row for batch in seen if batch.channel.name == channel for row in batch.rows]


def statuses(source: EngineCollector, seen: list[Batch]) -> list[dict[str, str]]:
    words = ("collector", "channel", "field", "scope", "state", "reason", "remedy")
    return [{word: source.strings.text(row[word]) for word in words} for row in rows(seen, "status")]


def every_text(source: EngineCollector) -> str:
    return "\n".join(text for _, text in source.strings.since(0))


def test_it_is_a_collector() -> None:
    one: Collector = collector()
    assert (one.name, EngineCollector.probe()) == ("engine", None)
    assert {ENGINE, ENGINE_BUCKET} < set(one.channels)


async def test_rows_from_a_server_that_counts() -> None:
    """Each request of ours finds 30 more tokens, 3 more first tokens in (0.1, 0.25] and 3 fewer waiting."""
    script = Script()

    async def answer(request: web.Request) -> web.Response:
        n = len(script.asked)
        labels = 'engine="0",model_name="m"'
        ttft = "vllm:time_to_first_token_seconds"
        return web.Response(
            text=f"vllm:num_requests_waiting{{{labels}}} {90 - 3 * n}\n"
            f"vllm:generation_tokens_total{{{labels}}} {30 * n}\n"
            f'{ttft}_bucket{{{labels},le="0.1"}} 0\n{ttft}_bucket{{{labels},le="0.25"}} {3 * n}\n'
            f'{ttft}_bucket{{{labels},le="+Inf"}} {3 * n}\n{ttft}_count{{{labels}}} {3 * n}\n'
            f"{ttft}_sum{{{labels}}} {0.5 * n}\n"
        )

    script.answers["/metrics"] = answer
    async with serving(script) as port:
        source = collector(f"127.0.0.1:{port}")
        seen = await until(source, lambda seen: len(rows(seen, "engine")) == 4)
    found = rows(seen, "engine")
    assert [row["waiting"] for row in found] == [87, 84, 81, 78]
    assert [row["dt_ns"] > 0 for row in found] == [False, True, True, True]
    for row in found[1:]:
        assert row["output_tps"] * row["dt_ns"] / NS == pytest.approx(30, rel=1e-5)
        assert (row["ttft_n"], row["ttft_sum_s"]) == (3, pytest.approx(0.5))
    # The last row's buckets were still to come.
    assert [(row["lo_s"], row["hi_s"], row["count"]) for row in rows(seen, "engine_bucket")] == [
        (0.1, 0.25, 3)
    ] * 2
    gaps = np.diff([at for _, at in script.asked])
    assert gaps.min() > 0.15  # an interval of 250 ms


async def test_a_slow_and_a_dead_engine_delay_no_other() -> None:
    slow, good = Script(), Script()

    async def never(request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    slow.answers["/metrics"], good.answers["/metrics"] = never, page("llamacpp")
    async with serving(slow) as slow_port, serving(good) as good_port:
        source = collector(f"127.0.0.1:{slow_port}", f"127.0.0.1:{free_port()}", f"127.0.0.1:{good_port}")
        began = time.monotonic()
        seen = await until(source, lambda seen: len(rows(seen, "engine")) == 4)
        assert time.monotonic() - began < 2.0
    assert {source.strings.text(row["engine"]) for row in rows(seen, "engine")} == {
        f"127.0.0.1:{good_port}/metrics"
    }
    assert any(one["reason"] == "nothing listens there" for one in statuses(source, seen))


async def test_a_restart_is_told_and_the_reasons_stay() -> None:
    """The counters go back while the server is up: one row without counts, then on as before."""
    script = Script()

    async def answer(request: web.Request) -> web.Response:
        n = len(script.asked)
        return web.Response(text=counting(1000 + 10 * n if n <= 2 else 10 * n))

    script.answers["/metrics"] = answer
    async with serving(script) as port:
        source = collector(f"127.0.0.1:{port}")
        seen = await until(source, lambda seen: len(rows(seen, "engine")) == 4)
    found = rows(seen, "engine")
    assert [row["restarts"] for row in found[1:]] == [0, 1, 0]
    assert np.isnan(found[2]["output_tps"])
    assert found[3]["output_tps"] * found[3]["dt_ns"] / NS == pytest.approx(10, rel=1e-5)
    told = [one for one in statuses(source, seen) if one["field"] == "kv_used_pct"]
    assert [one["state"] for one in told] == ["not_supported"]


async def test_a_planted_secret_is_nowhere() -> None:
    """In the URLs, the headers and status texts of the server, label values and the bodies of errors."""
    script = Script()
    script.answers["/metrics"] = (
        counting(1) + f'vllm:cache_config_info{{api_key="{SECRET}"}} 1\n{SECRET} {{\n'
    )
    async with serving(script) as port:
        source = collector(
            f"http://127.0.0.1:{port}/metrics?key={SECRET}",
            f"http://127.0.0.1:{port}/gone?key={SECRET}",
            f"http://user:{SECRET}@127.0.0.1:{port}/metrics",
            f"http://127.0.0.1:{port}/metrics?other={SECRET}",
        )
        seen = await until(
            source,
            lambda seen: (
                len(rows(seen, "engine")) == 3 and any("404" in s["reason"] for s in statuses(source, seen))
            ),
        )
    assert f"/metrics?key={SECRET}" in {
        path for path, _ in script.asked
    }  # the caller's query is sent to its server
    assert SECRET not in every_text(source)
    reasons = " ".join(one["reason"] for one in statuses(source, seen))
    assert "holds a user name or password" in reasons
    assert "differs from another one" in reasons
    assert "lines of its page cannot be read" in reasons
    assert SECRET not in repr(source) + repr(vars(source))


async def test_two_pages_at_one_port_keep_their_own_reasons() -> None:
    """One is well and one is not: the good one must not call the bad one mended."""
    script = Script()
    script.answers["/a"] = counting(1)
    async with serving(script) as port:
        source = collector(f"127.0.0.1:{port}/a", f"127.0.0.1:{port}/b")
        seen = await until(source, lambda seen: len(rows(seen, "engine")) == 4)
    told = [(one["scope"][-2:], one["state"]) for one in statuses(source, seen) if not one["field"]]
    assert told == [("/b", "unavailable")]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (None, "it answers HTTP 404"),
        ("<html>\n", "the answer is HTML or JSON, not metrics"),
        ("x 1\n", "it has metrics, but is not an inference engine that opusmon knows"),
        ("vllm:num_requests_running 1\nvllm:num_requ", "the page is cut short: its last line has no end"),
        ("", "the answer is empty"),
    ],
)
async def test_what_is_no_engine_has_a_status_row(body: str | None, reason: str) -> None:
    script = Script()
    if body is not None:
        script.answers["/metrics"] = body
    async with serving(script) as port:
        source = collector(f"127.0.0.1:{port}/metrics")
        seen = await until(source, lambda seen: any(s["reason"] for s in statuses(source, seen)))
    [status] = [one for one in statuses(source, seen) if one["reason"]]
    assert (status["scope"], status["state"], status["reason"]) == (
        f"127.0.0.1:{port}/metrics",
        "unavailable",
        reason,
    )
    assert status["remedy"]
    assert not rows(seen, "engine")


async def test_a_mended_engine_is_told_to_be_well() -> None:
    script = Script()
    async with serving(script) as port:
        source = collector(f"127.0.0.1:{port}/metrics")

        def enough(seen: list[Batch]) -> bool:
            if statuses(source, seen):
                script.answers["/metrics"] = counting(1)
            return any(one["state"] == "ok" and not one["field"] for one in statuses(source, seen))

        seen = await until(source, enough)
    mended = statuses(source, seen)[-1]
    assert (mended["scope"], mended["state"], mended["reason"]) == (f"127.0.0.1:{port}/metrics", "ok", "")


async def test_closing_it_leaves_nothing_behind() -> None:
    async def never(request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    script = Script()
    script.answers["/metrics"] = never
    async with serving(script) as port:
        stream = collector(f"127.0.0.1:{port}", discover=True).batches()
        first = asyncio.ensure_future(anext(stream))
        await script.called.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await stream.aclose()
        left = [task for task in asyncio.all_tasks() if "engine" in repr(task.get_coro())]
        assert [task for task in left if "test_engine" not in repr(task.get_coro())] == []


async def test_a_fault_of_ours_is_raised_and_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr("opusmon.collectors.engine.collector.batches", broken)
    script = Script()
    script.answers["/metrics"] = counting(1)
    async with serving(script) as port:
        with pytest.raises(RuntimeError, match="a fault"):
            await until(collector(f"127.0.0.1:{port}"), lambda seen: False)


async def test_costs_are_told_without_those_of_the_process_it_runs_in() -> None:
    script = Script()
    script.answers["/metrics"] = counting(1)
    async with serving(script) as port:
        source = collector(f"127.0.0.1:{port}")
        seen = await until(source, lambda seen: any(batch.channel.name == "cost" for batch in seen))
    row = next(batch.rows[0] for batch in seen if batch.channel.name == "cost")
    assert source.strings.text(row["collector"]) == "engine"
    assert source.strings.text(row["slowest"]) == f"127.0.0.1:{port}/metrics"
    assert row["calls"] >= 5
    assert 0 < row["slowest_ns"] <= row["call_ns"]
    assert np.isnan([row["cpu_ns"], row["rss_b"]]).all()


async def test_the_page_of_a_real_prometheus_is_refused_politely(tmp_path: Path) -> None:
    needs("prometheus")
    port = free_port()
    config = tmp_path / "prometheus.yml"
    config.write_text("global: {scrape_interval: 1m}\n")
    child = await asyncio.create_subprocess_exec(
        shutil.which("prometheus") or "",
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        source = collector(f"127.0.0.1:{port}")
        why = "it has metrics, but is not an inference engine that opusmon knows"
        seen = await until(source, lambda seen: any(s["reason"] == why for s in statuses(source, seen)), 20)
        assert not rows(seen, "engine")
    finally:
        child.terminate()
        await child.wait()
