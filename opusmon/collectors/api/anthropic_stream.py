"""Anthropic Messages: streams and whole answers."""

from __future__ import annotations

import math

from opusmon.collectors.api.reading import Body, Reading, error_type, filled, mapping
from opusmon.collectors.api.request import Request, word

KNOWN = frozenset(
    [
        "input_tokens",
        "output_tokens",
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
        "cache_creation.ephemeral_5m_input_tokens",
        "cache_creation.ephemeral_1h_input_tokens",
        "output_tokens_details.thinking_tokens",
        "server_tool_use.web_search_requests",
        "server_tool_use.web_fetch_requests",
    ]
)
"""Usage fields of the API as documented; others go to `usage_more`."""

_PAYLOADS = {
    "text_delta": ("text", True),
    "thinking_delta": ("thinking", False),
    "input_json_delta": ("partial_json", True),
    "citations_delta": ("citation", False),
}
"""Delta type to its payload and whether that is answer. A signature closes thinking and is no token."""
_BLOCKS = {"text": ("text", True), "thinking": ("thinking", False), "redacted_thinking": ("data", False)}
"""Blocks that may begin with a payload; usually it is empty, and an empty one is no token."""


class AnthropicReading(Reading):
    """Reads `POST /v1/messages`."""

    def event(self, t: int, body: Body, name: str) -> None:
        """Read one event; pings do not start a clock."""
        kind = body.get("type") or name
        if kind == "error" or (error_type(body) and not isinstance(body.get("type"), str)):
            self.error = self.error or error_type(body) or "error"
        if kind == "ping":
            return
        self.timeline.event(t)
        if kind == "content_block_delta":
            delta = mapping(body.get("delta"))
            self._payload(t, delta, _PAYLOADS.get(str(delta.get("type"))))
        elif kind == "content_block_start":
            self._block(t, body)
        elif kind == "message_start":
            message = mapping(body.get("message"))
            self._head(message)
            self.usage.merge(message.get("usage"))
        elif kind == "message_delta":
            self.stop = word(mapping(body.get("delta")).get("stop_reason")) or self.stop
            self.usage.merge(body.get("usage"))
        elif kind == "message_stop":
            self.finished = True

    def answer(self, body: Body) -> None:
        """Read a whole message."""
        self.error = error_type(body)
        self._head(body)
        self.stop = word(body.get("stop_reason"))
        self.usage.merge(body.get("usage"))
        if "usage" not in body:
            self.usage.merge({"input_tokens": body.get("input_tokens")})  # count_tokens
        blocks = body.get("content")
        for index, block in enumerate(blocks if isinstance(blocks, list) else ()):
            self._count_tool(index, mapping(block))
        self.finished = not self.error

    def tokens(self, request: Request) -> None:
        """Put the token counts into a row; the API's `input_tokens` leaves the cache out, the row's does not."""
        read = self.usage.get("cache_read_input_tokens")
        written = self.usage.get("cache_creation_input_tokens")
        cached = sum(part for part in (read, written) if not math.isnan(part))
        request.input_tokens = self.usage.get("input_tokens") + cached
        request.output_tokens = self.usage.get("output_tokens")
        request.cache_read_tokens, request.cache_write_tokens = read, written
        request.thinking_tokens = self.usage.get("output_tokens_details.thinking_tokens")
        request.usage_more = self.usage.more(KNOWN)

    def _block(self, t: int, body: Body) -> None:
        block = mapping(body.get("content_block"))
        self._count_tool(body.get("index"), block)
        self._payload(t, block, _BLOCKS.get(str(block.get("type"))))

    def _payload(self, t: int, part: Body, rule: tuple[str, bool] | None) -> None:
        if rule is not None and filled(part.get(rule[0])):
            self.timeline.token(t, answer=rule[1])

    def _count_tool(self, index: object, block: Body) -> None:
        if str(block.get("type")).endswith("tool_use"):
            self._tool(str(index))
