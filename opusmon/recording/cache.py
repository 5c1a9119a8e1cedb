"""Decoded chunks kept in memory, the least recently used ones dropped first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

CACHE_B = 16 * 1024 * 1024
ENTRY_B = 300
"""What an entry costs beside its rows: the bytes object, the key, the links."""


class RowsCache:
    """Rows as bytes by key, bounded; joining hundreds of small chunks is far quicker with bytes than with arrays.

    Args:
        limit_b: most bytes held, entries' overhead included.
    """

    def __init__(self, limit_b: int = CACHE_B) -> None:
        self._limit_b = limit_b
        self._rows: OrderedDict[Hashable, bytes] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: Hashable) -> bytes | None:
        """The rows of a key, if they are held."""
        rows = self._rows.get(key)
        if rows is not None:
            self._rows.move_to_end(key)
        return rows

    def put(self, key: Hashable, rows: bytes) -> None:
        """Hold rows; others go when there is no room. More than a quarter of the limit is not held."""
        cost_b = len(rows) + ENTRY_B
        if cost_b > self._limit_b // 4 or key in self._rows:
            return
        self._rows[key] = rows
        self.bytes += cost_b
        while self.bytes > self._limit_b:
            _, old = self._rows.popitem(last=False)
            self.bytes -= len(old) + ENTRY_B
