"""A pane without its collector: what it would show, why it cannot, and the command that enables it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from opusmon.ui.panes.base import Frame, Size
from opusmon.ui.text import Line, clean, cut, fit, fit_lines, wrapped

_INDENT = "  "
NO_DATA = "this session has no such data at this time"
"""The reason when not even a reason was recorded."""


@dataclass(frozen=True)
class WaitingPane:
    """Stands in for a pane that cannot be drawn.

    Attributes:
        name: of the pane it stands in for.
        number: its key.
        shows: what it would show, one short line each.
        why: why it cannot, one sentence.
        remedy: the exact command or step that enables it, "" when nothing does.
    """

    channel: ClassVar[str] = "gpu"  # it has no samples of its own to step through
    sorts: ClassVar[tuple[str, ...]] = ()

    name: str
    number: int
    shows: Sequence[str]
    why: str
    remedy: str = ""

    def title(self, frame: Frame) -> str:
        """Number, name, and that it is off."""
        del frame
        return f"{self.number} {self.name}  off"

    def render(self, frame: Frame) -> list[Line]:
        """Reason first, then the remedy, then what would be here; the first ones survive a small pane."""
        return self.lines(frame.size)

    def lines(self, size: Size) -> list[Line]:
        """The same for a size: nothing else of a frame matters here."""
        return fit_lines(self._lines(size.width), size.width, size.height)

    def summary(self, frame: Frame) -> Line:
        """The reason in one line."""
        words = clean(f"{self.number} {self.name}  off: {self.why}")
        return fit(((cut(words, frame.size.width), "dim"),), frame.size.width)

    def items(self, frame: Frame) -> int:
        """Nothing to select."""
        del frame
        return 0

    def _lines(self, width: int) -> Iterator[Line]:
        yield from wrapped(f"Not running: {self.why}", width, "", "value")
        if self.remedy:
            yield ()
            yield (("To enable it:", "label"),)
            yield from wrapped(self.remedy, width, _INDENT, "accent")
        if self.shows:
            yield ()
            yield (("It would show:", "label"),)
            for line in self.shows:
                yield from wrapped(line, width, _INDENT, "dim")
