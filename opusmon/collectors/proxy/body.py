"""A request's body on its way to the upstream, held as long as it may have to be sent once more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from aiohttp import web

HELD_B = 1 << 20
"""Bodies up to this size can be sent again; larger ones only pass through."""


class Body:
    """The body of one request.

    Args:
        request: whose body it is.
        look: called with each piece, once.
        done: called when all of it has been read.
    """

    def __init__(
        self, request: web.BaseRequest, look: Callable[[bytes], None], done: Callable[[], None]
    ) -> None:
        self._request, self._look, self._done = request, look, done
        self._held: list[bytes] | None = []
        self._held_b = 0

    @property
    def again(self) -> bool:
        """It can still be sent from the beginning."""
        return self._held is not None

    def parts(self) -> bytes | AsyncIterator[bytes] | None:
        """What to send: in one piece if it is all here, which saves a packet, else as it comes; None for no body."""
        if not self._request.body_exists:
            self._done()
            return None
        if not self._request.content.is_eof():
            return self._pieces()
        if rest := self._request.content.read_nowait(-1):
            self._took(rest)
        self._done()
        return b"".join(self._held) if self._held is not None else rest

    def let_go(self) -> None:
        """It need not be sent again."""
        self._held = None

    async def _pieces(self) -> AsyncIterator[bytes]:
        for piece in list(self._held or ()):
            yield piece
        async for piece in self._request.content.iter_any():
            self._took(piece)
            yield piece
        self._done()

    def _took(self, piece: bytes) -> None:
        self._look(piece)
        self._held_b += len(piece)
        if self._held_b > HELD_B:
            self._held = None
        elif self._held is not None:
            self._held.append(piece)
