"""What is raised where the proxy cannot run, and what became of a request that could not be forwarded."""

from __future__ import annotations

import errno
import ssl
from dataclasses import dataclass

import aiohttp

from opusmon.collectors.api.observer import End
from opusmon.collectors.base import UnavailableError


class ProxyUnavailable(UnavailableError):  # noqa: N818  (it reads as what happened)
    """The proxy cannot be started as it was asked for."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the upstream gave no answer, or no whole one. The words are ours: an exception's text may quote anything.

    Attributes:
        end: how the connection ended.
        words: what happened, for people and for the field `error`.
        status: of the answer to the client, if none has begun.
    """

    end: End
    words: str
    status: int = 502


_BY_ERRNO = {
    errno.ECONNREFUSED: "connection refused",
    errno.ECONNRESET: "connection reset",
    errno.EPIPE: "connection closed",
    errno.EHOSTUNREACH: "host unreachable",
    errno.ENETUNREACH: "network unreachable",
    errno.EMFILE: "too many open files",
}


def failure(error: BaseException) -> Failure:
    """What an exception of the upstream's side means."""
    if isinstance(error, TimeoutError) or getattr(error, "errno", None) == errno.ETIMEDOUT:
        return Failure("timeout", "upstream timed out", 504)
    return Failure("cut", _words(error))


def _words(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "upstream's name does not resolve"
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return "upstream's TLS was refused"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "upstream closed the connection before answering"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "upstream's answer was cut"
    if isinstance(error, aiohttp.ClientResponseError):
        return "upstream's answer is not HTTP"
    return _BY_ERRNO.get(getattr(error, "errno", None) or 0, "connection lost")
