"""Rows of a view that looks going forward in time read once, however much the looks overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from opusmon.clock import Anchors
from opusmon.schema import Channel, Rows, StringTable, join_rows
from opusmon.triage.scene import View


@dataclass(slots=True)
class _Held:
    """Rows with begin < t <= end of one channel; `reach_ns` is the longest range that was asked for."""

    begin: int
    end: int
    rows: Rows
    reach_ns: int


class Trail:
    """A view that holds, by channel, the rows that were read last.

    The next piece of a recording asks for most of the rows before it again, once for every time that a rule looks
    back. They are read from the view below once and let go when the looks have passed them.

    Args:
        view: where rows are read; rows of a range that was read must not change meanwhile.
        reach_ns: how long a range will be asked for; of longer ones the first is read again.
    """

    def __init__(self, view: View, reach_ns: int = 0) -> None:
        self._view = view
        self._reach_ns = reach_ns
        self._held: dict[str, _Held] = {}

    @property
    def channels(self) -> Mapping[str, Channel]:
        """The channels by name."""
        return self._view.channels

    @property
    def strings(self) -> StringTable:
        """Text of the ids in the rows."""
        return self._view.strings

    @property
    def anchors(self) -> Anchors:
        """Wall time of monotonic instants."""
        return self._view.anchors

    def query(self, channel: str, t0: int, t1: int) -> Rows:
        """Rows with t0 < t <= t1 in time order. Do not write to them."""
        held = self._held.get(channel)
        # What lies far back nobody will pass again.
        if t0 >= t1 or (held is not None and t0 < held.begin and t1 < held.end):
            return self._view.query(channel, t0, t1)
        if held is None or t0 > held.end:
            held = self._held[channel] = _Held(t0, t1, self._view.query(channel, t0, t1), self._reach_ns)
            return held.rows
        kind = self.channels[channel]
        held.reach_ns = max(held.reach_ns, t1 - t0)
        if t1 > held.end:
            held.begin = max(held.begin, min(t0, t1 - held.reach_ns))
            kept = held.rows[np.searchsorted(held.rows["t"], held.begin, side="right") :]
            held.rows = join_rows([kept, self._view.query(channel, held.end, t1)], kind)
            held.end = t1
        if t0 < held.begin:
            held.rows = join_rows([self._view.query(channel, t0, held.begin), held.rows], kind)
            held.begin = t0
        first, last = np.searchsorted(held.rows["t"], (t0, t1), side="right")
        return held.rows[first:last]

    def binned(self, channel: str, fields: Sequence[str], t0: int, t1: int, step_ns: int) -> Rows:
        """As the view below gives it."""
        return self._view.binned(channel, fields, t0, t1, step_ns)

    def extremes(self, channel: str, fields: Sequence[str], t0: int, t1: int) -> Rows | None:
        """As the view below gives it."""
        return self._view.extremes(channel, fields, t0, t1)

    def latest(self, channel: str, t: int, lookback_ns: int) -> Rows:
        """As the view below gives it."""
        return self._view.latest(channel, t, lookback_ns)
