"""How busy the GPUs of a process were at given instants, as NVML measured it.

A sample counts for the instants after it, until the next one: whatever follows it changes nothing, so that a finding
does not depend on where a look ends.
"""

from __future__ import annotations

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

    def at(self, gpu: int, t: Times) -> Floats:
        """Activity of one GPU at instants, shape of `t`."""
        own = np.flatnonzero(self.gpu == gpu)
        if not len(own):
            return np.full(len(t), np.nan)
        place = own[np.maximum(np.searchsorted(self.t[own], t, side="right") - 1, 0)]
        age = t - self.t[place]
        return np.where((age >= 0) & (age <= AGE_NS), self.busy_pct[place], np.nan)


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
    users = scene.rows("gpu_process", _PROCESS_NS)
    for pid in distinct(pids):
        gpus = set(users["gpu"][users["pid"] == pid].tolist() if len(users) else ()) or set(
            known.gpu.tolist()
        )
        if gpus:
            own = np.flatnonzero(pids == pid)
            each = np.stack([known.at(gpu, t[own]) for gpu in sorted(gpus)])
            least[own], most[own] = each.min(axis=0), each.max(axis=0)
    return Load(least, most)


def _activity(scene: Scene) -> _Activity:
    rows = scene.rows("gpu", AGE_NS)
    if not len(rows):
        return _Activity(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
    whole = np.flatnonzero(rows["gi"] == WHOLE_GPU)
    busy_pct = np.fmax(floats(rows, "sm_util_pct"), floats(rows, "gpu_busy_pct"))
    return _Activity(rows["t"][whole], rows["gpu"][whole], busy_pct[whole])
