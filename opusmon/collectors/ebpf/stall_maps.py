"""The maps of stalls.bpf.c: what is in them, and how they are read and filled."""

from __future__ import annotations

import os
import platform
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import islice

import numpy as np

from opusmon.collectors.ebpf import maps
from opusmon.collectors.ebpf.maps import Table
from opusmon.collectors.ebpf.probes import Backend
from opusmon.collectors.ebpf.symbols import STACK_ARGUMENT_9

RING_PAGES = 2048
RING_B = RING_PAGES * 4096
MAX_THREADS, MAX_CALLS, MAX_PROCESSES, MAX_STACKS = 16_384, 8192, 4096, 16_384
MAX_BROKEN, RUNS, STACK_DEPTH, MAX_COMPILERS = 256, 16, 127, 16
OPEN_NS = 10_000_000_000
"""A wait that lasts longer is told before it ends."""
CAPTURE_LIMIT_NS = 600_000_000_000
"""A capture that is open for longer counts no more: its stream may have been destroyed."""
OF_CUDA, OF_TLS = 1, 2
"""Flags in the map `watched`: page faults and descendants count; handshakes count."""

SYSCALL_FUTEX = {"x86_64": 202, "aarch64": 98}
_SYSCALL_AT = {"x86_64": 120, "aarch64": 280}
"""Bytes from the start of the kernel's struct pt_regs to the number of the system call: orig_ax (after 15 registers of
8 bytes); syscallno (after regs[31], sp, pc, pstate and orig_x0)."""

WAIT, OFF_CPU, RUN_QUEUE, FUTEX, JIT, CAPTURE, INIT, TLS = range(1, 9)
NOT_BEGUN, NO_BEGIN, CODE_KNOWN = 1, 2, 4
UNKNOWN = 2**64 - 1

EVENT = np.dtype(
    [
        *((name, "<u8") for name in ("t", "dur", "stream", "size")),
        *((name, "<u4") for name in ("kind", "call", "tgid", "tid")),
        ("code", "<i4"),
        ("stack", "<i4"),
        ("state", "<u4"),
        ("syscall", "<i4"),
        ("by_tid", "<u4"),
        ("by_call", "<u4"),
        ("by_code", "<i4"),
        ("flags", "<u4"),
        ("comm", "S16"),
        ("by_comm", "S16"),
    ]
)
"""`struct event_t`."""
_U4 = np.dtype([("value", "<u4")])
_U8 = np.dtype([("value", "<u8")])
PROC = np.dtype(
    [
        *((name, "<u8") for name in ("faults", "active_at", "begun_at", "by_t")),
        *((name, "<u4") for name in ("capturing", "by_tid", "by_call")),
        ("by_code", "<i4"),
        ("by_stack", "<i4"),
        ("pad", "<u4"),
        ("by_comm", "S16"),
    ]
)
CALL = np.dtype([*((name, "<u8") for name in ("start", "stream", "size")), ("call", "<u4"), ("waits", "<u4")])
RUN = np.dtype([("call", "<u4"), ("times", "<u4"), ("stream", "<u8")])
RECENT = np.dtype([("n", "<u8"), ("runs", RUN, (RUNS,))])
SLOW_KEY = np.dtype([(name, "<u4") for name in ("tid", "call", "epoch", "pad")])
SLOW = np.dtype(
    [
        *((name, "<u8") for name in ("n", "dur", "longest", "size", "last", "failed")),
        ("tgid", "<u4"),
        ("stack", "<i4"),
        ("comm", "S16"),
    ]
)


def cflags(machine: str | None = None) -> list[str]:
    """Compiler flags of stalls.bpf.c on that machine."""
    name = machine or platform.machine()
    bounds = {
        "STREAM_ON_STACK": STACK_ARGUMENT_9[name],
        "SYSCALL_AT": _SYSCALL_AT[name],
        "SYSCALL_FUTEX": SYSCALL_FUTEX[name],
        "RING_PAGES": RING_PAGES,
        "MAX_THREADS": MAX_THREADS,
        "MAX_CALLS": MAX_CALLS,
        "MAX_PROCESSES": MAX_PROCESSES,
        "MAX_STACKS": MAX_STACKS,
    }
    return [f"-D{word}={value}" for word, value in bounds.items()]


@dataclass(frozen=True, slots=True)
class Counts:
    """What the kernel counted since the reading before, or since the start.

    Attributes:
        launch: hits of the launch group, entries and returns.
        poll: hits of the poll group.
        always: hits of the other probes on libcuda, entries and returns.
        filtered: hits of the frequent tracepoints (switch, wake-up, page fault), of all threads of the host.
        other: hits of the rare ones, and of libssl.
        lost_ring: events that found the ring full.
        lost_map: calls or threads that found a map full.
        lost_read: launches whose stream could not be read.
    """

    launch: int = 0
    poll: int = 0
    always: int = 0
    filtered: int = 0
    other: int = 0
    lost_ring: int = 0
    lost_map: int = 0
    lost_read: int = 0

    @property
    def uprobes(self) -> int:
        """Hits that cost a trap."""
        return self.launch + self.poll + self.always

    @property
    def lost(self) -> int:
        """Events and calls that are missing from the rows."""
        return self.lost_ring + self.lost_map


@dataclass(frozen=True, slots=True)
class OpenWait:
    """A wait for the GPU that has not ended.

    Attributes:
        pid: of the process.
        tid: of the thread.
        call: its number in stalls.bpf.c.
        age_ns: how long it has lasted.
    """

    pid: int
    tid: int
    call: int
    age_ns: int


def is_capturing(proc: np.void, now: int) -> bool:
    """Whether a process (dtype `PROC`) has a capture open that may still end; `now` is monotonic ns."""
    return int(proc["capturing"]) > 0 and now - int(proc["begun_at"]) < CAPTURE_LIMIT_NS


class StallMaps:
    """Reads and fills the maps.

    Args:
        backend: holds them.
    """

    def __init__(self, backend: Backend) -> None:
        self._fd = backend.map_fd
        self._procs = maps.HashMap(backend.map_fd("procs"), _U4, PROC, MAX_PROCESSES)
        self._slow = maps.HashMap(backend.map_fd("slow"), SLOW_KEY, SLOW, MAX_CALLS)
        self._broken = maps.HashMap(backend.map_fd("broken"), _U8, RECENT, MAX_BROKEN)
        self._calls = maps.HashMap(backend.map_fd("calls"), _U8, CALL, MAX_CALLS)
        self._watched_map = maps.HashMap(backend.map_fd("watched"), _U4, _U4, MAX_PROCESSES)
        self._watched: dict[int, int] = {}
        self._before = Counts()
        self._settings = (0, 0, 0)
        self._epoch = 1

    def configure(self, threshold_ns: int, tls_threshold_ns: int, exit_code_at: int) -> None:
        """Say which waits and handshakes are long, and where a task keeps its exit code (0: nowhere known)."""
        self._settings = (threshold_ns, tls_threshold_ns, exit_code_at)
        self._write()

    def name_compilers(self, names: Iterable[str]) -> None:
        """Programs that are watched from exec to exit, as the kernel cuts their names: 15 characters."""
        for slot, name in enumerate(names):
            maps.write(self._fd("compilers"), slot, name.encode()[:15].ljust(16, b"\0"))

    def watch(self, wanted: Mapping[int, int]) -> None:
        """Set the processes that count, with their flags (`OF_CUDA`, `OF_TLS`); those beyond the map's bound do not."""
        wanted = dict(islice(wanted.items(), MAX_PROCESSES))
        for pid in self._watched.keys() - wanted.keys():
            self._watched_map.delete(np.array([(pid,)], _U4)[0])
        for pid, flags in wanted.items():
            if self._watched.get(pid) != flags:
                maps.write(self._fd("watched"), pid, struct.pack("=I", flags))
        self._watched = wanted

    def adopt(self, kin: Mapping[int, int]) -> None:
        """Descendants that were there already, to their outermost watched ancestor."""
        for pid, root in kin.items():
            maps.write(self._fd("kin"), pid, struct.pack("=I", root))

    def processes(self) -> dict[int, np.void]:
        """Pid to what the kernel knows of the process, dtype `PROC`."""
        keys, values = self._procs.read()
        return dict(zip(keys["value"].tolist(), values, strict=True))

    def open_waits(self, now: int, pids: Collection[int] = ()) -> list[OpenWait]:
        """Waits that have lasted for `OPEN_NS` at `now` (monotonic ns), the longest first; of all processes without `pids`."""
        keys, values = self._calls.read()
        ages = now - values["start"].astype(np.int64)
        found = [
            OpenWait(
                int(keys["value"][at]) >> 32,
                int(keys["value"][at]) & 0xFFFFFFFF,
                int(values["call"][at]),
                int(ages[at]),
            )
            for at in np.flatnonzero((values["waits"] != 0) & (ages >= OPEN_NS)).tolist()
        ]
        return sorted((one for one in found if not pids or one.pid in pids), key=lambda one: -one.age_ns)

    def slow(self) -> tuple[Table, Table]:
        """Calls added up since the last reading: keys (dtype `SLOW_KEY`) and values (`SLOW`), shape (n,)."""
        ended, self._epoch = self._epoch, self._epoch + 1
        self._write()
        keys, values = self._slow.read()
        done = keys["epoch"] <= ended
        for key in keys[done]:
            self._slow.delete(key)
        return keys[done], values[done]

    def sequences(self) -> dict[int, np.void]:
        """End of an aborted capture (monotonic ns) to the calls before it, dtype `RECENT`; each is told once."""
        keys, values = self._broken.read()
        for key in keys:
            self._broken.delete(key)
        return dict(zip(keys["value"].tolist(), values, strict=True))

    def stack(self, number: int) -> tuple[int, ...]:
        """Addresses of a user stack, innermost first; empty where there is none."""
        if number < 0:
            return ()
        frames = np.zeros(STACK_DEPTH, np.uint64)
        missed = maps.read_slot(self._fd("stacks"), number, frames)
        return () if missed else tuple(frames[frames != 0].tolist())

    def counts(self) -> Counts:
        """Counts since the last call."""
        names = [field.name for field in fields(Counts)]
        now = Counts(*(maps.read_percpu(self._fd("counts"), slot) for slot in range(len(names))))
        before, self._before = self._before, now
        return Counts(*(getattr(now, name) - getattr(before, name) for name in names))

    def _write(self) -> None:
        maps.write(self._fd("control"), 0, struct.pack("=4Q", self._epoch, *self._settings))


def descendants(watched: Iterable[int], parents: Mapping[int, int]) -> dict[int, int]:
    """Pid of each descendant of a watched process to its outermost watched ancestor.

    Args:
        watched: pids.
        parents: pid to the pid of its parent, for all processes.
    """
    seen = set(watched)
    found = {}
    for pid in parents:
        root, at = 0, parents.get(pid, 0)
        for _ in range(64):  # no cycle, however the table was read
            if at in seen:
                root = at
            at = parents.get(at, 0)
            if at <= 1:
                break
        if root:
            found[pid] = root
    return found


def parents(proc: str = "/proc") -> dict[int, int]:
    """Pid to the pid of its parent, of all processes that can be read now."""
    found = {}
    for name in filter(str.isdecimal, os.listdir(proc)):  # noqa: PTH208  (thrice as fast)
        try:
            with open(f"{proc}/{name}/stat", "rb", buffering=0) as file:  # noqa: PTH123  (hundreds per scan)
                found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it has ended
    return found
