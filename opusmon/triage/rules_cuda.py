"""Rules about CUDA streams, by what the host asked of the driver: launch calls, graphs, gaps, waits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from opusmon.clock import NS
from opusmon.schema import Rows
from opusmon.times import format_duration
from opusmon.triage.cuda_names import process_name, stream_name, text_of
from opusmon.triage.finding import Evidence, Finding
from opusmon.triage.gpu_load import Load, loads
from opusmon.triage.graph_use import SPAN_NS, Fallback, fallbacks, use_of
from opusmon.triage.scene import Scene, rule
from opusmon.triage.severity import CRIT, NOTE, WARN, distinct
from opusmon.triage.stream_spells import SEVERER, candidates, stream_spells
from opusmon.triage.sustained import Floats, Spell, floats, number

_MS, _US = 1e6, 1e3
BURST_GAP_NS = 65 * NS
"""Calls are timed at least in one of 60 intervals (`collectors.ebpf.budget.MAX_EVERY`)."""


def _subject(scene: Scene, row: np.void) -> str:
    return f"{process_name(scene, row)} {stream_name(int(row['stream']))}"


def _pct_of_time(rows: Rows, field: str) -> Floats:
    """A sum of times over the time that its sample covers, %."""
    dt_ns = floats(rows, "dt_ns")
    return 100 * floats(rows, field) / np.where(dt_ns > 0, dt_ns, np.nan)


def _loads(scene: Scene, rows: Rows) -> Load:
    return loads(scene, rows["pid"], rows["t"])


# -- launches ----------------------------------------------------------------------------------------------------


@rule("stream", lookback_s=200, join_s=70)
def launch_latency(scene: Scene) -> Iterator[Finding]:
    """Launch calls take long: their mean is over the limit in three timed samples in a row.

    Thresholds: `launch_call_us`, `launch_call_crit_us`, `launch_in_a_row`, `launch_full_gpu_pct`, `launch_share_pct`. Where
    the GPU is busy a call may wait for room in its full queue, and where calls are few they hold nothing up: a note.
    Samples in which no call was timed say nothing.
    """
    rows, limits = scene.rows("stream"), scene.limits
    limit_ns, count = limits["launch_call_us"] * _US, int(limits["launch_in_a_row"])
    call_ns, timed = floats(rows, "launch_call_ns"), floats(rows, "timed_launches")
    known = (timed > 0) & ~np.isnan(call_ns)
    rows = candidates(rows, known & (call_ns > limit_ns), known, count)
    if not len(rows):
        return
    call_ns = floats(rows, "launch_call_ns")
    busy = _loads(scene, rows).least >= limits["launch_full_gpu_pct"]
    few = _launch_share_pct(rows) < limits["launch_share_pct"]
    severity = np.where(
        busy | few, NOTE, np.where(call_ns >= limits["launch_call_crit_us"] * _US, CRIT, WARN)
    )
    weight = severity * SEVERER + call_ns
    on = call_ns > limit_ns
    for one in stream_spells(scene, rows, on, weight, count=count, longest_gap_ns=BURST_GAP_NS):
        yield _launch_finding(scene, one, int(severity[one.place]))


def _launch_share_pct(rows: Rows) -> Floats:
    """Part of the time that launch calls took, shape (n,); NaN where they were not counted."""
    return np.asarray(
        100 * floats(rows, "launches") * floats(rows, "launch_call_ns") / np.maximum(floats(rows, "dt_ns"), 1)
    )


def _launch_finding(scene: Scene, one: Spell, severity: int) -> Finding:
    call_ns, limit_us = number(one.row, "launch_call_ns"), scene.limits["launch_call_us"]
    subject, words = _subject(scene, one.row), format_duration(int(call_ns))
    host = "likely a CPU that is slow or shared, tracing, or a lock in the driver that another thread holds"
    share_pct = float(_launch_share_pct(np.asarray([one.row]))[0])
    few = "likely calls that come one at a time, each to a cold CPU: they take too little time to hold anything up"
    full = "the GPU is busy: likely its queue is full and launch calls wait for room, which costs nothing"
    return one.finding(
        "launch_latency",
        subject,
        severity,
        title=f"Launch calls of {subject} take {words} on average, over {limit_us:g} us",
        evidence=(
            Evidence("launch_call_ns", call_ns, "ns", limit_us * _US),
            Evidence("launch_call_max_ns", number(one.row, "launch_call_max_ns"), "ns"),
            Evidence("share_pct", share_pct, "%", scene.limits["launch_share_pct"]),
            Evidence("timed_launches", number(one.row, "timed_launches")),
            Evidence("thread", text_of(scene, one.row, "thread")),
        ),
        cause=host if severity > NOTE else few if share_pct < scene.limits["launch_share_pct"] else full,
        next="look for run queue and lock stalls of this thread (stalls pane), then at its CPU's clock and neighbours",
        pane="streams",
    )


@rule("stream", lookback_s=SPAN_NS / NS + 10)
def graph_fallback(scene: Scene) -> Iterator[Finding]:
    """A process replays fewer graphs and launches more kernels one by one: it fell back to eager execution.

    Thresholds: `graph_before_per_s`, `graph_fall_ratio`, `graph_plain_rise_ratio`. Compared are the medians of five
    samples before and after, only such in which launches were counted on all streams, so that it is told seven
    samples after the change. Load that goes down, or up, moves both kinds of launches alike and is no fallback.
    """
    rows, limits = scene.rows("stream"), scene.limits
    least_per_s = limits["graph_before_per_s"]
    fall, rise = limits["graph_fall_ratio"], limits["graph_plain_rise_ratio"]
    plain, graphs = floats(rows, "launches"), floats(rows, "graph_launches")
    for pid in distinct(rows["pid"][graphs > 0]):
        use = use_of(rows, plain, graphs, np.flatnonzero(rows["pid"] == pid))
        for one in fallbacks(use, least_per_s=least_per_s, fall=fall, rise=rise):
            yield _fallback_finding(scene, one)


def _fallback_finding(scene: Scene, one: Fallback) -> Finding:
    subject = process_name(scene, one.row)
    before, after = one.share
    return Finding(
        "graph_fallback",
        subject,
        WARN,
        max(int(one.row["t"]) - int(one.row["dt_ns"]), scene.t0),
        one.t1,
        f"{subject} fell back from graphs to single launches: {one.graphs[0]:.0f} to {one.graphs[1]:.0f} graphs/s, "
        f"{one.plain[0]:.0f} to {one.plain[1]:.0f} launches/s",
        (
            Evidence(
                "graph_share_after_pct", 100 * after, "%", 100 * before * scene.limits["graph_fall_ratio"]
            ),
            Evidence("graph_share_before_pct", 100 * before, "%"),
            Evidence("graph_launches_before_per_s", one.graphs[0], "1/s"),
            Evidence("graph_launches_after_per_s", one.graphs[1], "1/s"),
            Evidence("launches_before_per_s", one.plain[0], "1/s"),
            Evidence("launches_after_per_s", one.plain[1], "1/s"),
        ),
        "likely batches or shapes without a captured graph, a capture that failed, or long prompts mixed into decoding",
        "look for aborted captures just before; compare the batch sizes the engine captures with those it runs",
        "streams",
        weight=before - after,
    )


# -- gaps and waits ----------------------------------------------------------------------------------------------


@rule("stream", "gpu")
def pipeline_bubbles(scene: Scene) -> Iterator[Finding]:
    """The GPU lies idle between the steps of a busy process: gaps from the end of a wait to the next launch.

    Thresholds: `bubble_pct`, `bubble_mean_ms`, `bubble_gpu_pct`, `bubble_in_a_row`. Longer gaps are pauses without work,
    and a GPU that another stream keeps busy is not idle.
    """
    rows, limits = scene.rows("stream"), scene.limits
    count, least_pct = int(limits["bubble_in_a_row"]), limits["bubble_pct"]
    share = _pct_of_time(rows, "bubble_ns")
    rows = candidates(rows, share >= least_pct, ~np.isnan(share), count)
    if not len(rows):
        return
    share, load = _pct_of_time(rows, "bubble_ns"), _loads(scene, rows).most
    short = floats(rows, "bubble_ns") <= limits["bubble_mean_ms"] * _MS * floats(rows, "bubbles")
    on = (share >= least_pct) & short & (load < limits["bubble_gpu_pct"])
    weight = np.where(np.isnan(load), np.nan, share)
    for one in stream_spells(scene, rows, on, weight, count=count):
        yield _bubble_finding(scene, one, float(load[one.place]))


def _bubble_finding(scene: Scene, one: Spell, load_pct: float) -> Finding:
    subject, limits = _subject(scene, one.row), scene.limits
    mean_ns = number(one.row, "bubble_ns") / number(one.row, "bubbles")
    return one.finding(
        "pipeline_bubbles",
        subject,
        WARN,
        title=f"{subject} leaves the GPU without work {min(one.weight, 100):.0f} % of the time, GPU {load_pct:.0f} % busy",
        evidence=(
            Evidence("bubble_pct", one.weight, "%", limits["bubble_pct"]),
            Evidence("bubble_mean_ns", mean_ns, "ns", limits["bubble_mean_ms"] * _MS),
            Evidence("bubble_max_ns", number(one.row, "bubble_max_ns"), "ns"),
            Evidence("gpu_busy_pct", load_pct, "%", limits["bubble_gpu_pct"]),
        ),
        cause="likely host work between steps: scheduling, sampling, detokenising, or Python that holds its lock",
        next="look at this thread's stalls; a stack profile of the process shows what it does between steps",
        pane="streams",
    )


@rule("stream", "gpu")
def gpu_bound(scene: Scene) -> Iterator[Finding]:
    """A thread mostly waits for a GPU that is busy: the GPU is the limit, which is as it should be.

    Thresholds: `wait_share_pct`, `wait_busy_gpu_pct`, `wait_in_a_row`. A note, no problem.
    """
    for one, load_pct in _waits(scene, busy=True):
        subject = _subject(scene, one.row)
        yield one.finding(
            "gpu_bound",
            subject,
            NOTE,
            title=f"{subject} is GPU-bound: waits {min(one.weight, 100):.0f} % of the time, GPU {load_pct:.0f} % busy",
            evidence=_wait_evidence(scene, one, load_pct, "wait_busy_gpu_pct"),
            cause="the GPU works all the time and the host waits for it: likely no problem of the host",
            next="more speed takes less work per token or more GPU; see memory bandwidth and tensor use (gpu pane)",
            pane="streams",
        )


@rule("stream", "gpu")
def wait_on_idle_gpu(scene: Scene) -> Iterator[Finding]:
    """A thread mostly waits for the GPU while the GPU runs hardly any kernel.

    Thresholds: `wait_share_pct`, `wait_idle_gpu_pct`, `wait_in_a_row`.
    """
    for one, load_pct in _waits(scene, busy=False):
        subject = _subject(scene, one.row)
        yield one.finding(
            "wait_on_idle_gpu",
            subject,
            WARN,
            title=f"{subject} waits {min(one.weight, 100):.0f} % of the time for a GPU that is {load_pct:.0f} % busy",
            evidence=_wait_evidence(scene, one, load_pct, "wait_idle_gpu_pct"),
            cause="likely it waits for a copy, for an event of another stream, or for another GPU or host, not for kernels",
            next="look at copies and PCIe traffic of that GPU, and at the other ranks of the job",
            pane="streams",
        )


def _waits(scene: Scene, *, busy: bool) -> Iterator[tuple[Spell, float]]:
    """Streams that are waited for most of the time while the GPUs are busy, or idle; and how busy they are, %."""
    rows, limits = scene.rows("stream"), scene.limits
    least_pct, count = limits["wait_share_pct"], int(limits["wait_in_a_row"])
    share = _pct_of_time(rows, "wait_ns")
    rows = candidates(rows, share >= least_pct, ~np.isnan(share), count)
    if not len(rows):
        return
    share, load = _pct_of_time(rows, "wait_ns"), _loads(scene, rows)
    busy_pct = load.least if busy else load.most
    on = busy_pct >= limits["wait_busy_gpu_pct"] if busy else busy_pct <= limits["wait_idle_gpu_pct"]
    weight = np.where(np.isnan(busy_pct), np.nan, share)
    for one in stream_spells(scene, rows, on & (share >= least_pct), weight, count=count):
        yield one, float(busy_pct[one.place])


def _wait_evidence(scene: Scene, one: Spell, load_pct: float, limit: str) -> tuple[Evidence, ...]:
    # Whoever reads 116 % must not have to guess.
    counted = "waits that ended in the interval, all threads" if one.weight > 100 else ""
    return (
        Evidence("wait_pct", one.weight, "%", scene.limits["wait_share_pct"], counted),
        Evidence("gpu_busy_pct", load_pct, "%", scene.limits[limit]),
        Evidence("wait_max_ns", number(one.row, "wait_max_ns"), "ns"),
        Evidence("waits", number(one.row, "waits")),
    )
