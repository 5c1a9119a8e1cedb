"""A pane whose collector did not run in the session shown: the reason is what the session recorded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from opusmon.channels import KEYFRAME_NS
from opusmon.clock import NS
from opusmon.ui.panes.base import Frame, Size
from opusmon.ui.panes.waiting import NO_DATA, WaitingPane
from opusmon.ui.text import Line

_LOOKBACK_NS = KEYFRAME_NS + 5 * NS


@lru_cache(maxsize=16)
def _drawn(pane: WaitingPane, size: Size) -> list[Line]:
    """The lines of a pane that says the same thing every second: wrapped once."""
    return pane.lines(size)


@dataclass(frozen=True)
class AwaitedPane:
    """Finds its collector's newest `status` row at the playhead and explains.

    Attributes:
        name: of the pane and of its collector.
        number: its key.
        shows: what it would show.
    """

    channel: ClassVar[str] = "gpu"
    sorts: ClassVar[tuple[str, ...]] = ()

    name: str
    number: int
    shows: tuple[str, ...]

    def title(self, frame: Frame) -> str:
        """Number, name, and that it is off."""
        return self._waiting(frame).title(frame)

    def render(self, frame: Frame) -> list[Line]:
        """Reason, remedy, and what would be here."""
        return _drawn(self._waiting(frame), frame.size)

    def summary(self, frame: Frame) -> Line:
        """The reason in one line."""
        return self._waiting(frame).summary(frame)

    def items(self, frame: Frame) -> int:
        """Nothing to select."""
        del frame
        return 0

    def _waiting(self, frame: Frame) -> WaitingPane:
        text = frame.view.strings.text
        for row in frame.view.latest("status", frame.t, _LOOKBACK_NS)[::-1]:
            if text(row["collector"]) == self.name and not text(row["channel"]):
                return WaitingPane(
                    self.name, self.number, self.shows, text(row["reason"]), text(row["remedy"])
                )
        return WaitingPane(self.name, self.number, self.shows, NO_DATA)
