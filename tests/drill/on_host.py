"""Causes on the host: its CPUs, its memory, limits, the hypervisor."""

from __future__ import annotations

import numpy as np

from drill.host import MS, POD, SLICE
from drill.library import AT, planted


def _late(host, share_pct, reason, since=AT):
    """Workers and API server wait for a CPU, so much of the time, in stalls of a few scheduler slices."""
    for table in host.processes.values():
        table["run_delay_pct"][since:] = np.clip(share_pct + host.noise(share_pct / 8)[since:], 0, 100)
        table["forced_switches_per_s"][since:] = 80 + 4 * host.noise(1.0)[since:]
    for worker in range(host.gpus):
        for t in range(since, host.seconds):
            for k in range(4):
                dur = host.rng.lognormal(np.log(24), 0.4) * MS
                host.stall(t + 0.15 + 0.2 * k, "run_queue", worker, dur_ns=dur, reason=reason)


def _slow_calls(host, us, since=AT):
    for stream in host.streams:
        timed = ~np.isnan(stream["launch_call_ns"][since:])
        stream["launch_call_ns"][since:][timed] = us * 1e3 * (1 + 0.1 * host.rng.normal(size=timed.sum()))


@planted("cpu_saturated", "host", order=[(0, "host", "runnable"), (2, "stream", "mean_bubble")])
def busy_loops(host):
    """A build runs on all 32 CPUs: three runnable threads for each; launching threads wait, launch calls take long."""
    host.demand.host_s[AT + 2 :] = 0.06
    yield
    host.host["cpu_busy_pct"][AT:] = 99.6
    host.host["runnable"][AT:] = 96.0 + host.rng.poisson(4, host.seconds - AT)
    host.host["psi_cpu_some_pct"][AT:] = 88 + 3 * host.noise(1.0)[AT:]
    host.host["load1"][AT:] = 2 + 94 * (1 - np.exp(-np.arange(host.seconds - AT) / 60))
    for table in host.cgroups.values():
        table["cpu_pressure_pct"][AT:] = 60
    _late(host, 22, "preempted", AT + 2)
    _slow_calls(host, 31, AT + 2)


@planted("process_starved", "VLLM::Worker 4242")
def one_busy_loop_beside(host):
    """A busy loop shares the one CPU that worker 4242 is pinned to; all others are free."""
    host.demand.host_s[AT + 2 :] = 0.06
    yield
    table = host.processes[4242]
    table["run_delay_pct"][AT:] = 47 + 4 * host.noise(1.0)[AT:]
    table["cpu_pct"][AT:] = 50
    table["forced_switches_per_s"][AT:] = 110
    host.host["cpu_busy_pct"][AT:] += 3
    for t in range(AT + 1, host.seconds):
        for k in range(4):
            host.stall(
                t + 0.15 + 0.2 * k,
                "run_queue",
                0,
                dur_ns=host.rng.lognormal(np.log(22), 0.4) * MS,
                reason="preempted",
            )


@planted("cpu_quota_throttling", POD)
def quota(host):
    """Someone sets a CPU limit of 2 cores on the pod: it stands still for a part of each 100 ms."""
    host.demand.host_s[AT + 1 :] = 0.055
    yield
    table = host.cgroups[POD]
    table["cpu_quota_cores"] = np.where(np.arange(host.seconds) >= AT, 2.0, np.nan)
    table["cpu_cores"][AT:] = 1.99
    table["throttled_pct"][AT:] = np.clip(41 + 4 * host.noise(1.0)[AT:], 0, 100)
    table["throttled_periods_pct"][AT:] = 92
    for group in (POD, SLICE):
        host.cgroups[group]["cpu_pressure_pct"][AT:] = 45
    _late(host, 30, "CPU limit", AT + 1)


@planted("cpu_stolen", "host", order=[(0, "host", "cpu_steal"), (2, "stream", "mean_bubble")])
def stolen(host):
    """The hypervisor runs other machines on these CPUs: a quarter of the time is gone, run queues grow."""
    host.demand.host_s[AT + 2 :] = 0.055
    yield
    host.host["cpu_steal_pct"][AT:] = np.clip(24 + 3 * host.noise(1.0)[AT:], 0, 100)
    host.host["cpu_busy_pct"][AT:] += 20
    host.host["psi_cpu_some_pct"][AT:] = 22 + 3 * host.noise(1.0)[AT:]
    _late(host, 12, "runnable", AT + 2)
    _slow_calls(host, 26, AT + 2)


@planted(
    "memory_pressure",
    "host",
    order=[
        (0, "host", "mem_available"),
        (55, "host", "swap_out"),
        (60, "stream", "mean_bubble"),
        (None, "request", "ttft"),
    ],
)
def swapping(host):
    """A process on the host grows until pages go to swap; serving processes fault them back in from the disk."""
    host.demand.host_s[AT + 60 :] = 0.09
    yield
    n = host.seconds - AT
    fall = np.concatenate(
        (host.host["mem_available_b"][:AT], np.maximum(196e9 - np.arange(n) * 3.2e9, 1.2e9))
    )
    host.host["mem_available_b"] = fall
    begin = AT + 55
    for name, level in (
        ("swap_in_bps", 4.4e7), ("swap_out_bps", 7.5e7), ("psi_memory_some_pct", 34), ("psi_memory_full_pct", 14),
        ("psi_io_some_pct", 46), ("psi_io_full_pct", 30), ("direct_reclaim_pages_per_s", 61_000), ("major_faults_per_s", 2_100),
        ("disk_read_bps", 5e7), ("disk_write_bps", 8e7), ("cpu_iowait_pct", 9),
    ):  # fmt: skip
        host.host[name][begin:] = np.maximum(level * (1 + host.noise(0.12)[begin:]), 0)
    host.host["swap_used_b"][begin:] = np.arange(host.seconds - begin) * 6e7
    for worker in range(2):
        for t in range(begin + 2, host.seconds):
            for k in range(3):
                host.stall(t + 0.2 + 0.25 * k, "off_cpu", worker, dur_ns=host.rng.lognormal(np.log(40), 0.5) * MS,
                           reason="uninterruptible: I/O, page fault or driver")  # fmt: skip


@planted("oom_kill", "host")
def killed_for_memory(host):
    """A job takes all memory within a second: the kernel kills a worker, the engine is gone for a minute."""
    _killed(host)
    yield
    host.host["mem_available_b"] = np.where(
        np.arange(host.seconds) == AT - 1, 4e8, host.host["mem_available_b"]
    )
    _gone(host)


@planted(
    "cgroup_memory_near_limit",
    POD,
    at=AT - 40,
    order=[(-90, "cgroup", "mem_used"), (40, "request", "failed")],
)
def pod_at_its_memory_limit(host):
    """Memory of the pod grows to its limit within two minutes; the kernel kills a worker, the engine is gone for a minute."""
    _killed(host)
    yield
    table = host.cgroups[POD]
    table["mem_limit_b"] = 99e9
    grown = np.clip((np.arange(host.seconds) - AT + 130) / 130, 0, 1) * (np.arange(host.seconds) < AT)
    table["mem_used_b"] = table["mem_used_b"] + grown * 80.9e9
    table["oom_kills"][AT:] = 1
    _gone(host)


def _killed(host):
    host.demand.halted[AT : AT + 60] = 1.0


def _gone(host):
    """What is seen while the engine is not there: errors, no figures, idle GPUs."""
    host.host["oom_kills"][AT:] = 1
    for request in host.requests:
        if AT < request["t_s"] < AT + 90:
            request |= {
                "outcome": "transport_error",
                "status": np.nan,
                "error": "connection reset",
                "ttft_ns": np.nan,
            }
    _refuse(host)
    for name in ("running", "waiting", "output_tps", "input_tps"):
        host.engine[name][AT : AT + 60] = np.nan
    for table in host.gpu:
        for name in ("sm_util_pct", "gpu_busy_pct", "hbm_bw_pct"):
            table[name][AT : AT + 60] = 0


def _refuse(host):
    """While the engine is gone connections are refused."""
    for t in host.rng.uniform(AT + 1, AT + 60, 110).tolist():
        host.requests.append({
            "t_s": t, "source": "proxy", "start": "sent upstream", "endpoint": "/v1/chat/completions", "model": "llama-70b",
            "label": "chat", "outcome": "transport_error", "error": "connection refused", "e2e_ns": 1e6, "retry": 0.0,
        })  # fmt: skip
