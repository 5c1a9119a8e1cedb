"""What is worth jumping to: marks of the recording and events of the channels, on one list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from opusmon.channels import ENGINE, GPU_EVENT, STALL
from opusmon.clock import NS
from opusmon.schema import Rows, conform
from opusmon.triage.finding import Finding
from opusmon.triage.severity import distinct
from opusmon.ui.findings import KINDS
from opusmon.ui.panes.base import View
from opusmon.ui.panes.latency_read import binned, read
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
"""Stalls of one kind, and restarts of one engine, in the same ten seconds are one mark: one thing to go to."""
MOST = 1000
"""Most marks of stalls, and of restarts: the newest ones. An address that leads to several engines in turn has a
restart with each scrape."""
NEAR_NS = 600 * NS
"""Up to this range rows are read as they are; in a wider one the ten minutes that have no mark are skipped."""

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
        self._restarts: list[Place] = []
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

        def grown(places: list[Place], find: Callable[[View, int, int], list[Place]]) -> list[Place]:
            kept = [place for place in places if window.t0 <= place.t <= begin]
            return kept + find(window, begin, window.t1)

        self._events = grown(self._events, _events)
        self._stalls = grown(self._stalls, _stalls)[-MOST:]
        self._restarts = grown(self._restarts, _restarts)[-MOST:]
        self._until = window.t1
        marks = (Place(m.t0, m.kind, m.text) for m in window.marks())
        self._all = sorted([*self._events, *self._stalls, *self._restarts, *self._found, *marks])
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

    def bins() -> Rows:
        found = view.binned(STALL.name, [], t0, t1, NEAR_NS)
        return found[np.isin(found["kind"], list(_kinds(view, found, STALL_KINDS)))] if len(found) else found

    return _newest(
        _ranges(t0, t1, bins),
        lambda begin, end: _folded(view, conform(view.query(STALL.name, begin, end), STALL)),
    )


def _restarts(view: View, t0: int, t1: int) -> list[Place]:
    """Marks of engines that were started anew, folded, in time order."""

    def bins() -> Rows:
        found = binned(view, ENGINE, ["restarts"], t0, t1, NEAR_NS)
        return found[found["restarts_max"] > 0] if len(found) else found

    return _newest(_ranges(t0, t1, bins), lambda begin, end: _restarted(view, read(view, ENGINE, begin, end)))


def _newest(ranges: Iterable[tuple[int, int]], find: Callable[[int, int], Iterable[Place]]) -> list[Place]:
    """The newest places in ranges that come newest first, in time order; no more ranges are read than it takes."""
    found: list[Place] = []
    for begin, end in ranges:
        found.extend(find(begin, end))
        if len(found) >= MOST:
            break
    return sorted(found)[-MOST:]


def _ranges(t0: int, t1: int, bins: Callable[[], Rows]) -> Iterator[tuple[int, int]]:
    """The parts of a range in which there are marks, newest first: all of a short one, else those of its bins."""
    if t1 - t0 <= NEAR_NS:
        yield t0, t1
        return
    for start in np.unique(bins()["t"])[::-1].tolist():
        yield max(start - 1, t0), min(start + NEAR_NS - 1, t1)


def _folded(view: View, rows: Rows) -> Iterator[Place]:
    """One mark for the failed captures, and one for the compilations, of each ten seconds: the first of them."""
    for number, mark in _kinds(view, rows, STALL_KINDS).items():
        own = rows[rows["kind"] == number]
        if mark == "capture":
            own = own[~np.isnan(own["code"]) & (own["code"] != 0)]
        for first, more in _folds(own):
            yield Place(int(first["t"][0]), mark, f"{_stall_words(view, first, mark)}{more}", "stalls")


def _restarted(view: View, rows: Rows) -> Iterator[Place]:
    """One mark for each engine and ten seconds in which its counters began anew: at the first scrape after it."""
    rows = rows[rows["restarts"] > 0]
    for number in distinct(rows["engine"]):
        # An engine has a row for each model it serves.
        own = rows[rows["engine"] == number]
        own = own[np.unique(own["t"], return_index=True)[1]]
        words = f"engine {view.strings.text(number)} restarted"
        for first, more in _folds(own):
            yield Place(int(first["t"][0]), "restart", f"{words}{more}", "latency")


def _folds(rows: Rows) -> Iterator[tuple[Rows, str]]:
    """The first row of each ten seconds, shape (1,), and how many more there are, in words."""
    _, first, count = np.unique(rows["t"] // FOLD_NS, return_index=True, return_counts=True)
    for place, many in zip(first.tolist(), count.tolist(), strict=True):
        yield rows[place : place + 1], f", and {many - 1} more in {FOLD_NS // NS} s" if many > 1 else ""


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
