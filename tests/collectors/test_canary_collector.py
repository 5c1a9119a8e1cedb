"""The canary as a collector: slots at fixed times, hard caps, nothing of keys and prompts in what it emits."""

import asyncio
import contextlib
import math
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opusmon.channels import BY_NAME, REQUEST, REQUEST_OPEN, STATUS
from opusmon.clock import NS, SystemClock
from opusmon.collectors.api.request import Request
from opusmon.collectors.canary import CanaryCollector, CanaryRefused
from opusmon.collectors.canary.budget import HOUR_NS, Budget
from opusmon.collectors.canary.collector import cost
from opusmon.collectors.canary.prompt import bound, prompt
from opusmon.schema import StringTable

from .canary_server import end, good, serving, start

TICK_NS = 250_000_000


def collector(url, **words):
    words.setdefault("model", "m")
    return CanaryCollector(StringTable(), SystemClock(), TICK_NS, base_url=url, **words)


async def rows_of(source, count, channel=REQUEST):
    """The first rows of a channel, as dictionaries with their text."""
    found = []
    async with asyncio.timeout(20), contextlib.aclosing(source.batches()) as batches:
        async for batch in batches:
            if batch.channel is channel:
                found += [as_words(row, channel, source.strings) for row in batch.rows]
            if len(found) >= count:
                return found
    return found


def as_words(row, channel, strings):
    return {
        name: strings.text(row[name])
        if name != "t" and BY_NAME[channel.name].by_name[name].text
        else row[name]
        for name in row.dtype.names
    }


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch):
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_CUSTOM_HEADERS"):
        monkeypatch.delenv(name, raising=False)


async def test_rows_have_the_answer_in_them():
    async with serving() as server:
        (row,) = await rows_of(collector(server.url), 1)
    assert (row["source"], row["outcome"], row["model"]) == ("canary", "ok", "m")
    assert (row["endpoint"], row["start"]) == ("/v1/messages", "intended send time")
    assert (row["input_tokens"], row["output_tokens"]) == (10, 3)
    assert row["number"] == 1


async def test_a_request_that_overruns_its_slot_does_not_put_off_the_next():
    third = asyncio.Event()

    async def first_stalls(seen, out):
        if len(server.seen) == 1:
            await third.wait()
        await good(seen, out)

    async with serving(first_stalls) as server:
        source = collector(server.url, per_hour=3600, hourly_tokens=100_000)
        task = asyncio.create_task(rows_of(source, 3))
        async with asyncio.timeout(15):
            await server.wait_for(3)
        third.set()
        rows = {row["number"]: row for row in await task}
        arrived = [seen.t for seen in server.seen]
    due = {number: row["t"] - row["e2e_ns"] for number, row in rows.items()}
    assert due[2] - due[1] == pytest.approx(NS, abs=1)
    assert due[3] - due[1] == pytest.approx(2 * NS, abs=1)
    assert rows[1]["e2e_ns"] > 2e9 - 1
    assert rows[2]["t"] < rows[1]["t"]
    assert all(arrived[number - 1] >= due[number] for number in due)


async def test_a_request_in_flight_is_seen_while_it_waits():
    async def stalls(seen, out):
        await out.head()
        await out.event("start", start())
        await asyncio.sleep(60)

    async with serving(stalls) as server:
        rows = await rows_of(collector(server.url), 4, REQUEST_OPEN)
        wrote = server.seen[0].wrote
    last = rows[-1]
    assert (last["source"], last["number"], last["phase"], last["chunks"]) == ("canary", 1, "waiting", 0)
    assert last["age_ns"] == last["no_token_ns"]
    assert 0 < last["silent_ns"] <= last["t"] - wrote["head"]
    assert last["age_ns"] >= last["t"] - server.seen[0].t
    assert math.isnan(last["ttft_ns"])


async def test_when_the_tokens_are_spent_slots_stay_empty_and_it_says_so():
    async with serving(lambda seen, out: costly(seen, out)) as server:
        source = collector(server.url, per_hour=3600, hourly_tokens=bound(64) + 16)
        status = await rows_of(source, 2, STATUS)
        assert len(server.seen) == 1
    said = [row for row in status if row["field"] == "" and row["scope"] == "budget"]
    assert said[0]["channel"] == "request"
    assert "tokens an hour is reached" in said[0]["reason"]
    assert "12" not in said[0]["remedy"]


async def costly(seen, out):
    await out.head()
    await out.event("start", start(tokens=100))
    await out.event("usage", end(40))
    await out.event("stop", {"type": "message_stop"})
    await out.end()


async def test_it_says_what_it_does_while_it_runs():
    async with serving() as server:
        status = await rows_of(collector(server.url), 1, STATUS)
    assert status[0]["state"] == "ok"
    assert "at most 12 requests and 6,000 tokens an hour" in status[0]["reason"]


async def test_a_configuration_that_could_leak_ends_it_with_a_remedy(monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-planted")
    with pytest.raises(CanaryRefused) as refused:
        await rows_of(collector("http://10.0.0.7:8000"), 1)
    assert "https" in refused.value.why.remedy
    assert "sk-planted" not in str(refused.value.why)


async def test_planted_secrets_are_in_nothing_it_emits(monkeypatch, caplog, capfd):
    """The key, and a server that repeats headers and prompt in its error, its model and its id."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-planted-1")
    monkeypatch.setenv("ANTHROPIC_CUSTOM_HEADERS", "x-team: sk-planted-2")

    async def echoes(seen, out):
        text = f"{seen.headers['authorization']} {seen.headers['x-team']} {seen.prompt}"
        body = {"type": "error", "error": {"type": "invalid_request_error", "message": text}}
        await out.plain(400, body, set_cookie="session=sk-planted-3", x_echo="sk-planted-1")

    async with serving(echoes) as server:
        source = collector(server.url)
        (row,) = await rows_of(source, 1)
        prompt_words = server.seen[0].prompt
    assert row["error"] == "invalid_request_error"
    out, err = capfd.readouterr()
    texts = [text for _, text in source.strings.since(0)]
    everything = "\n".join([*texts, caplog.text, out, err, repr(source), repr(vars(source))])
    assert "planted" not in everything
    assert prompt_words.split()[0] not in everything


# Budget


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 500), st.integers(0, 500)), max_size=60))
def test_no_hour_ever_holds_more_than_the_caps(steps):
    """Whatever is asked when: requests and tokens of any hour stay within the caps, while answers cost no more."""
    budget, t, sent = Budget(5, 1000), 0, []
    for wait_s, most, used in steps:
        t += wait_s * NS
        ticket = budget.reserve(t, most)
        if ticket is not None:
            sent.append((t, min(used, most)))
            budget.settle(ticket, min(used, most))
        hour = [tokens for when, tokens in sent if t - when < HOUR_NS - NS]
        assert len(hour) <= 5
        assert sum(hour) <= 1000


def test_reservations_count_until_they_are_settled():
    budget = Budget(10, 100)
    first = budget.reserve(0, 60)
    assert budget.reserve(1, 60) is None
    assert budget.short_of(1, 60) == "tokens"
    budget.settle(first, 20)
    assert budget.reserve(2, 60) is not None
    assert budget.tokens(3) == 80
    assert budget.tokens(2 * HOUR_NS) == 0


def test_what_a_request_is_charged():
    def row(**words):
        return Request(0, "canary", "", 1, reused=0.0, **words)

    assert cost(row(input_tokens=70, output_tokens=16), 144) == 86
    assert cost(row(outcome="truncated", input_tokens=70, output_tokens=1), 144) == 144
    assert cost(row(outcome="timeout"), 144) == 144
    assert cost(row(outcome="upstream_http_error"), 144) == 0
    assert cost(Request(0, "canary", "", 1, outcome="transport_error"), 144) == 0
    assert cost(row(), 144) == 144


@settings(deadline=None)
@given(st.integers(1, 100_000), st.floats(0.2, 8))
def test_prompts_have_the_wanted_length_and_a_head_of_their_own(tokens, per_word):
    one, other = prompt(tokens, per_word), prompt(tokens, per_word)
    assert one[:16] != other[:16]
    filler = one.split("\n")[1].split()
    assert len(filler) == pytest.approx(max(0, (tokens - 48) / per_word), abs=0.51)
    assert not math.isnan(bound(tokens))
    assert bound(tokens) >= min(tokens, 96)


async def test_what_ended_since_the_last_turn_is_given_out_when_it_is_stopped():
    """Turns are 20 s apart here: without the orderly end the row would be lost."""
    ended = asyncio.Event()

    class Ended(deque):
        def append(self, request):
            super().append(request)
            ended.set()

    async with serving() as server:
        source = CanaryCollector(StringTable(), SystemClock(), 20 * NS, base_url=server.url, model="m")
        source._ended = Ended()
        task = asyncio.create_task(rows_of(source, 99))
        async with asyncio.timeout(15):
            await ended.wait()
        source.stop()
        (row,) = await task
    assert (row["source"], row["outcome"]) == ("canary", "ok")
