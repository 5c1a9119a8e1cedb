"""Why there is no page, and what asks for one; apart from `fetch`, so that the HTTP client is imported last."""

from __future__ import annotations

from typing import Protocol


class Getter(Protocol):
    """Asks for a page; `fetch.Fetcher` is one."""

    async def get(self, url: str) -> str:
        """The page as text.

        Raises:
            FetchError: there is none.
        """
        ...


class FetchError(Exception):
    """There is no page. The words are opusmon's own: nothing the server sent is among them.

    Attributes:
        reason: one clause.
        remedy: a step, "" when there is none.
        status: HTTP status, 0 where it did not come to one.
        refused: nothing listens there.
    """

    def __init__(self, reason: str, remedy: str = "", *, status: int = 0, refused: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.status = status
        self.refused = refused
