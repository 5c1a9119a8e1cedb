"""What collectors say of themselves, for the panes: the `status` rows in force, and the line about the worst of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opusmon.channels import KEYFRAME_NS
from opusmon.clock import NS
from opusmon.collectors.base import LEFT_OUT, UNASKED
from opusmon.triage.severity import distinct
from opusmon.ui.panes.base import View, has
from opusmon.ui.panes.waiting import NO_DATA, WaitingPane
from opusmon.ui.text import Line, clean, line_cells, shorten

STATUS_LOOKBACK_NS = KEYFRAME_NS + 5 * NS
"""What holds is said again every `KEYFRAME_NS`."""
ALL_KEY = "w"
"""Shows them all."""
WRONG_RANK = 3
"""Up to this one something is broken or kept from us; the states after it are limits."""

_STATES = ("error", "unavailable", "restarting", "no_permission", "stale")
"""States that explain what is missing, most important first; the others are limits."""
_FIELDS = ("collector", "channel", "field", "scope", "state", "reason", "remedy")


@dataclass(frozen=True, slots=True)
class Status:
    """A `status` row in words; see `opusmon.channels.STATUS`."""

    collector: str
    channel: str
    field: str
    scope: str
    state: str
    reason: str
    remedy: str

    @property
    def is_ok(self) -> bool:
        """Nothing is wrong."""
        return self.state == "ok"

    @property
    def is_whole(self) -> bool:
        """It is about the collector, not about one of its values."""
        return not (self.channel or self.field or self.scope)

    @property
    def is_unasked(self) -> bool:
        """The collector does not run because nobody wanted it to."""
        return self.reason.startswith((UNASKED, LEFT_OUT))

    @property
    def rank(self) -> int:
        """Place in order of importance, 0 first."""
        return _STATES.index(self.state) if self.state in _STATES else len(_STATES)

    @property
    def why(self) -> str:
        """The reason, the state where none is given."""
        return self.reason or self.state

    @property
    def text(self) -> str:
        """Why, and of what: `pid 42 launches: not counted`."""
        where = " ".join(word for word in (self.scope, self.field) if word)
        return f"{where}: {self.why}" if where else self.why


def read_statuses(view: View, t: int, *collectors: str) -> tuple[Status, ...]:
    """What these collectors say at `t`, all of them when none is named: each as a whole first, then by channel.

    Args:
        view: where to look.
        t: the playhead, monotonic ns.
        collectors: their names; other rows are left out.
    """
    rows = view.latest("status", t, STATUS_LOOKBACK_NS)
    if not has(rows, *_FIELDS):
        return ()
    text = view.strings.text
    own = [number for number in distinct(rows["collector"]) if not collectors or text(number) in collectors]
    said = [
        Status(*(clean(text(row[name])) for name in _FIELDS)) for row in rows[np.isin(rows["collector"], own)]
    ]
    return tuple(sorted(said, key=lambda one: (one.collector, one.channel, one.field, one.scope)))


def whole(statuses: Sequence[Status]) -> Status | None:
    """What a collector says of itself as a whole; None when it says nothing."""
    return next((status for status in statuses if status.is_whole), None)


def troubles(statuses: Sequence[Status]) -> list[Status]:
    """Those that are not well and say so."""
    return [status for status in statuses if not status.is_ok and status.why]


def waiting(name: str, number: int, shows: Sequence[str], said: Status | None) -> WaitingPane | None:
    """What stands in for a pane without data; None when its collector is well: then that is the news.

    Args:
        name: of the pane.
        number: its key.
        shows: what it would show.
        said: what its collector says as a whole.
    """
    if said is None:
        return WaitingPane(name, number, shows, NO_DATA)
    return None if said.is_ok else WaitingPane(name, number, shows, said.why, said.remedy)


def trouble_line(words: str, remedy: str, others: int, width: int, *, is_wrong: bool) -> Line:
    """`! words (remedy)  +3 more: w`, for the foot of a pane; how many more there are is never cut off.

    Args:
        words: the reason that matters most.
        remedy: what mends it, "" where nothing does.
        others: how many more there are.
        width: most cells.
        is_wrong: something is broken or kept from us; else it is a limit, and drawn quietly.
    """
    line: Line = ((f"! {words}" if is_wrong else words, "warn" if is_wrong else "dim"),)
    if remedy:
        line = (*line, (f" ({remedy})", "key" if is_wrong else "dim"))
    tail: Line = (("  ", ""), (f"+{others} more: ", "dim"), (ALL_KEY, "key")) if others else ()
    return (*shorten(line, width - line_cells(tail)), *tail)
