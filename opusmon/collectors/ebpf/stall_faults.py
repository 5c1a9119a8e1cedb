"""Storms of page faults, from counters that only grow."""

from __future__ import annotations

from collections.abc import Mapping

from opusmon.collectors.ebpf.stall_rows import Stall, page_faults

NS = 1_000_000_000


class Faults:
    """Compares readings of the kernel's counters.

    Args:
        most: page faults per second of a process that are no storm yet.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._before: dict[int, int] = {}
        self._read_at: int | None = None

    def storms(self, faults: Mapping[int, int], now: int) -> list[Stall]:
        """One row per process over the rate since the last reading. Major faults are not told from minor ones.

        Args:
            faults: pid to its faults so far.
            now: monotonic ns.
        """
        dt_ns = now - self._read_at if self._read_at is not None else 0
        grown = {
            pid: count - self._before.get(pid, count if not dt_ns else 0) for pid, count in faults.items()
        }
        self._before, self._read_at = dict(faults), now
        if dt_ns <= 0:
            return []
        return [
            page_faults(now, pid, "", count, dt_ns, self._most)
            for pid, count in grown.items()
            if count * NS / dt_ns > self._most
        ]
