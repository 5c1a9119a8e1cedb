"""Windows of hours over judged requests without reading hours each time: what has passed does not change.

Sums are kept by slot, in chunks without a gap, per objective and source of one view at a time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from opusmon.clock import NS
from opusmon.schema import Rows
from opusmon.slo import Slo, Text, judge, no_sums, tally

Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]

SLOT_NS = 5 * NS
CHUNK_SLOTS = 12
CHUNK_NS = CHUNK_SLOTS * SLOT_NS
LONGEST_NS = 6 * 3600 * NS
"""Rules over longer windows are for a monitoring server: neither a screen nor a triage reads days."""
SETTLED_NS = 10 * NS
"""Rows of a time this long ago have all come in."""
MAX_KEPT_CHUNKS = 2 * LONGEST_NS // CHUNK_NS

Judge = Callable[[int], tuple[Floats, int]]
"""Sums of a chunk by its number (it begins at number x `CHUNK_NS`), and the bytes that were read for it."""


def chunk_sums(slo: Slo, rows: Rows, text: Text, begin: int) -> tuple[Floats, int]:
    """Sums by slot of the rows of the chunk that begins at `begin` (monotonic ns), and the bytes read for it."""
    judged = judge(slo, rows, text)
    sums = no_sums(CHUNK_SLOTS) if judged is None else tally(judged, begin, SLOT_NS, CHUNK_SLOTS).sums
    return sums, rows.nbytes


@dataclass(frozen=True, slots=True)
class Room:
    """What may be read at once of the time before what is known.

    Attributes:
        max_b: bytes of rows.
        chunks: chunks; each counts as its share of `max_b` at least.
    """

    max_b: int
    chunks: int


ALL_OF_IT = Room(1 << 62, 2 * MAX_KEPT_CHUNKS)


@dataclass(slots=True)
class _Past:
    """Sums of what has settled: judged requests by slot, of chunks without a gap.

    Attributes:
        begin: number of the first chunk.
        sums: as of `slo.Tally`, shape (4, chunks x slots).
    """

    begin: int
    sums: Floats

    @property
    def end(self) -> int:
        """Number of the chunk after the last one."""
        return self.begin + int(self.sums.shape[1]) // CHUNK_SLOTS

    def part(self, first: int, end: int) -> Floats:
        """The slots of the chunks from `first`, or from its own begin, up to `end`."""
        low = max(first - self.begin, 0) * CHUNK_SLOTS
        return self.sums[:, low : max(end - self.begin, 0) * CHUNK_SLOTS]


class Kept(threading.local):
    """What has settled, by objective and source, of one view at a time; each thread has its own.

    Args:
        room: how much of the older time one call may read; the rest follows in later calls.
    """

    def __init__(self, room: Room = ALL_OF_IT) -> None:
        self._room = room
        self._view: weakref.ref[object] | None = None
        self._past: dict[tuple[object, ...], _Past] = {}

    def past(self, view: object, key: tuple[object, ...], first: int, end: int, judged: Judge) -> Floats:
        """The slots of chunks up to `end`, back to `first` or as far as has been read; shape (4, slots).

        Args:
            view: what is read; another one than before begins anew.
            key: objective and source.
            first: number of the oldest chunk wanted.
            end: number of the chunk after the newest one, all of which have settled.
            judged: reads a chunk.
        """
        if self._view is None or self._view() is not view:
            self._view, self._past = weakref.ref(view), {}
        held = self._past.get(key)
        if held is None or not held.begin <= end <= held.end + self._room.chunks:
            held = _Past(end, no_sums(0))
        held = self._past[key] = _grown(held, first, end, judged, self._room)
        return held.part(first, end)


def _grown(held: _Past, first: int, end: int, judged: Judge, most: Room) -> _Past:
    """With the chunks up to `end` added, then older ones down to `first` as far as there is room to read."""
    newer = [judged(number)[0] for number in range(held.end, end)]
    older: list[Floats] = []
    room = most.max_b
    for number in range(held.begin - 1, first - 1, -1):
        if room <= 0:
            break
        sums, size = judged(number)
        room -= max(size, most.max_b // most.chunks)
        older.append(sums)
    if not newer and not older:
        return held
    joined = np.concatenate([*older[::-1], held.sums, *newer], axis=1)
    begin = held.begin - len(older)
    spare = max(joined.shape[1] // CHUNK_SLOTS - MAX_KEPT_CHUNKS, 0)
    return _Past(begin + spare, joined[:, spare * CHUNK_SLOTS :])
