"""Batches over a pipe: length-prefixed frames, encoder and decoder without any IO.

A frame is a u32 length, a kind byte and a payload. Channels and strings are sent once, before the first
batch that needs them; batches use the chunk codec. The decoder trusts nothing: sizes are bounded and a frame
that does not fit is a `WireError`.
"""

from __future__ import annotations

import json
import struct

import numpy as np

from opusmon import codec
from opusmon.schema import MAX_TEXTS, Batch, Channel, Rows, SchemaError, StringTable

VERSION = 1
MAX_FRAME_B = 16 * 1024 * 1024
MAX_CHANNELS = 256

_HEAD = struct.Struct("<IB")
_BATCH = struct.Struct("<HIB")
_CHANNEL = struct.Struct("<H")
_STRING = struct.Struct("<I")

HELLO, CHANNEL, STRING, BATCH, UNAVAILABLE = range(1, 6)


class WireError(ValueError):
    """Bytes that are not frames of this protocol."""


class Encoder:
    """Batches to bytes.

    Args:
        strings: the table the batches refer to; what is new in it is sent before each batch.
        compress: zlib the columns, for a network; a local pipe does better without.
    """

    def __init__(self, strings: StringTable, *, compress: bool = False) -> None:
        self._strings = strings
        self._sent_strings = 1
        self._channels: dict[str, int] = {}
        self._codec = codec.ZLIB if compress else codec.RAW

    def hello(self, host: str) -> bytes:
        """The first frame."""
        return _frame(HELLO, json.dumps({"version": VERSION, "host": host}).encode())

    def unavailable(self, reason: str, remedy: str) -> bytes:
        """Say why nothing will come."""
        return _frame(UNAVAILABLE, json.dumps({"reason": reason, "remedy": remedy}).encode())

    def batch(self, batch: Batch) -> bytes:
        """The batch, preceded by whatever the other side has not seen yet."""
        parts: list[bytes] = []
        number = self._channels.get(batch.channel.name)
        if number is None:
            number = self._channels[batch.channel.name] = len(self._channels)
            parts.append(_frame(CHANNEL, _CHANNEL.pack(number) + batch.channel.to_json().encode()))
        for text_id, text in self._strings.since(self._sent_strings):
            parts.append(_frame(STRING, _STRING.pack(text_id) + text.encode("utf-8", "replace")))
        self._sent_strings = len(self._strings)
        head = _BATCH.pack(number, len(batch.rows), self._codec)
        parts.append(_frame(BATCH, head + codec.encode(batch.rows, self._codec)))
        return b"".join(parts)


class Decoder:
    """Bytes to batches whose text ids refer to the receiver's own table.

    Args:
        strings: the receiver's table.
        origin: host name put on every batch, "" for this one.

    Attributes:
        host: name the sender gave itself, once its first frame has come.
        unavailable: (reason, remedy) when the sender said that nothing will come.
    """

    def __init__(self, strings: StringTable, origin: str = "") -> None:
        self._strings = strings
        self._origin = origin
        self._buffer = bytearray()
        self._channels: dict[int, Channel] = {}
        self._ids: dict[int, int] = {0: 0}
        self.host = ""
        self.unavailable: tuple[str, str] | None = None

    def feed(self, data: bytes) -> list[Batch]:
        """Take bytes as they come; returns the batches that are complete.

        Raises:
            WireError: the stream is not this protocol, or is damaged; it cannot go on.
        """
        self._buffer += data
        batches: list[Batch] = []
        offset = 0
        while len(self._buffer) - offset >= _HEAD.size:
            size, kind = _HEAD.unpack_from(self._buffer, offset)
            if size > MAX_FRAME_B:
                raise WireError(f"a frame of {size} bytes is over the limit")
            if len(self._buffer) - offset - _HEAD.size < size:
                break
            start = offset + _HEAD.size
            offset = start + size
            batch = self._frame(kind, bytes(self._buffer[start:offset]))
            if batch is not None:
                batches.append(batch)
        del self._buffer[:offset]
        return batches

    def _frame(self, kind: int, payload: bytes) -> Batch | None:
        readers = {
            HELLO: self._hello,
            CHANNEL: self._channel,
            STRING: self._string,
            UNAVAILABLE: self._refusal,
        }
        try:
            if kind == BATCH:
                return self._batch(payload)
            # Another kind comes from a newer sender: skipping it is what keeps old readers working.
            readers.get(kind, lambda _: None)(payload)
        except WireError:
            raise
        except (struct.error, SchemaError, codec.CodecError, ValueError, KeyError, TypeError) as error:
            raise WireError(f"damaged frame of kind {kind}: {error}") from error
        return None

    def _hello(self, payload: bytes) -> None:
        body = json.loads(payload)
        if body["version"] != VERSION:
            raise WireError(f"the other side speaks version {body['version']}, this one {VERSION}")
        self.host = str(body["host"])

    def _channel(self, payload: bytes) -> None:
        (number,) = _CHANNEL.unpack_from(payload)
        if number >= MAX_CHANNELS:
            raise WireError(f"channel number {number} is over the limit")
        self._channels[number] = Channel.from_json(payload[_CHANNEL.size :].decode("utf-8", "replace"))

    def _string(self, payload: bytes) -> None:
        (text_id,) = _STRING.unpack_from(payload)
        if len(self._ids) <= MAX_TEXTS:
            self._ids[text_id] = self._strings.intern(payload[_STRING.size :].decode("utf-8", "replace"))

    def _refusal(self, payload: bytes) -> None:
        body = json.loads(payload)
        self.unavailable = (str(body["reason"]), str(body["remedy"]))

    def _batch(self, payload: bytes) -> Batch | None:
        number, n, how = _BATCH.unpack_from(payload)
        channel = self._channels.get(number)
        if channel is None:
            raise WireError(f"batch of channel {number}, which was not described")
        if n == 0:
            return None
        rows = codec.decode(payload[_BATCH.size :], n, channel.dtype, how)
        self._translate(rows, channel)
        return Batch(channel, rows, self._origin)

    def _translate(self, rows: Rows, channel: Channel) -> None:
        """Replace the sender's text ids by the receiver's, in place; an id never sent becomes 0."""
        for field in channel.fields:
            if field.text:
                ids = rows[field.name].tolist()
                rows[field.name] = np.array([self._ids.get(number, 0) for number in ids], dtype=field.dtype)


def _frame(kind: int, payload: bytes) -> bytes:
    return _HEAD.pack(len(payload), kind) + payload
