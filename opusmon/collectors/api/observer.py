"""Watches one answer go by and decides, at its end, how it went."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

from opusmon.collectors.api.anthropic_stream import AnthropicReading
from opusmon.collectors.api.content import Inflater, Plain, UnreadableError, decoder
from opusmon.collectors.api.openai_stream import ChatReading, ResponsesReading
from opusmon.collectors.api.reading import Reading, error_type
from opusmon.collectors.api.request import Outcome, Request, word
from opusmon.collectors.api.sse import Event, Parser

End = Literal["clean", "cut", "timeout", "client", "stopped"]
"""How the connection ended: as HTTP says it should, by the server or the network, by a timeout, by the client, by the
end of opusmon itself."""

MAX_JSON_B = 2 << 20
MAX_ERROR_B = 1 << 16
_READINGS: tuple[tuple[str, type[Reading]], ...] = (
    ("/messages", AnthropicReading),
    ("/messages/count_tokens", AnthropicReading),
    ("/chat/completions", ChatReading),
    ("/completions", ChatReading),
    ("/embeddings", ChatReading),
    ("/responses", ResponsesReading),
)


def reading_for(method: str, path: str) -> Reading | None:
    """What reads the answers of an endpoint; None for those that generate nothing."""
    if method != "POST":
        return None
    return next((kind() for end, kind in _READINGS if path.endswith(end)), None)


class Observer:
    """Understands an answer as far as it can, and says where it cannot.

    Args:
        method: of the request.
        path: of the request, without its query.

    Attributes:
        reading: what was understood; None for endpoints that generate nothing.
        streaming: the answer is a stream of events.
        blind: why the body is not looked into, "" while it is.
    """

    def __init__(self, method: str, path: str) -> None:
        self.reading = reading_for(method, path)
        self.streaming = False
        self.blind = ""
        self._status = 0
        self._mode: Literal["", "sse", "json", "other"] = ""
        self._content: Plain | Inflater = Plain()
        self._parser = Parser()
        self._kept = bytearray()
        self._kind = ""
        self._broken = False
        self._some = False

    def head(self, status: int, headers: Mapping[str, str], asked_stream: bool | None) -> None:
        """The response's status and headers, in a case-insensitive mapping."""
        self._status = status
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        self._mode, self._kind = _mode(kind, asked_stream), word(kind)
        self.streaming = self._mode == "sse"
        if self.reading is None:
            return
        try:
            self._content = decoder(headers.get("content-encoding", ""))
        except UnreadableError as error:
            self.blind = str(error)

    def feed(self, t: int, chunk: bytes) -> None:
        """A piece of the body as it was on the wire, with the time it came (monotonic ns)."""
        self._some = True
        if self.reading is None or self.blind:
            return
        try:
            body = self._content.feed(chunk)
        except UnreadableError as error:
            self.blind = str(error)
            return
        if self._mode == "sse" and self._status < 400:
            self._events(t, self._parser.feed(body))
        elif self._mode != "other" or self._status >= 400:
            self._keep(body)

    def finish(self, t: int) -> None:
        """There is no more of the body."""
        if self.reading is None or self.blind:
            return
        if self._mode == "sse" and self._status < 400:
            self._events(t, self._parser.finish())
        else:
            self._whole(self.reading)
        self._kept.clear()

    def outcome(self, end: End) -> Outcome:
        """How the request went; HTTP's status alone does not say."""
        if self._status >= 400:
            return "upstream_http_error"
        if self.reading is not None and self.reading.error:
            return "stream_error_event" if self.streaming else "json_error_in_200"
        if end in ("client", "stopped"):
            done = self.reading is not None and self.reading.finished
            return "ok" if done else "client_disconnect" if end == "client" else "monitor_stopped"
        if end != "clean":
            return "timeout" if end == "timeout" else "transport_error"
        return "ok" if self._complete() else "truncated"

    def fill(self, request: Request) -> None:
        """Put what was understood into a row, the clocks aside."""
        request.streaming = float(self.streaming)
        if self.reading is not None and not self.blind:
            self.reading.fill(request)

    def _complete(self) -> bool:
        """A clean end of the connection is the end of the answer."""
        if self.reading is None or not 200 <= self._status < 300:
            return True
        if self.blind:
            return self._some
        return self.reading.finished and not self._broken

    def _events(self, t: int, events: list[Event]) -> None:
        assert self.reading is not None  # noqa: S101  (the caller looked)
        for event in events:
            if event.data.strip() == b"[DONE]":
                self.reading.done()
                continue
            try:
                body = json.loads(event.data)
            except (ValueError, RecursionError):
                body = {}
            if isinstance(body, dict):
                self.reading.event(t, body, event.name)

    def _keep(self, body: bytes) -> None:
        self._kept += body
        if len(self._kept) > (MAX_JSON_B if self._status < 400 else MAX_ERROR_B):
            self._kept.clear()
            self.blind = "answer too large to look into"

    def _whole(self, reading: Reading) -> None:
        """Read a JSON answer."""
        try:
            body = json.loads(self._kept) if self._kept else None
        except (ValueError, RecursionError):
            body = None
        if self._status >= 400:
            reading.error = (error_type(body) if isinstance(body, dict) else "") or str(self._status)
        elif self._mode == "other" and self._some:
            reading.error = f"not JSON but {self._kind or 'untyped'}"
        elif isinstance(body, dict):
            reading.answer(body)
        else:
            self._broken = True


def _mode(kind: str, asked_stream: bool | None) -> Literal["sse", "json", "other"]:
    if kind == "text/event-stream":
        return "sse"
    if kind == "application/json" or kind.endswith("+json"):
        return "json"
    return "sse" if asked_stream and kind in ("", "text/plain", "application/octet-stream") else "other"
