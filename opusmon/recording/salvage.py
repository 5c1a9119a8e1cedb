"""Getting every whole chunk out of a recording that is cut off or damaged, into a new file."""

from __future__ import annotations

import sqlite3
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from opusmon.clock import Anchor, Anchors
from opusmon.codec import MAX_CHUNK_B, ZLIB, encode
from opusmon.recording import store
from opusmon.recording.catalog import (
    MAX_ANCHORS,
    MAX_CHANNELS,
    MAX_MARKS,
    MAX_SCHEMA_CHARS,
    MAX_SESSION_KEYS,
    MAX_STRINGS,
    MAX_TEXT_ID,
    TextBudget,
    all_ints,
    read_channel,
)
from opusmon.recording.decode import Stored, decode_many, join
from opusmon.recording.pages import Cell, Pages, cell_at, cells, values
from opusmon.recording.stage import Stage, Transaction
from opusmon.recording.store import Mark, RecordingError, clean_text
from opusmon.recording.writer import CLOSED
from opusmon.schema import Batch, Channel, SchemaError, StringTable, sort_rows

Progress = Callable[[int, int], None]

BLOCK = 2048
BLOCK_B = 32 * 1024 * 1024
"""Chunks, and most bytes of them, decoded and written together."""

MAX_ROW_B = 64 * 1024
"""Longest row of a small table that is read. A damaged or hostile one may claim to be far longer."""

PAGE_BITS = 16
"""A cell's place is its page number and, in the low bits, where it begins on the page."""

NAMES = 12
"""Most channels that a report names."""

_SHAPES = {
    ("null", "int", "text", "int", "int", "int", "int", "blob"): "chunk",
    ("null", "text", "text"): "channel",
    ("null", "int", "int", "text", "text"): "mark",
}
"""Tables told apart by the types of their first columns; a newer version may have added some behind."""

_EXACT_SHAPES = {("null", "int", "int"): "clock", ("int", "text"): "string", ("text", "text"): "session"}
"""Tables so plain that all their columns must match."""

_MOST_B = {"channel": 4 * MAX_SCHEMA_CHARS} | dict.fromkeys(("mark", "clock", "string", "session"), MAX_ROW_B)


@dataclass(frozen=True)
class SalvageReport:
    """What was saved.

    Attributes:
        chunks: chunks in the new file.
        rows: rows in them.
        lost_chunks: chunks that were found but cannot be decoded.
        channels: channels that were found.
        t0: time of the first row, monotonic ns, 0 without rows.
        t1: time of the last row.
        names: names of the channels.
    """

    chunks: int
    rows: int
    lost_chunks: int
    channels: int
    t0: int
    t1: int
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        """What was saved and what was not, in one line."""
        names = ", ".join(self.names[:NAMES]) + (", ..." if len(self.names) > NAMES else "")
        of = f"{_count(self.channels, 'channel')}{names and f' ({names})'}"
        left_out = f"{_count(self.lost_chunks, 'damaged chunk')} left out"
        return f"saved {_count(self.chunks, 'chunk')}, {_count(self.rows, 'row')} of {of}, {left_out}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


class _Place(NamedTuple):
    """A chunk found in the source."""

    id: int
    page: int
    start: int


@dataclass
class _Found:
    """The small tables of the source, and where its chunks are."""

    channels: dict[int, Channel] = field(default_factory=dict)
    texts: dict[int, tuple[int, str]] = field(default_factory=dict)
    anchors: dict[int, Anchor] = field(default_factory=dict)
    marks: dict[int, Mark] = field(default_factory=dict)
    session: dict[str, str] = field(default_factory=dict)
    text: TextBudget = field(default_factory=TextBudget)
    described: TextBudget = field(default_factory=TextBudget)
    ids: array[int] = field(default_factory=lambda: array("q"))
    places: array[int] = field(default_factory=lambda: array("q"))

    def take(self, table: str, rowid: int, row: list[Any]) -> None:
        """Keep a row of a small table, within the limits a reader has as well."""
        cleaned: list[Any] = [clean_text(value) if isinstance(value, str) else value for value in row]
        budget, kept = (self.described, row) if table == "channel" else (self.text, cleaned)
        room = budget.take(*(value for value in kept if isinstance(value, str)))
        if table == "channel" and room and len(self.channels) < MAX_CHANNELS:
            self._take_channel(rowid, row[2][:MAX_SCHEMA_CHARS])
        elif table == "clock" and len(self.anchors) < MAX_ANCHORS:
            self.anchors[rowid] = Anchor(rowid, row[1], row[2])
        elif not room:
            return
        elif table == "string" and len(self.texts) < MAX_STRINGS and 0 <= row[0] <= MAX_TEXT_ID:
            self.texts[rowid] = (cleaned[0], cleaned[1])
        elif table == "mark" and len(self.marks) < MAX_MARKS:
            self.marks[rowid] = Mark(*cleaned[1:5])
        elif table == "session" and len(self.session) < MAX_SESSION_KEYS:
            self.session[cleaned[0]] = cleaned[1]

    def _take_channel(self, number: int, text: str) -> None:
        """Keep a channel; of two with one name the first, as a reader does."""
        try:
            channel = read_channel(text)
        except SchemaError:
            return
        rivals = [other for other, known in self.channels.items() if known.name == channel.name]
        if all(number <= rival for rival in rivals):
            for rival in rivals:
                del self.channels[rival]
            self.channels[number] = channel

    def chunks(self) -> Iterator[_Place]:
        """The chunks by id; the same id may come twice, where an old copy of a page was left."""
        ids, places = np.array(self.ids, np.int64), np.array(self.places, np.int64)
        for number in np.lexsort((places, ids)).tolist():
            place = self.places[number]
            yield _Place(self.ids[number], place >> PAGE_BITS, place & ((1 << PAGE_BITS) - 1))

    def strings(self) -> StringTable:
        """The texts in the order they were interned."""
        return StringTable(dict(text for _, text in sorted(self.texts.items())))


def salvage(source: Path, out: Path, progress: Progress | None = None) -> SalvageReport:
    """Write all that can be read of a damaged or truncated recording to a new one. The source is only read.

    Args:
        source: the recording; a `-wal` file beside it is used as well.
        out: file to create.
        progress: called with the work done and the whole of it, in pages, twice over.

    Raises:
        RecordingError: the source holds no recording, or the new file cannot be written.
    """
    told = progress or (lambda _done, _total: None)
    try:
        pages = Pages(source)
    except OSError as error:
        raise RecordingError(f"cannot read {source}: {store.describe(error)}") from error
    try:
        found = _search(pages, told)
        if not found.channels:
            raise RecordingError(f"nothing in {source} can be salvaged: no channel description is left")
        return _Writing(pages, found, out, told).run(source.name)
    except OSError as error:
        raise RecordingError(f"cannot read {source}: {store.describe(error)}") from error
    finally:
        pages.close()


def _search(pages: Pages, told: Progress) -> _Found:
    """Look at every page: read the small tables, note where chunks are."""
    found = _Found()
    free = pages.free()
    for done, number in enumerate(pages.numbers()):
        if done % 1000 == 0:
            told(done, 2 * pages.count)
        if number in free:
            continue
        for cell in cells(pages, number):
            table = _table_of(cell)
            if table == "chunk":
                found.ids.append(cell.rowid)
                found.places.append(number << PAGE_BITS | cell.start)
            elif cell.size_b <= _MOST_B.get(table, 0) and (row := values(pages, cell)) is not None:
                found.take(table, cell.rowid, row)
    return found


def _table_of(cell: Cell) -> str:
    """Which table a row is of, "" for none of ours."""
    kinds = tuple(map(_kind, cell.types))
    exact = _EXACT_SHAPES.get(kinds, "")
    return exact or next((table for shape, table in _SHAPES.items() if kinds[: len(shape)] == shape), "")


def _kind(serial: int) -> str:
    if serial >= 12:
        return "text" if serial % 2 else "blob"
    return "null" if serial == 0 else "int" if serial <= 9 and serial != 7 else "real"


class _Writing:
    """The second half of a salvage: decode the chunks, write the sound ones."""

    def __init__(self, pages: Pages, found: _Found, out: Path, told: Progress) -> None:
        self._pages, self._found, self._out, self._told = pages, found, out, told
        self._stage = Stage(found.strings())
        self._chunks = self._rows = self._lost = 0
        self._times: list[int] = []
        self._last_id: int | None = None

    def run(self, name: str) -> SalvageReport:
        """Write the new file.

        Raises:
            RecordingError: it cannot be written; what there was of it is removed.
        """
        connection, _ = store.create(self._out)
        try:
            self._write(connection, name)
        except (sqlite3.Error, OSError) as error:
            connection.close()
            self._out.unlink(missing_ok=True)
            raise RecordingError(f"cannot write {self._out}: {store.describe(error)}") from error
        t0, t1 = min(self._times, default=0), max(self._times, default=0)
        names = tuple(sorted(channel.name for channel in self._found.channels.values()))
        return SalvageReport(self._chunks, self._rows, self._lost, len(names), t0, t1, names)

    def _write(self, connection: sqlite3.Connection, name: str) -> None:
        found = self._found
        marks = [Mark(*mark) for _, mark in sorted(found.marks.items())]
        first = self._stage.build((), marks, found.anchors.values())
        for _, channel in sorted(found.channels.items()):
            self._stage.add_channel(first, channel)
        first.apply(connection)
        block: list[tuple[_Place, list[Any] | None]] = []
        block_b = 0
        for count, place in enumerate(found.chunks()):
            row = self._read(place)
            block.append((place, row))
            block_b += self._size_b(row)
            if len(block) == BLOCK or block_b > BLOCK_B:
                self._add(connection, block)
                block, block_b = [], 0
                self._told(
                    self._pages.count * (len(found.ids) + count) // len(found.ids), 2 * self._pages.count
                )
        self._add(connection, block)
        end = Anchors(found.anchors.values()).wall(max(self._times, default=0))
        session = {CLOSED: str(end), **found.session, "salvaged_from": name}
        self._stage.finish(session.items()).apply(connection)
        store.finish(connection)

    def _read(self, place: _Place) -> list[Any] | None:
        """Columns of the chunk at a place."""
        cell = cell_at(self._pages.get(place.page), place.page, place.start)
        return None if cell is None else values(self._pages, cell)

    def _size_b(self, row: list[Any] | None) -> int:
        """Bytes that a chunk takes as it is stored and when it is decoded."""
        if row is None:
            return 0
        channel = self._found.channels.get(row[1])
        rows_b = 0 if channel is None else row[5] * channel.dtype.itemsize
        return len(row[7]) + (rows_b if 0 < rows_b <= MAX_CHUNK_B else 0)

    def _add(self, connection: sqlite3.Connection, block: Sequence[tuple[_Place, list[Any] | None]]) -> None:
        """Decode a block of chunks and commit the sound ones."""
        decoded = self._decode(block)
        work = Transaction()
        for number, (place, row) in enumerate(block):
            rows = decoded.get(number)
            if rows is None or row is None:
                self._lost += 1
            elif place.id != self._last_id:
                self._last_id = place.id
                self._add_rows(work, row, rows)
        if work:
            work.apply(connection)

    def _decode(self, block: Sequence[tuple[_Place, list[Any] | None]]) -> dict[int, bytes | None]:
        """Row bytes by position in the block."""
        by_channel: defaultdict[int, list[Stored]] = defaultdict(list)
        for number, (_, row) in enumerate(block):
            if row is not None and all_ints(row[1]):
                by_channel[row[1]].append(Stored(number, row[5], row[6], row[7]))
        decoded: dict[int, bytes | None] = {}
        for channel_id, stored in by_channel.items():
            channel = self._found.channels.get(channel_id)
            if channel is not None:
                decoded |= decode_many(stored, channel.dtype)
        return decoded

    def _add_rows(self, work: Transaction, row: list[Any], row_bytes: bytes) -> None:
        """Add a sound chunk; its bytes are kept when they are as a writer of this version makes them."""
        channel = self._found.channels[row[1]]
        rows = join([row_bytes], channel.dtype)
        ordered = sort_rows(rows)
        data = row[7] if ordered is rows and row[6] == ZLIB else encode(ordered)
        batch = Batch(channel, ordered, row[2])
        self._stage.add_encoded(work, batch, data)
        self._chunks += 1
        self._rows += len(rows)
        self._times += [batch.t0, batch.t1]
        self._times = [min(self._times), max(self._times)]
