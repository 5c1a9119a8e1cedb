"""The thin widgets of the dashboard: they hold state and mouse events; what they show comes from pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from textual import events
from textual.message import Message

from opusmon.ui.glyphs import Glyphs
from opusmon.ui.panes.base import Frame, Pane, PaneState, Size, Tracking, View
from opusmon.ui.text import Line, abbreviated, box, clean
from opusmon.ui.widgets.lines import LinesWidget

FILTER_CELLS = 24
"""Most of a filter's words that a title shows."""


class PaneWidget(LinesWidget, can_focus=True):
    """A pane with its frame; one line high it is the pane's summary.

    Args:
        pane: what draws it.
        glyphs: the characters.
    """

    class Chosen(Message):
        """The pane was clicked; `twice` when double-clicked."""

        def __init__(self, number: int, *, twice: bool) -> None:
            super().__init__()
            self.number = number
            self.twice = twice

    def __init__(self, pane: Pane, glyphs: Glyphs) -> None:
        super().__init__(id=f"pane-{pane.name}", classes="pane")
        self.pane = pane
        self.state = PaneState()
        self._glyphs = glyphs
        self._items = 0
        self._held: object | None = None
        self._inside: list[Line] = []
        self._edge: tuple[object, ...] = ()

    def draw(self, view: View, t: int, span_ns: int) -> None:
        """Compute the lines for an instant and show what changed."""
        width, height = self.size
        if not (width and height and self.display):
            return
        frame = Frame(view, t, span_ns, Size(width, height), self._glyphs, self.state)
        if height < 3:
            # What is wrong elsewhere must not hide behind a filter that is out of sight.
            overview = replace(frame, state=replace(self.state, filter=""))
            self.set_lines([self.pane.summary(overview)])
            return
        inner = replace(frame, size=Size(max(width - 2, 0), height - 2))
        inner = self._follow(inner)
        self._items = self.pane.items(inner)
        title = self._title(inner)
        lines = self.pane.render(inner)
        edge = (title, width, height, self.has_focus)
        if (
            lines is not self._inside or edge != self._edge
        ):  # a pane may answer with the very list of last time
            self._inside, self._edge = lines, edge
            self.set_lines(box(lines, title, width, height, focused=self.has_focus, glyphs=self._glyphs))

    def _title(self, frame: Frame) -> str:
        """The pane's title; a filter stands first in it, since the numbers are not those of everything."""
        title = self.pane.title(frame)
        if not self.state.filter:
            return title
        head = f"{self.pane.number} {self.pane.name}"
        words = abbreviated(clean(self.state.filter), FILTER_CELLS)
        return f'{head}  filter "{words}"{title.removeprefix(head)}'

    def _follow(self, frame: Frame) -> Frame:
        """Keep the selected item selected while a list moves on under it; the first place follows the newest."""
        if not isinstance(self.pane, Tracking):
            return frame
        if self.state.selected == 0:
            self._held = None
            return frame
        if self._held is None:
            self._held = self.pane.identity(frame)
            return frame
        place = self.pane.place(frame, self._held)
        if place is None:
            self._held = self.pane.identity(frame)
        elif place != self.state.selected:
            self.state = replace(self.state, selected=place)
        return replace(frame, state=self.state)

    def move(self, direction: int) -> None:
        """Select the next or previous item."""
        self._held = None
        last = max(self._items - 1, 0)
        self.state = replace(self.state, selected=max(0, min(self.state.selected + direction, last)))

    def on_click(self, event: events.Click) -> None:
        """Choose this pane."""
        self.post_message(self.Chosen(self.pane.number, twice=event.chain == 2))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """The wheel moves the selection."""
        event.stop()
        self.move(1)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """The wheel moves the selection."""
        event.stop()
        self.move(-1)


class TimeBarWidget(LinesWidget):
    """The whole session on one line, the event lane under it; a click or a drag moves the playhead.

    Args:
        time_at: session time (monotonic ns) of a column, None outside the bar.
    """

    class Picked(Message):
        """An instant was pointed at, monotonic ns."""

        def __init__(self, t: int) -> None:
            super().__init__()
            self.t = t

    def __init__(self, time_at: Callable[[int], int | None]) -> None:
        super().__init__(id="timebar")
        self._time_at = time_at

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """Begin a drag."""
        self.capture_mouse()
        self._pick(event.x)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Follow a drag."""
        if event.button and self.app.mouse_captured is self:
            self._pick(event.x)

    def on_mouse_up(self) -> None:
        """End a drag."""
        self.release_mouse()

    def _pick(self, x: int) -> None:
        t = self._time_at(x)
        if t is not None:
            self.post_message(self.Picked(t))
