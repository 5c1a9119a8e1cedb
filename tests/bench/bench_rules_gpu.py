"""What the rules about GPUs and the host cost live: one look over the last minutes, as it is made each second.

    .venv/bin/python tests/bench/bench_rules_gpu.py

Two minutes of 8 GPUs with 18 links each, 100 streams, 16 processes, 8 control groups and an engine, calm and with all
at once wrong; the goal is under 5 ms. Then a day of 8 GPUs (without links) in pieces, as a file is looked at.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from opusmon.channels import BY_NAME
from opusmon.clock import NS, Anchors
from opusmon.schema import Batch, StringTable
from opusmon.triage import run
from opusmon.triage.scene import Scene
from opusmon.window import Window

MINE = ("rules_gpu", "rules_gpu_health", "rules_gpu_work", "rules_nvlink", "rules_host")
ROUNDS = 40
CALM = {
    "gpu": {
        "gi": -1,
        "mem_total_b": 150e9,
        "mem_used_b": 135e9,
        "hbm_bw_pct": 60,
        "gpu_busy_pct": 95,
        "sm_util_pct": 80,
        "power_mw": 600e3,
        "sm_clock_mhz": 1900,
        "throttle_mask": 0,
        **dict.fromkeys(
            ("throttle_power_ns", "throttle_sync_ns", "throttle_sw_thermal_ns", "throttle_hw_thermal_ns"), 5e9
        ),
        **dict.fromkeys(("throttle_brake_ns", "ecc_uncorrected", "remap_pending", "remap_failed"), 0),
    },
    "nvlink": {"tx_bps": 15e9, "rx_bps": 15e9, "state": 1, "speed_bps": 26.562e9, "crc_errors": 0},
    "l2": {"l2_hit_pct": 60},
    "stream": {"launches": 100, "waits": 20, "wait_ns": 1e7},
    "host": {"cpus": 128, "runnable": 40, "psi_cpu_some_pct": 3, "cpu_busy_pct": 30, "oom_kills": 0},
    "cgroup": {"throttled_pct": 0, "mem_limit_b": 64e9, "mem_used_b": 30e9, "oom_kills": 0},
    "process": {"run_delay_pct": 1, "cpu_pct": 100},
    "engine": {"waiting": 0, "running": 30},
    "gpu_device": {"gi": -1, "max_sm_clock_mhz": 1980},
}
WRONG = {
    "gpu": {
        "mem_used_b": 149e9,
        "hbm_bw_pct": 97,
        "sm_util_pct": 70,
        "sm_clock_mhz": 1200,
        "throttle_mask": 0x4,
        "ecc_uncorrected": 3,
        "remap_pending": 1,
    },
    "host": {"psi_cpu_some_pct": 50, "psi_memory_some_pct": 20},
    "cgroup": {"throttled_pct": 20, "mem_used_b": 63.5e9},
    "process": {"run_delay_pct": 30},
    "engine": {"waiting": 9},
}
SERIES = {"gpu": 8, "nvlink": 144, "l2": 8, "stream": 100, "host": 1, "cgroup": 8, "process": 16, "engine": 1}


def rows(channel: str, count: int, seconds: int, changes: dict, step_s: int = 1) -> np.ndarray:
    """`count` series of a channel, a row each every `step_s`."""
    kind = BY_NAME[channel]
    out = np.zeros(count * (seconds // step_s), kind.dtype)
    place = np.arange(len(out))
    for field in kind.fields:
        if field.dtype in ("<f4", "<f8"):
            out[field.name] = np.nan
    # As read: the links of a GPU together, one GPU a little after the other.
    own = place % count
    gpu = own // 18 if channel == "nvlink" else own
    out["t"] = (place // count + 1) * step_s * NS + gpu * 1_000_000
    for name, value in {**CALM[channel], **changes.get(channel, {}), "dt_ns": step_s * NS}.items():
        if name in out.dtype.names:
            out[name] = value
    if channel == "nvlink":
        out["gpu"], out["link"] = own // 18, own % 18
        if changes:
            out["tx_bps"] = np.where(own % 18 == 7, 23e9, 6e9)
    else:
        out[kind.key[0] if kind.key else "dt_ns"] = own + 1 if channel != "host" else NS
    return out


def session(seconds: int, changes: dict, leave: tuple[str, ...] = ()) -> Window:
    view = Window(StringTable(), Anchors(), keep_ns=10**15, cap_b=2**40)
    for channel, count in SERIES.items():
        if channel not in leave:
            view.push(Batch(BY_NAME[channel], rows(channel, count, seconds, changes)))
    view.push(Batch(BY_NAME["gpu_device"], rows("gpu_device", 8, seconds, changes, 60)))
    return view


def timed_ms(call, rounds: int = ROUNDS) -> float:
    took = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        took.append((time.perf_counter() - start) * 1e3)
    return statistics.median(took)


def main() -> None:
    run.MODULES = MINE
    names = list(run.rules())
    for label, changes in (("calm", {}), ("all at once wrong", WRONG)):
        view = session(120, changes)
        found = run.look(view, view.t1 - 120 * NS, view.t1)
        whole = timed_ms(lambda view=view: run.look(view, view.t1 - 120 * NS, view.t1))
        print(f"{label}: {len(names)} rules, {len(found)} findings, {whole:.2f} ms a look (goal 5)")
        scene = Scene(view, view.t1 - 120 * NS, view.t1)
        costs = {
            name: timed_ms(lambda name=name, scene=scene: list(run.RULES[name].find(scene))) for name in names
        }
        for name, ms in sorted(costs.items(), key=lambda one: -one[1])[:6]:
            print(f"  {name:28s} {ms:6.3f} ms")
    day = session(86_400, {}, ("nvlink", "stream", "process"))
    start = time.perf_counter()
    run.look_over(day, day.t0 - 1, day.t1)
    print(f"a day of 8 GPUs in pieces: {time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    main()
