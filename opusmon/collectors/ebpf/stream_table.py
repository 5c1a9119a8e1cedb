"""The kernel's table of streams, read once per interval."""

from __future__ import annotations

import platform
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from opusmon.channels import STREAM
from opusmon.collectors.ebpf import maps
from opusmon.collectors.ebpf.names import Names
from opusmon.collectors.ebpf.probes import Backend
from opusmon.collectors.ebpf.stream_rows import BIN_KEY, BIN_VALUE, KEY, VALUE, Coverage, Differ
from opusmon.collectors.ebpf.symbols import STACK_ARGUMENT_9
from opusmon.schema import Batch, Rows

MAX_STREAMS, MAX_CALLS, MAX_EVENTS = 8192, 8192, 32_768
MAX_BINS = 8192
"""Bins of call times in use, of all processes: one process uses some 100 of its 450."""
IDLE_NS = 300_000_000_000
"""A stream of a living process that nobody touched for so long is dropped from the table."""

_SLOTS = ("launch", "poll", "always", "timing", "lost_stream", "lost_call", "lost_read")
POLL_SLOT = _SLOTS.index("poll")
"""Where hits of poll probes are counted in the map `counts`."""
_NEVER = 2**64 - 1


def cflags(machine: str | None = None) -> list[str]:
    """Compiler flags of streams.bpf.c on that machine."""
    return [
        f"-DSTREAM_ON_STACK={STACK_ARGUMENT_9[machine or platform.machine()]}",
        f"-DMAX_STREAMS={MAX_STREAMS}",
        f"-DMAX_CALLS={MAX_CALLS}",
        f"-DMAX_EVENTS={MAX_EVENTS}",
        f"-DMAX_BINS={MAX_BINS}",
    ]


@dataclass(frozen=True, slots=True)
class Hits:
    """Counts since the reading before, or since the start.

    Attributes:
        launch: hits of launch probes.
        poll: hits of poll probes, entries and returns.
        always: hits of the other probes, entries and returns.
        timing: hits of the probes that time launch calls, entries and returns.
        lost_stream: calls that found the table full.
        lost_call: calls whose begin, or event whose stream, could not be kept.
        lost_read: calls whose arguments could not be read.
    """

    launch: int = 0
    poll: int = 0
    always: int = 0
    timing: int = 0
    lost_stream: int = 0
    lost_call: int = 0
    lost_read: int = 0

    @property
    def total(self) -> int:
        """Hits of all probes."""
        return self.launch + self.poll + self.always + self.timing

    @property
    def lost(self) -> int:
        """Calls that are missing from the rows."""
        return self.lost_stream + self.lost_call + self.lost_read


class StreamTable:
    """Reads the table and keeps it small.

    Args:
        backend: holds the maps.
        names: gives names.
        only_pids: processes to report, all of them when empty.
    """

    def __init__(self, backend: Backend, names: Names, only_pids: frozenset[int]) -> None:
        self._table = maps.HashMap(backend.map_fd("streams"), KEY, VALUE, MAX_STREAMS)
        self._control = backend.map_fd("control")
        self._counts = backend.map_fd("counts")
        self._names = names
        self._only = np.array(sorted(only_pids), np.int64)
        self._differ = Differ()
        self._before = Hits()
        self._epoch = 1
        self._launches_since = _NEVER
        self._burst = self._bursts = 0
        self._binned = False
        self._bin_fd = backend.map_fd("call_bins")
        self._write()

    def count_launches(self, since: int | None) -> None:
        """Tell the kernel since when (monotonic ns) all launches are seen; None when they are not."""
        self._launches_since = _NEVER if since is None else since
        self._write()

    def time_calls(self, on: bool, *, binned: bool = False) -> None:
        """Begin a burst in which launch calls are timed, or end it; their probes are to be on throughout.

        Args:
            on: begin one.
            binned: also sort the times into bins, for `call_bins`.
        """
        self._bursts += on
        self._burst, self._binned = (self._bursts, binned) if on else (0, False)
        self._write()

    def call_bins(self) -> tuple[maps.Table, maps.Table]:
        """Process and bin (dtype `BIN_KEY`), and how many launch calls it has had in it so far, shape (n,) each."""
        keys, counts = maps.HashMap(self._bin_fd, BIN_KEY, BIN_VALUE, MAX_BINS).read()
        keep = np.isin(keys["pid"], self._only) | (not len(self._only))
        return keys[keep], counts[keep]

    def read(self, t: int, dt_ns: int, cover: Coverage) -> Batch | None:
        """Rows over the interval that ends at `t`; None when no stream is known."""
        ended, self._epoch = self._epoch, self._epoch + 1
        self._write()
        keys, values = self._table.read()
        rows, changed = self._differ.rows(keys, values, t, dt_ns, ended, cover)
        keep = self._prune(keys, values, changed, t)
        if len(self._only):
            keep &= np.isin(rows["pid"], self._only)
        rows, values = rows[keep], values[keep]
        if not len(rows):
            return None
        self._name(rows, values, t)
        return Batch(STREAM, rows)

    def hits(self) -> Hits:
        """Counts since the last call."""
        now = Hits(*(maps.read_percpu(self._counts, slot) for slot in range(len(_SLOTS))))
        before, self._before = self._before, now
        return Hits(*(getattr(now, slot) - getattr(before, slot) for slot in _SLOTS))

    def timing_hits(self) -> int:
        """Hits of the probes that time launch calls, since the start."""
        return maps.read_percpu(self._counts, _SLOTS.index("timing"))

    def _name(self, rows: Rows, values: np.ndarray[tuple[int], np.dtype[Any]], t: int) -> None:
        processes = self._names.processes(rows["pid"].tolist(), t)
        threads = {comm: self._names.thread(comm) for comm in set(values["comm"].tolist())}
        rows["thread"] = [threads[comm] for comm in values["comm"].tolist()]
        names = np.array([processes[pid] for pid in rows["pid"].tolist()], np.uint32)
        # A process that has ended cannot be asked; its first thread carries its name.
        rows["process"] = np.where((names == 0) & (rows["tid"] == rows["pid"]), rows["thread"], names)

    def _prune(self, keys: maps.Table, values: maps.Table, changed: maps.Table, t: int) -> Any:
        """Delete entries of dead processes, and idle ones; returns which rows are worth showing."""
        dead = {int(pid) for pid in np.unique(keys["pid"]) if not self._names.alive(int(pid))}
        idle = np.maximum(t - values["seen"].astype(np.int64), 0) > IDLE_NS
        gone = ~changed & (idle | np.isin(keys["pid"], sorted(dead)))
        for key in keys[gone]:
            self._table.delete(key)
            self._differ.forget(key)
        return ~gone

    def _write(self) -> None:
        words = (self._epoch, self._launches_since, self._burst, self._binned)
        maps.write(self._control, 0, struct.pack("=4Q", *words))
