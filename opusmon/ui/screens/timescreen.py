"""The keys that move the playhead, as a part of the dashboard."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial

from textual import on
from textual.screen import Screen

from opusmon.session import Session
from opusmon.times import TimeError, parse_duration, parse_time
from opusmon.ui.marks import Places, neighbour
from opusmon.ui.playhead import Mode, Playhead, next_sample, next_span
from opusmon.ui.widgets.panels import TimeBarWidget


class TimeScreen(Screen[None]):
    """A screen with a playhead.

    Attributes:
        session: what is watched or replayed.
        playhead: the instant shown.
        places: what `n` and `N` go to.
        span_ns: time range of the histories.
    """

    session: Session
    playhead: Playhead
    places: Places
    span_ns: int

    @abstractmethod
    def frame(self) -> None:
        """Draw what changed."""

    @abstractmethod
    def say(self, text: str, *, warn: bool = False) -> None:
        """Show a message on the last line for a few seconds."""

    @abstractmethod
    def step_channel(self) -> str:
        """The channel whose samples `t` and `T` step through."""

    def action_pause(self) -> None:
        """Stop the playhead, or let it go on."""
        self.playhead.toggle()
        self.frame()

    def action_step(self, direction: int) -> None:
        """To the next or previous sample of the current pane's channel; while live this pauses first."""
        t = self.playhead.t
        self.playhead.pause()
        found = next_sample(partial(self.session.window.step, self.step_channel()), t, direction)
        if found is None:
            self.say("there is no later sample" if direction > 0 else "there is no earlier sample")
            return
        self.playhead.seek(found)
        self.frame()

    def action_jump(self, direction: int) -> None:
        """Ask for a duration and move by it."""
        word = "forward" if direction > 0 else "back"
        self.ask(f"Jump {word} by (10m, 90s, 1h30m)", lambda text: self._jump(text, direction), "1m")

    def _jump(self, text: str, direction: int) -> str:
        try:
            by = parse_duration(text)
        except TimeError as error:
            return str(error)
        return self._seek(self.playhead.t + direction * by)

    def action_goto(self) -> None:
        """Ask for a time and go there."""
        self.ask("Go to (14:03, 10m after the start, -90s before the end, ISO 8601)", self._goto)

    def _goto(self, text: str) -> str:
        window = self.session.window
        try:
            return self._seek(parse_time(text, anchors=window.anchors, t0=window.t0, t1=self.session.edge()))
        except TimeError as error:
            return str(error)

    def _seek(self, t: int) -> str:
        playing = self.playhead.mode is Mode.PLAY
        if not playing:
            self.playhead.pause()
        self.playhead.seek(t)
        return ""

    def action_place(self, direction: int) -> None:
        """To the next or previous finding, mark or event."""
        place = neighbour(self.places.update(), self.playhead.t, direction)
        if place is None:
            self.say(
                "nothing is marked after this time" if direction > 0 else "nothing is marked before this time"
            )
            return
        self.playhead.pause()
        self.playhead.seek(place.t)
        self.say(f"{place.kind}: {place.text}")

    def action_span(self, direction: int) -> None:
        """A longer or shorter time range."""
        window = self.session.window
        self.span_ns = next_span(self.span_ns, self.session.edge() - window.t0, direction)
        self.frame()

    def action_speed(self, direction: int) -> None:
        """Play faster or slower; a live session has one speed."""
        if self.session.follows:
            self.say("a live session has one speed; T and J go back in it")
            return
        self.playhead.faster(direction)
        self.say(f"replay speed x{self.playhead.speed:g}")

    @on(TimeBarWidget.Picked)
    def picked(self, event: TimeBarWidget.Picked) -> None:
        """The time bar was clicked or dragged."""
        self._seek(event.t)

    def ask(self, question: str, accept: Callable[[str], str], value: str = "") -> None:
        """Ask for a line of text; see `Prompt`."""
        from opusmon.ui.screens.prompt import Prompt  # the input widgets are not needed for the first frame

        self.app.push_screen(Prompt(question, accept, value))
