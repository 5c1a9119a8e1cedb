"""Names of processes and threads as text ids."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from opusmon.schema import StringTable

REFRESH_NS = 5_000_000_000
"""A process may rename itself: names are read again this often."""


class Names:
    """Looks names up once per process and 5 s.

    Args:
        strings: where they are interned.
        proc: the /proc folder.
    """

    def __init__(self, strings: StringTable, proc: Path = Path("/proc")) -> None:
        self._strings = strings
        self._proc = proc
        self._known: dict[int, int] = {}
        self._read_at = 0

    def processes(self, pids: Iterable[int], now: int) -> dict[int, int]:
        """Pid to the text id of its name; 0 where it ended before it could be asked.

        Args:
            pids: whose names are wanted; those of others are forgotten.
            now: monotonic ns.
        """
        stale = now - self._read_at >= REFRESH_NS
        if stale:
            self._read_at = now
        self._known = {
            pid: self._read(pid) if stale or pid not in self._known else self._known[pid] for pid in set(pids)
        }
        return self._known

    def alive(self, pid: int) -> bool:
        """Whether the process still exists."""
        return (self._proc / str(pid)).exists()

    def thread(self, comm: bytes) -> int:
        """Text id of a thread's name as the kernel gives it."""
        return self._strings.intern(comm.decode("utf-8", "replace"))

    def _read(self, pid: int) -> int:
        try:
            comm = (self._proc / str(pid) / "comm").read_bytes().rstrip(b"\n")
        except OSError:
            return self._known.get(pid, 0)
        return self._strings.intern(comm.decode("utf-8", "replace"))
