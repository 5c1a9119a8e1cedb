"""OpenAI Chat Completions, Completions and Responses: streams and whole answers."""

from __future__ import annotations

from opusmon.collectors.api.reading import Body, Reading, error_type, filled, mapping
from opusmon.collectors.api.request import Request, word

KNOWN = frozenset(
    [
        "prompt_tokens",
        "completion_tokens",
        "input_tokens",
        "output_tokens",
        "total_tokens",
        *(
            f"{outer}.{inner}"
            for outer in ("prompt_tokens_details", "input_tokens_details")
            for inner in ("cached_tokens", "audio_tokens", "text_tokens", "image_tokens")
        ),
        *(
            f"{outer}.{inner}"
            for outer in ("completion_tokens_details", "output_tokens_details")
            for inner in (
                "reasoning_tokens",
                "audio_tokens",
                "text_tokens",
                "accepted_prediction_tokens",
                "rejected_prediction_tokens",
            )
        ),
    ]
)
"""Usage fields of the API as documented; others go to `usage_more`."""

_ANSWERS = ("content", "refusal", "audio")
_THOUGHTS = ("reasoning_content", "reasoning", "reasoning_details")
"""Names that servers give thinking in a delta; the API itself has none."""


class _OpenAiReading(Reading):
    def tokens(self, request: Request) -> None:
        """Put the token counts into a row; what was read from the cache is part of the API's prompt count."""
        get = self.usage.get
        request.input_tokens = get("prompt_tokens", "input_tokens")
        request.output_tokens = get("completion_tokens", "output_tokens")
        request.cache_read_tokens = get(
            "prompt_tokens_details.cached_tokens", "input_tokens_details.cached_tokens"
        )
        request.thinking_tokens = get(
            "completion_tokens_details.reasoning_tokens", "output_tokens_details.reasoning_tokens"
        )
        request.usage_more = self.usage.more(KNOWN)


class ChatReading(_OpenAiReading):
    """Reads `POST /v1/chat/completions` and `POST /v1/completions`."""

    def event(self, t: int, body: Body, name: str) -> None:
        """Read one chunk; the first has a role and no content, the last may have usage and no choices."""
        if error := error_type(body) or ("error" if name == "error" else ""):
            self.error = self.error or error
        self.timeline.event(t)
        self._head(body)
        self.usage.merge(body.get("usage"))
        choices = body.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            self._choice(t, mapping(choice))

    def answer(self, body: Body) -> None:
        """Read a whole completion."""
        self.error = error_type(body)
        self._head(body)
        self.usage.merge(body.get("usage"))
        choices = body.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            self._stop(mapping(choice))
            self._tools_of(mapping(choice), mapping(mapping(choice).get("message")))
        self.finished = not self.error

    def _choice(self, t: int, choice: Body) -> None:
        self._chosen = True
        delta = mapping(choice.get("delta"))
        tools = self._tools_of(choice, delta)
        if tools or filled(choice.get("text")) or any(filled(delta.get(name)) for name in _ANSWERS):
            self.timeline.token(t, answer=True)
        elif any(filled(delta.get(name)) for name in _THOUGHTS):
            self.timeline.token(t, answer=False)
        self._stop(choice)

    def _stop(self, choice: Body) -> None:
        reason = word(choice.get("finish_reason"))
        self.stop = reason or self.stop
        self.finished = self.finished or bool(reason)

    def _tools_of(self, choice: Body, part: Body) -> bool:
        """Count the tool calls of a delta or message; whether one of them has input."""
        calls = part.get("tool_calls")
        some = False
        for index, call in enumerate(calls if isinstance(calls, list) else ()):
            call = mapping(call)
            function = mapping(call.get("function"))
            if call.get("id") or function.get("name"):
                self._tool((str(choice.get("index")), str(call.get("index", index))))
            some = some or filled(function.get("arguments"))
        old = mapping(part.get("function_call"))
        if old.get("name"):
            self._tool((str(choice.get("index")), "function_call"))
        return some or filled(old.get("arguments"))


class ResponsesReading(_OpenAiReading):
    """Reads `POST /v1/responses`."""

    def event(self, t: int, body: Body, name: str) -> None:
        """Read one event."""
        kind = str(body.get("type") or name)
        self.timeline.event(t)
        if kind.endswith(".delta"):
            if filled(body.get("delta")):
                self.timeline.token(t, answer="reasoning" not in kind)
        elif kind == "response.output_item.added":
            self._item(body.get("output_index"), mapping(body.get("item")))
        elif kind == "error" or (not kind and error_type(body)):
            nested = error_type(body) if isinstance(body.get("error"), dict) else ""
            self.error = self.error or nested or word(body.get("code")) or "error"
        elif "response" in body:
            self._state(mapping(body.get("response")))

    def answer(self, body: Body) -> None:
        """Read a whole response."""
        self._state(body)
        if not self.error and body.get("object") != "response":
            self.error = error_type(body)
        items = body.get("output")
        for index, item in enumerate(items if isinstance(items, list) else ()):
            self._item(index, mapping(item))
        self.finished = not self.error

    def _state(self, response: Body) -> None:
        self._head(response)
        self.usage.merge(response.get("usage"))
        status = response.get("status")
        if status == "failed":
            error = mapping(response.get("error"))
            self.error = self.error or word(error.get("code")) or error_type(response) or "error"
        elif status in ("completed", "incomplete", "cancelled"):
            self.finished = True
            reason = mapping(response.get("incomplete_details")).get("reason")
            self.stop = word(reason) or word(status)

    def _item(self, index: object, item: Body) -> None:
        if str(item.get("type")).endswith("_call"):
            self._tool(str(index))
