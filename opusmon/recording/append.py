"""Marks added to a finished recording."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from opusmon.recording import store
from opusmon.recording.reader import Recording
from opusmon.recording.store import Mark, RecordingError


def add_marks(path: Path, marks: Sequence[Mark]) -> None:
    """Add marks to a recording that was closed; all of them or, on an error, none.

    Raises:
        RecordingError: it cannot be read or written, is still being recorded, or is damaged.
    """
    with Recording.open(path) as recording:
        need_finished(recording)
    try:
        # mode=rw: a file that has gone meanwhile is not made anew.
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None)
        try:
            _insert(connection, marks)
        finally:
            connection.close()
    except (sqlite3.Error, OSError) as error:
        raise RecordingError(f"cannot write {path}: {store.describe(error)}") from error


def need_finished(recording: Recording) -> None:
    """Fail for a recording that a recorder may still write: it numbers the rows by itself.

    Raises:
        RecordingError: it was not closed.
    """
    if not recording.finished:
        raise RecordingError(
            f"{recording.path} is still being recorded, or its recorder died: "
            "`opusmon salvage` makes a finished copy"
        )


def _insert(connection: sqlite3.Connection, marks: Sequence[Mark]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM mark").fetchone()
    connection.executemany(
        "INSERT INTO mark VALUES(?,?,?,?,?)",
        [
            (
                number,
                store.clamp(mark.t0),
                store.clamp(mark.t1),
                *map(store.clean_text, (mark.kind, mark.text)),
            )
            for number, mark in enumerate(marks, last + 1)
        ],
    )
    connection.execute("COMMIT")
