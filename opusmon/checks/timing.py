"""How long calls take. Imported in the child only."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

BUDGET_S = 0.5
"""How long one way to call is timed."""

MIN_CALLS = 5
MAX_CALLS = 200
WARM_CALLS = 3

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Times:
    """Of single calls, each begun when the device was idle.

    Attributes:
        median_ms: of the calls.
        low_ms, high_ms: quartiles.
        calls: how many.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    calls: int


def on_host(call: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> Times:
    """Time calls by the wall clock, after a warm-up.

    Args:
        call: what is timed; its work is done when it returns.
        before: done before each call, not timed.
    """
    return _times([wall_ms for (wall_ms,) in _taken(lambda: (_wall_ms(call),), before)])


def on_gpu(call: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> tuple[Times, Times]:
    """Time calls on torch's current GPU, after a warm-up.

    Args:
        call: what is timed; it may return before its work is done.
        before: done before each call, not timed.

    Returns:
        Until the GPU is done, as the host sees it; and between two CUDA events around the call.
    """

    def once() -> tuple[float, float]:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()

        def between() -> None:
            first.record()
            call()
            last.record()
            torch.cuda.synchronize()

        wall_ms = _wall_ms(between)
        return wall_ms, first.elapsed_time(last)

    walls, spans = zip(*_taken(once, before), strict=True)
    return _times(walls), _times(spans)


def _taken(once: Callable[[], T], before: Callable[[], Any]) -> list[T]:
    taken: list[T] = []
    until_s = time.perf_counter() + BUDGET_S
    for number in range(WARM_CALLS + MAX_CALLS):
        before()
        found = once()
        if number >= WARM_CALLS:
            taken.append(found)
        if len(taken) >= MIN_CALLS and time.perf_counter() > until_s:
            break
    return taken


def _wall_ms(call: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    call()
    return (time.perf_counter() - start_s) * 1e3


def _times(taken_ms: Sequence[float]) -> Times:
    low, median, high = statistics.quantiles(taken_ms, n=4, method="inclusive")
    return Times(median, low, high, len(taken_ms))
