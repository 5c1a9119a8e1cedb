"""CPU, memory and paging of the whole machine: the part of channel `host` that needs no list of devices."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from opusmon.collectors.host.files import MALFORMED, names, pick, read
from opusmon.collectors.host.reading import Answer, Rates, Row, scaled
from opusmon.collectors.missing import FIRST, WENT_BACK, Missing

PAGE_B = os.sysconf("SC_PAGE_SIZE")
KIB = 1024

_CPU = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
"""Columns of the "cpu" line. Guest time, which follows, is inside user and nice already."""
_IDLE = ("idle", "iowait")
_SLIP_TICKS = 100
"""Idle and iowait step back by some ticks while CPUs wake up (proc(5)): that is no new series."""

_SHARES = ("cpu_busy_pct", "cpu_iowait_pct", "cpu_steal_pct", "cpu_irq_pct")
_STAT = {"ctxt": "switches_per_s", "intr": "interrupts_per_s"}
_STAT_LINES = names("ctxt", "intr", "procs_running", "procs_blocked")
_CPU_LINE = re.compile(rb"^cpu((?: +\d{1,20}){8,})", re.MULTILINE)
_CPU_N = re.compile(rb"^cpu\d", re.MULTILINE)

_MEMINFO = names(
    *("MemTotal", "MemAvailable", "Buffers", "Cached", "Shmem", "Dirty", "Writeback", "SwapTotal", "SwapFree")
)
_VMSTAT = names("pswpin", "pswpout", "pgmajfault", "oom_kill")
_DIRECT = re.compile(rb"\npgsteal_direct\w* (\d{1,20})(?=\n)")
"""One number since Linux 4.8, one for each zone before."""
_VM_RATES = {
    "pswpin": ("swap_in_bps", PAGE_B),
    "pswpout": ("swap_out_bps", PAGE_B),
    "pgmajfault": ("major_faults_per_s", 1),
    "direct": ("direct_reclaim_pages_per_s", 1),
}


class CpuShares:
    """Shares of CPU time between two readings of the "cpu" line."""

    def __init__(self) -> None:
        self._before: dict[str, int] | None = None

    def update(self, ticks: dict[str, int]) -> Mapping[str, float] | Missing:
        """Percent of all CPU time by column since the reading before.

        The sum of the columns is the base, not the clock: CPUs that come and go change both alike.
        """
        before, self._before = self._before, ticks
        if before is None:
            return FIRST
        grown = {name: ticks[name] - before[name] for name in _CPU}
        for name in _IDLE:
            if -_SLIP_TICKS <= grown[name] < 0:
                grown[name] = 0
        if min(grown.values()) < 0:
            return WENT_BACK
        ticks_in_all = sum(grown.values())
        return {name: n * 100 / ticks_in_all for name, n in grown.items()} if ticks_in_all else FIRST


class System:
    """Reads /proc/stat, loadavg, meminfo and vmstat.

    Args:
        proc: the /proc folder.
    """

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._shares, self._stat_rates, self._vm_rates = CpuShares(), Rates(), Rates()

    def read(self, row: Row, at: int) -> None:
        """Fill the fields at `at` (monotonic ns)."""
        self._stat(row, at)
        self._load(row)
        self._memory(row)
        self._paging(row, at)

    def _stat(self, row: Row, at: int) -> None:
        text = read(f"{self._proc}/stat")
        if isinstance(text, Missing):
            row.put_all(("cpus", "runnable", "blocked", *_SHARES, *_STAT.values()), text)
            return
        found = pick(_STAT_LINES, text)
        row.put("cpus", len(_CPU_N.findall(text)) or MALFORMED)
        # The reader itself is running, and says nothing about the load.
        row.put("runnable", max(0, found["procs_running"] - 1) if "procs_running" in found else MALFORMED)
        row.put("blocked", found.get("procs_blocked", MALFORMED))
        rates = self._stat_rates.update({name: found[name] for name in _STAT if name in found}, at)
        for name, column in _STAT.items():
            row.put(column, rates.get(name, MALFORMED))
        self._cpu(row, cpu_ticks(text))

    def _cpu(self, row: Row, ticks: dict[str, int] | None) -> None:
        shares = MALFORMED if ticks is None else self._shares.update(ticks)
        if isinstance(shares, Missing):
            row.put_all(_SHARES, shares)
            return
        row.put("cpu_iowait_pct", shares["iowait"])
        row.put("cpu_steal_pct", shares["steal"])
        row.put("cpu_irq_pct", shares["irq"] + shares["softirq"])
        row.put("cpu_busy_pct", sum(share for name, share in shares.items() if name not in _IDLE))

    def _load(self, row: Row) -> None:
        text = read(f"{self._proc}/loadavg")
        row.put("load1", text if isinstance(text, Missing) else _load(text))

    def _memory(self, row: Row) -> None:
        text = read(f"{self._proc}/meminfo")
        columns = memory({} if isinstance(text, Missing) else pick(_MEMINFO, text))
        for column, kib in columns.items():
            row.put(column, text if isinstance(text, Missing) else scaled(kib, KIB))

    def _paging(self, row: Row, at: int) -> None:
        text = read(f"{self._proc}/vmstat")
        lacking = text if isinstance(text, Missing) else MALFORMED
        found = {} if isinstance(text, Missing) else pick(_VMSTAT, text)
        direct = [] if isinstance(text, Missing) else _DIRECT.findall(text)
        counters = {name: found[name] for name in _VM_RATES if name in found}
        if direct:
            counters["direct"] = sum(map(int, direct))
        rates = self._vm_rates.update(counters, at)
        for name, (column, factor) in _VM_RATES.items():
            row.put(column, scaled(rates.get(name, lacking), factor))
        row.put("oom_kills", found.get("oom_kill", lacking))


def cpu_ticks(text: bytes) -> dict[str, int] | None:
    """The columns of the "cpu" line of /proc/stat; None without a whole one."""
    match = _CPU_LINE.search(text)
    return dict(zip(_CPU, map(int, match[1].split()), strict=False)) if match else None


def memory(kib: Mapping[str, int]) -> dict[str, Answer]:
    """Memory fields in KiB from those of /proc/meminfo.

    Shared memory (tmpfs, /dev/shm) is counted by the kernel as cache, but cannot be dropped: it is taken off here.
    """
    return {
        "mem_total_b": _sum(kib, "MemTotal"),
        "mem_available_b": _sum(kib, "MemAvailable"),
        "page_cache_b": _sum(kib, "Cached", "Buffers", less="Shmem"),
        "dirty_b": _sum(kib, "Dirty", "Writeback"),
        "swap_used_b": _sum(kib, "SwapTotal", less="SwapFree"),
    }


def _sum(kib: Mapping[str, int], *more: str, less: str = "") -> Answer:
    if any(name not in kib for name in (*more, *([less] if less else []))):
        return MALFORMED
    return float(max(0, sum(kib[name] for name in more) - (kib[less] if less else 0)))


def _load(text: bytes) -> Answer:
    """The first number of /proc/loadavg."""
    match = re.match(rb"(\d{1,9}\.\d{1,9}) ", text)
    return float(match[1]) if match else MALFORMED
