"""Rows of one channel as CSV or NDJSON, chunk by chunk: memory does not grow with the recording.

Columns: `t` (monotonic ns), `time` (ISO 8601 wall time with UTC offset, microseconds), the channel's fields, and
`origin`, the host a row came from ("" for the one that recorded). Text ids are resolved. A missing value (NaN) is
empty in CSV and null in NDJSON. Integers are exact; a 32-bit float is written in the fewest digits that
read back as the same 32-bit float.

Text is written as it was recorded, except to a terminal: there a process name must not be able to send it commands,
so control characters become "?". A spreadsheet may take a process name that begins with = + - or @ for a
formula: import text columns as text.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, tzinfo
from itertools import repeat
from typing import Any, Literal, Protocol, TextIO

from opusmon.clock import NS, Anchors
from opusmon.schema import Batch, Channel, Field, Rows, StringTable
from opusmon.text import printable
from opusmon.window import Described

Format = Literal["csv", "ndjson"]
FORMATS: tuple[Format, ...] = ("csv", "ndjson")

_ADDED = ("t", "time", "origin")


class ExportError(ValueError):
    """What cannot be exported and what can, in one line."""


class RowSource(Described, Protocol):
    """What rows are read from; a `Recording` is one."""

    def batches(self, t0: int, t1: int, channels: Sequence[str] | None = None) -> Iterator[Batch]:
        """Rows with `t0 < t <= t1` (monotonic ns), chunk by chunk."""
        ...


def dump(
    recording: RowSource, channel: str, t0: int, t1: int, fmt: str, out: TextIO, tz: tzinfo | None = None
) -> int:
    """Write the rows of a channel.

    Args:
        recording: where to read.
        channel: its name.
        t0: rows after this instant, monotonic ns.
        t1: rows up to and including this instant, monotonic ns.
        fmt: "csv" or "ndjson".
        out: where to; a file must be opened with newline="". `BrokenPipeError` is the caller's.
        tz: time zone of `time`, None for this machine's.

    Returns:
        How many rows were written.

    Raises:
        ExportError: there is no such channel or format.
    """
    known = recording.channels.get(channel)
    if known is None:
        names = ", ".join(sorted(recording.channels))
        raise ExportError(f"no channel {channel!r} in this recording; it has {names or 'none'}")
    if fmt not in FORMATS:
        raise ExportError(f"no format {fmt!r}; there are {', '.join(FORMATS)}")
    write = (_csv if fmt == "csv" else _ndjson)(columns(known), out)
    wall = _WallText(recording.anchors, tz)
    clean = printable if out.isatty() else _encodable
    count = 0
    for batch in recording.batches(t0, t1, [channel]):
        rows = _between(batch.rows, t0, t1)
        write(_records(batch, rows, recording.strings, wall, clean))
        count += len(rows)
    return count


def columns(channel: Channel) -> list[str]:
    """Names of the columns; a field of an unknown channel that bears an added name gets an underscore."""
    fields = [f"{field.name}_" if field.name in _ADDED else field.name for field in channel.fields]
    return ["t", "time", *fields, "origin"]


def _csv(names: Sequence[str], out: TextIO) -> Callable[[Iterator[tuple[Any, ...]]], None]:
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    return writer.writerows


def _ndjson(names: Sequence[str], out: TextIO) -> Callable[[Iterator[tuple[Any, ...]]], None]:
    def write(records: Iterator[tuple[Any, ...]]) -> None:
        out.writelines(
            json.dumps(dict(zip(names, record, strict=True)), allow_nan=False) + "\n" for record in records
        )

    return write


def _records(
    batch: Batch, rows: Rows, strings: StringTable, wall: _WallText, clean: Callable[[str], str]
) -> Iterator[tuple[Any, ...]]:
    """Rows as tuples in the order of `columns`; None is a missing value in either format."""
    times = rows["t"].tolist()
    fields = [_values(rows, field, strings, clean) for field in batch.channel.fields]
    return zip(times, map(wall.text, times), *fields, repeat(clean(batch.origin)))


def _values(rows: Rows, field: Field, strings: StringTable, clean: Callable[[str], str]) -> list[Any]:
    column = rows[field.name]
    if field.text:
        return [clean(strings.text(number)) for number in column.tolist()]
    if column.dtype.kind != "f":
        return list(column.tolist())
    # str() of a 32-bit float is its shortest form: 71.3 where the double nearest to it is 71.30000305175781.
    numbers = map(float, column.astype("U32").tolist()) if column.dtype.itemsize == 4 else column.tolist()
    return [number if math.isfinite(number) else None for number in numbers]


def _encodable(text: str) -> str:
    """Text that every UTF-8 stream takes: a lone surrogate, from a name that was not UTF-8, becomes an escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _between(rows: Rows, t0: int, t1: int) -> Rows:
    first, last = rows["t"].searchsorted(t0, "right"), rows["t"].searchsorted(t1, "right")
    return rows[first:last]


class _WallText:
    """Wall times as text; the calendar is asked once per second of the session, not once per row."""

    def __init__(self, anchors: Anchors, tz: tzinfo | None) -> None:
        self._anchors = anchors
        self._tz = tz
        self._second: int | None = None
        self._parts = ("", "")

    def text(self, t: int) -> str:
        """ISO 8601 with microseconds and offset, cut and not rounded; equal to `times.format_iso`."""
        second, rest = divmod(self._anchors.wall(t), NS)
        if second != self._second:
            stamp = datetime.fromtimestamp(second, UTC).astimezone(self._tz).isoformat(timespec="seconds")
            self._second, self._parts = second, (stamp[:19], stamp[19:])
        date, offset = self._parts
        return f"{date}.{rest // 1000:06d}{offset}"
