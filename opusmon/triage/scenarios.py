"""The scenario table: how each kind of request fared, and what happened while the slow ones waited.

A cause is named where it overlaps the slow requests in clearly more cases than its times would by chance. Chance is measured:
the requests are moved along the time of their kind, round its end, step by step, and counted at each step. So long
requests, which overlap more of anything, prove nothing, and neither does a cause that lasts all the time. What
remains is coincidence, not proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opusmon.channels import REQUEST
from opusmon.quantiles import enough, quantile_of
from opusmon.request_rows import SIZE_CLASSES, UNKNOWN_SIZE, positive, size_class
from opusmon.schema import Rows, conform
from opusmon.times import format_duration
from opusmon.triage.finding import Finding
from opusmon.triage.instants import Floats, request_source, said, split
from opusmon.triage.rules_api_shape import group_field, latency_of
from opusmon.triage.scene import Scene
from opusmon.triage.severity import NOTE

SLOW_SHARE = 0.10
"""The slowest tenth of a kind,"""
SLOW_RATIO = 1.5
"""as far as it takes so many times the median."""
MIN_SLOW = 3
MIN_SHARE = 0.25
"""A cause that meets fewer of the slow requests is not the main one."""
MIN_LIFT = 1.5
MAX_CHANCE = 0.25
"""Share of the steps at which as many slow requests overlap the cause as really did. One episode of each in a few
minutes cannot give less than the share of time that the cause lasts; so it is told, and only what is common is left
out."""
TOLD_CHANCE = 0.01
STEPS = 499
SYMPTOMS = frozenset(
    {
        "slo_burn_fast",
        "slo_burn_slow",
        "request_errors",
        "retries_hide_latency",
        "latency_knee",
        "volatile_latency",
    }
)
"""Rules that say that requests are slow, not why."""
NONE_FOUND = "none found"


@dataclass(frozen=True, slots=True, eq=False)
class Cause:
    """Something that happened at times.

    Attributes:
        name: what to call it.
        spans: begin and end of each time, monotonic ns, shape (n, 2).
    """

    name: str
    spans: np.ndarray[tuple[Any, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Coincidence:
    """A cause and how far it coincides with the slow requests.

    Attributes:
        name: of the cause.
        count: slow requests that overlap it.
        slow: slow requests.
        lift: count over what chance gives.
        chance: share of the steps with as many.
    """

    name: str
    count: int
    slow: int
    lift: float
    chance: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests of one source, label (or model) and input-size class.

    Attributes:
        source: who saw them.
        group: label or model.
        size: input-size class.
        latency: ttft or e2e.
        n: requests with that latency.
        mean_ns: mean.
        p95_ns: 95th percentile.
        rough: fewer than 20 requests: the percentile says little.
        slow: slow ones among them.
        cause: what coincides most; None when nothing does beyond chance.
    """

    source: str
    group: str
    size: str
    latency: str
    n: int
    mean_ns: float
    p95_ns: float
    rough: bool
    slow: int
    cause: Coincidence | None

    @property
    def volatility_pct(self) -> float:
        """p95 over the mean, per cent of the mean."""
        return 100 * (self.p95_ns / self.mean_ns - 1) if self.mean_ns > 0 else math.nan

    def to_json(self) -> dict[str, Any]:
        """For programs; what is missing is null."""
        cause = self.cause
        return {
            "source": self.source,
            "group": self.group,
            "size": self.size,
            "latency": self.latency,
            "count": self.n,
            "mean_s": _json(self.mean_ns / 1e9),
            "p95_s": _json(self.p95_ns / 1e9),
            "rough": self.rough,
            "volatility_pct": _json(self.volatility_pct),
            "slow": self.slow,
            "cause": None
            if cause is None
            else {
                "name": cause.name,
                "count": cause.count,
                "lift": _json(cause.lift),
                "chance": _json(cause.chance),
            },
        }


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None


def causes(findings: Iterable[Finding], least: int = NOTE) -> list[Cause]:
    """Causes from what the rules found, symptoms left out: one per rule and subject.

    Args:
        findings: in any order.
        least: severity from which on they count.
    """
    spans: dict[str, list[tuple[int, int]]] = {}
    for one in findings:
        if one.rule not in SYMPTOMS and one.severity >= least:
            spans.setdefault(f"{one.rule} ({one.subject})", []).append((one.t0, one.t1))
    return [Cause(name, np.array(times, np.int64)) for name, times in sorted(spans.items())]


def of_stalls(scene: Scene) -> list[Cause]:
    """Causes from the rows of channel `stall`, by process and kind."""
    found: list[Cause] = []
    for (process, kind), rows in scene.series("stall", "process", "kind"):
        took = positive(rows["dur_ns"])
        known = ~np.isnan(took)
        ends = rows["t"][known]
        spans = np.stack((ends - took[known].astype(np.int64), ends), axis=1)
        found.append(Cause(f"stall {said(scene, kind)} ({said(scene, process)})", spans))
    return found


def scenarios(scene: Scene, given: Sequence[Cause]) -> list[Scenario]:
    """The table: kinds of requests of each source, the largest source first, by group and size.

    Args:
        scene: its requests.
        given: what may be behind the slow ones, for example `[*causes(findings), *of_stalls(scene)]`.
    """
    rows = conform(scene.rows("request"), REQUEST)
    found = sorted(split(rows, ("source", "start")), key=lambda item: -len(item[1]))
    return [one for key, mine in found for one in _of_source(scene, key, mine, given)]


def _of_source(scene: Scene, key: tuple[int, int], rows: Rows, given: Sequence[Cause]) -> Iterator[Scenario]:
    latency, values = latency_of(scene, rows)
    group, size = rows[group_field(rows)], size_class(rows["input_tokens"].astype(np.float64))
    names = [*(name for name, _ in SIZE_CLASSES), UNKNOWN_SIZE]
    known = ~np.isnan(values)
    kinds = np.unique(np.stack((group[known].astype(np.int64), size[known]), axis=1), axis=0)
    for number, place in sorted(kinds.tolist(), key=lambda kind: (said(scene, kind[0]), kind[1])):
        mine = known & (group == number) & (size == place)
        took, ends = values[mine], rows["t"][mine]
        total = positive(rows["e2e_ns"][mine])
        begins = ends - np.nan_to_num(np.maximum(total, took), nan=0.0).astype(np.int64)
        late = _slow(took)
        spans = np.stack((begins, begins + took.astype(np.int64)), axis=1)
        yield Scenario(
            source=request_source(scene, key),
            group=said(scene, number) or "(none)",
            size=names[place],
            latency=latency,
            n=len(took),
            mean_ns=float(took.mean()),
            p95_ns=quantile_of(took, 0.95).value,
            rough=not enough(len(took), 0.95),
            slow=int(late.sum()),
            cause=main_cause(spans, late, given),
        )


def _slow(took: Floats) -> np.ndarray[tuple[Any, ...], np.dtype[np.bool_]]:
    """The slowest `SLOW_SHARE` that take `SLOW_RATIO` times the median at least, shape (n,)."""
    edge = quantile_of(took, 1 - SLOW_SHARE).value
    return np.asarray((took >= edge) & (took >= SLOW_RATIO * float(np.median(took))), np.bool_)


# -- chance ------------------------------------------------------------------------------------------------------


def main_cause(spans: Any, slow: Any, given: Sequence[Cause]) -> Coincidence | None:
    """The cause that overlaps most slow requests beyond chance; None when none does.

    Args:
        spans: begin and end of each request's wait, shape (n, 2), ns.
        slow: which of them are slow, shape (n,).
        given: what may be behind them.
    """
    waits = np.asarray(spans, np.int64)[np.asarray(slow, np.bool_)]
    if len(waits) < MIN_SLOW:
        return None
    t0, t1 = int(np.min(spans)), int(np.max(spans))
    found = [one for cause in given if (one := _coincidence(waits, t0, t1, cause)) is not None]
    return max(found, key=lambda one: (one.count - one.count / one.lift, one.lift), default=None)


def _coincidence(waits: Any, t0: int, t1: int, cause: Cause) -> Coincidence | None:
    begins, ends = _union(cause.spans, t0, t1)
    if not len(begins):
        return None
    length = waits[:, 1] - waits[:, 0]
    count = int(_touching(begins, ends, waits[:, 0], waits[:, 1]).sum())
    if count < max(MIN_SLOW, MIN_SHARE * len(waits)):
        return None
    period = t1 - t0 + 1
    around = np.concatenate((begins, begins + period)), np.concatenate((ends, ends + period))
    steps = (np.arange(1, STEPS + 1, dtype=np.float64) / (STEPS + 1) * period).astype(np.int64)
    moved = (waits[:, 0] - t0 + steps[:, None]) % period + t0
    counts = _touching(*around, moved, moved + length).sum(axis=1)
    chance = (1 + int((counts >= count).sum())) / (STEPS + 1)
    lift = count / max(float(counts.mean()), 0.5 / STEPS)
    if lift < MIN_LIFT or chance > MAX_CHANCE:
        return None
    return Coincidence(cause.name, count, len(waits), lift, chance)


def _union(spans: Any, t0: int, t1: int) -> tuple[Any, Any]:
    """Begins and ends of the times covered, ascending and apart from each other, cut to [t0, t1]."""
    inside = spans[(spans[:, 1] >= t0) & (spans[:, 0] <= t1)]
    inside = np.clip(inside[np.argsort(inside[:, 0], kind="stable")], t0, t1)
    if not len(inside):
        return inside[:, 0], inside[:, 1]
    reach = np.maximum.accumulate(inside[:, 1])
    first = np.flatnonzero(np.concatenate(([True], inside[1:, 0] > reach[:-1])))
    return inside[first, 0], np.maximum.reduceat(inside[:, 1], first)


def _touching(begins: Any, ends: Any, first: Any, last: Any) -> Any:
    """Which times [first, last] touch one of the spans, which are ascending and apart; any shape."""
    place = np.searchsorted(ends, first, side="left")
    return (place < len(begins)) & (begins[np.minimum(place, len(begins) - 1)] <= last)


# -- words -------------------------------------------------------------------------------------------------------

_COLUMNS = (("n", 6), ("mean", 9), ("p95", 9), ("p95/mean", 10))


def table(found: Sequence[Scenario]) -> list[str]:
    """The table as text, a heading per source; `~` marks a p95 of fewer than 20 requests."""
    width = max([len(one.group) for one in found] + [5])
    lines: list[str] = []
    for source, mine in _by_source(found).items():
        lines.append(f"{source}, {mine[0].latency.upper()}")
        heads = "".join(title.rjust(size) for title, size in _COLUMNS)
        lines.append(f"{'group'.ljust(width)}  {'input'.ljust(12)}{heads}  main coincident cause")
        lines += [_row(one, width) for one in mine]
    return lines


def _by_source(found: Sequence[Scenario]) -> Mapping[str, Sequence[Scenario]]:
    parted: dict[str, list[Scenario]] = {}
    for one in found:
        parted.setdefault(one.source, []).append(one)
    return parted


def _row(one: Scenario, width: int) -> str:
    rough = "~" if one.rough else ""
    cells = (
        str(one.n),
        format_duration(int(one.mean_ns)),
        rough + format_duration(int(one.p95_ns)),
        f"{rough}{one.volatility_pct:+.0f} %",
    )
    body = "".join(cell.rjust(size) for cell, (_, size) in zip(cells, _COLUMNS, strict=True))
    return f"{one.group.ljust(width)}  {one.size.ljust(12)}{body}  {cause_words(one)}"


def cause_words(one: Scenario) -> str:
    """`stall wait (vllm): 12 of 14 slow ones, 6.2x chance`, or `none found`."""
    cause = one.cause
    if cause is None:
        return NONE_FOUND
    sure = f" ({100 * cause.chance:.0f} % of chance alone)" if cause.chance > TOLD_CHANCE else ""
    return f"{cause.name}: {cause.count} of {cause.slow} slow ones, {cause.lift:.2g}x chance{sure}"
