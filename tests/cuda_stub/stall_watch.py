"""The stalls collector at work on a thread of its own, its rows kept."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from opusmon.clock import SystemClock
from opusmon.collectors.stalls import StallsCollector
from opusmon.schema import Batch, StringTable


class StallWatch:
    """Runs the collector until closed.

    Args:
        options: of `StallsCollector`.
    """

    def __init__(self, **options: Any) -> None:
        self.strings = StringTable()
        self.batches: list[Batch] = []
        self._news = threading.Condition()
        self._error: BaseException | None = None
        self._options = {"interval_ns": 250_000_000, **options}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._task = self._loop.create_task(self._collect())
        with contextlib.suppress(asyncio.CancelledError):
            try:
                self._loop.run_until_complete(self._task)
            except Exception as error:
                self._error = error
        self._loop.close()
        with self._news:
            self._news.notify_all()

    async def _collect(self) -> None:
        collector = StallsCollector(self.strings, SystemClock(), **self._options)
        async with contextlib.aclosing(collector.batches()) as batches:
            async for batch in batches:
                with self._news:
                    self.batches.append(batch)
                    self._news.notify_all()

    def until(self, ready: Callable[[], Any], limit_s: float = 60.0) -> Any:
        """Wait until `ready()` is true; returns what it said."""
        deadline = time.monotonic() + limit_s
        with self._news:
            while not (said := ready()):
                if self._error is not None:
                    raise self._error
                left = deadline - time.monotonic()
                assert left > 0, (
                    f"not seen in {limit_s} s; rows: {self.rows()[-20:]}; it said: {self.reasons()}"
                )
                self._news.wait(left)
        return said

    def rows(self, kind: str = "", pid: int = 0) -> list[dict[str, Any]]:
        """Stalls so far, texts in words."""
        found = [row for batch in self.batches if batch.channel.name == "stall" for row in self._words(batch)]
        return [row for row in found if kind in ("", row["kind"]) and pid in (0, row["pid"])]

    def of(self, channel: str) -> list[dict[str, Any]]:
        """Rows of another channel so far, texts in words."""
        return [row for batch in self.batches if batch.channel.name == channel for row in self._words(batch)]

    def reasons(self) -> list[tuple[str, str, str, str]]:
        """Field, scope, state and reason of each status row so far."""
        return [(row["field"], row["scope"], row["state"], row["reason"]) for row in self.of("status")]

    def said(self, words: str) -> bool:
        """Whether a status row has these words in its reason."""
        return any(words in reason for *_, reason in self.reasons())

    @property
    def files(self) -> int:
        """How many libcuda files it last said to have probes on."""
        found = [re.search(r"probes are on (\d+) libcuda", reason) for *_, reason in self.reasons()]
        return next((int(match[1]) for match in reversed(found) if match), 0)

    def leave(self) -> None:
        """Tell it to end, without waiting for the kernel, which takes 0.1 s for each probe."""
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._task.cancel)

    def close(self) -> None:
        """End it; its probes are gone afterwards."""
        self.leave()
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def _words(self, batch: Batch) -> list[dict[str, Any]]:
        texts = {field.name for field in batch.channel.fields if field.text}
        names = batch.rows.dtype.names or ()
        return [
            {name: self.strings.text(row[name]) if name in texts else row[name].item() for name in names}
            for row in batch.rows
        ]
