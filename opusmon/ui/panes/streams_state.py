"""What the streams pane knows at the playhead: CUDA streams by host evidence, and what the GPUs measured.

Host evidence is what a process asked of the driver and how long it waited; only the `gpu` channel says what a
GPU did. The two are never mixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opusmon.channels import WHOLE_CONTEXT, WHOLE_GPU
from opusmon.clock import NS
from opusmon.schema import Rows
from opusmon.ui.panes.base import Frame, View, has
from opusmon.ui.panes.memo import FrameMemo
from opusmon.ui.panes.statuses import Status, read_statuses, whole
from opusmon.ui.text import CUT_OFF, clean

COLLECTOR = "streams"
CHANNEL = "stream"
SORTS = ("wait", "launches", "graphs", "bubble", "copies", "name")

LOOKBACK_NS = 10 * NS
"""Streams and GPUs without a row for this long are not shown."""
DEFAULT_INTERVAL_NS = NS
STALE_INTERVALS = 2.5
QUIET_INTERVALS = 1.5
"""A stream whose newest row is this much older than the newest of all had nothing to report."""

BLIND_NS = 5 * NS
BLIND_BUSY_PCT = 20.0
"""A GPU that was busier than this for `BLIND_NS` must have been given work by some CUDA call."""
_EVIDENCE = ("launches", "graph_launches", "copies", "waits")

DIRECTIONS = (("h2d", "h2d_b"), ("d2h", "d2h_b"), ("d2d", "d2d_b"), ("any", "other_b"))
"""Copies by direction: host to device, device to host, between devices or within one, not told by the call."""

_COUNTED = (
    *("launches", "graph_launches", "copies", "waits", "wait_ns", "bubbles", "bubble_ns", "not_ready"),
    *(name for _, name in DIRECTIONS),
)

_NAMED = {
    0: ("legacy", "legacy"),
    1: ("legacy", "legacy"),
    2: ("per-thread", "thread"),
    WHOLE_CONTEXT: ("whole context", "ctx"),
}
"""Handles that are no addresses, in full and in short."""

Record = Mapping[str, float]
Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Device:
    """Measured activity of a GPU, per cent, NaN where missing."""

    gpu: int
    sm_pct: float
    busy_pct: float


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream of one process.

    Attributes:
        pid: its process.
        stream: its handle.
        process: name of the process.
        thread: name of the thread that launched or waited last.
        row: its newest row.
        rates: counts and sums of the row per second, and `copy_b`, the bytes copied in all directions.
        age_ns: playhead minus time of the row.
        quiet: other streams have newer rows.
    """

    pid: int
    stream: int
    process: str
    thread: str
    row: Record
    rates: Record
    age_ns: int
    quiet: bool

    @property
    def name(self) -> str:
        """`vllm/worker-0`, or the process alone when its thread has the same name."""
        if not self.thread or self.thread == self.process:
            return self.process or "?"
        return f"{self.process or '?'}/{self.thread}"

    def handle(self, width: int) -> str:
        """The handle in at most `width` cells: the last digits tell streams apart, as handles are addresses."""
        full, short = _NAMED.get(self.stream, ("", ""))
        if full:
            return full if len(full) <= width else short[:width]
        full = f"{self.stream:#x}"
        return full if len(full) <= width else f"~{full[len(full) - width + 1 :]}"

    def per_s(self, field: str) -> float:
        """A count or sum of the row per second; NaN where it is missing or older than the others'."""
        return self.rates.get(field, math.nan)

    @property
    def wait_ms_per_s(self) -> float:
        """Host time in waits that ended, ms per second; threads add up and a wait may have begun earlier."""
        return self.per_s("wait_ns") / 1e6

    @property
    def bubble_pct(self) -> float:
        """Time from the end of a wait to the next launch, per cent; over 100 when it began earlier."""
        return self.per_s("bubble_ns") / 1e7

    @property
    def copy_bps(self) -> float:
        """Bytes copied per second, all directions; NaN when none is known."""
        return self.rates["copy_b"]

    @property
    def graph_share_pct(self) -> float:
        """Graph launches of all launches, per cent; NaN without any."""
        return share_pct(self.per_s("graph_launches"), self.per_s("launches"))

    @property
    def since_launch_ns(self) -> float:
        """Time since the last launch when the row was taken, of a quiet stream at the playhead; NaN when unknown."""
        return self.row.get("since_launch_ns", math.nan) + (self.age_ns if self.quiet else 0)

    def longest_ns(self, field: str) -> float:
        """`wait_max_ns`, `bubble_max_ns` or `launch_call_max_ns` of the row; NaN for a quiet stream."""
        return math.nan if self.quiet else self.row.get(field, math.nan)

    @property
    def call_ns(self) -> float:
        """Mean host time in a launch call, of those that were timed; NaN when none was."""
        return math.nan if self.quiet else self.row.get("launch_call_ns", math.nan)

    def mean_ns(self, total: str, count: str) -> float:
        """A sum of the row over a count of it, ns; NaN without any."""
        number = self.row.get(count, math.nan)
        return self.row.get(total, math.nan) / number if number > 0 and not self.quiet else math.nan


def share_pct(graphs: float, kernels: float) -> float:
    """Graph launches of all launches, per cent; NaN where one is unknown or both are 0."""
    total = graphs + kernels
    return 100 * graphs / total if total > 0 else math.nan


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of it.

    Attributes:
        streams: those that pass the filter, in the order chosen.
        series: process and handle of all of them, without the filter, in order.
        pids: how many processes they are of.
        kernels_per_s: kernel launches of all streams; NaN when no stream's are known.
        graphs_per_s: likewise graph launches.
        graph_share_pct: over the streams whose launches of both kinds are known.
        interval_ns: between rows.
        age_ns: playhead minus time of the newest row; None without one.
        statuses: what the collector says of itself.
        devices: what the GPUs measured.
        blind: "GPU 0 is 84 % busy and no CUDA call was seen", "" when that is not so.
    """

    streams: tuple[Stream, ...] = ()
    series: tuple[tuple[int, int], ...] = ()
    pids: int = 0
    kernels_per_s: float = math.nan
    graphs_per_s: float = math.nan
    graph_share_pct: float = math.nan
    interval_ns: int = DEFAULT_INTERVAL_NS
    age_ns: int | None = None
    statuses: tuple[Status, ...] = ()
    devices: tuple[Device, ...] = ()
    blind: str = ""

    @property
    def total(self) -> int:
        """How many streams there are without the filter."""
        return len(self.series)

    @property
    def stale(self) -> bool:
        """The newest row is older than `STALE_INTERVALS` intervals."""
        return self.age_ns is not None and self.age_ns > STALE_INTERVALS * self.interval_ns

    @property
    def collector(self) -> Status | None:
        """What the collector says of itself as a whole; None when it says nothing."""
        return whole(self.statuses)


def _snapshot(frame: Frame) -> Snapshot:
    """Read the view at the playhead."""
    view, t = frame.view, frame.t
    rows = view.latest(CHANNEL, t, LOOKBACK_NS)
    statuses = read_statuses(view, t, COLLECTOR)
    devices = read_devices(view, t)
    if not has(rows, "pid", "stream", "dt_ns"):
        return Snapshot(statuses=statuses, devices=devices, blind=_blind(view, t))
    newest_t = int(rows["t"].max())
    interval_ns = int(np.median(rows["dt_ns"])) or DEFAULT_INTERVAL_NS
    found = _streams(view, rows, t, newest_t - int(QUIET_INTERVALS * interval_ns))
    current = [stream for stream in found if not stream.quiet]
    both = [(stream.per_s("launches"), stream.per_s("graph_launches")) for stream in current]
    known = [pair for pair in both if not math.isnan(sum(pair))]
    return Snapshot(
        streams=tuple(_chosen(found, frame.state.filter, frame.state.sort)),
        series=tuple(sorted((stream.pid, stream.stream) for stream in found)),
        pids=len({stream.pid for stream in found}),
        kernels_per_s=_sum([kernels for kernels, _ in both]),
        graphs_per_s=_sum([graphs for _, graphs in both]),
        graph_share_pct=share_pct(sum(graphs for _, graphs in known), sum(kernels for kernels, _ in known)),
        interval_ns=interval_ns,
        age_ns=t - newest_t,
        statuses=statuses,
        devices=devices,
        blind=_blind(view, t),
    )


snapshot = FrameMemo(_snapshot)
"""What is known at the playhead, read once per frame."""


def _sum(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) if known else math.nan


def _streams(view: View, rows: Rows, t: int, quiet_t: int) -> list[Stream]:
    """One per row; those at or before `quiet_t` are quiet."""
    names = rows.dtype.names or ()
    text = view.strings.text
    found: list[Stream] = []
    rates = _rates(rows, quiet_t)
    per_s = zip(*(column.tolist() for column in rates.values()), strict=True)
    for values, own in zip(rows.tolist(), per_s, strict=True):
        row = dict(zip(names, values, strict=True))
        found.append(
            Stream(
                pid=row["pid"],
                stream=row["stream"],
                process=clean(text(row.get("process", 0))),
                thread=clean(text(row.get("thread", 0))),
                row=row,
                rates=dict(zip(rates, own, strict=True)),
                age_ns=t - row["t"],
                quiet=row["t"] <= quiet_t,
            )
        )
    return found


def _rates(rows: Rows, quiet_t: int) -> dict[str, Floats]:
    """Counts and sums per second by field, shape (rows,); NaN where the row is quiet or covers no time."""
    dt_ns = rows["dt_ns"]
    covers = (dt_ns > 0) & (rows["t"] > quiet_t)
    scale = np.where(covers, 1e9 / np.maximum(dt_ns, 1), np.nan)
    names = rows.dtype.names or ()
    rates = {name: rows[name] * scale for name in _COUNTED if name in names}
    copies = np.array([rates[name] for _, name in DIRECTIONS if name in rates])
    total = np.where(np.isnan(copies), 0.0, copies).sum(axis=0) if len(copies) else np.zeros(len(rows))
    rates["copy_b"] = np.where(np.isnan(copies).all(axis=0), np.nan, total)
    return rates


def _largest_first(value: float) -> float:
    return math.inf if math.isnan(value) else -value


_KEYS: dict[str, Callable[[Stream], float | str]] = {
    "wait": lambda stream: _largest_first(stream.wait_ms_per_s),
    "launches": lambda stream: _largest_first(stream.per_s("launches")),
    "graphs": lambda stream: _largest_first(stream.per_s("graph_launches")),
    "bubble": lambda stream: _largest_first(stream.bubble_pct),
    "copies": lambda stream: _largest_first(stream.copy_bps),
    "name": lambda stream: stream.name.lower(),
}


def _searched(item: Stream) -> str:
    """Process, names and handle of a stream, as it is listed and in full."""
    names = " ".join(_NAMED.get(item.stream, ()))
    return f"{item.pid} {item.name} {item.stream:#x} {names}".lower()


def _chosen(found: Sequence[Stream], wanted: str, sort: str) -> list[Stream]:
    """Those that pass the filter, sorted; equals stay in the order of process and handle."""
    words = wanted.lower().removeprefix(CUT_OFF)  # as the list shows a handle
    if words:
        found = [item for item in found if words in _searched(item)]
    key = _KEYS.get(sort, _KEYS[SORTS[0]])
    return sorted(found, key=lambda stream: (key(stream), stream.pid, stream.stream))


def read_devices(view: View, t: int) -> tuple[Device, ...]:
    """What each whole GPU measured last."""
    rows = view.latest("gpu", t, LOOKBACK_NS)
    if not has(rows, "gpu", "gi", "sm_util_pct", "gpu_busy_pct"):
        return ()
    values = zip(*(rows[name].tolist() for name in ("gpu", "gi", "sm_util_pct", "gpu_busy_pct")), strict=True)
    return tuple(sorted((Device(g, sm, busy) for g, gi, sm, busy in values if gi == WHOLE_GPU), key=_index))


def _index(device: Device) -> int:
    return device.gpu


def _blind(view: View, t: int) -> str:
    """Says so when a GPU was busy and no call was seen; a count that is missing is no proof of that."""
    rows = view.query(CHANNEL, t - BLIND_NS, t)
    if has(rows, *_EVIDENCE):
        if any((rows[name] != 0).any() for name in _EVIDENCE):  # NaN too: not counted is not "none"
            return ""
    elif not _was_ok(view, t - BLIND_NS):
        return ""
    busy = _busy(view, t)
    if not busy:
        return ""
    gpu, pct = max(busy.items(), key=lambda item: item[1])
    more = f" ({len(busy) - 1} more busy)" if len(busy) > 1 else ""
    return f"GPU {gpu} is {pct:.0f} % busy{more} and no CUDA call was seen"


def _was_ok(view: View, t: int) -> bool:
    """The collector ran at that time: probes that have just been set can have seen nothing."""
    return any(
        status.is_ok and not (status.channel or status.scope) for status in read_statuses(view, t, COLLECTOR)
    )


def _busy(view: View, t: int) -> dict[int, float]:
    """The newest activity of every GPU that has been busy for `BLIND_NS`, per cent."""
    rows = view.query("gpu", t - LOOKBACK_NS, t)
    if not has(rows, "gpu", "gi", "dt_ns", "sm_util_pct", "gpu_busy_pct"):
        return {}
    rows = rows[rows["gi"] == WHOLE_GPU]
    found: dict[int, float] = {}
    for gpu in sorted(set(rows["gpu"].tolist())):
        own = rows[rows["gpu"] == gpu]
        pct = np.fmax(own["gpu_busy_pct"], own["sm_util_pct"])
        idle = np.flatnonzero(~(pct > BLIND_BUSY_PCT))
        since = own[int(idle[-1]) + 1 if len(idle) else 0 :]
        if len(since) and _covers(since, t):
            found[gpu] = float(pct[-1])
    return found


def _covers(rows: Rows, t: int) -> bool:
    """The rows are of the last `BLIND_NS`, all of it, and the newest one is recent."""
    first, last = rows[0], rows[-1]
    lasted_ns = int(last["t"]) - int(first["t"]) + int(first["dt_ns"])
    return lasted_ns >= BLIND_NS and t - int(last["t"]) <= STALE_INTERVALS * max(int(last["dt_ns"]), 1)
