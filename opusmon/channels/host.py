"""The host: what the kernel says about pressure, memory and the processes that serve. No root."""

from __future__ import annotations

from opusmon.schema import Channel, Field


def _psi(what: str) -> tuple[Field, ...]:
    """Pressure stall information of one resource as shares of the time since the previous row."""
    words = f"time in which %s tasks waited for {what}"
    return (
        Field(f"psi_{what}_some_pct", "<f4", "%", words % "some"),
        Field(f"psi_{what}_full_pct", "<f4", "%", words % "all"),
    )


HOST = Channel(
    "host",
    "gauge",
    (
        Field("dt_ns", "<i8", "ns", "rates and shares cover [t - dt_ns, t]"),
        Field("cpus", "<f4", "", "CPUs online"),
        Field("cpu_busy_pct", "<f4", "%", "of all CPUs: neither idle nor waiting for I/O"),
        Field("cpu_iowait_pct", "<f4", "%"),
        Field("cpu_steal_pct", "<f4", "%", "taken by the hypervisor"),
        Field("cpu_irq_pct", "<f4", "%", "hard and soft interrupts"),
        Field("load1", "<f4", "", "load average over 1 minute"),
        Field("runnable", "<f4", "", "tasks running or waiting for a CPU, at t"),
        Field("blocked", "<f4", "", "tasks waiting for I/O, at t; other uninterruptible sleep is not in it"),
        Field("switches_per_s", "<f4", "1/s", "context switches"),
        Field("interrupts_per_s", "<f4", "1/s"),
        *_psi("cpu"),
        *_psi("memory"),
        *_psi("io"),
        Field("mem_total_b", "<f8", "B"),
        Field("mem_available_b", "<f8", "B", "what could be had without swapping"),
        Field("page_cache_b", "<f8", "B", "without shared memory, which cannot be dropped"),
        Field("dirty_b", "<f8", "B", "dirty and in writeback"),
        Field("swap_used_b", "<f8", "B"),
        Field("swap_in_bps", "<f4", "B/s"),
        Field("swap_out_bps", "<f4", "B/s"),
        Field("disk_read_bps", "<f4", "B/s", "whole disks"),
        Field("disk_write_bps", "<f4", "B/s", "whole disks"),
        Field("major_faults_per_s", "<f4", "1/s"),
        Field("direct_reclaim_pages_per_s", "<f4", "1/s", "pages that processes had to free themselves"),
        Field("oom_kills", "<f4", "", "since boot"),
        Field("net_rx_bps", "<f4", "B/s", "all interfaces except loopback"),
        Field("net_tx_bps", "<f4", "B/s", "all interfaces except loopback"),
    ),
    help="One row per tick for the host (or for the container's view of it).",
)

CGROUP = Channel(
    "cgroup",
    "gauge",
    (
        Field("cgroup", "<u4", help="path below the cgroup root", text=True),
        Field("dt_ns", "<i8", "ns", "shares cover [t - dt_ns, t]"),
        Field("cpu_quota_cores", "<f4", "", "CPU limit in cores, NaN for none"),
        Field("cpu_cores", "<f4", "", "CPU used, in cores"),
        Field("throttled_pct", "<f4", "%", "share of time its tasks were held back by the CPU limit"),
        Field("throttled_periods_pct", "<f4", "%", "share of enforcement periods in which it was held back"),
        Field("mem_used_b", "<f8", "B"),
        Field("mem_limit_b", "<f8", "B", "NaN for none"),
        Field("mem_cache_b", "<f8", "B", "page cache charged to it, without shared memory"),
        Field("mem_pressure_pct", "<f4", "%", "PSI memory, some"),
        Field("cpu_pressure_pct", "<f4", "%", "PSI cpu, some"),
        Field("oom_kills", "<f4", "", "since it was made"),
        Field("limit_hits", "<f4", "", "times memory reached its limit, since it was made"),
    ),
    key=("cgroup",),
    help="The control groups of the watched processes, the tightest limit on the path to the root.",
)

PROCESS = Channel(
    "process",
    "gauge",
    (
        Field("pid", "<i4"),
        Field("name", "<u4", help="process name, without arguments (they may hold secrets)", text=True),
        Field("user", "<u4", text=True),
        Field("cgroup", "<u4", text=True),
        Field("dt_ns", "<i8", "ns", "rates cover [t - dt_ns, t]"),
        Field("cpu_pct", "<f4", "%", "of one core, user and system"),
        Field("cpu_system_pct", "<f4", "%", "of one core, in the kernel"),
        Field(
            "run_delay_pct",
            "<f4",
            "%",
            "time its main thread waited for a CPU; a wait counts when it ends, at most 100",
        ),
        Field("rss_b", "<f8", "B"),
        Field("swap_b", "<f8", "B"),
        Field("threads", "<f4"),
        Field("fds", "<f4", "", "open files; NaN without permission"),
        Field("major_faults_per_s", "<f4", "1/s"),
        Field("minor_faults_per_s", "<f4", "1/s"),
        Field("voluntary_switches_per_s", "<f4", "1/s", "main thread"),
        Field("forced_switches_per_s", "<f4", "1/s", "main thread: preempted"),
        Field("read_bps", "<f4", "B/s", "from storage; NaN without permission"),
        Field("write_bps", "<f4", "B/s", "to storage; NaN without permission"),
        Field("age_ns", "<f8", "ns", "since it started"),
    ),
    key=("pid",),
    help="One row per serving process per tick.",
)
