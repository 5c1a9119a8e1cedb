"""What the latency pane reads of engines: histogram buckets, and the numbers and sums beside them.

Up to `ROWS_NS` rows are read as they are. For wider spans the rollups are, which add up exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opusmon.channels import ENGINE, ENGINE_BUCKET
from opusmon.schema import Rows
from opusmon.ui.panes.base import Frame, View
from opusmon.ui.panes.latency_read import NOW_NS, ROWS_NS, Array, Floats, Ints, binned, read

Hashes = np.ndarray[tuple[Any, ...], np.dtype[np.uint64]]

_ODD = [
    np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
]
"""Odd, so that multiplying loses nothing."""
_RECENT_ROWS = 4000
_MAX_COUNT = 1e15


@dataclass(frozen=True, slots=True, eq=False)
class BucketRows:
    """Counts of buckets over time, each row with the number of the bucket it is of.

    Attributes:
        t: end of what a row covers, shape (rows,).
        count: observations, shape (rows,).
        bucket: which one, shape (rows,).
        engine: text id by bucket, shape (buckets,).
        model: text id by bucket.
        metric: name by bucket.
        lo_ns: lower edge by bucket.
        hi_ns: upper edge by bucket.
    """

    t: Ints
    count: Floats
    bucket: Ints
    engine: Ints
    model: Ints
    metric: tuple[str, ...]
    lo_ns: Floats
    hi_ns: Floats

    def sums(self, since: int) -> Floats:
        """Observations by bucket in rows after `since`, shape (buckets,)."""
        first = int(np.searchsorted(self.t, since, side="right"))
        return np.bincount(
            self.bucket[first:], weights=self.count[first:], minlength=len(self.metric)
        ).astype(np.float64)

    def of(self, metric: str, engines: Iterable[tuple[int, int]] | None = None) -> Ints:
        """The buckets of a metric, of all engines or of some (engine, model)."""
        wanted = None if engines is None else set(engines)
        pairs = zip(self.metric, self.engine.tolist(), self.model.tolist(), strict=True)
        return np.array(
            [
                n
                for n, (name, engine, model) in enumerate(pairs)
                if name == metric and (wanted is None or (engine, model) in wanted)
            ],
            dtype=np.int64,
        )


def read_buckets(frame: Frame, step_ns: int) -> BucketRows | None:
    """The buckets of all engines over the span; None without a row.

    Args:
        frame: what and when.
        step_ns: width of the bins that a wide span is read in.
    """
    view, t = frame.view, frame.t
    if frame.span_ns <= ROWS_NS:
        rows = read(view, ENGINE_BUCKET, t - max(frame.span_ns, NOW_NS), t)
        return _bucket_rows(view, rows, rows["t"], rows["count"]) if len(rows) else None
    rows = binned(view, ENGINE_BUCKET, ["count"], t - frame.span_ns, t, step_ns)
    if not len(rows):
        return None
    ends = np.minimum(rows["t"] + step_ns, t)
    return _bucket_rows(view, rows, ends, rows["count_mean"] * rows["count_n"])


def recent_sums(frame: Frame, known: BucketRows) -> Floats:
    """Observations of the last minute by bucket, shape (buckets,)."""
    if frame.span_ns <= ROWS_NS:
        return known.sums(frame.t - NOW_NS)
    rows = read(frame.view, ENGINE_BUCKET, frame.t - NOW_NS, frame.t)
    out = np.zeros(len(known.metric))
    if not len(rows):
        return out
    recent = _bucket_rows(frame.view, rows, rows["t"], rows["count"])
    names = {name: place for place, name in enumerate(_names(known))}
    for name, value in zip(_names(recent), recent.sums(0).tolist(), strict=True):
        if name in names:
            out[names[name]] = value
    return out


def _names(rows: BucketRows) -> list[tuple[int, int, str, float, float]]:
    columns = (
        rows.engine.tolist(),
        rows.model.tolist(),
        rows.metric,
        rows.lo_ns.tolist(),
        rows.hi_ns.tolist(),
    )
    return list(zip(*columns, strict=True))


def _bucket_rows(view: View, rows: Rows, t: Array, count: Array) -> BucketRows:
    first, bucket = _series(_hashes(rows))
    of = rows[first]
    metrics = tuple(view.strings.text(number) for number in of["metric"].tolist())
    return BucketRows(
        t=np.asarray(t, np.int64),
        count=_counts(count),
        bucket=bucket,
        engine=of["engine"].astype(np.int64),
        model=of["model"].astype(np.int64),
        metric=metrics,
        lo_ns=of["lo_s"] * 1e9,
        hi_ns=of["hi_s"] * 1e9,
    )


def _counts(values: Array) -> Floats:
    """Counts, 0 where a damaged row holds none."""
    numbers = values.astype(np.float64)
    return np.where((numbers > 0) & (numbers < _MAX_COUNT), numbers, 0.0)


def _hashes(rows: Rows) -> Hashes:
    """One number for the bucket of each row: 3 columns of ids, and the edges by their bits."""
    hashes = rows["engine"].astype(np.uint64) * _ODD[0] + rows["model"].astype(np.uint64) * _ODD[1]
    hashes += rows["metric"].astype(np.uint64) * _ODD[2]
    for name, odd in (("lo_s", _ODD[3]), ("hi_s", _ODD[0] ^ np.uint64(0xFFFE))):
        bits = np.ascontiguousarray(rows[name], dtype=np.float64).view(np.uint64)
        hashes += (bits ^ (bits >> np.uint64(29))) * odd
    return hashes


def _series(hashes: Hashes) -> tuple[Ints, Ints]:
    """A row of each bucket, and the bucket of each row. The newest rows nearly always hold all buckets there are."""
    offset = max(len(hashes) - _RECENT_ROWS, 0)
    known, first = np.unique(hashes[offset:], return_index=True)
    place = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    if not bool(np.all(known[place] == hashes)):
        known, first, place = np.unique(hashes, return_index=True, return_inverse=True)
        offset = 0
    return (first + offset).astype(np.int64), place.reshape(-1).astype(np.int64)


# -- engines -----------------------------------------------------------------------------------------------------


def engine_rows(frame: Frame, since: int) -> Rows:
    """Rows of `engine` after `since`."""
    return read(frame.view, ENGINE, since, frame.t)


Means = Mapping[tuple[int, int, str], tuple[float, float]]
"""Number of observations and their sum (ns), by engine, model and metric."""


def engine_means(frame: Frame, metrics: Sequence[str], step_ns: int) -> Means:
    """Those of the span; a wide one is read in bins of `step_ns`."""
    fields = [name for metric in metrics for name in (f"{metric}_n", f"{metric}_sum_s")]
    if frame.span_ns <= ROWS_NS:
        rows = engine_rows(frame, frame.t - max(frame.span_ns, NOW_NS))
        columns = {name: rows[name].astype(np.float64) for name in fields} if len(rows) else {}
    else:
        rows = binned(frame.view, ENGINE, fields, frame.t - frame.span_ns, frame.t, step_ns)
        columns = {name: rows[f"{name}_mean"] * rows[f"{name}_n"] for name in fields} if len(rows) else {}
    return means_of(rows, columns, metrics)


def means_of(rows: Rows, columns: Mapping[str, Floats], metrics: Sequence[str]) -> Means:
    """The same from columns that are read already."""
    found: dict[tuple[int, int, str], tuple[float, float]] = {}
    for engine, model in engines_of(rows):
        mine = (rows["engine"] == engine) & (rows["model"] == model)
        for metric in metrics:
            n, total_s = np.nansum(columns[f"{metric}_n"][mine]), np.nansum(columns[f"{metric}_sum_s"][mine])
            found[(engine, model, metric)] = (float(n), float(total_s) * 1e9)
    return found


def engines_of(rows: Rows) -> list[tuple[int, int]]:
    """The (engine, model) ids that rows are of, in order."""
    if not len(rows):
        return []
    code = np.unique(rows["engine"].astype(np.int64) << 32 | rows["model"].astype(np.int64))
    return [(int(number) >> 32, int(number) & 0xFFFFFFFF) for number in code.tolist()]
