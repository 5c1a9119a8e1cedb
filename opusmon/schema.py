"""What a record is: fields, channels, batches and the interned text they refer to.

A batch is a numpy structured array: n >= 1 rows of one channel, sorted by `t`. The same value
travels from a collector through the pipe, the window, the file and back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np

Rows = np.ndarray[tuple[int], np.dtype[np.void]]
Kind = Literal["gauge", "counter", "event"]

T_DTYPE = "<i8"
"""CLOCK_MONOTONIC nanoseconds: the clock of `bpf_ktime_get_ns` and `time.monotonic_ns`."""

DTYPES = frozenset({"<i2", "<i4", "<i8", "<u4", "<u8", "<f4", "<f8"})
"""The only column types a file may name; anything else is refused by `Channel.from_json`."""

MAX_TEXT_CHARS = 8192
MAX_TEXTS = 65_536


class SchemaError(ValueError):
    """A channel description that this version cannot use."""


@dataclass(frozen=True, slots=True)
class Field:
    """One column of a channel.

    Attributes:
        name: snake_case, the unit in the name where there is one (`dur_ns`, `hbm_bw_pct`).
        dtype: one of `DTYPES`, little-endian. Measured numbers are floats, so that NaN can say "missing".
        unit: what is printed after the value, "" for none.
        help: one sentence, with the caveat a reader must know.
        text: the value is an id into the source's `StringTable` (dtype `<u4`).
    """

    name: str
    dtype: str
    unit: str = ""
    help: str = ""
    text: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or (self.text and self.dtype != "<u4"):
            raise SchemaError(f"field {self.name!r}: dtype {self.dtype!r} is not supported")
        if not self.name.isidentifier():
            raise SchemaError(f"field name {self.name!r} is not an identifier")


@dataclass(frozen=True)
class Channel:
    """A named, typed stream of rows.

    Attributes:
        name: public name; dumps, exports and rules use it.
        kind: gauge (a value at an instant or over the interval that ends there), counter (grows), event.
        fields: the columns after `t`.
        key: the identity fields; rows with equal keys are one series.
        help: one sentence.
    """

    name: str
    kind: Kind
    fields: tuple[Field, ...]
    key: tuple[str, ...] = ()
    help: str = ""

    def __post_init__(self) -> None:
        names = [field.name for field in self.fields]
        if len(set(names)) != len(names) or "t" in names:
            raise SchemaError(f"channel {self.name!r}: field names repeat")
        if not set(self.key) <= set(names):
            raise SchemaError(f"channel {self.name!r}: key names a field it does not have")

    @cached_property
    def dtype(self) -> np.dtype[np.void]:
        """Structured dtype of a row: `t` first, then the fields in order, packed."""
        return np.dtype([("t", T_DTYPE), *((f.name, f.dtype) for f in self.fields)])

    @cached_property
    def by_name(self) -> Mapping[str, Field]:
        """The fields by name (`t` is not among them)."""
        return {field.name: field for field in self.fields}

    @cached_property
    def values(self) -> tuple[str, ...]:
        """Names of the numeric fields that are not part of the key: what a rollup summarises."""
        return tuple(f.name for f in self.fields if not f.text and f.name not in self.key)

    def rows(self, records: Iterable[Sequence[Any]]) -> Rows:
        """Build rows from sequences in column order, `t` first; sorted by `t`."""
        rows = np.array([tuple(record) for record in records], dtype=self.dtype)
        return sort_rows(rows)

    def to_json(self) -> str:
        """Describe the channel as JSON text."""
        fields = [
            {"name": f.name, "dtype": f.dtype, "unit": f.unit, "help": f.help, "text": f.text}
            for f in self.fields
        ]
        body = {"name": self.name, "kind": self.kind, "key": self.key, "help": self.help, "fields": fields}
        return json.dumps(body, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Channel:
        """Read a description written by this or another version; unknown properties are ignored.

        Raises:
            SchemaError: the text is not such a description.
        """
        try:
            body = json.loads(text)
            fields = tuple(
                Field(
                    name=str(f["name"]),
                    dtype=str(f["dtype"]),
                    unit=str(f.get("unit", "")),
                    help=str(f.get("help", "")),
                    text=bool(f.get("text", False)),
                )
                for f in body["fields"]
            )
            kinds: dict[str, Kind] = {"counter": "counter", "event": "event"}
            kind: Kind = kinds.get(str(body["kind"]), "gauge")
            return cls(
                str(body["name"]), kind, fields, tuple(map(str, body["key"])), str(body.get("help", ""))
            )
        except SchemaError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SchemaError(f"not a channel description: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows of one channel from one host, sorted by `t`.

    Attributes:
        channel: what the rows are.
        rows: structured array of `channel.dtype`, shape (n,), n >= 1.
        origin: the host the rows came from, "" for this one.
    """

    channel: Channel
    rows: Rows
    origin: str = ""

    def __post_init__(self) -> None:
        if self.rows.dtype != self.channel.dtype or self.rows.ndim != 1 or len(self.rows) == 0:
            raise SchemaError(f"batch of {self.channel.name!r}: rows do not fit the channel")

    @property
    def t0(self) -> int:
        """Time of the first row, monotonic ns."""
        return int(self.rows["t"][0])

    @property
    def t1(self) -> int:
        """Time of the last row, monotonic ns."""
        return int(self.rows["t"][-1])


class StringTable:
    """Text interned to u32 ids: rows carry ids and stay fixed-size.

    Id 0 is "" (no text). The table is bounded; once it is full, new text becomes `FULL`, which says so.
    """

    FULL = "(text dropped: string table full)"

    def __init__(self, texts: Mapping[int, str] | None = None, *, limit: int = MAX_TEXTS) -> None:
        self._limit = limit
        self._texts: dict[int, str] = {0: ""}
        self._texts.update(texts or {})
        self._ids = {text: number for number, text in self._texts.items()}
        self._next = max(self._texts) + 1

    def __len__(self) -> int:
        return len(self._texts)

    def intern(self, text: str) -> int:
        """Id of `text`, adding it when new. Text over `MAX_TEXT_CHARS` is cut."""
        text = text[:MAX_TEXT_CHARS]
        known = self._ids.get(text)
        if known is not None:
            return known
        if len(self._texts) >= self._limit:
            text = self.FULL
            if text in self._ids:
                return self._ids[text]
        number = self._next
        self.put(number, text)
        return number

    def put(self, number: int, text: str) -> None:
        """Set the text of an id read from a pipe or a file."""
        self._texts[number] = text
        self._ids.setdefault(text, number)
        self._next = max(self._next, number + 1)

    def text(self, number: int) -> str:
        """Text of an id; an unknown id reads as "?"."""
        return self._texts.get(int(number), "?")

    def since(self, count: int) -> list[tuple[int, str]]:
        """Entries added after the table held `count` entries, in order."""
        return list(self._texts.items())[count:] if count < len(self._texts) else []


def conform(rows: Rows, channel: Channel) -> Rows:
    """Rows of another version of a channel in the columns of this one; `rows` itself when they are the same.

    Columns that are not there become NaN where they can say "missing", else 0.
    """
    if rows.dtype == channel.dtype:
        return rows
    out: Rows = np.zeros(len(rows), dtype=channel.dtype)
    theirs = rows.dtype.names or ()
    for name in channel.dtype.names or ():
        if name in theirs:
            with np.errstate(invalid="ignore", over="ignore"):
                out[name] = rows[name]
        elif channel.dtype[name].kind == "f":
            out[name] = np.nan
    return out


def sort_rows(rows: Rows) -> Rows:
    """Rows in time order; rows of equal time keep their order. Returns `rows` itself when already sorted."""
    times = rows["t"]
    if len(rows) < 2 or bool(np.all(times[1:] >= times[:-1])):
        return rows
    return rows.take(np.argsort(times, kind="stable"))


def join_rows(parts: Sequence[Rows], channel: Channel) -> Rows:
    """Concatenate row arrays of one channel in time order; empty input gives an empty array."""
    if len(parts) == 1:
        return sort_rows(parts[0])
    if not parts:
        return np.empty(0, dtype=channel.dtype)
    # As lumps of bytes: numpy copies rows field by field, which takes 20 times as long.
    lump = f"V{channel.dtype.itemsize}"
    if all(part.dtype == channel.dtype for part in parts):
        return sort_rows(np.concatenate([part.view(lump) for part in parts]).view(channel.dtype))
    return sort_rows(cast("Rows", np.concatenate(parts)))
