"""The pane contract: a pure function from what was measured to lines of text.

A pane knows no source, no mode and no clock. Live, the playhead is now; paused or in replay it is the
reader's; the pane cannot tell. It writes style names, never colours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from opusmon.schema import Rows
from opusmon.ui.glyphs import BRAILLE, Glyphs
from opusmon.ui.text import Line
from opusmon.window import Readable


class View(Readable, Protocol):
    """What a pane may read; `opusmon.window.Window` is one. An unknown channel has no rows."""

    @property
    def version(self) -> int:
        """Grows with everything that comes in; while it stays, so do the answers."""
        ...

    def latest(self, channel: str, t: int, lookback_ns: int) -> Rows:
        """The newest row of each series among those with t - lookback_ns < row t <= t, in any order."""
        ...


@dataclass(frozen=True, slots=True)
class Size:
    """Room for a pane's inside, without its frame."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class PaneState:
    """What the reader has chosen in a pane; the app changes it, the pane only reads it.

    Attributes:
        selected: index of the selected item, clipped by the pane to what is there.
        scroll: first item shown; the pane moves it as far as needed to keep the selected item in sight.
        filter: part of a word; keeps the items that contain it.
        sort: field to sort by, "" for the pane's own order.
        detail: the selected item is open in full.
        processes: show the process list.
        maximized: the pane has the whole screen.
    """

    selected: int = 0
    scroll: int = 0
    filter: str = ""
    sort: str = ""
    detail: bool = False
    processes: bool = False
    maximized: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """All a pane is drawn from.

    Attributes:
        view: what was measured.
        t: the playhead, monotonic ns.
        span_ns: histories show [t - span_ns, t].
        size: cells and lines.
        glyphs: the characters to draw with.
        state: the reader's choices.
    """

    view: View
    t: int
    span_ns: int
    size: Size
    glyphs: Glyphs = BRAILLE
    state: PaneState = field(default_factory=PaneState)


class Pane(Protocol):
    """A pane: no state of its own, so one instance serves any number of frames."""

    @property
    def name(self) -> str:
        """As in the command palette."""
        ...

    @property
    def number(self) -> int:
        """The key that shows it."""
        ...

    @property
    def channel(self) -> str:
        """The channel whose samples `t` and `T` step through."""
        ...

    @property
    def sorts(self) -> tuple[str, ...]:
        """What `PaneState.sort` may name, the first one is the default; empty when it does not sort."""
        ...

    def title(self, frame: Frame) -> str:
        """What the frame's upper edge says: number, name, sources and their age."""
        ...

    def render(self, frame: Frame) -> list[Line]:
        """Exactly `size.height` lines of exactly `size.width` cells."""
        ...

    def summary(self, frame: Frame) -> Line:
        """The pane's worst number in one line, `size.width` cells, for screens with room for one pane."""
        ...

    def items(self, frame: Frame) -> int:
        """How many items `PaneState.selected` may choose from."""
        ...


@runtime_checkable
class Tracking(Protocol):
    """A pane whose list moves on under the selection: the app follows the selected item, not its place."""

    def identity(self, frame: Frame) -> Any | None:
        """What tells the selected item from all others, for as long as it is listed."""
        ...

    def place(self, frame: Frame, wanted: Any) -> int | None:
        """Where the item with that identity is now; None when it is not listed."""
        ...


def has(rows: Rows, *names: str) -> bool:
    """There are rows, and they have these fields: a session of another version may lack some."""
    return len(rows) > 0 and set(names) <= set(rows.dtype.names or ())


def first_shown(selected: int, scroll: int, count: int, room: int) -> int:
    """Index of the first item to show so that the selected one is in sight and no room is wasted.

    Args:
        selected: index of the selected item.
        scroll: first item wanted.
        count: items there are.
        room: items that fit.
    """
    if count <= room or room <= 0:
        return 0
    first = min(max(scroll, 0), count - room)
    chosen = min(max(selected, 0), count - 1)
    return min(max(first, chosen - room + 1), chosen)
