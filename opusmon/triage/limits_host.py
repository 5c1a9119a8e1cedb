"""Thresholds of the rules about the host: those that the screen colours by, and what only rules need."""

from __future__ import annotations

from collections.abc import Mapping

from opusmon.triage.limit import Limit
from opusmon.triage.severity import HOST_LIMITS

_UNITS = {"run_queue_per_cpu": "", "swap_bps": "B/s"}

LIMITS: Mapping[str, Limit] = {
    **{
        f"{name}_{level}": Limit(value, _UNITS.get(name, "%"), limits.why)
        for name, limits in HOST_LIMITS.items()
        for level, value in (("warn", limits.warn), ("crit", limits.crit))
    },
    # All tasks stopped: half of what some tasks may wait, and a tenth of a second each second is an outage.
    "psi_memory_full_pct_warn": Limit(3, "%", "time in which every task waited for memory: nothing ran"),
    "psi_memory_full_pct_crit": Limit(10, "%", "time in which every task waited for memory: nothing ran"),
    "direct_reclaim_pages_per_s_warn": Limit(
        5_000, "1/s", "20 MB/s that threads free themselves before they get memory: this project's own choice"
    ),
    "direct_reclaim_pages_per_s_crit": Limit(
        100_000, "1/s", "400 MB/s: this project's own choice; pressure tells the time lost"
    ),
    "host_in_a_row": Limit(3, "samples", "run queue and pressure go up and down from one second to the next"),
    "host_cpu_pressed_pct": Limit(
        50,
        "%",
        "of all CPUs; below it a task that waits is bound to some of them: four busy loops on two of 32 CPUs make 95 % "
        "pressure with 6 % busy (measured)",
    ),
    "host_cpu_busy_pct": Limit(
        85, "%", "of all CPUs; above it a task that wakes up is likely to wait for one"
    ),
}
"""Name to limit."""
