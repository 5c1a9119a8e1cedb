"""From batches to table rows: what one transaction will write, prepared in full before it begins.

So a transaction that fails (disk full) can be tried again as it is: every row carries its own id.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opusmon.clock import NS, Anchor
from opusmon.codec import ZLIB, encode
from opusmon.recording.rollup import LEVELS_NS, Cascade, RollupGroup, encode_group
from opusmon.recording.store import Mark, clamp, clean_text, storable
from opusmon.schema import Batch, Channel, Rows, StringTable, conform, join_rows

MAX_CHUNK_ROWS = 65_536
MAX_SPAN_NS = 10 * NS
"""Longest time a chunk covers: a query looks this far back for chunks that reach into its range."""

Record = tuple[Any, ...]

INSERTS = {
    "session": "INSERT OR REPLACE INTO session VALUES(?,?)",
    "clock": "INSERT OR REPLACE INTO clock VALUES(?,?,?)",
    "channel": "INSERT OR REPLACE INTO channel VALUES(?,?,?)",
    "span": "INSERT OR REPLACE INTO span VALUES(?,?)",
    "string": "INSERT OR REPLACE INTO string(rowid,id,text) VALUES(?,?,?)",
    "chunk": "INSERT OR REPLACE INTO chunk VALUES(?,?,?,?,?,?,?,?)",
    "rollup": "INSERT OR REPLACE INTO rollup VALUES(?,?,?,?,?,?,?,?)",
    "mark": "INSERT OR REPLACE INTO mark VALUES(?,?,?,?,?)",
}


@dataclass(slots=True)
class Transaction:
    """Table rows to be written together.

    Attributes:
        records: rows by table, in the order of their columns.
        refused: channel, number of rows and reason of batches that could not be turned into table rows.
    """

    records: dict[str, list[Record]] = field(default_factory=lambda: {table: [] for table in INSERTS})

    refused: list[tuple[str, int, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(self.records.values())

    def apply(self, connection: sqlite3.Connection) -> None:
        """Write and commit, or leave the file as it was.

        Raises:
            sqlite3.Error: nothing was written.
        """
        connection.execute("BEGIN IMMEDIATE")
        try:
            for table, records in self.records.items():
                if records:
                    connection.executemany(INSERTS[table], records)
            connection.execute("COMMIT")
        except sqlite3.Error:
            # SQLite has rolled back by itself when the disk is full.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


@dataclass(slots=True)
class _Known:
    """A channel that has its row in the file."""

    id: int
    channel: Channel
    cascade: Cascade
    max_span_ns: int = 0


class Stage:
    """Builds transactions; remembers which ids, channels and texts the file has.

    Args:
        strings: the table that text ids in rows refer to; what is new in it goes into every transaction.
    """

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings
        self._texts = 0
        self._known: dict[str, _Known] = {}
        self._next = dict.fromkeys(("chunk", "rollup", "mark"), 1)

    def build(
        self, batches: Sequence[Batch], marks: Iterable[Mark] = (), anchors: Iterable[Anchor] = ()
    ) -> Transaction:
        """Prepare the transaction for what has come since the last one."""
        work = Transaction()
        for origin, parts in _runs(batches):
            try:
                self._add_run(work, origin, parts)
            except Exception as error:  # one collector's bad batch must not end the recording of the others
                work.refused.append(
                    (parts[0].channel.name, sum(len(part.rows) for part in parts), repr(error))
                )
        self._add_texts(work)
        for mark in marks:
            self.add_mark(work, mark)
        work.records["clock"] += [(clamp(a.t), clamp(a.wall_ns), clamp(a.step_ns)) for a in anchors]
        return work

    def finish(self, session: Iterable[tuple[str, str]]) -> Transaction:
        """Prepare the last transaction: the rollups that are left, and session keys."""
        work = Transaction()
        for known in self._known.values():
            self._add_groups(work, known, known.cascade.close())
        work.records["session"] += [(clean_text(key), clean_text(value)) for key, value in session]
        return work

    def _add_run(self, work: Transaction, origin: str, parts: Sequence[Batch]) -> None:
        """Add batches of one channel and origin as one chunk, or several when they are long."""
        known = self._register(work, parts[0].channel)
        rows = join_rows([conform(part.rows, known.channel) for part in parts], known.channel)
        for piece in split(rows):
            self._add_chunk(work, known, origin, piece, encode(piece))
        self._add_groups(work, known, known.cascade.add(rows))

    def add_channel(self, work: Transaction, channel: Channel) -> None:
        """Add a channel that may never have rows."""
        self._register(work, channel)

    def add_encoded(self, work: Transaction, batch: Batch, data: bytes) -> None:
        """Add rows whose zlib column bytes are known already, as they are."""
        known = self._register(work, batch.channel)
        self._add_chunk(work, known, batch.origin, batch.rows, data)
        self._add_groups(work, known, known.cascade.add(batch.rows))

    def add_mark(self, work: Transaction, mark: Mark) -> None:
        """Add a mark."""
        record = (
            self._take("mark"),
            clamp(mark.t0),
            clamp(mark.t1),
            clean_text(mark.kind),
            clean_text(mark.text),
        )
        work.records["mark"].append(record)

    def _add_chunk(self, work: Transaction, known: _Known, origin: str, rows: Rows, data: bytes) -> None:
        """Add a chunk, and widen its channel's span when it is longer."""
        t0, t1 = int(rows["t"][0]), int(rows["t"][-1])
        record = (self._take("chunk"), known.id, clean_text(origin), t0, t1, len(rows), ZLIB, data)
        work.records["chunk"].append(record)
        if clamp(t1 - t0) > known.max_span_ns:
            known.max_span_ns = clamp(t1 - t0)
            work.records["span"].append((known.id, known.max_span_ns))

    def _register(self, work: Transaction, channel: Channel) -> _Known:
        """The channel of this name, added to the file when it is new."""
        known = self._known.get(channel.name)
        if known is None:
            known = self._known[channel.name] = _Known(len(self._known) + 1, channel, Cascade(channel))
            work.records["channel"].append((known.id, storable(channel.name), storable(channel.to_json())))
            work.records["span"].append((known.id, 0))
        return known

    def _add_groups(self, work: Transaction, known: _Known, groups: Iterable[RollupGroup]) -> None:
        for group in groups:
            data = encode_group(known.channel, group.rows)
            level_ns = LEVELS_NS[group.level]
            record = (
                self._take("rollup"),
                known.id,
                level_ns,
                group.t0,
                clamp(group.t1),
                len(group.rows),
                ZLIB,
                data,
            )
            work.records["rollup"].append(record)

    def _add_texts(self, work: Transaction) -> None:
        """Add the texts interned since the last call; collectors go on interning meanwhile."""
        if len(self._strings) == self._texts:
            return
        for number, text in _snapshot(self._strings, self._texts):
            self._texts += 1
            work.records["string"].append((self._texts, number, clean_text(text)))

    def _take(self, table: str) -> int:
        number = self._next[table]
        self._next[table] = number + 1
        return number


def split(rows: Rows) -> list[Rows]:
    """Cut sorted rows so that no piece covers over `MAX_SPAN_NS` or has over `MAX_CHUNK_ROWS` rows."""
    pieces: list[Rows] = []
    start = 0
    while start < len(rows):
        limit = min(int(rows["t"][start]), np.iinfo(np.int64).max - MAX_SPAN_NS) + MAX_SPAN_NS
        end = int(np.searchsorted(rows["t"], limit, side="right"))
        end = min(end, start + MAX_CHUNK_ROWS)
        pieces.append(rows[start:end])
        start = end
    return pieces


def _snapshot(strings: StringTable, count: int) -> list[tuple[int, str]]:
    """Texts added after the first `count`; tries again when another thread adds one at that very moment."""
    for _ in range(100):
        try:
            return strings.since(count)
        except RuntimeError:
            continue
    return []


def _runs(batches: Sequence[Batch]) -> list[tuple[str, list[Batch]]]:
    """Batches of one channel and origin together, as long as no other origin of that channel comes between.

    So rows of equal time keep the order they arrived in.
    """
    latest: dict[str, tuple[str, list[Batch]]] = {}
    runs: list[tuple[str, list[Batch]]] = []
    for batch in batches:
        run = latest.get(batch.channel.name)
        if run is None or run[0] != batch.origin:
            run = latest[batch.channel.name] = (batch.origin, [])
            runs.append(run)
        run[1].append(batch)
    return runs
