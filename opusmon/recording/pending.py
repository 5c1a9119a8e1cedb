"""The bounded queue between collectors and the writer thread."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from opusmon.schema import Batch

SOFT_B = 16 * 1024 * 1024
"""Beyond this, event batches are dropped. A burst of 10^5 events/s of 64 bytes fills it in 2.5 s."""

HARD_B = 24 * 1024 * 1024
"""Beyond this, gauges and counters are dropped as well: memory stays bounded whatever the disk does."""

BATCH_B = 512
"""What a batch costs beside its rows: the array object, the queue entry."""


@dataclass(slots=True)
class Loss:
    """Rows of one channel that did not fit.

    Attributes:
        rows: how many.
        t0: time of the first one, monotonic ns.
        t1: time of the last one.
    """

    rows: int
    t0: int
    t1: int

    def add(self, batch: Batch) -> None:
        """Count the rows of a batch as lost."""
        self.rows += len(batch.rows)
        self.t0, self.t1 = min(self.t0, batch.t0), max(self.t1, batch.t1)


@dataclass(frozen=True, slots=True)
class _Entry:
    order: int
    cost_b: int
    batch: Batch


class PendingBatches:
    """Batches waiting for the writer, bounded in bytes; events make way for gauges and counters.

    Args:
        soft_b: capacity for everything, events included.
        hard_b: capacity for gauges and counters once no queued event is left to drop.
    """

    def __init__(self, soft_b: int = SOFT_B, hard_b: int = HARD_B) -> None:
        self._soft_b, self._hard_b = soft_b, hard_b
        self._events: deque[_Entry] = deque()
        self._gauges: deque[_Entry] = deque()
        self._losses: dict[str, Loss] = {}
        self._lock = threading.Lock()
        self._order = 0
        self.bytes = 0
        self.rows = 0
        self.dropped_rows = 0

    def put(self, batch: Batch) -> None:
        """Queue a batch, or count its rows as lost. Returns at once."""
        cost_b = batch.rows.nbytes + BATCH_B
        with self._lock:
            if batch.channel.kind == "event":
                queue, fits = self._events, self.bytes + cost_b <= self._soft_b
            else:
                self._make_room(cost_b)
                queue, fits = self._gauges, self.bytes + cost_b <= self._hard_b
            if not fits:
                self._lose(batch)
                return
            self._order += 1
            queue.append(_Entry(self._order, cost_b, batch))
            self.bytes += cost_b
            self.rows += len(batch.rows)

    def take(self, max_rows: int) -> list[Batch]:
        """Remove batches in the order they came until `max_rows` is reached; at least one if there is any."""
        taken: list[Batch] = []
        count = 0
        with self._lock:
            while count < max_rows and (self._events or self._gauges):
                entry = self._pop(self._older())
                count += len(entry.batch.rows)
                taken.append(entry.batch)
        return taken

    def take_losses(self) -> dict[str, Loss]:
        """Losses by channel since the last call."""
        with self._lock:
            losses, self._losses = self._losses, {}
        return losses

    def _older(self) -> deque[_Entry]:
        """The queue whose head came first."""
        if self._events and (not self._gauges or self._events[0].order < self._gauges[0].order):
            return self._events
        return self._gauges

    def _pop(self, queue: deque[_Entry]) -> _Entry:
        entry = queue.popleft()
        self.bytes -= entry.cost_b
        self.rows -= len(entry.batch.rows)
        return entry

    def _make_room(self, cost_b: int) -> None:
        """Drop the oldest events until `cost_b` fits beside the rest, or none is left."""
        while self._events and self.bytes + cost_b > self._soft_b:
            self._lose(self._pop(self._events).batch)

    def _lose(self, batch: Batch) -> None:
        loss = self._losses.setdefault(batch.channel.name, Loss(0, batch.t0, batch.t1))
        loss.add(batch)
        self.dropped_rows += len(batch.rows)
