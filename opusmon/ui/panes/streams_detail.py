"""One stream in full: its numbers with their units, and how long its waits were."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from opusmon.ui import units
from opusmon.ui.panes.base import Frame
from opusmon.ui.panes.streams_bins import ROWS_NS
from opusmon.ui.panes.streams_state import CHANNEL, DIRECTIONS, Stream
from opusmon.ui.panes.streams_table import (
    bubble_words,
    number_style,
    percent_words,
    short_duration,
    short_number,
)
from opusmon.ui.text import Line, fill, fit
from opusmon.ui.widgets.chart import bar, strip

HISTOGRAM: tuple[tuple[str, str], ...] = (
    ("wait_lt_10us", "<10 us"),
    ("wait_lt_100us", "10-100 us"),
    ("wait_lt_1ms", "0.1-1 ms"),
    ("wait_lt_10ms", "1-10 ms"),
    ("wait_lt_100ms", "10-100 ms"),
    ("wait_lt_1s", "0.1-1 s"),
    ("wait_ge_1s", ">=1 s"),
)
"""Fields that count waits by how long they took, and what they are called."""
HISTOGRAM_LINES = len(HISTOGRAM) + 1
SIDE_CELLS = 52
"""Of a histogram beside the numbers."""
_LABEL_CELLS, _COUNT_CELLS = 10, 9
BESIDE_CELLS = 120
"""From this width on the histogram stands beside the numbers."""


def wait_counts(frame: Frame, stream: Stream) -> list[float]:
    """Waits of a stream in the span by how long they took, as `HISTOGRAM`; NaN where none was counted."""
    view, t0 = frame.view, frame.t - frame.span_ns
    fields = [field for field, _ in HISTOGRAM]
    raw = frame.span_ns <= ROWS_NS
    rows = (
        view.query(CHANNEL, t0, frame.t)
        if raw
        else view.binned(CHANNEL, fields, t0, frame.t, max(frame.span_ns, 1))
    )
    if not len(rows):
        return [math.nan] * len(fields)
    rows = rows[(rows["stream"] == np.uint64(stream.stream)) & (rows["pid"] == stream.pid)]
    return [_total(rows[field] if raw else rows[f"{field}_mean"] * rows[f"{field}_n"]) for field in fields]


def _total(values: np.ndarray[tuple[Any, ...], np.dtype[np.floating]]) -> float:
    known = values[~np.isnan(values)]
    return float(known.sum()) if len(known) else math.nan


def histogram_lines(frame: Frame, stream: Stream, width: int) -> list[Line]:
    """A heading and one line for each length of wait: count, bar, and share of all waits."""
    counts = wait_counts(frame, stream)
    total = sum(count for count in counts if count == count)
    words = f"{total:.0f} waits in {units.span(frame.span_ns)}, by how long they took"
    lines: list[Line] = [((words, "label"),)]
    room = min(width - _LABEL_CELLS - _COUNT_CELLS - 8, 40)
    for (_, label), count in zip(HISTOGRAM, counts, strict=True):
        share = count / total if total > 0 else math.nan
        drawn = bar(share if share == share else 0.0, room, frame.glyphs, "series1")
        line: Line = (
            (label.rjust(_LABEL_CELLS), "label"),
            (units.number(count, _COUNT_CELLS), number_style(count)),
            (" ", ""),
            *drawn,
        )
        lines.append((*line, (f" {units.percent(100 * share, 3)}", number_style(share))))
    return lines


def histogram_strip(frame: Frame, stream: Stream) -> Line:
    """The same in one line: `12345 waits in 5m  <10 us _..:#_ >=1 s`."""
    counts = wait_counts(frame, stream)
    total = sum(count for count in counts if count == count)
    shares = [count / total if total > 0 else 0.0 * count for count in counts]
    return (
        (f"{total:.0f} waits in {units.span(frame.span_ns)}  ", "label"),
        (f"{HISTOGRAM[0][1]} ", "dim"),
        (strip(shares, frame.glyphs), "series1"),
        (f" {HISTOGRAM[-1][1]}", "dim"),
    )


def _part(label: str, value: float, words: str) -> Line:
    return ((f"{label} ", "label"), (words, number_style(value)))


def _each(label: str, field: str, unit: str, stream: Stream) -> Line:
    value = stream.per_s(field)
    return _part(label, value, f"{short_number(value)} {unit}")


def _took(label: str, ns: float, words: str = "") -> Line:
    return _part(label, ns, f"{short_duration(ns)}{words}")


def _copies(stream: Stream) -> list[Line]:
    rates = [(label, stream.per_s(field)) for label, field in DIRECTIONS]
    return [_part(label, value, units.rate(value)) for label, value in rates if label != "any" or value > 0]


def _launch_call(frame: Frame, stream: Stream) -> list[Line]:
    """Mean and longest launch call; where they are timed now and then only, when that was last."""
    mean_ns, longest_ns, age_ns = stream.call_ns, stream.longest_ns("launch_call_max_ns"), 0
    if math.isnan(mean_ns):
        mean_ns, longest_ns, age_ns = _last_timed(frame, stream)
    words = f", max {short_duration(longest_ns)}" if not math.isnan(longest_ns) else ""
    found = [_took("call", mean_ns, words)]
    return [*found, _took("timed", age_ns, " ago")] if age_ns else found


def _last_timed(frame: Frame, stream: Stream) -> tuple[float, float, int]:
    """Mean and longest call of the newest row in the span that has them, ns, and its age; NaN where none has."""
    rows = frame.view.query(CHANNEL, frame.t - min(frame.span_ns, ROWS_NS), frame.t)
    if "launch_call_max_ns" in (rows.dtype.names or ()):
        own = (rows["stream"] == np.uint64(stream.stream)) & (rows["pid"] == stream.pid)
        rows = rows[own & ~np.isnan(rows["launch_call_ns"])]
        if len(rows):
            row = rows[-1]
            age_ns = max(frame.t - int(row["t"]), 1)
            return float(row["launch_call_ns"]), float(row["launch_call_max_ns"]), age_ns
    return math.nan, math.nan, 0


def number_lines(frame: Frame, stream: Stream, width: int) -> list[Line]:
    """Every number of a stream, a topic a line; what does not fit in `width` cells is left out."""
    head: Line = (
        (stream.name, "title"),
        ("  pid ", "label"),
        (str(stream.pid), "value"),
        ("  thread ", "label"),
        (f"{stream.row.get('tid', 0):.0f}", "value"),
        ("  stream ", "label"),
        (stream.handle(20), "value"),
    )
    share = stream.graph_share_pct
    waits_pct, bubble_pct = stream.wait_ms_per_s, stream.bubble_pct
    topics: Sequence[Sequence[Line]] = (
        (
            _each("kernels", "launches", "per s", stream),
            _each("graphs", "graph_launches", "per s", stream),
            _part("graph share", share, percent_words(share)),
            *_launch_call(frame, stream),
        ),
        (_each("copies", "copies", "per s", stream), *_copies(stream)),
        (
            _part("wait", waits_pct, f"{short_number(waits_pct)} ms/s"),
            _each("in", "waits", "waits per s", stream),
            _took("mean", stream.mean_ns("wait_ns", "waits")),
            _took("longest", stream.longest_ns("wait_max_ns")),
            _each("not ready", "not_ready", "polls per s", stream),
        ),
        (
            _part("bubble", bubble_pct, bubble_words(bubble_pct)),
            _each("in", "bubbles", "gaps per s", stream),
            _took("mean", stream.mean_ns("bubble_ns", "bubbles")),
            _took("longest", stream.longest_ns("bubble_max_ns")),
            _took("last launch", stream.since_launch_ns, " ago"),
        ),
    )
    return [head, *(fill(topic, width - 1) for topic in topics)]


NUMBER_LINES = 5


def detail_lines(frame: Frame, stream: Stream, height: int) -> list[Line]:
    """A stream in at most `height` lines: its numbers, and the histogram beside, under, or in one line of them."""
    width = frame.size.width
    numbers = [((" ", ""), *line) for line in number_lines(frame, stream, width - 1)]
    if width >= BESIDE_CELLS and height >= HISTOGRAM_LINES:
        left = width - SIDE_CELLS
        numbers = [((" ", ""), *line) for line in number_lines(frame, stream, left - 1)]
        beside = histogram_lines(frame, stream, SIDE_CELLS - 1)
        numbers += [()] * (len(beside) - len(numbers))
        return [(*fit(line, left), *other) for line, other in zip(numbers, beside, strict=True)]
    if height >= NUMBER_LINES + HISTOGRAM_LINES:
        return [*numbers, *(((" ", ""), *line) for line in histogram_lines(frame, stream, width - 2))]
    if height > 2:
        return [*numbers[: height - 1], ((" ", ""), *histogram_strip(frame, stream))]
    return numbers[:height]
