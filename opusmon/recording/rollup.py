"""Rollups at 10 s, 1 min and 10 min: how the writer builds them and how the file holds them.

What the reader relies on, per channel and level: let S be the end of the last bucket that is stored. Every
committed row before S is in exactly one stored partial bucket, and no row from S on is in any. It holds after
a crash, because a group of buckets is sealed in the transaction of the chunks that closed it, and rows that
come later still are stored as further partial buckets in the transaction of their own chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, cast

import numpy as np

from opusmon import stats
from opusmon.clock import NS
from opusmon.codec import encode
from opusmon.schema import Channel, Rows

LEVELS_NS = (10 * NS, 60 * NS, 600 * NS)
"""Bucket widths; each divides the next."""

GROUPS_NS = (60 * NS, 600 * NS, 600 * NS)
"""Buckets of a level are stored together per stretch of this length: fewer, better compressed table rows."""

SLACK_NS = 5 * NS
"""A group is sealed once a row this much later has come, so that slow collectors rarely make partial buckets."""

COMPACT_ROWS = 16_384
"""Raw rows held per channel before they are summarised."""


class RollupGroup(NamedTuple):
    """Buckets of one level to be stored together.

    Attributes:
        level: index in `LEVELS_NS`.
        rows: array of `stats.rollup_dtype` over `channel.values`, sorted by `t`.
    """

    level: int
    rows: Rows

    @property
    def t0(self) -> int:
        """Start of the first bucket."""
        return int(self.rows["t"][0])

    @property
    def t1(self) -> int:
        """End of the last bucket, exclusive."""
        return int(self.rows["t"][-1]) + LEVELS_NS[self.level]


@lru_cache(maxsize=256)
def stored_dtype(channel: Channel) -> np.dtype[np.void]:
    """Dtype of a stored rollup: min and max of a float32 field are float32 as well, means are float64."""
    full = stats.rollup_dtype(channel, channel.values)
    narrow = {f"{f}_{s}" for f in channel.values if channel.by_name[f].dtype == "<f4" for s in ("min", "max")}
    return np.dtype([(name, "<f4" if name in narrow else full[name].str) for name in full.names or ()])


def encode_group(channel: Channel, rows: Rows) -> bytes:
    """Compressed column bytes of stored buckets."""
    packed = np.empty(len(rows), stored_dtype(channel))
    with np.errstate(over="ignore"):
        for name in rows.dtype.names or ():
            packed[name] = rows[name]
    return encode(packed)


class Cascade:
    """Summarises the rows of one channel as they come and says which buckets to store.

    Each level is fed by what the one below has stored, so its own S never passes the lower one's.

    Raises:
        ValueError: the channel cannot be summarised (a key field is called `n`).
    """

    def __init__(self, channel: Channel) -> None:
        stored_dtype(channel)
        self._channel = channel
        self._raw: list[Rows] = []
        self._raw_count = 0
        self._newest: int | None = None
        self._parts: list[list[Rows]] = [[] for _ in LEVELS_NS]
        self._sealed: list[int | None] = [None for _ in LEVELS_NS]

    def add(self, rows: Rows) -> list[RollupGroup]:
        """Take rows of a committed-to-be chunk, sorted by `t`; returns the groups to store with it."""
        if not len(rows):
            return []
        sealed = self._sealed[0]
        fresh = rows if sealed is None else rows[rows["t"] >= sealed]
        late = rows[: 0 if sealed is None else len(rows) - len(fresh)]
        self._hold(fresh)
        newest = int(rows["t"][-1])
        self._newest = newest if self._newest is None else max(self._newest, newest)
        parts = [self._summary(late)] if len(late) else []
        boundary = (self._newest - SLACK_NS) // GROUPS_NS[0] * GROUPS_NS[0]
        if sealed is None or boundary > sealed or parts:
            return self._seal(0, parts, boundary if sealed is None else max(boundary, sealed))
        return []

    def close(self) -> list[RollupGroup]:
        """Everything that is left, when no row will follow."""
        groups: list[RollupGroup] = []
        self._compact()
        for level in range(len(LEVELS_NS)):
            if self._parts[level]:
                rows = stats.merge_rollups(self._parts[level], LEVELS_NS[level])
                groups += _grouped(level, rows)
                if level + 1 < len(LEVELS_NS):
                    self._parts[level + 1].append(rows)
            self._parts[level] = []
        return groups

    def _hold(self, rows: Rows) -> None:
        """Keep raw rows until their group closes, in summary when there are many."""
        if len(rows):
            self._raw.append(rows)
            self._raw_count += len(rows)
        if self._raw_count > COMPACT_ROWS:
            self._compact()

    def _compact(self) -> None:
        """Replace the raw rows by their 10 s summary."""
        if self._raw:
            rows = cast("Rows", np.concatenate(self._raw))
            merged = stats.merge_rollups([*self._parts[0], self._summary(rows)])
            self._parts[0], self._raw, self._raw_count = [merged], [], 0

    def _summary(self, rows: Rows) -> Rows:
        return stats.rollup(rows, self._channel, self._channel.values, LEVELS_NS[0])

    def _seal(self, level: int, late: Sequence[Rows], boundary: int) -> list[RollupGroup]:
        """Store the late parts and all buckets that end by `boundary`; feed them to the next level."""
        if level == 0 and boundary != self._sealed[0]:
            self._compact()
        self._sealed[level] = boundary
        done = [*late, *(part[part["t"] < boundary] for part in self._parts[level])]
        self._parts[level] = [rest for part in self._parts[level] if len(rest := part[part["t"] >= boundary])]
        done = [part for part in done if len(part)]
        rows = [stats.merge_rollups(done, LEVELS_NS[level])] if done else []
        groups = [group for merged in rows for group in _grouped(level, merged)]
        return groups + (self._feed(level + 1, rows, boundary) if level + 1 < len(LEVELS_NS) else [])

    def _feed(self, level: int, rows: list[Rows], below: int) -> list[RollupGroup]:
        """Hand the buckets stored below to a level, and seal what the lower boundary `below` allows."""
        boundary = below // GROUPS_NS[level] * GROUPS_NS[level]
        due: list[Rows] = []
        for part in (stats.merge_rollups([part], LEVELS_NS[level]) for part in rows):
            before = part["t"] < boundary
            due.append(part[before])
            self._parts[level].append(part[~before])
        due = [part for part in due if len(part)]
        return self._seal(level, due, boundary) if due or boundary != self._sealed[level] else []


def _grouped(level: int, rows: Rows) -> list[RollupGroup]:
    """Split merged buckets by the stretch they are stored in; rows are sorted by `t`."""
    stretch = rows["t"] // GROUPS_NS[level]
    cuts = np.flatnonzero(np.diff(stretch)) + 1
    return [RollupGroup(level, cast("Rows", part)) for part in np.split(rows, cuts)]
