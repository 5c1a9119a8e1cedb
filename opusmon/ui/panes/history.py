"""Histories over the span: bins that do not shimmer as the playhead moves, with holes where nothing was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from opusmon.clock import NS
from opusmon.schema import Rows
from opusmon.ui.panes.base import Frame

Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]
Ints = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]
History = Mapping[tuple[int, ...], Mapping[str, Floats]]

HOLD_INTERVALS = 2.5
"""Bins without a row are bridged up to this many intervals: one late tick is not a gap."""

_MS = 1_000_000
_STEPS_NS = (
    *(ms * _MS for ms in (100, 200, 500)),
    *(s * NS for s in (1, 2, 3, 4, 5, 6, 8, 10, 20, 30)),
    *(m * 60 * NS for m in (1, 2, 5, 10, 20, 30)),
    *(h * 3600 * NS for h in (1, 2, 4, 6, 12, 24)),
)
"""From 10 s on they are multiples of a recording's rollups, so that wide spans are read from those."""


def nice_step(span_ns: int, columns: int, interval_ns: int) -> int:
    """The finest bin width that fits the span into `columns` bins and has a row in every bin."""
    least = max(-(-span_ns // max(columns, 1)), interval_ns)
    return next((step for step in _STEPS_NS if step >= least), -(-least // _STEPS_NS[-1]) * _STEPS_NS[-1])


def histories(
    frame: Frame, channel: str, fields: Sequence[str], key: Sequence[str], columns: int, interval_ns: int
) -> History:
    """The peaks of fields over the span, oldest first, for every series of a channel.

    Args:
        frame: what and when.
        channel: its name.
        fields: numeric fields.
        key: the channel's identity fields.
        columns: most bins wanted.
        interval_ns: time between rows.

    Returns:
        By key values, then by field: shape (bins,), NaN where nothing was measured.
    """
    kind = frame.view.channels.get(channel)
    known = [name for name in fields if kind is not None and name in kind.by_name]
    if not known or columns <= 0 or frame.span_ns <= 0:
        return {}
    step = nice_step(frame.span_ns, columns, interval_ns)
    count = -(-frame.span_ns // step)
    first_t = (frame.t // step - count + 1) * step
    bins = frame.view.binned(channel, known, first_t - 1, frame.t, step)
    places = (bins["t"] - first_t) // step
    inside = (places >= 0) & (places < count)
    if not inside.any():
        return {}
    if not inside.all():
        bins, places = bins[inside], places[inside]
    names, number = _series(bins, key)
    source = _held(number, places, (len(names), count), int(HOLD_INTERVALS * interval_ns // step))
    grids = {name: np.append(bins[f"{name}_max"], np.nan)[source] for name in known}
    return {series: {name: grids[name][row] for name in known} for row, series in enumerate(names)}


def _series(bins: Rows, key: Sequence[str]) -> tuple[list[tuple[int, ...]], Ints]:
    """The series that the bins are of, by their key values, and for each bin which of them it is of."""
    code = np.zeros(len(bins), dtype=np.int64)
    for name in key:
        column = bins[name].astype(np.int64)
        low = int(column.min())
        code = code * (int(column.max()) - low + 1) + (column - low)
    _, first, number = np.unique(code, return_index=True, return_inverse=True)
    return list(zip(*(bins[name][first].tolist() for name in key), strict=True)), number.reshape(-1)


def _held(number: Ints, places: Ints, shape: tuple[int, int], hold: int) -> Ints:
    """For each series and place the bin that fills it, -1 for none.

    That is its own, or the one before it across a hole of at most `hold` places. A bin without a value is not a
    hole: it stays without one.
    """
    source = np.full(shape, -1, dtype=np.int64)
    source[number, places] = np.arange(len(places))
    if len(places) == source.size:
        return source
    order = np.arange(shape[1])
    last = np.maximum.accumulate(np.where(source >= 0, order, -1), axis=1)
    following = np.minimum.accumulate(np.where(source >= 0, order, shape[1])[:, ::-1], axis=1)[:, ::-1]
    bridged = (last >= 0) & (following - last - 1 <= hold)
    return np.where(bridged, np.take_along_axis(source, np.maximum(last, 0), axis=1), -1)
