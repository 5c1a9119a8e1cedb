"""One question on one line, at the foot of the screen."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Static


class Prompt(ModalScreen[None]):
    """Ask for a line of text; it stays open, with the reason, while the answer cannot be used.

    Args:
        question: what is asked, with an example.
        accept: takes the answer; returns "" or why it cannot be used.
        value: what is in the line at first.
    """

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "dismiss", "close")]

    def __init__(
        self,
        question: str,
        accept: Callable[[str], str],
        value: str = "",
    ) -> None:
        super().__init__()
        self._question = question
        self._accept = accept
        self._value = value

    def compose(self) -> ComposeResult:
        """The question, the line, and room for one reason."""
        with Vertical(id="prompt"):
            yield Static(self._question, id="question", markup=False)
            yield Input(self._value, id="answer", compact=True, select_on_focus=True)
            problem = Static("", id="problem", markup=False)
            problem.display = False
            yield problem

    @on(Input.Submitted)
    def submitted(self, event: Input.Submitted) -> None:
        """Close when the answer is taken, else say why not."""
        problem = self._accept(event.value.strip())
        if not problem:
            self.dismiss()
            return
        line = self.query_one("#problem", Static)
        line.update(problem)
        line.display = True
