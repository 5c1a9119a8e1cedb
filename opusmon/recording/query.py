"""Rows out of an open recording: chunks and rollups by time range, decoded through a cache.

Functions here run inside one short read transaction of `opusmon.recording.reader.Recording`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opusmon import stats
from opusmon.clock import NS
from opusmon.codec import MAX_CHUNK_B
from opusmon.recording.cache import RowsCache
from opusmon.recording.decode import Stored, columns_of, decode_in_order, decode_many, join, plain
from opusmon.recording.rollup import GROUPS_NS, LEVELS_NS, stored_dtype
from opusmon.recording.store import I64_MAX, RecordingError, clamp
from opusmon.schema import Channel, Rows, sort_rows

MAX_QUERY_B = 512 * 1024 * 1024
"""Most bytes of rows that one query may give."""

BLOCK = 512
"""Stored chunks decoded together."""

LONG_NS = 300 * NS
"""Ranges from this length on are read past the cache by one who goes through the file."""

_WITHIN = """
FROM chunk WHERE channel=:c AND t0<=:b AND t1>:a
    AND t0 > :a - COALESCE((SELECT max_ns FROM span WHERE channel=:c), 4611686018427387904)
"""
_CHUNKS = "SELECT id, n" + _WITHIN
_WHOLE_CHUNKS = "SELECT id, n, codec, data" + _WITHIN
_ROLLUPS = "SELECT id FROM rollup WHERE channel=? AND level=? AND t1>? AND t1<=? AND t0<?"
# In the order of the table, not of the index: one pass over the file instead of a jump per chunk.
_COUNTS = """
SELECT channel, sum(n) FROM chunk NOT INDEXED
    WHERE typeof(channel)='integer' AND typeof(n)='integer' AND n BETWEEN 1 AND ? GROUP BY channel
"""
_NEXT = "SELECT id, channel, n, codec, data FROM chunk WHERE id>? ORDER BY id LIMIT ?"
_FETCH = {
    "chunk": "SELECT id, n, codec, data FROM chunk WHERE id=?",
    "rollup": "SELECT id, n, codec, data FROM rollup WHERE id=?",
}


@dataclass(slots=True)
class ChunkReader:
    """Reads the rows of channels from a connection.

    Attributes:
        connection: open for reading.
        cache: decoded chunks and rollup columns.
        damaged: channel number and id of the chunks that were skipped because they cannot be decoded.
        through: long ranges are asked for once each, and nothing of them is kept.
    """

    connection: sqlite3.Connection
    cache: RowsCache = field(default_factory=RowsCache)
    damaged: set[tuple[int, int]] = field(default_factory=set)
    through: bool = False

    def sizes_b(self, number: int, channel: Channel, t0: int, t1: int) -> dict[int, int]:
        """Ids of the chunks that may have rows with `t0 < t <= t1`, in arrival order, and the size of their rows.

        A size that no chunk has counts as 0: such a chunk is damaged and will be left out.
        """
        found = self.connection.execute(_CHUNKS, {"c": number, "a": clamp(t0), "b": clamp(t1)})
        most = MAX_CHUNK_B // channel.dtype.itemsize
        sizes = {
            chunk: n * channel.dtype.itemsize if isinstance(n, int) and 0 < n <= most else 0
            for chunk, n in found
            if isinstance(chunk, int)
        }
        return dict(sorted(sizes.items()))

    def rows(self, number: int, channel: Channel, t0: int, t1: int) -> Rows:
        """Rows with `t0 < t <= t1` by time, rows of equal time in arrival order; damaged chunks are skipped.

        Raises:
            RecordingError: there are more than `MAX_QUERY_B`.
        """
        if t0 >= t1:
            return np.empty(0, channel.dtype)
        if self.through and t1 - t0 >= LONG_NS:
            return cut(sort_rows(self._long(number, channel, t0, t1)), t0, t1)
        sizes = self.sizes_b(number, channel, t0, t1)
        size_b = sum(sizes.values())
        if size_b > MAX_QUERY_B:
            raise _too_much(channel)
        chunks = self.chunks(number, channel, list(sizes))
        rows = join((chunks[i] for i in sizes if i in chunks), channel.dtype)
        return cut(sort_rows(rows), t0, t1)

    def _long(self, number: int, channel: Channel, t0: int, t1: int) -> Rows:
        """Rows of all chunks that may have some in the range, in arrival order; nothing is taken from the cache."""
        found = self.connection.execute(_WHOLE_CHUNKS, {"c": number, "a": clamp(t0), "b": clamp(t1)})
        rows, damaged = decode_in_order(found, channel.dtype, MAX_QUERY_B)
        self.damaged.update((number, chunk) for chunk in damaged)
        if rows is None:
            raise _too_much(channel)
        return rows

    def chunks(self, number: int, channel: Channel, ids: Sequence[int]) -> dict[int, bytes]:
        """Row bytes of a channel's chunks by id, without the damaged ones.

        What is remembered of a chunk holds for this channel alone: a damaged index may list it under another.
        """
        found: dict[int, bytes] = {}
        missing: list[int] = []
        for chunk in ids:
            held = self.cache.get((number, chunk))
            if held is not None:
                found[chunk] = held
            elif (number, chunk) not in self.damaged:
                missing.append(chunk)
        for start in range(0, len(missing), BLOCK):
            stored = self._fetch("chunk", missing[start : start + BLOCK])
            for chunk, rows in decode_many(stored, channel.dtype).items():
                if rows is None:
                    self.damaged.add((number, chunk))
                else:
                    found[chunk] = rows
                    self.cache.put((number, chunk), rows)
        return found

    def verify(self, after: int, itemsizes: Mapping[int, int], most: int) -> tuple[int, int]:
        """Decode the next chunks, in the order of their ids, and note the damaged ones; nothing is kept.

        Args:
            after: id behind which to begin.
            itemsizes: bytes of a row by channel number; chunks of other channels are passed over.
            most: how many chunks.

        Returns:
            How many there were, and the id of the last one.
        """
        count, last = 0, after
        for last, number, n, codec, data in self.connection.execute(_NEXT, (after, most)):
            count += 1
            itemsize = itemsizes.get(number)
            if itemsize is not None and plain(n, codec, data, itemsize) is None:
                self.damaged.add((number, last))
        return count, last

    def counts(self) -> dict[int, int]:
        """Rows by channel number, by what the chunks say of themselves: none is decoded."""
        found = self.connection.execute(_COUNTS, (MAX_CHUNK_B // 8,))
        return {number: int(rows) for number, rows in found}

    def binned(
        self, number: int, channel: Channel, fields: Sequence[str], t0: int, t1: int, step_ns: int
    ) -> Rows:
        """Bins over rows with `t0 < t <= t1`, from the widest stored buckets that fit `step_ns`."""
        levels = sum(step_ns % level_ns == 0 for level_ns in LEVELS_NS)
        request = _Binning(number, channel, tuple(fields), step_ns)
        parts = self._bins(request, t0 + 1, t1 + 1, levels - 1)
        parts.append(np.empty(0, stats.rollup_dtype(channel, fields)))
        return stats.merge_rollups(parts, step_ns)

    def extremes(self, number: int, channel: Channel, fields: Sequence[str], t0: int, t1: int) -> Rows | None:
        """The widest stored buckets that have all rows with `t0 < t <= t1`, and some around them.

        None where not all of those rows are in buckets yet, or where a bucket cannot be decoded.
        """
        width = LEVELS_NS[-1]
        if self._sealed(number, width) <= t1:
            return None
        low, high = (t0 + 1) // width * width, (t1 // width + 1) * width
        request = _Binning(number, channel, tuple(fields), width)
        return self._buckets(request, len(LEVELS_NS) - 1, low, high)

    def _bins(self, request: _Binning, begin: int, end: int, level: int) -> list[Rows]:
        """Partial bins over `begin <= t < end`.

        Buckets that lie inside the range whole come from `level`; the ends, and what is not sealed yet,
        come from the level below, and in the end from rows.
        """
        if begin >= end:
            return []
        if level < 0:
            rows = self.rows(request.number, request.channel, begin - 1, end - 1)
            return [stats.rollup(rows, request.channel, request.fields, request.step_ns)]
        width = LEVELS_NS[level]
        low = -(-begin // width) * width
        high = min(end, self._sealed(request.number, width)) // width * width
        stored = self._buckets(request, level, low, high) if low < high else None
        if stored is None:
            return self._bins(request, begin, end, level - 1)
        before = self._bins(request, begin, low, level - 1)
        return [*before, stored, *self._bins(request, high, end, level - 1)]

    def _sealed(self, number: int, width: int) -> int:
        """End of the last stored bucket: rows before it are in buckets, later ones are not."""
        found = self.connection.execute(
            "SELECT max(t1) FROM rollup WHERE channel=? AND level=?", (number, width)
        )
        end = found.fetchone()[0]
        return end if isinstance(end, int) else -(2**63)

    def _buckets(self, request: _Binning, level: int, low: int, high: int) -> Rows | None:
        """Stored buckets that begin in `low <= t < high`; None when one cannot be decoded."""
        bounds = (clamp(low), clamp(high + GROUPS_NS[level]), clamp(high))
        found = self.connection.execute(_ROLLUPS, (request.number, LEVELS_NS[level], *bounds)).fetchall()
        ids = [number for (number,) in found]
        parts = self._bucket_bytes(request, ids)
        if parts is None:
            return None
        rows = join(parts, stats.rollup_dtype(request.channel, request.fields))
        return rows[(rows["t"] >= low) & (rows["t"] < high)]

    def _bucket_bytes(self, request: _Binning, ids: Sequence[int]) -> list[bytes] | None:
        """The columns asked for of stored rollups, as row bytes; None when one is damaged."""
        stored_as = stored_dtype(request.channel)
        wanted = stats.rollup_dtype(request.channel, request.fields)
        parts: list[bytes] = []
        for number in ids:
            key = (request.number, number, request.fields)
            held = self.cache.get(key)
            if held is None:
                for stored in self._fetch("rollup", [number]):
                    data = plain(stored.n, stored.codec, stored.data, stored_as.itemsize)
                    if data is None:
                        return None
                    columns = columns_of([data], stored.n, stored_as, wanted.names or ())
                    # Damage can make a signalling NaN, and casting that one warns.
                    with np.errstate(invalid="ignore"):
                        held = columns.astype(wanted).tobytes()
                    self.cache.put(key, held)
            parts.append(held or b"")
        return parts

    def _fetch(self, table: str, ids: Sequence[int]) -> list[Stored]:
        """Stored chunks or rollups by id; one that was pruned meanwhile is left out."""
        rows = (self.connection.execute(_FETCH[table], (number,)).fetchone() for number in ids)
        return [Stored(*row) for row in rows if row is not None]

    def step_forward(self, number: int, channel: Channel, t: int) -> int | None:
        """Time of the first row after `t`."""
        while True:
            # The next chunk to begin bounds the search; those that have begun may still have an earlier row.
            edge = self._edge("SELECT min(t0) FROM chunk WHERE channel=? AND t0>?", number, t)
            # A damaged index may lead back, and round for ever.
            edge = None if edge is not None and edge <= t else edge
            rows = self.rows(number, channel, t, I64_MAX if edge is None else edge)
            if len(rows):
                return int(rows["t"][0])
            if edge is None:
                return None
            t = edge

    def step_back(self, number: int, channel: Channel, t: int) -> int | None:
        """Time of the last row before `t`."""
        while (
            edge := self._edge("SELECT max(t0) FROM chunk WHERE channel=? AND t0<?", number, t)
        ) is not None and edge < t:
            rows = self.rows(number, channel, edge - 1, t - 1)
            if len(rows):
                return int(rows["t"][-1])
            t = edge
        return None

    def _edge(self, sql: str, number: int, t: int) -> int | None:
        """The time a query over chunk starts finds."""
        found: Any = self.connection.execute(sql, (number, clamp(t))).fetchone()[0]
        return found if isinstance(found, int) else None

    def origins(self, ids: Sequence[int]) -> dict[int, str]:
        """Hosts that chunks came from."""
        sql = "SELECT origin FROM chunk WHERE id=?"
        rows = ((number, self.connection.execute(sql, (number,)).fetchone()) for number in ids)
        return {number: str(row[0]) for number, row in rows if row is not None}


def _too_much(channel: Channel) -> RecordingError:
    return RecordingError(
        f"over {MAX_QUERY_B // 10**6} MB of {channel.name} rows in this range: ask for a shorter one"
    )


@dataclass(frozen=True, slots=True)
class _Binning:
    """What `binned` was asked for."""

    number: int
    channel: Channel
    fields: tuple[str, ...]
    step_ns: int


def cut(rows: Rows, t0: int, t1: int) -> Rows:
    """Sorted rows with `t0 < t <= t1`."""
    first, last = np.searchsorted(rows["t"], np.array([clamp(t0), clamp(t1)]), side="right")
    return rows[first:last]
