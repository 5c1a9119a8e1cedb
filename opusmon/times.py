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
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from decimal import Decimal
from functools import cached_property
from itertools import pairwise

from opusmon.clock import NS, Anchor, Anchors

_MAX_NS = 2**63 - 1
_MAX_TEXT_CHARS = 64
_DAY = timedelta(days=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICRO = "\N{MICRO SIGN}\N{GREEK SMALL LETTER MU}"
_UNITS_NS = {
    "ns": 1,
    **dict.fromkeys(("us", *(f"{mu}s" for mu in _MICRO)), 1_000),
    **dict.fromkeys(("ms", "msec"), 1_000_000),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), NS),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60 * NS),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600 * NS),
    **dict.fromkeys(("d", "day", "days"), 86_400 * NS),
}
_EPOCH_UNITS_NS = ((12, NS), (15, 1_000_000), (18, 1_000), (20, 1))
"""Digits before the point, up to this many, and the unit they count: 10 digits are s, 13 ms, 16 us, 19 ns."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+", re.ASCII)
_PART = re.compile(rf"\s*(\d+(?:\.\d+)?)\s*([a-z{_MICRO}]+)", re.ASCII)
_COLONS = re.compile(r"(?:(\d+):)?(\d+):([0-5]\d(?:\.\d+)?)", re.ASCII)
_CLOCK = re.compile(
    r"(?:(today|yesterday)\s*)?(?:([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d)(?:[.,](\d{1,9}))?)?)?", re.ASCII
)
_EPOCH_TEXT = re.compile(r"(\d{9,20})(?:\.(\d{1,9}))?", re.ASCII)
_ISO = re.compile(
    r"\d{4}-[\dW-]+(?P<h>[T ]\d\d(?P<m>:?\d\d(?P<s>:?\d\d(?:[.,](?P<f>\d+))?)?)?)?(?:Z|[+-][\d:.]+)?",
    re.ASCII | re.IGNORECASE,
)

_DURATION_FORMS = "use 10m, 90s, 1h30m, 500ms or seconds"
_TIME_FORMS = "use 10m (after the start), -90s (before the end), 14:03:21, ISO 8601 or epoch seconds"


class TimeError(ValueError):
    """A time or duration that cannot be used; its text is one line for the person who typed it."""


class _NotATime(Exception):  # noqa: N818  (never leaves this module)
    """The text is of none of the forms."""


def parse_duration(text: str) -> int:
    """Nanoseconds of a duration: `10m`, `1h30m`, `10m20s`, `500ms`, `2d`, `1:30` (m:ss), or a bare number of seconds.

    Raises:
        TimeError: it is none of these, it repeats a unit, or it is longer than 292 years.
    """
    plain = text.strip().lower()
    value = None
    if len(plain) <= _MAX_TEXT_CHARS:
        value = _seconds_ns(plain) if _NUMBER.fullmatch(plain) else _colons_ns(plain)
        value = _units_ns(plain) if value is None else value
    if value is None or value > _MAX_NS:
        raise TimeError(f"{_shown(text)} is not a duration: {_DURATION_FORMS}")
    return value


def parse_time(
    text: str, *, anchors: Anchors, t0: int, t1: int, now: int | None = None, tz: tzinfo | None = None
) -> int:
    """Monotonic ns of a time within a session; the module's text says which forms there are.

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
        if len(plain) > _MAX_TEXT_CHARS:
            raise _NotATime
        t = _offset_time(plain.lower(), session)
        if t is None:
            t = _wall_time(plain, session)
    except (_NotATime, OverflowError, OSError, ValueError) as error:
        raise TimeError(_not_a_time(text)) from error
    if t is None or not session.t0 <= t <= session.t1:
        raise TimeError(_outside(text, session))
    return t


def format_wall(anchors: Anchors, t: int, precision: int = 0, tz: tzinfo | None = None) -> str:
    """Wall clock at monotonic `t`: `14:03:21`, with `precision` (0 to 9) decimals, cut and not rounded."""
    seconds, rest = divmod(anchors.wall(t), NS)
    clock = _local(seconds, tz).strftime("%H:%M:%S")
    return f"{clock}.{rest:09d}"[: len(clock) + 1 + precision] if precision else clock


def format_iso(anchors: Anchors, t: int, tz: tzinfo | None = None) -> str:
    """Wall time at monotonic `t` in ISO 8601, with UTC offset and microseconds, cut and not rounded."""
    seconds, rest = divmod(anchors.wall(t), NS)
    return _local(seconds, tz).replace(microsecond=rest // 1000).isoformat(timespec="microseconds")


def format_duration(ns: int) -> str:
    """A duration in three digits or two units: `17.2 ms`, `1.94 s`, `71 s`, `5m20s`, `3h12m`, `2d3h`."""
    if ns < 0:
        return "-" + format_duration(-ns)
    for unit, size, limit in (("ns", 1, 1000), ("us", 1_000, 1000), ("ms", 1_000_000, 1000), ("s", NS, 120)):
        if round(ns / size) < limit:
            return f"{_three_digits(ns / size)} {unit}"
    if (seconds := round(ns / NS)) < 3600:
        return _two_units(seconds, 60, "m", "s")
    if (minutes := round(ns / (60 * NS))) < 24 * 60:
        return _two_units(minutes, 60, "h", "m")
    return _two_units(round(ns / (3600 * NS)), 24, "d", "h")


def _three_digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def _two_units(count: int, per: int, big: str, small: str) -> str:
    whole, rest = divmod(count, per)
    return f"{whole}{big}{rest}{small}" if rest else f"{whole}{big}"


def _seconds_ns(text: str) -> int:
    return int(Decimal(text) * NS)


def _colons_ns(text: str) -> int | None:
    """`m:ss` or `h:mm:ss`."""
    match = _COLONS.fullmatch(text)
    if not match:
        return None
    hours, minutes, seconds = match.groups()
    return (int(hours or 0) * 3600 + int(minutes) * 60) * NS + _seconds_ns(seconds)


def _units_ns(text: str) -> int | None:
    """`1h30m`: numbers with units, each unit once."""
    total, place, seen = 0, 0, set[int]()
    while place < len(text):
        match = _PART.match(text, place)
        size = _UNITS_NS.get(match[2]) if match else None
        if match is None or size is None or size in seen:
            return None
        seen.add(size)
        total += int(Decimal(match[1]) * size)
        place = match.end()
    return total if seen else None


@dataclass(frozen=True)
class _Stretch:
    """Part of a session between two anchors, both ends included; wall = t + offset_ns."""

    t0: int
    t1: int
    offset_ns: int

    @property
    def wall0(self) -> int:
        return self.t0 + self.offset_ns

    @property
    def wall1(self) -> int:
        return self.t1 + self.offset_ns


@dataclass(frozen=True)
class _Session:
    anchors: Anchors
    t0: int
    t1: int
    tz: tzinfo | None

    @cached_property
    def stretches(self) -> list[_Stretch]:
        """In time order; the first anchor also holds for what came before it."""
        anchors = list(self.anchors) or [Anchor(self.t0, self.t0)]
        starts = [self.t0, *(max(anchor.t, self.t0) for anchor in anchors[1:])]
        ends = [*(start - 1 for start in starts[1:]), self.t1]
        parts = (
            _Stretch(start, min(end, self.t1), anchor.offset_ns)
            for start, end, anchor in zip(starts, ends, anchors, strict=True)
        )
        return [part for part in parts if part.t0 <= part.t1]

    @property
    def last_day(self) -> date:
        """Local date of the end."""
        return _local(self.anchors.wall(self.t1) // NS, self.tz).date()

    def days(self) -> list[date]:
        """Local dates that can hold the latest 14:03 of some stretch, latest first."""
        ends = {_local(part.wall1 // NS, self.tz).date() for part in self.stretches}
        return sorted({day - _DAY * back for day in ends for back in range(3)}, reverse=True)

    def find(self, wall: _Wall) -> int | None:
        """The latest instant that bore this wall time; one that the clock jumped over is where it jumped."""
        for part in reversed(self.stretches):
            if part.wall0 <= wall.ns <= part.wall1:
                return wall.ns - part.offset_ns
        for part in self.stretches:
            if wall.ns < part.wall0 < wall.ns + wall.width_ns:
                return part.t0
        jumps = (b.t0 for a, b in pairwise(self.stretches) if a.wall1 < wall.ns < b.wall0)
        return next(jumps, None)


@dataclass(frozen=True)
class _Wall:
    """CLOCK_REALTIME ns, and how much the last digit typed stands for."""

    ns: int
    width_ns: int


def _offset_time(text: str, session: _Session) -> int | None:
    """A time counted from either end of the session; None when the text is of another kind."""
    if text in ("start", "end", "now"):
        return session.t0 if text == "start" else session.t1
    if text.endswith("ago"):
        return session.t1 - parse_duration(text.removesuffix("ago"))
    if text[:1] in ("-", "\N{MINUS SIGN}"):
        return session.t1 - parse_duration(text[1:])
    if text[:1] == "+":
        return session.t0 + parse_duration(text[1:])
    if ":" in text or _EPOCH_TEXT.fullmatch(text):
        return None
    try:
        return session.t0 + parse_duration(text)
    except TimeError:
        return None


def _wall_time(text: str, session: _Session) -> int | None:
    """A time by the wall clock; None when the session does not hold it.

    Raises:
        _NotATime: the text is no time at all.
    """
    if match := _EPOCH_TEXT.fullmatch(text):
        return session.find(_epoch_wall(match[1], match[2] or ""))
    if (match := _CLOCK.fullmatch(text.lower())) and text:
        return _clock_time(match, session)
    if match := _ISO.fullmatch(text):
        return _iso_time(text, match, session)
    raise _NotATime


def _epoch_wall(digits: str, decimals: str) -> _Wall:
    unit_ns = next(unit for count, unit in _EPOCH_UNITS_NS if len(digits) <= count)
    exact = Decimal(f"{digits}.{decimals or 0}") * unit_ns
    return _Wall(int(exact), max(1, unit_ns // 10 ** len(decimals)))


def _clock_time(match: re.Match[str], session: _Session) -> int | None:
    """`[today|yesterday] [H:MM[:SS[.fff]]]`: the latest day of the session on which it finds something."""
    word, hour, minute, second, fraction = match.groups()
    back = {"today": 0, "yesterday": 1, None: -1}[word]
    days = session.days() if back < 0 else [session.last_day - _DAY * back]
    width_ns = _width_ns(minute, second, fraction)
    for day in days:
        naive = datetime(day.year, day.month, day.day, int(hour or 0), int(minute or 0), int(second or 0))  # noqa: DTZ001
        rest_ns = int((fraction or "").ljust(9, "0"))
        if (t := _latest(naive, rest_ns, width_ns, session)) is not None:
            return t
    return None


def _iso_time(text: str, match: re.Match[str], session: _Session) -> int | None:
    try:
        stamp = datetime.fromisoformat(text.upper())
    except ValueError as error:
        raise _NotATime from error
    width_ns = _width_ns(match["m"], match["s"], match["f"], hour=match["h"])
    if stamp.tzinfo is not None:
        return session.find(_Wall(_epoch_ns(stamp), width_ns))
    return _latest(stamp, 0, width_ns, session)


def _width_ns(minute: str | None, second: str | None, fraction: str | None, hour: str | None = None) -> int:
    """What the last digit stands for: a day, an hour, a minute, a second or a decimal of it."""
    if fraction:
        return int(10 ** max(0, 9 - len(fraction)))
    if second or minute:
        return NS if second else 60 * NS
    return 3600 * NS if hour else 86_400 * NS


def _latest(naive: datetime, rest_ns: int, width_ns: int, session: _Session) -> int | None:
    """Find a local time. At the end of summer time it happens twice, at its begin it may not happen."""
    found: list[int] = []
    for fold in (0, 1):
        aware = _aware(naive.replace(fold=fold), session.tz)
        seconds, below_ns = divmod(_epoch_ns(aware), NS)
        if _local(seconds, session.tz).replace(tzinfo=None) != naive.replace(microsecond=0):
            continue
        t = session.find(_Wall(seconds * NS + below_ns + rest_ns, width_ns))
        found += [] if t is None else [t]
    return max(found, default=None)


def _aware(naive: datetime, tz: tzinfo | None) -> datetime:
    return naive.astimezone() if tz is None else naive.replace(tzinfo=tz)


def _epoch_ns(stamp: datetime) -> int:
    return (stamp.astimezone(UTC) - _EPOCH) // timedelta(microseconds=1) * 1000


def _local(seconds: int, tz: tzinfo | None) -> datetime:
    return datetime.fromtimestamp(seconds, UTC).astimezone(tz)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:39] + "...")


def _not_a_time(text: str) -> str:
    return f"{_shown(text)} is not a time: {_TIME_FORMS}"


def _outside(text: str, session: _Session) -> str:
    """Name the session's range, and the sign that may have been forgotten."""
    start, end = (_local(session.anchors.wall(t) // NS, session.tz) for t in (session.t0, session.t1))
    until = f"{end:%H:%M:%S}" if start.date() == end.date() else f"{end:%Y-%m-%d %H:%M:%S}"
    lasts = format_duration(session.t1 - session.t0)
    hint = ""
    span = _colons_ns(text.strip())
    if span is not None and span <= session.t1 - session.t0:
        hint = f"; write +{text.strip()} to count from the start"
    return f"{_shown(text)} is outside the recording: {start:%Y-%m-%d %H:%M:%S} to {until} ({lasts}){hint}"
