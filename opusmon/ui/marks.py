"""What is worth jumping to: marks of the recording and events of the channels, on one list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from opusmon.channels import GPU_EVENT, STALL
from opusmon.clock import NS
from opusmon.schema import Rows, conform
from opusmon.triage.finding import Finding
from opusmon.triage.severity import distinct
from opusmon.ui.findings import KINDS
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

STALL_KINDS = {"capture": "capture", "jit": "jit"}
"""Stalls that are marks: graph captures that failed, and compilations. The others are the stalls pane's."""

FOLD_NS = 10 * NS
"""Stalls of one kind in the same ten seconds are one mark: a compile storm is one thing to go to."""
MAX_STALLS = 1000
"""Most marks of stalls, the newest ones."""
NEAR_NS = 600 * NS
"""Up to this range stalls are read as they are; in a wider one the ten minutes without such stalls are skipped."""

_OVERLAP_NS = 60 * NS
"""Events may come late: the last minute is read again."""


class Place(NamedTuple):
    """An instant worth finding again.

    Attributes:
        t: monotonic ns.
        kind: a key of `widgets.timeline.MARKS`; any other shows as `*`.
        text: from outside.
        pane: name of the pane that shows it best; "" for what is of the whole session: bookmarks, gaps, drops.
        dur_ns: how long it lasts from there; 0 for what has no length.
    """

    t: int
    kind: str
    text: str = ""
    pane: str = ""
    dur_ns: int = 0


class Places:
    """The places of a session, in time order; reads only what came since the last time.

    Args:
        window: of the session.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._events: list[Place] = []
        self._stalls: list[Place] = []
        self._until: int | None = None
        self._version = -1
        self._all: list[Place] = []
        self._found: list[Place] = []
        self._found_version = 0

    def found(self, findings: Sequence[Finding], version: int) -> None:
        """What the rules have found are places too, where their evidence begins.

        Args:
            findings: all of them.
            version: as long as it stays, so do they.
        """
        if version != self._found_version:
            self._found_version = version
            self._found = [
                Place(one.t0, KINDS[one.severity], f"{one.title}: {one.next}", one.pane, one.t1 - one.t0)
                for one in findings
            ]
            self._version = -1

    def update(self) -> list[Place]:
        """All places there are now."""
        window = self._window
        if window.version == self._version:
            return self._all
        self._version = window.version
        begin = window.t0 - 1 if self._until is None else max(window.t0 - 1, self._until - _OVERLAP_NS)
        begin = (
            begin // FOLD_NS * FOLD_NS - 1
        )  # whole folds, so that they do not depend on when they were read
        kept = [place for place in self._events if window.t0 <= place.t <= begin]
        self._events = kept + _events(window, begin, window.t1)
        kept = [place for place in self._stalls if window.t0 <= place.t <= begin]
        self._stalls = (kept + _stalls(window, begin, window.t1))[-MAX_STALLS:]
        self._until = window.t1
        marks = (Place(m.t0, m.kind, m.text) for m in window.marks())
        self._all = sorted([*self._events, *self._stalls, *self._found, *marks])
        return self._all


def _kinds(view: View, rows: Rows, marks: dict[str, str]) -> dict[int, str]:
    """The kinds of mark by the text ids of the rows' kinds that are marks."""
    names = {number: view.strings.text(number) for number in distinct(rows["kind"])}
    return {number: marks[name] for number, name in names.items() if name in marks}


def _events(view: View, t0: int, t1: int) -> list[Place]:
    rows = view.query(GPU_EVENT.name, t0, t1)
    if not len(rows):
        return []
    kinds = _kinds(view, rows, EVENT_KINDS)
    rows = rows[np.isin(rows["kind"], list(kinds))]
    return [
        Place(
            int(row["t"]),
            kinds[int(row["kind"])],
            f"GPU {row['gpu']}: {view.strings.text(row['detail'])}",
            "gpu",
        )
        for row in rows
    ]


def _stalls(view: View, t0: int, t1: int) -> list[Place]:
    """Marks of the stalls of a range, folded, in time order."""
    if STALL.name not in view.channels:
        return []
    found: list[Place] = []
    for begin, end in _ranges(view, t0, t1):
        found.extend(_folded(view, conform(view.query(STALL.name, begin, end), STALL)))
        if len(found) >= MAX_STALLS:
            break
    return sorted(found)[-MAX_STALLS:]


def _ranges(view: View, t0: int, t1: int) -> Iterator[tuple[int, int]]:
    """The parts of a range in which there are stalls that are marks, newest first."""
    if t1 - t0 <= NEAR_NS:
        yield t0, t1
        return
    bins = view.binned(STALL.name, [], t0, t1, NEAR_NS)
    if not len(bins):
        return
    bins = bins[np.isin(bins["kind"], list(_kinds(view, bins, STALL_KINDS)))]
    for start in np.unique(bins["t"])[::-1].tolist():
        yield max(start - 1, t0), min(start + NEAR_NS - 1, t1)


def _folded(view: View, rows: Rows) -> Iterator[Place]:
    """One mark for the failed captures, and one for the compilations, of each ten seconds: the first of them."""
    for number, mark in _kinds(view, rows, STALL_KINDS).items():
        own = rows[rows["kind"] == number]
        if mark == "capture":
            own = own[~np.isnan(own["code"]) & (own["code"] != 0)]
        _, first, count = np.unique(own["t"] // FOLD_NS, return_index=True, return_counts=True)
        for place, many in zip(first.tolist(), count.tolist(), strict=True):
            more = f", and {many - 1} more in {FOLD_NS // NS} s" if many > 1 else ""
            words = f"{_stall_words(view, own[place : place + 1], mark)}{more}"
            yield Place(int(own["t"][place]), mark, words, "stalls")


def _stall_words(view: View, row: Rows, mark: str) -> str:
    """`vllm: capture failed, 901 by cuMemAlloc_v2`, `vllm: jit ptxas`."""
    text = view.strings.text
    process, call, by_call = (text(row[name][0]) for name in ("process", "call", "by_call"))
    if mark == "jit":
        return f"{process}: jit {call}"
    return f"{process}: capture failed, {row['code'][0]:.0f}" + (f" by {by_call}" if by_call else "")


def by_pane(places: Iterable[Place], panes: Iterable[str]) -> dict[str, list[Place]]:
    """The places of each of these panes, in their order; under "" those of no pane, or of another one."""
    found: dict[str, list[Place]] = {"": [], **{pane: [] for pane in panes}}
    rest = found[""]
    for place in places:
        found.get(place.pane, rest).append(place)
    return found


def neighbour(found: list[Place], t: int, direction: int) -> Place | None:
    """The next place after `t` (direction +1) or the last one before it (-1)."""
    if direction > 0:
        return next((place for place in found if place.t > t), None)
    return next((place for place in reversed(found) if place.t < t), None)
