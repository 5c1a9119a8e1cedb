"""Thresholds of the rules about CUDA streams and stalls. How bad a single stall is says `severity.STALL_LIMITS`."""

from __future__ import annotations

from collections.abc import Mapping

from opusmon.triage.limit import Limit

_OWN = "this project's own choice"

LIMITS: Mapping[str, Limit] = {
    "launch_call_us": Limit(
        12.8,
        "us",
        "mean of a launch call; a launch-bound loop on an H200 takes 10.8 us a launch, 12.0 to 12.5 us while each is "
        "counted (measured); `opusmon calibrate` proposes a value for this host",
    ),
    "launch_call_crit_us": Limit(
        100, "us", "400 launches of a decode step then take the 40 ms that MLPerf allows per token"
    ),
    "launch_share_pct": Limit(
        2,
        "%",
        "of the time spent in launch calls; 150 calls a second of 15 us take 0.2 % (H200, measured): " + _OWN,
    ),
    "launch_in_a_row": Limit(3, "samples", "a burst that is timed may meet code being loaded, once"),
    "launch_full_gpu_pct": Limit(
        80, "%", "GPU this busy: launch calls wait for room in its queue, which is no host problem: " + _OWN
    ),
    "graph_before_per_s": Limit(1, "1/s", "graph launches of a process that replays graphs: " + _OWN),
    "graph_fall_ratio": Limit(
        0.25,
        "",
        "share of graphs among launches, and their rate, after against before: prompts between decode steps lower the "
        "share only: " + _OWN,
    ),
    "graph_plain_rise_ratio": Limit(
        1.5, "", "plain launches a second, after against before; less load lowers both kinds: " + _OWN
    ),
    "bubble_pct": Limit(25, "%", "time from the end of a wait to the next launch: a quarter: " + _OWN),
    "bubble_mean_ms": Limit(
        40, "ms", "longer gaps on average are pauses between requests; MLPerf allows 40 ms per token"
    ),
    "bubble_gpu_pct": Limit(
        50, "%", "GPU less busy than this: it lies idle in the gaps; another stream may fill them: " + _OWN
    ),
    "bubble_in_a_row": Limit(3, "samples", "one sample at the edge of a phase is not a state"),
    "wait_share_pct": Limit(80, "%", "of the time in waits: the host has little else to do: " + _OWN),
    "wait_in_a_row": Limit(3, "samples", "one sample holds the whole of a wait that ended in it"),
    "wait_busy_gpu_pct": Limit(
        80, "%", "GPU busier than this: what is waited for is being worked on: " + _OWN
    ),
    "wait_idle_gpu_pct": Limit(
        20, "%", "GPU less busy than this: it is not kernels that are waited for: " + _OWN
    ),
    "stall_some": Limit(3, "stalls", "in a minute, from 10 ms on: less happens on any host: " + _OWN),
    "stall_often": Limit(
        10, "stalls", "in a minute, from 10 ms on: over one token in a hundred at 20 tokens a second is late"
    ),
    "stall_share_pct": Limit(5, "%", "of a minute: takes that much of the throughput of one GPU: " + _OWN),
    "alloc_storm": Limit(
        100, "calls", "in a minute after warm-up, when a caching allocator takes hardly any: " + _OWN
    ),
    "warm_age_s": Limit(300, "s", "a process this old serves: as the stalls collector judges it"),
    "warm_quiet_s": Limit(
        20, "s", "so does one that launched for so long without loading or compiling code: likewise"
    ),
}
