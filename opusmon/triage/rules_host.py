"""Rules about the host: CPUs, memory, control groups, and the processes that wait for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from opusmon.clock import NS
from opusmon.schema import Rows
from opusmon.triage.finding import Evidence, Finding
from opusmon.triage.scene import Scene, rule
from opusmon.triage.severity import CRIT, NONE, WARN
from opusmon.triage.sustained import Floats, Spell, floats, grown, newest_at, number, spells

GIB = 1024**3
_BEFORE_NS = 5 * NS // 2
"""Rows of different channels this close belong together: two of the usual intervals, and jitter."""
_LEVEL_WEIGHT = 1e6
"""A critical sample outweighs every warning, whatever their figures: a figure is at most so many times its limit."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured series and its two limits.

    Attributes:
        name: of its limits, with `_warn` and `_crit`.
        words: format of a value, as it stands in a title.
        values: shape (n,).
        unit: of the values.
        scale: what a value is divided by in a title.
    """

    name: str
    words: str
    values: Floats
    unit: str = "%"
    scale: float = 1.0

    def told(self, scene: Scene, place: int) -> Evidence:
        """The value at a sample as evidence, beside the limit of a warning."""
        return Evidence(self.name, float(self.values[place]), self.unit, scene.limits[f"{self.name}_warn"])


def _rank(scene: Scene, figures: Sequence[Figure]) -> Floats:
    """How bad each sample is by the worst figure: level x 1e6 + value / warning limit; NaN where none is known."""
    ranks = []
    for one in figures:
        warn, crit = (scene.limits[f"{one.name}_{level}"] for level in ("warn", "crit"))
        with np.errstate(invalid="ignore"):
            level = np.where(one.values >= crit, CRIT, np.where(one.values >= warn, WARN, NONE))
        ranks.append(level * _LEVEL_WEIGHT + np.minimum(one.values / max(warn, 1e-9), _LEVEL_WEIGHT / 2))
    return np.asarray(np.fmax.reduce(np.stack(ranks)))


def _severity(one: Spell) -> int:
    return int(one.weight // _LEVEL_WEIGHT)


def _over(scene: Scene, rows: Rows, figures: Sequence[Figure]) -> Iterator[tuple[Spell, int]]:
    """Stretches in which some figure is over its limit, with the place of the worst sample."""
    if not any((one.values >= scene.limits[f"{one.name}_warn"]).any() for one in figures):
        return
    rank = _rank(scene, figures)
    on = rank >= WARN * _LEVEL_WEIGHT
    for one in spells(scene, rows, on, rank, count=int(scene.limits["host_in_a_row"])):
        yield one, one.place


def _worst(scene: Scene, figures: Sequence[Figure], place: int) -> tuple[str, tuple[Evidence, ...]]:
    """The worst figure at a sample in words, and all of them as evidence, the worst first."""
    bad = {one.name: float(_rank(scene, [one])[place]) for one in figures}
    ordered = sorted(figures, key=lambda one: -np.nan_to_num(bad[one.name], nan=-1.0))
    first = ordered[0]
    return first.words.format(float(first.values[place]) / first.scale), tuple(
        one.told(scene, place) for one in ordered
    )


def _host_findings(
    scene: Scene,
    name: str,
    figures: Sequence[Figure],
    *,
    title: str,
    cause: str,
    todo: str,
) -> Iterator[Finding]:
    rows = scene.rows("host")
    for one, place in _over(scene, rows, figures):
        words, evidence = _worst(scene, figures, place)
        extra = _extra(one.row, name)
        yield one.finding(
            name,
            "host",
            _severity(one),
            title=f"{title}: {words}",
            evidence=(*evidence, *extra),
            cause=cause,
            next=todo,
            pane="stalls",
        )


_EXTRA: Mapping[str, tuple[tuple[str, str], ...]] = {
    "cpu_saturated": (("cpu_busy_pct", "%"), ("runnable", "tasks"), ("cpus", ""), ("load1", "")),
    "memory_pressure": (("mem_available_b", "B"), ("swap_used_b", "B"), ("major_faults_per_s", "1/s")),
    "storage_waits": (
        ("disk_read_bps", "B/s"),
        ("disk_write_bps", "B/s"),
        ("blocked", "tasks"),
        ("dirty_b", "B"),
    ),
    "cpu_stolen": (("cpu_busy_pct", "%"),),
}
"""What else the row tells about a finding."""


def _extra(row: np.void, name: str) -> tuple[Evidence, ...]:
    return tuple(Evidence(field, number(row, field), unit) for field, unit in _EXTRA[name])


def _of(rows: Rows, name: str, words: str, unit: str = "%") -> Figure:
    return Figure(name, words, floats(rows, name), unit)


def _stays_below(scene: Scene, channel: str, *names: str) -> bool:
    """Whether, by what is summarised, none of these figures reaches its limit."""
    return scene.stays_below(channel, **{name: scene.limits[f"{name}_warn"] for name in names})


def _surely_not_saturated(scene: Scene) -> bool:
    told = scene.extremes("host", "psi_cpu_some_pct", "runnable", "cpus")
    if told is None or (told["cpus_min"] <= 0).any():
        return False
    over = told["psi_cpu_some_pct_max"] >= scene.limits["psi_cpu_some_pct_warn"]
    over |= told["runnable_max"] / told["cpus_min"] >= scene.limits["run_queue_per_cpu_warn"]
    return not over.any()


def _surely_no_pressure(scene: Scene) -> bool:
    told = scene.extremes("host", "swap_in_bps", "swap_out_bps")
    if told is None:
        return False
    swap_bps = told["swap_in_bps_max"] + told["swap_out_bps_max"]
    return not (swap_bps >= scene.limits["swap_bps_warn"]).any() and _stays_below(
        scene, "host", "psi_memory_full_pct", "psi_memory_some_pct", "direct_reclaim_pages_per_s"
    )


@rule("host", quiet=_surely_not_saturated)
def cpu_saturated(scene: Scene) -> Iterator[Finding]:
    """Tasks wait for a CPU: a long run queue, or pressure while at least `host_cpu_pressed_pct` of the CPUs are busy.

    Thresholds: `run_queue_per_cpu_*`, `psi_cpu_some_pct_*`, `host_cpu_pressed_pct`.
    """
    rows = scene.rows("host")
    cpus = floats(rows, "cpus")
    idle = floats(rows, "cpu_busy_pct") < scene.limits["host_cpu_pressed_pct"]
    pressure = np.where(idle, np.nan, floats(rows, "psi_cpu_some_pct"))
    queue = floats(rows, "runnable") / np.where(cpus > 0, cpus, np.nan)
    yield from _host_findings(
        scene,
        "cpu_saturated",
        (
            Figure("psi_cpu_some_pct", "some task waits for a CPU {:.0f} % of the time", pressure),
            Figure("run_queue_per_cpu", "{:.1f} tasks per CPU are running or wait", queue, ""),
        ),
        title="CPUs overloaded",
        cause="more runnable threads than CPUs; threads that feed the GPUs likely wait as well",
        todo="top -H, or ps -eo pid,psr,pcpu,comm --sort=-pcpu | head; move other work off the host",
    )


@rule("host", quiet=_surely_no_pressure)
def memory_pressure(scene: Scene) -> Iterator[Finding]:
    """Tasks wait for memory: pressure, reclaim by the threads themselves, pages that come from or go to swap.

    Thresholds: `psi_memory_some_pct_*`, `psi_memory_full_pct_*`, `direct_reclaim_pages_per_s_*`, `swap_bps_*`.
    """
    rows = scene.rows("host")
    swap_bps = floats(rows, "swap_in_bps") + floats(rows, "swap_out_bps")
    yield from _host_findings(
        scene,
        "memory_pressure",
        (
            _of(rows, "psi_memory_full_pct", "all tasks wait for memory {:.0f} % of the time"),
            _of(rows, "psi_memory_some_pct", "some task waits for memory {:.0f} % of the time"),
            _of(rows, "direct_reclaim_pages_per_s", "threads free {:.0f} pages/s themselves", "1/s"),
            Figure("swap_bps", "{:.1f} MB/s to and from swap", swap_bps, "B/s", 1e6),
        ),
        title="Memory pressure on the host",
        cause="host memory is short: likely page cache of models, pinned buffers, or a process that grows",
        todo="ps -eo pid,rss,comm --sort=-rss | head; free -m; look for a process that grows",
    )


@rule("host", quiet=lambda scene: _stays_below(scene, "host", "psi_io_some_pct", "cpu_iowait_pct"))
def storage_waits(scene: Scene) -> Iterator[Finding]:
    """Tasks wait for storage.

    Thresholds: `psi_io_some_pct_*`, `cpu_iowait_pct_*`.
    """
    rows = scene.rows("host")
    yield from _host_findings(
        scene,
        "storage_waits",
        (
            _of(rows, "psi_io_some_pct", "some task waits {:.0f} % of the time"),
            _of(rows, "cpu_iowait_pct", "CPUs idle for it {:.0f} % of the time"),
        ),
        title="Waiting for storage",
        cause="likely a model being loaded, checkpoints or logs being written, or a slow disk",
        todo="see which process reads or writes (processes in the stalls pane); iostat -x 1",
    )


@rule("host", quiet=lambda scene: _stays_below(scene, "host", "cpu_steal_pct"))
def cpu_stolen(scene: Scene) -> Iterator[Finding]:
    """The hypervisor runs others on this machine's CPUs.

    Thresholds: `cpu_steal_pct_*`.
    """
    rows = scene.rows("host")
    yield from _host_findings(
        scene,
        "cpu_stolen",
        (_of(rows, "cpu_steal_pct", "{:.1f} % of the CPU time"),),
        title="CPU time taken by the hypervisor",
        cause="the virtual machine shares its CPUs with others, or is over its share",
        todo="ask for dedicated CPUs, or move the server",
    )


# -- killed for memory -------------------------------------------------------------------------------------------


def _surely_no_kill(scene: Scene) -> bool:
    return scene.never_grows("host", "oom_kills") and scene.never_grows("cgroup", "oom_kills")


@rule("host", "cgroup", join_s=60, quiet=_surely_no_kill)
def oom_kill(scene: Scene) -> Iterator[Finding]:
    """The kernel killed a process because memory was out.

    The words tell the count as it stood after the last kill.
    """
    if len(scene.rows("host")):
        yield from _kills(scene, "host", scene.rows("host"), "since boot")
    for (group,), rows in scene.series("cgroup", "cgroup"):
        if (floats(rows, "oom_kills") > 0).any():
            yield from _kills(scene, f"cgroup {scene.text(group)}", rows, "since the group was made")


def _kills(scene: Scene, subject: str, rows: Rows, since: str) -> Iterator[Finding]:
    kills = floats(rows, "oom_kills")
    rows, kills = rows[~np.isnan(kills)], kills[~np.isnan(kills)]
    more = grown(rows["t"], kills, scene.limits["count_gap_s"] * NS)
    for one in spells(scene, rows, more > 0, kills):
        limit_b, available_b = number(one.row, "mem_limit_b"), number(one.row, "mem_available_b")
        yield one.finding(
            "oom_kill",
            subject,
            CRIT,
            title=f"Out of memory: the kernel killed a process ({subject}; {one.weight:.0f} {since})",
            evidence=(
                Evidence("kills since the sample before", float(more[one.place]), "", 0),
                Evidence("oom_kills", one.weight),
                *(
                    Evidence(*known)
                    for known in _known(("mem_limit_b", limit_b), ("mem_available_b", available_b))
                ),
            ),
            cause="host memory" if subject == "host" else "the group's memory limit",
            next="dmesg | grep -i 'killed process'; journalctl -k",
            pane="stalls",
        )


def _known(*values: tuple[str, float]) -> Iterator[tuple[str, float, str]]:
    for name, value in values:
        if value == value:
            yield name, value, "B"


# -- control groups ----------------------------------------------------------------------------------------------


@rule("cgroup", quiet=lambda scene: _stays_below(scene, "cgroup", "throttled_pct"))
def cpu_quota_throttling(scene: Scene) -> Iterator[Finding]:
    """The CPU limit of a serving process's control group holds it back.

    Thresholds: `throttled_pct_*`.
    """
    if not (floats(scene.rows("cgroup"), "throttled_pct") >= scene.limits["throttled_pct_warn"]).any():
        return
    for (group,), rows in scene.series("cgroup", "cgroup"):
        for one, place in _over(scene, rows, (figure := _of(rows, "throttled_pct", "{:.0f} %"),)):
            quota = number(one.row, "cpu_quota_cores")
            of = f" of {quota:.3g} cores" if quota == quota else ""
            if _limited_above(scene, group, one, quota):
                continue
            yield one.finding(
                "cpu_quota_throttling",
                f"cgroup {scene.text(group)}",
                _severity(one),
                title=f"CPU limit{of} holds {scene.text(group)} back "
                f"{figure.values[place]:.0f} % of the time",
                evidence=(
                    figure.told(scene, place),
                    Evidence("throttled_periods_pct", number(one.row, "throttled_periods_pct"), "%"),
                    Evidence("cpu_quota_cores", quota, "cores"),
                    Evidence("cpu_cores", number(one.row, "cpu_cores"), "cores"),
                ),
                cause="more threads run than the limit allows, and all stand still for the rest of each 100 ms period",
                next="raise or remove the CPU limit of the container; or lower its number of threads",
                pane="stalls",
            )


def _limited_above(scene: Scene, group: int, one: Spell, quota_cores: float) -> bool:
    """Whether a group above it has the same limit and is held back as well: then that one is told of."""
    path = scene.text(group)
    for (other,), rows in scene.series("cgroup", "cgroup", lookback_ns=_BEFORE_NS):
        above = scene.text(other).rstrip("/")
        if other == group or not path.startswith(f"{above}/"):
            continue
        near = rows[(rows["t"] <= one.t) & (rows["t"] > one.t - _BEFORE_NS)]
        held = floats(near, "throttled_pct") >= scene.limits["throttled_pct_warn"]
        if (held & (floats(near, "cpu_quota_cores") == quota_cores)).any():
            return True
    return False


def _surely_has_memory(scene: Scene) -> bool:
    told = scene.extremes("cgroup", "mem_used_b", "mem_cache_b", "mem_limit_b")
    if told is None or (told["mem_limit_b_min"] <= 0).any():
        return False
    held_b = told["mem_used_b_max"] - np.fmin(told["mem_cache_b_min"], 0)  # in some rows it may be missing
    share = 100 * held_b / told["mem_limit_b_min"]
    return not (share >= scene.limits["cgroup_mem_pct_warn"]).any()


@rule("cgroup", quiet=_surely_has_memory)
def cgroup_memory_near_limit(scene: Scene) -> Iterator[Finding]:
    """Memory of a serving process's control group is near its limit, page cache that can be dropped left out.

    Thresholds: `cgroup_mem_pct_*`.
    """
    for (group,), rows in scene.series("cgroup", "cgroup"):
        limit_b = floats(rows, "mem_limit_b")
        if not (limit_b > 0).any():
            continue
        held_b = floats(rows, "mem_used_b") - np.nan_to_num(floats(rows, "mem_cache_b"))
        share = 100 * held_b / np.where(limit_b > 0, limit_b, np.nan)
        for one, place in _over(scene, rows, (figure := Figure("cgroup_mem_pct", "{:.1f} %", share),)):
            left_b = float(limit_b[place] - held_b[place])
            yield one.finding(
                "cgroup_memory_near_limit",
                f"cgroup {scene.text(group)}",
                _severity(one),
                title=f"Memory of {scene.text(group)} at {share[place]:.1f} % of its limit, {left_b / GIB:.2f} GiB left",
                evidence=(
                    figure.told(scene, place),
                    Evidence("mem_limit_b", float(limit_b[place]), "B"),
                    Evidence("mem_used_b", number(one.row, "mem_used_b"), "B"),
                    Evidence("mem_cache_b", number(one.row, "mem_cache_b"), "B"),
                    Evidence("limit_hits", number(one.row, "limit_hits")),
                ),
                cause="the program needs about what the limit allows; at the limit the kernel reclaims, then kills",
                next="raise the memory limit, or find what grows: pinned buffers, shared memory, caches",
                pane="stalls",
            )


# -- processes ---------------------------------------------------------------------------------------------------


@rule("process", quiet=lambda scene: _stays_below(scene, "process", "run_delay_pct"))
def process_starved(scene: Scene) -> Iterator[Finding]:
    """The main thread of a serving process waits for a CPU that others use.

    Thresholds: `run_delay_pct_*`; above `host_cpu_busy_pct` all CPUs are taken to be busy.
    """
    if not (floats(scene.rows("process"), "run_delay_pct") >= scene.limits["run_delay_pct_warn"]).any():
        return
    # A process that renames itself, or another with the same pid, is another subject.
    for (pid, named), rows in scene.series("process", "pid", "name"):
        for one, place in _over(scene, rows, (figure := _of(rows, "run_delay_pct", "{:.0f} %"),)):
            around = _around(scene, one)
            cause, todo = _why_starved(scene, pid, around)
            name = scene.text(named)
            yield one.finding(
                "process_starved",
                f"{name} {pid}",
                _severity(one),
                title=f"{name} {pid} waits for a CPU {figure.values[place]:.0f} % of the time",
                evidence=(
                    figure.told(scene, place),
                    Evidence("cpu_pct", number(one.row, "cpu_pct"), "%"),
                    Evidence("forced_switches_per_s", number(one.row, "forced_switches_per_s"), "1/s"),
                    Evidence("cpu_busy_pct", around["busy_pct"], "%", scene.limits["host_cpu_busy_pct"]),
                    Evidence(
                        "throttled_pct", around["throttled_pct"], "%", scene.limits["throttled_pct_warn"]
                    ),
                ),
                cause=cause,
                next=todo,
                pane="stalls",
            )


def _around(scene: Scene, one: Spell) -> dict[str, float]:
    """What the host and the process's control group said at that time."""
    host = scene.rows("host", _BEFORE_NS)
    busy = number(newest_at(host, one.t, _BEFORE_NS) if len(host) else None, "cpu_busy_pct")
    throttled = math.nan
    for (group,), rows in scene.series("cgroup", "cgroup", lookback_ns=_BEFORE_NS):
        if group == number(one.row, "cgroup"):
            throttled = number(newest_at(rows, one.t, _BEFORE_NS), "throttled_pct")
    return {"busy_pct": busy, "throttled_pct": throttled}


def _why_starved(scene: Scene, pid: int, around: Mapping[str, float]) -> tuple[str, str]:
    if around["throttled_pct"] >= scene.limits["throttled_pct_warn"]:
        return "likely the CPU limit of its control group", "raise or remove the CPU limit of the container"
    if around["busy_pct"] >= scene.limits["host_cpu_busy_pct"]:
        return (
            "all CPUs are busy: likely other work on the host",
            "ps -eo pid,psr,pcpu,comm --sort=-pcpu | head",
        )
    return (
        "CPUs are free, but not those it runs on: likely pinned beside another busy thread",
        f"taskset -pc {pid}; ps -eLo pid,tid,psr,pcpu,comm --sort=-pcpu | head",
    )
