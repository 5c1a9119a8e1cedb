"""Threads that do something at the same moment, and what came of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from opusmon.checks.init_driver import AbsentError, CudaError
from opusmon.checks.init_fork import Stages

WORKS = "works"
NOT_REACHED = "not reached"


def together(
    stages: Stages,
    threads: int,
    raced: Callable[[int, Any], Any],
    *,
    setup: Callable[[int], Any] = lambda _: None,
    after: Callable[[Any], str] = lambda _: WORKS,
) -> tuple[str, bool]:
    """Run `raced` in every thread at once.

    Args:
        stages: each thread gets a slot.
        threads: how many.
        raced: gets the thread's number and what `setup` returned.
        setup: runs in the thread before it waits for the others.
        after: gets what `raced` returned, once all threads are through with that; says how it went.

    Returns:
        The outcome of all threads as one (see `merged`), and whether there was a moment at which all of them
        were inside `raced`.

    Raises:
        AbsentError: a library lacks a function.
    """
    gate = threading.Barrier(threads)
    outcomes = [NOT_REACHED] * threads
    spans = [(0, 0)] * threads
    absent: list[AbsentError] = []

    def run(number: int) -> None:
        stages.thread(number + 1)
        made: Any = None
        try:
            state = setup(number)
            gate.wait()
            start = time.perf_counter_ns()
            try:
                made = raced(number, state)
                outcomes[number] = WORKS
            except CudaError as error:
                outcomes[number] = str(error)
            spans[number] = (start, time.perf_counter_ns())
            gate.wait()
            if outcomes[number] == WORKS:
                outcomes[number] = after(made)
        except CudaError as error:
            outcomes[number] = str(error)
            gate.abort()
        except AbsentError as error:
            absent.append(error)
            gate.abort()
        except threading.BrokenBarrierError:
            return

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if absent:
        raise absent[0]
    return merged(outcomes), max(start for start, _ in spans) < min(end for _, end in spans)


def merged(outcomes: Sequence[str]) -> str:
    """`works` when all threads say so, else what the others say, each once."""
    failed = set(outcomes) - {WORKS}
    if len(failed) > 1:
        failed -= {NOT_REACHED}
    return " + ".join(sorted(failed)) if failed else WORKS
