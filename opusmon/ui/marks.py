"""What is worth jumping to: marks of the recording and events of the channels, on one list."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from opusmon.clock import NS
from opusmon.ui.panes.base import View
from opusmon.window import Window

EVENT_KINDS = {
    "xid": "xid",
    "lost": "critical",
    "unavailable": "critical",
    "recovery": "warning",
    "link_down": "warning",
    "link_errors": "warning",
    "ecc": "warning",
    "remap": "warning",
    "back": "restart",
}
"""GPU events that are marks, and the kind of mark each one is; throttle changes are too many for it."""

_OVERLAP_NS = 60 * NS
"""Events may come late: the last minute is read again."""


class Place(NamedTuple):
    """An instant worth finding again: monotonic ns, a kind of `widgets.timeline.MARKS`, and a text from outside."""

    t: int
    kind: str
    text: str


class Places:
    """The places of a session, in time order; reads only what came since the last time.

    Args:
        window: of the session.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._events: list[Place] = []
        self._until: int | None = None
        self._version = -1
        self._all: list[Place] = []

    def update(self) -> list[Place]:
        """All places there are now."""
        window = self._window
        if window.version == self._version:
            return self._all
        self._version = window.version
        begin = window.t0 - 1 if self._until is None else max(window.t0 - 1, self._until - _OVERLAP_NS)
        kept = [place for place in self._events if window.t0 <= place.t <= begin]
        self._events = kept + _events(window, begin, window.t1)
        self._until = window.t1
        self._all = sorted([*self._events, *(Place(m.t0, m.kind, m.text) for m in window.marks())])
        return self._all


def _events(view: View, t0: int, t1: int) -> list[Place]:
    rows = view.query("gpu_event", t0, t1)
    if not len(rows):
        return []
    kinds = {
        number: EVENT_KINDS.get(view.strings.text(number)) for number in np.unique(rows["kind"]).tolist()
    }
    rows = rows[np.isin(rows["kind"], [number for number, kind in kinds.items() if kind])]
    return [
        Place(
            int(row["t"]),
            kinds[int(row["kind"])] or "",
            f"GPU {row['gpu']}: {view.strings.text(row['detail'])}",
        )
        for row in rows
    ]


def neighbour(found: list[Place], t: int, direction: int) -> Place | None:
    """The next place after `t` (direction +1) or the last one before it (-1)."""
    if direction > 0:
        return next((place for place in found if place.t > t), None)
    return next((place for place in reversed(found) if place.t < t), None)
