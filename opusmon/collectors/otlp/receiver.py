"""The listening side of OTLP/HTTP: loopback only, bounded in size, rate and time."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from aiohttp import web

from opusmon.clock import NS, Clock
from opusmon.collectors.cost import CallCost
from opusmon.collectors.otlp.answers import TYPES, Encoding, Refusal, failure, success
from opusmon.collectors.otlp.decode import decode_json, decode_protobuf, has_protobuf
from opusmon.collectors.otlp.records import Record, Signal, Undecodable
from opusmon.collectors.proxy.rules import Listen, own_hosts
from opusmon.collectors.proxy.server import listening_socket
from opusmon.loopback import names_loopback

BODY_B = 4 * 1024 * 1024
"""Of a body, before and after decompression."""
BODY_S = 10.0
BODIES_AT_ONCE = 8
POSTS_PER_S = 50.0
BYTES_PER_S = 16.0 * 1024 * 1024
INSTALL = "pip install 'opusmon[otlp]'"
NO_PROTOBUF = f"protobuf is not installed here: {INSTALL}, or send http/json"
_SIGNALS: dict[str, str] = {"/v1/traces": "traces", "/v1/logs": "logs", "/v1/metrics": "metrics"}
_BLOCK_B = 65_536


class Bucket:
    """A rate that may be exceeded for two seconds' worth.

    Args:
        per_s: the rate.
        clock: now.
    """

    def __init__(self, per_s: float, clock: Clock) -> None:
        self._per_s, self._clock = per_s, clock
        self._left, self._at = 2 * per_s, clock.now()

    def take(self, amount: float) -> bool:
        """Spend so much; False when the rate is exceeded. One amount over the whole bucket only empties it."""
        now = self._clock.now()
        self._left = min(2 * self._per_s, self._left + (now - self._at) * self._per_s / NS)
        self._at = now
        if self._left < min(amount, self._per_s):
            return False
        self._left -= amount
        return True


@dataclass(slots=True)
class Counts:
    """What came in, for the status row.

    Attributes:
        taken: records that became requests.
        ignored: spans and events that are none, and bodies of metrics.
        refused: why bodies were, in the words their senders got; they are few and our own.
    """

    taken: int = 0
    ignored: int = 0
    rejected: int = 0
    unreadable: int = 0
    refused: set[str] = field(default_factory=set)


class Receiver:
    """Takes bodies and hands on their records.

    Args:
        listen: where.
        clock: for the rates.
        take: gets the records of a body; says why it rejects each that it does.
        protobuf: whether protobuf bodies can be read; found out when None.

    Attributes:
        listen: where it does listen, with the port that was free.
        counts: what came in.
    """

    def __init__(
        self,
        listen: Listen,
        clock: Clock,
        take: Callable[[list[Record]], list[str]],
        protobuf: bool | None = None,
    ) -> None:
        self.listen = listen
        self.counts = Counts()
        self._take, self._clock, self._calls = take, clock, CallCost()
        self._protobuf = has_protobuf() if protobuf is None else protobuf
        self._posts, self._bytes = Bucket(POSTS_PER_S, clock), Bucket(BYTES_PER_S, clock)
        self._bodies = 0
        self._runner: web.ServerRunner | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            ProxyUnavailable: the address is taken, or may not be used.
        """
        sock = listening_socket(self.listen)
        if not self.listen.path:
            self.listen = Listen(self.listen.host, int(sock.getsockname()[1]))
        server = web.Server(
            self._answer, access_log=None, logger=_silent(), auto_decompress=False, keepalive_timeout=75.0
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.SockSite(self._runner, sock).start()

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def take_cost(self) -> CallCost:
        """Bodies that were read and how long that took, since this was asked last."""
        calls, self._calls = self._calls, CallCost()
        return calls

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        encoding: Encoding = "protobuf" if request.content_type == TYPES["protobuf"] else "json"
        try:
            body = await self._export(request, encoding)
        except Refusal as refusal:
            if refusal.status != 400:  # those are counted as unreadable
                self.counts.refused.add(refusal.words)
            again = {"Retry-After": str(refusal.retry_after_s)} if refusal.retry_after_s else {}
            # Closed, for the rest of a body that is not read would be taken for the next request.
            headers = {**again, "Connection": "close"}
            answer = web.Response(
                status=refusal.status,
                body=failure(encoding, refusal),
                headers=headers,
                content_type=TYPES[encoding],
            )
            answer.force_close()
            return answer
        return web.Response(body=body, content_type=TYPES[encoding])

    async def _export(self, request: web.BaseRequest, encoding: Encoding) -> bytes:
        signal = self._admit(request)
        self._bodies += 1
        try:
            async with asyncio.timeout(BODY_S):
                body = await _body(request)
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {BODY_S:g} s") from None
        finally:
            self._bodies -= 1
        if not self._bytes.take(len(body)):
            raise Refusal(429, "too many bytes a second", 1)
        if signal == "metrics":
            self.counts.ignored += 1
            return success(encoding, signal)
        return self._records("traces" if signal == "traces" else "logs", encoding, body)

    def _admit(self, request: web.BaseRequest) -> str:
        """Which signal it is, before its body is read."""
        if not self.listen.path and not (
            own_hosts(request.headers.getall("Host", ())) and _own_origin(request)
        ):
            raise Refusal(403, "the request is not for this host")
        signal = _SIGNALS.get(request.path)
        if signal is None:
            raise Refusal(404, "there are /v1/traces, /v1/logs and /v1/metrics")
        if request.method != "POST":
            raise Refusal(405, "POST only")
        if not self._posts.take(1) or self._bodies >= BODIES_AT_ONCE:
            raise Refusal(429, "too many requests at once", 1)
        if request.content_type not in TYPES.values():
            raise Refusal(415, "send application/x-protobuf or application/json")
        if request.content_type == TYPES["protobuf"] and not self._protobuf and signal != "metrics":
            raise Refusal(415, NO_PROTOBUF)
        return signal

    def _records(self, signal: Signal, encoding: Encoding, body: bytes) -> bytes:
        began = self._clock.now()
        try:
            decoded = decode_json(signal, body) if encoding == "json" else decode_protobuf(signal, body)
        except Undecodable as error:
            self.counts.unreadable += 1
            raise Refusal(400, str(error)) from None
        finally:
            self._calls.add(f"decode {encoding}", self._clock.now() - began)
        reasons = self._take(decoded.records)
        self.counts.taken += len(decoded.records) - len(reasons)
        self.counts.rejected += len(reasons)
        self.counts.ignored += decoded.ignored
        return success(encoding, signal, len(reasons), "; ".join(dict.fromkeys(reasons)))


def _own_origin(request: web.BaseRequest) -> bool:
    """A page in a browser names its origin; only those of this host may send."""
    origin = request.headers.get("Origin")
    if origin is None:
        return True
    try:
        return names_loopback(urlsplit(origin).hostname or "")
    except ValueError:
        return False


async def _body(request: web.BaseRequest) -> bytes:
    """The body, decompressed.

    Raises:
        Refusal: it is too large, or not compressed as it says.
    """
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("gzip", "identity", ""):
        raise Refusal(415, "compress with gzip or not at all")
    if (request.content_length or 0) > BODY_B:
        raise _too_large()
    data = bytearray()
    async for part in request.content.iter_chunked(_BLOCK_B):
        data += part
        if len(data) > BODY_B:
            raise _too_large()
    return _unpacked(bytes(data)) if encoding == "gzip" else bytes(data)


def _unpacked(data: bytes) -> bytes:
    inflater = zlib.decompressobj(wbits=31)
    try:
        body = inflater.decompress(data, BODY_B + 1)
    except zlib.error:
        raise Refusal(400, "the body is not gzip") from None
    if len(body) > BODY_B:
        raise _too_large()
    if not inflater.eof or inflater.unused_data:
        raise Refusal(400, "the body is not one whole gzip member")
    return body


def _too_large() -> Refusal:
    return Refusal(413, f"bodies of up to {BODY_B // 1024**2} MiB are taken")


def _silent() -> logging.Logger:
    """A logger that keeps nothing: what aiohttp logs may quote headers."""
    logger = logging.getLogger("opusmon.otlp")
    logger.setLevel(logging.CRITICAL + 1)
    return logger
