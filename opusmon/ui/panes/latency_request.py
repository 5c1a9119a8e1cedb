"""One request: all its clocks on one axis, and under it what the GPUs and the kernel did in that time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from opusmon.channels import GPU, STALL, WHOLE_GPU
from opusmon.clock import NS
from opusmon.request_rows import LIMITS
from opusmon.schema import Rows
from opusmon.times import format_wall
from opusmon.ui import units
from opusmon.ui.panes.base import Frame
from opusmon.ui.panes.latency_list import Entry, outcome_of, share_words
from opusmon.ui.panes.latency_numbers import count_words
from opusmon.ui.panes.latency_read import Floats, read
from opusmon.ui.panes.streams_table import number_style, short_duration
from opusmon.ui.text import Line, clean, fill, fit, spread
from opusmon.ui.widgets.chart import sparks

LABEL_CELLS = 14
VALUE_CELLS = 9
CLOCKS = (
    ("headers", "headers_ns", "series1"),
    ("first event", "first_event_ns", "series1"),
    ("first token", "ttft_ns", "series3"),
    ("first answer", "first_answer_ns", "series0"),
    ("last token", "last_token_ns", "series0"),
    ("end", "e2e_ns", "series4"),
)
"""In the order they happen. Each line is marked from the clock before it to its own."""
PHASES = (("DNS", "dns_ns"), ("connect", "connect_ns"), ("TLS", "tls_ns"), ("sent late", "late_ns"))
MAX_GPUS = 4
MAX_STALLS = 6
LONGEST_STALL_NS = 60 * NS
"""Stalls that end up to this long after the request are looked at: they may have begun within it."""
_GPU_LINES = (("SM", "sm_util_pct", "series4"), ("HBM bw", "hbm_bw_pct", "series0"))


def request_lines(frame: Frame, entry: Entry, height: int) -> list[Line]:
    """A request in at most `height` lines; the clocks first, then its numbers, then what else happened."""
    if height <= 0:
        return []
    width = frame.size.width
    t1 = frame.t if entry.in_flight else int(entry.get("t"))
    t0 = t1 - (min(max(int(entry.age_ns), 0), t1) if math.isfinite(entry.age_ns) else 0)
    axis = max(width - LABEL_CELLS - VALUE_CELLS - 1, 0)
    clocks = _clocks(frame, entry, axis)
    numbers = [line for line in _numbers(frame, entry, width - 1) if line]
    gpus, stalls = _gpu_lines(frame, t0, t1, axis), _stall_lines(frame, t0, t1, axis)
    beside = [*gpus, *stalls]
    head = [_head(frame, entry), _axis(frame, t0, t1, axis)]
    # In a low pane the clocks matter most, then one line of numbers, then GPU and stalls.
    room = height - len(head)
    if room < len(clocks) + len(numbers) + len(beside):
        keep = max(room - len(clocks) - len(numbers), min(len(beside), 2) if room >= len(clocks) + 3 else 0)
        beside = _foremost(gpus, stalls, keep)
        numbers = numbers[: max(room - len(clocks) - len(beside), 0)]
    lines = [*head, *clocks, *beside, *(((" ", ""), *line) for line in numbers)]
    return lines[:height]


def _foremost(gpus: Sequence[Line], stalls: Sequence[Line], most: int) -> list[Line]:
    """At most so many lines, in their order: how busy the first GPU was, whether threads stood still, then the rest."""
    lines = [*gpus, *stalls]
    of_gpus, of_stalls = range(len(gpus)), range(len(gpus), len(lines))
    ranked = [*of_gpus[:1], *of_stalls[:1], *of_gpus[1:2], *of_stalls[1:], *of_gpus[2:]]
    return [lines[place] for place in sorted(ranked[:most])]


def _head(frame: Frame, entry: Entry) -> Line:
    outcome = outcome_of(frame, entry)
    fine = outcome == "ok" or entry.in_flight
    words = [
        ((f" request {entry.number} ", "title"),),
        ((outcome if fine else f"! {outcome}", "value" if fine else "warn"),),
        *(((entry.text(frame, name), "label"),) for name in ("error", "stop")),
        ((entry.text(frame, "endpoint"), "value"),),
        ((entry.text(frame, "model"), "label"),),
        ((entry.text(frame, "label"), "label"),),
        ((f"{entry.text(frame, 'source')}, start: {entry.text(frame, 'start')}", "dim"),),
        ((entry.text(frame, "id"), "dim"),),
    ]
    return fill([line for line in words if line[0][0]], frame.size.width)


def _axis(frame: Frame, t0: int, t1: int, cells: int) -> Line:
    """Wall time at both ends of the axis."""
    anchors = frame.view.anchors
    begin, end = format_wall(anchors, t0, 1), format_wall(anchors, t1, 1)
    line = spread(((begin, "dim"),), ((end, "dim"),), cells)
    return (
        (" " * LABEL_CELLS, ""),
        *fit(line, cells),
        (f" {short_duration(t1 - t0)}".ljust(VALUE_CELLS), "label"),
    )


def _clocks(frame: Frame, entry: Entry, cells: int) -> list[Line]:
    """One line for each clock that was read; of a request in flight, what it waits for."""
    lines: list[Line] = []
    before = 0.0
    for name, field, style in CLOCKS:
        value = entry.get(field)
        if value != value:
            continue
        lines.append(_clock(frame, name, (before, value), entry.age_ns, cells, style))
        before = max(before, value)
    if entry.in_flight:
        words = entry.text(frame, "phase") or "in flight"
        lines.append(_clock(frame, f"{words} +", (before, entry.age_ns), entry.age_ns, cells, "accent"))
    return lines


def _clock(frame: Frame, name: str, ends: tuple[float, float], age_ns: float, cells: int, style: str) -> Line:
    begin, end = (min(max(round(cells * ns / age_ns), 0), cells) if age_ns > 0 else 0 for ns in ends)
    full = frame.glyphs.bar_parts[-1]
    count = max(end - begin, 1 if cells else 0)
    begin = min(begin, max(cells - count, 0))
    rest = cells - begin - count
    return (
        (f" {name}".ljust(LABEL_CELLS)[:LABEL_CELLS], "label"),
        (frame.glyphs.track * begin, "dim"),
        (full * count, style),
        (frame.glyphs.track * rest, "dim"),
        (f" {short_duration(ends[1])}".ljust(VALUE_CELLS), "value"),
    )


# -- numbers -----------------------------------------------------------------------------------------------------


def _numbers(frame: Frame, entry: Entry, width: int) -> list[Line]:
    topics = (_gaps(entry), _tokens(frame, entry), _connection(frame, entry), _limits(entry))
    return [fill([part for part in topic if part], width) for topic in topics]


def _took(label: str, entry: Entry, field: str) -> Line:
    value = entry.get(field)
    return ((f"{label} ", "label"), (short_duration(value), number_style(value))) if value == value else ()


def _number(label: str, entry: Entry, field: str) -> Line:
    value = entry.get(field)
    return ((f"{label} ", "label"), (count_words(value), number_style(value))) if value == value else ()


def _gaps(entry: Entry) -> list[Line]:
    return [
        _number("chunks", entry, "chunks"),
        _took("gap mean", entry, "gap_mean_ns"),
        _took("p95", entry, "gap_p95_ns"),
        _took("longest", entry, "gap_max_ns"),
        _took("TPOT", entry, "tpot_ns"),
        _took("silent", entry, "silent_ns"),
        _took("no token for", entry, "no_token_ns"),
    ]


def _tokens(frame: Frame, entry: Entry) -> list[Line]:
    read = entry.get("cache_read_tokens")
    words = share_words(read, entry.get("input_tokens"))
    more = entry.text(frame, "usage_more")
    return [
        _number("tokens in", entry, "input_tokens"),
        (*_number("from cache", entry, "cache_read_tokens"), (f" ({words})", "dim")) if read == read else (),
        _number("to cache", entry, "cache_write_tokens"),
        _number("out", entry, "output_tokens"),
        _number("thinking", entry, "thinking_tokens"),
        _number("tool calls", entry, "tool_calls"),
        ((more, "dim"),) if more else (),
    ]


def _connection(frame: Frame, entry: Entry) -> list[Line]:
    del frame
    reused = entry.get("reused") == 1
    status, size = entry.get("status"), entry.get("response_b")
    return [
        (("HTTP ", "label"), (f"{status:.0f}", "value")) if status == status else (),
        (("connection reused", "label"),) if reused else (),
        *(_took(label, entry, field) for label, field in PHASES),
        (("sent ", "label"), (units.size(entry.get("request_b")), "value")) if size == size else (),
        (("received ", "label"), (units.size(size), "value")) if size == size else (),
        _took("opusmon added", entry, "own_ns"),
        _took("per chunk", entry, "own_chunk_ns"),
    ]


def _limits(entry: Entry) -> list[Line]:
    left = [(name, entry.get(f"left_{name}"), entry.get(f"limit_{name}")) for name in LIMITS]
    parts: list[Line] = [
        ((f"{name.replace('_', ' ')} left ", "label"), (share_words(now, limit), "value"))
        for name, now, limit in left
        if now == now and limit > 0
    ]
    wait = entry.get("retry_after_s")
    retry = entry.get("retry")
    parts.append(((f"retry {retry:.0f}", "warn" if retry > 0 else "dim"),) if retry == retry else ())
    parts.append((("retry after ", "label"), (short_duration(wait * 1e9), "warn")) if wait == wait else ())
    return parts


# -- what else happened ------------------------------------------------------------------------------------------


def _gpu_lines(frame: Frame, t0: int, t1: int, cells: int) -> list[Line]:
    """SM and HBM bandwidth of the first GPUs on the same axis, each with its mean in that time."""
    columns = cells * frame.glyphs.columns_per_cell
    rows = read(frame.view, GPU, t0, t1 + 2 * NS)  # a row covers the time before it
    if not columns or not len(rows):
        return []
    rows = rows[rows["gi"] == WHOLE_GPU]
    found = np.unique(rows["gpu"]).tolist()
    lines: list[Line] = []
    for gpu in found[:MAX_GPUS]:
        own = rows[rows["gpu"] == gpu]
        for name, field, style in _GPU_LINES:
            values = sampled(own, field, t0, t1, columns)
            if np.isnan(values).all():
                continue
            picture = sparks(values[None], cells, 0.0, 100.0, frame.glyphs)[0]
            label = f" GPU {gpu} {name}".ljust(LABEL_CELLS)[:LABEL_CELLS]
            mean = f" {np.nanmean(values):.0f} %".ljust(VALUE_CELLS)
            lines.append(((label, "label"), (picture, style), (mean, "value")))
    more = len(found) - MAX_GPUS
    return [*lines, ((f" +{more} more GPUs", "dim"),)] if more > 0 else lines


def sampled(rows: Rows, field: str, t0: int, t1: int, columns: int) -> Floats:
    """A gauge at the middle of each column of (t0, t1]; NaN where no row covers it.

    Args:
        rows: of one series, by time, each over [t - dt_ns, t].
        field: the gauge.
        t0: begin, monotonic ns.
        t1: end.
        columns: how many, over 0.
    """
    middles = t0 + (np.arange(columns) + 0.5) * (t1 - t0) / columns
    place = np.searchsorted(rows["t"], middles, side="left")
    inside = np.minimum(place, len(rows) - 1)
    covered = (place < len(rows)) & (rows["t"][inside] - rows["dt_ns"][inside] * 1.5 <= middles)
    return np.where(covered, rows[field][inside].astype(np.float64), math.nan)


def _stall_lines(frame: Frame, t0: int, t1: int, cells: int) -> list[Line]:
    """Where threads stood still in that time, and the longest of those stalls in words."""
    rows = read(frame.view, STALL, t0, min(t1 + LONGEST_STALL_NS, frame.t))
    if not cells or not len(rows):
        return []
    rows = rows[(rows["t"] - np.nan_to_num(rows["dur_ns"], nan=0.0)) <= t1]
    if not len(rows):
        return [((" stalls".ljust(LABEL_CELLS), "label"), ("none seen in that time", "dim"))]
    covered = np.zeros(cells, dtype=np.bool_)
    scale = cells / max(t1 - t0, 1)
    ends = np.clip(np.ceil((rows["t"] - t0) * scale), 1, cells).astype(np.int64)
    begins = np.floor((rows["t"] - np.nan_to_num(rows["dur_ns"], nan=0.0) - t0) * scale)
    for begin, end in zip(
        np.clip(begins, 0, cells - 1).astype(np.int64).tolist(), ends.tolist(), strict=True
    ):
        covered[begin : max(end, begin + 1)] = True
    marks = "".join("!" if hit else frame.glyphs.track for hit in covered.tolist())
    head: Line = (
        (" stalls".ljust(LABEL_CELLS), "label"),
        (marks, "warn"),
        (f" {len(rows)}".ljust(VALUE_CELLS), "value"),
    )
    longest = np.argsort(-np.nan_to_num(rows["dur_ns"], nan=0.0), kind="stable")[:MAX_STALLS]
    return [head, _stall_words(frame, [rows[n : n + 1] for n in longest.tolist()])]


def _stall_words(frame: Frame, rows: Sequence[Rows]) -> Line:
    text = frame.view.strings.text
    parts: list[Line] = []
    for row in rows:
        kind, process, thread = (clean(text(int(row[name][0]))) for name in ("kind", "process", "thread"))
        who = f"{process}/{thread}" if thread and thread != process else process
        parts.append(
            (
                (f"{kind.replace('_', ' ')} ", "label"),
                (short_duration(float(row["dur_ns"][0])), "value"),
                (f" {who}", "dim"),
            )
        )
    return ((" " * LABEL_CELLS, ""), *fill(parts, frame.size.width - LABEL_CELLS))
