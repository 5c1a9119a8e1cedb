"""Who uses a GPU: pids, memory and SM share. Names never include arguments: those may hold secrets."""

from __future__ import annotations

import math
import pwd
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from opusmon.channels import WHOLE_GPU
from opusmon.collectors.gpu.limits import NOT_AVAILABLE, UNAVAILABLE
from opusmon.collectors.gpu.nvml import NOT_FOUND, Missing, Nvml
from opusmon.collectors.gpu.reading import Key, ProcessRow, scope

OUTSIDE = "outside my namespace"
MAX_COMM = 15
"""The kernel cuts /proc/PID/comm after 15 bytes."""

LISTS = {
    "compute": ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2"),
    "graphics": ("nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses_v2"),
}

Entry = tuple[int, int, str, float]
"""pid, GPU instance, kind, bytes of device memory."""


class Users:
    """User names by uid. A directory service that hangs delays a name, never a reading."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()
        self._asked: set[int] = set()

    def name(self, uid: int) -> str:
        """The user's name; "uid N" until it is known."""
        known = self._names.get(uid)
        if known is not None:
            return known
        with self._lock:
            fresh = uid not in self._asked
            self._asked.add(uid)
        if fresh:
            thread = threading.Thread(target=self._ask, args=(uid,), daemon=True)
            thread.start()
            thread.join(0.05)
        return self._names.get(uid, f"uid {uid}")

    def _ask(self, uid: int) -> None:
        try:
            self._names[uid] = pwd.getpwuid(uid).pw_name
        except KeyError:
            self._names[uid] = f"uid {uid}"


def process_name(pid: int, proc: Path = Path("/proc")) -> str:
    """Name of a process without its arguments, `OUTSIDE` when this pid namespace does not hold it."""
    try:
        comm = _plain((proc / str(pid) / "comm").read_bytes())
    except OSError:
        return OUTSIDE
    if len(comm) < MAX_COMM:
        return comm
    full = _program(proc / str(pid) / "cmdline")
    return full if full.startswith(comm) else comm


def _program(path: Path) -> str:
    """Base name of argv[0], up to a space: a process may write its arguments into its title."""
    try:
        with path.open("rb") as file:
            first = file.read(4096).split(b"\0", 1)[0]
    except OSError:
        return ""
    words = _plain(first).split()
    return words[0].rsplit("/", 1)[-1] if words else ""


def _plain(raw: bytes) -> str:
    text = raw.decode("utf-8", errors="replace").strip()
    return "".join(c if c.isprintable() else "?" for c in text)


def process_user(pid: int, users: Users, proc: Path = Path("/proc")) -> str:
    """Owner of a process, "" when it cannot be seen."""
    try:
        return users.name((proc / str(pid)).stat().st_uid)
    except OSError:
        return ""


class Processes:
    """The processes of one device.

    Args:
        nvml: the edge of the calling thread.
        gpu: device index.
        users: shared name cache.
        only: pids to report, empty for all.

    Attributes:
        missing: reasons of the last reading by status key.
    """

    def __init__(self, nvml: Nvml, gpu: int, users: Users, only: frozenset[int]) -> None:
        self.missing: dict[Key, Missing] = {}
        self._nvml, self._gpu, self._users, self._only = nvml, gpu, users, only
        self._seen_us = 0

    def read(self, handle: Any, mig: Iterable[tuple[int, Any]], t: int, interval_ns: int) -> list[ProcessRow]:
        """Rows of `gpu_process`.

        Args:
            handle: device handle.
            mig: (GPU instance, handle) of the MIG devices, asked when the parent device may not be.
            t: monotonic ns for the rows.
            interval_ns: how far back the first utilization sample reaches.
        """
        self.missing = {}
        entries = self._entries(handle, list(mig))
        if not entries:
            return []
        shares = self._shares(handle, interval_ns)
        rows = []
        for pid, gi, kind, mem_b in entries:
            if self._only and pid not in self._only:
                continue
            share = math.nan if shares is None else shares.get(pid, 0.0)
            name, user = process_name(pid), process_user(pid, self._users)
            rows.append(ProcessRow(t, self._gpu, gi, pid, name, user, kind, mem_b, share))
        return rows

    def _entries(self, handle: Any, mig: list[tuple[int, Any]]) -> list[Entry]:
        """One entry per (GPU instance, pid); compute wins over graphics."""
        found: dict[tuple[int, int], Entry] = {}
        for kind, names in LISTS.items():
            for gi, process in self._list(names, handle, mig):
                mem_b = self._memory(process.usedGpuMemory)
                found.setdefault((gi, process.pid), (int(process.pid), gi, kind, mem_b))
        return list(found.values())

    def _list(self, names: tuple[str, ...], handle: Any, mig: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
        answer = self._nvml.first(names, handle)
        if not isinstance(answer, Missing):
            return [(_instance(process), process) for process in answer]
        out: list[tuple[int, Any]] = []
        for gi, mig_handle in mig:
            part = self._nvml.first(names, mig_handle)
            if isinstance(part, Missing):
                answer = part
                break
            out += [(gi, process) for process in part]
        else:
            if mig:
                return out
        self.missing["gpu_process", "", scope(self._gpu)] = answer
        return out

    def _memory(self, used: int | None) -> float:
        if used is None or used in NOT_AVAILABLE:
            self.missing["gpu_process", "mem_b", scope(self._gpu)] = UNAVAILABLE
            return math.nan
        return float(used)

    def _shares(self, handle: Any, interval_ns: int) -> dict[int, float] | None:
        """Mean SM percentage by pid since the last reading; None when NVML does not tell."""
        since = self._seen_us or (time.time_ns() - interval_ns) // 1000
        samples = self._nvml.call("nvmlDeviceGetProcessUtilization", handle, since)
        if isinstance(samples, Missing) and samples.code in (0, NOT_FOUND):
            return {}
        if isinstance(samples, Missing):
            self.missing["gpu_process", "sm_pct", scope(self._gpu)] = samples
            return None
        self._seen_us = max([self._seen_us, *(int(sample.timeStamp) for sample in samples)])
        return mean_shares((int(sample.pid), int(sample.smUtil)) for sample in samples)


def _instance(process: Any) -> int:
    gi = getattr(process, "gpuInstanceId", 0xFFFFFFFF)
    return WHOLE_GPU if gi in (None, 0xFFFFFFFF) else int(gi)


def mean_shares(samples: Iterable[tuple[int, int]]) -> dict[int, float]:
    """Mean percentage by pid; sentinels are dropped, the rest is clamped to 0-100."""
    by_pid: dict[int, list[int]] = defaultdict(list)
    for pid, share in samples:
        if share not in NOT_AVAILABLE:
            by_pid[pid].append(min(max(share, 0), 100))
    return {pid: sum(shares) / len(shares) for pid, shares in by_pid.items()}
