"""What the gpu pane knows at the playhead: devices, their links, their age, and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from opusmon.channels import KEYFRAME_NS, WHOLE_GPU
from opusmon.clock import NS
from opusmon.schema import Rows
from opusmon.times import format_wall
from opusmon.ui.panes.base import Frame, View
from opusmon.ui.panes.gpu_flags import Flag, gpu_flags, link_flags
from opusmon.ui.text import clean
from opusmon.ui.units import duration

Record = Mapping[str, float]
Key = tuple[int, int]

LOOKBACK_NS = 10 * NS
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
class Link:
    """One NVLink link at the playhead; rates in bytes per second, NaN where missing."""

    number: int
    tx_bps: float
    rx_bps: float
    speed_bps: float
    down: bool
    errors: float


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
        links: by link number.
        age_ns: playhead minus time of the row; None without one.
        stale: the row is older than `STALE_INTERVALS` intervals.
        gone: "GPU 1 lost at 14:03:21", or another reason for having no row; "" when all is well.
        flags: what is wrong, worst first.
        reasons: (channel, field) with a `status` row that explains their absence here.
    """

    gpu: int
    gi: int
    name: str
    row: Record
    device: Record
    unified: bool = False
    links: tuple[Link, ...] = ()
    age_ns: int | None = None
    stale: bool = False
    gone: str = ""
    flags: tuple[Flag, ...] = ()
    reasons: frozenset[tuple[str, str]] = frozenset()

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


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of it.

    Attributes:
        gpus: whole devices in NVML order, each followed by its MIG instances.
        reasons: most important first.
        interval_ns: between rows.
    """

    gpus: tuple[Gpu, ...] = ()
    reasons: tuple[Reason, ...] = ()
    interval_ns: int = DEFAULT_INTERVAL_NS


@dataclass(frozen=True, slots=True)
class _Known:
    """Rows of all channels by series, before they are put together."""

    rows: Mapping[Key, Record]
    devices: Mapping[Key, Record]
    links: Mapping[int, list[Record]]
    reasons: Sequence[Reason]
    events: Sequence[Record] = field(default_factory=list)


def records(rows: Rows) -> list[Record]:
    """Rows as mappings from field name to number."""
    names = rows.dtype.names or ()
    return [dict(zip(names, row, strict=True)) for row in rows.tolist()]


def count_gpus(frame: Frame) -> int:
    """How many entries `snapshot` has, for less."""
    rows, devices, reasons, _ = _series(frame)
    return len({*rows, *_expected(devices, reasons)})


def snapshot(frame: Frame) -> Snapshot:
    """Read the view at the playhead."""
    view, t = frame.view, frame.t
    rows, devices, reasons, late = _series(frame)
    links = _by_gpu(records(view.latest("nvlink", t, HIDDEN_AFTER_NS if late else LOOKBACK_NS)))
    interval_ns = read_interval(rows.values())
    stale = any(t - row["t"] > STALE_INTERVALS * interval_ns for row in rows.values())
    lookback_ns = EVENT_LOOKBACK_NS if late or stale else frame.span_ns
    events = records(view.latest("gpu_event", t, lookback_ns))
    known = _Known(rows, devices, links, reasons, events)
    keys = sorted({*rows, *_expected(devices, reasons)})
    gpus = tuple(_gpu(frame, key, known, interval_ns) for key in keys)
    return Snapshot(gpus, tuple(reasons), interval_ns)


def _series(frame: Frame) -> tuple[dict[Key, Record], dict[Key, Record], list[Reason], bool]:
    """Newest rows, devices and reasons; and whether some GPU is late, so that older rows were looked for."""
    view, t = frame.view, frame.t
    reasons = read_reasons(view, t)
    devices = _by_key(records(view.latest("gpu_device", t, DEVICE_LOOKBACK_NS)))
    rows = _by_key(records(view.latest("gpu", t, LOOKBACK_NS)))
    late = not rows or not _expected(devices, reasons) <= set(rows)
    if late:
        rows = _by_key(records(view.latest("gpu", t, HIDDEN_AFTER_NS)))
    return rows, devices, reasons, late


def _expected(devices: Iterable[Key], reasons: Iterable[Reason]) -> set[Key]:
    """Every GPU that is known of without its row."""
    return {*devices, *((gpu, WHOLE_GPU) for reason in reasons for gpu in _scope_gpu(reason.scope))}


@dataclass(frozen=True, slots=True)
class Age:
    """How old the newest row is.

    Attributes:
        age_ns: playhead minus its time.
        interval_ns: between rows.
    """

    age_ns: int
    interval_ns: int

    @property
    def stale(self) -> bool:
        """Older than `STALE_INTERVALS` intervals."""
        return self.age_ns > STALE_INTERVALS * self.interval_ns


def read_age(frame: Frame) -> Age | None:
    """Age of the newest `gpu` row; None when there is none that is shown."""
    rows = frame.view.latest("gpu", frame.t, LOOKBACK_NS)
    if not len(rows):
        rows = frame.view.latest("gpu", frame.t, HIDDEN_AFTER_NS)
    found = records(rows)
    return Age(frame.t - int(max(row["t"] for row in found)), read_interval(found)) if found else None


def read_interval(rows: Iterable[Record]) -> int:
    """The interval between rows: the longest that any of them covers, ns."""
    return max((int(row.get("dt_ns", 0)) for row in rows), default=0) or DEFAULT_INTERVAL_NS


def read_reasons(view: View, t: int) -> list[Reason]:
    """Reasons in force about GPUs, most important first."""
    found: list[Reason] = []
    text = view.strings.text
    names = ("collector", "channel", "field", "scope", "state", "reason", "remedy")
    for record in records(view.latest("status", t, DEVICE_LOOKBACK_NS)):
        words = [clean(text(int(record.get(name, 0)))) for name in names]
        collector, channel, state = words[0], words[1], words[4]
        if state not in _BAD_STATES or not (collector == "gpu" or channel in _CHANNELS):
            continue
        found.append(Reason(_BAD_STATES.index(state), *words))
    return sorted(found, key=lambda reason: (reason.rank, bool(reason.field), reason.scope, reason.field))


def _by_key(rows: Iterable[Record]) -> dict[Key, Record]:
    return {(int(row["gpu"]), int(row["gi"])): row for row in rows if "gpu" in row and "gi" in row}


def _by_gpu(rows: Iterable[Record]) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = {}
    for row in rows:
        found.setdefault(int(row["gpu"]), []).append(row)
    return found


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
    links = _links(known.links.get(gpu, ())) if whole else ()
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
        links=() if gone else links,
        age_ns=age_ns,
        stale=age_ns is not None and age_ns > STALE_INTERVALS * interval_ns,
        gone=gone,
        flags=tuple(sorted(found, key=lambda flag: -flag.severity)),
        reasons=_explained(known.reasons, f"gpu {gpu}" if whole else f"gpu {gpu} gi {gi}"),
    )


def _name(view: View, device: Record) -> str:
    words = clean(view.strings.text(int(device.get("name", 0))))
    return words.removeprefix("NVIDIA ")


def _links(rows: Iterable[Record]) -> tuple[Link, ...]:
    return tuple(sorted(map(_link, rows), key=lambda link: link.number))


def _link(row: Record) -> Link:
    errors = math.nan
    for name in ("replay_errors", "recovery_errors", "crc_errors"):
        count = row.get(name, math.nan)
        if count == count:  # not NaN
            errors = count if errors != errors else errors + count
    return Link(
        number=int(row["link"]),
        tx_bps=row.get("tx_bps", math.nan),
        rx_bps=row.get("rx_bps", math.nan),
        speed_bps=row.get("speed_bps", math.nan),
        down=row.get("state", math.nan) == 0,
        errors=errors,
    )


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
