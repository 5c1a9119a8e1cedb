"""The sweep: TTFT against prompt length, its knee, its spend, its end."""

import asyncio
import json
import math

import numpy as np
import pytest

from opusmon.collectors.canary.endpoint import CanaryConfig, CanaryRefused
from opusmon.collectors.canary.knee import find_knee
from opusmon.collectors.canary.report import render, request_json, request_line, summary
from opusmon.collectors.canary.sweep import Sweep, announce_sweep, as_json, check_sizes, planned_tokens
from opusmon.collectors.canary.turns import announce_count, ask_in_turn

from .canary_server import STOP, delta, end, serving, start

KNEE = 3000


def tokens_of(seen, per_word=1.0):
    """As this server's vocabulary counts them: 40 for the template, some per word."""
    return round(40 + per_word * len(seen.prompt.split()))


def prefill_s(tokens):
    return 0.01 + 2e-6 * tokens + 12e-6 * max(0, tokens - KNEE)


def engine(per_word=1.0, ttft_s=prefill_s, cached=0):
    async def answer(seen, out):
        tokens = tokens_of(seen, per_word)
        await out.head()
        await asyncio.sleep(ttft_s(tokens))
        await out.event(
            "start",
            start(tokens=tokens - cached * tokens // 100, cache_read_input_tokens=cached * tokens // 100),
        )
        await out.event("token0", delta())
        await asyncio.sleep(0.004)
        await out.event("token1", delta())
        await out.event("usage", end(2))
        await out.event("stop", STOP)
        await out.end()
        seen.tokens = tokens

    return answer


def config(url):
    return CanaryConfig(url, "m", env={})


async def sweep(*what, **options):
    """The result of one that is left to its end."""
    work = Sweep(*what, **options)
    await work.run()
    return work.result()


async def test_the_knee_is_where_the_server_put_it():
    async with serving(engine()) as server:
        result = await sweep(config(server.url), (500, 1500, 6000, 12_000), 3)
    assert result.aborted == ""
    assert [point.n for point in result.points] == [3, 3, 3, 3]
    for point in result.points:
        assert prefill_s(point.tokens) * 1e9 <= point.ttft_ns <= 1.5 * prefill_s(point.tokens) * 1e9 + 50e6
        assert point.tpot_ns >= 3.9e6
    assert result.knee is not None, result.no_knee
    assert KNEE * 0.7 < result.knee.tokens < KNEE * 1.4
    assert result.knee.low_tokens <= result.knee.tokens <= result.knee.high_tokens
    assert result.knee.after_ns == pytest.approx(14_000, rel=0.3)
    assert len(result.requests) == 12
    assert {row.start for row in result.requests} == {"sent upstream"}
    assert result.requests[-1].reused == 1
    text = render(result)
    assert "knee: TTFT bends at" in text
    assert "none could be served from it" in text
    assert "spent " in text


async def test_lengths_come_right_once_the_server_has_counted():
    async with serving(engine(per_word=1.4, ttft_s=lambda tokens: 0)) as server:
        result = await sweep(config(server.url), (500, 2000), 2, most_tokens=10**6)
        tokens = [seen.tokens for seen in server.seen]
        heads = {seen.prompt[:16] for seen in server.seen}
    assert tokens[1] == pytest.approx(2000, rel=0.03)
    assert tokens[2] == pytest.approx(500, rel=0.06)
    assert result.spent_tokens == sum(tokens) + 4 * 2
    assert len(heads) == 4


async def test_it_ends_before_it_spends_more_than_it_said():
    """A vocabulary that makes three tokens of a word: the plan is broken by the first answer, and kept all the same."""
    async with serving(engine(per_word=3.0, ttft_s=lambda tokens: 0)) as server:
        result = await sweep(config(server.url), (1000,), 3)
    assert 1 <= len(result.requests) < 3
    assert "tokens are spent" in result.aborted
    assert "ended early" in render(result)


async def test_it_gives_up_when_nothing_works():
    async def refuses(seen, out):
        await out.plain(529, {"type": "error", "error": {"type": "overloaded_error", "message": "x"}})

    async with serving(refuses) as server:
        result = await sweep(config(server.url), (500, 1000), 5)
        assert len(server.seen) == 3
    assert "overloaded_error" in result.aborted
    assert result.spent_tokens == 0
    assert result.knee is None
    body = json.loads(json.dumps(as_json(result), allow_nan=False))
    assert body["points"][0]["ttft_ns"] is None
    assert body["points"][0]["failed"] == 2
    assert "requests" not in body


async def test_a_cache_that_serves_prompts_all_the_same_is_named():
    async with serving(engine(ttft_s=lambda tokens: 0, cached=50)) as server:
        result = await sweep(config(server.url), (500, 1000), 1)
    assert result.points[0].tokens == server.seen[0].tokens
    assert "took prompt tokens from its cache at 500, 1,000" in render(result)


def test_the_spend_is_said_before():
    one = config("http://127.0.0.1:8000")
    # 3 x (1.15 x (1000 + 4000) + 2 x 48 + 2 x 16)
    assert planned_tokens(one, (1000, 4000), 3) == 3 * (5750 + 96 + 32)
    text = announce_sweep(one, (1000, 4000), 3)
    assert "6 requests" in text
    assert "17,634 tokens in all" in text
    assert "127.0.0.1:8000" in text


async def test_one_that_is_cancelled_has_the_result_of_what_was_asked():
    async with serving(engine()) as server:
        work = Sweep(config(server.url), (500, 1000), 3)
        task = asyncio.create_task(work.run(on_request=lambda one: len(work.requests) < 3 or task.cancel()))
        with pytest.raises(asyncio.CancelledError):
            await task
    result = work.result()
    assert ([(point.size, point.n) for point in result.points], result.aborted) == (
        [(500, 2), (1000, 1)],
        "it was interrupted",
    )
    assert "ended early: it was interrupted" in render(result)


@pytest.mark.parametrize(("sizes", "repeats"), [((), 1), ((10,), 1), ((3_000_000,), 1), ((1000,), 0)])
def test_sizes_out_of_range_are_refused(sizes, repeats):
    with pytest.raises(CanaryRefused):
        check_sizes(sizes, repeats)


# The fit, on numbers


def samples(sizes, ttft, noise, repeats=5, seed=3):
    rng = np.random.default_rng(seed)
    x = np.repeat(np.array(sizes, float), repeats)
    y = np.array([ttft(one) for one in x])
    return x, y * (1 + noise * rng.standard_normal(len(x)))


@pytest.mark.parametrize("knee", [6000, 9000, 14_000])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_two_lines_are_found(knee, noise):
    x, y = samples((1e3, 4e3, 16e3, 64e3), lambda n: 2e7 + 1e4 * n + 4e4 * max(0, n - knee), noise)
    found, why = find_knee(x, y)
    assert found is not None, why
    assert found.tokens == pytest.approx(knee, rel=0.15)
    assert found.before_ns == pytest.approx(1e4, rel=0.2)
    assert found.after_ns == pytest.approx(5e4, rel=0.05)


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.2])
def test_one_line_has_no_knee(noise):
    for seed in range(5):
        x, y = samples((1e3, 4e3, 16e3, 64e3), lambda n: 2e7 + 1e4 * n, noise, seed=seed)
        found, why = find_knee(x, y)
        assert found is None
        assert why


def test_noise_alone_has_no_knee():
    for seed in range(5):
        x, y = samples((1e3, 4e3, 16e3, 64e3), lambda n: 1e9, 0.5, seed=seed)
        assert find_knee(x, np.maximum(y, 1e6))[0] is None


def test_too_few_lengths_say_so():
    x, y = samples((1e3, 4e3, 16e3), lambda n: n, 0)
    assert find_knee(x, y) == (None, "a knee needs 4 lengths with answers, there are 3")
    assert find_knee(np.array([]), np.array([]))[0] is None


def test_one_sample_of_each_length_is_not_enough():
    x, y = samples((1e3, 4e3, 16e3, 64e3), lambda n: 2e7 + 4e4 * max(0, n - 9000), 0, repeats=1)
    assert find_knee(x, y) == (None, "a knee needs 8 answers, there are 4")


async def test_lines_of_single_requests():
    async with serving(engine(ttft_s=lambda tokens: 0)) as server:
        result = await sweep(config(server.url), (500,), 2)
    first, second = map(request_line, result.requests)
    assert "connect " in first
    assert "reused connection" in second
    assert "TTFT" in first
    assert "nan" not in first + second + summary(result.requests)
    assert summary(result.requests).startswith("2 of 2 ok")
    assert not math.isnan(result.requests[0].ttft_ns)


async def test_a_few_requests_by_hand():
    told = []
    async with serving(engine(ttft_s=lambda tokens: 0)) as server:
        one = config(server.url)
        requests, why = await ask_in_turn(one, 3, on_request=told.append)
    assert (len(requests), why, told) == (3, "", requests)
    assert [row.number for row in requests] == [1, 2, 3]
    body = json.loads(json.dumps(request_json(requests[0]), allow_nan=False))
    assert (body["outcome"], body["late_ns"], body["output_tokens"]) == ("ok", None, 2)
    # 2 x (16 words + 48) in, 16 out
    assert "at most 432 tokens" in announce_count(one, 3)


async def test_requests_by_hand_end_at_the_cap():
    async with serving(engine(ttft_s=lambda tokens: 0)) as server:
        requests, why = await ask_in_turn(CanaryConfig(server.url, "m", env={}, hourly_tokens=200), 5)
        spent = [seen.tokens + 2 for seen in server.seen]
    assert len(requests) == 1
    assert why == f"{spent[0]} of 200 tokens are spent"
    with pytest.raises(CanaryRefused):
        await ask_in_turn(config("http://127.0.0.1:1"), 0)
