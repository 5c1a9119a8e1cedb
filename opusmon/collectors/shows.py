"""What the panes show, in words: for panes that have nothing to show. Apart, so that saying it imports no collector."""

from __future__ import annotations

from opusmon.jit_words import JIT, WORDS

LATENCY: tuple[str, ...] = (
    "TTFT, ITL and E2E: p50, p95 and p99, and a heat map over time",
    "requests running and waiting, KV cache use, prefix hits, tokens per second",
    "errors, retries and truncated answers by share",
    "SLO burn rate and the budget that is left",
)

GPU: tuple[str, ...] = (
    "memory, HBM bandwidth, SM activity, power, temperature and clocks of each GPU",
    "NVLink and PCIe traffic, link by link",
    "throttling, XIDs, ECC errors and row remaps",
    "the processes on the GPUs and what they hold",
)

STREAMS: tuple[str, ...] = (
    "kernel launches, graph launches and copies per second, per process and stream",
    "time the host waits for each stream, in ms per second",
    "bubbles: time in which a stream had no work queued",
    "a lane per stream over the span shown",
)

STALLS: tuple[str, ...] = (
    "sync waits over 5 ms, with process, thread and stream",
    "off-CPU time and run-queue latency of the watched threads",
    "CUDA graph captures that fail, with the call that broke them",
    f"{WORDS[JIT]}: ptxas and its parent process",
    "a histogram of durations",
)
