"""The one widget base: shows lines of spans, and repaints only the rows that changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.theme import Theme
from textual.widget import Widget

from opusmon.ui.text import Line, line_cells, merge
from opusmon.ui.themes import palette


class LinesWidget(Widget):
    """A widget whose content is given as lines of styled plain text.

    Nothing is computed while Textual draws: `render_line` is a look-up. Text has no markup meaning.

    Attributes:
        styles_by_name: rich style of each style name, rebuilt when the theme changes.
    """

    DEFAULT_CSS = """
    LinesWidget { width: 1fr; height: 1fr; }
    """

    def __init__(self, lines: Sequence[Line] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._shown: list[Line] = list(lines)
        self._strips: list[Strip | None] = [None] * len(self._shown)
        self.styles_by_name: Mapping[str, Style] = {}

    @property
    def lines(self) -> Sequence[Line]:
        """What is shown."""
        return self._shown

    def on_mount(self) -> None:
        """Build the palette and follow theme changes."""
        self._use_theme(self.app.current_theme)
        self.app.theme_changed_signal.subscribe(self, self._use_theme)

    def set_lines(self, lines: Sequence[Line]) -> int:
        """Show these lines; rows equal to what is shown are not repainted.

        Returns:
            How many rows changed.
        """
        changed = [y for y, (old, new) in enumerate(zip_longest(self._shown, lines)) if old != new]
        if not changed:
            return 0
        kept = self._strips[: len(lines)]
        self._strips = kept + [None] * (len(lines) - len(kept))
        for y in changed:
            if y < len(lines):
                self._strips[y] = None
        self._shown = list(lines)
        self.refresh(*(self._row(y) for y in changed))
        return len(changed)

    def render_line(self, y: int) -> Strip:
        """One row, from the cache."""
        base = self.visual_style.rich_style
        if not 0 <= y < len(self._shown):
            return Strip.blank(self.size.width, base)
        strip = self._strips[y]
        if strip is None:
            strip = self._strips[y] = self._strip(self._shown[y])
        return strip.apply_style(base)

    def _row(self, y: int) -> Region:
        """The whole width of a row of the content, in the widget's own coordinates."""
        left, top = self.gutter.left, self.gutter.top
        return Region(left, top + y, max(self.size.width, 1), 1)

    def _strip(self, line: Line) -> Strip:
        blank = Style()
        named = self.styles_by_name
        segments = [Segment(text, named.get(style, blank)) for text, style in merge(line)]
        return Strip(segments, line_cells(line))

    def _use_theme(self, theme: Theme) -> None:
        self.styles_by_name = palette(theme)
        self._strips = [None] * len(self._shown)
        self.refresh()
