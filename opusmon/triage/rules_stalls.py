"""The rule about threads that are kept from feeding a GPU. The other rules about stalls are in the module imported here."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from opusmon.clock import NS
from opusmon.schema import Rows
from opusmon.triage import rules_stall_events
from opusmon.triage.cuda_names import text_of, thread_name
from opusmon.triage.episodes import Flags
from opusmon.triage.finding import Finding
from opusmon.triage.gpu_load import AGE_NS, COVER_NS, loads, worked_ns
from opusmon.triage.scene import Scene, rule
from opusmon.triage.severity import CRIT, NONE, NOTE, REASON_CAPS, WARN, Levels, distinct, each_ns, translate
from opusmon.triage.stall_bouts import FAILED, MINUTE_NS, Sums, begins, bouts
from opusmon.triage.stall_findings import (
    begin_with,
    evidence_of,
    numbers_of,
    of_kinds,
    severity_of,
    stall_finding,
)
from opusmon.triage.warmth import IDLE, UNKNOWN, had_work, was_active

__all__ = ["rules_stall_events", "stalled_thread"]

_THREAD_KINDS = ("wait", "run_queue", "futex", "off_cpu")
_FOLDED = "shorter ones, folded"
"""Reason of rows that fold many short stalls of a thread: they are counted with those beside them."""
_OWN_WISH = tuple(word for cap, words in REASON_CAPS if cap == NOTE for word in words)
_ON_OTHERS = ("lock", "network", "pipe, socket", "waiting for a child")
"""How reasons begin of what a thread with nothing to do does as well as one that is kept waiting."""
_IN_A_WAIT = (
    "inside cuStreamSynchronize",
    "inside cuEventSynchronize",
    "inside cuCtxSynchronize",
    "inside cuMemcpy",
)
_ACTIVE_NS = 2 * NS
"""A process that launched, copied or waited so shortly before a stall was at work."""

_WHY = {
    "wait": (
        "likely the GPU works on something else, or waits for a copy or another GPU",
        "see whether this GPU is busy (gpu pane), and what the stream launched before",
    ),
    "run_queue": (
        "likely more threads than CPUs, a CPU limit, or a neighbour on this CPU",
        "look at the run queue and CPU pressure of the host; `ps -eLo pcpu,psr,comm --sort=-pcpu | head` shows who runs",
    ),
    "futex": (
        "likely another thread of the process holds the lock, for example Python's",
        "look at the stack and at what the other threads of the process did then (stalls pane)",
    ),
    "off_cpu": (
        "likely what the reason says: the thread slept in the kernel and launched nothing",
        "look at the stack; for I/O and page faults at the host's memory pressure and disks",
    ),
}
"""Likely cause and next step by kind."""
_DID = {
    "off_cpu": "off the CPU ({})",
    "run_queue": "ready but not running ({})",
    "futex": "waiting for another thread ({})",
}


@rule("stall", join_s=60)
def stalled_thread(scene: Scene) -> Iterator[Finding]:
    """A thread that feeds a GPU was kept from it: by the run queue, I/O, a page fault, a lock, or the GPU.

    Thresholds: `severity.STALL_LIMITS` for one stall; `stall_some`, `stall_often` and `stall_share_pct` for a minute of
    them. What a thread wished for itself (sleep, events) is no stall; waiting for another thread or the network is one
    only while an engine has requests, or as a note where that is not known and the process was just active; waiting for
    a GPU that is busy is `gpu_bound`.
    """
    rows = of_kinds(scene, *_THREAD_KINDS)
    if not len(rows):
        return
    rows = _unfolded(scene, rows)
    levels = _judged(scene, rows)
    kept = levels > NONE
    rows, levels = rows[kept], levels[kept]
    for one in bouts(scene, rows, levels, ("pid", "tid", "kind", "reason"), lambda s: _grade(scene, s)):
        kind = scene.text(one.worst["kind"])
        why, subject = text_of(scene, one.worst, "reason") or kind, thread_name(scene, one.worst)
        cause, further = _WHY[kind]
        yield stall_finding(
            "stalled_thread",
            f"{subject}: {why}",
            one,
            f"{subject} {_DID.get(kind, '{}').format(why)} {numbers_of(one)}",
            evidence_of(scene, one, kind),
            cause=cause,
            next=further,
        )


def _unfolded(scene: Scene, rows: Rows) -> Rows:
    """Rows in which a folded one has the reason of the last one of its thread and kind, of at most a minute before."""
    if not begin_with(scene, rows["reason"], (_FOLDED,)).any():
        return rows
    rows = of_kinds(scene, *_THREAD_KINDS, lookback_ns=MINUTE_NS)
    order = np.lexsort((rows["kind"], rows["tid"], rows["pid"]))
    rows = rows[order]
    single, place = ~begin_with(scene, rows["reason"], (_FOLDED,)), np.arange(len(rows))
    source = np.maximum.accumulate(np.where(single, place, 0))
    known = single[source] & (rows["t"] - rows["t"][source] <= MINUTE_NS)
    for name in ("pid", "tid", "kind"):
        known &= rows[name] == rows[name][source]
    rows["reason"] = rows["reason"][np.where(known, source, place)]
    rows = rows[np.argsort(rows["t"], kind="stable")]
    found: Rows = rows[rows["t"] > scene.t0]
    return found


def _judged(scene: Scene, rows: Rows) -> Levels:
    """Severity of each stall as far as it kept a thread from work that there was; `NONE` where it did not."""
    levels = severity_of(scene, rows)
    is_wait, is_queue = (
        begin_with(scene, rows["kind"], ("wait",)),
        begin_with(scene, rows["kind"], ("run_queue",)),
    )
    nature = translate(rows["reason"], {n: _nature(scene.text(n)) for n in distinct(rows["reason"])}, 0)
    levels[(nature == _OWN) | ((nature == _GPU) & ~is_queue)] = NONE
    _judge_voluntary(scene, rows, levels, nature == _OTHERS)
    _judge_waits(scene, rows, levels, is_wait)
    levels[is_wait & (rows["code"] != 0) & ~np.isnan(rows["code"])] = FAILED
    return levels


_OWN, _GPU, _OTHERS = 1, 2, 3


def _nature(reason: str) -> int:
    """What the reason of a stall says of it: the thread's own wish, inside a wait for the GPU, a wait for others."""
    if reason.startswith((*_OWN_WISH, _FOLDED)):
        return _OWN
    if reason.partition(", ")[2].startswith(_IN_A_WAIT):
        return _GPU
    return _OTHERS if reason.startswith(_ON_OTHERS) else 0


def _judge_voluntary(scene: Scene, rows: Rows, levels: Levels, on_others: Flags) -> None:
    """What waits for others counts while there is work, in place."""
    place = np.flatnonzero((levels > NONE) & on_others)
    if not len(place):
        return
    work = had_work(scene, rows["t"][place])
    levels[place[work == IDLE]] = NONE
    unknown = place[work == UNKNOWN]
    levels[unknown] = np.minimum(levels[unknown], NOTE)
    begun, pids = begins(rows), rows["pid"][unknown]
    for pid in distinct(pids):
        own = unknown[pids == pid]
        levels[own[~was_active(scene, pid, begun[own], _ACTIVE_NS)]] = NONE


def _judge_waits(scene: Scene, rows: Rows, levels: Levels, is_wait: Flags) -> None:
    """Waiting for a GPU that works is no stall, and a note where it is not known whether it does; in place.

    A GPU that idles between requests works all the time of a wait, and not most of the second: kernels that together
    took as long as the wait explain it as well.
    """
    own = np.flatnonzero(is_wait & (levels > NONE))
    if not len(own):
        return
    pids, t = rows["pid"][own], rows["t"][own]
    least = loads(scene, pids, t).least
    levels[own] = np.where(np.isnan(least), np.minimum(levels[own], NOTE), levels[own])
    begun = np.maximum(t - each_ns(rows[own]).astype(np.int64), t - COVER_NS)
    worked = worked_ns(scene, pids, begun, t)
    soon = (
        ~np.isnan(least) & np.isnan(worked) & (t > scene.t1 - AGE_NS)
    )  # the sample that tells is still to come
    explained = worked >= scene.limits["wait_busy_gpu_pct"] / 100 * (t - begun)
    levels[own[(least >= scene.limits["wait_busy_gpu_pct"]) | explained | soon]] = NONE


def _grade(scene: Scene, sums: Sums) -> Levels:
    """Few stalls in a minute happen on any host; how many are too many grows with how short they are."""
    limits = scene.limits
    some, often = limits["stall_some"], limits["stall_often"]
    much = 100 * sums.total_ns >= limits["stall_share_pct"] * MINUTE_NS
    levels = np.where((sums.warn >= some) | much, NOTE, NONE)
    levels[(sums.crit > 0) | (sums.warn >= often) | (much & (sums.warn > 0))] = WARN
    levels[(sums.crit >= some) | (much & (sums.crit > 0)) | (sums.failed > 0)] = CRIT
    return levels.astype(np.int8)
