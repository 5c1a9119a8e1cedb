"""One engine scraped again and again, and the collector over several, against a real HTTP server."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from needs import needs

from opusmon.channels import ENGINE, ENGINE_BUCKET
from opusmon.clock import NS, ManualClock, SystemClock
from opusmon.collectors.base import Collector
from opusmon.collectors.engine import EngineCollector
from opusmon.collectors.engine.address import parse
from opusmon.collectors.engine.target import Target
from opusmon.collectors.engine.trouble import FetchError
from opusmon.schema import Batch, StringTable

from .engine_pages import page
from .engine_server import SECRET, Script, free_port, serving

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
        (
            ("engine", "", "h:1/metrics"),
            "stale",
            "it answers HTTP 500",
            "Look at the engine's log: its page is there, and fails",
        )
    ]
    assert second.scrape is not None
    assert second.scrape.dt_ns == 3 * NS + 10_000_000
    assert second.entries[0].values["output_tps"] == pytest.approx(60 / 3.01)


async def test_a_path_that_is_only_tried_is_never_said_to_be_well() -> None:
    """Both are 404, in turn. With the path in the scope, each try would call the other one mended."""
    clock = ManualClock(NS)
    target = Target(parse("h:1"), clock)
    answers = Answers(clock, *[FetchError("it answers HTTP 404", status=404)] * 3)
    notes = [note for _ in range(3) for note in (await target.turn(answers, NS)).notes]
    assert [url.removeprefix("http://h:1") for url in answers.urls] == [
        "/metrics",
        "/prometheus/metrics",
        "/metrics",
    ]
    remedy = "Name the address of its metrics page: --engine http://HOST:PORT/PATH"
    assert notes == [(("engine", "", "h:1"), "unavailable", "it answers HTTP 404", remedy)] * 3


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
    source: EngineCollector, enough: Callable[[list[Batch]], bool], limit_s: float = 60.0
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
