"""Spans and log events as far as they are looked at: name, times, and the few attributes that are asked for.

Everything else (prompts, answers, user and session ids, e-mails, resource attributes) is left where it was decoded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Signal = Literal["traces", "logs"]
Value = str | float | bool

NUMBERS = frozenset(
    {
        "gen_ai.response.time_to_first_chunk",
        "gen_ai.usage.input_tokens",
        "gen_ai.usage.output_tokens",
        "gen_ai.usage.cache_read.input_tokens",
        "gen_ai.usage.cache_write.input_tokens",
        "gen_ai.usage.reasoning.output_tokens",
        "http.request.resend_count",
        "http.response.status_code",
        "duration_ms",
        "ttft_ms",
        "input_tokens",
        "output_tokens",
        "cache_read_tokens",
        "cache_creation_tokens",
        "status_code",
        "attempt",
    }
)
FLAGS = frozenset({"gen_ai.request.stream", "success"})
WORDS = frozenset(
    {
        "gen_ai.request.model",
        "gen_ai.response.model",
        "anthropic.message.stop_reason",
        "anthropic.request.id",
        "error.type",
        "model",
        "request_id",
        "stop_reason",
        "error_class",
        "event.name",
    }
)
"""Attributes that are read; their texts are names, and one that does not look like a name is dropped."""
KEPT = NUMBERS | FLAGS | WORDS

SPANS = frozenset({"anthropic.messages.create", "claude_code.llm_request"})
EVENTS = frozenset({"claude_code.api_request", "claude_code.api_error", "claude_code.api_refusal"})
CLAUDE_SCOPE = "com.anthropic.claude_code"
_PREFIX = "claude_code."
_NAME = re.compile(r"[\w.:/@+\-\[\]]{1,128}", re.ASCII)
_MAX = 2.0**53


class Undecodable(ValueError):  # noqa: N818  (it reads as what happened)
    """A body that is not what its content type says."""


@dataclass(frozen=True, slots=True)
class Record:
    """A span or a log event.

    Attributes:
        name: one of `SPANS` or `EVENTS`.
        start_ns: wall time of a span's start, 0 for an event.
        end_ns: wall time of its end, or of the event.
        failed: the span's status is an error.
        fine: the span's status says that all went well.
        attributes: those in `KEPT`.
    """

    name: str
    start_ns: int
    end_ns: int
    failed: bool = False
    fine: bool = False
    attributes: Mapping[str, Value] = field(default_factory=dict)

    def number(self, name: str) -> float:
        """A number that is not negative, NaN where there is none."""
        value = self.attributes.get(name, math.nan)
        return value if isinstance(value, float) else math.nan

    def word(self, name: str) -> str:
        """A name, "" where there is none."""
        value = self.attributes.get(name, "")
        return value if isinstance(value, str) else ""


@dataclass(slots=True)
class Decoded:
    """A body's records of interest, and how many more it had."""

    records: list[Record] = field(default_factory=list)
    ignored: int = 0

    def add(self, record: Record | None) -> None:
        """Keep a record, or count one that is of no interest."""
        if record is None:
            self.ignored += 1
        else:
            self.records.append(record)


def attributes(pairs: Iterable[tuple[str, object]]) -> dict[str, Value]:
    """The attributes that are read, each as the type that it should have; others are dropped."""
    kept: dict[str, Value] = {}
    for name, value in pairs:
        one = _value(name, value)
        if one is not None:
            kept[name] = one
    return kept


def _value(name: str, value: object) -> Value | None:
    if name in NUMBERS:
        return _number(value)
    if name in FLAGS:
        return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower())
    if name not in WORDS or not isinstance(value, str) or not _NAME.fullmatch(value):
        return None
    return value if name.endswith("model") or "@" not in value else None  # a model may have one: name@date


def _number(value: object) -> float | None:
    """Claude Code wrote numbers as text once, and still may."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value[:32] if isinstance(value, str) else value)
    except (ValueError, OverflowError):
        return None
    return number if 0 <= number < _MAX else None


def event_name(given: str, body: object, scope: str, kept: Mapping[str, Value]) -> str:
    """Which of `EVENTS` a log record is, "" for none of them.

    The name is in its own field, in the body or in an attribute; without its prefix it counts in the scope of
    Claude Code only.
    """
    for name in (given, body, kept.get("event.name")):
        if not isinstance(name, str):
            continue
        if name in EVENTS:
            return name
        if scope.startswith(CLAUDE_SCOPE) and _PREFIX + name in EVENTS:
            return _PREFIX + name
    return ""
