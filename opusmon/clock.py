"""The session clock: CLOCK_MONOTONIC nanoseconds, and anchors that turn them into wall time for display."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

NS = 1_000_000_000
ANCHOR_EVERY_NS = 60 * NS
STEP_NS = 1_000_000
"""An offset change of more than 1 ms between checks 1 s apart is a step: NTP slews at most 0.5 ms/s."""


@dataclass(frozen=True, slots=True, order=True)
class Anchor:
    """One reading of both clocks.

    Attributes:
        t: CLOCK_MONOTONIC ns.
        wall_ns: CLOCK_REALTIME ns at that instant.
        step_ns: how far wall time had jumped since the previous anchor, 0 when it had not.
    """

    t: int
    wall_ns: int
    step_ns: int = 0

    @property
    def offset_ns(self) -> int:
        """Wall minus monotonic."""
        return self.wall_ns - self.t


class Clock(Protocol):
    """What needs "now" takes one of these."""

    def now(self) -> int:
        """CLOCK_MONOTONIC ns."""
        ...

    def anchor(self) -> Anchor:
        """Read both clocks."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> int:
        """CLOCK_MONOTONIC ns."""
        return time.monotonic_ns()

    def anchor(self) -> Anchor:
        """Read both clocks; of five tries the one with the narrowest bracket (0.5-3 us) counts."""
        best: tuple[int, Anchor] | None = None
        for _ in range(5):
            before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
            width = after - before
            if best is None or width < best[0]:
                best = (width, Anchor(before + width // 2, wall))
        assert best is not None  # noqa: S101  (the loop ran)
        return best[1]


class ManualClock:
    """A clock that moves when told to, for replays and tests.

    Args:
        t: CLOCK_MONOTONIC ns at the start.
        wall_ns: CLOCK_REALTIME ns at the start.
    """

    def __init__(self, t: int = 0, wall_ns: int = 0) -> None:
        self.t = t
        self.wall_ns = wall_ns

    def now(self) -> int:
        """The time set last."""
        return self.t

    def anchor(self) -> Anchor:
        """Both readings set last."""
        return Anchor(self.t, self.wall_ns)

    def advance(self, ns: int) -> None:
        """Move both clocks forward."""
        self.t += ns
        self.wall_ns += ns


class Anchors:
    """The anchors of a session, in time order, and the conversions they allow."""

    def __init__(self, anchors: Iterable[Anchor] = ()) -> None:
        self._anchors = sorted(anchors)
        self._reading = self.last

    def __len__(self) -> int:
        return len(self._anchors)

    def __iter__(self) -> Iterator[Anchor]:
        return iter(self._anchors)

    @property
    def last(self) -> Anchor | None:
        """The newest anchor."""
        return self._anchors[-1] if self._anchors else None

    def add(self, anchor: Anchor) -> None:
        """Append an anchor read later than the others."""
        self._anchors.append(anchor)

    def observe(self, reading: Anchor) -> Anchor | None:
        """The anchor to keep for this reading, if it is due (every 60 s) or wall time has stepped."""
        before, self._reading = self._reading, reading
        last = self.last
        if before is None or last is None:
            return reading
        step = reading.offset_ns - before.offset_ns
        if abs(step) > STEP_NS * max(1, (reading.t - before.t) // NS):
            return Anchor(reading.t, reading.wall_ns, step)
        return reading if reading.t - last.t >= ANCHOR_EVERY_NS else None

    def wall(self, t: int) -> int:
        """CLOCK_REALTIME ns at monotonic `t`, by the last anchor at or before it (the first one for earlier t).

        Without anchors the answer is `t` itself: 1970 plus the uptime.
        """
        if not self._anchors:
            return t
        place = bisect_right(self._anchors, t, key=lambda anchor: anchor.t)
        return t + self._anchors[max(place - 1, 0)].offset_ns

    def monotonic(self, wall_ns: int) -> int:
        """Monotonic ns at a wall time: the last stretch of the session that held it, else the nearest one."""
        if not self._anchors:
            return wall_ns
        for anchor in reversed(self._anchors):
            if wall_ns >= anchor.wall_ns:
                return wall_ns - anchor.offset_ns
        return wall_ns - self._anchors[0].offset_ns
