"""The application: theme, the dashboard, and what works on every screen."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.filter import ANSIToTruecolor, DimFilter, LineFilter
from textual.screen import Screen
from textual.worker import Worker, WorkerError

from opusmon.session import Session
from opusmon.ui import themes
from opusmon.ui.glyphs import ASCII, Glyphs
from opusmon.ui.outlet import PatientDriver
from opusmon.ui.playhead import Playhead
from opusmon.ui.screens.dashboard import FPS, SPAN_NS, Dashboard, playhead_of

_LOOK_EVERY_S = 0.05
_NOT_NEEDED = (DimFilter, ANSIToTruecolor)


class OpusmonApp(App[None]):
    """opusmon's screen over a session.

    Args:
        session: live, or a recording.
        glyphs: characters to draw with.
        theme: name of a theme, "" for the default one.
        playhead: the instant shown; by default at the edge of a growing session, else at the start.
        span_ns: time range of the histories.
        limits: thresholds of the rules in force; the usual ones by default.
        environ: environment, for NO_COLOR and the like.
    """

    CSS_PATH = "opusmon.tcss"
    TITLE = "opusmon"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c,ctrl+q", "quit", "quit", priority=True, show=False),
        Binding("colon,ctrl+p", "command_palette", "palette"),
        Binding("ctrl+z", "suspend_process", "suspend", show=False),
    ]

    def __init__(
        self,
        session: Session,
        *,
        glyphs: Glyphs,
        theme: str = "",
        environ: Mapping[str, str] | None = None,
        playhead: Playhead | None = None,
        span_ns: int = SPAN_NS,
        limits: Mapping[str, float] | None = None,
    ) -> None:
        self._environ = dict(environ or {})
        # With NO_COLOR Textual must be told before it starts, else its colours become black on black.
        super().__init__(driver_class=PatientDriver, ansi_color="NO_COLOR" in self._environ)
        self.session = session
        self.glyphs = glyphs
        self._theme_wanted = theme
        self._span_ns = span_ns
        self._limits = limits
        self.playhead = playhead if playhead is not None else playhead_of(session)
        self.theme_problems: list[str] = []
        self._own_themes: list[str] = []
        self._pump: Worker[None] | None = None
        self.set_class(glyphs is ASCII, "-ascii")

    def get_default_screen(self) -> Screen[None]:
        """The dashboard."""
        return Dashboard(self.session, self.playhead, self.glyphs, span_ns=self._span_ns, limits=self._limits)

    def on_mount(self) -> None:
        """Apply the theme and start the session."""
        loaded, self.theme_problems = themes.load_themes()
        for theme in loaded.values():
            self.register_theme(theme)
        self._own_themes = sorted(loaded)
        wanted = themes.choose(self._theme_wanted or None, self._environ, self.console.color_system)
        if wanted in self.available_themes:
            self.theme = wanted
        else:
            self.theme_problems.append(f"no theme is named {wanted!r}; `opusmon themes` lists them")
        if self.session.warning or self.theme_problems:
            self.call_after_refresh(self._say_problems)
        if not self.is_headless:
            # A lost ssh connection or a polite kill closes the file as `q` does.
            for number in (signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, self.exit)
        self._pump = self.run_worker(self.session.run(), name="session", exit_on_error=True)

    async def on_unmount(self) -> None:
        """Wait for the session's last rows; the terminal is the user's again by now."""
        if self._pump is None:
            return
        if not self._pump.is_cancelled:  # a second time would cut it short
            self._pump.cancel()
        with contextlib.suppress(WorkerError):
            await self._pump.wait()

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Textual's filters without those that mix dim and ANSI colours: terminals do both by themselves.

        They run over every line of the bounding box of what changed, ten times the lines that did.
        """
        return [kept for kept in super().get_line_filters() if not isinstance(kept, _NOT_NEEDED)]

    def _say_problems(self) -> None:
        first, *others = [*filter(None, [self.session.warning]), *self.theme_problems]
        more = f" (and {len(others)} more; `opusmon themes` lists bad themes)" if others else ""
        if isinstance(self.screen, Dashboard):
            self.screen.say(first + more, warn=True)

    async def action_quit(self) -> None:
        """Leave at once; the file is closed by whoever opened the session."""
        self.exit()

    def action_command_palette(self) -> None:
        """Show the palette."""
        if not isinstance(self.screen, CommandPalette):
            self.push_screen(CommandPalette(placeholder="Search for commands", id="--command-palette"))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The palette: what the keys do, by name."""
        dashboard = self.screen_stack[0] if self.screen_stack else screen
        if isinstance(dashboard, Dashboard):
            for title, text, call in _commands(dashboard):
                yield SystemCommand(title, text, call)
        for name in self._own_themes:
            yield SystemCommand(f"theme: {name}", "colours", lambda name=name: setattr(self, "theme", name))
        yield SystemCommand("quit", "leave opusmon", self.exit)


def _commands(board: Dashboard) -> list[tuple[str, str, Callable[[], object]]]:
    """Title, explanation and call of each palette entry of the dashboard."""
    return [
        ("time: pause or resume", "space", board.action_pause),
        ("time: go to", "g", board.action_goto),
        ("time: jump forward", "j", lambda: board.action_jump(1)),
        ("time: jump back", "J", lambda: board.action_jump(-1)),
        ("time: next mark", "n", lambda: board.action_place(1)),
        ("time: previous mark", "N", lambda: board.action_place(-1)),
        ("time: longer span", "+", lambda: board.action_span(1)),
        ("time: shorter span", "-", lambda: board.action_span(-1)),
        ("time: bookmark", "r", board.action_bookmark),
        ("pane: latency", "1", lambda: board.action_pane(1)),
        ("pane: gpu", "2", lambda: board.action_pane(2)),
        ("pane: streams", "3", lambda: board.action_pane(3)),
        ("pane: stalls", "4", lambda: board.action_pane(4)),
        ("pane: maximize", "m", board.action_maximize),
        ("pane: filter", "/", board.action_filter),
        ("pane: sort", "s", board.action_sort),
        ("gpu: processes", "p", board.action_processes),
        ("show: findings", "f", board.action_findings),
        ("show: explain what moved first", "e", board.action_explain),
        ("show: event lane", "l", board.action_lane),
        ("show: what is missing, and why", "w", board.action_missing),
        ("show: cost", "c", board.action_cost),
        ("show: help", "?", board.action_help),
    ]


async def screenshot(app: OpusmonApp, size: tuple[int, int], ready: Callable[[], bool], wait_s: float) -> str:
    """Draw one frame without a terminal; returns it as SVG.

    Args:
        app: not yet running.
        size: columns, lines.
        ready: whether there is something to show; it is waited for.
        wait_s: for this long at most.
    """
    async with app.run_test(size=size) as pilot:
        for _ in range(int(wait_s / _LOOK_EVERY_S)):
            if ready():
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        await pilot.pause(2 / FPS)
        return app.export_screenshot(title="opusmon")
