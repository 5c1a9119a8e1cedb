"""What a request asks for: its model, and whether the answer is to be a stream. Nothing else of it is read."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from opusmon.collectors.api.request import word

WHOLE_B = 1 << 20
_PARSE_B = 1 << 17
_EDGE_B = 1 << 16
_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.){0,256}")')
_STREAM = re.compile(rb'"stream"\s*:\s*(true|false)\b')


@dataclass(frozen=True, slots=True)
class Asked:
    """What was found.

    Attributes:
        model: "" when it is not known.
        stream: a stream was asked for; None when that is not known.
    """

    model: str = ""
    stream: bool | None = None


class BodyWatch:
    """Keeps as much of a request's body as it takes to find the two fields, until `asked`.

    A body up to `WHOLE_B` is kept whole, of a longer one the beginning and the end: clients write the model before
    or after the messages.
    """

    def __init__(self) -> None:
        self.size_b = 0
        self._kept = bytearray()
        self._tail = bytearray()

    def feed(self, chunk: bytes) -> None:
        """More of the body."""
        self.size_b += len(chunk)
        if not self._tail and len(self._kept) + len(chunk) <= WHOLE_B:
            self._kept += chunk
            return
        if not self._tail:
            self._tail = self._kept[_EDGE_B:]
            del self._kept[_EDGE_B:]
        self._tail += chunk
        del self._tail[:-_EDGE_B]

    def asked(self) -> Asked:
        """What the body asks for, after its end; forgets the body."""
        head, tail = bytes(self._kept), bytes(self._tail)
        self._kept, self._tail = bytearray(), bytearray()
        if not tail and len(head) <= _PARSE_B:
            return _parsed(head)
        found = _scanned(head, tail)
        if found is not None:
            return found
        return Asked() if tail else _parsed(head)


def _parsed(body: bytes) -> Asked:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return Asked()
    if not isinstance(fields, dict):
        return Asked()
    stream = fields.get("stream", False)
    return Asked(word(fields.get("model")), stream if isinstance(stream, bool) else None)


def _scanned(*parts: bytes) -> Asked | None:
    """The fields without parsing all: a quote inside a string is escaped, so a match is a real key.

    It may be the key of an inner object; None when the matches differ.
    """
    models = {match[1] for part in parts for match in _MODEL.finditer(part)}
    streams = {match[1] for part in parts for match in _STREAM.finditer(part)}
    if len(models) > 1 or len(streams) > 1:
        return None
    whole = not parts[-1]
    stream = {b"true": True, b"false": False}.get(next(iter(streams), b"false" if whole else b""))
    return Asked(_text(next(iter(models), b'""')), stream)


def _text(quoted: bytes) -> str:
    try:
        return word(json.loads(quoted))
    except ValueError:
        return ""
