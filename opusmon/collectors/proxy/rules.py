"""What the proxy forwards, and how: addresses, paths, hosts, headers. Pure functions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from multidict import CIMultiDict

from opusmon.collectors.proxy.errors import ProxyUnavailable
from opusmon.loopback import names_loopback

SOCKET_PATH_B = 107
"""Linux keeps 108 bytes for it, the last one for a zero (unix(7))."""
PATHS: tuple[str, ...] = (
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/models/*",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/*",
    "/v1/embeddings",
    "/health",
)
"""Paths forwarded without being asked: what generates, and what its clients look up. `/metrics` is not among them:
the engine's own port serves it, and a scrape is no API request."""
METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "DELETE"})

_HOP = frozenset(
    [
        "connection",
        "keep-alive",
        "proxy-connection",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "http2-settings",
    ]
)
"""RFC 9110, 7.6.1, and the two for proxies: they speak of one connection, and each side has its own."""
_HAD = frozenset({"host", "expect"})
"""Answered here: the upstream has its own name, and `100 Continue` was sent or the request refused."""
_DOTS = re.compile(r"(^|/)(\.|%2e){1,2}(/|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Listen:
    """Where to listen: a loopback address and port, or the path of a unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def text(self) -> str:
        """As it is given on the command line."""
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(text: str) -> Listen:
    """Read `HOST:PORT`, `PORT` or `unix:/path`; port 0 takes a free one.

    What is said of a wrong one names no option: the proxy has two, and the receiver of telemetry a third.

    Raises:
        ProxyUnavailable: it is none of them, or not loopback: requests carry keys, and anyone could send some.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/"):
            raise ProxyUnavailable(
                "a unix socket needs an absolute path", "for example unix:/run/user/1000/opusmon.sock"
            )
        if len(os.fsencode(path)) > SOCKET_PATH_B:
            reason = f"the path of a unix socket has {SOCKET_PATH_B} bytes at most"
            raise ProxyUnavailable(reason, "choose a shorter one, for example in /run")
        return Listen(path=path)
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host or text.startswith(":") else "127.0.0.1"
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ProxyUnavailable(
            f"{text[:80]!r} is no address to listen on", "write 127.0.0.1:PORT or unix:/path"
        )
    if not names_loopback(host):
        reason = f"{host[:80] or 'every address'} is not loopback, and what is sent there is in the clear"
        raise ProxyUnavailable(reason, f"write 127.0.0.1:{port}, and reach it from elsewhere by ssh -L")
    return Listen("127.0.0.1" if host.lower() == "localhost" else host, int(port))


def parse_upstream(text: str) -> str:
    """The base URL without a trailing slash, and without `/v1`, with which the paths of clients begin.

    Raises:
        ProxyUnavailable: it is empty, no http or https URL, or carries a password, a query or a fragment.
    """
    example = "write http://HOST:PORT or https://HOST"
    if not text:
        raise ProxyUnavailable("no upstream was given", example)
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise ProxyUnavailable("the upstream is no http or https URL", example)
    if "@" in parts.netloc or parts.query or parts.fragment or "?" in text:
        reason = "the upstream may hold neither a password nor a query: clients send their own keys"
        raise ProxyUnavailable(reason, example)
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def parse_allow(allow: str | Iterable[str]) -> tuple[str, ...]:
    """Extra paths: `/path` or `/path/*`, separated by commas or one by one.

    Raises:
        ProxyUnavailable: one does not begin with a slash, or allows everything.
    """
    given = (allow,) if isinstance(allow, str) else allow
    words = [word.strip() for text in given for word in text.split(",")]
    paths = tuple(word for word in words if word)
    for path in paths:
        if not path.startswith("/") or path == "/*" or "*" in path[:-1]:
            raise ProxyUnavailable(
                f"{path[:80]!r} is no path to allow", "name paths such as /v1/rerank,/tokenize"
            )
    return paths


class Paths:
    """The paths that are forwarded.

    Args:
        extra: those beyond `PATHS`; a `*` at the end stands for anything.
    """

    def __init__(self, extra: Iterable[str] = ()) -> None:
        every = (*PATHS, *extra)
        self._exact = frozenset(path for path in every if not path.endswith("*"))
        self._prefixes = tuple(path[:-1] for path in every if path.endswith("*"))

    def match(self, path: str) -> str:
        """The entry that allows a path, "" when none does. Rows carry the entry: a path may hold anything."""
        if path in self._exact:
            return path
        if _DOTS.search(path) or "\\" in path:
            return ""
        return next((prefix + "*" for prefix in self._prefixes if path.startswith(prefix)), "")


def own_hosts(hosts: Iterable[str]) -> bool:
    """Every `Host` header names this machine by a loopback name, whatever the port.

    A page elsewhere can make a browser connect here under its own name (DNS rebinding); its `Host` gives it away.
    """
    return all(names_loopback(_host(value)) for value in hosts)


def _host(value: str) -> str:
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0]


def _named(headers: Mapping[str, str] | CIMultiDict[str], values: Iterable[str]) -> frozenset[str]:
    """Header names that `Connection` lists."""
    return frozenset(word.strip().lower() for value in values for word in value.split(",")) & frozenset(
        name.lower() for name in headers
    )


def forwardable(headers: CIMultiDict[str], *, request: bool) -> CIMultiDict[str]:
    """The headers that go on, repeated ones and order kept.

    Args:
        headers: as they came.
        request: they are a request's, whose `Host` and `Expect` end here.
    """
    drop = _HOP | _named(headers, headers.getall("connection", ()))
    if request:
        drop |= _HAD
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in drop)
