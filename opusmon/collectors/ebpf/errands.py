"""What a collector of probes does beside its turns: calls that block, on a thread of their own, and tasks that make them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Errands:
    """One thread for a backend, which is for one thread only, and the tasks that are under way.

    Args:
        thread: name of the thread; it starts with the first call.
    """

    def __init__(self, thread: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, function: Callable[..., Any], *words: Any) -> Any:
        """Call a function on the thread, behind those called before, and answer what it returns or raises."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *words)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something done while the turns go on."""
        self._tasks.add(asyncio.create_task(work))

    def reap(self) -> None:
        """Forget finished tasks; raises what one of them raised, which ends the collector."""
        done = {task for task in self._tasks if task.done()}
        self._tasks -= done
        for task in done:
            task.result()

    def cancel(self) -> None:
        """Let no task go on."""
        for task in self._tasks:
            task.cancel()

    def close(self, last: Callable[[], Any] | None = None) -> None:
        """Cancel the tasks, and return once the thread has made the calls it was given.

        Args:
            last: called on the thread before it ends.
        """
        self.cancel()
        if last is not None:
            self._pool.submit(last)
        self._pool.shutdown(wait=True)
