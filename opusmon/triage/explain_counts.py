"""Events as series: how many and how long per grid step, and quantiles of requests and of histogram buckets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opusmon import quantiles
from opusmon.channels import BY_NAME, ENGINE_BUCKET, GPU_EVENT, REQUEST, REQUEST_OPEN, STALL
from opusmon.clock import NS
from opusmon.request_rows import BROKEN_OFF
from opusmon.schema import Rows, conform
from opusmon.triage.changes import Floats, Ints
from opusmon.triage.explain_series import Series, Spans, Subject, subject_of
from opusmon.triage.explain_words import FLOORS, LATENCY_FLOOR_NS
from opusmon.triage.scene import View

PIECE_NS = 600 * NS
"""Rows of a long range are read in pieces of about this length."""
LATE_NS = 60 * NS
"""A request is written when it ends; its first token may be so much earlier."""
BUCKET_NS = 5 * NS
"""A quantile of a histogram needs some observations: its grid is no finer."""

REQUESTS: tuple[tuple[str, str, float, str, str], ...] = (
    ("ttft_p50", "ttft_ns", 0.5, "ttft_ns", "ns"),
    ("ttft_p95", "ttft_ns", 0.95, "ttft_ns", "ns"),
    ("tpot_p50", "tpot_ns", 0.5, "e2e_ns", "ns"),
    ("tpot_p95", "tpot_ns", 0.95, "e2e_ns", "ns"),
    ("e2e_p50", "e2e_ns", 0.5, "e2e_ns", "ns"),
    ("e2e_p95", "e2e_ns", 0.95, "e2e_ns", "ns"),
    ("input_tokens_p50", "input_tokens", 0.5, "", "tokens"),
    ("input_tokens_p95", "input_tokens", 0.95, "", "tokens"),
    ("output_tokens_p50", "output_tokens", 0.5, "e2e_ns", "tokens"),
    ("retries_p95", "retry", 0.95, "e2e_ns", ""),
)
"""Quantity, field, quantile, how long after its start the request shows it ("" for at once), unit."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Steps of equal length over both ranges; the last one of each, where it is not whole, is left out.

    Attributes:
        step_ns: length of a step.
        pieces: start and number of steps of the pieces that rows are read in.
    """

    step_ns: int
    pieces: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, spans: Spans, least_ns: int = 0) -> Grid:
        """The grid of two ranges."""
        step = -(-max(spans.step_ns, least_ns) // spans.step_ns) * spans.step_ns
        most = max(1, PIECE_NS // step)
        pieces = []
        for t0, t1 in spans.parts:
            steps = (t1 - t0) // step
            pieces += [(t0 + n * step, min(most, steps - n)) for n in range(0, steps, most)]
        return cls(step, tuple(pieces))

    @property
    def t(self) -> Ints:
        """Ends of the steps, shape (steps,)."""
        ends = [t0 + (np.arange(n, dtype=np.int64) + 1) * self.step_ns for t0, n in self.pieces]
        return np.concatenate(ends) if ends else np.empty(0, np.int64)

    def read(self, view: View, channel: str, late_ns: int = 0) -> Iterator[tuple[int, int, int, Rows]]:
        """Of each piece: place of its first step, start, number of steps, and the rows."""
        place = 0
        for t0, n in self.pieces:
            rows = view.query(channel, t0, t0 + n * self.step_ns + late_ns)
            if len(rows):
                yield place, t0, n, conform(rows, BY_NAME[channel])
            place += n

    def steps(self, t: Ints, t0: int, n: int) -> Ints:
        """The step of each time within a piece; -1 outside of it."""
        step: Ints = -(-(t - t0) // self.step_ns) - 1
        return np.where((step >= 0) & (step < n), step, -1)


@dataclass(slots=True)
class _Columns:
    """Values per step of several series that appear as rows are read."""

    grid: Grid
    t: Ints
    found: dict[tuple[Any, ...], Floats] = field(default_factory=dict)
    subjects: dict[tuple[Any, ...], Subject] = field(default_factory=dict)

    @classmethod
    def over(cls, grid: Grid) -> _Columns:
        return cls(grid, grid.t)

    def put(self, key: tuple[Any, ...], place: int, values: Floats, fill: float) -> None:
        """Set the steps of one piece; steps never set read `fill`."""
        if key not in self.found:
            self.found[key] = np.full(len(self.t), fill)
        self.found[key][place : place + len(values)] = values

    def series(self, channel: str, units: Mapping[str, tuple[str, float]]) -> Iterator[Series]:
        """All of them; the last part of a key is the quantity, `units` has its unit and noise."""
        for key, x in self.found.items():
            unit, floor = units[key[-1]]
            who = self.subjects[key[:-1]]
            dt_ns = self.grid.step_ns
            yield Series(channel, key[-1], who.text, who.names, self.t, x, unit, dt_ns, floor)


def counts(view: View, spans: Spans) -> Iterator[Series]:
    """The series of everything that comes as events."""
    grid = Grid.of(spans)
    for name, read in (
        (STALL.name, _stalls),
        (GPU_EVENT.name, _gpu_events),
        (REQUEST.name, _requests),
        (REQUEST_OPEN.name, _open_requests),
    ):
        if name in view.channels:
            yield from read(view, grid)
    if ENGINE_BUCKET.name in view.channels:
        yield from _histograms(view, Grid.of(spans, BUCKET_NS))


def _groups(rows: Rows, names: tuple[str, ...]) -> Iterator[tuple[tuple[int, ...], Rows]]:
    """Rows by the values of some integer fields."""
    columns = np.stack([rows[name].astype(np.int64) for name in names], axis=1)
    values, place = np.unique(columns, axis=0, return_inverse=True)
    place = place.reshape(-1)
    for n, value in enumerate(values.tolist()):
        yield tuple(value), rows[place == n]


def _per_step(steps: Ints, n: int, weights: Floats | None, step_ns: int) -> Floats:
    """Counts, or sums of weights, per second in each step."""
    inside = steps >= 0
    sums = np.bincount(
        steps[inside],
        weights=None if weights is None else np.nan_to_num(weights[inside]),
        minlength=n,
    )
    return np.asarray(sums * (NS / step_ns), np.float64)


def _stalls(view: View, grid: Grid) -> Iterator[Series]:
    columns = _Columns.over(grid)
    for place, t0, n, rows in grid.read(view, STALL.name):
        for key, own in _groups(rows, ("pid", "kind")):
            kind = view.strings.text(key[1]).replace("_", " ")
            process = view.strings.text(int(own["process"][0]))
            columns.subjects.setdefault(key, Subject(f"{{0}} {key[0]} {kind}", (process,)))
            steps = grid.steps(own["t"], t0, n)
            columns.put((*key, "stalls"), place, _per_step(steps, n, None, grid.step_ns), 0.0)
            lasted = own["dur_ns"].astype(np.float64)
            columns.put((*key, "stall_ns"), place, _per_step(steps, n, lasted, grid.step_ns), 0.0)
    yield from columns.series(
        STALL.name, {"stalls": ("1/s", FLOORS["1/s"]), "stall_ns": ("ns/s", FLOORS["ns/s"])}
    )


def _gpu_events(view: View, grid: Grid) -> Iterator[Series]:
    columns = _Columns.over(grid)
    for place, t0, n, rows in grid.read(view, GPU_EVENT.name):
        for key, own in _groups(rows, ("gpu", "kind")):
            kind = view.strings.text(key[1]).replace("_", " ")
            columns.subjects.setdefault(key, Subject(f"gpu {key[0]} {kind}", ()))
            steps = grid.steps(own["t"], t0, n)
            columns.put((*key, "events"), place, _per_step(steps, n, None, grid.step_ns), 0.0)
    yield from columns.series(GPU_EVENT.name, {"events": ("1/s", FLOORS["1/s"])})


def _open_requests(view: View, grid: Grid) -> Iterator[Series]:
    """Requests in flight: the rows of an instant, averaged over the instants of a step."""
    columns = _Columns.over(grid)
    for place, t0, n, rows in grid.read(view, REQUEST_OPEN.name):
        for key, own in _groups(rows, ("source",)):
            columns.subjects.setdefault(key, Subject("({0})", (view.strings.text(key[0]),)))
            steps = grid.steps(own["t"], t0, n)
            instants = np.maximum(np.bincount(grid.steps(np.unique(own["t"]), t0, n) + 1, minlength=n + 1), 1)
            rate = np.bincount(steps + 1, minlength=n + 1) / instants
            columns.put((*key, "open"), place, rate[1:], 0.0)
    yield from columns.series(REQUEST_OPEN.name, {"open": ("", 0.5)})


def _requests(view: View, grid: Grid) -> Iterator[Series]:
    columns = _Columns.over(grid)
    for place, t0, n, rows in grid.read(view, REQUEST.name, LATE_NS):
        for key, own in _groups(rows, ("source", "model")):
            names = tuple(view.strings.text(number) for number in key)
            columns.subjects.setdefault(key, Subject("({0}, {1})" if names[1] else "({0})", names))
            _request_columns(view, columns, key, own, (place, t0, n))
    floors = {"ns": LATENCY_FLOOR_NS, "tokens": 1.0, "": 0.05}
    units = {quantity: (unit, floors[unit]) for quantity, _, _, _, unit in REQUESTS}
    units |= {"rate": ("1/s", FLOORS["1/s"]), "failed_pct": ("%", FLOORS["%"])}
    yield from columns.series(REQUEST.name, units)


def _request_columns(
    view: View, columns: _Columns, key: tuple[int, ...], rows: Rows, piece: tuple[int, int, int]
) -> None:
    place, t0, n = piece
    grid = columns.grid
    ended = grid.steps(rows["t"], t0, n)
    rate = _per_step(ended, n, None, grid.step_ns)
    columns.put((*key, "rate"), place, rate, 0.0)
    outcome = {number: view.strings.text(number) for number in np.unique(rows["outcome"]).tolist()}
    fine = [number for number, text in outcome.items() if text in ("ok", *BROKEN_OFF)]
    failed = _per_step(ended, n, (~np.isin(rows["outcome"], fine)).astype(np.float64), grid.step_ns)
    share = np.full(n, np.nan)
    np.divide(100 * failed, rate, out=share, where=rate > 0)
    columns.put((*key, "failed_pct"), place, share, math.nan)
    lasted = np.nan_to_num(rows["e2e_ns"])
    for quantity, name, q, shown, _ in REQUESTS:
        after = np.nan_to_num(rows[shown]) if shown else np.zeros(len(rows))
        steps = grid.steps(rows["t"] - (lasted - after).astype(np.int64), t0, n)
        columns.put((*key, quantity), place, by_step(steps, rows[name].astype(np.float64), n, q), math.nan)


def by_step(steps: Ints, values: Floats, n: int, q: float) -> Floats:
    """The q-quantile of the values of each step, by nearest rank; NaN where there are none, shape (n,)."""
    good = (steps >= 0) & np.isfinite(values)
    steps, values = steps[good], values[good]
    out = np.full(n, np.nan)
    order = np.lexsort((values, steps))
    count = np.bincount(steps, minlength=n)
    start = np.cumsum(count) - count
    some = count > 0
    rank = np.maximum(np.ceil(q * count - 1e-9).astype(np.int64), 1) - 1
    out[some] = values[order][(start + rank)[some]]
    return out


def _histograms(view: View, grid: Grid) -> Iterator[Series]:
    columns = _Columns.over(grid)
    units = {}
    for place, t0, n, rows in grid.read(view, ENGINE_BUCKET.name):
        for key, own in _groups(rows, ("engine", "model", "metric")):
            metric = view.strings.text(key[2])
            who = subject_of(view, ENGINE_BUCKET, own[0], ("engine", "model"))
            columns.subjects.setdefault(key, who)
            units[f"{metric}_p95"] = ("s", FLOORS["s"])
            steps = grid.steps(own["t"], t0, n)
            p95 = np.array([_p95(own[steps == step]) for step in range(n)])
            columns.put((*key, f"{metric}_p95"), place, p95, math.nan)
    yield from columns.series(ENGINE_BUCKET.name, units)


def _p95(rows: Rows) -> float:
    """p95 in s of the buckets of one step; NaN without observations."""
    if not len(rows):
        return math.nan
    return quantiles.quantile(quantiles.buckets(rows["lo_s"], rows["hi_s"], rows["count"]), 0.95).value
