"""Rules about a GPU's memory: its bandwidth, and how much of it is left."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from opusmon.channels import KEYFRAME_NS, WHOLE_GPU
from opusmon.clock import NS
from opusmon.schema import Rows
from opusmon.times import format_duration
from opusmon.triage.episodes import Times
from opusmon.triage.finding import Evidence, Finding
from opusmon.triage.scene import Scene, rule
from opusmon.triage.severity import CRIT, NOTE, WARN
from opusmon.triage.sustained import Floats, Spell, floats, newest_at, number, spells

GIB = 1024**3
_KEY = ("gpu", "gi")
_PARTS = 4
"""Of the window in which memory has to grow. One step, however large, raises the median of two parts at most."""


def gpu_name(gpu: int, gi: int = WHOLE_GPU) -> str:
    """Subject of a finding: "gpu 0", or "gpu 0 gi 3" for a MIG GPU instance."""
    return f"gpu {gpu}" if gi == WHOLE_GPU else f"gpu {gpu} gi {gi}"


def _used_pct(rows: Rows) -> Floats:
    total = floats(rows, "mem_total_b")
    return 100 * floats(rows, "mem_used_b") / np.where(total > 0, total, np.nan)


def device_at(scene: Scene, gpu: int, gi: int, t: int) -> np.void | None:
    """What is known of a device at `t` (monotonic ns): its row of `gpu_device`, repeated every 60 s."""
    for key, rows in scene.series("gpu_device", *_KEY, lookback_ns=2 * KEYFRAME_NS):
        if key == (gpu, gi):
            return newest_at(rows, t, 2 * KEYFRAME_NS)
    return None


# -- memory ------------------------------------------------------------------------------------------------------


@rule("gpu")
def hbm_bandwidth_saturated(scene: Scene) -> Iterator[Finding]:
    """HBM bandwidth is used up: three samples in a row over 95 % of its peak.

    Threshold: `hbm_bw_pct`. GPM's share of the theoretical bandwidth; single samples over it are read at times in the
    middle of a copy that runs at 88 % (H200, measured), which is why it takes several.
    """
    limit, count = scene.limits["hbm_bw_pct"], int(scene.limits["gpu_in_a_row"])
    if not (floats(scene.rows("gpu"), "hbm_bw_pct") >= limit).any():
        return
    for key, rows in scene.series("gpu", *_KEY):
        share = floats(rows, "hbm_bw_pct")
        for one in spells(scene, rows, share >= limit, share, count=count):
            yield one.finding(
                "hbm_bandwidth_saturated",
                gpu_name(*key),
                WARN,
                title=f"HBM bandwidth of {gpu_name(*key)} at {one.weight:.1f} % of its peak",
                evidence=(
                    Evidence("hbm_bw_pct", one.weight, "%", limit),
                    Evidence("hbm_bw_bps", number(one.row, "hbm_bw_bps"), "B/s"),
                    Evidence("sm_util_pct", number(one.row, "sm_util_pct"), "%"),
                ),
                cause="kernels likely wait for memory: decoding a large batch, long contexts, or copies",
                next="compare with tokens/s: more requests gain nothing now; look for copies among the GPU's processes",
            )


@rule("gpu")
def hbm_nearly_full(scene: Scene) -> Iterator[Finding]:
    """HBM is nearly full, beyond what engines reserve on purpose.

    Thresholds: `hbm_used_note_pct`, `hbm_used_warn_pct`, `hbm_used_crit_pct`. An engine's pool at 90 % says nothing.
    """
    limits = scene.limits
    note, count = limits["hbm_used_note_pct"], int(limits["gpu_in_a_row"])
    if not (_used_pct(scene.rows("gpu")) >= note).any():
        return
    for key, rows in scene.series("gpu", *_KEY):
        used = _used_pct(rows)
        for one in spells(scene, rows, used >= note, used, count=count):
            steps = (limits["hbm_used_warn_pct"], limits["hbm_used_crit_pct"])
            severity = NOTE + sum(one.weight >= step for step in steps)
            total_b, used_b = number(one.row, "mem_total_b"), number(one.row, "mem_used_b")
            left = f"{(total_b - used_b) / GIB:.1f} GiB left"
            yield one.finding(
                "hbm_nearly_full",
                gpu_name(*key),
                severity,
                title=f"HBM of {gpu_name(*key)} {one.weight:.1f} % full, {left}",
                evidence=(
                    Evidence("mem_used_pct", one.weight, "%", (note, *steps)[severity - NOTE]),
                    Evidence("mem_used_b", used_b, "B"),
                    Evidence("mem_total_b", total_b, "B"),
                ),
                cause="likely an engine's pool set too large, or a second program on the GPU; a pool that stands still "
                "is at rest and only leaves no room for more",
                next="see which process holds it (gpu pane), then lower the engine's share of memory",
            )


@rule("gpu", lookback_s=240)
def hbm_filling(scene: Scene) -> Iterator[Finding]:
    """HBM grows towards full, with the time that is left.

    Thresholds: `hbm_filling_*`, `hbm_full_warn_s`, `hbm_full_crit_s`. The slope is that between the medians of the
    first and the last quarter of a window that lies above `hbm_filling_from_pct` as a whole and rises from quarter to
    quarter: a model being loaded is through sooner, and an engine's pool that fills to 90 % and stays has no slope.
    """
    least, count = scene.limits["hbm_filling_from_pct"], int(scene.limits["gpu_in_a_row"])
    if not (_used_pct(scene.rows("gpu")) >= least).any():
        return
    for key, rows in scene.series("gpu", *_KEY):
        used = _used_pct(rows)
        rows, used = rows.compress(~np.isnan(used)), used[~np.isnan(used)]
        if not (used >= least).any() or np.ptp(used) < (_PARTS - 1) * scene.limits["hbm_filling_step_pct"]:
            continue
        slope = _slopes(rows["t"], used, scene)
        with np.errstate(divide="ignore", invalid="ignore"):
            left_s = np.where(slope > 0, (100 - used) / slope, np.inf)
        for one in spells(scene, rows, left_s <= scene.limits["hbm_full_warn_s"], -left_s, count=count):
            yield _filling(scene, key, one, float(slope[one.place]))


def _slopes(t: Times, used_pct: Floats, scene: Scene) -> Floats:
    """Growth in percent of the memory per second over the window that ends at each sample; 0 where it is none."""
    slope = np.zeros(len(t))
    limits = scene.limits
    window_s = limits["hbm_filling_window_s"]
    step_s = float(np.median(np.diff(t))) / NS if len(t) > 1 else 0.0
    part = round(window_s / _PARTS / step_s) if step_s else 0
    n = _PARTS * part
    if part < 1 or len(t) < n:
        return slope
    middles = np.median(sliding_window_view(used_pct, part), axis=1)
    count = len(t) - n + 1
    by_part = np.stack([middles[place * part :][:count] for place in range(_PARTS)])
    rises = (np.diff(by_part, axis=0) >= limits["hbm_filling_step_pct"]).all(axis=0)
    above = sliding_window_view(used_pct, n).min(axis=1) >= limits["hbm_filling_from_pct"]
    whole = t[n - 1 :] - t[:count] <= 1.1 * window_s * NS
    growth = (by_part[-1] - by_part[0]) / (window_s * (_PARTS - 1) / _PARTS)
    slope[n - 1 :] = np.where(whole & rises & above, growth, 0.0)
    return slope


def _filling(scene: Scene, key: tuple[int, ...], one: Spell, slope_pct: float) -> Finding:
    row, left_s = one.row, -one.weight
    total_b, used_b = number(row, "mem_total_b"), number(row, "mem_used_b")
    growth_bps = slope_pct / 100 * total_b
    return one.finding(
        "hbm_filling",
        gpu_name(*key),
        CRIT if left_s <= scene.limits["hbm_full_crit_s"] else WARN,
        title=f"HBM of {gpu_name(*key)} full in {format_duration(int(left_s * NS))}: {100 * used_b / total_b:.1f} % used, "
        f"{growth_bps * 60 / GIB:.2f} GiB more a minute",
        evidence=(
            Evidence("time_left_s", left_s, "s", scene.limits["hbm_full_warn_s"]),
            Evidence("growth_bps", growth_bps, "B/s"),
            Evidence("mem_used_b", used_b, "B"),
            Evidence("mem_total_b", total_b, "B"),
        ),
        cause="likely a program that keeps what it allocates: growing caches, tensors held, a second program loading",
        next="see which process grows (gpu pane, processes); restart it before the memory is out",
    )
