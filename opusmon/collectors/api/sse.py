"""Server-sent events out of a byte stream, incrementally: bytes in, events out, nothing held back."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_EVENT_B = 1 << 20
"""An event with more data than this is reported without it."""

_EOL = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes:
        data: its data lines joined by LF, not decoded; empty when `cut`.
        name: its `event` field, "" when there was none.
        cut: the data was longer than the parser's limit and was dropped.
    """

    data: bytes
    name: str = ""
    cut: bool = False


class Parser:
    """Splits a stream into events by the rules of the HTML standard, section 9.2.

    Lines end with CR, LF or CRLF. A CR that ends a chunk ends its line at once, and an LF that follows it in the next
    chunk belongs to it: waiting would hold the event back. Lines are split as bytes, so a character cut between
    chunks, or U+2028 inside one, does no harm. Comments are dropped, a byte order mark at the start is skipped.

    Args:
        limit_b: bytes of data kept per event; the stream may go on for ever, memory may not.
    """

    def __init__(self, limit_b: int = MAX_EVENT_B) -> None:
        self._limit_b = limit_b
        self._line = bytearray()
        self._long = False
        self._data: list[bytes] = []
        self._data_b = 0
        self._has_data = False
        self._cut = False
        self._name = ""
        self._after_cr = False
        self._first = True

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that this chunk completes."""
        if not chunk:
            return []
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        pieces = _EOL.split(chunk)
        self._after_cr = chunk.endswith(b"\r") if chunk else False
        events: list[Event] = []
        for piece in pieces[:-1]:
            self._take(piece)
            self._end_line(events)
        self._take(pieces[-1])
        return events

    def finish(self) -> list[Event]:
        """What the end of the stream leaves: an event whose blank line never came.

        The standard drops it; clients of the model APIs use it, and so does this one.
        """
        events: list[Event] = []
        self._end_line(events)
        self._dispatch(events)
        return events

    def _take(self, piece: bytes) -> None:
        """More of the current line."""
        room = self._limit_b + 64 - len(self._line)
        if len(piece) > room:
            self._long = True
            piece = piece[: max(room, 0)]
        self._line += piece

    def _end_line(self, events: list[Event]) -> None:
        line = bytes(self._line)
        self._line.clear()
        if self._first:
            self._first = False
            line = line.removeprefix(_BOM)
        if line:
            self._field(line)
        else:
            self._dispatch(events)
        self._long = False

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._has_data = True
            self._data_b += len(value) + 1
            self._cut |= self._long or self._data_b > self._limit_b + 1
            if self._cut:
                self._data.clear()
            else:
                self._data.append(value)
        elif name == b"event":
            self._name = value[:128].decode("utf-8", "replace")

    def _dispatch(self, events: list[Event]) -> None:
        if self._has_data:
            events.append(Event(b"\n".join(self._data), self._name, self._cut))
        self._data.clear()
        self._data_b = 0
        self._has_data = self._cut = False
        self._name = ""
