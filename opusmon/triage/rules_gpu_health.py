"""Rules about a GPU's health: clocks that are held back, driver errors, faulty memory, GPUs that do not answer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from opusmon.channels import KEYFRAME_NS, WHOLE_GPU
from opusmon.clock import NS
from opusmon.schema import Rows
from opusmon.stats import rate
from opusmon.triage.episodes import Flags
from opusmon.triage.finding import Evidence, Finding
from opusmon.triage.limits_gpu import XID_OTHER, XID_SEVERITY
from opusmon.triage.rules_gpu import device_at, gpu_name
from opusmon.triage.scene import Scene, rule
from opusmon.triage.severity import CRIT, NOTE, WARN
from opusmon.triage.sustained import Floats, Spell, as_of, floats, grown, number, rows_of, spells, sustained

_IDLE = 0x1
_THROTTLE_HOLD_NS = 30 * NS


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a GPU runs slower than it could.

    Attributes:
        words: what it is called.
        bit: in the clocks event reasons of `nvml.h`.
        counter: field with the time held back, "" for none.
        severity: of having been held back at all.
        cause: the likely cause.
        next: what to look at.
    """

    words: str
    bit: int
    counter: str
    severity: int
    cause: str
    next: str


_COOLING = "likely too little cooling: a fan, the air inlet, the pump, or a neighbour's heat"
REASONS = (
    Reason(
        "power cap",
        0x4,
        "throttle_power_ns",
        NOTE,
        "the work draws more than the power limit allows: normal under dense matrix work, lost throughput if it lasts",
        "nvidia-smi -q -d POWER: compare the limit in force with the highest one",
    ),
    Reason(
        "sync boost",
        0x10,
        "throttle_sync_ns",
        NOTE,
        "the GPU keeps to the clock of the slowest one in its sync boost group",
        "look at the clocks of the other GPUs",
    ),
    Reason(
        "software thermal limit",
        0x20,
        "throttle_sw_thermal_ns",
        WARN,
        _COOLING,
        "nvidia-smi -q -d TEMPERATURE; compare with the other GPUs",
    ),
    Reason(
        "hardware thermal limit",
        0x40,
        "throttle_hw_thermal_ns",
        CRIT,
        _COOLING,
        "take load off this host; nvidia-smi -q -d TEMPERATURE, then the fans",
    ),
    Reason(
        "power brake",
        0x80,
        "throttle_brake_ns",
        CRIT,
        "the power supply or the rack asked the GPU to slow down",
        "check the power supplies and the rack's power limit",
    ),
    Reason(
        "hardware slowdown",
        0x8,
        "",
        CRIT,
        "the hardware slowed the GPU down, likely for heat or power",
        "nvidia-smi -q -d PERFORMANCE; check power and cooling",
    ),
)
_POWER_CAP = 0x4
_HARD_CAUSES = 0x40 | 0x80


@rule("gpu", lookback_s=400, join_s=30)
def throttled(scene: Scene) -> Iterator[Finding]:
    """Something holds the clocks of a GPU back: power cap, heat, power brake.

    Thresholds: `throttle_share_pct` of a sample's time by the driver's counters, or the reason set at the instant;
    for hardware limits any time at all. The power cap is a note, from `throttle_power_long_s` on a warning.
    """
    for (gpu, gi), rows in scene.series("gpu", "gpu", "gi"):
        if gi == WHOLE_GPU and len(rows):
            mask = _mask(rows)
            for reason in REASONS:
                if _stirs(rows, mask, reason):
                    yield from _held_back(scene, gpu, rows, mask, reason)


def _mask(rows: Rows) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Clocks event reasons; 0 where they are missing, the counters tell then."""
    mask = np.nan_to_num(floats(rows, "throttle_mask"), posinf=0.0)
    return np.clip(mask, 0, 2**32).astype(np.int64)


def _stirs(rows: Rows, mask: np.ndarray[tuple[int], np.dtype[np.int64]], reason: Reason) -> bool:
    """Whether there can be anything: the cheap question, for nearly always there is not."""
    if (mask & reason.bit).any():
        return True
    if not reason.counter or reason.counter not in (rows.dtype.names or ()):
        return False
    held = rows[reason.counter]
    return bool((held[1:] != held[:-1]).any()) and bool(np.isfinite(held).any())


def _held_back(
    scene: Scene, gpu: int, rows: Rows, mask: np.ndarray[tuple[int], np.dtype[np.int64]], reason: Reason
) -> Iterator[Finding]:
    hard = reason.severity >= WARN
    limit = scene.limits["throttle_brief_pct" if hard else "throttle_share_pct"]
    share = np.full(len(rows), np.nan)
    if reason.counter:
        share = np.minimum(rate(rows["t"], floats(rows, reason.counter)) / NS * 100, 100)
    told = (mask & reason.bit) > 0
    if not reason.counter:
        told &= (mask & _HARD_CAUSES) == 0  # the driver sets it together with its cause
    known = ~np.isnan(share) | ~np.isnan(floats(rows, "throttle_mask"))
    on = told | (share >= limit)
    clock = floats(rows, "sm_clock_mhz")
    rank = np.where(known, np.where(np.isnan(clock), -1e6, -clock), np.nan)
    count = 1 if hard else int(scene.limits["gpu_in_a_row"])
    for one in spells(scene, rows, on, rank, count=count, hold_ns=_THROTTLE_HOLD_NS):
        at = float(share[one.place])
        yield _throttle(scene, gpu, reason, one, at, limit)


def _throttle(
    scene: Scene, gpu: int, reason: Reason, one: Spell, share_pct: float, limit_pct: float
) -> Finding:
    long = reason.bit == _POWER_CAP and one.t1 - one.t0 >= scene.limits["throttle_power_long_s"] * NS
    device = device_at(scene, gpu, WHOLE_GPU, one.t)
    clock, highest = number(one.row, "sm_clock_mhz"), number(device, "max_sm_clock_mhz")
    of = f" of {highest:.0f}" if highest > 0 else ""
    at = f": SM clock {clock:.0f}{of} MHz" if clock == clock else ""
    return one.finding(
        "throttled",
        f"{gpu_name(gpu)} {reason.words}",
        WARN if long else reason.severity,
        title=f"GPU {gpu} held back by the {reason.words}{at}",
        evidence=(
            Evidence("held back", share_pct, "%", limit_pct),
            Evidence("sm_clock_mhz", clock, "MHz"),
            Evidence("max_sm_clock_mhz", highest, "MHz"),
            Evidence("power_mw", number(one.row, "power_mw"), "mW", number(device, "power_limit_mw")),
            Evidence("temp_c", number(one.row, "temp_c"), "C"),
            Evidence("mem_temp_c", number(one.row, "mem_temp_c"), "C"),
        ),
        cause=reason.cause,
        next=reason.next,
    )


@rule("gpu")
def clocks_low(scene: Scene) -> Iterator[Finding]:
    """The SM clock is low while the GPU works, and no throttle reason explains it.

    Thresholds: `gpu_clock_low_pct` of the highest clock, with `gpu_busy_sm_pct` of the SMs busy.
    """
    limits = scene.limits
    if not (floats(scene.rows("gpu"), "sm_util_pct") >= limits["gpu_busy_sm_pct"]).any():
        return
    devices = dict(scene.series("gpu_device", "gpu", "gi", lookback_ns=2 * KEYFRAME_NS))
    for (gpu, gi), rows in scene.series("gpu", "gpu", "gi"):
        if gi != WHOLE_GPU or (gpu, gi) not in devices:
            continue
        highest = as_of(devices[gpu, gi], "max_sm_clock_mhz", rows["t"], 2 * KEYFRAME_NS)
        share = 100 * floats(rows, "sm_clock_mhz") / np.where(highest > 0, highest, np.nan)
        busy = floats(rows, "sm_util_pct")
        low = (share < limits["gpu_clock_low_pct"]) & (busy >= limits["gpu_busy_sm_pct"])
        if not low.any():
            continue
        known = ~np.isnan(busy + floats(rows, "throttle_mask"))
        known[:1] = False  # whether the counters had grown until then is not known
        on = low & known & _unexplained(rows)
        for one in spells(
            scene, rows, on, np.where(known, -share, np.nan), count=int(limits["gpu_in_a_row"])
        ):
            clock, top = number(one.row, "sm_clock_mhz"), float(highest[one.place])
            yield one.finding(
                "clocks_low",
                gpu_name(gpu),
                WARN,
                title=f"GPU {gpu} works at {clock:.0f} of {top:.0f} MHz, and the driver names no reason",
                evidence=(
                    Evidence("sm_clock_mhz", clock, "MHz", limits["gpu_clock_low_pct"] / 100 * top),
                    Evidence("sm_util_pct", number(one.row, "sm_util_pct"), "%", limits["gpu_busy_sm_pct"]),
                    Evidence("power_mw", number(one.row, "power_mw"), "mW"),
                ),
                cause="likely clocks locked or limited by hand (nvidia-smi -lgc, -ac) or by a profile",
                next=f"nvidia-smi -q -d CLOCK,PERFORMANCE -i {gpu}",
            )


def _unexplained(rows: Rows) -> Flags:
    """No reason is set but idleness, and no counter of time held back grew since the sample before."""
    mask = _mask(rows)
    free: Flags = (mask & ~_IDLE) == 0
    for reason in REASONS:
        if reason.counter and _stirs(rows, mask, reason):
            free = free & ~(rate(rows["t"], floats(rows, reason.counter)) > 0)
    return free


# -- what the driver reports -------------------------------------------------------------------------------------


@rule("gpu_event")
def xid(scene: Scene) -> Iterator[Finding]:
    """The driver reported an error by its XID; how bad it is by what the vendor's catalogue asks for."""
    for row in _events(scene, "xid"):
        code = number(row, "code")
        if not math.isfinite(code):
            continue
        what, _, todo = (scene.text(row["detail"]) or "not described").partition(": ")
        subject = f"{gpu_name(int(row['gpu']), int(row['gi']))} xid {code:.0f}"
        yield Finding(
            "xid",
            subject,
            XID_SEVERITY.get(int(code), XID_OTHER),
            int(row["t"]),
            int(row["t"]),
            f"XID {code:.0f} on {gpu_name(int(row['gpu']), int(row['gi']))}: {what}",
            (Evidence("xid", code),),
            what,
            todo or "look for 'NVRM: Xid' in dmesg",
        )


@rule("gpu_event")
def driver_asks_for_recovery(scene: Scene) -> Iterator[Finding]:
    """The driver says that the GPU is unavailable, or which recovery it needs."""
    for kind in ("unavailable", "recovery"):
        for row in _events(scene, kind):
            if kind == "recovery" and not row["code"] > 0:
                continue  # none is needed any more
            name, what = gpu_name(int(row["gpu"]), int(row["gi"])), scene.text(row["detail"])
            t = int(row["t"])
            yield Finding(
                "driver_asks_for_recovery",
                name,
                CRIT,
                t,
                t,
                f"{name}: {what}",
                (Evidence("driver says", what),),
                "an error before it, likely with an XID",
                what if kind == "recovery" and what else "drain the host and reset the GPU",
            )


def _events(scene: Scene, kind: str) -> Iterator[np.void]:
    rows = rows_of(scene, "gpu_event")
    wanted = [number for number in np.unique(rows["kind"]).tolist() if scene.text(number) == kind]
    yield from rows[np.isin(rows["kind"], wanted)]


@rule("gpu_event", "status", lookback_s=240, join_s=90)
def gpu_lost(scene: Scene) -> Iterator[Finding]:
    """A GPU does not answer: lost, or a call that does not return.

    Told by the events "lost" and "back", and by the collector's status of that GPU, repeated every 60 s while it
    holds.
    """
    told: dict[str, list[tuple[int, bool, str, str]]] = {}
    for kind, is_lost in (("lost", True), ("back", False)):
        for row in _events(scene, kind):
            words = (int(row["t"]), is_lost, scene.text(row["detail"]), "")
            told.setdefault(gpu_name(int(row["gpu"])), []).append(words)
    for name, words in _statuses(scene):
        told.setdefault(name, []).append(words)
    for name, said in sorted(told.items()):
        yield from _lost(scene, name, sorted(said))


def _statuses(scene: Scene) -> Iterator[tuple[str, tuple[int, bool, str, str]]]:
    for row in rows_of(scene, "status"):
        if scene.text(row["collector"]) != "gpu" or scene.text(row["channel"]) != "gpu" or row["field"]:
            continue
        state, name = scene.text(row["state"]), scene.text(row["scope"])
        if state in ("error", "unavailable", "stale", "ok") and name.startswith("gpu "):
            yield (
                name,
                (int(row["t"]), state != "ok", scene.text(row["reason"]), scene.text(row["remedy"])),
            )


def _lost(scene: Scene, name: str, said: list[tuple[int, bool, str, str]]) -> Iterator[Finding]:
    gap = KEYFRAME_NS * 3 // 2
    t = np.array([words[0] for words in said], np.int64)
    on = np.array([words[1] for words in said])
    for one in sustained(t, on, gap_ns=gap):
        _, _, reason, remedy = said[one.last]
        yield Finding(
            "gpu_lost",
            name,
            CRIT,
            int(t[one.first]),
            int(t[one.last]),
            f"{name} does not answer: {reason or 'no reason given'}",
            (Evidence("status", reason or "lost"),),
            "a fault of the GPU or its connection, or a driver that hangs; likely with an XID in dmesg",
            remedy or "look for 'NVRM: Xid' in dmesg; a lost GPU needs a reset or a reboot",
            open=one.open and scene.t1 - int(t[one.last]) <= gap,
        )


# -- memory errors -----------------------------------------------------------------------------------------------


@rule("gpu", join_s=60)
def ecc_uncorrected(scene: Scene) -> Iterator[Finding]:
    """Uncorrectable memory errors: critical when they grow, a warning while they are on the count."""
    if not (floats(scene.rows("gpu"), "ecc_uncorrected") > 0).any():
        return
    for (gpu, gi), rows in scene.series("gpu", "gpu", "gi"):
        errors = floats(rows, "ecc_uncorrected")
        rows, errors = rows[~np.isnan(errors)], errors[~np.isnan(errors)]
        more = grown(rows["t"], errors, scene.limits["count_gap_s"] * NS)
        for severity, on in ((WARN, errors > 0), (CRIT, more > 0)):
            for one in spells(scene, rows, on, errors):
                yield one.finding(
                    "ecc_uncorrected",
                    gpu_name(gpu, gi),
                    severity,
                    title=f"GPU {gpu}: {one.weight:.0f} uncorrectable memory errors since the driver loaded",
                    evidence=(
                        Evidence("ecc_uncorrected", one.weight, "", 0),
                        Evidence("remap_pending", number(one.row, "remap_pending")),
                    ),
                    cause="faulty HBM; the program that used it was likely stopped",
                    next="drain the host and reset the GPU, so that the rows are remapped; see XIDs 48, 63, 94, 95",
                )


_MINUTE_NS = 60 * NS


@rule("gpu", lookback_s=130, join_s=60)
def pcie_replays(scene: Scene) -> Iterator[Finding]:
    """Packets are sent again over PCIe, more than `pcie_replays_per_min` in a minute.

    Counts that were read further apart than `count_gap_s` are not compared.
    """
    if not (floats(scene.rows("gpu"), "pcie_replays") > 0).any():
        return
    for (gpu, gi), rows in scene.series("gpu", "gpu", "gi"):
        count = floats(rows, "pcie_replays")
        rows, count = rows[~np.isnan(count)], count[~np.isnan(count)]
        so_far = np.cumsum(grown(rows["t"], count, scene.limits["count_gap_s"] * NS))
        before = np.searchsorted(rows["t"], rows["t"] - _MINUTE_NS, side="right") - 1
        minute = so_far - np.where(before >= 0, so_far[before], 0.0)
        limit = scene.limits["pcie_replays_per_min"]
        for one in spells(scene, rows, minute > limit, minute):
            yield one.finding(
                "pcie_replays",
                gpu_name(gpu, gi),
                WARN,
                title=f"GPU {gpu} sends packets again over PCIe: {one.weight:.0f} in a minute",
                evidence=(
                    Evidence("replays in a minute", one.weight, "", limit),
                    Evidence("pcie_replays", number(one.row, "pcie_replays")),
                ),
                cause="likely a poor connection: a riser or slot, a dirty contact, heat, or a host board's link settings",
                next=f"nvidia-smi -q -i {gpu} -d PCIE, lspci -vv: link speed and width, AER; drain the host if they go on",
            )


_REMAPS = (
    (
        "remap_failed",
        CRIT,
        "a row remap has failed",
        "no spare rows are left",
        "drain the host, run the field diagnostic, replace the GPU",
    ),
    (
        "remap_pending",
        WARN,
        "a row remap waits for a reset",
        "a memory error was found; the faulty row is still in use until then",
        "reset the GPU when its programs can stop: nvidia-smi --gpu-reset",
    ),
)


@rule("gpu", join_s=60)
def row_remap(scene: Scene) -> Iterator[Finding]:
    """A row of HBM could not be remapped (critical), or will be at the next reset (warning)."""
    for field, severity, what, cause, todo in _REMAPS:
        if not (floats(scene.rows("gpu"), field) > 0).any():
            continue
        for (gpu, gi), rows in scene.series("gpu", "gpu", "gi"):
            flag: Floats = floats(rows, field)
            for one in spells(scene, rows, flag > 0, flag):
                rows_bad = number(one.row, "remapped_uncorrectable")
                evidence = (Evidence(field, one.weight, "", 0), Evidence("remapped_uncorrectable", rows_bad))
                yield one.finding(
                    "row_remap",
                    f"{gpu_name(gpu, gi)} {field.replace('_', ' ')}",
                    severity,
                    title=f"GPU {gpu}: {what}",
                    evidence=evidence,
                    cause=cause,
                    next=todo,
                )
