"""Thresholds of the rules about GPUs and the links between them."""

from __future__ import annotations

from collections.abc import Mapping

from opusmon.triage.limit import Limit
from opusmon.triage.severity import CRIT, NOTE, WARN

_OWN = "this project's own choice"

LIMITS: Mapping[str, Limit] = {
    "count_gap_s": Limit(
        60, "s", "counts of errors and kills read further apart are not compared: when they grew is not known"
    ),
    "gpu_in_a_row": Limit(3, "samples", "one sample of a rate at the edge of a phase is not a state"),
    "hbm_bw_pct": Limit(
        95,
        "%",
        "of the theoretical peak; a plain copy reaches 88 % on an H200 (measured), so memory itself is the limit",
    ),
    "contended_hbm_pct": Limit(
        50,
        "%",
        "of the peak, with two programs at work that take turns: a copy that reads 87 % alone reads 54-60 % beside an "
        "engine that needs 15 % (H200, measured)",
    ),
    "contended_sm_pct": Limit(
        5, "%", "of the SMs' time by NVML, of each program: less is a monitor or one at rest"
    ),
    "hbm_used_note_pct": Limit(
        95, "%", "engines reserve 90-95 % on purpose: what lies above was not planned by most"
    ),
    "hbm_used_warn_pct": Limit(98, "%", "under 3 GiB left of an H200's 140: workspaces and graphs take that"),
    "hbm_used_crit_pct": Limit(99.5, "%", "the next allocation is likely to fail"),
    "hbm_filling_from_pct": Limit(
        80,
        "%",
        "below it growth is normal; a model being loaded passes from here to its pool within the window",
    ),
    "hbm_filling_window_s": Limit(
        120, "s", "loading at 0.5 GB/s takes 42 s from 80 to 95 % of an H200: growth for longer is no loading"
    ),
    "hbm_filling_step_pct": Limit(
        0.2, "%", "from quarter to quarter of the window: 0.3 GB of an H200; a pool at rest moves by none"
    ),
    "hbm_full_warn_s": Limit(1800, "s", "time left in which someone can act: " + _OWN),
    "hbm_full_crit_s": Limit(300, "s", "time left to drain a server: " + _OWN),
    "l2_miss_pct": Limit(50, "%", "half of the requests go on to HBM: " + _OWN),
    "l2_miss_rise_pct": Limit(10, "%", "points above the minute before; working sets move by less: " + _OWN),
    "l2_slower_ratio": Limit(1.5, "", "waits or launch calls against the minute before: " + _OWN),
    "l2_recent_s": Limit(10, "s", "what is compared with the minute before"),
    "l2_before_s": Limit(60, "s", "the range before"),
    "throttle_share_pct": Limit(
        10, "%", "of a sample's time; the power cap at work holds back 100 % of it (H200, measured)"
    ),
    "throttle_brief_pct": Limit(
        0.1, "%", "hardware limits are never normal: any time above the counter's grain counts"
    ),
    "throttle_power_long_s": Limit(
        300, "s", "a batch of prefills is over by then: the cap costs throughput for good: " + _OWN
    ),
    "gpu_clock_low_pct": Limit(
        75, "%", "of the highest SM clock; an H200 under its power cap still ran at 74-79 % (measured)"
    ),
    "gpu_busy_sm_pct": Limit(50, "%", "SMs busy: a GPU at work raises its clock within a second"),
    "blind_busy_pct": Limit(50, "%", "kernels run for half of the time: someone launches them"),
    "blind_s": Limit(15, "s", "no launch, wait or copy seen for so long; decode steps are 10-20 ms apart"),
    "idle_sm_pct": Limit(
        20,
        "%",
        "an engine with requests in its queue that keeps no GPU busier than this is held up elsewhere",
    ),
    "idle_waiting": Limit(1, "requests", "one that waits is enough when no GPU works"),
    "idle_no_token_s": Limit(2, "s", "MLPerf allows 2 s to the first token at p99 (Llama 2 70B, server)"),
    "pcie_replays_per_min": Limit(
        8, "1/min", "the most that NVIDIA's driver team recommends, as DCGM's health check has it"
    ),
    "nvlink_busy_pct": Limit(
        20, "%", "of a link's line rate; below it small messages spread unevenly without harm: " + _OWN
    ),
    "nvlink_hot_ratio": Limit(
        2, "", "times the median link; a peer copy loads 18 links within 1 % (measured)"
    ),
    "nvlink_hot_share_pct": Limit(25, "%", "of the links: more of them are a pattern, not hot links"),
    "nvlink_uneven_ratio": Limit(0.5, "", "least against busiest link, as the screen calls even"),
    "nvlink_full_pct": Limit(
        80, "%", "of the line rate; a peer copy reaches 84 % (22.2 of 26.6 GB/s, measured)"
    ),
    "nvlink_line_bps": Limit(
        26.562e9, "B/s", "NVLink 4 as NVML gives it on an H200; only where a link gives no speed"
    ),
}
"""Name to limit."""

_NOTES = (45, 63, 160)
_CRITS = (46, 48, 56, 57, 58, 61, 62, 64, 74, 79, 92, 95, 110, 119, 120, 122, 123, 136, 140, 143, 158)

XID_SEVERITY: Mapping[int, int] = {**dict.fromkeys(_NOTES, NOTE), **dict.fromkeys(_CRITS, CRIT)}
"""Severity by XID, by what the vendor's catalogue asks for: nothing now or a consequence of another one (note), a
reset, a reboot or a replaced part (critical). All others (`XID_OTHER`) end one program or say that they may be harmless."""

XID_OTHER = WARN
