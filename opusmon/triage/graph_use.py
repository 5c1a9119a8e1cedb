"""Where a process stopped replaying graphs and launched kernels one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from opusmon.clock import NS
from opusmon.schema import Rows
from opusmon.triage.episodes import Times
from opusmon.triage.sustained import Floats

SIDE = 5
"""Samples on either side that are compared: their median bears two that are off."""
NEAR = 2
"""A change is where the sides differ most, compared with so many samples around it."""
SPAN_NS = 240 * NS
"""The samples that are compared lie within this, so that launches counted 1 s of 15 s are enough."""


@dataclass(frozen=True, slots=True)
class Use:
    """Launches of a process, all its streams together, where both kinds were counted and there were any.

    Attributes:
        rows: a row of each sample, shape (n,).
        plain: kernel launches per second, shape (n,).
        graphs: graph launches per second, shape (n,).
    """

    rows: Rows
    plain: Floats
    graphs: Floats

    @property
    def share(self) -> Floats:
        """Graph launches of all launches, shape (n,)."""
        return self.graphs / (self.graphs + self.plain)


@dataclass(frozen=True, slots=True)
class Fallback:
    """A change from graphs to plain launches.

    Attributes:
        row: of the first sample after it.
        t1: time of the last sample that was compared.
        share: of graphs before and after, 0 to 1.
        plain: launches per second before and after.
        graphs: likewise graph launches.
    """

    row: np.void
    t1: int
    share: tuple[float, float]
    plain: tuple[float, float]
    graphs: tuple[float, float]


def use_of(rows: Rows, plain: Floats, graphs: Floats, own: Times) -> Use:
    """Launches per sample of one process.

    Args:
        rows: of channel `stream`, in time order, shape (n,).
        plain: kernel launches of each, shape (n,).
        graphs: graph launches of each, shape (n,).
        own: indices of those of the process, at least one.
    """
    firsts = np.flatnonzero(np.append(True, np.diff(rows["t"][own]) != 0))
    plain, graphs = np.add.reduceat(plain[own], firsts), np.add.reduceat(graphs[own], firsts)
    dt_s = rows["dt_ns"][own[firsts]] / 1e9
    good = (plain + graphs > 0) & (dt_s > 0)
    dt_s = dt_s[good]
    return Use(rows[own[firsts[good]]], plain[good] / dt_s, graphs[good] / dt_s)


def fallbacks(use: Use, *, least_per_s: float, fall: float, rise: float) -> Iterator[Fallback]:
    """Changes after which graphs are fewer and plain launches more, in the medians of `SIDE` samples.

    Args:
        use: of one process.
        least_per_s: graph launches per second before.
        fall: largest share and rate of graphs after, over those before.
        rise: least rate of plain launches after, over that before.
    """
    if len(use.rows) < 2 * (SIDE + NEAR) or use.share.min() > fall * use.share.max():
        return
    share, plain, graphs = (_sides(values) for values in (use.share, use.plain, use.graphs))
    on = (graphs[0] >= least_per_s) & (graphs[1] < graphs[0]) & (plain[1] >= rise * plain[0])
    # Prompts that come between decode steps add plain launches and take no graphs away.
    on &= (share[1] <= fall * share[0]) & (graphs[1] <= fall * graphs[0])
    t = use.rows["t"]
    for k in np.flatnonzero(on & _is_steepest(use.share)).tolist():
        first, last = k - NEAR, k + 2 * SIDE - 1 + NEAR
        if t[last] - t[first] <= SPAN_NS:
            pairs = (_pair(values, k) for values in (share, plain, graphs))
            yield Fallback(use.rows[k + SIDE], int(t[k + 2 * SIDE - 1]), *pairs)


def _sides(values: Floats) -> tuple[Floats, Floats]:
    """Median of the `SIDE` samples before each change there may be, and of those after it."""
    medians = np.median(np.lib.stride_tricks.sliding_window_view(values, SIDE), axis=1)
    return medians[:-SIDE], medians[SIDE:]


def _is_steepest(share: Floats) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether the means differ more there than at the `NEAR` places on either side, which must be known."""
    means = np.lib.stride_tricks.sliding_window_view(share, SIDE).mean(axis=1)
    drop = means[:-SIDE] - means[SIDE:]
    around = np.lib.stride_tricks.sliding_window_view(drop, 2 * NEAR + 1)
    steepest = np.zeros(len(drop), bool)
    steepest[NEAR : len(drop) - NEAR] = np.argmax(around, axis=1) == NEAR
    return steepest


def _pair(sides: tuple[Floats, Floats], k: int) -> tuple[float, float]:
    return float(sides[0][k]), float(sides[1][k])
