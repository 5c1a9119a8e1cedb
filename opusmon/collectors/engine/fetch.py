"""One GET of a metrics page, bounded in time and size. The only module here that knows the HTTP client."""

from __future__ import annotations

import errno
import zlib
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

import aiohttp

from opusmon import __version__
from opusmon.collectors.engine.trouble import FetchError

CONNECT_S = 1.0
TOTAL_S = 2.0
MAX_B = 8 * 1024 * 1024
"""After decompression."""

_HEADERS: Mapping[str, str] = {
    "Accept": "text/plain;version=0.0.4, */*;q=0.1",
    "Accept-Encoding": "identity",  # compressing would cost the server more than the loopback saves
    "User-Agent": f"opusmon/{__version__}",
}
_WBITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class Fetcher:
    """An HTTP client without cookies, proxies, redirects or stored credentials.

    Args:
        connect_s: time for name and connection, in s.
        total_s: time for everything, in s.
        max_b: size of a page, in bytes after decompression.
    """

    def __init__(self, connect_s: float = CONNECT_S, total_s: float = TOTAL_S, max_b: int = MAX_B) -> None:
        self._total_s = total_s
        self._max_b = max_b
        self._timeout = aiohttp.ClientTimeout(total=total_s, connect=connect_s, sock_connect=connect_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Open the client."""
        self._session = aiohttp.ClientSession(
            timeout=self._timeout,
            headers=_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=64, limit_per_host=2),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def get(self, url: str) -> str:
        """The page as text; bytes that are not UTF-8 become U+FFFD.

        Raises:
            FetchError: there is none, for whatever reason.
        """
        assert self._session is not None  # noqa: S101  (callers enter first)
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                _check(response)
                body = await self._body(response)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            raise _said(error, self._total_s) from None  # the original holds the URL
        return body.decode("utf-8", "replace")

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        unpack = _unpacker(response)
        body = bytearray()
        async for chunk in response.content.iter_any():
            try:
                body += chunk if unpack is None else unpack.decompress(chunk, self._max_b + 1 - len(body))
            except zlib.error:
                raise FetchError("its compressed answer is damaged") from None
            if len(body) > self._max_b:
                raise FetchError(f"its page is over {self._max_b / 2**20:g} MiB")
        if unpack is not None and not unpack.eof:
            raise FetchError("its compressed answer is cut short")
        return bytes(body)


class _Unpacker(Protocol):
    """As much of a zlib decompressor as is needed."""

    @property
    def eof(self) -> bool: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


def _said(error: BaseException, total_s: float) -> FetchError:
    """The error in our own words."""
    if isinstance(error, TimeoutError):
        return FetchError(f"no whole answer within {total_s:g} s")
    for kind, reason, remedy in _WORDS:
        if isinstance(error, kind):
            refused = getattr(error, "errno", None) == errno.ECONNREFUSED
            return FetchError("nothing listens there" if refused else reason, remedy, refused=refused)
    return FetchError("the connection broke")


_WORDS: tuple[tuple[type[BaseException], str, str], ...] = (
    (
        aiohttp.ClientSSLError,
        "TLS failed: it speaks plain HTTP, or its certificate is not trusted here",
        "Name its plain http:// address, or add its CA to the system's store",
    ),
    (aiohttp.ClientConnectorDNSError, "its host name is not known", ""),
    (aiohttp.ClientConnectorError, "it cannot be reached", ""),
    (aiohttp.ClientPayloadError, "its answer is cut short", ""),
    (aiohttp.ServerDisconnectedError, "it closed the connection without an answer", ""),
    (aiohttp.ClientResponseError, "it does not speak HTTP", ""),
    (aiohttp.InvalidURL, "its URL cannot be used", ""),
)


def _check(response: aiohttp.ClientResponse) -> None:
    """See that there is a page to read.

    Raises:
        FetchError: the status or the type of the content says otherwise.
    """
    status = response.status
    if 300 <= status < 400:
        raise FetchError(
            f"it redirects (HTTP {status}), which is not followed",
            "Name the final address with --engine URL",
            status=status,
        )
    if status in (401, 403):
        raise FetchError(f"it wants a key (HTTP {status}); opusmon sends none", status=status)
    if status != 200:
        raise FetchError(f"it answers HTTP {status}", status=status)
    if response.content_type in ("text/html", "application/json", "application/xhtml+xml"):
        raise FetchError("it answers HTML or JSON, not metrics", status=status)


def _unpacker(response: aiohttp.ClientResponse) -> _Unpacker | None:
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in _WBITS:
        raise FetchError("it compresses its answer in a way that was not asked for")
    return zlib.decompressobj(_WBITS[encoding])
