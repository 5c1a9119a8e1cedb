"""The streams collector as the screen runs it: a child process, its rows read from a pipe."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from opusmon.schema import Batch, StringTable
from opusmon.wire import Decoder

SUMMED = [
    "launches",
    "graph_launches",
    "copies",
    "h2d_b",
    "d2h_b",
    "d2d_b",
    "other_b",
    "waits",
    "wait_ns",
    "bubbles",
    "bubble_ns",
    "not_ready",
    "wait_lt_10us",
    "wait_lt_100us",
    "wait_lt_1ms",
    "wait_lt_10ms",
    "wait_lt_100ms",
    "wait_lt_1s",
    "wait_ge_1s",
]


class Watch:
    """Runs `opusmon stream --only streams` and keeps what it sends.

    Args:
        interval: as the command line takes it.
        stderr: where its complaints go; to ours by default.
    """

    def __init__(self, interval: str = "250ms", stderr: int | None = None) -> None:
        argv = [sys.executable, "-m", "opusmon", "stream", "--only", "streams", "--interval", interval]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
        self.strings = StringTable()
        self.batches: list[Batch] = []
        self.files = 0
        """How many libraries it last said to have probes on."""
        self.price_us = 0.0
        """What it last said that a probe hit is taken to cost."""
        self.states: dict[str, str] = {}
        """Field to the state that was last said of it: a state is said once, maybe before what a test waits for."""
        self._decoder = Decoder(self.strings, "")

    def until(self, ready: Callable[[], Any], limit_s: float = 60.0) -> Any:
        """Read on until `ready()` is true; returns what it said."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        deadline = time.monotonic() + limit_s
        while not (said := ready()):
            left = deadline - time.monotonic()
            assert left > 0, f"not seen in {limit_s} s; it said: {self.reasons()}"
            if select.select([fd], [], [], left)[0]:
                data = os.read(fd, 65_536)
                assert data, f"the collector ended: {self._decoder.unavailable}"
                self.batches += self._decoder.feed(data)
                self.states.update({field: state for field, state, _ in self.reasons()})
                found = [re.search(r"probes are on (\d+) libcuda", reason) for _, _, reason in self.reasons()]
                self.files = next((int(match[1]) for match in reversed(found) if match), self.files)
                priced = [
                    re.search(r"a probe hit is taken to cost ([\d.]+) us", one) for *_, one in self.reasons()
                ]
                self.price_us = next((float(match[1]) for match in reversed(priced) if match), self.price_us)
        return said

    def after(self, ready: Callable[[], Any], limit_s: float = 60.0) -> Any:
        """As `until`, with rows that come from now on only."""
        self.batches.clear()
        return self.until(ready, limit_s)

    def rows(self, channel: str) -> list[np.void]:
        """All rows of a channel so far."""
        return [row for batch in self.batches if batch.channel.name == channel for row in batch.rows]

    def reasons(self) -> list[tuple[str, str, str]]:
        """Field, state and reason of each status row so far."""
        words = ("field", "state", "reason")
        return [tuple(self.strings.text(row[word]) for word in words) for row in self.rows("status")]

    def said(self, words: str) -> bool:
        """Whether a status row has these words in its reason."""
        return any(words in reason for _, _, reason in self.reasons())

    def sums(self, pid: int, stream: int) -> dict[str, float]:
        """Sums over the rows of one stream so far; values of 0 are left out."""
        rows = [row for row in self.rows("stream") if (row["pid"], row["stream"]) == (pid, stream)]
        sums = {name: float(np.nansum([row[name] for row in rows])) for name in SUMMED}
        return {name: value for name, value in sums.items() if value}

    def last(self, pid: int, stream: int) -> np.void | None:
        """The latest row of one stream."""
        rows = [row for row in self.rows("stream") if (row["pid"], row["stream"]) == (pid, stream)]
        return rows[-1] if rows else None

    def close(self) -> None:
        """End it at once; the kernel removes its probes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
