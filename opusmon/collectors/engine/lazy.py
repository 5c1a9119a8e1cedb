"""The HTTP client, brought when there is a page to ask for: most hosts have no engine, and it takes 0.2 s and 15 MB."""

from __future__ import annotations

import asyncio
from importlib import import_module
from types import TracebackType
from typing import Any, Self


class LazyFetcher:
    """`fetch.Fetcher`, opened at the first question; its import runs beside the event loop."""

    def __init__(self) -> None:
        self._fetcher: Any = None
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Open nothing yet."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close what was opened."""
        if self._fetcher is not None:
            await self._fetcher.__aexit__(kind, error, trace)

    async def get(self, url: str) -> str:
        """The page as text; see `fetch.Fetcher.get`.

        Raises:
            FetchError: there is none, for whatever reason.
        """
        async with self._opening:
            if self._fetcher is None:
                module = await asyncio.to_thread(import_module, "opusmon.collectors.engine.fetch")
                self._fetcher = await module.Fetcher().__aenter__()
        page: str = await self._fetcher.get(url)
        return page
