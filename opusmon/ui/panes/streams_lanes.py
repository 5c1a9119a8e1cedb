"""A lane per stream over the span: what the host did with it, one mark per bin."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from opusmon.channels import GPU, WHOLE_GPU
from opusmon.schema import Rows
from opusmon.ui import units
from opusmon.ui.glyphs import Glyphs
from opusmon.ui.panes.base import Frame, View
from opusmon.ui.panes.history import Floats, Ints, histories
from opusmon.ui.panes.streams_bins import BUBBLE_DT, LONGEST, Flags, Sums, Wanted, recent_rows, summed, wanted
from opusmon.ui.panes.streams_state import Device, Stream, snapshot
from opusmon.ui.text import STYLES, Line, fill, fit, join, line_cells, pad, spread
from opusmon.ui.widgets.chart import chart, sparks

WAIT_PCT = 50
"""From this share of a bin on, waits are what the stream did in it."""
BUBBLE_PCT = 20
LONG_BUBBLE_PCT = 50
"""Bubbles come before waits: a stream that waits is normal, one that has nothing to wait for is not."""

Codes = np.ndarray[tuple[Any, ...], np.dtype[np.int8]]


@dataclass(frozen=True, slots=True)
class Mark:
    """What a lane shows for a bin; `ascii` and `block` are its characters, `words` its place in the legend."""

    ascii: str
    block: str
    style: str
    words: str


MARKS: tuple[Mark, ...] = (
    Mark(" ", " ", "", ""),
    Mark(".", ".", "dim", "none"),
    Mark("-", "▂", "series0", "copies"),
    Mark("=", "▄", "series0", "kernels"),
    Mark("#", "█", "series0", "graphs"),
    Mark("w", "▒", "series1", f"wait {WAIT_PCT} %+"),
    Mark("o", "o", "accent", f"bubble {BUBBLE_PCT} %+"),
    Mark("O", "O", "accent", f"{LONG_BUBBLE_PCT} %+"),
    Mark("?", "?", "dim", "not counted"),
)
"""By code."""
NOTHING, IDLE, COPIES, KERNELS, GRAPHS, WAIT, BUBBLE, LONG_BUBBLE, UNCOUNTED = range(len(MARKS))
_STYLE_OF = np.array([STYLES.index(mark.style) for mark in MARKS], dtype=np.int8)
_LEGEND = (GRAPHS, KERNELS, COPIES, WAIT, BUBBLE, LONG_BUBBLE, IDLE)


def _char(mark: Mark, glyphs: Glyphs) -> str:
    return mark.ascii if glyphs.name == "ascii" else mark.block


def legend(width: int, glyphs: Glyphs, span_ns: int) -> Line:
    """What the marks mean, over what time, and that they are not GPU time."""
    parts: list[Line] = [
        ((_char(MARKS[code], glyphs), MARKS[code].style), (f" {MARKS[code].words}", "dim"))
        for code in _LEGEND
    ]
    parts.append(((f"last {units.span(span_ns)}", "dim"),))
    return fill([*parts, (("by host evidence, not GPU time", "dim"),)], width)


def axis(span_ns: int, width: int) -> str:
    """The time axis over lanes, seconds before the playhead: `-5m ... -2m30s ... 0`."""
    left, middle, right = f"-{units.span(span_ns)}", f"-{units.span(span_ns // 2)}", "0"
    start = (width - len(middle)) // 2
    if start <= len(left):
        return pad(left, width - 1) + right if width > len(left) + 1 else pad("", width)
    return pad(pad(left, start) + middle, width - 1) + right


def lanes(frame: Frame, streams: Sequence[Stream], width: int, interval_ns: int) -> list[Line]:
    """The lanes of streams, `width` cells each, oldest at the left, ending at the playhead."""
    if width <= 0 or not streams or frame.span_ns <= 0:
        return [()] * len(streams)
    codes = lane_codes(frame, streams, width, interval_ns)
    places = np.arange(width) * codes.shape[1] // width
    characters = {code: _char(mark, frame.glyphs) for code, mark in enumerate(MARKS)}
    wide = codes[:, places]
    styles = _STYLE_OF[wide]
    changed = styles[:, 1:] != styles[:, :-1]
    texts = [row.tobytes().decode("ascii").translate(characters) for row in wide]
    return [_runs(text, row, edges) for text, row, edges in zip(texts, styles, changed, strict=True)]


def _runs(text: str, styles: Codes, changed: Flags) -> Line:
    """A lane as spans, one for each run of a style."""
    edges = [0, *(np.flatnonzero(changed) + 1).tolist(), len(text)]
    names = [STYLES[style] for style in styles[edges[:-1]].tolist()]
    return tuple((text[a:b], name) for a, b, name in zip(edges[:-1], edges[1:], names, strict=True))


def lane_codes(frame: Frame, streams: Sequence[Stream], columns: int, interval_ns: int) -> Codes:
    """What each stream did in each bin of the span.

    Args:
        frame: what and when.
        streams: which.
        columns: most bins wanted.
        interval_ns: time between rows.

    Returns:
        Indices of `MARKS`, shape (streams, bins), oldest first.
    """
    everyone = snapshot(frame).series  # those in sight change with every sample, all of them seldom
    codes = _codes(frame, replace(wanted(frame, (), columns, interval_ns), series=everyone))
    places = {key: place for place, key in enumerate(everyone)}
    return codes[[places[stream.pid, stream.stream] for stream in streams]]


class LaneCodes:
    """Remembers the bins of the last frame: of the next one only those that new rows fall into are computed.

    Rows are only ever added, so the number of rows in the bins kept says whether one came late; then, and when a
    wait or a bubble reaches back over a bin, everything is computed anew. Wide spans are read from bins, and only
    when a row has come.
    """

    def __init__(self) -> None:
        self._view: weakref.ref[View] | None = None
        self._want: Wanted | None = None
        self._newest: tuple[int, int] = (0, 0)
        self._counts = np.zeros(0, dtype=np.int64)
        self._codes: Codes = np.zeros((0, 0), dtype=np.int8)

    def __call__(self, frame: Frame, want: Wanted) -> Codes:
        """The codes of the bins, shape (streams, bins)."""
        rows = recent_rows(frame, want)
        newest = (len(rows), int(rows["t"][-1]) if len(rows) else 0)
        same = self._view is not None and self._view() is frame.view
        if not same or want != self._want or newest != self._newest:
            codes = self._extended(frame, want, rows) if same and want.raw else None
            self._codes = codes if codes is not None else _computed(frame, want, rows)
            self._counts = _row_counts(want, rows) if want.raw else self._counts
            self._view, self._want, self._newest = weakref.ref(frame.view), want, newest
        return self._codes

    def _extended(self, frame: Frame, want: Wanted, rows: Rows) -> Codes | None:
        """The last answer moved on, with its last bin and the bins after it computed; None when that is not all."""
        last = self._want
        if (
            last is None
            or not len(rows)
            or (last.step, last.count, last.raw, last.series)
            != (
                *(want.step, want.count, want.raw),
                want.series,
            )
        ):
            return None
        moved = (want.first_t - last.first_t) // want.step
        if not 0 <= moved < want.count - 1:
            return None
        kept = want.count - 1 - moved
        tail_t = want.first_t + kept * want.step
        before = int(np.searchsorted(rows["t"], tail_t))
        if before != int(self._counts[moved : moved + kept].sum()):
            return None
        tail = rows[before:]
        if any((tail[name] > want.step).any() for name in LONGEST):
            return None
        ends = replace(want, first_t=tail_t, count=moved + 1)
        return np.concatenate([self._codes[:, moved : moved + kept], _computed(frame, ends, tail)], axis=1)


_codes = LaneCodes()


def _computed(frame: Frame, want: Wanted, rows: Rows) -> Codes:
    sums = summed(frame, want, rows)
    empty: Codes = np.zeros((len(want.series), want.count), dtype=np.int8)
    return _coded(sums) if sums is not None else empty


def _row_counts(want: Wanted, rows: Rows) -> Ints:
    """Rows in each bin, of whatever stream."""
    edges = want.first_t + np.arange(want.count + 1) * want.step
    return np.diff(np.searchsorted(rows["t"], edges))


def _coded(sums: Sums) -> Codes:
    """The mark of each bin: the first that fits, in order of what the reader should see."""
    totals, bubble_pct = sums.totals, sums.bubble_pct
    seen = totals["dt_ns"] > 0
    codes = np.select(
        [
            (bubble_pct >= LONG_BUBBLE_PCT) | sums.covered["bubble_max_ns"],
            bubble_pct >= BUBBLE_PCT,
            (sums.wait_pct >= WAIT_PCT) | sums.covered["wait_max_ns"],
            totals["graph_launches"] > 0,
            totals["launches"] > 0,
            totals["copies"] > 0,
            seen & ~sums.counted,
            seen,
        ],
        [LONG_BUBBLE, BUBBLE, WAIT, GRAPHS, KERNELS, COPIES, UNCOUNTED, IDLE],
        NOTHING,
    )
    return codes.astype(np.int8)


def stream_charts(frame: Frame, stream: Stream, indent: int, height: int, interval_ns: int) -> list[Line]:
    """How much a stream was waited for and how much of the time was bubbles, under the lanes, in `height` lines.

    The upper edge is all of the time, the lower one none of it.
    """
    width = frame.size.width - indent
    if width <= 0 or height < 2 or frame.span_ns <= 0:
        return []
    want = wanted(frame, [stream], width * frame.glyphs.columns_per_cell, interval_ns)
    sums = summed(frame, want, recent_rows(frame, want))
    if sums is None:
        return []
    wait_pct = np.where(sums.covered["wait_max_ns"], 100.0, sums.wait_pct)
    bubble_pct = np.where(sums.covered["bubble_max_ns"], 100.0, sums.bubble_pct)
    seen = [sums.totals[name] > 0 for name in ("dt_ns", BUBBLE_DT)]
    tall = height // 2
    return [
        *_chart(
            frame,
            "wait",
            np.where(seen[0], wait_pct, np.nan)[0],
            indent,
            height - tall,
            "series1",
        ),
        *_chart(frame, "bubble", np.where(seen[1], bubble_pct, np.nan)[0], indent, tall, "accent"),
    ]


def _chart(frame: Frame, name: str, pct: Floats, indent: int, height: int, style: str) -> list[Line]:
    """A history of per cents with its name and scale to the left of it."""
    picture = chart(pct, frame.size.width - indent, height, 0.0, 100.0, frame.glyphs, style=style)
    labels = [f"{name} 100 % ", *[""] * (height - 2), "0 % "][:height]
    return [((pad(label, indent, ">"), "dim"), *line) for label, line in zip(labels, picture, strict=True)]


def device_lanes(
    frame: Frame, devices: Sequence[Device], indent: int, interval_ns: int, note: Line = ()
) -> list[Line]:
    """The measured SM activity of GPUs over the same time, for comparison with the lanes under it.

    Args:
        frame: what, when and how wide.
        devices: one line each.
        indent: where the lanes begin, cells.
        interval_ns: between rows.
        note: stands right before the history of the first one.
    """
    width = frame.size.width - indent
    columns = max(width, 0) * frame.glyphs.columns_per_cell
    fields = {_activity_field(device) for device in devices}
    found = histories(frame, "gpu", sorted(fields), GPU.key, columns, interval_ns)
    lines: list[Line] = []
    for place, device in enumerate(devices):
        series = found.get((device.gpu, WHOLE_GPU))
        picture = (
            sparks(series[_activity_field(device)][None], width, 0.0, 100.0, frame.glyphs)[0]
            if series
            else ""
        )
        words: Line = ((" ", ""), *device_words(device))
        label = spread(words, () if place else note, indent - 1)
        lines.append((*fit(label, indent), (picture, "series4")))
    return lines


def _activity_field(device: Device) -> str:
    return "gpu_busy_pct" if device.sm_pct != device.sm_pct else "sm_util_pct"  # NaN


def device_words(device: Device) -> Line:
    """`GPU 0 SM 84 % measured`; where SMs are not measured, the share of time in which any kernel ran."""
    name = (f"GPU {device.gpu} ", "label")
    if device.sm_pct == device.sm_pct:
        return (name, (f"SM {units.percent(device.sm_pct, 0)}", "value"), (" measured", "dim"))
    if device.busy_pct == device.busy_pct:
        return (name, (f"busy {units.percent(device.busy_pct, 0)}", "value"), (" measured", "dim"))
    return (name, ("SM --", "dim"))


def devices_words(devices: Sequence[Device], width: int) -> Line:
    """The activity of all GPUs: in full, or in short by number where that does not fit in `width` cells."""
    if not devices:
        return (("SM not measured", "dim"),)
    full = join(device_words(device) for device in devices)
    if line_cells(full) <= width:
        return full
    parts: list[Line] = [(("SM measured", "label"),)]
    for device in devices:
        value = units.percent(device.sm_pct, 0) if device.sm_pct == device.sm_pct else "--"
        parts.append(((f"{device.gpu} ", "label"), (value, "value")))
    return fill(parts, width)
