"""A BPF ring buffer of records of one size, read with mmap and numpy: a million a second without stalling anybody.

The kernel maps it as a page with the consumer's position (ours to write), a page with the producer's, and the data
twice in a row, so that a record never wraps. Each record has a head of 8 bytes: its length, with two flags.
"""

from __future__ import annotations

import mmap
from typing import Any, cast

import numpy as np

from opusmon.collectors.ebpf.maps import Table

BUSY, DISCARDED = 1 << 31, 1 << 30
"""Flags in the length: reserved and not yet submitted; submitted to be skipped."""
HEAD_B = 8
BATCH = 16_384
"""Records taken at once at most, so that a flood does not hold up the event loop for longer than some 5 ms."""


def entry(record: np.dtype[Any]) -> np.dtype[Any]:
    """A record as it lies in the ring: head, record, padding to 8 bytes."""
    size = -(-(HEAD_B + record.itemsize) // 8) * 8
    return np.dtype(
        {
            "names": ["length", "record"],
            "formats": ["<u4", record],
            "offsets": [0, HEAD_B],
            "itemsize": size,
        }
    )


def parse(data: Table, record: np.dtype[Any]) -> tuple[Table, int, int]:
    """The records in the bytes between the consumer's and the producer's position.

    Args:
        data: dtype u1, shape (bytes,), beginning with the head of a record.
        record: what every record is.

    Returns:
        Records in order, a copy, shape (n,); bytes that are done with; how many entries had another length, which
        are skipped.
    """
    kind = entry(record)
    entries = data[: len(data) // kind.itemsize * kind.itemsize].view(kind)
    lengths = entries["length"]
    ready = _first(lengths & BUSY != 0)
    fits = _first(lengths & ~np.uint32(DISCARDED) != record.itemsize)
    if fits == 0 < ready:
        return np.empty(0, record), _skip(int(lengths[0]), len(data)), 1
    count = min(ready, fits)
    records, skipped = entries[:count]["record"], lengths[:count] & DISCARDED != 0
    kept = records[~skipped] if skipped.any() else records.copy()
    return cast("Table", kept), count * kind.itemsize, 0


def _first(true: Table) -> int:
    """Index of the first true element; the length when there is none."""
    return int(np.argmax(true)) if true.any() else len(true)


def _skip(length: int, most: int) -> int:
    """Bytes that an entry of foreign length takes."""
    return min(most, -(-(HEAD_B + (length & ~(BUSY | DISCARDED))) // 8) * 8)


class Ring:
    """The reader of a ring buffer. Cheap enough for the event loop: some 50 ns a record.

    Args:
        fd: of the map.
        size_b: bytes of data, as the map was made.
        record: what every record is.

    Attributes:
        foreign: entries of another length that were skipped; there should be none.
        pressed: at the last look it was a quarter full: take soon.
    """

    def __init__(self, fd: int, size_b: int, record: np.dtype[Any]) -> None:
        self._record = record
        self._size_b = size_b
        self._ours = mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._theirs = mmap.mmap(fd, mmap.PAGESIZE + 2 * size_b, prot=mmap.PROT_READ, offset=mmap.PAGESIZE)
        self._consumed: Table = np.frombuffer(self._ours, np.uint64, 1)
        self._produced: Table = np.frombuffer(self._theirs, np.uint64, 1)
        self._data: Table = np.frombuffer(self._theirs, np.uint8, 2 * size_b, mmap.PAGESIZE)
        self._none: Table = np.empty(0, record)
        self._peak_b = 0
        self.foreign = 0
        self.pressed = False

    def take(self, most: int = BATCH) -> Table:
        """Records that are ready, up to `most`, in order; the kernel may write over their place at once."""
        records, used, foreign = self._read(most)
        self._consumed[0] += np.uint64(used)
        self.foreign += foreign
        return records

    def peek(self, most: int) -> Table:
        """The same, and they stay there."""
        return self._read(most)[0]

    def _read(self, most: int) -> tuple[Table, int, int]:
        """What `parse` gives."""
        begin = int(self._consumed[0])
        filled = int(self._produced[0]) - begin
        self._peak_b = max(self._peak_b, filled)
        self.pressed = filled * 4 >= self._size_b
        if not filled:
            return self._none, 0, 0
        at = begin % self._size_b
        span = min(filled, most * entry(self._record).itemsize)
        return parse(self._data[at : at + span], self._record)

    def peak(self) -> float:
        """The fullest it was found, as a share of its size (0 to 1)."""
        return self._peak_b / self._size_b

    def close(self) -> None:
        """Unmap it."""
        self._consumed = self._produced = self._data = np.empty(0, np.uint8)
        self._ours.close()
        self._theirs.close()
