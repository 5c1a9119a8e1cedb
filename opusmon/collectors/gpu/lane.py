"""A thread that may hang without taking anybody with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from opusmon.clock import Clock


class Lane:
    """Runs one job at a time on its own daemon thread and hands the result to an event loop.

    A daemon thread blocked in the driver does not keep the process from ending.

    Args:
        name: thread name.
        loop: where results are delivered.
        clock: when jobs began.

    Attributes:
        since: monotonic ns at which the job in progress was handed over, None when the lane is free.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self.since: int | None = None
        self._loop, self._clock = loop, clock
        self._jobs: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def free(self) -> bool:
        """Whether the last job has returned."""
        return self.since is None

    def submit(self, job: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run `job` on the lane's thread. Call it on the loop, and only when `free`."""
        future = self._loop.create_future()
        self.since = self._clock.now()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """Let the thread end once its job returns."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; whether it came."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            result: Any = None
            failure: BaseException | None = None
            try:
                result = job()
            except Exception as error:  # handed to whoever awaits the future
                failure = error
            try:
                self._loop.call_soon_threadsafe(self._deliver, future, result, failure)
            except RuntimeError:  # the loop has closed: nobody waits any more
                return

    def _deliver(self, future: asyncio.Future[Any], result: Any, failure: BaseException | None) -> None:
        self.since = None
        if future.cancelled():
            return
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)
