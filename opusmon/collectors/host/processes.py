"""Rows of channel `process`: what the kernel says about each watched process.

No file read here waits for the lock of the process's memory map, which it holds while it is stuck in a page fault.
Reading its command line would.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from opusmon.channels import PROCESS
from opusmon.clock import NS, Clock
from opusmon.collectors.host.cgroup_tree import Controller, label, membership
from opusmon.collectors.host.files import MALFORMED, names, pick, plain, read_short, why
from opusmon.collectors.host.reading import Answer, Rates, Row, scaled
from opusmon.collectors.missing import Missing
from opusmon.collectors.notes import Key
from opusmon.collectors.process_names import Users

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
KIB = 1024
SLOW_NS = 5 * NS
"""How often control groups are asked for, and open files are listed where the kernel does not count them."""

_STATUS = names("Uid", "VmRSS", "VmSwap", "Threads", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
_IO = names("read_bytes", "write_bytes")
_COLUMNS = tuple(
    field.name for field in PROCESS.fields if field.name not in ("pid", "name", "user", "cgroup", "dt_ns")
)
_RATES = {
    "ticks": ("cpu_pct", 100 / TICKS_PER_S),
    "system_ticks": ("cpu_system_pct", 100 / TICKS_PER_S),
    "run_delay_ns": ("run_delay_pct", 100 / NS),
    "major_faults": ("major_faults_per_s", 1),
    "minor_faults": ("minor_faults_per_s", 1),
    "voluntary_ctxt_switches": ("voluntary_switches_per_s", 1),
    "nonvoluntary_ctxt_switches": ("forced_switches_per_s", 1),
    "read_bytes": ("read_bps", 1),
    "write_bytes": ("write_bps", 1),
}
"""Counters to their fields, with what turns a rate per second into the field's unit."""

NO_SCHEDSTAT = Missing(
    "not_supported",
    "this kernel was built without CONFIG_SCHED_INFO",
    "use a kernel with CONFIG_SCHEDSTATS, as distributions ship it",
)


class Stat(NamedTuple):
    """What /proc/PID/stat says: times in clock ticks, `started` since boot."""

    comm: str
    ended: bool
    parent: int
    minor_faults: int
    major_faults: int
    user: int
    system: int
    started: int


def parse_stat(text: bytes) -> Stat | None:
    """Read /proc/PID/stat; None when it is not whole. A process may have blanks and brackets in its name."""
    head, bracket, rest = text.rpartition(b")")
    words = rest.split()
    if not bracket or len(words) < 20 or not all(words[n].isdigit() and len(words[n]) <= 20 for n in _WANTED):
        return None
    numbers = [int(words[n]) for n in _WANTED]
    return Stat(plain(head.partition(b"(")[2]), words[0] in _ENDED, *numbers)


_WANTED = (1, 7, 9, 11, 12, 19)
"""Places in stat after the name: ppid, minflt, majflt, utime, stime, starttime."""
_ENDED = (b"Z", b"X", b"x")
"""States of a process that nobody has waited for yet."""


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """A row of `process` before its text is interned; `values` in column order after `dt_ns`."""

    t: int
    pid: int
    name: str
    user: str
    cgroup: str
    dt_ns: int
    values: list[float]


@dataclass(slots=True)
class Life:
    """One process from its start to its end.

    Attributes:
        started: clock ticks since boot; another number under the same pid is another process.
        rates: of its counters.
        seen_at: time of its last reading.
        age_ns: at that time.
        paths: its control groups, as of `moved_at`.
        cgroup: what they are called.
        homeless: why they are not known.
        files: open files as listed, where the kernel does not count them, and when that was.
    """

    started: int
    rates: Rates = field(default_factory=Rates)
    seen_at: int | None = None
    age_ns: float = math.nan
    paths: dict[Controller, str] = field(default_factory=dict)
    cgroup: str = ""
    homeless: Missing | None = None
    moved_at: int = 0
    files: tuple[Answer, int] | None = None

    @property
    def born_at(self) -> float:
        """When it started, monotonic ns (as long as the host has not been suspended since)."""
        return (self.seen_at or 0) - self.age_ns


class Processes:
    """Reads the watched processes.

    Args:
        proc: the /proc folder.
        clock: time of the rows.
        users: name cache.

    Attributes:
        lives: the processes that were there at the last reading, by pid.
        missing: why fields of the last rows have no value.
    """

    def __init__(self, proc: str, clock: Clock, users: Users) -> None:
        self.lives: dict[int, Life] = {}
        self.missing: dict[Key, Missing] = {}
        self._proc, self._clock, self._users = proc, clock, users

    def read(self, pids: Mapping[int, str], boot_ns: int) -> list[ProcessRow]:
        """A row for each process that was there at the last reading too; rates cover the time between.

        Args:
            pids: whom to read, with the name, "" where only the kernel's name is known (15 bytes at most).
            boot_ns: time since boot, suspended time included.
        """
        self.missing = {}
        before, self.lives = self.lives, {}
        rows = (self._one(pid, name, before.get(pid), boot_ns) for pid, name in pids.items())
        return [row for row in rows if row is not None]

    def _one(self, pid: int, name: str, before: Life | None, boot_ns: int) -> ProcessRow | None:
        folder = f"{self._proc}/{pid}"
        text, now = read_short(f"{folder}/stat"), self._clock.now()
        stat = None if isinstance(text, Missing) else parse_stat(text)
        status = read_short(f"{folder}/status")
        if stat is None or stat.ended or isinstance(status, Missing):
            return None
        life = before if before is not None and before.started == stat.started else Life(stat.started)
        self.lives[pid] = life
        seen_at, life.seen_at = life.seen_at, now
        life.age_ns = boot_ns - stat.started * NS / TICKS_PER_S
        fields = pick(_STATUS, status)
        row = self._row(folder, stat, fields, life, now)
        if seen_at is None:
            return None
        self.missing |= row.reasons(PROCESS, f"pid {pid}")
        user = self._users.name(fields["Uid"]) if "Uid" in fields else ""
        # A name that no longer begins as the kernel's short one is of the time before it was renamed.
        name = name if name.startswith(stat.comm) else stat.comm
        return ProcessRow(now, pid, name, user, life.cgroup, now - seen_at, row.record(_COLUMNS))

    def _row(self, folder: str, stat: Stat, status: Mapping[str, int], life: Life, now: int) -> Row:
        row = Row()
        io = read_short(f"{folder}/io")
        traffic = {} if isinstance(io, Missing) else pick(_IO, io)
        delay = _run_delay(read_short(f"{folder}/schedstat"))
        counters = {
            "ticks": stat.user + stat.system,
            "system_ticks": stat.system,
            "major_faults": stat.major_faults,
            "minor_faults": stat.minor_faults,
            **{name: number for name, number in {**status, **traffic}.items() if name in _RATES},
        }
        if not isinstance(delay, Missing):
            counters["run_delay_ns"] = delay
        lacking = {"run_delay_ns": delay if isinstance(delay, Missing) else MALFORMED}
        if isinstance(io, Missing):
            lacking |= dict.fromkeys(("read_bytes", "write_bytes"), io)
        rates = life.rates.update(counters, now)
        for name, (column, factor) in _RATES.items():
            row.put(column, scaled(rates.get(name, lacking.get(name, MALFORMED)), factor))
        if row.values.get("run_delay_pct", 0) > 100:
            row.put("run_delay_pct", 100.0)  # a wait counts when it ends, though it may have begun before
        self._amounts(row, folder, status, life, now)
        return row

    def _amounts(self, row: Row, folder: str, status: Mapping[str, int], life: Life, now: int) -> None:
        row.put("rss_b", scaled(status.get("VmRSS", MALFORMED), KIB))
        row.put("swap_b", scaled(status.get("VmSwap", MALFORMED), KIB))
        row.put("threads", status.get("Threads", MALFORMED))
        row.put("fds", _open_files(folder, life, now))
        row.put("age_ns", life.age_ns if life.age_ns >= 0 else MALFORMED)
        if now - life.moved_at >= SLOW_NS or not life.paths:
            life.moved_at = now
            life.paths, life.cgroup, life.homeless = _groups(read_short(f"{folder}/cgroup"))
        if life.homeless is not None:
            row.put("cgroup", life.homeless)


def _groups(text: bytes | Missing) -> tuple[dict[Controller, str], str, Missing | None]:
    """Control groups of a process, what their group is called, and why they are not known."""
    if isinstance(text, Missing):
        return {}, "", text
    paths = membership(text)
    return (paths, label(paths), None) if paths else ({}, "", MALFORMED)


def _run_delay(text: bytes | Missing) -> int | Missing:
    """The second number of schedstat: ns that the main thread waited for a CPU."""
    if isinstance(text, Missing):
        return NO_SCHEDSTAT if text.state == "not_supported" else text
    words = text.split()
    if words == [b"0"] * 3:
        return NO_SCHEDSTAT  # what has run at all has used CPU: the kernel is not counting
    return int(words[1]) if len(words) == 3 and words[1].isdigit() and len(words[1]) <= 20 else MALFORMED


def _open_files(folder: str, life: Life, now: int) -> Answer:
    """Open files: the size of the folder since Linux 6.2, before that the length of its listing."""
    path = f"{folder}/fd"
    try:
        if counted := _folder_size(path):
            return counted
        if life.files is None or now - life.files[1] >= SLOW_NS:
            life.files = len(os.listdir(path)), now  # noqa: PTH208  (likewise)
    except OSError as error:
        return replace(why(error, path), code=0)
    return life.files[0]


def _folder_size(path: str) -> int:
    return os.stat(path).st_size  # noqa: PTH116  (a third of the time of Path.stat)
