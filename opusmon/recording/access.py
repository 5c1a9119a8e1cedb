"""Opening a recording for reading: who it is, whether it is whole, and nothing in it may act.

Whatever the file holds, opening answers with a connection or a `RecordingError` of one line.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from opusmon.recording import store
from opusmon.recording.store import RecordingError

MAGIC = b"SQLite format 3\x00"
HEADER_B = 100
READ_VERSION_AT = 19
WAL_VERSION = b"\x02"
"""The byte of the header that says how the file is read: 1 with a rollback journal, 2 with a WAL."""

MAX_VALUE_B = 80 * 1024 * 1024
"""Longest value SQLite may build, so that a hostile schema cannot fill the memory."""

BUSY_S = 0.5

FAILURES = (sqlite3.Error, UnicodeDecodeError)
"""What reading a damaged file may raise; the second when SQLite's own message quotes bytes of it."""


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of an SQLite header that tell about the file.

    Attributes:
        page_b: page size in bytes, 0 when it is not a legal one.
        pages: size of the file in pages as the last writer knew it, 0 when that is not recorded.
        freelist: first page of the list of free pages, 0 for none.
        version: `PRAGMA user_version`.
        application: `PRAGMA application_id`.
    """

    page_b: int
    pages: int
    freelist: int
    version: int
    application: int

    @classmethod
    def parse(cls, head: bytes) -> Header | None:
        """Read the first 100 bytes of a file; None when it is no SQLite file."""
        if len(head) < HEADER_B or not head.startswith(MAGIC):
            return None

        def number(at: int, width: int = 4) -> int:
            return int.from_bytes(head[at : at + width], "big")

        page_b = 65_536 if number(16, 2) == 1 else number(16, 2)
        legal = 512 <= page_b <= 65_536 and page_b & (page_b - 1) == 0
        # The page count is only valid when the last writer was one that keeps it.
        pages = number(28) if number(24) == number(92) else 0
        return cls(page_b if legal else 0, pages, number(32), number(60), number(68))


def read_header(path: Path) -> tuple[Header, int]:
    """Header and size in bytes of a file that nothing in this process has open through SQLite.

    Raises:
        RecordingError: it is missing, unreadable, empty or no SQLite file.
    """
    size_b = _size_b(path)
    try:
        with path.open("rb") as file:
            head = file.read(HEADER_B)
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {store.describe(error)}") from error
    if size_b < HEADER_B and MAGIC.startswith(head[: len(MAGIC)]):
        raise RecordingError(f"{path} is cut off after {size_b} bytes: nothing can be read, copy it again")
    header = Header.parse(head)
    if header is None:
        raise _foreign(path)
    return header, size_b


def connect(path: Path) -> tuple[sqlite3.Connection, list[str]]:
    """Open a recording read-only.

    Returns:
        A connection that any thread may use, one at a time, and warnings for the user.

    Raises:
        RecordingError: one line saying what is wrong and how to go on.
    """
    _size_b(path)
    warnings: list[str] = []
    try:
        connection = _open(path, warnings)
    except FAILURES as error:
        raise _diagnose(path, error) from error
    try:
        _check(connection, path, warnings)
    except FAILURES as error:
        connection.close()
        raise translate(error, path) from error
    except BaseException:
        connection.close()
        raise
    return connection, warnings


def _size_b(path: Path) -> int:
    """Size of a file that is not empty.

    Raises:
        RecordingError: it is, or cannot be read.
    """
    size_b = store.check_is_file(path)
    if size_b == 0:
        raise RecordingError(f"{path} is empty: nothing was recorded")
    return size_b


def _foreign(path: Path) -> RecordingError:
    return RecordingError(f"{path} is not an opusmon recording")


def _diagnose(path: Path, error: Exception) -> RecordingError:
    """Why SQLite would not open a file: foreign, truncated or damaged."""
    if store.is_busy(error) or (isinstance(error, sqlite3.Error) and not store.is_damaged(error)):
        return translate(error, path)
    try:
        header, size_b = read_header(path)
    except RecordingError as wrong:
        return wrong
    if header.application != store.APPLICATION_ID:
        return _foreign(path)
    return damaged(path, "truncated" if header.pages * header.page_b > size_b else "damaged")


def damaged(path: Path, how: str) -> RecordingError:
    """The error for a recording whose structure is broken: `how` is "damaged", "truncated", ..."""
    return RecordingError(
        f"{path} is {how}; run: opusmon salvage {path} -o {path.with_suffix('.salvaged.opusmon')}"
    )


def translate(error: Exception, path: Path) -> RecordingError:
    """What an SQLite error while reading means to the user."""
    if store.is_busy(error):
        return RecordingError(
            f"{path} is locked: another opusmon records it in exclusive mode; read it when that has stopped"
        )
    if store.is_damaged(error) or not isinstance(error, sqlite3.OperationalError):
        return damaged(path, "damaged")
    if str(error).startswith("no such "):
        return RecordingError(f"{path} was replaced or cut off while it was open: open it again")
    return RecordingError(f"cannot read {path}: {store.describe(error)}")


def _has_wal(path: Path) -> bool:
    """Whether there is a WAL with content."""
    try:
        return store.wal_path(path).stat().st_size > 0
    except OSError:
        return False


def _is_lone_copy(path: Path) -> bool:
    """Whether a file in WAL mode has no WAL beside it, so that no recorder can have it open.

    The file itself is looked into only then: closing it would drop a recorder's locks on it.
    """
    if store.wal_path(path).exists() and (_has_wal(path) or store.beside(path, "-shm").exists()):
        return False
    with path.open("rb") as file:
        head = file.read(HEADER_B)
    return head.startswith(MAGIC) and head[READ_VERSION_AT : READ_VERSION_AT + 1] == WAL_VERSION


class _Connection(sqlite3.Connection):
    """Takes away, when it is closed, the shared memory that SQLite made for it beside a copy.

    Attributes:
        made: that file, None where it was there before.
    """

    made: Path | None = None

    def close(self) -> None:
        super().close()
        if self.made is not None:
            _remove_unlocked(self.made)


def clear_away(path: Path) -> None:
    """Remove what a recorder had to leave beside its file, because somebody read it when it was closed: an empty log."""
    wal = store.wal_path(path)
    with suppress(OSError):
        if not wal.stat().st_size and _remove_unlocked(store.beside(path, "-shm")):
            wal.unlink()


def _remove_unlocked(shm: Path) -> bool:
    """Remove shared memory that no process uses: each that does holds a lock on it. Whether it is gone."""
    with suppress(OSError):
        inode = f":{shm.stat().st_ino} "
        if inode not in Path("/proc/locks").read_text(encoding="utf-8"):
            shm.unlink()
    return not shm.exists()


def _open(path: Path, warnings: list[str]) -> sqlite3.Connection:
    """Connect, and leave nothing beside the file that was not there.

    A copy of a file in WAL mode, and one in a folder where SQLite cannot make its shared memory, is read as it stands.
    """
    with suppress(OSError):
        if _is_lone_copy(path):
            connection = _try_open(path, "mode=ro&immutable=1")
            if not _has_wal(path):  # else a recorder began just now
                return connection
            connection.close()
    try:
        return _try_open(path, "mode=ro")
    except sqlite3.OperationalError as error:
        if (getattr(error, "sqlite_errorcode", 0) & 0xFF) not in (
            sqlite3.SQLITE_CANTOPEN,
            sqlite3.SQLITE_READONLY,
        ):
            raise
    if _has_wal(path):
        warnings.append(
            f"{path.name}-wal cannot be used in this folder, the newest rows are missing: copy both to a writable one"
        )
    return _try_open(path, "mode=ro&immutable=1")


def _try_open(path: Path, options: str) -> sqlite3.Connection:
    """Connect and read the schema once, with everything in the file that could act switched off."""
    address = f"file:{quote(os.fsencode(path.absolute()))}?{options}"
    shm = store.beside(path, "-shm")
    alone = not shm.exists()
    connection = sqlite3.connect(
        address,
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=BUSY_S,
        factory=_Connection,
    )
    try:
        connection.text_factory = _text
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_B)
        for pragma in ("trusted_schema=OFF", "query_only=ON", "cell_size_check=ON", "mmap_size=0"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute(f"PRAGMA cache_size=-{store.CACHE_KIB}")
        try:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        finally:  # now, not later: what a recorder makes then is the recorder's
            connection.made = shm if alone and shm.exists() else None
    except BaseException:
        connection.close()
        raise
    return connection


def _pages_b(connection: sqlite3.Connection) -> int:
    """Size the file should have; SQLite itself does not mind when the last page is cut."""
    pages = int(connection.execute("PRAGMA page_count").fetchone()[0])
    return pages * int(connection.execute("PRAGMA page_size").fetchone()[0])


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _check(connection: sqlite3.Connection, path: Path, warnings: list[str]) -> None:
    """Make sure that it is a recording, and that what will be read are plain tables, not views or virtual ones.

    Raises:
        RecordingError: it is something else.
        sqlite3.Error: it is damaged.
    """
    if connection.execute("PRAGMA application_id").fetchone()[0] != store.APPLICATION_ID:
        raise _foreign(path)
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > store.VERSION:
        warnings.append(
            f"{path.name} was written by a newer opusmon (format {version}): some of it may not be shown"
        )
    if not _has_wal(path) and _pages_b(connection) > _size_b(path):
        raise damaged(path, "truncated")
    rows = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchmany(1000)
    plain = {
        name
        for kind, name, sql in rows
        if kind == "table" and str(sql).lstrip().upper().startswith("CREATE TABLE")
    }
    missing = sorted(store.TABLES.keys() - plain)
    if missing:
        raise RecordingError(f"{path} is not an opusmon recording: it has no table {missing[0]}")
    for table, columns in store.TABLES.items():
        _check_columns(connection, path, table, columns)


def _check_columns(connection: sqlite3.Connection, path: Path, table: str, columns: Sequence[str]) -> None:
    """Make sure that the columns are stored, none computed, and that a numbered table's number is its row's own.

    Raises:
        RecordingError: it is something else.
        sqlite3.Error: it is damaged.
    """
    found = {
        str(name).lower(): (str(kind).upper(), key, hidden)
        for _, name, kind, _, _, key, hidden in connection.execute(f"PRAGMA table_xinfo({table})")
    }
    numbers = sum(key > 0 for _, key, _ in found.values())
    for place, column in enumerate(columns):
        kind, key, hidden = found.get(column, ("", 0, 1))
        own = place > 0 or table not in store.NUMBERED or (kind, key, numbers) == ("INTEGER", 1, 1)
        if hidden or not own or (table == "string" and "rowid" in found):
            raise damaged(path, f"damaged (its table {table} has no plain column {column})")
