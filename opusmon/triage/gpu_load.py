"""How busy the GPUs of a process were at given instants, as NVML measured it.

For `loads` a sample counts for the instants after it, until the next one: whatever follows changes nothing, so that a
finding does not depend on where a look ends. `worked_ns` needs the samples up to the end of a range, and says nothing
before they are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from opusmon.channels import WHOLE_GPU
from opusmon.clock import NS
from opusmon.triage.episodes import Times
from opusmon.triage.scene import Scene
from opusmon.triage.severity import Ids, distinct
from opusmon.triage.sustained import Floats, floats

AGE_NS = 5 * NS
"""Older samples say nothing about an instant."""
COVER_NS = 10 * NS
"""Longest range whose kernels are added up."""
_PROCESS_NS = 15 * NS
"""Rows of `gpu_process` come every 5 s."""


@dataclass(frozen=True, slots=True)
class Load:
    """Activity at n instants; NaN where it is not known of every GPU concerned.

    Attributes:
        least: of the least busy GPU, %, shape (n,).
        most: of the busiest one, %, shape (n,).
    """

    least: Floats
    most: Floats


@dataclass(frozen=True, slots=True)
class _Activity:
    """What is known of the GPUs around a scene: n samples, shape (n,) each, of whole devices only."""

    t: Times
    gpu: Ids
    busy_pct: Floats
    dt_ns: Times

    def at(self, gpu: int, t: Times) -> Floats:
        """Activity of one GPU at instants, shape of `t`."""
        own = np.flatnonzero(self.gpu == gpu)
        if not len(own):
            return np.full(len(t), np.nan)
        place = own[np.maximum(np.searchsorted(self.t[own], t, side="right") - 1, 0)]
        age = t - self.t[place]
        return np.where((age >= 0) & (age <= AGE_NS), self.busy_pct[place], np.nan)

    def worked_ns(self, gpu: int, begun: Times, t: Times) -> Floats:
        """Time with a kernel in the samples that cover each range, shape of `t`; NaN where one of them is missing."""
        own = np.flatnonzero((self.gpu == gpu) & ~np.isnan(self.busy_pct))
        ends, dt_ns = self.t[own], self.dt_ns[own]
        total = np.concatenate(([0.0], np.cumsum(self.busy_pct[own] / 100 * dt_ns)))
        first, last = np.searchsorted(ends, begun, side="right"), np.searchsorted(ends, t, side="left")
        near = np.append(ends - dt_ns, np.iinfo(np.int64).max)[last] <= t + AGE_NS
        return np.where(near, total[np.minimum(last + 1, len(own))] - total[first], np.nan)


def loads(scene: Scene, pids: Ids, t: Times) -> Load:
    """How busy the GPUs of processes were: SMs busy (GPM), or the time in which any kernel ran if that is more.

    Of a process whose GPUs are not known all GPUs count.

    Args:
        scene: what is looked at.
        pids: the process concerned, shape (n,).
        t: instants, monotonic ns, shape (n,).
    """
    least, most = np.full(len(t), np.nan), np.full(len(t), np.nan)
    known = _activity(scene)
    for pid, gpus in _gpus_of(scene, known, pids):
        own = np.flatnonzero(pids == pid)
        each = np.stack([known.at(gpu, t[own]) for gpu in gpus])
        least[own], most[own] = each.min(axis=0), each.max(axis=0)
    return Load(least, most)


def worked_ns(scene: Scene, pids: Ids, begun: Times, t: Times) -> Floats:
    """How long the least busy GPU of each process ran kernels around a range of time, ns, shape (n,).

    Counted are the samples that cover the range, as a whole: a kernel may lie anywhere in a sample. NaN where they are
    not all there (yet). Of a process whose GPUs are not known all GPUs count.

    Args:
        scene: what is looked at.
        pids: the process concerned, shape (n,).
        begun: starts of the ranges, at most `COVER_NS` before their ends, monotonic ns, shape (n,).
        t: ends, shape (n,).
    """
    least = np.full(len(t), np.nan)
    known = _activity(scene, COVER_NS + AGE_NS)
    for pid, gpus in _gpus_of(scene, known, pids):
        own = np.flatnonzero(pids == pid)
        least[own] = np.stack([known.worked_ns(gpu, begun[own], t[own]) for gpu in gpus]).min(axis=0)
    return least


def _gpus_of(scene: Scene, known: _Activity, pids: Ids) -> Iterator[tuple[int, list[int]]]:
    """The GPUs of each process, all of them where its own are not known; processes without any are left out."""
    users = scene.rows("gpu_process", _PROCESS_NS)
    for pid in distinct(pids):
        own = set(users["gpu"][users["pid"] == pid].tolist() if len(users) else ())
        if gpus := sorted(own or set(known.gpu.tolist())):
            yield pid, gpus


def _activity(scene: Scene, before_ns: int = AGE_NS) -> _Activity:
    rows = scene.rows("gpu", before_ns)
    if not len(rows):
        none = np.empty(0, np.int64)
        return _Activity(none, none, np.empty(0), none)
    whole = np.flatnonzero(rows["gi"] == WHOLE_GPU)
    busy_pct = np.fmax(floats(rows, "sm_util_pct"), floats(rows, "gpu_busy_pct"))
    dt_ns = rows["dt_ns"][whole] if "dt_ns" in (rows.dtype.names or ()) else np.full(len(whole), NS)
    return _Activity(rows["t"][whole], rows["gpu"][whole], busy_pct[whole], np.clip(dt_ns, 0, AGE_NS))
