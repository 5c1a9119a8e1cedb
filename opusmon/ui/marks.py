"""What is worth jumping to: marks of the recording and events of the channels, on one list. Pure."""

from __future__ import annotations

from typing import NamedTuple

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


class Place(NamedTuple):
    """An instant worth finding again: monotonic ns, a kind of `widgets.timeline.MARKS`, and a text from outside."""

    t: int
    kind: str
    text: str


def places(window: Window) -> list[Place]:
    """All of them, in time order."""
    found = [Place(mark.t0, mark.kind, mark.text) for mark in window.marks()]
    found.extend(_events(window, window.t0 - 1, window.t1))
    return sorted(found)


def _events(view: View, t0: int, t1: int) -> list[Place]:
    rows = view.query("gpu_event", t0, t1)
    out: list[Place] = []
    for row in rows:
        kind = EVENT_KINDS.get(view.strings.text(row["kind"]))
        if kind is not None:
            out.append(Place(int(row["t"]), kind, f"GPU {row['gpu']}: {view.strings.text(row['detail'])}"))
    return out


def neighbour(found: list[Place], t: int, direction: int) -> Place | None:
    """The next place after `t` (direction +1) or the last one before it (-1)."""
    if direction > 0:
        return next((place for place in found if place.t > t), None)
    return next((place for place in reversed(found) if place.t < t), None)
