"""TTFT and TPOT against the length of the prompt: one request at a time, lengths in turn, a stated spend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from opusmon.clock import Clock, SystemClock
from opusmon.collectors.api.request import Request
from opusmon.collectors.canary.collector import cost
from opusmon.collectors.canary.endpoint import CanaryConfig, CanaryRefused, check, who_pays
from opusmon.collectors.canary.knee import Knee, find_knee
from opusmon.collectors.canary.prompt import FIXED_TOKENS, prompt, words
from opusmon.text import counted

SIZES = (1_000, 4_000, 16_000, 64_000)
REPEATS = 3
MOST_SIZE = 2_000_000
MARGIN = 1.15
"""A prompt may turn out so much longer than wanted, once the server has counted one."""
GIVE_UP = 3
"""Failures in a row after which a sweep ends."""


@dataclass(frozen=True)
class Point:
    """What one length of prompt took.

    Attributes:
        size: tokens asked for.
        tokens: median of what the server counted.
        n: requests that ended well.
        failed: requests that did not.
        ttft_ns: median; NaN without answers.
        ttft_low_ns: 25th percentile.
        ttft_high_ns: 75th percentile.
        ttft_max_ns: slowest.
        tpot_ns: median; NaN where answers had fewer than two tokens.
        tpot_low_ns: 25th percentile.
        tpot_high_ns: 75th percentile.
        cached_tokens: prompt tokens that came from a prefix cache all the same, median.
    """

    size: int
    tokens: float
    n: int
    failed: int
    ttft_ns: float
    ttft_low_ns: float
    ttft_high_ns: float
    ttft_max_ns: float
    tpot_ns: float
    tpot_low_ns: float
    tpot_high_ns: float
    cached_tokens: float


@dataclass(frozen=True)
class SweepResult:
    """A sweep, as far as it came.

    Attributes:
        host: of the endpoint.
        model: as asked for.
        points: one per length, shortest first.
        knee: where TTFT bends; None when it does not, or that cannot be told.
        no_knee: why there is none.
        spent_tokens: what the requests were charged.
        planned_tokens: what it was to spend at most.
        aborted: why it ended early, "" when it did not.
        requests: rows, in the order sent.
    """

    host: str
    model: str
    points: tuple[Point, ...]
    knee: Knee | None
    no_knee: str
    spent_tokens: int
    planned_tokens: int
    aborted: str
    requests: tuple[Request, ...]


def planned_tokens(config: CanaryConfig, sizes: Sequence[int], repeats: int) -> int:
    """The most tokens that a sweep may spend, prompt and answer together."""
    prompts = sum(round(size * MARGIN) + FIXED_TOKENS for size in sizes)
    return repeats * (prompts + config.max_tokens * len(sizes))


def announce_sweep(config: CanaryConfig, sizes: Sequence[int] = SIZES, repeats: int = REPEATS) -> str:
    """One line that says what a sweep will spend, before it starts."""
    lengths = ", ".join(f"{size:,}" for size in sizes)
    return (
        f"sweep: {config.model} at {config.host}, {counted(repeats * len(sizes), 'request')} one after another"
        f" ({repeats} each of {lengths} tokens), at most {planned_tokens(config, sizes, repeats):,} tokens in all,"
        f" {who_pays(config)}"
    )


def check_sizes(sizes: Sequence[int], repeats: int) -> tuple[int, ...]:
    """The lengths in order, each once.

    Raises:
        CanaryRefused: there are none, or they are out of range.
    """
    ordered = tuple(sorted(set(sizes)))
    if not ordered or ordered[0] < 2 * FIXED_TOKENS or ordered[-1] > MOST_SIZE:
        raise CanaryRefused(
            "prompt lengths out of range", f"give some from {2 * FIXED_TOKENS} to {MOST_SIZE:,} tokens"
        )
    if not 1 <= repeats <= 1000:
        raise CanaryRefused(f"{repeats} requests per length", "give 1 to 1000")
    return ordered


class Sweep:
    """Measures each length `repeats` times, in rounds, so that a slow minute does not fall on one length.

    Every prompt begins with random text of its own, so that no prefix cache can serve it.

    Args:
        config: what to ask; its hourly caps do not count here, `most_tokens` does.
        sizes: prompt lengths in tokens.
        repeats: requests per length.
        most_tokens: hard cap; `planned_tokens` when None.

    Attributes:
        aborted: why it ended early, "" when it did not.
        requests: what was asked so far.

    Raises:
        CanaryRefused: the configuration is not one to run with.
    """

    def __init__(
        self,
        config: CanaryConfig,
        sizes: Sequence[int] = SIZES,
        repeats: int = REPEATS,
        *,
        most_tokens: int | None = None,
    ) -> None:
        self.config, self.sizes = check(config), check_sizes(sizes, repeats)
        self.aborted = ""
        self.requests: list[Request] = []
        self._repeats = repeats
        self._planned = planned_tokens(self.config, self.sizes, repeats)
        self._most_tokens = self._planned if most_tokens is None else min(self._planned, most_tokens)
        self._per_word = 1.0
        self._spent = self._failures = 0
        self._by_size: dict[int, list[Request]] = {size: [] for size in self.sizes}

    async def run(
        self, *, clock: Clock | None = None, on_request: Callable[[Request], None] | None = None
    ) -> None:
        """Ask until all is measured, too much has failed or been spent, or it is cancelled.

        Args:
            clock: times of the rows.
            on_request: is told each request as it ends.
        """
        from opusmon.collectors.canary.exchange import Client  # 40 MB; not before it is needed
        from opusmon.collectors.canary.warmup import warm_up

        clock = clock or SystemClock()
        self.aborted = "it was interrupted"  # until it is known how it ends
        await warm_up(self.config, clock)
        client = Client(self.config, clock)
        try:
            self.aborted = await self._rounds(client, on_request)
        finally:
            await client.close()

    def result(self) -> SweepResult:
        """What was measured so far."""
        good = [
            one
            for one in self.requests
            if one.outcome == "ok" and one.ttft_ns > 0 and not math.isnan(one.input_tokens)
        ]
        x = np.array([one.input_tokens for one in good], np.float64)
        y = np.array([one.ttft_ns for one in good], np.float64)
        knee, no_knee = find_knee(x, y)
        return SweepResult(
            self.config.host,
            self.config.model,
            tuple(_point(size, requests) for size, requests in self._by_size.items()),
            knee,
            no_knee,
            self._spent,
            self._planned,
            self.aborted,
            tuple(self.requests),
        )

    async def _rounds(self, client: Any, on_request: Callable[[Request], None] | None) -> str:
        for _ in range(self._repeats):
            for size in self.sizes:
                if why := self._stop(size):
                    return why
                text = prompt(size, self._per_word)
                request = await client.ask(text, len(self.requests) + 1, label=f"sweep {size}")
                self._took(size, request)
                if on_request is not None:
                    on_request(request)
        return ""

    def _bound(self, size: int) -> int:
        return round(size * MARGIN) + FIXED_TOKENS + self.config.max_tokens

    def _stop(self, size: int) -> str:
        """Why the next request, of that length, is not sent; "" when it is."""
        if self._spent + self._bound(size) > self._most_tokens:
            return f"{self._spent:,} of {self._most_tokens:,} tokens are spent: the next request could cost more than the rest"
        if self._failures >= GIVE_UP:
            last = self.requests[-1]
            return f"{GIVE_UP} requests in a row failed, the last with {last.outcome} ({last.error or 'no type'})"
        return ""

    def _took(self, size: int, request: Request) -> None:
        self.requests.append(request)
        self._by_size[size].append(request)
        self._spent += cost(request, self._bound(size))
        self._failures = 0 if request.outcome == "ok" else self._failures + 1
        filler = words_counted(size, self._per_word)
        if request.outcome == "ok" and request.input_tokens > FIXED_TOKENS and filler:
            self._per_word = min(8.0, max(0.125, (request.input_tokens - FIXED_TOKENS) / filler))


def words_counted(size: int, per_word: float) -> int:
    """Filler words that a prompt of so many tokens got."""
    return round(words(size) / per_word)


def _point(size: int, requests: Sequence[Request]) -> Point:
    good = [one for one in requests if one.outcome == "ok"]
    ttft = _quartiles([one.ttft_ns for one in good])
    tpot = _quartiles([one.tpot_ns for one in good])
    return Point(
        size,
        _quartiles([one.input_tokens for one in good])[1],
        len(good),
        len(requests) - len(good),
        ttft[1],
        ttft[0],
        ttft[2],
        ttft[3],
        tpot[1],
        tpot[0],
        tpot[2],
        _quartiles([one.cache_read_tokens for one in good])[1],
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float, float, float]:
    """25th percentile, median, 75th percentile and maximum of what is not NaN; NaN without any."""
    numbers = np.array([value for value in values if not math.isnan(value)], np.float64)
    if not len(numbers):
        return (math.nan,) * 4
    low, middle, high, most = np.percentile(numbers, (25, 50, 75, 100))
    return float(low), float(middle), float(high), float(most)


def as_json(result: SweepResult) -> dict[str, Any]:
    """The result in plain values, without the rows; missing numbers are None."""
    body = asdict(replace(result, requests=()))
    del body["requests"]
    return {name: plain(value) for name, value in body.items()}


def plain(value: Any) -> Any:
    """A value as JSON has it: missing numbers are None, tuples lists."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
