"""What the series of a comparison are called, in which unit, and which differences are noise of that unit.

Fields of channels that are not in the tables get words from their name and unit; so a new field, or one of another
version's file, is compared as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from opusmon.schema import Field


@dataclass(frozen=True, slots=True)
class Words:
    """Name of a quantity.

    Attributes:
        name: as in a sentence after the subject.
        plural: it "double"s, where others "doubles".
        added: a difference is told ("+640 ms") rather than a ratio.
    """

    name: str
    plural: bool = False
    added: bool = False


WORDS: Mapping[tuple[str, str], Words] = {
    ("gpu", "mem_used_b"): Words("memory in use", added=True),
    ("gpu", "hbm_bw_pct"): Words("HBM bandwidth"),
    ("gpu", "hbm_bw_bps"): Words("HBM bandwidth"),
    ("gpu", "mem_busy_pct"): Words("memory busy"),
    ("gpu", "gpu_busy_pct"): Words("GPU busy"),
    ("gpu", "sm_util_pct"): Words("SMs busy"),
    ("gpu", "sm_occupancy_pct"): Words("SM occupancy"),
    ("gpu", "tensor_pct"): Words("tensor pipes busy"),
    ("gpu", "pcie_tx_bps"): Words("PCIe TX"),
    ("gpu", "pcie_rx_bps"): Words("PCIe RX"),
    ("gpu", "nvlink_tx_bps"): Words("NVLink TX"),
    ("gpu", "nvlink_rx_bps"): Words("NVLink RX"),
    ("gpu", "power_mw"): Words("power"),
    ("gpu", "temp_c"): Words("temperature", added=True),
    ("gpu", "mem_temp_c"): Words("memory temperature", added=True),
    ("gpu", "sm_clock_mhz"): Words("SM clock", added=True),
    ("gpu", "mem_clock_mhz"): Words("memory clock", added=True),
    ("gpu", "throttle_power_ns"): Words("time held back by the power cap"),
    ("gpu", "throttle_sync_ns"): Words("time held back by sync boost"),
    ("gpu", "throttle_sw_thermal_ns"): Words("time held back by the software thermal limit"),
    ("gpu", "throttle_hw_thermal_ns"): Words("time held back by the hardware thermal limit"),
    ("gpu", "throttle_brake_ns"): Words("time held back by the power brake"),
    ("gpu", "pcie_replays"): Words("PCIe replays", plural=True),
    ("gpu", "ecc_corrected"): Words("corrected ECC errors", plural=True),
    ("gpu", "ecc_uncorrected"): Words("uncorrected ECC errors", plural=True),
    ("nvlink", "tx_bps"): Words("NVLink TX"),
    ("nvlink", "rx_bps"): Words("NVLink RX"),
    ("nvlink", "state"): Words("NVLink state"),
    ("nvlink", "speed_bps"): Words("NVLink line rate"),
    ("nvlink", "replay_errors"): Words("NVLink replays", plural=True),
    ("nvlink", "recovery_errors"): Words("NVLink recoveries", plural=True),
    ("nvlink", "crc_errors"): Words("NVLink CRC errors", plural=True),
    ("gpu_process", "mem_b"): Words("device memory", added=True),
    ("gpu_process", "sm_pct"): Words("share of the SMs"),
    ("l2", "l2_hit_pct"): Words("L2 hit rate"),
    ("l2", "l2_lookup_hit_pct"): Words("L2 lookups that hit", plural=True),
    ("l2", "l2_to_hbm_ratio"): Words("L2 to HBM ratio"),
    ("l2", "l2_bps"): Words("L2 traffic"),
    ("l2", "hbm_read_bps"): Words("HBM reads", plural=True),
    ("l2", "hbm_write_bps"): Words("HBM writes", plural=True),
    ("l2", "sm_active_pct"): Words("SMs active"),
    ("l2", "warps_active_pct"): Words("warps active"),
    ("l2", "tensor_pct"): Words("tensor pipes busy"),
    ("l2", "pcie_read_bps"): Words("PCIe RX"),
    ("l2", "pcie_write_bps"): Words("PCIe TX"),
    ("l2", "nvlink_rx_bps"): Words("NVLink RX"),
    ("l2", "nvlink_tx_bps"): Words("NVLink TX"),
    ("stream", "launches"): Words("launches", plural=True),
    ("stream", "graph_launches"): Words("graph replays", plural=True),
    ("stream", "copies"): Words("copies", plural=True),
    ("stream", "h2d_b"): Words("host to device copies", plural=True),
    ("stream", "d2h_b"): Words("device to host copies", plural=True),
    ("stream", "d2d_b"): Words("device to device copies", plural=True),
    ("stream", "waits"): Words("number of waits"),
    ("stream", "wait_ns"): Words("time in waits"),
    ("stream", "mean_wait"): Words("waits", plural=True),
    ("stream", "bubbles"): Words("number of bubbles"),
    ("stream", "bubble_ns"): Words("time in bubbles"),
    ("stream", "mean_bubble"): Words("bubbles", plural=True),
    ("stream", "launch_call_ns"): Words("launch calls", plural=True),
    ("stall", "stalls"): Words("stalls", plural=True),
    ("stall", "stall_ns"): Words("time in stalls"),
    ("gpu_event", "events"): Words("events", plural=True),
    ("host", "runnable"): Words("tasks running or waiting for a CPU", plural=True),
    ("host", "psi_cpu_some_pct"): Words("CPU pressure"),
    ("host", "psi_memory_some_pct"): Words("memory pressure"),
    ("host", "psi_io_some_pct"): Words("I/O pressure"),
    ("host", "cpu_busy_pct"): Words("CPU busy"),
    ("host", "mem_available_b"): Words("memory available", added=True),
    ("cgroup", "throttled_pct"): Words("time held back by the CPU limit"),
    ("process", "cpu_pct"): Words("CPU"),
    ("process", "run_delay_pct"): Words("time waiting for a CPU"),
    ("process", "rss_b"): Words("resident memory", added=True),
    ("engine", "running"): Words("requests running", plural=True),
    ("engine", "waiting"): Words("requests waiting", plural=True),
    ("engine", "kv_used_pct"): Words("KV cache in use", added=True),
    ("engine", "prefix_hit_pct"): Words("prefix cache hits", plural=True),
    ("engine", "preemptions"): Words("preemptions", plural=True),
    ("engine", "input_tps"): Words("prompt tokens", plural=True),
    ("engine", "output_tps"): Words("generated tokens", plural=True),
    ("engine", "finished"): Words("requests finished", plural=True),
    ("engine", "failed"): Words("requests failed", plural=True),
    ("engine", "graph_pct"): Words("decode passes as CUDA graph"),
    ("request", "rate"): Words("requests ended", plural=True),
    ("request", "failed_pct"): Words("failed requests", plural=True),
    ("request_open", "open"): Words("requests in flight", plural=True),
    ("cost", "cpu_ns"): Words("opusmon's own CPU"),
    ("cost", "call_ns"): Words("opusmon's time in calls"),
}
"""By channel and field, or derived quantity."""

LATENCIES: Mapping[str, str] = {
    "ttft": "TTFT",
    "itl": "ITL",
    "tpot": "TPOT",
    "e2e": "E2E",
    "queue": "queue time",
    "prefill": "prefill",
    "decode": "decode",
}

OMIT = re.compile(
    r"dt_ns|tid|pid|age_ns|since_\w+|wait_(lt|ge)_\w+|\w+_max_ns|timed_launches|throttle_mask|mem_total_b|\w+_n"
    r"|kv_used_max_pct|restarts|scrape_ns|\w+_sum_s|late|slowest_ns|calls|code|number"
)
"""Fields that are identity, a bit mask, an extreme or part of a mean: they tell nothing of their own here."""

PER_SECOND = frozenset(
    {
        *("launches", "graph_launches", "copies", "h2d_b", "d2h_b", "d2d_b", "other_b", "waits", "wait_ns"),
        *("bubbles", "bubble_ns", "not_ready", "preemptions", "finished", "failed", "cpu_ns", "call_ns"),
    }
)
"""Sums over the row's interval, in `stream`, `engine` and `cost`: divided by its length."""

_CUMULATIVE = re.compile(r"\bcumulative\b|\bsince (boot|the driver loaded|it was made)\b")
_UNITS = ("bps", "pct", "ns", "mhz", "mw", "tps", "s", "b", "c")

FLOORS: Mapping[str, float] = {
    "%": 1.0,  # NVML and GPM round to whole per cent or nearly
    "C": 1.0,  # sensors read whole degrees
    "MHz": 15.0,  # clocks go in steps of 15 MHz
    "mW": 3000.0,  # an idle H200 wanders by as much
    "B": 16.0 * 1024**2,  # allocators take memory in blocks of 2 to 20 MiB
    "B/s": 1e6,
    "ns": 500.0,
    "ns/s": 1e6,  # 1 ms in each second
    "s": 2e-3,
    "1/s": 0.25,
    "": 0.05,
}
"""Scatter that a unit always has; differences under twice of it are no change."""
LATENCY_FLOOR_NS = 2e6
"""Of requests: under 2 ms nobody feels it."""


def words(channel: str, quantity: str) -> Words:
    """Name of a field or derived quantity; unknown ones from their own name without the unit."""
    known = WORDS.get((channel, quantity))
    if known is not None:
        return known
    stem, _, last = quantity.rpartition("_")
    if stem in LATENCIES:
        return Words(f"{LATENCIES[stem]} {last}", added=True)
    plain = quantity
    for unit in _UNITS:
        plain = plain.removesuffix(f"_{unit}")
    return Words(plain.removesuffix("_per_s").replace("_", " "))


_FAMILIES: Mapping[str, tuple[str, int]] = {
    "mean_wait": ("wait", 0),
    "wait_ns": ("wait", 1),
    "waits": ("wait", 2),
    "mean_bubble": ("bubble", 0),
    "bubble_ns": ("bubble", 1),
    "bubbles": ("bubble", 2),
    "stall_ns": ("stall", 0),
    "stalls": ("stall", 1),
}
_STATISTICS = {"p95": 0, "p50": 1, "mean": 2}


def family(channel: str, quantity: str) -> tuple[str, int]:
    """What a quantity is a form of, and which form is told first: the p95 of a latency, the mean of waits.

    The same quantity in two channels (the traffic of `gpu` and of `l2`, the sum over links and each link) is one
    family.
    """
    if quantity in _FAMILIES:
        return _FAMILIES[quantity]
    stem, _, last = quantity.rpartition("_")
    if last in _STATISTICS:
        return stem, _STATISTICS[last]
    order = {"gpu": 0, "engine_bucket": 0, "l2": 3}.get(channel, 1)
    return words(channel, quantity).name, order


def cumulative(field: Field) -> bool:
    """Whether a field counts since some beginning, as its description says."""
    return bool(_CUMULATIVE.search(field.help))


def wanted(name: str) -> bool:
    """Whether a field is worth comparing."""
    return not OMIT.fullmatch(name)


_SCALES: Mapping[str, tuple[tuple[float, str], ...]] = {
    "B/s": ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")),
    "B": ((1024.0**4, "TiB"), (1024.0**3, "GiB"), (1024.0**2, "MiB"), (1024.0, "KiB"), (1.0, "B")),
    "ns": ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns")),
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
    "ns/s": ((1e6, "ms/s"),),
    "mW": ((1e3, "W"),),
    "1/s": ((1e3, "k/s"), (1.0, "/s")),
}


def amounts(unit: str, *values: float) -> str:
    """Numbers in one common scale with the unit once: `12.1 -> 6.0 GB/s`. Missing ones read `--`."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    scales = _SCALES.get(unit, ((1.0, unit),))
    scale, shown = next(((s, u) for s, u in scales if largest >= s), scales[-1])
    decimals = 0 if largest >= 100 * scale else 1 if largest >= 10 * scale else 2
    texts = [f"{value / scale:.{decimals}f}" if math.isfinite(value) else "--" for value in values]
    return f"{' -> '.join(texts)} {shown}".rstrip()
