"""What the receiver answers, in the sender's own encoding: full or partial success, and errors."""

from __future__ import annotations

import json
from typing import Literal

Encoding = Literal["json", "protobuf"]
TYPES: dict[Encoding, str] = {"json": "application/json", "protobuf": "application/x-protobuf"}
_REJECTED = {"traces": "rejectedSpans", "logs": "rejectedLogRecords", "metrics": "rejectedDataPoints"}
_CODES = {400: 3, 403: 7, 404: 5, 405: 12, 413: 8, 415: 3, 429: 8}
"""HTTP status to the code of google.rpc.Status: 3 invalid argument, 5 not found, 7 denied, 8 exhausted, 12 unknown."""


class Refusal(Exception):  # noqa: N818  (it reads as what happened)
    """A request that is not taken.

    Args:
        status: HTTP status.
        words: for the sender; nothing of what it sent.
        retry_after_s: when it may come again, 0 for never.
    """

    def __init__(self, status: int, words: str, retry_after_s: int = 0) -> None:
        super().__init__(words)
        self.status, self.words, self.retry_after_s = status, words, retry_after_s


def success(encoding: Encoding, signal: str, rejected: int = 0, words: str = "") -> bytes:
    """An Export...ServiceResponse; with `partial_success` when records were rejected."""
    if encoding == "json":
        part = (
            {"partialSuccess": {_REJECTED[signal]: str(rejected), "errorMessage": words}} if rejected else {}
        )
        return json.dumps(part).encode()
    if not rejected:
        return b""
    return _bytes_field(1, _varint_field(1, rejected) + _bytes_field(2, words.encode()))


def failure(encoding: Encoding, refusal: Refusal) -> bytes:
    """A google.rpc.Status."""
    code = _CODES.get(refusal.status, 2)
    if encoding == "json":
        return json.dumps({"code": code, "message": refusal.words}).encode()
    return _varint_field(1, code) + _bytes_field(2, refusal.words.encode())


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
