"""The series of a view over two ranges of time: every number of every channel, with its subject and unit.

Gauges are taken as they are, counters since boot are differenced, sums over an interval divided by it. Events become
counts and total durations per grid step, requests and histogram buckets quantiles per step. Text that names things
(processes, models) stays apart, in `Series.names`, for whoever has to hide it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opusmon import stats
from opusmon.channels import COST, GPU_DEVICE, STATUS, WHOLE_CONTEXT, WHOLE_GPU
from opusmon.clock import NS
from opusmon.schema import Channel, Rows
from opusmon.triage.changes import Floats, Ints
from opusmon.triage.explain_words import FLOORS, PER_SECOND, cumulative, wanted
from opusmon.triage.scene import View

RAW_NS = 2400 * NS
"""Ranges that are together longer than this are read from rollups."""
MOST_SAMPLES = 1200
"""Samples of a series that a long range is reduced to."""
_ROLLUP_NS = 10 * NS
NAMES_NS = 60 * NS
LONGEST_NS = 600 * NS
"""No sample stands for more time than this."""

SKIPPED = frozenset(
    {STATUS.name, GPU_DEVICE.name, "engine_bucket", "request", "request_open", "stall", "gpu_event"}
)
"""Channels without series of their own: what they say is read by `explain_events` and `explain_requests`."""

_UNITS = {"B": "B/s", "ns": "ns/s", "": "1/s", "rows": "1/s"}
"""Unit of what is divided by time."""


@dataclass(frozen=True, slots=True)
class Spans:
    """What is compared: the times of the baseline and those in which a change is looked for.

    Attributes:
        base0: the baseline's samples are after this, monotonic ns.
        base1: and at most at this.
        zone0: a change is looked for after this.
        zone1: and until this.
    """

    base0: int
    base1: int
    zone0: int
    zone1: int

    @property
    def length_ns(self) -> int:
        """Both together."""
        return self.base1 - self.base0 + self.zone1 - self.zone0

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """The two ranges, one when they touch."""
        if self.base1 == self.zone0:
            return ((self.base0, self.zone1),)
        return (self.base0, self.base1), (self.zone0, self.zone1)

    @property
    def step_ns(self) -> int:
        """Grid of what is counted or summarised: at least a second."""
        return max(1, -(-self.length_ns // (MOST_SAMPLES * NS))) * NS

    def select(self, t: Ints) -> tuple[np.ndarray[Any, np.dtype[np.bool_]], int]:
        """Which of the times belong to either range, and how many of them to the baseline."""
        base = (t > self.base0) & (t <= self.base1)
        zone = (t > self.zone0) & (t <= self.zone1)
        return base | zone, int(np.count_nonzero(base))


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One number over time.

    Attributes:
        channel: where it is from.
        quantity: field, or name of what was derived from fields.
        subject: whose it is, with `{0}`, `{1}` in the places of `names`: "gpu 0", "{0} 1234 stream 0x7".
        names: text from outside: process, model, engine, ...
        t: ascending, ns, shape (n,).
        x: the samples, NaN where missing, shape (n,).
        unit: of x.
        dt_ns: each sample stands for the time since t - dt_ns; 0 for an instant.
        floor: noise that the unit always has.
        part: number of the link, where it is one of several of one subject; else -1.
        whole: subject of all such parts together.
    """

    channel: str
    quantity: str
    subject: str
    names: tuple[str, ...]
    t: Ints
    x: Floats
    unit: str
    dt_ns: int
    floor: float
    part: int = -1
    whole: str = ""


def gauges(view: View, spans: Spans) -> Iterator[Series]:
    """The series of all channels that have a row per sample."""
    for name, channel in sorted(view.channels.items()):
        if name not in SKIPPED and channel.kind != "event":
            yield from _of_channel(view, channel, spans)


def _of_channel(view: View, channel: Channel, spans: Spans) -> Iterator[Series]:
    fields = [name for name in channel.values if name == "dt_ns" or wanted(name)]
    extra = [n for n in channel.values if n not in fields and (n.endswith(("_sum_s", "_n")))]
    table = _table(view, channel, [*fields, *extra], spans)
    if table is None:
        return
    known = _process_names(view, channel, spans) if table.step_ns else {}
    for one in table.split():
        subject = subject_of(view, channel, one.rows[0], known=known)
        for name in fields:
            if name != "dt_ns":
                yield one.series(name, subject)
        yield from _means(one, subject)


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """Whose series these are; see `Series`."""

    text: str
    names: tuple[str, ...]
    part: int = -1
    whole: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Rows of a channel in which each field can be asked for as numbers, raw or of a rollup.

    Attributes:
        rows: of the channel, or of a rollup of it.
        step_ns: bin width of the rollup, 0 for raw rows.
    """

    channel: Channel
    rows: Rows
    step_ns: int

    def column(self, name: str, most: bool = False) -> Floats:
        """A field as numbers; of a rollup the mean, or the maximum with `most`."""
        column = self.rows[name if not self.step_ns else f"{name}_{'max' if most else 'mean'}"]
        # A file may hold a signalling NaN, and casting that one warns.
        with np.errstate(invalid="ignore"):
            numbers: Floats = column.astype(np.float64)
        return numbers

    @property
    def t(self) -> Ints:
        """Times of the samples; of bins their ends."""
        times: Ints = self.rows["t"].astype(np.int64) + self.step_ns
        return times

    @property
    def has_dt(self) -> bool:
        """Whether rows say which interval they cover."""
        return "dt_ns" in self.channel.by_name

    def split(self) -> Iterator[_Table]:
        """One table for each series of the channel."""
        if not self.channel.key:
            yield self
            return
        keys = np.stack([self.rows[name].astype(np.int64) for name in self.channel.key], axis=1)
        order = np.lexsort(keys.T[::-1])
        placed = keys[order]
        starts = np.flatnonzero(np.any(placed[1:] != placed[:-1], axis=1)) + 1
        for part in np.split(order, starts):
            yield _Table(self.channel, self.rows[np.sort(part)], self.step_ns)

    def interval_ns(self) -> int:
        """Length of the interval that a sample stands for; 0 where samples are instants."""
        if self.step_ns:
            return self.step_ns
        return min(max(0, int(np.median(self.rows["dt_ns"]))), LONGEST_NS) if self.has_dt else 0

    def series(self, name: str, subject: Subject) -> Series:
        """The series of a field."""
        field = self.channel.by_name[name]
        unit, x, dt_ns = field.unit, self.column(name, most=True), self.interval_ns()
        if cumulative(field):
            x, unit = stats.rate(self.t, x), _UNITS.get(unit, f"{unit}/s")
            if not dt_ns and len(x) > 1:
                dt_ns = int(np.median(np.diff(self.t)))
        else:
            x = self.column(name)
            if name in PER_SECOND and self.has_dt:
                x, unit = self._per_second(x), _UNITS.get(unit, f"{unit}/s")
        return self.made(name, subject, x, unit, dt_ns)

    def _per_second(self, x: Floats) -> Floats:
        """Sums over intervals divided by their lengths."""
        dt_s = self.column("dt_ns") / NS
        return divided(x, dt_s)

    def made(self, quantity: str, subject: Subject, x: Floats, unit: str, dt_ns: int) -> Series:
        """A series of this table's times."""
        return Series(
            self.channel.name,
            quantity,
            subject.text,
            subject.names,
            self.t,
            x,
            unit,
            dt_ns,
            FLOORS.get(unit, 0.0),
            subject.part,
            subject.whole,
        )


_RATIOS: Mapping[str, tuple[tuple[str, str, str, str], ...]] = {
    "stream": (("mean_wait", "wait_ns", "waits", "ns"), ("mean_bubble", "bubble_ns", "bubbles", "ns")),
    "engine": tuple(
        (f"{name}_mean", f"{name}_sum_s", f"{name}_n", "s")
        for name in ("ttft", "itl", "tpot", "e2e", "queue", "prefill", "decode")
    ),
}
"""Means to derive by channel: quantity, sum, count, unit."""


def _means(table: _Table, subject: Subject) -> Iterator[Series]:
    for quantity, total, count, unit in _RATIOS.get(table.channel.name, ()):
        if {total, count} <= set(table.channel.by_name):
            n = table.column(count)
            yield table.made(quantity, subject, divided(table.column(total), n), unit, table.interval_ns())


def divided(sums: Floats, counts: Floats) -> Floats:
    """Sums over counts, NaN where nothing was counted."""
    out = np.full(len(sums), np.nan)
    np.divide(sums, counts, out=out, where=counts > 0)
    return out


def _table(view: View, channel: Channel, fields: Sequence[str], spans: Spans) -> _Table | None:
    """The rows of a channel in both ranges; None where there are none, or no number in them."""
    if not fields or fields == ["dt_ns"]:
        return None
    step_ns = 0
    if spans.length_ns > RAW_NS:
        step_ns = -(-spans.step_ns // _ROLLUP_NS) * _ROLLUP_NS
        parts = [view.binned(channel.name, fields, t0, t1, step_ns) for t0, t1 in spans.parts]
    else:
        parts = [view.query(channel.name, t0, t1) for t0, t1 in spans.parts]
    parts = [part for part in parts if len(part)]
    if not parts:
        return None
    return _Table(channel, parts[0] if len(parts) == 1 else np.concatenate(parts), step_ns)


# -- subjects ----------------------------------------------------------------------------------------------------


def _process_names(view: View, channel: Channel, spans: Spans) -> dict[int, int]:
    """Text ids of the names of processes, which rollups do not have: of those at the end of either range."""
    field = _name_field(channel.by_name)
    if field is None or "pid" not in channel.key:
        return {}
    known: dict[int, int] = {}
    for end in (spans.base1, spans.zone1):
        rows = view.query(channel.name, end - NAMES_NS, end)
        known |= dict(zip(rows["pid"].tolist(), rows[field].tolist(), strict=True))
    return known


def _name_field(fields: Iterable[str]) -> str | None:
    """The field that names the process, if there is one."""
    have = set(fields)
    return next((one for one in ("process", "name") if one in have), None)


def subject_of(
    view: View, channel: Channel, row: Any, keys: Sequence[str] = (), known: Mapping[int, int] | None = None
) -> Subject:
    """Whose series a row belongs to, by its key, or by the fields named.

    Args:
        view: has the texts.
        channel: of the row.
        row: a row, raw or of a rollup.
        keys: fields that tell; those of the channel's key by default.
        known: text ids of process names by pid, for rows that have none.
    """
    words: list[str] = []
    names: list[str] = []
    part, whole = -1, ""

    def name(text_id: Any) -> str:
        names.append(view.strings.text(int(text_id)))
        return f"{{{len(names) - 1}}}"

    for key in keys or channel.key:
        if key == "link":
            part, whole = int(row[key]), " ".join(words)
        words.extend(_key_words(channel, row, key, name, known or {}))
    return Subject(" ".join(words), tuple(names), part, whole)


def _key_words(
    channel: Channel, row: Any, key: str, name: Callable[[Any], str], known: Mapping[int, int]
) -> list[str]:
    """Words for one field of a key."""
    value = row[key]
    if channel.by_name[key].text:
        return [name(value)] if int(value) else []
    if key == "gi":
        return [] if value == WHOLE_GPU else [f"instance {value}"]
    if key == "pid":
        field = _name_field(row.dtype.names or ())
        text_id = known.get(int(value)) if field is None else row[field]
        return [f"pid {value}"] if text_id is None else [name(text_id), str(value)]
    if key == "stream":
        return [stream_words(int(value))]
    return [f"{key} {value}"]


def stream_words(stream: int) -> str:
    """`stream 0x7`, or what the special handles mean."""
    special = {0: "default stream", 2: "per-thread default stream", WHOLE_CONTEXT: "all streams"}
    return special.get(stream, f"stream {stream:#x}")


def own(series: Series) -> bool:
    """Whether it is about opusmon itself."""
    return series.channel == COST.name
