"""What streams did in each bin of the span, summed from their rows.

Up to `ROWS_NS` the rows themselves are summed, a tenth of the work that general bins take; wider spans are read
from the rollups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from opusmon.clock import NS
from opusmon.schema import Rows
from opusmon.ui.panes.base import Frame
from opusmon.ui.panes.history import Floats, Ints, nice_step
from opusmon.ui.panes.streams_state import CHANNEL, Stream

ROWS_NS = 15 * 60 * NS
RECENT_NS = 30 * NS
"""Wide spans are read anew when a row has come in this time."""
SUMS = ("dt_ns", "launches", "graph_launches", "copies", "wait_ns", "bubble_ns")
LONGEST = ("wait_max_ns", "bubble_max_ns")
BUBBLE_DT = "bubble_dt_ns"
"""Time in which bubbles could be told: they end with a launch, and launches are not always counted."""

_MULTIPLIERS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))
"""Odd, so that multiplying loses nothing; they make one number of a handle and a process."""

Flags = np.ndarray[tuple[Any, ...], np.dtype[np.bool_]]
Chosen = Ints | slice


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which bins, and of whom.

    Attributes:
        first_t: where the first one begins, ns.
        step: their width, ns.
        count: how many there are.
        raw: they are summed from rows.
        series: process and handle of each stream.
    """

    first_t: int
    step: int
    count: int
    raw: bool
    series: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Sums:
    """The bins of streams, each array of shape (streams, bins), oldest first.

    Attributes:
        totals: sums by field of `SUMS`, and `BUBBLE_DT`.
        covered: by field of `LONGEST`, the bins within a single wait or bubble longer than a bin.
        counted: launches were counted in a part of the bin.
    """

    totals: Mapping[str, Floats]
    covered: Mapping[str, Flags]
    counted: Flags

    @property
    def wait_pct(self) -> Floats:
        """Host time in waits, per cent of the time."""
        return 100 * self.totals["wait_ns"] / np.maximum(self.totals["dt_ns"], 1.0)

    @property
    def bubble_pct(self) -> Floats:
        """Bubbles, per cent of the time in which they could be told."""
        return 100 * self.totals["bubble_ns"] / np.maximum(self.totals[BUBBLE_DT], 1.0)


def wanted(frame: Frame, streams: Sequence[Stream], columns: int, interval_ns: int) -> Wanted:
    """The finest bins that fit the span into `columns`; the last one holds the playhead.

    Args:
        frame: what and when; its span is positive.
        streams: which.
        columns: most bins.
        interval_ns: time between rows.
    """
    step = nice_step(frame.span_ns, columns, interval_ns)
    count = -(-frame.span_ns // step)
    first_t = (frame.t // step - count + 1) * step
    series = tuple((stream.pid, stream.stream) for stream in streams)
    return Wanted(first_t, step, count, frame.span_ns <= ROWS_NS, series)


def recent_rows(frame: Frame, want: Wanted) -> Rows:
    """The rows to sum; for a wide span the newest ones, which tell whether there is anything new."""
    return frame.view.query(CHANNEL, want.first_t - 1 if want.raw else frame.t - RECENT_NS, frame.t)


def summed(frame: Frame, want: Wanted, rows: Rows) -> Sums | None:
    """The bins; None when there is no row in any.

    Args:
        frame: what and when.
        want: which.
        rows: from `recent_rows`.
    """
    if not want.raw:
        rows = frame.view.binned(CHANNEL, [*SUMS, *LONGEST], want.first_t - 1, frame.t, want.step)
    if not len(rows):
        return None
    mine, number = _of(rows, want.series)
    t = rows["t"][mine]
    places = np.clip((t - want.first_t) // want.step, 0, want.count - 1)
    bins = _Bins(number, places, (len(want.series), want.count))
    columns = _from_rows(rows, mine) if want.raw else _from_rollup(rows, mine)
    end_t = t if want.raw else np.minimum(t + want.step, frame.t)
    covered = {
        name: bins.covered((end_t - columns[name] - want.first_t) // want.step, columns[name] > want.step)
        for name in LONGEST
    }
    totals = {name: bins.total(columns[name]) for name in (*SUMS, BUBBLE_DT)}
    return Sums(totals, covered, bins.total(~np.isnan(columns["launches"])) > 0)


def _of(rows: Rows, series: Sequence[tuple[int, int]]) -> tuple[Chosen, Ints]:
    """Which rows are of these streams, and for each of those the place of its stream among them."""
    known = np.array([_code(stream, pid) for pid, stream in series], dtype=np.uint64)
    order = np.argsort(known)
    known = known[order]
    codes = rows["stream"] * _MULTIPLIERS[0] + rows["pid"].astype(np.uint64) * _MULTIPLIERS[1]
    at = np.minimum(np.searchsorted(known, codes), len(series) - 1)
    mine = np.flatnonzero(known[at] == codes)
    if len(mine) == len(rows):
        return slice(None), order[at]
    return mine, order[at[mine]]


def _code(stream: int, pid: int) -> int:
    return (stream * int(_MULTIPLIERS[0]) + pid * int(_MULTIPLIERS[1])) % 2**64


def _from_rows(rows: Rows, mine: Chosen) -> Mapping[str, Floats]:
    found = {name: rows[name][mine].astype(np.float64) for name in (*SUMS, *LONGEST)}
    return {**found, BUBBLE_DT: np.where(np.isnan(found["bubble_ns"]), 0.0, found["dt_ns"])}


def _from_rollup(rows: Rows, mine: Chosen) -> Mapping[str, Floats]:
    rows = rows[mine]
    sums = {name: rows[f"{name}_mean"] * rows[f"{name}_n"] for name in SUMS}
    found = {**sums, **{name: rows[f"{name}_max"] for name in LONGEST}}
    return {**found, BUBBLE_DT: sums["dt_ns"] * rows["bubble_ns_n"] / np.maximum(rows["n"], 1)}


@dataclass(frozen=True)
class _Bins:
    """Where rows belong: stream and bin of each, and how many of both there are."""

    number: Ints
    places: Ints
    shape: tuple[int, int]

    @cached_property
    def flat(self) -> Ints:
        """Both as one number."""
        return self.number * self.shape[1] + self.places

    def total(self, values: np.ndarray[tuple[Any, ...], np.dtype[Any]]) -> Floats:
        """Sums of values by stream and bin; missing ones count as 0."""
        missing = np.isnan(values)
        known = np.where(missing, 0.0, values) if missing.any() else values
        sums = np.bincount(self.flat, weights=known, minlength=self.shape[0] * self.shape[1])
        return np.asarray(sums, dtype=np.float64).reshape(self.shape)

    def covered(self, begins: Floats, chosen: Flags) -> Flags:
        """Bins from where something began up to, without it, the bin of its row, for the chosen rows."""
        if not chosen.any():
            return np.zeros(self.shape, dtype=np.bool_)
        depth = np.zeros((self.shape[0], self.shape[1] + 1))
        number, places = self.number[chosen], self.places[chosen]
        begin = np.clip(begins[chosen] + 1, 0, places).astype(np.int64)
        np.add.at(depth, (number, begin), 1)
        np.add.at(depth, (number, places), -1)
        within: Flags = np.cumsum(depth, axis=1)[:, :-1] > 0
        return within
