"""Reading a recording, also while another process or thread writes it."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from opusmon import stats
from opusmon.clock import Anchors
from opusmon.recording import access, store
from opusmon.recording.catalog import Catalog, read_marks
from opusmon.recording.decode import join
from opusmon.recording.query import ChunkReader, cut
from opusmon.recording.store import Mark, RecordingError
from opusmon.recording.writer import CLOSED
from opusmon.schema import Batch, Channel, Rows, StringTable, sort_rows

PAGE_CHUNKS = 256
"""Chunks read per transaction by `batches` and `verify`: a long export must not hold up the writer's checkpoints."""

THROUGH_KIB = 4096
"""Pages kept for one who goes through a file: the channels of the same minutes lie on the same pages."""

PAGE_B = 64 * 1024 * 1024
"""Most bytes of rows in those chunks, unless a single one has more."""


class Recording:
    """A recording opened read-only. Time ranges of rows are half-open everywhere: `t0 < t <= t1`.

    Every method may be called from any thread. Reading never keeps the writer waiting: each call is one short
    transaction. A chunk that cannot be decoded is skipped and counted.

    Use `Recording.open`.

    Attributes:
        path: the file.
        warnings: one line for each thing the user should know (newer version, unusable parts).
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, warnings: list[str]) -> None:
        self.path = path
        self._connection = connection
        self._reader = ChunkReader(connection)
        self._catalog = Catalog(warnings=warnings)
        self._lock = threading.RLock()
        self._seen = -1
        self.refresh()
        self._was_written = not self.finished

    @classmethod
    def open(cls, path: Path, *, through: bool = False) -> Self:
        """Open a file.

        Args:
            path: the file.
            through: it will be gone through once: ranges of minutes are read whole and not kept, which is twice as quick.

        Raises:
            RecordingError: it is missing, not a recording, truncated, damaged or may not be read; in one line.
        """
        connection, warnings = access.connect(path)
        try:
            if through:
                connection.execute(f"PRAGMA cache_size=-{THROUGH_KIB}")
            recording = cls(path, connection, warnings)
            recording._reader.through = through
            return recording
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Close the file. May be called again."""
        # Nothing was written, so there is nothing a failure could cost.
        with self._lock, suppress(*access.FAILURES):
            self._connection.close()
            if self._was_written and self.finished:
                access.clear_away(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def warnings(self) -> list[str]:
        """One line for each thing the user should know."""
        return self._catalog.warnings

    @property
    def channels(self) -> dict[str, Channel]:
        """The channels by name, as the file describes them."""
        return self._catalog.channels

    @property
    def strings(self) -> StringTable:
        """The texts that rows refer to."""
        return self._catalog.strings

    @property
    def anchors(self) -> Anchors:
        """Both clocks, for wall times."""
        return self._catalog.anchors

    @property
    def session(self) -> dict[str, str]:
        """Facts about the session: host, argv, version, ..."""
        return self._catalog.session

    @property
    def t0(self) -> int:
        """Time of the first row, monotonic ns; 0 without rows."""
        return self._catalog.t0

    @property
    def t1(self) -> int:
        """Time of the last row, monotonic ns; 0 without rows."""
        return self._catalog.t1

    @property
    def size_b(self) -> int:
        """Bytes on disk, WAL included."""
        return store.size_b(self.path)

    @property
    def damaged_chunks(self) -> int:
        """Chunks met so far that could not be decoded; `verify` meets all."""
        return len(self._reader.damaged)

    @property
    def finished(self) -> bool:
        """Whether the recorder closed it cleanly (as of the last `refresh`)."""
        return CLOSED in self._catalog.session

    def refresh(self) -> bool:
        """Pick up channels, texts, anchors and times written since; whether anything is new.

        Raises:
            RecordingError: the file cannot be read.
        """
        with self._reading():
            version = int(self._connection.execute("PRAGMA data_version").fetchone()[0])
            if version == self._seen:
                return False
            changed = self._catalog.load(self._connection)
            self._seen = version
            return changed

    def counts(self) -> dict[str, int]:
        """Rows by channel as the file's chunks state them; none is decoded, so damaged ones count as well.

        Raises:
            RecordingError: the file is damaged.
        """
        with self._reading():
            found = self._reader.counts()
        return {name: found.get(number, 0) for name, number in self._catalog.ids.items()}

    def verify(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Decode every chunk, so that `damaged_chunks` is that of the whole file; returns it.

        Args:
            progress: called with the chunks done and those in the file.

        Raises:
            RecordingError: the file is damaged beyond single chunks.
        """
        itemsizes = {self._catalog.ids[name]: known.dtype.itemsize for name, known in self.channels.items()}
        with self._reading():
            total = int(self._connection.execute("SELECT count(*) FROM chunk").fetchone()[0])
        done, count, last = 0, 1, -store.I64_MAX - 1
        while count:
            with self._reading():
                count, last = self._reader.verify(last, itemsizes, PAGE_CHUNKS)
            done += count
            if progress is not None:
                progress(min(done, total), total)
        return self.damaged_chunks

    def query(self, channel: str, t0: int, t1: int) -> Rows:
        """Rows with `t0 < t <= t1` (monotonic ns) by time, rows of equal time in arrival order.

        Raises:
            RecordingError: no such channel, a damaged file, or more rows than memory should hold.
        """
        known, number = self._find(channel)
        with self._reading():
            return self._reader.rows(number, known, t0, t1)

    def binned(self, channel: str, fields: Sequence[str], t0: int, t1: int, step_ns: int) -> Rows:
        """Min, max, mean and count of fields per bin of `step_ns` and key over rows with `t0 < t <= t1`.

        The answer is that of `stats.rollup(query(channel, t0, t1), ...)` up to rounding, but for
        multiples of 10 s it is read from stored rollups. Bins at either end hold only the rows inside the range.

        Raises:
            RecordingError: no such channel or field, a field that is text or part of the key, or a damaged file.
        """
        known, number = self._find(channel)
        wrong = [name for name in fields if name not in known.values]
        if wrong or step_ns <= 0:
            what = f"no numeric field {wrong[0]!r}" if wrong else f"no bins of {step_ns} ns"
            raise RecordingError(f"channel {channel} has {what}; it has {', '.join(known.values)}")
        with self._reading():
            return self._reader.binned(number, known, fields, t0, t1, step_ns)

    def extremes(self, channel: str, fields: Sequence[str], t0: int, t1: int) -> Rows | None:
        """Stored summaries of fields that cover all rows with `t0 < t <= t1`, and rows up to 10 minutes around them.

        Columns are those of `binned`, and much cheaper to read than the rows: what lies within `{f}_min` and `{f}_max`
        is certain. None where the file has no such summaries of the whole range.

        Raises:
            RecordingError: no such channel, or a damaged file.
        """
        known, number = self._find(channel)
        if not set(fields) <= set(known.values):
            return None
        with self._reading():
            return self._reader.extremes(number, known, fields, t0, t1)

    def latest(self, channel: str, t: int, lookback_ns: int) -> Rows:
        """The newest row of every key with `t - lookback_ns < t' <= t`, sorted by key.

        Raises:
            RecordingError: as `query`.
        """
        return stats.latest(self.query(channel, t - lookback_ns, t), self._find(channel)[0].key)

    def step(self, channel: str, t: int, direction: int) -> int | None:
        """Time of the next (+1) or previous (-1) sample strictly after or before `t`; None when there is none.

        Raises:
            RecordingError: as `query`.
        """
        known, number = self._find(channel)
        with self._reading():
            find = self._reader.step_forward if direction > 0 else self._reader.step_back
            return find(number, known, t)

    def marks(self, t0: int | None = None, t1: int | None = None) -> list[Mark]:
        """Marks that touch `t0 <= t <= t1`, both ends included, by start; None leaves a side open.

        Raises:
            RecordingError: the file is damaged.
        """
        with self._reading():
            return read_marks(self._connection, t0, t1)

    def batches(self, t0: int, t1: int, channels: Sequence[str] | None = None) -> Iterator[Batch]:
        """Rows with `t0 < t <= t1` as they were written, chunk by chunk, in the order they arrived.

        Args:
            t0: monotonic ns, exclusive.
            t1: monotonic ns, inclusive.
            channels: names to give; None for all.

        Raises:
            RecordingError: no such channel, or a damaged file.
        """
        found = [self._find(name) for name in (self.channels if channels is None else channels)]
        wanted = {number: channel for channel, number in found}
        ids, owners, sizes_b = self._arrivals(wanted, t0, t1)
        for page in _pages(sizes_b):
            for batch in self._page(ids[page].tolist(), owners[page].tolist(), wanted):
                rows = cut(batch.rows, t0, t1)
                if len(rows):
                    yield Batch(batch.channel, rows, batch.origin)

    def _arrivals(
        self, wanted: Mapping[int, Channel], t0: int, t1: int
    ) -> tuple[stats.Ints, stats.Ints, stats.Ints]:
        """Chunks that may have rows in the range, in arrival order, the channel of each, and its size in bytes."""
        lists = [np.empty((3, 0), np.int64)]
        for number, channel in wanted.items():
            with self._reading():
                sizes = self._reader.sizes_b(number, channel, t0, t1)
            lists.append(np.array([list(sizes), [number] * len(sizes), list(sizes.values())], np.int64))
        ids, owners, sizes_b = np.concatenate(lists, axis=1)
        order = np.argsort(ids, kind="stable")
        return ids[order], owners[order], sizes_b[order]

    def _page(self, ids: list[int], owners: list[int], wanted: Mapping[int, Channel]) -> list[Batch]:
        """Chunks as batches, in the order given, without the damaged ones."""
        pairs = list(zip(ids, owners, strict=True))
        with self._reading():
            chunks: dict[tuple[int, int], bytes] = {}
            for number, channel in wanted.items():
                mine = [chunk for chunk, owner in pairs if owner == number]
                found = self._reader.chunks(number, channel, mine)
                chunks |= {(chunk, number): rows for chunk, rows in found.items()}
            origins = self._reader.origins(ids)
        return [
            Batch(
                wanted[owner],
                sort_rows(join([chunks[chunk, owner]], wanted[owner].dtype)),
                origins.get(chunk, ""),
            )
            for chunk, owner in pairs
            if (chunk, owner) in chunks
        ]

    def _find(self, channel: str) -> tuple[Channel, int]:
        """A channel and its number in the file.

        Raises:
            RecordingError: there is none of this name.
        """
        known = self.channels.get(channel)
        if known is None:
            names = ", ".join(sorted(self.channels)) or "none yet"
            raise RecordingError(f"{self.path.name} has no channel {channel!r}; it has {names}")
        return known, self._catalog.ids[channel]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """One read transaction, so that rollups and rows belong together.

        Raises:
            RecordingError: what an SQLite error inside it means.
        """
        with self._lock:
            try:
                self._connection.execute("BEGIN")
                try:
                    yield
                finally:
                    self._connection.rollback()
            except sqlite3.ProgrammingError as error:
                raise RecordingError(f"{self.path.name} is closed") from error
            except access.FAILURES as error:
                raise access.translate(error, self.path) from error


def _pages(sizes_b: stats.Ints) -> Iterator[slice]:
    """Stretches of chunks to be read in one transaction each."""
    start = total_b = 0
    for at, size_b in enumerate(sizes_b.tolist()):
        if at > start and (at - start == PAGE_CHUNKS or total_b + size_b > PAGE_B):
            yield slice(start, at)
            start, total_b = at, 0
        total_b += size_b
    if start < len(sizes_b):
        yield slice(start, len(sizes_b))
