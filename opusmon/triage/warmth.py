"""Whether a process served already when something happened, and whether it had work to do then."""

from __future__ import annotations

import numpy as np

from opusmon.clock import NS
from opusmon.triage.episodes import Flags, Times
from opusmon.triage.scene import Scene
from opusmon.triage.severity import Levels, distinct
from opusmon.triage.stream_spells import is_one_of
from opusmon.triage.sustained import floats

COLD, WARM, UNKNOWN = 0, 1, -1
"""Still starting; serving; no figure says."""
IDLE, BUSY = 0, 1
"""Nobody waits for an answer; somebody does."""

_SEEN_NS = 60 * NS
"""It launched for long enough at some time in the last minute: long compilations do not make a process cold again."""
_ACTIVE_SHARE = 0.75
_RECENT_NS = 10 * NS
_SLOW_KINDS = ("jit", "alloc", "free", "module")
_ACTIVITY = ("launches", "graph_launches", "copies", "waits")


def warmth(scene: Scene, pid: int, t: Times) -> Levels:
    """Whether a process was warm at instants, shape (n,): `WARM`, `COLD`, or `UNKNOWN`.

    As the stalls collector judges it: it started `warm_age_s` ago, or it launched for `warm_quiet_s` without loading
    or compiling code and without taking memory. `UNKNOWN` is for sessions that hold neither processes nor streams.

    Args:
        scene: what is looked at.
        pid: the process.
        t: instants, monotonic ns, shape (n,).
    """
    if not {"process", "stream"} & set(scene.view.channels):
        return np.full(len(t), UNKNOWN, np.int8)
    started = _started(scene, pid)
    active, dt_ns = _activity(scene, pid, t, 2 * _SEEN_NS)
    quiet = _quiet_times(scene, pid, active, dt_ns)
    warm = np.searchsorted(quiet, t, "right") > np.searchsorted(quiet, t - _SEEN_NS, "right")
    if started is not None:
        warm |= t - started >= scene.limits["warm_age_s"] * NS
    return warm.astype(np.int8)


def _started(scene: Scene, pid: int) -> int | None:
    """When a process started, monotonic ns; None where that is not known."""
    rows = scene.rows("process", _SEEN_NS)
    ages = floats(rows, "age_ns")
    own = np.flatnonzero(~np.isnan(ages) & (floats(rows, "pid") == pid))
    return int(rows["t"][own[-1]]) - int(ages[own[-1]]) if len(own) else None


def _activity(scene: Scene, pid: int, t: Times, before_ns: int) -> tuple[Times, Times]:
    """Samples in which a process launched, copied or waited: their times, and what they cover, ns, shape (n,) each.

    Those from `before_ns` before the first of the instants `t` to the last one, as far as twice `_SEEN_NS` before the scene.
    """
    rows = scene.rows("stream", 2 * _SEEN_NS)
    ends = np.searchsorted(rows["t"], (int(t.min()) - before_ns, int(t.max())), "right") if len(t) else (0, 0)
    rows = rows[slice(*ends)]
    own = np.flatnonzero(rows["pid"] == pid) if len(rows) else np.empty(0, np.int64)
    active = np.zeros(len(own), bool)
    for name in _ACTIVITY:
        active |= floats(rows, name)[own] > 0
    own = own[active]
    first_of_sample = np.ones(len(own), bool)
    first_of_sample[1:] = np.diff(rows["t"][own]) != 0
    own = own[first_of_sample]
    return rows["t"][own], rows["dt_ns"][own] if len(own) else own


def _quiet_times(scene: Scene, pid: int, t: Times, dt_ns: Times) -> Times:
    """When a process had launched for `warm_quiet_s` without anything slow, monotonic ns, ascending."""
    quiet_ns = int(scene.limits["warm_quiet_s"] * NS)
    spent = np.concatenate(([0], np.cumsum(dt_ns)))
    since = np.searchsorted(t, t - quiet_ns, "right")
    launched = spent[1:] - spent[since] >= _ACTIVE_SHARE * quiet_ns
    slow = _slow_times(scene, pid)
    none = np.searchsorted(slow, t, "right") == np.searchsorted(slow, t - quiet_ns, "right")
    found: Times = t[launched & none]
    return found


def _slow_times(scene: Scene, pid: int) -> Times:
    """When a process loaded or compiled code, or took memory."""
    rows = scene.rows("stall", 2 * _SEEN_NS)
    if not len(rows):
        return np.empty(0, np.int64)
    slow = [number for number in distinct(rows["kind"]) if scene.text(number) in _SLOW_KINDS]
    found: Times = rows["t"][(rows["pid"] == pid) & is_one_of(rows["kind"], slow)]
    return found


def had_work(scene: Scene, t: Times) -> Levels:
    """Whether an engine had requests to work on at instants, shape (n,): `BUSY`, `IDLE`, or `UNKNOWN`.

    Args:
        scene: what is looked at.
        t: instants, monotonic ns, shape (n,).
    """
    state = np.full(len(t), UNKNOWN, np.int8)
    for _, rows in scene.series("engine", "engine", lookback_ns=_RECENT_NS):
        requests = np.fmax(floats(rows, "running"), floats(rows, "waiting"))
        place = np.searchsorted(rows["t"], t, "right") - 1
        known = (place >= 0) & (t - rows["t"][place] <= _RECENT_NS) & ~np.isnan(requests[place])
        np.maximum(state, (requests[place] > 0).astype(np.int8), out=state, where=known)
    return state


def was_active(scene: Scene, pid: int, t: Times, within_ns: int) -> Flags:
    """Whether a process launched, copied or waited up to `within_ns` before each instant, shape (n,)."""
    active, _ = _activity(scene, pid, t, within_ns)
    found: Flags = np.searchsorted(active, t, "right") > np.searchsorted(active, t - within_ns, "right")
    return found
