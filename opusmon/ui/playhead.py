"""The instant shown, and how it moves: with now, at a speed, or by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from opusmon.clock import NS

SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 60.0)


class Mode(Enum):
    """What moves the playhead."""

    TRACK = "track"
    """It is the newest instant there is."""
    PLAY = "play"
    """It advances at a speed."""
    PAUSE = "pause"
    """It stays where it was put."""


@dataclass
class Playhead:
    """The playhead of a session.

    Attributes:
        now: a monotonic clock in ns; it only paces playing.
        begin: the oldest instant that can be shown.
        edge: the newest one.
        follows: the session grows, so that the playhead can track its edge.
        speed: session seconds per second while playing.
    """

    now: Callable[[], int]
    begin: Callable[[], int]
    edge: Callable[[], int]
    follows: bool
    speed: float = 1.0
    mode: Mode = Mode.PAUSE
    _t: int = 0
    _since: int = 0

    def __post_init__(self) -> None:
        self._t = self.begin()
        self.resume()

    @property
    def t(self) -> int:
        """The instant shown, monotonic ns. Playing stops by itself at the end."""
        if self.mode is Mode.TRACK:
            return self.edge()
        if self.mode is Mode.PLAY:
            t = self._t + int((self.now() - self._since) * self.speed)
            if t < self.edge():
                return t
            self._t, self.mode = self.edge(), Mode.PAUSE
        return self._t

    def pause(self) -> None:
        """Stay here."""
        self._t, self.mode = self.t, Mode.PAUSE

    def resume(self) -> None:
        """Go on: back to the edge of a growing session, else play from here (from the start, at the end)."""
        if self.follows:
            self.mode = Mode.TRACK
            return
        if self._t >= self.edge():
            self._t = self.begin()
        self._since, self.mode = self.now(), Mode.PLAY

    def toggle(self) -> None:
        """Pause, or resume."""
        if self.mode is Mode.PAUSE:
            self.resume()
        else:
            self.pause()

    def seek(self, t: int) -> None:
        """Move to an instant, kept inside the session. Tracking becomes paused; playing plays on from there."""
        t = max(self.begin(), min(t, self.edge()))
        if self.mode is Mode.TRACK:
            self.mode = Mode.PAUSE
        self._t, self._since = t, self.now()

    def set_speed(self, speed: float) -> None:
        """Play at another speed from here on."""
        if self.mode is Mode.PLAY:
            self._t, self._since = self.t, self.now()
        self.speed = speed

    def faster(self, direction: int) -> None:
        """The next speed up (+1) or down (-1)."""
        place = min(range(len(SPEEDS)), key=lambda i: abs(SPEEDS[i] - self.speed))
        self.set_speed(SPEEDS[max(0, min(place + direction, len(SPEEDS) - 1))])

    def behind_ns(self) -> int:
        """How far the instant shown lies before the newest one."""
        return max(0, self.edge() - self.t)


SAMPLE_GAP_NS = 100_000_000
"""Rows closer than this are one sample: each GPU of a tick is read a little after the one before it."""


def next_sample(step: Callable[[int, int], int | None], t: int, direction: int) -> int | None:
    """Time of the next (+1) or previous (-1) sample, by its last row; None when there is none.

    Args:
        step: gives the time of the row after (+1) or before (-1) a time.
        t: where to start, monotonic ns.
        direction: +1 or -1.
    """
    if direction > 0:
        found = step(t, 1)
        # The rest of the sample shown is not the next one.
        while found is not None and found - t < SAMPLE_GAP_NS:
            t, found = found, step(found, 1)
        return _last_of(step, found)
    found = step(t, -1)
    while found is not None and t - found < SAMPLE_GAP_NS:
        t, found = found, step(found, -1)
    return found


def _last_of(step: Callable[[int, int], int | None], t: int | None) -> int | None:
    while t is not None:
        following = step(t, 1)
        if following is None or following - t >= SAMPLE_GAP_NS:
            return t
        t = following
    return None


SPANS_NS = tuple(s * NS for s in (10, 30, 60, 300, 900, 1800, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 24 * 3600))
"""The time spans that `+` and `-` go through; the whole session is one more, beyond the last that fits in it."""


def next_span(span_ns: int, whole_ns: int, direction: int) -> int:
    """The next longer (+1) or shorter (-1) span; the longest is the whole session."""
    spans = [span for span in SPANS_NS if span < whole_ns] or [SPANS_NS[0]]
    if whole_ns > spans[-1]:
        spans.append(whole_ns)
    if direction > 0:
        return next((span for span in spans if span > span_ns), spans[-1])
    return next((span for span in reversed(spans) if span < span_ns), spans[0])
