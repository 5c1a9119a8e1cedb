"""Rollups, newest values, percentiles and rates: pure numpy over rows, no input or output.

These run on the UI thread each second, so nothing here loops over rows in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from opusmon.schema import Channel, Rows

Ints = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]
Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]

_SUFFIXES = ("_min", "_max", "_mean", "_n")
_CODE_LIMIT = 2**62


def rollup_dtype(channel: Channel, fields: Sequence[str]) -> np.dtype[np.void]:
    """Structured dtype of a rollup: `t`, the key fields, `n`, then min, max, mean and n of each field.

    Raises:
        ValueError: a field does not exist, or a key field is called `n`.
    """
    unknown = [name for name in fields if name not in channel.by_name]
    if unknown or "n" in channel.key:
        raise ValueError(f"channel {channel.name!r} has no field {', '.join(unknown) or 'usable as key'}")
    head = [("t", "<i8"), *((name, channel.by_name[name].dtype) for name in channel.key), ("n", "<u4")]
    types = ("<f8", "<f8", "<f8", "<u4")
    return np.dtype(head + [(f + s, kind) for f in fields for s, kind in zip(_SUFFIXES, types, strict=True)])


def rollup(rows: Rows, channel: Channel, fields: Sequence[str], step_ns: int) -> Rows:
    """Summarise rows per bin and key.

    Args:
        rows: structured array of `channel.dtype`, shape (n,), in any order.
        channel: what the rows are; rows with equal `channel.key` fields are summarised together.
        fields: numeric fields to summarise.
        step_ns: bin width; bins begin at multiples of it, a row belongs to `floor(t / step) * step`.

    Returns:
        Rows of `rollup_dtype`, sorted by bin start `t` and key. `n` counts the rows; `{f}_n` those that are
        not NaN; `{f}_min`, `{f}_max` and `{f}_mean` are NaN where that is 0.

    Raises:
        ValueError: `step_ns` is not positive, or a field does not exist.
    """
    if step_ns <= 0:
        raise ValueError(f"a bin of {step_ns} ns")
    dtype = rollup_dtype(channel, fields)
    bins = np.floor_divide(rows["t"], step_ns)
    order, starts = _groups([bins, *(rows[name] for name in channel.key)])
    out = np.empty(len(starts), dtype)
    if not len(starts):
        return out
    first = order[starts]
    out["t"] = bins[first] * step_ns
    for name in channel.key:
        out[name] = rows[name][first]
    out["n"] = np.diff(starts, append=len(rows))
    for name in fields:
        # A file may hold a signalling NaN, and casting that one warns.
        with np.errstate(invalid="ignore"):
            values = rows[name][order].astype(np.float64)
        _summarise(out, name, values, starts)
    return out


def merge_rollups(parts: Sequence[Rows], step_ns: int | None = None) -> Rows:
    """Merge partial bins of the same dtype, for example those of late rows; means are weighted by `{f}_n`.

    Args:
        parts: at least one array of `rollup_dtype`, in any order.
        step_ns: width of the resulting bins, a multiple of the parts' own; None keeps theirs.

    Returns:
        One row per bin and key, sorted by both.
    """
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
    names = rows.dtype.names or ()
    key, fields = _layout(names)
    times = rows["t"] if step_ns is None else np.floor_divide(rows["t"], step_ns) * step_ns
    order, starts = _groups([times, *(rows[name] for name in key)])
    out = np.empty(len(starts), rows.dtype)
    if not len(starts):
        return out
    first = order[starts]
    out["t"] = times[first]
    for name in key:
        out[name] = rows[name][first]
    out["n"] = np.add.reduceat(rows["n"][order], starts)
    for name in fields:
        _merge(out, name, rows[order], starts)
    return out


def latest(rows: Rows, key: Sequence[str]) -> Rows:
    """The newest row of every key, sorted by key; of rows with equal `t` the one that came last.

    Args:
        rows: structured array with `t`, sorted by it.
        key: the identity fields; without any the answer is the last row.
    """
    if not key or not len(rows):
        return rows[-1:]
    order, starts = _groups([rows[name] for name in key])
    ends = np.append(starts[1:], len(rows)) - 1
    newest: Rows = rows[order[ends]]
    return newest


def percentile(values: np.ndarray[tuple[Any, ...], np.dtype[Any]], q: float) -> float:
    """The q-th percentile (0-100, linear interpolation) of the values that are not NaN; NaN without any."""
    numbers = values[~np.isnan(values)]
    return float(np.percentile(numbers, q)) if len(numbers) else float("nan")


def rate(t: Ints, counter: np.ndarray[tuple[Any, ...], np.dtype[Any]]) -> Floats:
    """Growth per second of one series since its previous row, shape (n,).

    Args:
        t: monotonic ns, ascending.
        counter: a number that only grows, until it restarts.

    Returns:
        NaN in the first row, where the counter went back (a restart is not negative work), where either
        number is missing and where no time passed.
    """
    out = np.full(len(t), np.nan)
    if len(t) > 1:
        gained = np.diff(counter.astype(np.float64))
        passed_s = np.diff(t) / 1e9
        good = (gained >= 0) & (passed_s > 0)
        out[1:][good] = gained[good] / passed_s[good]
    return out


def _layout(names: tuple[str, ...]) -> tuple[tuple[str, ...], list[str]]:
    """Key fields and summarised fields of a rollup dtype."""
    at = names.index("n")
    return names[1:at], [name[: -len("_min")] for name in names[at + 1 :: len(_SUFFIXES)]]


def _groups(columns: Sequence[np.ndarray[tuple[Any, ...], np.dtype[Any]]]) -> tuple[Ints, Ints]:
    """Stable order by the columns, the first one most significant, and where each group starts in it."""
    if not len(columns[0]):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    code = _code(columns)
    if code is not None:
        if bool(np.all(code[1:] >= code[:-1])):
            order = np.arange(len(code))
        else:
            order = np.argsort(code, kind="stable")
            code = code[order]
        changed = code[1:] != code[:-1]
    else:
        order = np.lexsort(columns[::-1])
        changed = np.zeros(len(order) - 1, bool)
        for column in columns:
            placed = column[order]
            changed |= placed[1:] != placed[:-1]
    return order, np.concatenate(([0], np.flatnonzero(changed) + 1))


def _code(columns: Sequence[np.ndarray[tuple[Any, ...], np.dtype[Any]]]) -> Ints | None:
    """One integer per row that orders as the columns do; None when they are not integers or span too far."""
    code = np.zeros(len(columns[0]), np.int64)
    room = 1
    for column in columns:
        if column.dtype.kind not in "iu":
            return None
        low, high = int(column.min()), int(column.max())
        width = high - low + 1
        room *= width
        if room > _CODE_LIMIT:
            return None
        if width > 1:
            code *= width
            code += _above(column, low)
    return code


def _above(column: np.ndarray[tuple[Any, ...], np.dtype[Any]], low: int) -> Ints:
    """Distance of each integer from the lowest one; a narrow type must widen before it is subtracted."""
    if column.dtype.kind == "u":
        return np.asarray(column - column.dtype.type(low), np.int64)
    return np.asarray(column, np.int64) - low


def _summarise(out: Rows, name: str, values: Floats, starts: Ints) -> None:
    """Fill min, max, mean and n of a field from its values in group order."""
    missing = np.isnan(values)
    if missing.any():
        count = np.add.reduceat(~missing, starts, dtype=np.int64)
        low, high = np.where(missing, np.inf, values), np.where(missing, -np.inf, values)
        values = np.where(missing, 0.0, values)
    else:
        count = np.diff(starts, append=len(values))
        low = high = values
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mean = np.add.reduceat(values, starts) / count
    _store(out, name, np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts), mean, count)


def _merge(out: Rows, name: str, rows: Rows, starts: Ints) -> None:
    """Fill min, max, mean and n of a field from partial summaries in group order."""
    count = rows[name + "_n"].astype(np.int64)
    empty = count == 0
    low = np.where(empty, np.inf, rows[name + "_min"])
    high = np.where(empty, -np.inf, rows[name + "_max"])
    total = np.add.reduceat(count, starts)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        weighted = np.where(empty, 0.0, rows[name + "_mean"] * count)
        mean = np.add.reduceat(weighted, starts) / total
    _store(out, name, np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts), mean, total)


def _store(out: Rows, name: str, low: Floats, high: Floats, mean: Floats, count: Ints) -> None:
    """Write the four columns of a field, NaN where nothing was counted."""
    empty = count == 0
    for suffix, column in zip(_SUFFIXES, (low, high, mean), strict=False):
        out[name + suffix] = np.where(empty, np.nan, column)
    out[name + "_n"] = count
