"""The trailing time range held in memory, queried by time.

Older rows than memory holds come from the store (the recording being written, or the one replayed), and
wide spans from its rollups. With no rows pushed at all, a window over a store is a replay: the panes that
read it cannot tell the difference, and the tests check that there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from opusmon import stats
from opusmon.channels import COST
from opusmon.clock import NS, Anchors
from opusmon.schema import Batch, Channel, Rows, StringTable, conform, join_rows, sort_rows

KEEP_NS = 15 * 60 * NS
CAP_B = 24 * 1024 * 1024
_FIRST_ROWS = 64
_NEVER = -(1 << 62)


class MarkLike(Protocol):
    """A range of session time with a kind and a text."""

    @property
    def t0(self) -> int:
        """First instant, monotonic ns."""
        ...

    @property
    def t1(self) -> int:
        """Last instant, monotonic ns."""
        ...

    @property
    def kind(self) -> str:
        """bookmark, drop, gap, a finding's severity, ..."""
        ...

    @property
    def text(self) -> str:
        """What to show."""
        ...


class Described(Protocol):
    """What rows mean: channels, text and wall time."""

    @property
    def channels(self) -> Mapping[str, Channel]:
        """The channels by name."""
        ...

    @property
    def strings(self) -> StringTable:
        """Text of the ids in the rows."""
        ...

    @property
    def anchors(self) -> Anchors:
        """Wall time of monotonic instants."""
        ...


class Readable(Described, Protocol):
    """Rows by time."""

    def query(self, channel: str, t0: int, t1: int) -> Rows:
        """Rows with t0 < t <= t1 in time order."""
        ...

    def binned(self, channel: str, fields: Sequence[str], t0: int, t1: int, step_ns: int) -> Rows:
        """Rows with t0 < t <= t1 summarised in bins that start at multiples of `step_ns`.

        Columns: `t` (start of the bin), the key fields, `n`, and `{f}_min`, `{f}_max`, `{f}_mean`, `{f}_n`.
        """
        ...


class Store(Readable, Protocol):
    """What a window falls through to: a recording."""

    @property
    def t0(self) -> int:
        """Time of the first row."""
        ...

    @property
    def t1(self) -> int:
        """Time of the last row."""
        ...

    def refresh(self) -> bool:
        """Notice what was written since; True when there was something."""
        ...

    def extremes(self, channel: str, fields: Sequence[str], t0: int, t1: int) -> Rows | None:
        """Summaries as `binned` gives them that cover all rows with t0 < t <= t1 and perhaps more; None without any."""
        ...

    def step(self, channel: str, t: int, direction: int) -> int | None:
        """Time of the row after (+1) or before (-1) `t`."""
        ...

    def marks(self, t0: int | None = None, t1: int | None = None) -> Sequence[MarkLike]:
        """Marks that touch the range."""
        ...


class _Ring:
    """The newest rows of one channel in one growing array, sorted by time.

    Attributes:
        floor: rows at or before this time are no longer here.
    """

    def __init__(self, channel: Channel) -> None:
        self._rows: Rows = np.empty(_FIRST_ROWS, dtype=channel.dtype)
        self._begin = 0
        self._end = 0
        self.floor = _NEVER

    @property
    def rows(self) -> Rows:
        return self._rows[self._begin : self._end]

    @property
    def nbytes(self) -> int:
        return (self._end - self._begin) * self._rows.dtype.itemsize

    def push(self, new: Rows) -> None:
        """Append rows; the rare ones older than the newest held are merged in, after their equals."""
        if self.floor > _NEVER and int(new["t"][0]) <= self.floor:
            new = new[new["t"] > self.floor]
            if not len(new):
                return
        self._reserve(len(new))
        late = self._end > self._begin and int(new["t"][0]) < int(self._rows["t"][self._end - 1])
        self._rows[self._end : self._end + len(new)] = new
        self._end += len(new)
        if late:
            self._rows[self._begin : self._end] = sort_rows(self.rows)

    def trim(self, t: int) -> None:
        """Let go of rows at or before `t`."""
        gone = int(np.searchsorted(self.rows["t"], t, side="right"))
        if gone:
            self._begin += gone
            self.floor = max(self.floor, t)

    def slice(self, t0: int, t1: int) -> Rows:
        """Rows with t0 < t <= t1, without a copy."""
        times = self.rows["t"]
        first = self._begin + int(np.searchsorted(times, t0, side="right"))
        last = self._begin + int(np.searchsorted(times, t1, side="right"))
        return self._rows[first : max(first, last)]

    def _reserve(self, n: int) -> None:
        if self._end + n <= len(self._rows):
            return
        held = self._end - self._begin
        size = max(_FIRST_ROWS, held + n, held + held // 2)
        grown = np.empty(size, dtype=self._rows.dtype)
        grown[:held] = self.rows
        self._rows, self._begin, self._end = grown, 0, held


class Window:
    """A sink and a view: what panes and rules read, by time.

    Args:
        channels: known from the start; more appear as batches or the store bring them.
        strings: the table that text ids refer to.
        anchors: for wall time.
        store: where older rows are, None when nothing records.
        keep_ns: how far back memory reaches.
        cap_b: most bytes in memory; the oldest rows go first.

    Attributes:
        version: grows with every change: what was computed under one is good as long as it stands.
        news: grows with every change that deserves a frame.
    """

    def __init__(
        self,
        strings: StringTable,
        anchors: Anchors,
        *,
        channels: Sequence[Channel] = (),
        store: Store | None = None,
        keep_ns: int = KEEP_NS,
        cap_b: int = CAP_B,
    ) -> None:
        self.strings = strings
        self.anchors = anchors
        self.version = 0
        self.news = 0
        self._channels = {channel.name: channel for channel in channels}
        self._store = store
        self._keep_ns = keep_ns
        self._cap_b = cap_b
        self._rings: dict[str, _Ring] = {}
        self._marks: list[MarkLike] = []
        self._t0: int | None = None
        self._t1 = 0
        # All panes of a frame ask for the newest rows of the same few channels at the same instant.
        self._asked: dict[tuple[str, int, int], Rows] = {}
        self._asked_at = (0, 0)

    @classmethod
    def over(cls, store: Store) -> Window:
        """A window on a recording: nothing in memory, everything from the file."""
        return cls(store.strings, store.anchors, store=store)

    @property
    def channels(self) -> Mapping[str, Channel]:
        """Every channel seen, by name."""
        if self._store is None:
            return self._channels
        return {**self._store.channels, **self._channels}

    @property
    def t0(self) -> int:
        """Time of the oldest row reachable, monotonic ns; 0 when there is none."""
        if self._store is not None and self._store.t0:
            return self._store.t0
        if self._store is not None:
            return self._t0 or 0
        starts = [int(ring.rows["t"][0]) for ring in self._rings.values() if len(ring.rows)]
        return min(starts, default=0)

    @property
    def t1(self) -> int:
        """Time of the newest row, monotonic ns; 0 when there is none."""
        return max(self._t1, self._store.t1 if self._store is not None else 0)

    def push(self, batch: Batch) -> None:
        """Take a batch and let go of what is too old or too much."""
        name = batch.channel.name
        self._channels.setdefault(name, batch.channel)
        ring = self._rings.get(name)
        if ring is None:
            ring = self._rings[name] = _Ring(self._channels[name])
        ring.push(conform(batch.rows, self._channels[name]))
        for other in self._rings.values():
            other.trim(batch.t1 - self._keep_ns)
        self._t0 = batch.t0 if self._t0 is None else min(self._t0, batch.t0)
        self._t1 = max(self._t1, batch.t1)
        self.version += 1
        # What watching costs can wait for the next sample: a frame for it alone would be most of that cost.
        self.news += name != COST.name
        self._shed()

    def add_mark(self, mark: MarkLike) -> None:
        """Show a mark now; the recorder writes it on its own."""
        self._marks.append(mark)
        self.version += 1
        self.news += 1

    def refresh(self) -> bool:
        """Notice what another process wrote to the store since."""
        changed = self._store is not None and self._store.refresh()
        self.version += changed
        self.news += changed
        return changed

    def query(self, channel: str, t0: int, t1: int) -> Rows:
        """Rows with t0 < t <= t1 in time order; none for a channel nobody has sent. Do not write to them."""
        ring = self._rings.get(channel)
        store = self._store_of(channel)
        if ring is None:
            return store.query(channel, t0, t1) if store else self._empty(channel)
        if store is None or t0 >= ring.floor:
            return ring.slice(t0, t1)
        older = store.query(channel, t0, min(t1, ring.floor))
        return join_rows([older, ring.slice(max(t0, ring.floor), t1)], self._channels[channel])

    def binned(self, channel: str, fields: Sequence[str], t0: int, t1: int, step_ns: int) -> Rows:
        """`stats.rollup` of the rows with t0 < t <= t1, from the store's rollups where the span is wide."""
        kind = self._kind(channel)
        if kind is None:
            return np.empty(0, dtype=[("t", "<i8")])
        ring = self._rings.get(channel)
        store = self._store_of(channel)
        if store is None or (ring is not None and t0 >= ring.floor):
            return stats.rollup(self.query(channel, t0, t1), kind, fields, step_ns)
        if ring is None or t1 <= ring.floor:
            return store.binned(channel, fields, t0, t1, step_ns)
        older = store.binned(channel, fields, t0, ring.floor, step_ns)
        newer = stats.rollup(ring.slice(ring.floor, t1), kind, fields, step_ns)
        return stats.merge_rollups([older, newer])

    def extremes(self, channel: str, fields: Sequence[str], t0: int, t1: int) -> Rows | None:
        """What the store's summaries say of a range without reading it; None where rows of the channel are in memory."""
        store = self._store_of(channel)
        if store is None or channel in self._rings:
            return None
        return store.extremes(channel, fields, t0, t1)

    def latest(self, channel: str, t: int, lookback_ns: int) -> Rows:
        """The newest row of each series among those with t - lookback_ns < row t <= t."""
        ask = (channel, t, lookback_ns)
        if self._asked_at != (self.version, t):
            self._asked.clear()
            self._asked_at = (self.version, t)
        rows = self._asked.get(ask)
        if rows is None:
            kind = self._kind(channel)
            rows = self.query(channel, t - lookback_ns, t)
            rows = self._asked[ask] = stats.latest(rows, kind.key) if kind is not None else rows
        return rows

    def step(self, channel: str, t: int, direction: int) -> int | None:
        """Time of the first sample after `t` (direction +1) or the last one before it (-1)."""
        ring = self._rings.get(channel)
        store = self._store_of(channel)
        if ring is None:
            return store.step(channel, t, direction) if store else None
        times = ring.rows["t"]
        place = int(np.searchsorted(times, t, side="right" if direction > 0 else "left"))
        if direction > 0:
            older = store.step(channel, t, 1) if store and t < ring.floor else None
            return older if older is not None else (int(times[place]) if place < len(times) else None)
        if place > 0:
            return int(times[place - 1])
        return store.step(channel, min(t, ring.floor + 1), -1) if store and ring.floor > _NEVER else None

    def marks(self, t0: int | None = None, t1: int | None = None) -> list[MarkLike]:
        """Marks that touch the range, in time order."""
        stored = list(self._store.marks(t0, t1)) if self._store is not None else []
        seen = {(mark.t0, mark.t1, mark.kind, mark.text) for mark in stored}
        for mark in self._marks:
            inside = (t1 is None or mark.t0 <= t1) and (t0 is None or mark.t1 >= t0)
            if inside and (mark.t0, mark.t1, mark.kind, mark.text) not in seen:
                stored.append(mark)
        return sorted(stored, key=lambda mark: mark.t0)

    def _store_of(self, channel: str) -> Store | None:
        store = self._store
        return store if store is not None and channel in store.channels else None

    def _kind(self, channel: str) -> Channel | None:
        known = self._channels.get(channel)
        return known if known is not None or self._store is None else self._store.channels.get(channel)

    def _empty(self, channel: str) -> Rows:
        kind = self._channels.get(channel)
        return np.empty(0, dtype=kind.dtype if kind is not None else [("t", "<i8")])

    def _shed(self) -> None:
        """Keep memory under its cap: while it is over, the largest channel loses its older half."""
        while sum(ring.nbytes for ring in self._rings.values()) > self._cap_b:
            ring = max(self._rings.values(), key=lambda ring: ring.nbytes)
            times = ring.rows["t"]
            ring.trim(int(times[len(times) // 2]))
