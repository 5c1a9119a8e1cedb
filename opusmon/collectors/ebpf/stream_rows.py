"""What the kernel added up, as rows of `stream`: differences between two readings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from opusmon.channels import STREAM
from opusmon.collectors.ebpf.maps import Table
from opusmon.schema import Rows

KEY = np.dtype([("pid", "<u4"), ("pad", "<u4"), ("stream", "<u8")])
_LONGEST = np.dtype([("epoch", "<u8"), ("wait_ns", "<u8"), ("bubble_ns", "<u8"), ("call_ns", "<u8")])
BIN_KEY, BIN_VALUE = np.dtype([("pid", "<u4"), ("bin", "<u4")]), np.dtype("<u8")
"""`struct bin_key_t` of streams.bpf.c, and how many calls are in that bin."""

FIRST_OCTAVE, LAST_OCTAVE, OCTAVE_BINS = 8, 35, 16
"""Bins of the time of launch calls: one under 2^8 ns, then 16 of equal width in each octave, one from 2^36 ns on."""

VALUE = np.dtype(
    [
        *((name, "<u8") for name in ("launches", "graph_launches", "copies")),
        ("bytes", "<u8", (4,)),
        ("waits", "<u8"),
        ("wait_ns", "<u8"),
        ("hist", "<u8", (8,)),
        *((name, "<u8") for name in ("bubbles", "bubble_ns", "not_ready", "timed", "timed_ns")),
        *((name, "<u8") for name in ("last_launch", "wait_end", "seen")),
        ("longest", _LONGEST, (2,)),
        ("tid", "<u4"),
        ("pad", "<u4"),
        ("comm", "S16"),
    ]
)
"""`struct key_t` and `struct stream_t` of streams.bpf.c."""

COUNTS = ("launches", "graph_launches", "copies", "waits", "wait_ns", "bubbles", "bubble_ns", "not_ready")
BYTES = ("h2d_b", "d2h_b", "d2d_b", "other_b")
WAIT_BINS = (*(f"wait_lt_{end}" for end in ("10us", "100us", "1ms", "10ms", "100ms", "1s")), "wait_ge_1s")
BY_LAUNCHES = ("launches", "bubbles", "bubble_ns", "bubble_max_ns", "since_launch_ns")
"""Fields that are unknown while kernel launches are not counted: a bubble ends at the next launch."""

_GROWING = (*COUNTS, "bytes", "hist", "timed", "timed_ns")


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the probes saw of an interval.

    Attributes:
        launches_since: when the launch probes went on, monotonic ns; None when they were off in a part of it.
        polls: the poll probes were on throughout.
    """

    launches_since: int | None
    polls: bool


class Differ:
    """Turns readings of the kernel's table, whose counters only grow, into rows over the interval between them."""

    def __init__(self) -> None:
        self._before: dict[bytes, int] = {}
        self._values: Table = np.zeros(0, VALUE)

    def rows(
        self, keys: Table, values: Table, t: int, dt_ns: int, epoch: int, cover: Coverage
    ) -> tuple[Rows, Table]:
        """One row per entry, in the order of `keys`; text fields are left 0.

        Args:
            keys: dtype `KEY`, shape (n,).
            values: dtype `VALUE`, shape (n,).
            t: time of the reading, monotonic ns.
            dt_ns: since the reading before.
            epoch: the one that this reading ended; the longest wait and bubble are taken from it.
            cover: what the probes saw.

        Returns:
            The rows, and whether each entry has changed, shape (n,).
        """
        grown = self._grown(keys, values)
        rows = np.zeros(len(keys), STREAM.dtype)
        rows["t"], rows["dt_ns"] = t, dt_ns
        rows["pid"], rows["stream"], rows["tid"] = keys["pid"], keys["stream"], values["tid"]
        for name in COUNTS:
            rows[name] = grown[name]
        for index, name in enumerate(BYTES):
            rows[name] = grown["bytes"][:, index]
        for index, name in enumerate(WAIT_BINS):
            rows[name] = grown["hist"][:, index]
        longest = values["longest"][:, epoch & 1]
        fresh = longest["epoch"] == epoch
        rows["wait_max_ns"] = np.where(fresh, longest["wait_ns"], 0)
        rows["bubble_max_ns"] = np.where(fresh, longest["bubble_ns"], 0)
        _call_times(rows, grown, np.where(fresh, longest["call_ns"], 0))
        rows["since_launch_ns"] = _since(values["last_launch"], t, cover.launches_since)
        _blank(rows, cover)
        changed = np.zeros(len(keys), bool)
        for name in (*COUNTS, "timed"):
            changed |= grown[name] != 0
        return rows, changed

    def forget(self, key: np.void) -> None:
        """The entry was deleted: should it come back, it counts from 0."""
        self._before.pop(key.tobytes(), None)

    def _grown(self, keys: Table, values: Table) -> Table:
        """How much each counter has grown; an entry that is new counts from 0."""
        names = [key.tobytes() for key in keys]
        index = np.array([self._before.get(name, -1) for name in names], np.int64)
        grown = values.copy()
        old = np.flatnonzero(index >= 0)
        before = self._values[index[old]]
        for name in _GROWING:
            grown[name][old] = values[name][old] - before[name]
        self._before = {name: at for at, name in enumerate(names)}
        self._values = values
        return grown


def _call_times(rows: Rows, grown: Table, longest_ns: Table) -> None:
    """Mean and longest of the launch calls that were timed; NaN without any, which are not calls that took no time."""
    timed = grown["timed"]
    rows["timed_launches"] = timed
    rows["launch_call_ns"] = np.where(timed > 0, grown["timed_ns"] / np.maximum(timed, 1), np.nan)
    rows["launch_call_max_ns"] = np.where(timed > 0, longest_ns, np.nan)


def _since(last: Table, t: int, launches_since: int | None) -> Table:
    """Time since the last launch; NaN when none was seen since the launch probes went on."""
    if launches_since is None:
        return np.full(len(last), np.nan)
    seen = last.astype(np.int64)
    age: Table = np.where(seen >= launches_since, np.maximum(t - seen, 0), np.nan)
    return age


def _blank(rows: Rows, cover: Coverage) -> None:
    """What was not watched throughout the interval is unknown, not small."""
    unknown = (
        *(BY_LAUNCHES if cover.launches_since is None else ()),
        *(() if cover.polls else ("not_ready",)),
    )
    for name in unknown:
        rows[name] = np.nan


def bin_edges_ns() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Lower edges of the bins, ns, the end of the last one after them: bin i holds [edges[i], edges[i + 1])."""
    octaves = 2.0 ** np.arange(FIRST_OCTAVE, LAST_OCTAVE + 1)
    inner = (octaves[:, None] * (1 + np.arange(OCTAVE_BINS) / OCTAVE_BINS)).ravel()
    edges: np.ndarray[tuple[int], np.dtype[np.float64]] = np.concatenate(
        ([0.0], inner, [2.0 ** (LAST_OCTAVE + 1), np.inf])
    )
    return edges
