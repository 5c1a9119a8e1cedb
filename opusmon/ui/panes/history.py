"""Histories over the span: bins that do not shimmer as the playhead moves, with holes where nothing was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from opusmon.clock import NS
from opusmon.schema import Rows
from opusmon.ui.panes.base import Frame

Floats = npt.NDArray[np.float64]
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
    hold = int(HOLD_INTERVALS * interval_ns // step)
    return {series: _columns(rows, known, first_t, step, count, hold) for series, rows in _split(bins, key)}


def _split(bins: Rows, key: Sequence[str]) -> list[tuple[tuple[int, ...], Rows]]:
    """Bins by series."""
    if not len(bins):
        return []
    identity = np.stack([bins[name] for name in key], axis=1)
    found, inverse = np.unique(identity, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    return [(tuple(map(int, series)), bins[inverse == place]) for place, series in enumerate(found)]


def _columns(
    rows: Rows, fields: Sequence[str], first_t: int, step: int, count: int, hold: int
) -> dict[str, Floats]:
    places = (rows["t"] - first_t) // step
    inside = (places >= 0) & (places < count)
    places = places[inside]
    source = _held(places, count, hold)
    out = {}
    for name in fields:
        values = np.append(rows[f"{name}_max"][inside].astype(np.float64), np.nan)
        out[name] = values[source]
    return out


def _held(places: npt.NDArray[np.int64], count: int, hold: int) -> npt.NDArray[np.int64]:
    """For each bin the row that fills it: its own, or the one before it across a hole of at most `hold` bins; else -1.

    A bin whose row has no value is not a hole: it stays without one.
    """
    source = np.full(count, -1, dtype=np.int64)
    source[places] = np.arange(len(places))
    last = np.maximum.accumulate(np.where(source >= 0, np.arange(count), -1))
    following = np.minimum.accumulate(np.where(source >= 0, np.arange(count), count)[::-1])[::-1]
    bridged = (last >= 0) & (following - last - 1 <= hold)
    return np.where(bridged, source[np.maximum(last, 0)], -1)
