"""Threads for calls that may hang: one does all the work until it is stuck, then another takes over."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

PATIENCE_S = 0.025
"""A job that takes longer than this no longer keeps the others waiting: another thread takes them."""

_Wakes = SimpleQueue[bool]


class Job:
    """A call that some thread makes once.

    Attributes:
        done: it has returned.
    """

    __slots__ = ("_failure", "_result", "_run", "done")

    def __init__(self, run: Callable[[], Any]) -> None:
        self.done = False
        self._run = run
        self._result: Any = None
        self._failure: Exception | None = None

    def perform(self) -> None:
        """Make the call, on the calling thread."""
        try:
            self._result = self._run()
        except Exception as error:  # raised again where the result is asked for
            self._failure = error
        self.done = True

    def result(self) -> Any:
        """What the call returned, or raise what it raised. Only once it is done."""
        if self._failure is not None:
            raise self._failure
        return self._result


class Round:
    """Jobs posted together; the loop is woken once, when the last of them has ended.

    Args:
        loop: where `wait` is called.
        jobs: at least one.
        ended: called on the loop when the last job has.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, jobs: Sequence[Job], ended: Callable[[], None]
    ) -> None:
        self.jobs = jobs
        self._loop, self._ended = loop, ended
        self._waker: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        """Whether all jobs have returned."""
        return all(job.done for job in self.jobs)

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the last job or for the timeout; whether all are done."""
        if not self.done:
            waker = self._waker = self._loop.create_future()
            timer = self._loop.call_later(timeout_s, self._wake)
            try:
                await waker
            finally:
                timer.cancel()
        return self.done

    def tell(self) -> None:
        """On a worker's thread, after each job."""
        if self.done:
            try:
                self._loop.call_soon_threadsafe(self._end)
            except RuntimeError:
                return  # the loop has closed: nobody waits any more

    def _end(self) -> None:
        self._ended()
        self._wake()

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)


class Crew:
    """Daemon threads that take jobs in turn. A thread that is stuck in the driver does not keep the process alive.

    One thread suffices while no job hangs: the threads would only contend for the interpreter, and each hand-over
    costs as much as several NVML calls.

    Args:
        name: prefix of the thread names.
        loop: where rounds are posted and awaited.
        patience_s: how long a job may take before another thread takes the jobs behind it.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, patience_s: float = PATIENCE_S) -> None:
        self._name, self._loop, self._patience_s = name, loop, patience_s
        self._waiting: deque[tuple[Job, Round]] = deque()
        self._workers: list[_Wakes] = []
        self._idle: list[_Wakes] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def size(self) -> int:
        """Threads there are."""
        return len(self._workers)

    def post(self, calls: Sequence[Callable[[], Any]]) -> Round:
        """Have calls made, in order; on the loop's thread."""
        jobs = [Job(call) for call in calls]
        group = Round(self._loop, jobs, self._rest)
        self._waiting.extend((job, group) for job in jobs)
        self._hire()
        if self._timer is None and len(jobs) > 1:
            self._timer = self._loop.call_later(self._patience_s, self._relieve)
        return group

    def run_last(self, call: Callable[[], Any], timeout_s: float) -> bool:
        """Make a last call and wait for it on this thread; whether it returned in time."""
        ended = threading.Event()

        def last() -> None:
            call()
            ended.set()

        self.post([last])
        return ended.wait(timeout_s)

    def close(self) -> None:
        """Let the threads end, each once its job returns."""
        self._waiting.clear()
        for wakes in self._workers:
            wakes.put(False)

    def _rest(self) -> None:
        """A round has ended: unless another is under way there is nothing to watch over."""
        if self._timer is not None and not self._waiting:
            self._timer.cancel()
            self._timer = None

    def _relieve(self) -> None:
        """Jobs are still waiting: whoever should do them is held up."""
        self._timer = None
        if self._waiting:
            self._hire()
            self._timer = self._loop.call_later(self._patience_s, self._relieve)

    def _hire(self) -> None:
        try:
            wakes = self._idle.pop()
        except IndexError:
            wakes = SimpleQueue()
            self._workers.append(wakes)
            name = f"{self._name}-{len(self._workers)}"
            threading.Thread(target=self._work, args=(wakes,), name=name, daemon=True).start()
        wakes.put(True)

    def _work(self, wakes: _Wakes) -> None:
        while wakes.get():
            finished: Round | None = None
            while (item := self._take()) is not None:
                if finished is not None:
                    finished.tell()
                job, finished = item
                job.perform()
            self._idle.append(wakes)  # before the loop hears of it and posts more
            if finished is not None:
                finished.tell()

    def _take(self) -> tuple[Job, Round] | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None
