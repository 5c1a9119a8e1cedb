"""The newest event of each kind of each GPU, also from long ago, without reading a day of throttle changes."""

from __future__ import annotations

import numpy as np

from opusmon.clock import NS
from opusmon.schema import Rows, join_rows
from opusmon.ui.panes.base import View

NEAR_NS = 600 * NS
"""So far back rows are read as they are; a GPU that throttles every second writes two rows a second."""

_KINDS = ("xid", "lost", "back", "unavailable")
"""Kinds looked for further back."""


def newest_events(view: View, t: int, lookback_ns: int) -> Rows:
    """The newest `gpu_event` row of each series in (t - lookback_ns, t], of `_KINDS` beyond `NEAR_NS`, in any order."""
    near = view.latest("gpu_event", t, min(lookback_ns, NEAR_NS))
    channel = view.channels.get("gpu_event")
    if lookback_ns <= NEAR_NS or channel is None:
        return near
    bins = view.binned("gpu_event", [], t - lookback_ns, t - NEAR_NS, NEAR_NS)
    parts = [near]
    for start in _starts(view, bins):
        rows = view.query("gpu_event", max(start - 1, t - lookback_ns), min(start + NEAR_NS - 1, t - NEAR_NS))
        parts.append(rows[np.isin(rows["kind"], _wanted(view, rows))])
    rows = join_rows(parts, channel)
    newest = {(int(row["gpu"]), int(row["gi"]), int(row["kind"])): place for place, row in enumerate(rows)}
    return rows[sorted(newest.values())]


def _wanted(view: View, rows: Rows) -> list[int]:
    """Those of the kinds' text ids that are kinds looked for."""
    return [number for number in np.unique(rows["kind"]).tolist() if view.strings.text(number) in _KINDS]


def _starts(view: View, bins: Rows) -> set[int]:
    """Start of the newest bin of each series that is looked for."""
    newest: dict[tuple[int, int, int], int] = {}
    for row in bins[np.isin(bins["kind"], _wanted(view, bins))] if len(bins) else bins:
        newest[int(row["gpu"]), int(row["gi"]), int(row["kind"])] = int(row["t"])
    return set(newest.values())
