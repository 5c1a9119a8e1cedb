"""Content codings, undone for looking only: what is forwarded stays as it came."""

from __future__ import annotations

import zlib

MAX_OUT_B = 8 << 20
"""One chunk may not become more than this: a small one can be made to fill the memory."""

_GZIP, _ZLIB, _RAW = 31, 15, -15
"""Window bits: gzip, zlib and bare deflate."""


class UnreadableError(Exception):
    """A body that cannot be looked into; the message says why and quotes nothing of it."""


class Plain:
    """A body without coding."""

    def feed(self, chunk: bytes) -> bytes:
        """The chunk itself."""
        return chunk


class Inflater:
    """Undoes gzip or deflate, chunk by chunk; gives at once what a flush of the sender made readable.

    Args:
        gzip: the coding is gzip, of one member or several; else deflate, with zlib's frame or without.
    """

    def __init__(self, *, gzip: bool) -> None:
        self._bits = _GZIP if gzip else _ZLIB
        self._stream = zlib.decompressobj(self._bits)
        self._begun = False

    def feed(self, chunk: bytes) -> bytes:
        """What the chunk adds.

        Raises:
            UnreadableError: it is not of that coding, or expands too far.
        """
        out = bytearray()
        while chunk:
            out += self._inflate(chunk, MAX_OUT_B - len(out))
            if self._stream.unconsumed_tail or len(out) >= MAX_OUT_B:
                raise UnreadableError("its compression expands too far")
            chunk = self._stream.unused_data if self._stream.eof else b""
            if chunk and self._bits == _GZIP:
                self._stream = zlib.decompressobj(self._bits)
            elif chunk:
                break  # bytes after the end of a deflate body
        return bytes(out)

    def _inflate(self, chunk: bytes, room: int) -> bytes:
        try:
            out = self._stream.decompress(chunk, room)
        except zlib.error:
            if self._begun or self._bits != _ZLIB:
                raise UnreadableError("it is not compressed as it says") from None
            self._bits = _RAW  # some servers send bare deflate
            self._stream = zlib.decompressobj(_RAW)
            return self._inflate(chunk, room)
        self._begun = True
        return out


def decoder(coding: str) -> Plain | Inflater:
    """What reads a `Content-Encoding`.

    Raises:
        UnreadableError: the standard library cannot undo it.
    """
    name = coding.strip().lower()
    if name in ("", "identity"):
        return Plain()
    if name in ("gzip", "x-gzip", "deflate"):
        return Inflater(gzip=name != "deflate")
    known = name if name in ("br", "zstd", "compress") else "another one"
    raise UnreadableError(f"encoding {known}")
