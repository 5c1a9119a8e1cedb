"""One request of the canary, from the call to the last byte: sent by the `anthropic` client, read byte by byte.

The client sends, names the errors and keeps the connections. Its own reading of streams is not used: it drops events
without a name, passes over a stream that ends early and over an error that comes as JSON with status 200.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx2

from opusmon.clock import Clock
from opusmon.collectors.api.anthropic_stream import AnthropicReading
from opusmon.collectors.api.limits import fill_limits
from opusmon.collectors.api.request import NAN, OpenRequest, Outcome, Phase, Request, word
from opusmon.collectors.api.sse import Event, Parser
from opusmon.collectors.canary.endpoint import PATH, CanaryConfig
from opusmon.collectors.canary.phases import TIMEOUTS, TRANSPORT_ERRORS, Phases, TimedTransport

CONNECT_S = 10.0
INTENDED = "intended send time"
SENT = "sent upstream"
_BODY_B = 1 << 20
_TIMEOUTS: tuple[type[Exception], ...] = (anthropic.APITimeoutError, *TIMEOUTS)
_LOST: tuple[type[Exception], ...] = (anthropic.APIConnectionError, *TRANSPORT_ERRORS)


@dataclass(slots=True)
class _Call:
    """One call under way."""

    request: Request
    phases: Phases
    origin: int
    reading: AnthropicReading = field(default_factory=AnthropicReading)


class Client:
    """Sends requests one by one or side by side; keep one, so that its connections can be reused.

    No retries, no redirects, no proxy of the environment, no telemetry of the client's own.

    Args:
        config: as `check` returned it.
        clock: times of the rows.
    """

    def __init__(self, config: CanaryConfig, clock: Clock) -> None:
        self._config, self._clock = config, clock
        self._open: dict[int, _Call] = {}
        api_key, token = config.key()
        timeout = httpx2.Timeout(config.timeout_s, connect=min(CONNECT_S, config.timeout_s))
        http = httpx2.AsyncClient(
            transport=TimedTransport(), trust_env=False, follow_redirects=False, timeout=timeout
        )
        self._sdk = anthropic.AsyncAnthropic(
            api_key=api_key,
            auth_token=token,
            base_url=config.base_url,
            max_retries=0,
            timeout=timeout,
            http_client=http,
            open_telemetry=False,
        )

    async def close(self) -> None:
        """Close its connections."""
        await self._sdk.close()

    async def ask(self, prompt: str, number: int, intended: int | None = None, label: str = "") -> Request:
        """Send one prompt and read its answer to the end; whatever goes wrong is in the outcome.

        Args:
            prompt: text of the one user message.
            number: of the request.
            intended: when it should have been sent, monotonic ns; its clocks start there. Without it they
                start when the request was sent, connecting left out.
            label: of the row.
        """
        start = SENT if intended is None else INTENDED
        request = Request(0, "canary", start, number, PATH, self._config.model, label, retry=0.0)
        called = self._clock.now()
        call = _Call(request, Phases(self._clock.now), called if intended is None else intended)
        self._open[number] = call
        try:
            with call.phases.current():
                request.outcome, request.error = await self._outcome(call, prompt)
        finally:
            del self._open[number]
        request.t = self._clock.now()
        request.own_ns = _own_ns(call.phases, called)
        if intended is not None:
            request.late_ns = float(called - intended)
        elif call.phases.sent_at is not None:
            call.origin = call.phases.sent_at
        _fill(call)
        return request

    def in_flight(self, now: int) -> list[OpenRequest]:
        """The requests that have not ended at `now` (monotonic ns)."""
        return [_open(call, now) for call in self._open.values()]

    async def _outcome(self, call: _Call, prompt: str) -> tuple[Outcome, str]:
        """How it ended, and the type of the error."""
        try:
            async with asyncio.timeout(self._config.timeout_s):
                return await self._exchange(call, prompt)
        except _TIMEOUTS:
            return "timeout", f"{call.phases.stage}_timeout"
        except anthropic.APIStatusError as error:
            self._headers(call.request, error.response)
            return "upstream_http_error", word(error.type) or f"http_{error.status_code}"
        except _LOST:
            if call.phases.headers_at is not None:
                return "truncated", "connection_lost"
            return "transport_error", f"{call.phases.stage}_error"

    async def _exchange(self, call: _Call, prompt: str) -> tuple[Outcome, str]:
        stream = await self._sdk.messages.create(
            model=self._config.model,
            max_tokens=self._config.max_tokens,
            messages=[{"role": "user", "content": prompt}],
            stream=True,
        )
        response = stream.response
        try:
            self._headers(call.request, response)
            if str(response.headers.get("content-type", "")).lower().startswith("text/event-stream"):
                call.request.streaming = 1.0
                return await self._stream(call, response)
            return _whole(call.reading, await _body(response))
        finally:
            await stream.close()

    async def _stream(self, call: _Call, response: httpx2.Response) -> tuple[Outcome, str]:
        parser, reading = Parser(), call.reading
        async for chunk in response.aiter_bytes():
            t = self._clock.now()
            for event in parser.feed(chunk):
                if (body := _event_body(event)) is not None:
                    reading.event(t, body, event.name)
        if reading.error:
            return "stream_error_event", reading.error
        if reading.finished:
            return "ok", ""
        return "truncated", "" if reading.timeline.first_event is not None else "no_events"

    def _headers(self, request: Request, response: httpx2.Response) -> None:
        request.status, request.streaming = float(response.status_code), 0.0
        request.id = word(response.headers.get("request-id"))
        fill_limits(request, response.headers, self._clock.anchor().wall_ns)


def _own_ns(phases: Phases, called: int) -> float:
    """Time the client spent before the request left, connecting aside: no time of the server's."""
    if phases.sent_at is None:
        return NAN
    opening = (phases.dns_ns, phases.connect_ns, phases.tls_ns)
    return phases.sent_at - called - sum(part for part in opening if not math.isnan(part))


def _open(call: _Call, now: int) -> OpenRequest:
    request, phases, line = call.request, call.phases, call.reading.timeline
    stages: dict[str, Phase] = {"waiting": "waiting", "reading": line.phase}
    phase = stages.get(phases.stage, "sending")
    row = OpenRequest(now, request.source, request.start, request.number, PATH, request.model, request.label)
    row.phase = phase
    row.age_ns = float(now - call.origin)
    row.chunks = float(line.chunks)
    row.ttft_ns = NAN if line.first_token is None else float(line.first_token - call.origin)
    row.silent_ns = NAN if phases.byte_at is None else float(now - phases.byte_at)
    row.no_token_ns = float(now - (call.origin if line.last_token is None else line.last_token))
    return row


def _fill(call: _Call) -> None:
    request, phases, origin = call.request, call.phases, call.origin
    if phases.headers_at is not None:  # without an answer there is no count of anything in it, not even zero
        call.reading.fill(request)
    if request.streaming == 1:
        call.reading.timeline.fill(request, origin)
    request.e2e_ns = float(request.t - origin)
    request.headers_ns = NAN if phases.headers_at is None else float(phases.headers_at - origin)
    request.dns_ns, request.connect_ns, request.tls_ns = phases.dns_ns, phases.connect_ns, phases.tls_ns
    request.reused = phases.reused
    request.request_b = phases.request_b
    request.response_b = NAN if phases.headers_at is None else float(phases.response_b)


def _event_body(event: Event) -> Mapping[str, Any] | None:
    if event.cut:
        return None
    try:
        body = json.loads(event.data)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


async def _body(response: httpx2.Response) -> bytes:
    """A body that is no stream, at most 1 MiB of it."""
    body = b""
    async for part in response.aiter_bytes():
        body += part
        if len(body) > _BODY_B:
            break
    return body[:_BODY_B]


def _whole(reading: AnthropicReading, content: bytes) -> tuple[Outcome, str]:
    """What a JSON answer to a streaming request is: an error in a 200, or a server that does not stream."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        return "json_error_in_200", "not_a_stream"
    reading.answer(body)
    if reading.finished and body.get("type") == "message":
        return "ok", ""
    return "json_error_in_200", reading.error or "not_a_stream"
