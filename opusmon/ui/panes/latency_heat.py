"""The heat map of one latency of one source: time to the right, latency upwards on a logarithmic scale.

A bucket is spread evenly over the lines between its edges: a histogram says no more. Observations over the last edge
are drawn above it, in the top line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opusmon.channels import REQUEST
from opusmon.clock import NS
from opusmon.request_rows import MAX_NS, finished_ns
from opusmon.ui.panes.base import Frame
from opusmon.ui.panes.history import nice_step
from opusmon.ui.panes.latency_buckets import BucketRows
from opusmon.ui.panes.latency_numbers import Block
from opusmon.ui.panes.latency_read import ROWS_NS, Floats, Ints, Requests, binned
from opusmon.ui.panes.streams_table import short_duration
from opusmon.ui.text import Line, Span
from opusmon.ui.units import span as span_words
from opusmon.ui.widgets.heatmap import heatmap

GUTTER_CELLS = 8
MIN_LINES = 3
MAX_COLUMNS = 120
"""With more there is hardly a request in each: a wider map has wider columns."""
_SHOWN = ("ttft", "e2e", "tpot", "itl", "queue")
"""The first one that a source has is drawn."""
_NICE = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
_LEAST_NS, _MOST_NS = 1e5, 1e14
"""The scale stays within these: 0.1 ms and a day."""
_LEAST_TOP = 4.0
"""A single request is no dark spot."""


@dataclass(frozen=True, slots=True)
class Bins:
    """Equal bins of time, the last one holds the playhead.

    Attributes:
        first_t: where the first one begins, monotonic ns.
        step_ns: length of one.
        count: how many.
    """

    first_t: int
    step_ns: int
    count: int

    def place(self, t: Ints) -> Ints:
        """The bin of each instant; outside 0..count-1 when it is in none."""
        return (t - self.first_t - 1) // self.step_ns


def bins(frame: Frame, columns: int, interval_ns: int) -> Bins:
    """Bins that fit the span into `columns`: for single requests just as many, for scrapes with one in each at least.

    Args:
        frame: what and when.
        columns: most bins.
        interval_ns: between scrapes; 0 for requests.
    """
    exact = not interval_ns and frame.span_ns <= ROWS_NS
    step = nice_step(frame.span_ns, columns, interval_ns or NS)
    step = max(-(-frame.span_ns // columns), 1) if exact else step
    count = max(-(-frame.span_ns // step), 1)
    return Bins((-(-frame.t // step) - count) * step, step, count)


def heat_field(block: Block) -> str:
    """Which latency of a source is drawn, "" for none."""
    return next((field for field in _SHOWN if block.metric(field) is not None), "")


def heat_lines(
    frame: Frame,
    block: Block,
    requests: Requests,
    known: BucketRows | None,
    height: int,
    limits_ns: Sequence[float] = (),
) -> list[Line]:
    """A heading and the map, exactly `height` lines; nothing where there is too little room or nothing to draw.

    Args:
        frame: what, when and how wide.
        block: the source.
        requests: its requests are among them.
        known: its buckets are among them.
        height: lines.
        limits_ns: limits of objectives about this latency; their lines are marked.
    """
    field = heat_field(block)
    width = frame.size.width - GUTTER_CELLS
    if not field or height < MIN_LINES or width < 8 or frame.span_ns <= 0:
        return []
    each = 1 + width // MAX_COLUMNS
    placed = bins(frame, width // each, block.interval_ns)
    lines = height - 1
    if block.engine is not None:
        found = _of_buckets(block, field, known, placed, lines)
    else:
        found = _of_requests(frame, block, field, requests, placed, lines)
    if found is None:
        return []
    grid, edges = found
    top = max(float(np.nanmax(grid, initial=0.0)), _LEAST_TOP)
    drawn = heatmap(grid, width // each * each, frame.glyphs, top=top)
    labels = [_label(edges, line, lines, limits_ns) for line in range(lines)][::-1]
    return [_heading(frame, block, field, placed), *((*a, *b) for a, b in zip(labels, drawn, strict=True))]


def scale(low_ns: float, high_ns: float, lines: int) -> Floats:
    """Edges of the lines (ns), from the bottom up, between the nice numbers around two values, shape (lines + 1,)."""
    low = _nice(min(max(low_ns, _LEAST_NS), _MOST_NS / 10), up=False)
    high = _nice(min(max(high_ns, 2 * _LEAST_NS), _MOST_NS), up=True)
    if high <= low:
        high = low * 10
    return np.geomspace(low, high, lines + 1)


def _nice(value: float, *, up: bool) -> float:
    """The nearest nice number times a power of ten that is not below (up) or above it."""
    power = 10.0 ** math.floor(math.log10(value))
    steps = [factor * power for factor in (*_NICE, 10.0)]
    if up:
        return next(step for step in steps if step >= value * (1 - 1e-9))
    return next(step for step in reversed(steps) if step <= value * (1 + 1e-9))


def _of_requests(
    frame: Frame, block: Block, field: str, requests: Requests, placed: Bins, lines: int
) -> tuple[Floats, Floats] | None:
    """Counts by line and bin, and the edges of the lines; NaN in bins of which nothing is known."""
    rows = requests.of(block.start_id)
    if not len(rows):
        return None
    read_from = frame.t - requests.covers_ns
    parts = [(rows["t"], finished_ns(frame.view.strings, rows, field), np.ones(len(rows)))]
    wide = frame.span_ns > requests.covers_ns
    if wide and not frame.state.filter:
        parts += _rolled_up(frame, block, field, read_from, placed)
    t, values, weights = (np.concatenate(column) for column in zip(*parts, strict=True))
    place = placed.place(t)
    mine = ~np.isnan(values) & (weights > 0) & (place >= 0) & (place < placed.count)
    values, place = values[mine], place[mine]
    if not len(values):
        return None
    edges = scale(float(values.min()), float(values.max()), lines)
    line = np.clip(np.searchsorted(edges, values, side="left") - 1, 0, lines - 1)
    flat = np.bincount(line * placed.count + place, weights=weights[mine], minlength=lines * placed.count)
    grid = np.asarray(flat, dtype=np.float64).reshape(lines, placed.count)
    if wide and len(parts) == 1:
        grid[:, : max(int((read_from - placed.first_t) // placed.step_ns), 0)] = np.nan
    return grid, edges


def _rolled_up(
    frame: Frame, block: Block, field: str, until: int, placed: Bins
) -> list[tuple[Ints, Floats, Floats]]:
    """Of older requests the fastest and the slowest of each bin, the others at their mean: times, values, weights."""
    name = f"{field}_ns"
    rows = binned(frame.view, REQUEST, [name], placed.first_t, until, placed.step_ns)
    if block.start_id is None or not len(rows):
        return []
    rows = rows[rows["source"] == block.start_id[0]]
    n = rows[f"{name}_n"].astype(np.float64)
    parts = (("min", np.minimum(n, 1)), ("max", np.clip(n - 1, 0, 1)), ("mean", np.maximum(n - 2, 0)))
    times = np.minimum(rows["t"] + placed.step_ns, until)
    return [(times, rows[f"{name}_{part}"].astype(np.float64), weights) for part, weights in parts]


def _of_buckets(
    block: Block, field: str, known: BucketRows | None, placed: Bins, lines: int
) -> tuple[Floats, Floats] | None:
    """The same from buckets."""
    if known is None or block.engine is None:
        return None
    own = known.of(field, [block.engine])
    place = placed.place(known.t)
    slot = np.full(len(known.metric), -1, dtype=np.int64)
    slot[own] = np.arange(len(own))
    row = slot[known.bucket]
    mine = (row >= 0) & (place >= 0) & (place < placed.count) & (known.count > 0)
    if not mine.any():
        return None
    flat = np.bincount(
        row[mine] * placed.count + place[mine], weights=known.count[mine], minlength=len(own) * placed.count
    )
    counts = np.asarray(flat, dtype=np.float64).reshape(len(own), placed.count)
    sound = (known.lo_ns < known.hi_ns) & (known.lo_ns < MAX_NS) & (known.hi_ns > 0)
    used = (counts.sum(axis=1) > 0) & sound[own]
    if not used.any():
        return None
    lo, hi = known.lo_ns[own][used], known.hi_ns[own][used]
    edges = scale(*_range(lo, hi), lines)
    return overlap(lo, hi, edges).T @ counts[used], edges


def _range(lo: Floats, hi: Floats) -> tuple[float, float]:
    """Lowest and highest value to draw: an open bucket gets a part of the scale beyond its edge."""
    low = min((lo[lo > 0].min(initial=np.inf), hi.min()))
    if (lo <= 0).any():
        low = min(low, float(hi[lo <= 0].min()) / 2)
    finite = hi[hi < MAX_NS]
    high = float(finite.max(initial=0.0))
    if len(finite) < len(hi):
        high = max(high, 2 * float(lo[hi >= MAX_NS].max()))
    return float(low), high


def overlap(lo: Floats, hi: Floats, edges: Floats) -> Floats:
    """How a bucket's observations are spread over lines, shape (buckets, lines), each row sums to 1.

    Args:
        lo: lower edges, 0 and less for the first bucket.
        hi: upper edges, infinite for the last one.
        edges: of the lines, ascending, over 0.
    """
    lines = len(edges) - 1
    begin = np.log(np.clip(lo, edges[0], edges[-2])[:, None])
    end = np.log(np.clip(hi, edges[1], edges[-1])[:, None])
    logs = np.log(edges)
    shared = np.clip(np.minimum(end, logs[1:]) - np.maximum(begin, logs[:-1]), 0.0, None)
    open_end = np.isinf(hi)
    first = np.clip(np.searchsorted(edges, lo[open_end], side="right") - 1, 0, lines - 1)
    shared[open_end] = np.arange(lines) == first[:, None]
    total = shared.sum(axis=1, keepdims=True)
    return np.asarray(shared / np.where(total > 0, total, 1.0), dtype=np.float64)


def _label(edges: Floats, line: int, lines: int, limits_ns: Sequence[float]) -> Line:
    """What a line is called at the left: limits of objectives first, then the scale at every second line."""
    low, high = edges[line], edges[line + 1]
    limit = next((value for value in limits_ns if low < value <= high), None)
    if limit is not None:
        return _gutter(f"{short_duration(limit)}!", "accent")
    every = 2 if lines > 4 else 1
    if line % every == 0 or line == lines - 1:
        return _gutter(short_duration(low), "dim")
    return _gutter("", "dim")


def _gutter(words: str, style: str) -> Line:
    span: Span = (f"{words.rjust(GUTTER_CELLS - 1)} ", style)
    return (span,)


def _heading(frame: Frame, block: Block, field: str, placed: Bins) -> Line:
    metric = block.metric(field)
    name = metric.name if metric is not None else field
    words = f" {name} over {span_words(frame.span_ns)}, {block.source}"
    notes = [f"{short_duration(placed.step_ns)} a column"]
    if block.engine is None and frame.span_ns > ROWS_NS:
        older = (
            f"{frame.glyphs.unknown} not filtered"
            if frame.state.filter
            else "least, mean and most of a column, failures too"
        )
        notes.append(f"before the last {span_words(ROWS_NS)}: {older}")
    return ((words, "label"), (f"  ({'; '.join(notes)})", "dim"))
