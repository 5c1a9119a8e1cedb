"""Rate-limit headers of a response."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from opusmon.collectors.api.request import NAN, Request

_HEADERS: dict[str, tuple[str, ...]] = {
    "limit_requests": ("anthropic-ratelimit-requests-limit", "x-ratelimit-limit-requests"),
    "left_requests": ("anthropic-ratelimit-requests-remaining", "x-ratelimit-remaining-requests"),
    "limit_input_tokens": ("anthropic-ratelimit-input-tokens-limit",),
    "left_input_tokens": ("anthropic-ratelimit-input-tokens-remaining",),
    "limit_output_tokens": ("anthropic-ratelimit-output-tokens-limit",),
    "left_output_tokens": ("anthropic-ratelimit-output-tokens-remaining",),
}
"""Field to header. OpenAI's token limit counts input and output together and fits neither field."""

_MAX = 1e15


def amount(text: str | None) -> float:
    """A non-negative decimal number of usual size, else NaN."""
    if text is None or len(text) > 32:
        return NAN
    try:
        value = float(text)
    except ValueError:
        return NAN
    return value if 0 <= value <= _MAX else NAN


def retry_after_s(headers: Mapping[str, str], wall_ns: int) -> float:
    """How long the server asks to wait: `retry-after-ms`, or `retry-after` in seconds or as a date.

    A date is compared with the server's own `Date`, and with the wall clock where there is none.
    """
    if not math.isnan(exact_ms := amount(headers.get("retry-after-ms"))):
        return exact_ms / 1e3
    text = headers.get("retry-after")
    if text is None or not math.isnan(seconds := amount(text)):
        return NAN if text is None else seconds
    until = _date(text)
    now = _date(headers.get("date", "")) or datetime.fromtimestamp(wall_ns / 1e9, UTC)
    return NAN if until is None else max(0.0, (until - now).total_seconds())


def _date(text: str) -> datetime | None:
    if len(text) > 64:
        return None
    try:
        when = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return when.replace(tzinfo=UTC) if when.tzinfo is None else when


def fill_limits(request: Request, headers: Mapping[str, str], wall_ns: int) -> None:
    """Put the limits into a row.

    Args:
        request: the row.
        headers: of the response, looked up in lower case: a case-insensitive mapping.
        wall_ns: CLOCK_REALTIME ns now.
    """
    request.retry_after_s = retry_after_s(headers, wall_ns)
    for field, names in _HEADERS.items():
        values = (amount(headers.get(name)) for name in names)
        setattr(request, field, next((value for value in values if not math.isnan(value)), NAN))
