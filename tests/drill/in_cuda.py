"""Causes in what the serving processes ask of CUDA."""

from __future__ import annotations

import numpy as np

from drill.host import HANDLES, MS
from drill.library import AT, planted


@planted(
    "stalled_thread",
    "waiting for the GPU",
)
def sync_stall(host):
    """Each step waits for a whole context 180 ms while the GPU has nothing to do: an event that is recorded too late."""
    host.demand.host_s[AT:] = 0.18
    yield
    for worker, stream in enumerate(host.streams):
        waits = stream["waits"]
        stream["wait_ns"][AT:] += 180 * MS * waits[AT:]
        stream["wait_max_ns"][AT:] = 195 * MS
        stream["bubble_ns"][AT:] = 1.6 * MS * waits[AT:]
        for t in range(AT, host.seconds):
            for k in range(4):
                host.stall(t + 0.2 + 0.19 * k, "wait", worker, dur_ns=host.rng.normal(183, 4) * MS, code=0, call="cuCtxSynchronize",
                           reason="waiting for the GPU", stack="engine_step;cuCtxSynchronize")  # fmt: skip


@planted("capture_aborted", "cuMemAlloc_v2", order=[(0, "stall", "capture"), (2, "stream", "launches")])
def capture_broken_by_a_thread(host):
    """A graph is captured anew; another thread allocates meanwhile: 901, and the engine goes on without graphs."""
    host.demand.host_s[AT + 2 :] = 0.055
    yield
    for worker in range(2):
        host.stall(AT + 0.5, "capture", worker, dur_ns=8 * MS, call="cuStreamEndCapture", code=901, stream=HANDLES[worker],
                   reason="aborted: invalidated by an earlier error", by_tid=4299, by_thread="loader", by_call="cuMemAlloc_v2",
                   by_code=900, before="cuStreamBeginCapture; cuLaunchKernel")  # fmt: skip
        _eager(host, worker, AT + 2)


def _eager(host, worker, since):
    """Graphs are replayed no more; each step is launched kernel by kernel."""
    stream = host.streams[worker]
    steps = host.served.steps[since:]
    known = ~np.isnan(stream["launches"][since:])
    stream["launches"][since:] = np.where(
        known, (steps * 640 + host.served.prefills[since:] * 520).round(), np.nan
    )
    stream["graph_launches"][since:] = 0


@planted("graph_fallback", "VLLM::Worker")
def fallback_to_eager(host):
    """Batches over the largest captured graph: steps are launched kernel by kernel, and the GPU waits for the host."""
    host.demand.host_s[AT:] = 0.06
    yield
    for worker in range(2):
        _eager(host, worker, AT)


@planted(
    "jit_while_serving",
    "VLLM::Worker",
    at=AT,
    until=AT + 60,
    order=[(0, "stall", "jit"), (8, "stall", "module")],
)
def compiling_while_serving(host):
    """A new shape: Triton compiles four kernels for seconds each, the engine stands still, code is loaded, the disk is read."""
    for k in range(4):
        host.demand.halted[AT + 12 * k : AT + 12 * k + 8] = 0.97
    yield
    for k in range(4):
        begin = AT + 12 * k
        for worker in range(2):
            host.stall(begin + 7.9, "jit", worker, dur_ns=7.6e9, call="ptxas", code=0, reason="compiles")
            host.stall(
                begin + 8.0, "module", worker, dur_ns=22 * MS, call="cuLibraryLoadData", code=0, count=2
            )
            host.stall(
                begin + 7.95, "off_cpu", worker, dur_ns=7.5e9, call="wait4", reason="waiting for a child"
            )
        host.host["cpu_busy_pct"][begin : begin + 8] += 6
        host.host["disk_read_bps"][begin] = 2e7
        for table in host.gpu:
            for name in ("sm_util_pct", "gpu_busy_pct", "hbm_bw_pct"):
                table[name][begin : begin + 8] *= 0.1


@planted("module_while_serving", "VLLM::Worker")
def loading_while_serving(host):
    """Kernels are loaded lazily in the serving path, each second for two minutes: each load waits for the device."""
    host.demand.halted[AT : AT + 120] = 0.6
    yield
    for t in range(AT, AT + 120):
        for worker in range(2):
            host.stall(
                t + 0.8,
                "module",
                worker,
                dur_ns=host.rng.normal(520, 30) * MS,
                call="cuModuleLoadData",
                code=0,
                count=5,
            )


@planted("allocation_while_serving", "VLLM::Worker")
def allocating_while_serving(host):
    """The framework empties its cache in each step: memory is freed and taken in the serving path."""
    host.demand.host_s[AT:] = 0.05
    yield
    for t in range(AT, host.seconds):
        for worker in range(2):
            host.stall(
                t + 0.7,
                "free",
                worker,
                dur_ns=host.rng.normal(240, 20) * MS,
                call="cuMemFree_v2",
                code=0,
                count=14,
            )
            host.stall(
                t + 0.8,
                "alloc",
                worker,
                dur_ns=host.rng.normal(190, 20) * MS,
                call="cuMemAlloc_v2",
                code=0,
                count=14,
                size_b=2**28,
            )


@planted("page_fault_storm", "VLLM::Worker")
def page_fault_storm(host):
    """Pinned buffers are mapped anew for each request: page faults by the hundred thousand, the launching thread waits."""
    host.demand.host_s[AT + 1 :] = 0.05
    yield
    for worker, pid in enumerate(p for p in host.processes if p != 4100):
        host.processes[pid]["minor_faults_per_s"][AT:] = 260_000 * (1 + host.noise(0.05)[AT:])
        host.processes[pid]["cpu_system_pct"][AT:] += 38
        for t in range(AT, host.seconds):
            host.stall(
                t + 0.9,
                "page_faults",
                worker,
                dur_ns=1e9,
                count=int(host.rng.normal(260_000, 9_000)),
                reason="minor",
            )
            host.stall(
                t + 0.6,
                "off_cpu",
                worker,
                dur_ns=host.rng.normal(25, 4) * MS,
                reason="uninterruptible: I/O, page fault or driver",
            )
