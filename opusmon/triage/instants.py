"""Conditions over sliding windows, judged at fixed instants of absolute time.

An instant is a multiple of its step and is judged by the rows of its own window alone, so the same instants say the
same wherever a look begins or ends. A finding is a run of instants; its words are those of the worst of them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from opusmon.channels import BY_NAME
from opusmon.clock import NS
from opusmon.schema import Rows, conform
from opusmon.text import printable
from opusmon.triage.episodes import Flags, Times
from opusmon.triage.finding import Evidence, Finding
from opusmon.triage.scene import Scene
from opusmon.triage.sustained import sustained

Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]
T = TypeVar("T")

STEP_NS = 5 * NS
WINDOW_NS = 60 * NS
"""What "in a minute" means; rules over it look back twice as far."""
SETTLED_NS = 10 * NS
"""Rows of a time this long ago have all come in."""


def instants(scene: Scene, step_ns: int = STEP_NS, end: int | None = None) -> Times:
    """Multiples of a step after `scene.t0` up to `scene.t1`, or up to `end`, shape (n,), monotonic ns."""
    last = scene.t1 if end is None else end
    return np.arange(scene.t0 // step_ns + 1, last // step_ns + 1, dtype=np.int64) * step_ns


def parts(
    scene: Scene, channel: str, keys: tuple[str, str], lookback_ns: int = 0
) -> Iterator[tuple[tuple[int, int], Rows]]:
    """Rows of a channel, in the columns of this version, by two text fields; of a single pair there is no copy."""
    rows = conform(scene.rows(channel, lookback_ns), BY_NAME[channel])
    yield from split(rows, keys)


def split(rows: Rows, keys: tuple[str, str]) -> Iterator[tuple[tuple[int, int], Rows]]:
    """Rows by two text fields, in time order each."""
    if not len(rows):
        return
    code = rows[keys[0]].astype(np.int64) << 32 | rows[keys[1]].astype(np.int64)
    if bool(np.all(code == code[0])):
        yield (int(code[0]) >> 32, int(code[0]) & 0xFFFFFFFF), rows
        return
    for one in np.unique(code).tolist():
        yield (one >> 32, one & 0xFFFFFFFF), rows.compress(code == one)


def said(scene: Scene, text_id: int, most: int = 64) -> str:
    """Text from outside, printable and short."""
    return printable(scene.text(text_id)[:most])


def request_source(scene: Scene, key: tuple[int, int]) -> str:
    """`proxy (sent upstream)`: who saw the requests, and where its clocks start."""
    source, start = said(scene, key[0]) or "?", said(scene, key[1])
    return f"{source} ({start})" if start else source


def engine_source(scene: Scene, key: tuple[int, int]) -> str:
    """`engine 127.0.0.1:8000/metrics llama-70b`."""
    return " ".join(filter(None, ("engine", said(scene, key[0]), said(scene, key[1]))))


class Windows:
    """The rows of a window before each instant.

    Args:
        rows_t: times of the rows, ascending, shape (m,).
        t: instants, shape (n,).
        window_ns: rows with instant - window < row t <= instant are in it.

    Attributes:
        first: index of the first row of each window, shape (n,).
        end: and of the row after its last one.
    """

    def __init__(self, rows_t: Times, t: Times, window_ns: int = WINDOW_NS) -> None:
        self.first = np.searchsorted(rows_t, t - window_ns, side="right")
        self.end = np.searchsorted(rows_t, t, side="right")

    def sum(self, values: Floats | Flags) -> Floats:
        """Sum of a column over each window, shape (n,); NaN count as nothing."""
        total = np.concatenate(([0.0], np.cumsum(np.nan_to_num(values.astype(np.float64), nan=0.0))))
        return total[self.end] - total[self.first]

    def slice(self, place: int) -> slice:
        """The rows of one window."""
        return slice(int(self.first[place]), int(self.end[place]))


# Not one class with `sustained.Spell`: that one is about a row, which an instant has none of, and leaves out evidence
# that is missing, because a GPU does not have every field. Here a missing number is said (null): of requests that are
# not streamed there is no TTFT to compare.
@dataclass(frozen=True, slots=True)
class Spell:
    """A run of instants at which a condition held.

    Attributes:
        t0: first row that speaks for it, monotonic ns.
        t1: last one.
        open: it held at the last instant there was.
        place: index of the worst instant, of equals the latest.
        weight: how bad that one is.
    """

    t0: int
    t1: int
    open: bool
    place: int
    weight: float

    def finding(
        self,
        rule: str,
        subject: str,
        severity: int,
        *,
        title: str,
        evidence: tuple[Evidence, ...],
        cause: str,
        next: str,  # noqa: A002  (the field's name)
    ) -> Finding:
        """A finding over this run, shown by the latency pane."""
        return Finding(
            rule,
            subject,
            severity,
            self.t0,
            self.t1,
            title,
            evidence,
            cause,
            next,
            "latency",
            self.open,
            self.weight,
        )


def runs(
    scene: Scene, t: Times, on: Flags, weight: Floats, hits: Times, window_ns: int = WINDOW_NS
) -> Iterator[Spell]:
    """Runs of instants at which a condition held.

    Instants whose window has its last hit before the scene are left to the look before: it has seen them.

    Args:
        scene: what is looked at.
        t: instants, a step apart, shape (n,).
        on: the condition holds, shape (n,).
        weight: how bad it is, shape (n,); what a severity is made of must grow with it.
        hits: times of the rows that speak for it, ascending, shape (m,).
        window_ns: how far back each instant looks for them.
    """
    if not on.any() or not len(hits):
        return
    last = np.searchsorted(hits, t, side="right") - 1
    first = np.searchsorted(hits, t - window_ns, side="right")
    on = on & (last >= first) & (hits[np.maximum(last, 0)] > scene.t0)
    step_ns = int(t[1] - t[0]) if len(t) > 1 else STEP_NS
    for one in sustained(t, on, gap_ns=step_ns):
        worst = weight[one.slice]
        place = one.last - int(np.argmax(worst[::-1]))
        t0 = max(int(hits[first[one.first]]), scene.t0)
        yield Spell(t0, int(hits[last[one.last]]), one.open, place, float(weight[place]))


class Memo(threading.local, Generic[T]):
    """What was found at an instant of one view at a time: minutes that have settled are fitted once, not each second.

    Each thread has its own.

    Args:
        compute: what to find at an instant; it reads rows up to it only.
        most: entries kept.
    """

    def __init__(self, compute: Callable[[Scene, int], T], most: int = 512) -> None:
        self._compute = compute
        self._most = most
        self._view: weakref.ref[object] | None = None
        self._held: dict[int, T] = {}

    def at(self, scene: Scene, t: int) -> T:
        """What was found at `t`, at least `SETTLED_NS` before the end of the scene."""
        if self._view is None or self._view() is not scene.view:
            self._view, self._held = weakref.ref(scene.view), {}
        if t not in self._held:
            if len(self._held) >= self._most:
                self._held.pop(next(iter(self._held)))
            self._held[t] = self._compute(scene, t)
        return self._held[t]


class Last(threading.local, Generic[T]):
    """What was found in the last scene of all, for rules that share it.

    Each thread has its own.

    Args:
        compute: what to find in a scene.
        channels: what it reads; another number of rows in the scene is another scene.
    """

    def __init__(self, compute: Callable[[Scene], T], *channels: str) -> None:
        self._compute = compute
        self._channels = channels
        self._held: tuple[weakref.ref[object], tuple[object, ...], T] | None = None

    def of(self, scene: Scene) -> T:
        """What is found in a scene: the last one again when view, range, limits and number of rows are the same."""
        rows = tuple(len(scene.rows(channel)) for channel in self._channels)
        about = (scene.t0, scene.t1, dict(scene.limits), rows)
        held = self._held
        if held is None or held[0]() is not scene.view or held[1] != about:
            held = self._held = (weakref.ref(scene.view), about, self._compute(scene))
        return held[2]


def window_rows(scene: Scene, channel: str, t: int, window_ns: int) -> Rows:
    """Rows with t - window < row t <= t, in the columns of this version; read once per scene."""
    rows = conform(scene.rows(channel, window_ns), BY_NAME[channel])
    first, end = np.searchsorted(rows["t"], (t - window_ns, t), side="right")
    return rows[first:end]
