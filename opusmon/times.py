"""Times and durations as people type and read them.

A time on a command line or in the "go to" prompt is one of:

| typed | means |
|---|---|
| `10m`, `+90s`, `+0:30`, `90` | that long after the start of the session |
| `-90s`, `-0:30`, `3m ago` | that long before the end of the recording, or before now when live |
| `14:03`, `0:30`, `14:03:21.5` | wall clock; the latest such time in the session |
| `yesterday 10:00`, `today 10:00` | wall clock, on the session's last day or the day before it |
| `2026-11-29T14:03`, `...Z`, `...+01:00` | ISO 8601; without an offset it is local time |
| `1795957401`, also in ms, us or ns | seconds since the epoch |
| `start`, `end`, `now` | the first and the last instant |

With a colon and no sign it is always a wall clock: `0:30` is half past midnight, `+0:30` is 30 s after the start.
A wall clock stands for all of its last digit: `14:03` finds a session that began at 14:03:21.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from decimal import Decimal
from itertools import pairwise

from opusmon.clock import NS, Anchors

_MAX_NS = 2**63 - 1
_MAX_TEXT_CHARS = 64
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS_NS = {
    **dict.fromkeys(("ns",), 1),
    **dict.fromkeys(("us", "\N{MICRO SIGN}s", "\N{GREEK SMALL LETTER MU}s"), 1_000),
    **dict.fromkeys(("ms", "msec"), 1_000_000),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), NS),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60 * NS),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600 * NS),
    **dict.fromkeys(("d", "day", "days"), 86_400 * NS),
}
_EPOCH_UNITS_NS = ((12, NS), (15, 1_000_000), (18, 1_000), (20, 1))
"""Digits before the point, up to this many, and the unit they count: 10 digits are s, 13 ms, 16 us, 19 ns."""

_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z\N{MICRO SIGN}\N{GREEK SMALL LETTER MU}]+)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
_SPAN = re.compile(r"(?:(\d+):)?(\d{1,3}):([0-5]\d(?:\.\d+)?)")
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2})(?:[.,](\d{1,9}))?)?")
_EPOCH_TEXT = re.compile(r"(\d{9,20})(?:\.(\d{1,9}))?")
_ISO_DATE = re.compile(r"\d{4}-(\d{2}-\d{2}|W\d{2}-\d)")
_ISO_CLOCK = re.compile(r"[T ]\d{2}(?P<minute>:?\d{2}(?P<second>:?\d{2}(?:[.,](?P<fraction>\d+))?)?)?")

_DURATION_FORMS = "use 10m, 90s, 1h30m, 500ms or seconds"
_TIME_FORMS = "use 10m (after the start), -90s (before the end), 14:03:21, ISO 8601 or epoch seconds"


class TimeError(ValueError):
    """A time or duration that cannot be used; the text is one line for the person who typed it."""


def parse_duration(text: str) -> int:
    """Nanoseconds of a duration: `10m`, `1h30m`, `10m20s`, `500ms`, `2d`, `1:30`, or a bare number of seconds.

    Raises:
        TimeError: it is none of these, it repeats a unit, or it is longer than 292 years.
    """
    plain = text.strip().lower()
    value = None
    if plain.isascii() and len(plain) <= _MAX_TEXT_CHARS:
        value = _number_ns(plain) if _NUMBER.fullmatch(plain) else _span_ns(plain)
    value = value if value is not None else _units_ns(plain)
    if value is None or value > _MAX_NS:
        raise TimeError(f"{_shown(text)} is not a duration: {_DURATION_FORMS}")
    return value


def parse_time(
    text: str,
    *,
    anchors: Anchors,
    t0: int,
    t1: int,
    now: int | None = None,
    tz: tzinfo | None = None,
) -> int:
    """Monotonic ns of a time within a session; the module says which forms there are.

    Args:
        text: what was typed.
        anchors: the session's wall anchors.
        t0: first instant of the session, monotonic ns.
        t1: last instant of the session, monotonic ns.
        now: the present, monotonic ns, when the session is live; it then counts as the end.
        tz: time zone of what was typed, None for this machine's.

    Raises:
        TimeError: the text is no time, or the time lies outside the session.
    """
    session = _Session(anchors, t0, max(t0, t1 if now is None else now), tz)
    plain = text.strip()
    try:
        t = _offset(plain, session)
        if t is None:
            t = _wall_time(plain, session)
    except (OverflowError, OSError) as error:
        raise TimeError(f"{_shown(text)} is not a time: {_TIME_FORMS}") from error
    if t is None or not session.t0 <= t <= session.t1:
        raise TimeError(_outside(text, session))
    return t


def format_wall(anchors: Anchors, t: int, precision: int = 0, tz: tzinfo | None = None) -> str:
    """Wall clock at `t`, `14:03:21` and `precision` (0 to 9) digits after the point, cut and not rounded."""
    seconds, rest = divmod(anchors.wall(t), NS)
    clock = _local(seconds, tz).strftime("%H:%M:%S")
    return f"{clock}.{rest:09d}"[: len(clock) + 1 + precision] if precision else clock


def format_iso(anchors: Anchors, t: int, tz: tzinfo | None = None) -> str:
    """Wall time at `t` in ISO 8601 with its UTC offset and microseconds: `2026-11-29T14:03:21.500000+01:00`."""
    seconds, rest = divmod(anchors.wall(t), NS)
    return _local(seconds, tz).replace(microsecond=rest // 1000).isoformat(timespec="microseconds")


def format_duration(ns: int) -> str:
    """A duration in three significant digits or two units: `17.2 ms`, `1.94 s`, `71 s`, `5m20s`, `3h12m`, `2d3h`."""
    if ns < 0:
        return "-" + format_duration(-ns)
    for unit, size in (("ns", 1), ("us", 1_000), ("ms", 1_000_000)):
        if round(ns / size) < 1000:
            return f"{_three_digits(ns / size)} {unit}"
    if round(ns / NS) < 120:
        return f"{_three_digits(ns / NS)} s"
    for size, small, big, per in ((NS, "s", "m", 60), (60 * NS, "m", "h", 60), (3600 * NS, "h", "d", 24)):
        count = _round_div(ns, size)
        if count < per * (24 if small == "m" else 60) or small == "h":
            whole, rest = divmod(count, per)
            return f"{whole}{big}" + (f"{rest}{small}" if rest else "")
    raise AssertionError("the last unit takes every value")
