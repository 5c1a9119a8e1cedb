"""Who uses a GPU: pids, memory and SM share."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from opusmon.channels import WHOLE_GPU
from opusmon.collectors.gpu.limits import NOT_AVAILABLE, UNAVAILABLE
from opusmon.collectors.gpu.nvml import NOT_FOUND, Nvml
from opusmon.collectors.gpu.reading import ProcessRow, scope
from opusmon.collectors.missing import Missing
from opusmon.collectors.notes import Key
from opusmon.collectors.process_names import Users, process_name, process_user

LISTS = {
    "compute": ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2"),
    "graphics": ("nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses_v2"),
}

Entry = tuple[int, int, str, float]
"""pid, GPU instance, kind, bytes of device memory."""


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
