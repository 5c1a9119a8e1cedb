"""Stretches over which a condition held on CUDA streams: of all streams at once, as there may be hundreds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from opusmon.schema import Rows
from opusmon.triage.episodes import Flags
from opusmon.triage.scene import Scene, gap_ns
from opusmon.triage.severity import Ids
from opusmon.triage.sustained import Floats, Spell, sustained

SEVERER = 1e15
"""Weight of a step of severity, far above that of any number: of all samples the most severe tells the finding."""

_MANY = 30


def candidates(rows: Rows, on: Flags, known: Flags, count: int) -> Rows:
    """The samples of the streams on which a condition holds `count` times or more, stream by stream.

    Args:
        rows: of channel `stream`, shape (n,).
        on: the condition holds, or may hold, shape (n,).
        known: there is something to judge it by, shape (n,); other samples are left out.
        count: at least 1.
    """
    if np.count_nonzero(on) < count:
        return rows[:0]
    # Two streams may have one code: both are looked at then.
    code = rows["stream"] ^ (rows["pid"].astype(np.uint64) << np.uint64(40))
    codes, times = np.unique(code[on], return_counts=True)
    place = np.flatnonzero(is_one_of(code, codes[times >= count]) & known)
    order = np.lexsort((rows["stream"][place], rows["pid"][place]))
    found: Rows = rows[place[order]]
    return found


def is_one_of(values: Ids, wanted: Sequence[int] | Ids) -> Flags:
    """`np.isin`, which sorts, and is slow for the few values that there usually are; shape of `values`."""
    if len(wanted) > _MANY:
        return np.isin(values, wanted)
    found = np.zeros(len(values), bool)
    for one in wanted:
        found |= values == one
    return found


def stream_spells(
    scene: Scene, rows: Rows, on: Flags, weight: Floats, *, count: int, longest_gap_ns: int | None = None
) -> Iterator[Spell]:
    """Stretches of at least `count` samples of a stream in a row that are on.

    Args:
        scene: what is looked at.
        rows: stream by stream, in time order each, as `candidates` gives them, shape (n,).
        on: the condition holds, shape (n,).
        weight: how bad each sample is, shape (n,); NaN where that is not known: such samples are passed over.
        count: samples in a row that it takes.
        longest_gap_ns: samples further apart are not in a row; by default as `gap_ns` says.
    """
    gap = gap_ns(rows) if longest_gap_ns is None else longest_gap_ns
    known = np.flatnonzero(~np.isnan(weight))
    on, weight = on[known], weight[known]
    if not on.any():
        return
    t, pid, stream = (rows[name][known] for name in ("t", "pid", "stream"))
    last = np.append((pid[1:] != pid[:-1]) | (stream[1:] != stream[:-1]), True)
    # A time axis on which the streams lie one after another.
    axis = t + (np.cumsum(last) - last) * (int(t.max()) - int(t.min()) + gap + 1)
    for one in sustained(axis, on, count=count, gap_ns=gap):
        worst = one.last - int(np.argmax(weight[one.slice][::-1]))
        t1, place = int(t[one.last]), int(known[worst])
        yield Spell(
            t0=int(t[one.first]),
            t1=t1,
            open=bool(last[one.last]) and scene.t1 - t1 <= gap,
            row=rows[place],
            place=place,
            weight=float(weight[worst]),
        )
