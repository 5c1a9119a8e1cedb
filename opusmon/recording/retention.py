"""Keeping a recording within an age and a size: the oldest chunks go, in small steps."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass

from opusmon.recording.rollup import LEVELS_NS
from opusmon.recording.store import PAGE_B, WAL_PAGES

STEP_CHUNKS = 256
STEP_B = 128 * 1024
"""Most chunks, and most of their bytes, deleted per transaction: small for the WAL, and no more than needed."""

STEP_PAGES = 512
"""Pages given back to the filesystem per step."""

TIME_LIMIT_S = 0.2
"""Longest the writer spends on it per flush; what is left waits for the next one."""

SLACK_SHARE = 4
"""Free pages are kept for the next chunks up to this part of the file; what is beyond is given back."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How much to keep.

    A rollup goes with the last of the rows it summarises: stored by ten minutes, rollups reach back further
    than the rows by up to that.

    Attributes:
        age_ns: chunks that ended longer ago go; None keeps all.
        size_b: bytes the file and its WAL may take; None for no limit.
    """

    age_ns: int | None = None
    size_b: int | None = None

    @property
    def wal_pages(self) -> int:
        """Pages in the WAL that start a checkpoint: at most an eighth of the size limit."""
        return WAL_PAGES if self.size_b is None else max(16, min(WAL_PAGES, self.size_b // 8 // PAGE_B))

    @property
    def file_b(self) -> int | None:
        """Bytes of pages in use that are allowed: the limit without the WAL and what one flush may add to it."""
        return None if self.size_b is None else max(self.size_b - 2 * self.wal_pages * PAGE_B, 16 * PAGE_B)

    def apply(self, connection: sqlite3.Connection, now: int) -> None:
        """Delete what is over the limits and shrink the file, for at most `TIME_LIMIT_S`.

        Args:
            connection: the writer's, outside a transaction.
            now: monotonic ns.

        Raises:
            sqlite3.Error: the disk failed; nothing is half done.
        """
        if self.age_ns is None and self.size_b is None:
            return
        end_s = time.monotonic() + TIME_LIMIT_S
        deleted = False
        while time.monotonic() < end_s and self._step(connection, now):
            deleted = True
        if deleted:
            _drop_derived(connection)
        while time.monotonic() < end_s and _shrink(connection):
            pass

    def _step(self, connection: sqlite3.Connection, now: int) -> bool:
        """Delete one step's worth; False when nothing is over the limits."""
        if self.age_ns is not None and _delete_before(connection, now - self.age_ns):
            return True
        limit_b = self.file_b
        return limit_b is not None and used_b(connection) > limit_b and _delete_oldest(connection)


def used_b(connection: sqlite3.Connection) -> int:
    """Bytes of pages in use."""
    pages = int(connection.execute("PRAGMA page_count").fetchone()[0])
    free = int(connection.execute("PRAGMA freelist_count").fetchone()[0])
    return (pages - free) * PAGE_B


def _delete_before(connection: sqlite3.Connection, cutoff: int) -> bool:
    """Delete a step of the chunks of each channel that ended before `cutoff`; whether there were any."""
    deleted = False
    for (channel,) in connection.execute("SELECT id FROM channel").fetchall():
        # t1 >= t0, so the index on t0 bounds the search; the few that straddle the cutoff stay.
        sql = "SELECT id, length(data) FROM chunk WHERE channel=? AND t0<? AND t1<? ORDER BY t0 LIMIT ?"
        deleted |= _delete(
            connection, connection.execute(sql, (channel, cutoff, cutoff, STEP_CHUNKS)).fetchall()
        )
    return deleted


def _delete_oldest(connection: sqlite3.Connection) -> bool:
    """Delete a step of the chunks that came first, but never the last one; whether there were any."""
    sql = "SELECT id, length(data) FROM chunk WHERE id < (SELECT max(id) FROM chunk) ORDER BY id LIMIT ?"
    return _delete(connection, connection.execute(sql, (STEP_CHUNKS,)).fetchall())


def _delete(connection: sqlite3.Connection, candidates: Sequence[tuple[int, int]]) -> bool:
    """Delete the first chunks of (id, bytes), `STEP_B` of them but at least one; whether there were any."""
    chosen: list[tuple[int]] = []
    total_b = 0
    for number, data_b in candidates:
        chosen.append((number,))
        total_b += data_b
        if total_b >= STEP_B:
            break
    if chosen:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("DELETE FROM chunk WHERE id=?", chosen)
        connection.execute("COMMIT")
    return bool(chosen)


def _drop_derived(connection: sqlite3.Connection) -> None:
    """Delete rollups and marks from before the first chunk that is left."""
    connection.execute("BEGIN IMMEDIATE")
    first: list[int] = []
    for (channel,) in connection.execute("SELECT id FROM channel").fetchall():
        oldest = connection.execute("SELECT min(t0) FROM chunk WHERE channel=?", (channel,)).fetchone()[0]
        if oldest is not None:
            first.append(oldest)
        for level in LEVELS_NS:
            connection.execute(
                "DELETE FROM rollup WHERE channel=? AND level=? AND t1<=coalesce(?, t1)",
                (channel, level, oldest),
            )
    if first:
        connection.execute("DELETE FROM mark WHERE t1<?", (min(first),))
    connection.execute("COMMIT")


def _shrink(connection: sqlite3.Connection) -> bool:
    """Give free pages at the end of the file back when there are many; whether some were."""
    pages = int(connection.execute("PRAGMA page_count").fetchone()[0])
    free = int(connection.execute("PRAGMA freelist_count").fetchone()[0])
    if free <= max(pages // SLACK_SHARE, STEP_PAGES):
        return False
    connection.execute(f"PRAGMA incremental_vacuum({STEP_PAGES})").fetchall()
    return True
