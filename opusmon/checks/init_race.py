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
    race = _Race(stages, threads, raced, setup, after)
    workers = [threading.Thread(target=race.run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if race.absent:
        raise race.absent[0]
    overlapped = max(start for start, _ in race.spans) < min(end for _, end in race.spans)
    return merged(race.outcomes), overlapped


class _Race:
    def __init__(
        self,
        stages: Stages,
        threads: int,
        raced: Callable[[int, Any], Any],
        setup: Callable[[int], Any],
        after: Callable[[Any], str],
    ) -> None:
        self._stages = stages
        self._raced = raced
        self._setup = setup
        self._after = after
        self._gate = threading.Barrier(threads)
        self.outcomes = [NOT_REACHED] * threads
        self.spans = [(0, 0)] * threads
        self.absent: list[AbsentError] = []

    def run(self, number: int) -> None:
        self._stages.thread(number + 1)
        try:
            self._steps(number)
        except threading.BrokenBarrierError:
            return
        except AbsentError as error:
            self.absent.append(error)
            self._gate.abort()
        except Exception as error:
            # A thread that is gone would leave the others at the gate, and that would look like a hang.
            self.outcomes[number] = str(error) if isinstance(error, CudaError) else type(error).__name__
            self._gate.abort()

    def _steps(self, number: int) -> None:
        state = self._setup(number)
        self._gate.wait()
        start = time.perf_counter_ns()
        made: Any = None
        try:
            made = self._raced(number, state)
            self.outcomes[number] = WORKS
        except CudaError as error:
            self.outcomes[number] = str(error)
        self.spans[number] = (start, time.perf_counter_ns())
        self._gate.wait()
        if self.outcomes[number] == WORKS:
            self.outcomes[number] = self._after(made)


def merged(outcomes: Sequence[str]) -> str:
    """`works` when all threads say so, else what the others say, each once."""
    failed = set(outcomes) - {WORKS}
    if len(failed) > 1:
        failed -= {NOT_REACHED}
    return " + ".join(sorted(failed)) if failed else WORKS
