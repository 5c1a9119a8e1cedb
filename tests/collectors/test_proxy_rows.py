"""Rows of `request` and `request_open`, which texts are kept, and the collector that gives them out."""

import asyncio
import contextlib
import dataclasses
import gc
import math

import fake_upstream as up
import numpy as np
import pytest
from fake_upstream import FakeUpstream, Script
from proxyrun import as_dicts, fetch

from opusmon.channels import REQUEST, REQUEST_OPEN
from opusmon.clock import NS, ManualClock, SystemClock
from opusmon.collectors.api.request import Keeper, OpenRequest, Request, open_batch, request_batch, word
from opusmon.collectors.api.timeline import Timeline
from opusmon.collectors.api.usage import Usage, number
from opusmon.collectors.proxy import ProxyCollector, serve_proxy
from opusmon.collectors.proxy.flight import MAX_OPEN, Flights
from opusmon.collectors.proxy.turns import Turns
from opusmon.schema import StringTable

MINUTE = 60 * NS


@pytest.fixture(autouse=True)
def gc_as_before():
    """The collector tunes the garbage collection of its process, which here is the tests'."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.parametrize(("kind", "channel"), [(Request, REQUEST), (OpenRequest, REQUEST_OPEN)])
def test_one_attribute_per_field(kind, channel):
    names = [field.name for field in dataclasses.fields(kind)]
    assert sorted(names) == sorted(["t", *(field.name for field in channel.fields)])


def test_rows_say_what_was_given_and_nan_for_the_rest():
    strings = StringTable()
    late = Request(5, "proxy", "sent upstream", 2, model="m", outcome="truncated", ttft_ns=3.5, id="req_2")
    batch = request_batch([late, Request(4, "canary", "intended send time", 1)], strings)
    first, second = as_dicts(batch, strings)
    assert (first["t"], first["source"], first["outcome"], first["id"]) == (4, "canary", "ok", "")
    assert (second["t"], second["model"], second["outcome"], second["ttft_ns"]) == (5, "m", "truncated", 3.5)
    missing = [f.name for f in REQUEST.fields if not f.text and f.name not in ("number", "ttft_ns")]
    assert all(math.isnan(second[name]) for name in missing)
    (row,) = as_dicts(open_batch([OpenRequest(1, "proxy", "s", 9, phase="thinking")], strings), strings)
    assert (row["number"], row["phase"], math.isnan(row["age_ns"])) == (9, "thinking", True)


def test_words_from_outside():
    assert word("a\x1b[31m\u202eb\n" + "c" * 300) == "a?[31m?b?" + "c" * 119
    assert [word(value) for value in (None, 3, {}, "  x ")] == ["", "", "", "x"]


def request(t, e2e=1.0, outcome="ok", ident="id", **more):
    return Request(t, "proxy", "s", 1, e2e_ns=e2e, outcome=outcome, id=ident, **more)


def test_ids_of_failed_and_of_the_slowest_are_kept():
    keeper = Keeper(slowest=2)
    times = [5.0, 9.0, 1.0, 2.0, 7.0, 6.0, 8.0]
    kept = [keeper.id(request(MINUTE + n, took, ident=f"r{n}")) for n, took in enumerate(times)]
    # Among the two slowest so far: 5, 9, then 7 over 5, then 8 over 7.
    assert kept == ["r0", "r1", "", "", "r4", "", "r6"]
    assert keeper.id(request(MINUTE + 9, 0.5, "truncated", "bad")) == "bad"
    assert keeper.id(request(2 * MINUTE, 0.5, ident="next minute")) == "next minute"


def test_a_burst_of_failures_does_not_fill_the_table():
    keeper = Keeper(burst=5, per_minute=2, limit=9)
    first = [keeper.id(request(n, outcome="truncated", ident=f"a{n}")) for n in range(100)]
    assert first == [f"a{n}" for n in range(5)] + [""] * 95
    later = [keeper.id(request(MINUTE + n, outcome="truncated", ident=f"b{n}")) for n in range(100)]
    assert later == ["b0", "b1"] + [""] * 98
    much_later = [
        keeper.id(request(100 * MINUTE + n, outcome="truncated", ident=f"c{n}")) for n in range(100)
    ]
    assert [ident for ident in much_later if ident] == ["c0", "c1"]  # 9 in all
    assert keeper.dropped == 95 + 98 + 98


def test_texts_of_a_day_under_attack_stay_bounded():
    """A client that sends a new model and label each time, a server with new errors: 24 h, one of each per 6 s."""
    strings, keeper = StringTable(), Keeper()
    for hour in range(24):
        rows = [
            request((hour * 3600 + s) * NS, s, "truncated", f"{hour}-{s}", model=f"m{hour}-{s}", label=f"l{s}", error=f"e{s}",
                stop=f"s{s}", usage_more=f"x={hour * 3600 + s}")
            for s in range(0, 3600, 6)
        ]  # fmt: skip
        request_batch(rows, strings, keeper)
    assert len(strings) < 18_000
    assert "(other)" in [text for _, text in strings.since(0)]


def test_usage_merges_by_the_last_value_that_is_not_null():
    usage = Usage()
    usage.merge({"a": 1, "b": 2, "c": {"d": 3, "e": {"f": 4, "g": {"h": 5}}}})
    usage.merge({"a": None, "b": 7, "c": {"d": True, "x": math.inf}, "s": "text", "bad name": 1, "": 1})
    assert usage.values == {"a": 1, "b": 7, "c.d": 3, "c.e.f": 4}
    assert usage.more(frozenset(["a"])) == "b=7, c.d=3, c.e.f=4"
    assert usage.get("none", "b") == 7


def test_usage_of_any_size_stays_small():
    usage = Usage()
    for start in range(0, 5000, 50):
        usage.merge({f"name_{n}": n + 0.25 for n in range(start, start + 50)})
    assert len(usage.values) == 64
    assert len(usage.more(frozenset())) <= 512
    assert [math.isnan(number(value)) for value in (10**400, -1e300, math.nan, "1", True, None)] == [True] * 6


def test_gaps_of_a_long_answer():
    timeline = Timeline()
    for n in range(101):
        timeline.token(n * 10 + (5 if n == 100 else 0), answer=n >= 50)
    row = Request(0, "proxy", "s", 1, output_tokens=201)
    timeline.fill(row, -7)
    assert (row.ttft_ns, row.first_answer_ns, row.last_token_ns) == (7, 507, 1012)
    assert (row.chunks, row.gap_max_ns, row.gap_mean_ns, row.tpot_ns) == (101, 15, 10.05, 1005 / 200)
    assert row.gap_p95_ns == 10


@pytest.mark.parametrize(("tokens", "outcome"), [(1, "ok"), (math.nan, "ok"), (9, "truncated")])
def test_no_tpot_of_one_token_or_of_half_an_answer(tokens, outcome):
    timeline = Timeline()
    timeline.token(1, answer=True)
    timeline.token(3, answer=True)
    row = Request(0, "proxy", "s", 1, output_tokens=tokens, outcome=outcome)
    timeline.fill(row, 0)
    assert math.isnan(row.tpot_ns)


# Turns


def flights_and_turns(clock):
    flights, strings = Flights(clock), StringTable()
    return flights, strings, Turns("proxy", strings, clock, NS, flights, sight="runs", tls=True)


def said(batches, strings, channel):
    return [row for batch in batches if batch.channel.name == channel for row in as_dicts(batch, strings)]


def test_rows_in_flight_come_once_a_second_and_notes_when_they_change():
    clock = ManualClock(MINUTE)
    flights, strings, turns = flights_and_turns(clock)
    flight = flights.begin("POST", "/v1/messages", "/v1/messages", {})
    first = list(turns.batches())
    assert {row["state"] for row in said(first, strings, "status")} == {"ok", "not_supported"}
    assert "connect_ns" in next(
        row["reason"] for row in said(first, strings, "status") if row["field"] == "tls_ns"
    )
    clock.advance(NS // 4)
    assert list(turns.batches()) == []
    clock.advance(NS)
    flight.sent = clock.now() - NS // 2
    (batch,) = turns.batches()
    (row,) = as_dicts(batch, strings)
    assert (row["age_ns"], row["silent_ns"], row["phase"]) == (NS // 2, NS // 2, "sending")
    clock.advance(NS)
    flights.refused["why"] += 2
    flights.end(flight, "client")
    batches = list(turns.batches())
    assert [row["outcome"] for row in said(batches, strings, "request")] == ["client_disconnect"]
    assert said(batches, strings, "request_open") == []
    assert [row["reason"] for row in said(batches, strings, "status")] == ["requests refused so far: 2; why"]


def test_what_it_costs():
    clock = ManualClock(MINUTE)
    flights, strings, turns = flights_and_turns(clock)
    list(turns.batches())
    for _ in range(3):
        flight = flights.begin("GET", "/v1/models", "/v1/models", {})
        flight.hold.add(40)
        flights.end(flight, "clean")
    clock.advance(5 * NS)
    (row,) = said(list(turns.batches()), strings, "cost")
    assert (row["collector"], row["dt_ns"], row["calls"], row["call_ns"], row["dropped"]) == (
        "proxy",
        5 * NS,
        3,
        120,
        0,
    )
    assert row["cpu_ns"] > 0
    assert row["rss_b"] > 1e6


async def test_the_collector_gives_rows_and_stops():
    strings = StringTable()
    async with FakeUpstream() as upstream:
        upstream.on("/v1/messages", Script(up.STREAM), Script(up.STREAM[:4], end="hang"))
        collector = ProxyCollector(
            strings, SystemClock(), NS // 4, upstream=upstream.url, listen="127.0.0.1:0"
        )
        rows = []
        async with asyncio.timeout(20), contextlib.aclosing(collector.batches()) as batches:
            hanging = None
            async for batch in batches:
                rows += [(batch.channel.name, row) for row in as_dicts(batch, strings)]
                names = [name for name, _ in rows]
                if hanging is None:
                    await fetch(f"http://{collector.address}")
                    hanging = asyncio.create_task(fetch(f"http://{collector.address}"))
                    await upstream.request(1)
                elif "request" in names and "request_open" in names:
                    collector.stop()
        assert (await hanging).broken
    assert collector.address == ""
    assert [row["outcome"] for name, row in rows if name == "request"] == ["ok", "monitor_stopped"]
    numbers = {row["number"] for name, row in rows if name == "request_open"}
    assert numbers <= {1, 2}
    assert any("forwards 127.0.0.1:" in row.get("reason", "") for _, row in rows)


async def test_stopping_does_not_wait_for_the_next_turn_and_leaves_no_row_behind():
    strings, clock, got = StringTable(), SystemClock(), []
    async with FakeUpstream() as upstream, asyncio.timeout(20):
        upstream.on("/v1/messages", Script(up.STREAM))
        collector = ProxyCollector(strings, clock, 3600 * NS, upstream=upstream.url, listen="127.0.0.1:0")

        async def pump():
            got.extend([batch async for batch in collector.batches()])

        task = asyncio.create_task(pump())
        while not collector.address:  # noqa: ASYNC110  (it is no event of ours)
            await asyncio.sleep(0.01)
        await asyncio.gather(*(fetch(f"http://{collector.address}") for _ in range(5)))
        collector.stop()
        await task
    assert [row["outcome"] for row in said(got, strings, "request")] == ["ok"] * 5


async def test_serve_proxy_pushes_until_it_is_told_to_stop():
    stop, pushed = asyncio.Event(), []
    ready = asyncio.get_running_loop().create_future()
    strings = StringTable()
    async with FakeUpstream() as upstream, asyncio.timeout(20):
        upstream.on("/v1/messages", Script(up.STREAM))
        task = asyncio.create_task(
            serve_proxy(pushed.append, strings, SystemClock(), upstream=upstream.url, listen="127.0.0.1:0", stop=stop,
                interval_ns=NS // 4, ready=ready.set_result)
        )  # fmt: skip
        await fetch(f"http://{await ready}")
        stop.set()
        await task
    requests = [batch for batch in pushed if batch.channel.name == "request"]
    assert np.concatenate([batch.rows for batch in requests])["chunks"].tolist() == [3]


def test_rows_in_flight_come_in_parts_without_those_that_ended_meanwhile():
    clock = ManualClock(MINUTE)
    flights = Flights(clock)
    begun = [flights.begin("POST", "/v1/messages", "/v1/messages", {}) for _ in range(MAX_OPEN + 5)]
    parts = flights.open_rows(clock.now(), 64)
    assert [row.number for row in next(parts)] == list(range(1, 65))
    for flight in begun[64:192]:
        flights.end(flight, "client")
    assert [row.number for row in next(parts)] == list(range(193, 257))
    assert sum(map(len, parts)) == MAX_OPEN - 256
    assert [len(flights.take(100)) for _ in range(3)] == [100, 28, 0]


def test_rows_nobody_takes_are_counted_and_said(monkeypatch):
    monkeypatch.setattr("opusmon.collectors.proxy.flight.MAX_DONE", 3)
    clock = ManualClock(MINUTE)
    flights, strings, turns = flights_and_turns(clock)
    for _ in range(5):
        flights.end(flights.begin("GET", "/health", "/health", {}), "clean")
    batches = list(turns.batches())
    assert len(said(batches, strings, "request")) == 3
    reasons = [row["reason"] for row in said(batches, strings, "status") if row["state"] == "error"]
    assert reasons == ["rows lost so far because nobody took them: 2"]
