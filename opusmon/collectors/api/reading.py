"""What is understood of one answer, whatever protocol it is in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from opusmon.collectors.api.request import Request, word
from opusmon.collectors.api.timeline import Timeline
from opusmon.collectors.api.usage import Usage

Body = Mapping[str, Any]


class Reading(ABC):
    """Reads the events of a stream, or a whole JSON answer.

    Unknown events and fields are ignored: the protocols promise to add some. Texts of prompts and answers are looked
    at for being empty or not, and are not kept.

    Attributes:
        timeline: the clocks.
        usage: token counts.
        model: as the server names it.
        id: of the message or response.
        stop: stop reason.
        error: type of an error that came as an event or in place of an answer.
        finished: the protocol's own end was seen.
    """

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.usage = Usage()
        self.model = ""
        self.id = ""
        self.stop = ""
        self.error = ""
        self.finished = False
        self._chosen = False
        self._tools: set[object] = set()

    @abstractmethod
    def event(self, t: int, body: Body, name: str) -> None:
        """Read one event.

        Args:
            t: when it came, monotonic ns.
            body: its data.
            name: its SSE name; the body's own `type` goes before it, for there are servers that send only data.
        """

    @abstractmethod
    def answer(self, body: Body) -> None:
        """Read a whole answer, one that was not streamed."""

    @abstractmethod
    def tokens(self, request: Request) -> None:
        """Put the token counts into a row."""

    def done(self) -> None:
        """The stream said `[DONE]`: the end, in a protocol that has choices, and if there was one."""
        self.finished = self.finished or self._chosen

    def fill(self, request: Request) -> None:
        """Put what was read into a row, the clocks aside; the row's own model and id go before."""
        request.model = request.model or self.model
        request.id = request.id or self.id
        request.stop = self.stop
        request.error = request.error or self.error
        request.tool_calls = len(self._tools)
        self.tokens(request)

    def _head(self, body: Body) -> None:
        self.model = word(body.get("model")) or self.model
        self.id = word(body.get("id")) or self.id

    def _tool(self, key: object) -> None:
        if len(self._tools) < 1024:
            self._tools.add(key)


def error_type(body: Body) -> str:
    """Type of the error that a JSON object describes, "" when it describes none.

    The shapes: `{"error": {"type", "code"}}`, `{"error": "text"}`, `{"object": "error", "type"}`. Messages are not
    read: they quote what was sent.
    """
    error = body.get("error")
    if isinstance(error, Mapping):
        return word(error.get("type")) or _code(error.get("code")) or "error"
    if error:
        return "error"
    if body.get("object") == "error" or (body.get("type") == "error" and error is None):
        kind = word(body.get("type"))
        return (kind if kind != "error" else "") or _code(body.get("code")) or "error"
    return ""


def _code(code: object) -> str:
    return str(code)[:128] if isinstance(code, int) else word(code)


def filled(value: object) -> bool:
    """A payload that has something in it."""
    return isinstance(value, str | list | dict) and bool(value)


def mapping(value: object) -> Body:
    """The value when it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}
