"""The dashboard: header, four panes on one playhead, the session's time bar with the event lane, the keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, cast

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.timer import Timer

from opusmon.clock import NS
from opusmon.session import Session
from opusmon.times import format_wall
from opusmon.triage.watch import Watch
from opusmon.ui.findings import sheet_lines as findings_sheet
from opusmon.ui.glyphs import Glyphs
from opusmon.ui.header import Facts, header, recording_words
from opusmon.ui.keys import footer, sheet_lines
from opusmon.ui.lane import LEAST_LINES, bar_width, has_lane, label, time_lines
from opusmon.ui.marks import Places
from opusmon.ui.panes import PANES
from opusmon.ui.playhead import Mode, Playhead
from opusmon.ui.screens.cost import cost_lines
from opusmon.ui.screens.missing import missing_lines
from opusmon.ui.screens.sheet import Sheet
from opusmon.ui.screens.timescreen import TimeScreen
from opusmon.ui.text import Line, clean, fit, shorten
from opusmon.ui.widgets import timeline
from opusmon.ui.widgets.lines import LinesWidget
from opusmon.ui.widgets.panels import PaneWidget, TimeBarWidget

NARROW_COLUMNS, NARROW_LINES = 100, 30
"""Under this size one pane shows at a time, the others as one line each."""
SPAN_NS = 300 * NS
GPU = 2
"""Number of the pane whose list, of processes, need not be shown."""
FPS = 4.0
MESSAGE_S = 5.0
SAMPLE_CHANNEL = "gpu"
"""The channel whose newest sample the header dates, and whose age is lateness."""
LOOK_NS = 2 * NS
"""The rules look at what is new this often: a look costs some 10 ms."""
QUIET_NS = 1_250_000_000
"""While tracking, a screen that got no new rows for this long is drawn anew, so that ages keep counting."""


class Dashboard(TimeScreen):
    """The main screen.

    Args:
        session: what is watched or replayed.
        playhead: the instant shown.
        glyphs: characters to draw with.
        fps: frames per second at most; a frame in which nothing changed is not drawn.
        span_ns: time range of the histories at first.
        limits: thresholds of the rules in force; the usual ones by default.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "pause", "pause"),
        Binding("t,right_square_bracket", "step(1)", "next sample"),
        Binding("T,left_square_bracket", "step(-1)", "previous sample"),
        Binding("j", "jump(1)", "jump forward"),
        Binding("J", "jump(-1)", "jump back"),
        Binding("g,b", "goto", "go to a time"),
        Binding("n", "place(1)", "next mark"),
        Binding("N", "place(-1)", "previous mark"),
        Binding("plus,equals_sign", "span(1)", "longer span"),
        Binding("minus", "span(-1)", "shorter span"),
        Binding("greater_than_sign", "speed(1)", "play faster"),
        Binding("less_than_sign", "speed(-1)", "play slower"),
        Binding("1", "pane(1)", "latency pane"),
        Binding("2", "pane(2)", "gpu pane"),
        Binding("3", "pane(3)", "streams pane"),
        Binding("4", "pane(4)", "stalls pane"),
        Binding("tab", "next_pane(1)", "next pane", priority=True),
        Binding("shift+tab", "next_pane(-1)", "previous pane", priority=True),
        Binding("m,enter", "maximize", "maximize"),
        Binding("escape", "restore", "back"),
        Binding("up", "select(-1)", "up"),
        Binding("down", "select(1)", "down"),
        Binding("pageup", "select(-8)", "page up"),
        Binding("pagedown", "select(8)", "page down"),
        Binding("slash", "filter", "filter"),
        Binding("s", "sort", "sort"),
        Binding("p", "processes", "processes"),
        Binding("c", "cost", "cost"),
        Binding("w", "missing", "what is missing, and why"),
        Binding("f", "findings", "findings"),
        Binding("e", "explain", "what moved first"),
        Binding("l", "lane", "event lane"),
        Binding("r", "bookmark", "bookmark"),
        Binding("question_mark", "help", "help"),
        Binding("ctrl+l,ctrl+r", "redraw", "redraw"),
    ]

    def __init__(
        self,
        session: Session,
        playhead: Playhead,
        glyphs: Glyphs,
        *,
        fps: float = FPS,
        span_ns: int = SPAN_NS,
        limits: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        self.session = session
        self.playhead = playhead
        self.places = Places(session.window)
        self.triage = Watch(session.window, limits)
        self._glyphs = glyphs
        self._fps = fps
        self.span_ns = span_ns
        self._current = GPU
        self._maximized = False
        self._lane_wanted: bool | None = None
        self._drawn: tuple[object, ...] = ()
        self._drawn_ns = 0
        self._message: Line = ()
        self._hush: Timer | None = None
        self._panes = [PaneWidget(pane, glyphs) for pane in PANES]

    def compose(self) -> ComposeResult:
        """One line, the panes, the time with its lane, one line."""
        yield LinesWidget(id="header")
        with Container(id="panes"):
            yield from self._panes
        yield TimeBarWidget(self._time_at)
        yield LinesWidget(id="footer")

    def on_mount(self) -> None:
        """Start the one frame timer."""
        self.action_pane(self._current)
        self.set_interval(1 / self._fps, self.frame)
        self.call_after_refresh(self.frame)

    def on_resize(self, event: events.Resize) -> None:
        """Choose the layout for the size."""
        narrow = event.size.width < NARROW_COLUMNS or event.size.height < NARROW_LINES
        self.set_class(narrow, "-narrow")
        self.set_class(has_lane(event.size.height, self._lane_wanted), "-lane")
        self.call_after_refresh(self.frame)

    # -- drawing ---------------------------------------------------------------------------------------------

    def frame(self) -> None:
        """Draw what changed since the last frame."""
        window, t = self.session.window, self.playhead.t
        # Not the playhead: that of a file that is followed stands still when its recorder does.
        now_ns = self.session.clock.now()
        tracking = self.playhead.mode is Mode.TRACK
        panes = tuple((pane.state, pane.size, pane.has_focus) for pane in self._panes)
        moment = 0 if tracking else t
        key = (
            self._news(tracking, now_ns),
            moment,
            self.playhead.mode,
            self.playhead.speed,
            self.span_ns,
            panes,
            self.size,
        )
        quiet = tracking and now_ns - self._drawn_ns > QUIET_NS
        if not self.is_current or (key == self._drawn and not quiet):
            return
        self._drawn, self._drawn_ns = key, now_ns
        self._look()
        with self.app.batch_update():
            for pane in self._panes:
                pane.draw(window, t, self.span_ns)
            self.query_one("#header", LinesWidget).set_lines([self._header(t)])
            self.query_one(TimeBarWidget).set_lines(self._time_lines(t))
            self.query_one("#footer", LinesWidget).set_lines([self._footer()])

    def _look(self) -> None:
        """Let the rules see what is new; a long recording is looked at a bit per frame."""
        window = self.session.window
        until = self.triage.until
        growing = self.session.follows and self.playhead.mode is Mode.TRACK
        pace_ns = max(LOOK_NS, self.triage.pace_ns) if growing else 1
        if window.t1 <= 0 or (until is not None and 0 <= window.t1 - until < pace_ns):
            return
        done = self.triage.advance(window.t0, window.t1)
        if not done:
            self.call_later(self._look_on)
        self.places.found(self.triage.findings, self.triage.version)

    def _look_on(self) -> None:
        self._drawn = ()

    def _news(self, tracking: bool, now_ns: int) -> int:
        """What has come in, as a number that grows; live at the pace of the samples.

        Eight collectors send at eight times of a second: a frame for each would cost four times as much and show a
        reader nothing sooner than a second can be read.
        """
        news = self.session.window.news
        if not tracking or not self._drawn or news == self._drawn[0]:
            return news
        pace_ns = min(self.session.interval_ns, NS) * 9 // 10
        return news if now_ns - self._drawn_ns >= pace_ns else int(cast("int", self._drawn[0]))

    def action_findings(self) -> None:
        """What the rules have found."""
        window = self.session.window

        def lines() -> list[Line]:
            until = self.triage.until
            left = (
                ""
                if until is None or until >= window.t1
                else f"looked at up to {format_wall(window.anchors, until)}"
            )
            return findings_sheet(
                self.triage.ranked(), window.anchors, self.playhead.t, left, self.size.width - 5
            )

        self.app.push_screen(Sheet("findings", lines, self._glyphs))

    def action_explain(self) -> None:
        """What moved first in the span shown, against the time before it."""
        self.say("comparing the span shown with the time before it")
        self.call_after_refresh(self._explain)

    def _explain(self) -> None:
        from opusmon.triage.explain import ExplainError, explain
        from opusmon.triage.sequence import lines as sequence_lines

        window, t = self.session.window, self.playhead.t
        # Half of what there is, where the span leaves less than that to compare it with.
        begin = max(t - self.span_ns, (window.t0 + t) // 2)
        try:
            told = explain(window, begin, t)
        except ExplainError:
            self.say(
                "too little is measured up to this time to compare: go further on, or take a longer span"
            )
            return
        shown: list[Line] = [
            ((clean(line), ""),) for line in sequence_lines(told, min(self.size.width - 6, 110))
        ]
        self.app.push_screen(Sheet("what moved first", lambda: shown, self._glyphs))

    def on_screen_resume(self) -> None:
        """Draw anew after something lay on top."""
        self._drawn = ()

    def _header(self, t: int) -> Line:
        session = self.session
        tracking = self.playhead.mode is Mode.TRACK
        sample = self._sample(t)
        newest_t = sample[1] if sample is not None else session.window.t1
        facts = Facts(
            host=session.meta.get("host", "?"),
            word=self._word(t),
            tracking=tracking,
            behind_ns=self.playhead.behind_ns() if self.playhead.mode is Mode.PAUSE else 0,
            recording=recording_words(session.recording, session.clock.now()),
            trouble=session.trouble,
            sample=sample,
            late_ns=session.late_ns(newest_t) if tracking and newest_t > 0 else 0,
            findings=self.triage.worst(t),
        )
        return header(session.window, t, facts, self.size.width)

    def _sample(self, t: int) -> tuple[int, int] | None:
        """Begin and end of the sample shown, monotonic ns."""
        window = self.session.window
        end = window.step(SAMPLE_CHANNEL, t + 1, -1)
        if end is None:
            return None
        rows = window.query(SAMPLE_CHANNEL, end - 1, end)
        return (end - int(rows["dt_ns"][-1]), end) if len(rows) else None

    def _word(self, t: int) -> str:
        mode = self.playhead.mode
        if mode is Mode.TRACK:
            return self.session.word
        if mode is Mode.PLAY:
            return f"REPLAY x{self.playhead.speed:g}"
        return f"PAUSED {format_wall(self.session.window.anchors, t, 0)}"

    def _bar(self, t: int) -> timeline.TimeBar:
        return timeline.TimeBar(self.session.window.t0 or t, max(self.session.edge(), t), t, self.span_ns)

    def _time_lines(self, t: int) -> list[Line]:
        shown = [pane.pane for pane in self._panes if pane.display] if self.has_class("-lane") else []
        return time_lines(
            self._bar(t),
            self.places.update(),
            [(pane.number, pane.name) for pane in shown],
            self._current,
            "now" if self.session.follows else "end",
            self.size.width,
            self._glyphs,
        )

    def _time_at(self, column: int) -> int | None:
        column -= len(label(self.span_ns))
        width = bar_width(self.span_ns, self.size.width)
        if not 0 <= column < width:
            return None
        return timeline.time_at(self._bar(self.playhead.t), column, width)

    def say(self, text: str, *, warn: bool = False) -> None:
        """Show a message in place of the keys for a few seconds; text from outside is drawn plain."""
        self._message = ((" ! " if warn else " ", "warn"), (clean(text), "warn" if warn else "accent"))
        if self._hush is not None:
            self._hush.stop()
        self._hush = self.set_timer(MESSAGE_S, self._quiet)
        self._drawn = ()
        self.frame()

    def _quiet(self) -> None:
        self._message, self._drawn = (), ()
        self.frame()

    def _footer(self) -> Line:
        if self._message:
            return fit(shorten(self._message, self.size.width), self.size.width)
        return footer(self.size.width, paused=self.playhead.mode is Mode.PAUSE, follows=self.session.follows)

    # -- panes -----------------------------------------------------------------------------------------------

    def step_channel(self) -> str:
        """That of the current pane."""
        return self._pane().pane.channel

    def _pane(self) -> PaneWidget:
        return next(pane for pane in self._panes if pane.pane.number == self._current)

    def action_pane(self, number: int) -> None:
        """Give a pane the keys, and in a small terminal the room."""
        self._current = number
        for pane in self._panes:
            is_current = pane.pane.number == number
            pane.set_class(is_current, "-current")
            pane.state = replace(pane.state, maximized=self._maximized and is_current)
        self._pane().focus()
        self.call_after_refresh(self.frame)

    def action_next_pane(self, direction: int) -> None:
        """Cycle through the panes."""
        numbers = [pane.number for pane in PANES]
        self.action_pane(numbers[(numbers.index(self._current) + direction) % len(numbers)])

    @on(PaneWidget.Chosen)
    def chosen(self, event: PaneWidget.Chosen) -> None:
        """A pane was clicked: it gets the keys; clicked twice, the room."""
        self.action_pane(event.number)
        if event.twice:
            self.action_maximize()

    def action_maximize(self) -> None:
        """Give the current pane the whole screen, or take it back."""
        self._maximized = not self._maximized
        self.set_class(self._maximized, "-max")
        self.action_pane(self._current)

    def action_lane(self) -> None:
        """Show the event lane, or put it away."""
        if self.size.height < LEAST_LINES:
            self.say(f"no event lane under {LEAST_LINES} lines")
            return
        wanted = not self.has_class("-lane")
        usual = has_lane(self.size.height, None)
        self._lane_wanted = None if wanted == usual else wanted
        self.set_class(wanted, "-lane")
        self.call_after_refresh(self.frame)

    def action_restore(self) -> None:
        """Close what is on top: the maximized pane, then the filter."""
        if self._maximized:
            self.action_maximize()
            return
        self._change(filter="")

    def action_select(self, by: int) -> None:
        """Move the selection of the current pane."""
        self._pane().move(by)
        self.frame()

    def action_filter(self) -> None:
        """Ask for a word and show what contains it."""
        pane = self._pane()
        self.ask(
            f"Filter {self._list_name()} (part of a name; empty shows all)",
            lambda text: self._change(filter=text, processes=pane.state.processes or self._listed(text)),
            pane.state.filter,
        )

    def _list_name(self) -> str:
        """What sort and filter are about."""
        return "GPU processes" if self._current == GPU else self._pane().pane.name

    def _listed(self, wanted: str) -> bool:
        """Whether the processes must be shown so that what was asked of their list is seen."""
        return self._current == GPU and bool(wanted)

    def action_sort(self) -> None:
        """The next sort order of the current pane."""
        pane = self._pane()
        sorts = pane.pane.sorts
        place = sorts.index(pane.state.sort) if pane.state.sort in sorts else 0
        chosen = sorts[(place + 1) % len(sorts)]
        self._change(sort=chosen, processes=pane.state.processes or self._listed(chosen))
        # The column that says so need not be there.
        self.say(f"{self._list_name()} sorted by {chosen}")

    def action_processes(self) -> None:
        """Show or hide the processes."""
        self.action_pane(GPU)
        self._change(processes=not self._pane().state.processes)

    def _change(self, **changes: object) -> str:
        pane = self._pane()
        pane.state = replace(pane.state, **changes)  # type: ignore[arg-type]
        self.frame()
        return ""

    # -- sheets ----------------------------------------------------------------------------------------------

    def action_help(self) -> None:
        """Show every key and what the words mean."""
        self.app.push_screen(Sheet("help", sheet_lines, self._glyphs))

    def action_cost(self) -> None:
        """Show what watching costs."""
        window = self.session.window
        self.app.push_screen(
            Sheet(
                "what watching costs",
                lambda: cost_lines(window, self.playhead.t, self.size.width - 5),
                self._glyphs,
            )
        )

    def action_missing(self) -> None:
        """Show every reason for what is missing at the playhead."""
        window = self.session.window

        def lines() -> list[Line]:
            return missing_lines(window, window.anchors, self.playhead.t, min(self.size.width - 5, 110))

        self.app.push_screen(Sheet("what is missing, and why", lines, self._glyphs))

    def action_bookmark(self) -> None:
        """Mark the instant shown."""
        t = self.playhead.t

        def accept(text: str) -> str:
            self.say(self.session.mark(t, t, "bookmark", text or "bookmark"))
            return ""

        self.ask("Bookmark this time as", accept)

    def action_redraw(self) -> None:
        """Paint everything again."""
        self._drawn = ()
        self.refresh(repaint=True, layout=True)
        self.frame()


def playhead_of(session: Session, now: Callable[[], int] = time.monotonic_ns) -> Playhead:
    """A playhead over a session: at its edge when it grows, else at its start."""
    return Playhead(now, lambda: session.window.t0, session.edge, session.follows)
