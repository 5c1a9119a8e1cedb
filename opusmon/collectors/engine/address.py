"""Where an engine is: a URL without secrets, and the label that rows carry."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

from opusmon.loopback import is_loopback

_MAX_CHARS = 200


class AddressError(ValueError):
    """A URL that cannot be used. The text says why and repeats none of it."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where to ask.

    Attributes:
        scheme: http or https.
        host: name or address, IPv6 without brackets.
        port: 1-65535.
        path: "" where the caller left it open.
        query: sent along, and kept out of every text.
        pid: process that listens there, 0 where that is not known.
    """

    scheme: str
    host: str
    port: int
    path: str = ""
    query: str = field(default="", repr=False)
    pid: int = 0

    @property
    def place(self) -> str:
        """host:port, for people."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def local(self) -> bool:
        """It is this host by its loopback name or address."""
        return is_loopback(self.host)

    def label(self, path: str) -> str:
        """What rows and status say: host:port/path."""
        return f"{self.place}{path}"

    def url(self, path: str) -> str:
        """What is asked; it may hold the caller's query, so it goes nowhere else."""
        return f"{self.scheme}://{self.place}{path}{'?' + self.query if self.query else ''}"


def parse(url: str) -> Address:
    """Take a URL apart. `host:port` alone will do.

    Raises:
        AddressError: it is no http or https URL, or holds a user name or password.
    """
    text = url.strip() if "://" in url else f"http://{url.strip()}"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise AddressError("it is not a URL such as http://127.0.0.1:8000") from None
    if parts.scheme not in ("http", "https"):
        raise AddressError("only http:// and https:// can be asked")
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        raise AddressError("it holds a user name or password, which opusmon does not send or keep")
    if not host or port == 0 or not all(char.isalnum() or char in "-._:%" for char in host):
        raise AddressError("it names no host and port, such as http://127.0.0.1:8000")
    path = quote(parts.path, safe="/%:@!$&'()*+,;=~-._")[:_MAX_CHARS]
    standard = 443 if parts.scheme == "https" else 80
    return Address(parts.scheme, host, port or standard, "" if path == "/" else path, parts.query)
