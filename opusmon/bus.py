"""Fan a batch out to sinks that are equals: neither the window nor the recorder knows the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from opusmon.schema import Batch


@runtime_checkable
class Sink(Protocol):
    """Anything with `push(batch)`. It must not block and must not raise."""

    def push(self, batch: Batch) -> None:
        """Take a batch."""
        ...


class Bus:
    """Push every batch to every sink, in the order given."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def push(self, batch: Batch) -> None:
        """Hand the batch to each sink."""
        for sink in self._sinks:
            sink.push(batch)
