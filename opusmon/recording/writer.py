"""The recorder: a sink with a writer thread behind a bounded queue."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from opusmon.clock import NS, Anchor, Clock
from opusmon.recording import store
from opusmon.recording.pending import PendingBatches
from opusmon.recording.retention import Retention
from opusmon.recording.stage import MAX_CHUNK_ROWS, Stage, Transaction
from opusmon.recording.store import Mark, RecordingError
from opusmon.schema import Batch, StringTable

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 30.0
CHECKPOINT_EVERY_S = 60.0
MIN_RETAIN_NS = 60 * NS
MIN_RETAIN_B = 1_000_000
"""Smallest limits: below them a recording would lose its rows faster than anybody could look at them."""

MAX_MARKS = 10_000
"""Marks and anchors that wait for a stuck disk; more are dropped."""

CLOSED = "closed"
"""Session key that a clean close sets, to the wall time in ns."""


@dataclass(frozen=True)
class RecorderState:
    """How the recording is going.

    Attributes:
        path: the file.
        recording: rows that are pushed now will be in the file.
        size_b: bytes on disk, WAL included, as of the last flush.
        error: why it is not recording, in one line; "" while it is.
        dropped_rows: rows lost so far because the queue was full.
        started_t: when it was started, monotonic ns.
    """

    path: Path
    recording: bool
    size_b: int
    error: str
    dropped_rows: int
    started_t: int


class Recorder:
    """A sink that writes a `.opusmon` file. Call `close` to leave a finished single file.

    Args:
        path: file to create; it must not exist.
        strings: table that the text ids in rows refer to.
        clock: the session clock; its first anchor is recorded at once, later ones come through `anchor`.
        session: facts to store with it: host, argv, version, ...
        retain_ns: drop what is older than this, at least `MIN_RETAIN_NS`; None keeps all.
        retain_b: keep the file and its WAL near this many bytes, at least `MIN_RETAIN_B`; None for no limit.
        flush_ns: longest time a row waits before it is committed, which is what a crash may lose.

    Raises:
        RecordingError: the file exists or cannot be written, or a limit is too small.
    """

    def __init__(
        self,
        path: Path,
        *,
        strings: StringTable,
        clock: Clock,
        session: Mapping[str, str] = MappingProxyType({}),
        retain_ns: int | None = None,
        retain_b: int | None = None,
        flush_ns: int = NS,
    ) -> None:
        _check_limits(retain_ns, retain_b)
        self.path = path
        self._clock = clock
        self._flush_s = flush_ns / 1e9
        self._retention = Retention(retain_ns, retain_b)
        self._queue = PendingBatches()
        self._marks: list[Mark] = []
        self._anchors: list[Anchor] = [clock.anchor()]
        self._stage = Stage(strings)
        self._work: Transaction | None = None
        self._wake = threading.Condition()
        self._closing = False
        self._stopped_t: int | None = None
        self._lost_before = 0
        self._retry_s = FIRST_RETRY_S
        self._checkpoint_due_s = time.monotonic() + CHECKPOINT_EVERY_S
        self._connection, self.warning = store.create(path)
        self._inode = path.stat().st_ino
        self._state = RecorderState(path, True, 0, "", 0, clock.now())
        self._begin(session)
        self._thread = threading.Thread(target=self._run, name="opusmon-recorder", daemon=True)
        self._thread.start()

    @property
    def state(self) -> RecorderState:
        """How it is going; cheap enough for every frame."""
        return replace(self._state, dropped_rows=self._queue.dropped_rows)

    def push(self, batch: Batch) -> None:
        """Queue a batch. Returns at once and never raises; what does not fit is counted and marked."""
        if self._closing:
            return
        self._queue.put(batch)
        if self._queue.rows >= MAX_CHUNK_ROWS and self._stopped_t is None:
            self._notify()

    def mark(self, t0: int, t1: int, kind: str, text: str) -> None:
        """Record a mark; `t0` and `t1` in monotonic ns. What becomes of the text is `store.clean_text`."""
        mark = Mark(int(t0), int(t1), store.clean_text(kind), store.clean_text(text))
        with self._wake:
            if len(self._marks) < MAX_MARKS:
                self._marks.append(mark)

    def anchor(self, anchor: Anchor) -> None:
        """Record a reading of both clocks."""
        with self._wake:
            if len(self._anchors) < MAX_MARKS:
                self._anchors.append(anchor)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued and the last rollups, fold the WAL in, leave one file. May be called again.

        Args:
            timeout_s: longest wait for a slow disk; after it `state.error` says that the file is unfinished.
        """
        self._closing = True
        self._notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._set_state(
                False, f"{self.path.name} is unfinished: the disk did not answer within {timeout_s:g} s"
            )

    def _begin(self, session: Mapping[str, str]) -> None:
        """Commit the session keys and the first anchor, so that a reader finds them from the start."""
        try:
            first = self._stage.build((), anchors=self._take_notes()[1])
            first.records["session"] += [
                (store.clean_text(k), store.clean_text(v)) for k, v in session.items()
            ]
            wal_pages = self._retention.wal_pages
            self._connection.execute(f"PRAGMA wal_autocheckpoint={wal_pages}")
            self._connection.execute(f"PRAGMA journal_size_limit={wal_pages * store.PAGE_B}")
            first.apply(self._connection)
        except sqlite3.Error as error:
            self._connection.close()
            self.path.unlink(missing_ok=True)
            raise RecordingError(f"cannot write {self.path}: {store.describe(error)}") from error
        self._set_state(True, "")

    def _run(self) -> None:
        """The writer thread: flush once per interval, sooner when much is queued, until closed."""
        while not self._closing:
            with self._wake:
                self._wake.wait_for(
                    self._is_due, self._retry_s if self._stopped_t is not None else self._flush_s
                )
            self._turn()
        self._finish()

    def _is_due(self) -> bool:
        """Whether to flush before the interval is over."""
        return self._closing or (self._stopped_t is None and self._queue.rows >= MAX_CHUNK_ROWS)

    def _turn(self) -> bool:
        """Flush all that is queued, keep to the limits; whether the disk took it."""
        try:
            self._check_place()
            while self._flush_some():
                pass
            self._resume()
            self._retention.apply(self._connection, self._clock.now())
            self._checkpoint()
        except Exception as error:  # whatever it is: the thread lives on, says so and tries again
            self._stop(error)
            return False
        self._set_state(True, "")
        return True

    def _flush_some(self) -> bool:
        """Commit one transaction, the one that failed before if there is one; whether more is queued."""
        if self._work is None:
            batches = self._queue.take(MAX_CHUNK_ROWS)
            marks, anchors = self._take_notes()
            self._work = self._stage.build(batches, marks, anchors)
            for name, rows, reason in self._work.refused:
                self.mark(batches[0].t0, batches[-1].t1, "drop", f"{rows} {name} rows lost: {reason}")
        if self._work:
            self._work.apply(self._connection)
        self._work = None
        return self._queue.rows > 0

    def _take_notes(self) -> tuple[list[Mark], list[Anchor]]:
        """Marks and anchors since the last call, with a mark for the rows of each channel that were lost."""
        losses = self._queue.take_losses()
        with self._wake:
            marks, self._marks = self._marks, []
            anchors, self._anchors = self._anchors, []
        for name, loss in losses.items():
            marks.append(Mark(loss.t0, loss.t1, "drop", f"{loss.rows} {name} rows lost: queue full"))
        return marks, anchors

    def _check_place(self) -> None:
        """A file that was removed or replaced would take rows that nobody can read.

        Raises:
            RecordingError: it was.
        """
        try:
            if self.path.stat().st_ino == self._inode:
                return
        except OSError:
            pass
        raise RecordingError(f"{self.path.name} was moved or removed: put it back, or start a new recording")

    def _stop(self, error: Exception) -> None:
        """Note why nothing is written, and wait longer from turn to turn."""
        if self._connection.in_transaction:
            self._connection.rollback()
        if self._stopped_t is None:
            self._stopped_t = self._clock.now()
            self._lost_before = self._queue.dropped_rows
            self._retry_s = FIRST_RETRY_S
            wall = time.strftime("%H:%M:%S", time.localtime(self._clock.anchor().wall_ns / 1e9))
            kept = f"{store.size_b(self.path) / 1e6:.1f} MB kept"
            self._set_state(False, f"{store.describe(error)}: recording stopped at {wall}, {kept}")
        else:
            self._retry_s = min(self._retry_s * 2, LAST_RETRY_S)

    def _resume(self) -> None:
        """After an outage, mark it: what was queued meanwhile is in the file, what was lost is counted."""
        if self._stopped_t is None:
            return
        t0, t1 = self._stopped_t, self._clock.now()
        lost = self._queue.dropped_rows - self._lost_before
        self._stopped_t = None
        self.mark(t0, t1, "gap", f"recording stopped for {(t1 - t0) / NS:.0f} s: {lost} rows lost")

    def _checkpoint(self) -> None:
        """Fold the WAL into the file now and then, and when a slow reader has let it grow."""
        wal_b = store.size_b(self.path) - self.path.stat().st_size
        if wal_b > 4 * store.WAL_PAGES * store.PAGE_B:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        elif time.monotonic() >= self._checkpoint_due_s:
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            self._checkpoint_due_s = time.monotonic() + CHECKPOINT_EVERY_S

    def _finish(self) -> None:
        """Write the last of it, unless the disk is full, and close."""
        try:
            if self._turn():
                while self._flush_some():
                    pass
                closed = str(self._clock.anchor().wall_ns)
                self._stage.finish([(CLOSED, closed)]).apply(self._connection)
                store.finish(self._connection)
                self._set_state(False, "")
        except Exception as error:  # as in _turn; what was committed stays readable
            self._stop(error)
        finally:
            self._connection.close()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def _set_state(self, recording: bool, error: str) -> None:
        size_b = store.size_b(self.path)
        self._state = replace(self._state, recording=recording, size_b=size_b, error=error)


def _check_limits(retain_ns: int | None, retain_b: int | None) -> None:
    """Refuse limits that would keep next to nothing.

    Raises:
        RecordingError: one is too small.
    """
    if retain_ns is not None and retain_ns < MIN_RETAIN_NS:
        raise RecordingError(
            f"rows cannot be kept for {retain_ns / NS:g} s only: ask for {MIN_RETAIN_NS // NS} s or more"
        )
    if retain_b is not None and retain_b < MIN_RETAIN_B:
        raise RecordingError(
            f"a recording cannot be kept to {retain_b} bytes: ask for {MIN_RETAIN_B / 1e6:g} MB or more"
        )
