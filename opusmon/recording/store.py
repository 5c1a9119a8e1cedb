"""The `.opusmon` file itself: its tables, how it is created, and what may go wrong, in one line.

One SQLite file, all numbers in chunks little-endian. While it is written it is in WAL mode (a reader may
follow); closed cleanly it is a single file in rollback-journal mode.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from opusmon.paths import filesystem_at, is_network, mounts_of
from opusmon.schema import MAX_TEXT_CHARS
from opusmon.text import reason_of

APPLICATION_ID = 0x6F707573
"""`PRAGMA application_id`: the bytes "opus" at offset 68 of the file."""

VERSION = 1
"""`PRAGMA user_version` of files written by this version."""

PAGE_B = 4096
CACHE_KIB = 1024
WAL_PAGES = 1000
"""Pages in the WAL that start a checkpoint: 4 MB."""

I64_MAX = 2**63 - 1

SCHEMA = """
CREATE TABLE session(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE clock(monotonic INTEGER PRIMARY KEY, realtime INTEGER NOT NULL, step INTEGER NOT NULL);
CREATE TABLE channel(id INTEGER PRIMARY KEY, name TEXT NOT NULL, schema_json TEXT NOT NULL);
CREATE TABLE span(channel INTEGER PRIMARY KEY, max_ns INTEGER NOT NULL);
CREATE TABLE string(id INTEGER NOT NULL, text TEXT NOT NULL);
CREATE TABLE chunk(id INTEGER PRIMARY KEY, channel INTEGER NOT NULL, origin TEXT NOT NULL, t0 INTEGER NOT NULL,
    t1 INTEGER NOT NULL, n INTEGER NOT NULL, codec INTEGER NOT NULL, data BLOB NOT NULL);
CREATE INDEX chunk_t0 ON chunk(channel, t0);
CREATE TABLE rollup(id INTEGER PRIMARY KEY, channel INTEGER NOT NULL, level INTEGER NOT NULL, t0 INTEGER NOT NULL,
    t1 INTEGER NOT NULL, n INTEGER NOT NULL, codec INTEGER NOT NULL, data BLOB NOT NULL);
CREATE INDEX rollup_t1 ON rollup(channel, level, t1);
CREATE TABLE mark(id INTEGER PRIMARY KEY, t0 INTEGER NOT NULL, t1 INTEGER NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL);
"""
"""`span` holds the longest chunk of each channel. It is apart from `channel` because it grows: a description that is
never written again stays on the first pages, where a copy that was cut off still has it."""

_CHUNK_COLUMNS = ("id", "channel", "t0", "t1", "n", "codec", "data")

TABLES: Mapping[str, tuple[str, ...]] = {
    "session": ("key", "value"),
    "clock": ("monotonic", "realtime", "step"),
    "channel": ("id", "name", "schema_json"),
    "span": ("channel", "max_ns"),
    "string": ("id", "text"),
    "chunk": (*_CHUNK_COLUMNS, "origin"),
    "rollup": (*_CHUNK_COLUMNS, "level"),
    "mark": ("id", "t0", "t1", "kind", "text"),
}
"""The tables and the columns of each that a reader asks for."""

NUMBERED = frozenset({"clock", "channel", "span", "chunk", "rollup", "mark"})
"""Tables whose first column is the row's own number, so that nothing but an integer can be in it."""


class RecordingError(Exception):
    """What is wrong with a recording and how to go on, in one line."""


class Mark(NamedTuple):
    """A stretch of time with something to say about it.

    Attributes:
        t0: where it begins, monotonic ns.
        t1: where it ends; equal to `t0` for an instant.
        kind: `drop` (rows lost to a full queue), `gap` (not recorded), `bookmark`, a finding, ...
        text: one line.
    """

    t0: int
    t1: int
    kind: str
    text: str


def create(path: Path) -> tuple[sqlite3.Connection, str]:
    """Make a new recording, mode 0600, in a folder that is made with 0700 when it does not exist.

    Under sudo both belong to the user who called it, so that the screen can follow without privileges.

    Returns:
        A connection in WAL mode that any thread may use, and a warning, "" when there is none.

    Raises:
        RecordingError: there is such a file already, or it cannot be written.
    """
    try:
        _make_folder(path.parent)
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise RecordingError(f"{path} exists already: choose another name or move it away") from error
    except OSError as error:
        raise RecordingError(f"cannot write {path}: {describe(error)}") from error
    try:
        os.fchmod(file, 0o600)
        _give_to_sudo_user(file)
        made = os.fstat(file)
    finally:
        # Before SQLite opens it: closing any descriptor of a file drops all POSIX locks the process has on it.
        os.close(file)
    try:
        warning = network_warning(path)
        return _set_up(path, made, exclusive=bool(warning)), warning
    except (sqlite3.Error, OSError) as error:
        path.unlink(missing_ok=True)
        raise RecordingError(f"cannot write {path}: {describe(error)}") from error


def _set_up(path: Path, made: os.stat_result, *, exclusive: bool) -> sqlite3.Connection:
    """Create the tables, then switch to WAL: page 1 lies in the file before anyone can open it."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=2.0)
    try:
        # Somebody else's folder may have had the name swapped for a link since the file was made.
        if not os.path.samestat(made, path.lstat()):
            raise OSError("the file was replaced while it was created")
        if exclusive:
            connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute(f"PRAGMA page_size={PAGE_B}")
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        connection.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
        # Some distributions overwrite deleted pages with zeros; retention would write as much as the recording.
        connection.execute("PRAGMA secure_delete=OFF").fetchall()
        connection.executescript(
            f"BEGIN; PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={VERSION}; {SCHEMA} COMMIT;"
        )
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint={WAL_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit={WAL_PAGES * PAGE_B}")
        # Makes the WAL: a file in WAL mode without one is taken for a copy that nobody writes.
        connection.execute("SELECT count(*) FROM session").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def finish(connection: sqlite3.Connection) -> None:
    """Fold the WAL into the file and leave rollback-journal mode, so that one file is left; closes.

    Another process that has the file open keeps it in WAL mode; its content is complete all the same.
    """
    try:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        try:
            connection.execute("PRAGMA journal_mode=DELETE").fetchall()
        except sqlite3.OperationalError as error:
            if not is_busy(error):
                raise
    finally:
        connection.close()


def wal_path(path: Path) -> Path:
    """The write-ahead log beside a recording."""
    return beside(path, "-wal")


def beside(path: Path, suffix: str) -> Path:
    """One of the files that SQLite keeps beside a recording: beside the file itself where `path` is a link to it."""
    real = path.resolve()
    return real.with_name(real.name + suffix)


def size_b(path: Path) -> int:
    """Bytes on disk of a recording with its WAL; 0 when it is gone."""
    total = 0
    for part in (path, wal_path(path)):
        try:
            total += part.stat().st_size
        except OSError:
            continue
    return total


def describe(error: BaseException) -> str:
    """An operating system or SQLite error in a few words."""
    return "disk full" if is_full(error) else reason_of(error)


def is_full(error: BaseException) -> bool:
    """Whether the disk (or a quota, or a file size limit) has no room."""
    return isinstance(error, sqlite3.Error) and _code(error) == sqlite3.SQLITE_FULL


def is_busy(error: BaseException) -> bool:
    """Whether another connection holds a lock."""
    return isinstance(error, sqlite3.Error) and _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def is_damaged(error: BaseException) -> bool:
    """Whether SQLite found the file's structure broken or cut off."""
    codes = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FORMAT)
    return isinstance(error, sqlite3.Error) and _code(error) in codes


def _code(error: sqlite3.Error) -> int:
    """Primary result code of an SQLite error, 0 for those the Python module raises itself."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def clean_text(text: str) -> str:
    """Text as a recording keeps it: cut to `MAX_TEXT_CHARS`, and see `storable`.

    Apply it to what is also shown before it is recorded, so that both are equal.
    """
    return storable(text[:MAX_TEXT_CHARS])


def storable(text: str) -> str:
    """Text that SQLite gives back whole: lone surrogates, as in undecodable process names, and NUL become "?"."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", "?")


def clamp(value: int) -> int:
    """An integer that SQLite can hold."""
    return max(-I64_MAX - 1, min(int(value), I64_MAX))


def network_warning(path: Path) -> str:
    """What to tell the user when `path` lies on a network filesystem, "" otherwise."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    kind = filesystem_type(path.absolute().parent.resolve(), mounts)
    if not is_network(kind):
        return ""
    return f"{path.parent} is on a network filesystem ({kind}): recorded in exclusive mode, cannot be read until it is closed"


def filesystem_type(folder: Path, mountinfo: str) -> str:
    """Type of the filesystem that holds an absolute folder, from the text of /proc/self/mountinfo (proc(5))."""
    return filesystem_at(folder, mounts_of(mountinfo))[1]


def _make_folder(folder: Path) -> None:
    """Make a folder and what is missing above it, mode 0700."""
    if folder.is_dir():
        return
    if folder.exists():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    _make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _give_to_sudo_user(file)
    finally:
        os.close(file)


def _give_to_sudo_user(file: int) -> None:
    """Under sudo, make the calling user the owner; SQLite gives -wal and -shm the same owner."""
    user, group = os.environ.get("SUDO_UID", ""), os.environ.get("SUDO_GID", "")
    if os.geteuid() == 0 and user.isdecimal():
        os.fchown(file, int(user), int(group) if group.isdecimal() else -1)


def check_is_file(path: Path) -> int:
    """Size in bytes of a regular file. It is not opened: closing it would drop a recorder's locks on it.

    Raises:
        RecordingError: it is missing, is no regular file, or may not be read.
    """
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise RecordingError(f"{path} does not exist: check the name") from error
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {describe(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a file"
        raise RecordingError(f"{path} is {kind}: name a recording")
    if not os.access(path, os.R_OK, effective_ids=True):
        raise RecordingError(f"cannot read {path}: permission denied")
    return status.st_size
