"""Which processes map a libcuda (or another library), and the file behind each mapping.

A probe goes on a file, not a process: every process that maps that file, now or later, in whichever container,
hits it. Containers that bring their own copy (compat libraries) are other files.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

NS = 1_000_000_000
YOUNG_NS, OLD_EVERY_NS = 60 * NS, 20 * NS
"""A process seen for under a minute is looked at in each scan if it has mapped something since; later every 20 s."""

LIBCUDA, LIBSSL = "libcuda.so", "libssl.so"


@cache
def _line(library: str) -> re.Pattern[bytes]:
    return re.compile(
        rb"^([0-9a-f]+-[0-9a-f]+) \S+ \S+ ([0-9a-f]+:[0-9a-f]+) (\d+)\s+(/(?:.*/)?"
        + re.escape(library.encode())
        + rb"[.\d]*)(?: \(deleted\))?$",
        re.MULTILINE,
    )


_BLOCK_B = 1 << 20


@dataclass(frozen=True, slots=True)
class Mapping:
    """A library in a process.

    Attributes:
        device: major and minor number as /proc/PID/maps writes them.
        inode: of the file.
        span: address range of its first mapping there, the name in /proc/PID/map_files.
        path: as that process sees it.
    """

    device: str
    inode: int
    span: str
    path: str

    @property
    def key(self) -> tuple[str, int]:
        """What tells files apart."""
        return self.device, self.inode


@dataclass(slots=True)
class _Known:
    first: int
    looked: int
    size: bytes
    stack: bytes
    mappings: tuple[Mapping, ...]


@dataclass(slots=True)
class Scan:
    """What a scan found.

    Attributes:
        processes: pid to its mappings; only those that map the library.
        hidden: processes that may not be looked into.
    """

    processes: dict[int, tuple[Mapping, ...]] = field(default_factory=dict)
    hidden: int = 0


class Scanner:
    """Looks through /proc again and again, reading the maps only of processes that may have changed.

    Reading one process's maps costs up to milliseconds in the kernel; its size (/proc/PID/statm) costs
    microseconds and changes whenever it maps something. Of those that map the library it is also noticed that they
    have run another program since, by where their stack begins.

    Args:
        proc: the /proc folder.
        only_pids: processes to look at, all of them when empty.
        library: begin of its file name, `.so` included.
    """

    def __init__(
        self, proc: Path = Path("/proc"), only_pids: frozenset[int] = frozenset(), library: str = LIBCUDA
    ) -> None:
        self._proc = proc
        self._only = only_pids
        self._library = library
        self._known: dict[int, _Known] = {}

    def scan(self, now: int, pids: Iterable[int] | None = None) -> Scan:
        """Look at processes.

        Args:
            now: monotonic ns.
            pids: which ones; by default those that the scanner was made for.
        """
        found = Scan()
        alive = set(self._pids() if pids is None else pids)
        for pid in list(self._known.keys() - alive):
            del self._known[pid]
        for pid in alive:
            try:
                mappings = self._look(pid, now)
            except PermissionError:
                found.hidden += 1
                continue
            except OSError:  # it has ended
                self._known.pop(pid, None)
                continue
            if mappings:
                found.processes[pid] = mappings
        return found

    def open(self, pid: int, mapping: Mapping) -> int:
        """A file descriptor of the mapped file itself, even where its path is gone or names another file by now.

        Raises:
            OSError: neither way to it is open to us.
        """
        with contextlib.suppress(OSError):
            return os.open(self._proc / str(pid) / "map_files" / mapping.span, os.O_RDONLY | os.O_CLOEXEC)
        inside = self._proc / str(pid) / "root" / mapping.path.lstrip("/")
        return os.open(inside, os.O_RDONLY | os.O_CLOEXEC)

    def _pids(self) -> Iterable[int]:
        if self._only:
            return [pid for pid in self._only if (self._proc / str(pid)).exists()]
        return (int(name) for name in os.listdir(self._proc) if name.isdecimal())  # noqa: PTH208  (thrice as fast)

    def _look(self, pid: int, now: int) -> tuple[Mapping, ...]:
        size = _read(f"{self._proc}/{pid}/statm").partition(b" ")[0]
        known = self._known.get(pid)
        stack = self._stack(pid) if known is not None and known.mappings else b""
        if known is not None and known.stack == stack and not _due(known, size, now):
            return known.mappings
        # A kernel thread has no memory and no maps.
        mappings = parse(_read(f"{self._proc}/{pid}/maps"), self._library) if size != b"0" else ()
        stack = stack or (self._stack(pid) if mappings else b"")
        first = now if known is None else known.first
        self._known[pid] = _Known(first, now, size, stack if mappings else b"", mappings)
        return mappings

    def _stack(self, pid: int) -> bytes:
        """Where the stack begins, as /proc/PID/stat says: another place after each exec."""
        fields = _read(f"{self._proc}/{pid}/stat").rpartition(b")")[2].split()
        return fields[25] if len(fields) > 25 else b""


def _due(known: _Known, size: bytes, now: int) -> bool:
    if size == known.size:
        return False
    return now - known.first < YOUNG_NS or now - known.looked >= OLD_EVERY_NS


def parse(maps: bytes, library: str = LIBCUDA) -> tuple[Mapping, ...]:
    """The files of a library in the text of a /proc/PID/maps, each once."""
    return tuple({mapping.key: mapping for mapping in reversed(list(_mappings(maps, library)))}.values())


def _mappings(maps: bytes, library: str) -> Iterator[Mapping]:
    if f"/{library}".encode() not in maps:
        return
    for span, device, inode, path in _line(library).findall(maps):
        yield Mapping(device.decode(), int(inode), span.decode(), os.fsdecode(path))


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123  (hundreds of these per scan)
        return b"".join(iter(lambda: file.read(_BLOCK_B), b""))
