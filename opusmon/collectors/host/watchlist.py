"""Which processes are watched: those asked for, or else those on a GPU, those that use CUDA and known engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from opusmon.channels import GPU_PROCESS, STREAM
from opusmon.clock import NS
from opusmon.schema import Batch, StringTable

MAX_PROCESSES = 64
FORGET_NS = 60 * NS
"""A process that no row has named for so long has left the GPU."""
_SLACK_NS = NS // 10
"""Start times come in hundredths of a second."""
_GRAPHICS = "graphics"


@dataclass(frozen=True, slots=True)
class Seen:
    """A process that is there now.

    Attributes:
        born_at: when it started, monotonic ns.
        started: the same in clock ticks since boot, as the kernel writes it.
    """

    born_at: float
    started: int


class Watchlist:
    """Pids by evidence.

    Args:
        strings: the table that pushed rows refer to.
        only: pids to watch whatever else there is; empty to find them.

    Attributes:
        engines: pid to start time of processes that are known by name.
        foreign: pids in rows are those of another pid namespace, and mean nothing here.
    """

    def __init__(self, strings: StringTable, only: frozenset[int] = frozenset()) -> None:
        self.engines: dict[int, int] = {}
        self.foreign = False
        self._strings, self._only = strings, only
        self._heard: dict[int, int] = {}

    def push(self, batch: Batch) -> None:
        """Learn from rows of `gpu_process` and `stream` of this host."""
        if batch.origin or batch.channel.name not in (GPU_PROCESS.name, STREAM.name):
            return
        rows = batch.rows
        if batch.channel.name == GPU_PROCESS.name:
            words = {int(kind): self._strings.text(kind) for kind in set(rows["kind"].tolist())}
            drawing = [words[int(kind)] == _GRAPHICS for kind in rows["kind"]]
        else:
            drawing = [False] * len(rows)
        for pid, t, draws in zip(rows["pid"].tolist(), rows["t"].tolist(), drawing, strict=True):
            if pid > 0 and not draws:
                self._heard[pid] = max(t, self._heard.get(pid, t))

    def pids(self, now: int) -> list[int]:
        """The processes to read at `now` (monotonic ns), at most `MAX_PROCESSES`, in the order of their pids."""
        return self._all(now)[:MAX_PROCESSES]

    def left_out(self, now: int) -> int:
        """How many there are beyond those."""
        return max(0, len(self._all(now)) - MAX_PROCESSES)

    def confirm(self, asked: Iterable[int], seen: Mapping[int, Seen]) -> None:
        """Forget those that have ended, and those whose pid another process has taken since it was named.

        Args:
            asked: the pids that were read.
            seen: those of them that are there.
        """
        for pid in asked:
            one = seen.get(pid)
            if one is None or one.born_at > self._heard.get(pid, one.born_at) + _SLACK_NS:
                self._heard.pop(pid, None)
            if one is None or one.started != self.engines.get(pid, one.started):
                self.engines.pop(pid, None)

    def _all(self, now: int) -> list[int]:
        if self._only:
            return sorted(self._only)
        self._heard = {pid: at for pid, at in self._heard.items() if now - at < FORGET_NS}
        return sorted(self.engines.keys() | (set() if self.foreign else self._heard.keys()))
