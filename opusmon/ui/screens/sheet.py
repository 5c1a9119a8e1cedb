"""A sheet of text over the dashboard: help, cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import ModalScreen

from opusmon.ui.glyphs import Glyphs
from opusmon.ui.text import Line, box, line_cells
from opusmon.ui.widgets.lines import LinesWidget

WHEEL_LINES = 3
"""As in most terminals."""


class Sheet(ModalScreen[None]):
    """Lines in a frame; scrolls, and any of escape, enter, ? closes it.

    Args:
        title: of the frame.
        lines: called each time it is drawn, so that a sheet can show what changes.
        glyphs: the frame's characters.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "app.quit", "quit"),
        ("escape,enter,question_mark,c,f,e,w", "dismiss", "close"),
        ("down,pagedown", "scroll(1)", "down"),
        ("up,pageup", "scroll(-1)", "up"),
    ]

    def __init__(self, title: str, lines: Callable[[], Sequence[Line]], glyphs: Glyphs) -> None:
        super().__init__()
        self._title = title
        self._lines = lines
        self._glyphs = glyphs
        self._top = 0

    def compose(self) -> ComposeResult:
        """One widget."""
        yield LinesWidget(id="sheet")

    def on_mount(self) -> None:
        """Draw now and every second."""
        self.set_interval(1, self.draw)
        self.call_after_refresh(self.draw)

    def on_resize(self, _event: events.Resize) -> None:
        """Draw for the new size."""
        self.call_after_refresh(self.draw)

    def on_mouse_scroll_down(self) -> None:
        """The wheel scrolls by lines: a turn of it is many events."""
        self._scroll(WHEEL_LINES)

    def on_mouse_scroll_up(self) -> None:
        """The wheel scrolls."""
        self._scroll(-WHEEL_LINES)

    def action_scroll(self, direction: int) -> None:
        """Scroll by half a sheet."""
        self._scroll(direction * max(1, self.size.height // 2 - 2))

    def _scroll(self, lines: int) -> None:
        self._top = max(0, self._top + lines)
        self.draw()

    def draw(self) -> None:
        """Show the lines, sized to them and to the terminal."""
        lines = list(self._lines())
        width = min(max((line_cells(line) for line in lines), default=0) + 4, self.size.width)
        height = min(len(lines) + 2, self.size.height)
        self._top = min(self._top, max(0, len(lines) - (height - 2)))
        shown = [((" ", ""), *line) for line in lines[self._top :]]
        more = len(lines) - self._top - (height - 2)
        title = self._title + (f" (down: {more} more lines)" if more > 0 else "")
        sheet = self.query_one("#sheet", LinesWidget)
        sheet.styles.width, sheet.styles.height = width, height
        sheet.set_lines(box(shown, title, width, height, focused=True, glyphs=self._glyphs))
