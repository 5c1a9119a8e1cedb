"""What a rule looks at: a view, a range of time, and the limits in force. The same live, in replay and over a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from opusmon.clock import NS
from opusmon.schema import Rows
from opusmon.triage.finding import Finding
from opusmon.triage.limits import LIMITS
from opusmon.window import Readable


class View(Readable, Protocol):
    """What rules may read; `opusmon.window.Window` is one, a recording another."""

    def latest(self, channel: str, t: int, lookback_ns: int) -> Rows:
        """The newest row of each series with t - lookback_ns < row t <= t."""
        ...

    def extremes(self, channel: str, fields: Sequence[str], t0: int, t1: int) -> Rows | None:
        """Summaries as `binned` gives them that cover all rows with t0 < t <= t1 and perhaps more; None without any."""
        ...


SUMMED_NS = 500 * NS
"""In shorter ranges summaries of ten minutes rule little out."""

_NO_ROWS: Rows = np.empty(0, dtype=[("t", "<i8")])


def _split(rows: Rows, keys: tuple[str, ...]) -> Iterator[tuple[tuple[int, ...], Rows]]:
    """Rows by the values of their key fields, in the order of those values."""
    if not len(rows) or not set(keys) <= set(rows.dtype.names or ()):
        return
    columns = np.stack([rows[key].astype(np.int64) for key in keys])
    order = np.lexsort(columns[::-1])
    placed = columns[:, order]
    edges = np.flatnonzero((placed[:, 1:] != placed[:, :-1]).any(axis=0)) + 1
    parts = np.split(rows.take(order), edges)  # far quicker than `rows[order]`
    for value, part in zip(placed[:, [0, *edges]].T.tolist(), parts, strict=True):
        yield tuple(value), part


@dataclass
class Scene:
    """One look of the rules at a range. Rows that several rules ask for are read once.

    Attributes:
        view: what was measured.
        t0: rows after this time count.
        t1: up to this one.
        limits: thresholds by name; see `opusmon.triage.limits`.
    """

    view: View
    t0: int
    t1: int
    limits: Mapping[str, float] = field(default_factory=lambda: {k: v.value for k, v in LIMITS.items()})
    _rows: dict[tuple[str, int], Rows] = field(default_factory=dict, repr=False)
    _series: dict[tuple[str, tuple[str, ...], int], list[tuple[tuple[int, ...], Rows]]] = field(
        default_factory=dict, repr=False
    )

    def rows(self, channel: str, lookback_ns: int = 0) -> Rows:
        """Rows of a channel in the range, in time order; empty where the session has none.

        Args:
            channel: its name.
            lookback_ns: also rows up to so long before the range.
        """
        key = (channel, lookback_ns)
        if key not in self._rows:
            known = channel in self.view.channels
            self._rows[key] = self.view.query(channel, self.t0 - lookback_ns, self.t1) if known else _NO_ROWS
        return self._rows[key]

    def series(
        self, channel: str, *keys: str, lookback_ns: int = 0
    ) -> Iterator[tuple[tuple[int, ...], Rows]]:
        """Rows of a channel by the values of the key fields named, in time order each.

        Nothing is given where the session's channel lacks one of those fields.
        """
        asked = (channel, keys, lookback_ns)
        if asked not in self._series:
            self._series[asked] = list(_split(self.rows(channel, lookback_ns), keys))
        yield from self._series[asked]

    def extremes(self, channel: str, *fields: str) -> Rows | None:
        """Summaries of all rows in the range and perhaps of some around it: what they rule out need not be read.

        Columns `{f}_min` and `{f}_max`, by series. None for a short range, for rows that were read already, and where a
        recording does not have them.
        """
        if self.t1 - self.t0 < SUMMED_NS or (channel, 0) in self._rows or channel not in self.view.channels:
            return None
        return self.view.extremes(channel, fields, self.t0, self.t1)

    def stays_below(self, channel: str, **limits: float) -> bool:
        """Whether it is certain that no row of the range reaches one of the limits, by field, without reading them."""
        told = self.extremes(channel, *limits)
        return told is not None and not any(
            (told[f"{name}_max"] >= least).any() for name, least in limits.items()
        )

    def never_grows(self, channel: str, *fields: str) -> bool:
        """Whether it is certain that no series has two values of one of these fields in the range, without reading rows."""
        if channel not in self.view.channels:
            return True
        told = self.extremes(channel, *fields)
        if told is None:
            return False
        place, key = np.zeros(len(told), np.intp), list(self.view.channels[channel].key)
        if key:
            _, place = np.unique(told[key], return_inverse=True)
        for name in fields:
            low, high = np.full(len(told), np.inf), np.full(len(told), -np.inf)
            np.fmin.at(low, place, told[f"{name}_min"])
            np.fmax.at(high, place, told[f"{name}_max"])
            if (high > low).any():
                return False
        return True

    def text(self, text_id: Any) -> str:
        """Text of an id in the rows."""
        return self.view.strings.text(int(text_id))

    def texts(self, ids: Sequence[int] | Rows) -> list[str]:
        """Texts of many ids."""
        return [self.text(one) for one in ids]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule.

    Attributes:
        name: public name, snake_case.
        find: the function; it yields findings whose ranges lie within the scene.
        channels: what it reads; it is not run where none of them has rows.
        lookback_ns: how far before "now" it has to look when it runs live.
        join_ns: findings of it closer than this are one.
        help: what it says, in one sentence: the first line of its docstring.
        quiet: whether it is certain that nothing is found, told without reading rows; see `Scene.extremes`.
    """

    name: str
    find: Callable[[Scene], Iterator[Finding]]
    channels: tuple[str, ...]
    lookback_ns: int
    join_ns: int
    help: str
    quiet: Callable[[Scene], bool] = lambda _: False


RULES: dict[str, Rule] = {}
"""Every rule by name; filled by `rule` as the modules named in `opusmon.triage.run` are imported."""

Find = Callable[[Scene], Iterator[Finding]]


def rule(
    *channels: str,
    lookback_s: float = 120,
    join_s: float = 10,
    quiet: Callable[[Scene], bool] = lambda _: False,
) -> Callable[[Find], Find]:
    """Register a function as a rule under its own name.

    Args:
        channels: what it reads.
        lookback_s: how far before now it looks live, in s.
        join_s: findings closer than this are one, in s.
        quiet: whether summaries rule out that it finds something.
    """

    def register(function: Find) -> Find:
        summary = (function.__doc__ or "").strip().splitlines()[0]
        RULES[function.__name__] = Rule(
            function.__name__, function, channels, int(lookback_s * NS), int(join_s * NS), summary, quiet
        )
        return function

    return register


def gap_ns(rows: Rows, least_ns: int = 3 * NS, intervals: float = 3.0) -> int:
    """Longest time between samples that is no gap: three of their intervals, at least 3 s."""
    if not len(rows) or "dt_ns" not in (rows.dtype.names or ()):
        return least_ns
    middle = len(rows) // 2
    return max(least_ns, int(intervals * float(np.partition(rows["dt_ns"], middle)[middle])))
