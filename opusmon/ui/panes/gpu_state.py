"""What the gpu pane knows at the playhead: devices, their links, their age, and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from opusmon.channels import KEYFRAME_NS, WHOLE_GPU
from opusmon.clock import NS
from opusmon.schema import Rows
from opusmon.times import format_wall
from opusmon.ui.panes.base import Frame, View
from opusmon.ui.panes.gpu_deep import Deep, read_dcgm, read_deep
from opusmon.ui.panes.gpu_events import newest_events
from opusmon.ui.panes.gpu_flags import Flag, gpu_flags
from opusmon.ui.panes.gpu_links import (
    ERROR_FIELDS,
    NO_LINKS,
    Links,
    any_errors,
    error_counts,
    link_flags,
    read_links,
)
from opusmon.ui.panes.memo import FrameMemo
from opusmon.ui.text import clean
from opusmon.ui.units import duration

Record = Mapping[str, float]
Key = tuple[int, int]

LOOKBACK_NS = 10 * NS
LINK_INTERVALS = 3
"""Links come with the rows of their GPU, up to 144 of them at a time: no more intervals than these are searched."""
HIDDEN_AFTER_NS = 60 * NS
"""Older rows say nothing about now and are not shown."""
STALE_INTERVALS = 2.5
"""One missed tick is jitter, two are not; the half allows for the way from the collector."""
DEVICE_LOOKBACK_NS = KEYFRAME_NS + 5 * NS
EVENT_LOOKBACK_NS = 24 * 3600 * NS
DEFAULT_INTERVAL_NS = NS

_BAD_STATES = ("error", "unavailable", "restarting", "no_permission", "stale", "not_supported")
"""`status` states that explain a missing value, most important first."""
_CHANNELS = frozenset({"gpu", "gpu_device", "nvlink", "gpu_process", "gpu_event"})


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something is missing, from a `status` row.

    Attributes:
        rank: place of its state in order of importance, 0 first.
    """

    rank: int
    collector: str
    channel: str
    field: str
    scope: str
    state: str
    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or one MIG instance of it (`gi` >= 0), at the playhead.

    Attributes:
        name: of the device, without the maker's.
        unified: CPU and GPU share the memory.
        row: its newest `gpu` row; empty when there is none recent enough.
        device: its newest `gpu_device` row; empty when unknown.
        links: its NVLink links.
        age_ns: playhead minus time of the row; None without one.
        stale: the row is older than `STALE_INTERVALS` intervals.
        gone: "GPU 1 lost at 14:03:21", or another reason for having no row; "" when all is well.
        flags: what is wrong, worst first.
        reasons: (channel, field) with a `status` row that explains their absence here.
        deep: what the hardware counters say, None where they are not read.
        dcgm_bw_pct: HBM bandwidth as a dcgm-exporter tells it, NaN where none does.
    """

    gpu: int
    gi: int
    name: str
    row: Record
    device: Record
    unified: bool = False
    links: Links = NO_LINKS
    age_ns: int | None = None
    stale: bool = False
    gone: str = ""
    flags: tuple[Flag, ...] = ()
    reasons: frozenset[tuple[str, str]] = frozenset()
    deep: Deep | None = None
    dcgm_bw_pct: float = math.nan

    def __getitem__(self, name: str) -> float:
        """A field of the `gpu` row, NaN where missing."""
        return self.row.get(name, math.nan)

    def missing(self, name: str, channel: str = "gpu") -> str:
        """What stands for a missing value: "n/a" when a `status` row says why, else "--"."""
        known = (channel, name) in self.reasons or (channel, "") in self.reasons
        return "n/a" if known else "--"

    @property
    def is_mig(self) -> bool:
        """A MIG instance."""
        return self.gi != WHOLE_GPU


def has_gpm(gpu: Gpu) -> bool:
    """The device gives GPM metrics: one that is missing now is missing, and nothing else stands in for it."""
    return gpu.device.get("gpm", math.nan) == 1


def bandwidth_field(gpu: Gpu) -> str:
    """`hbm_bw_pct`, or `mem_busy_pct` where the GPU only gives that (before Hopper)."""
    only_busy = math.isnan(gpu["hbm_bw_pct"]) and not math.isnan(gpu["mem_busy_pct"])
    return "mem_busy_pct" if only_busy and not has_gpm(gpu) else "hbm_bw_pct"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of it.

    Attributes:
        gpus: whole devices in NVML order, each followed by its MIG instances.
        reasons: most important first.
        interval_ns: between rows, the longest that any GPU needed last.
        cadence_ns: between rows, as usual of late.
        age_ns: playhead minus time of the newest row; None without one.
    """

    gpus: tuple[Gpu, ...] = ()
    reasons: tuple[Reason, ...] = ()
    interval_ns: int = DEFAULT_INTERVAL_NS
    cadence_ns: int = DEFAULT_INTERVAL_NS
    age_ns: int | None = None

    @property
    def stale(self) -> bool:
        """The newest row is older than `STALE_INTERVALS` intervals."""
        return self.age_ns is not None and self.age_ns > STALE_INTERVALS * self.interval_ns


@dataclass(frozen=True, slots=True)
class _Known:
    """Rows of all channels by series, before they are put together."""

    rows: Mapping[Key, Record]
    devices: Mapping[Key, Record]
    links: Mapping[int, Links]
    reasons: Sequence[Reason]
    deep: Mapping[int, Deep]
    dcgm: Mapping[int, float]
    events: Sequence[Record] = field(default_factory=list)


def records(rows: Rows) -> list[Record]:
    """Rows as mappings from field name to number."""
    names = rows.dtype.names or ()
    return [dict(zip(names, row, strict=True)) for row in rows.tolist()]


def _snapshot(frame: Frame) -> Snapshot:
    """Read the view at the playhead."""
    view, t = frame.view, frame.t
    rows, devices, reasons, late = _series(frame)
    interval_ns = max((int(row.get("dt_ns", 0)) for row in rows.values()), default=0) or DEFAULT_INTERVAL_NS
    stale = any(t - row["t"] > STALE_INTERVALS * interval_ns for row in rows.values())
    lookback_ns = EVENT_LOOKBACK_NS if late or stale else frame.span_ns
    events = records(newest_events(view, t, lookback_ns))
    known = _Known(
        rows,
        devices,
        _all_links(frame, HIDDEN_AFTER_NS if late or stale else _link_lookback(interval_ns)),
        reasons,
        read_deep(frame),
        read_dcgm(frame),
        events,
    )
    keys = sorted({*rows, *_expected(devices, reasons)})
    return Snapshot(
        gpus=tuple(_gpu(frame, key, known, interval_ns) for key in keys),
        reasons=tuple(reasons),
        interval_ns=interval_ns,
        cadence_ns=_cadence(view, t, interval_ns) if rows else interval_ns,
        age_ns=t - int(max(row["t"] for row in rows.values())) if rows else None,
    )


snapshot = FrameMemo(_snapshot)
"""What is known at the playhead, read once per frame."""


def _cadence(view: View, t: int, otherwise_ns: int) -> int:
    """The usual time between rows, ns: one late tick must not change what the title says."""
    rows = view.query("gpu", t - LOOKBACK_NS, t)
    if not len(rows) or "dt_ns" not in (rows.dtype.names or ()):
        return otherwise_ns
    return int(np.median(rows["dt_ns"])) or otherwise_ns


def _link_lookback(interval_ns: int) -> int:
    return min(max(LINK_INTERVALS * interval_ns, NS), LOOKBACK_NS)


def _all_links(frame: Frame, lookback_ns: int) -> dict[int, Links]:
    """The links of every GPU; how far their error counters have moved is looked up only where some are not zero."""
    rows = frame.view.latest("nvlink", frame.t, lookback_ns)
    return read_links(rows, _errors_before(frame) if any_errors(rows) else {})


def _errors_before(frame: Frame) -> dict[tuple[int, int], float]:
    """Errors of each link near the start of the span; of a link not seen there, the fewest seen within it."""
    start_t = frame.t - frame.span_ns
    found = _error_counts(frame.view.latest("nvlink", start_t, LOOKBACK_NS))
    newest = frame.view.latest("nvlink", frame.t, LOOKBACK_NS)
    if len(found) < len(newest):  # the session began within the span
        bins = frame.view.binned("nvlink", ERROR_FIELDS, start_t, frame.t, max(frame.span_ns, 1))
        for key, count in _error_counts(bins, "_min").items():
            found[key] = min(found.get(key, math.inf), count)
    return found


def _error_counts(rows: Rows, suffix: str = "") -> dict[tuple[int, int], float]:
    if not len(rows):
        return {}
    counts = zip(rows["gpu"].tolist(), rows["link"].tolist(), error_counts(rows, suffix), strict=True)
    found: dict[tuple[int, int], float] = {}
    for gpu, link, count in counts:
        if count == count:  # not NaN
            found[gpu, link] = min(found.get((gpu, link), math.inf), count)
    return found


def _series(frame: Frame) -> tuple[dict[Key, Record], dict[Key, Record], list[Reason], bool]:
    """Newest rows, devices and reasons; and whether some GPU is late, so that older rows were looked for."""
    view, t = frame.view, frame.t
    reasons = read_reasons(frame)
    devices = _by_key(records(view.latest("gpu_device", t, DEVICE_LOOKBACK_NS)))
    rows = _by_key(records(view.latest("gpu", t, LOOKBACK_NS)))
    late = not rows or not _expected(devices, reasons) <= set(rows)
    if late:
        rows = _by_key(records(view.latest("gpu", t, HIDDEN_AFTER_NS)))
    return rows, devices, reasons, late


def _expected(devices: Iterable[Key], reasons: Iterable[Reason]) -> set[Key]:
    """Every GPU that is known of without its row."""
    return {*devices, *((gpu, WHOLE_GPU) for reason in reasons for gpu in _scope_gpu(reason.scope))}


def _statuses(frame: Frame) -> list[list[str]]:
    """The statuses in force, each as the words of its fields in order."""
    text = frame.view.strings.text
    names = ("collector", "channel", "field", "scope", "state", "reason", "remedy")
    rows = records(frame.view.latest("status", frame.t, DEVICE_LOOKBACK_NS))
    return [[clean(text(int(record.get(name, 0)))) for name in names] for record in rows]


statuses = FrameMemo(_statuses)


def read_reasons(frame: Frame) -> list[Reason]:
    """Reasons in force about GPUs, most important first."""
    found: list[Reason] = []
    for words in statuses(frame):
        collector, channel, state = words[0], words[1], words[4]
        if state not in _BAD_STATES or not (collector == "gpu" or channel in _CHANNELS):
            continue
        found.append(Reason(_BAD_STATES.index(state), *words))
    return sorted(found, key=lambda reason: (reason.rank, bool(reason.field), reason.scope, reason.field))


def _by_key(rows: Iterable[Record]) -> dict[Key, Record]:
    return {(int(row["gpu"]), int(row["gi"])): row for row in rows if "gpu" in row and "gi" in row}


def _scope_gpu(scope: str) -> tuple[int, ...]:
    """The GPU of a `status` scope such as "gpu 1"; empty when it names none, or only a part of one."""
    words = scope.split()
    is_gpu = len(words) == 2 and words[0] == "gpu" and words[1].isdecimal() and len(words[1]) < 5
    return (int(words[1]),) if is_gpu else ()


def _gpu(frame: Frame, key: Key, known: _Known, interval_ns: int) -> Gpu:
    gpu, gi = key
    row = known.rows.get(key, {})
    device = known.devices.get(key, {})
    whole = gi == WHOLE_GPU
    links = known.links.get(gpu, NO_LINKS) if whole else NO_LINKS
    age_ns = frame.t - int(row["t"]) if row else None
    gone = _gone(frame, key, known)
    found = [*gpu_flags(row, _xids(frame, gpu, known) if whole else ()), *link_flags(links)]
    return Gpu(
        gpu=gpu,
        gi=gi,
        name=_name(frame.view, device),
        row={} if gone else row,
        device=device,
        unified=frame.view.strings.text(int(device.get("memory_kind", 0))) == "unified",
        links=NO_LINKS if gone else links,
        age_ns=age_ns,
        stale=age_ns is not None and age_ns > STALE_INTERVALS * interval_ns,
        gone=gone,
        flags=tuple(sorted(found, key=lambda flag: -flag.severity)),
        reasons=_explained(known.reasons, f"gpu {gpu}" if whole else f"gpu {gpu} gi {gi}"),
        deep=known.deep.get(gpu) if whole and not gone else None,
        dcgm_bw_pct=known.dcgm.get(gpu, math.nan) if whole else math.nan,
    )


def _name(view: View, device: Record) -> str:
    words = clean(view.strings.text(int(device.get("name", 0))))
    return words.removeprefix("NVIDIA ")


def _explained(reasons: Iterable[Reason], scope: str) -> frozenset[tuple[str, str]]:
    """What the reasons of a series, or of all of them, are about."""
    return frozenset((reason.channel, reason.field) for reason in reasons if reason.scope in (scope, ""))


def _events(frame: Frame, gpu: int, known: _Known) -> list[tuple[str, Record]]:
    text = frame.view.strings.text
    return [(text(int(row["kind"])), row) for row in known.events if int(row["gpu"]) == gpu]


def _xids(frame: Frame, gpu: int, known: _Known) -> tuple[int, ...]:
    """The XIDs within the span shown, the newest per kind."""
    since = frame.t - frame.span_ns
    rows = (row for kind, row in _events(frame, gpu, known) if kind == "xid" and row["t"] > since)
    return tuple(int(row["code"]) for row in rows if math.isfinite(row["code"]))


def _gone(frame: Frame, key: Key, known: _Known) -> str:
    """Why a GPU has no current row: lost, said to be unusable, or silent for too long."""
    gpu, gi = key
    row = known.rows.get(key)
    seen_t = int(row["t"]) if row else -1
    times = {
        kind: int(event["t"]) for kind, event in sorted(_events(frame, gpu, known), key=lambda e: e[1]["t"])
    }
    lost_t = times.get("lost")
    if lost_t is not None and lost_t >= seen_t and lost_t > times.get("back", -1):
        return f"GPU {gpu} lost {when(frame, lost_t)}"
    if row:
        return ""
    for reason in known.reasons:
        if gpu in _scope_gpu(reason.scope) and not reason.field and reason.channel in ("", "gpu"):
            return f"GPU {gpu}: {reason.text or reason.state}"
    part = f" gi {gi}" if gi != WHOLE_GPU else ""
    return f"GPU {gpu}{part}: no sample in the last {duration(HIDDEN_AFTER_NS)}"


def when(frame: Frame, t: int) -> str:
    """`at 14:03:21` by the wall clock, or how long before the playhead when the session has no wall time."""
    if len(frame.view.anchors):
        return f"at {format_wall(frame.view.anchors, t)}"
    return f"{duration(frame.t - t)} ago"
