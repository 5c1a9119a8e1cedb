"""Rules over the shape of latencies: where they bend with the length of the input, and how far they scatter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from opusmon.clock import NS
from opusmon.quantiles import quantile_of
from opusmon.request_rows import finished_ns
from opusmon.schema import Rows
from opusmon.slo import wilson_low
from opusmon.times import format_duration
from opusmon.triage.bend import Bend, find_bend
from opusmon.triage.episodes import Times
from opusmon.triage.finding import Evidence, Finding
from opusmon.triage.instants import (
    SETTLED_NS,
    Floats,
    Memo,
    Spell,
    instants,
    request_source,
    runs,
    said,
    split,
    window_rows,
)
from opusmon.triage.scene import Scene, rule
from opusmon.triage.severity import NOTE, WARN

SHAPE_NS = 600 * NS
STEP_NS = 60 * NS
_SOURCE = ("source", "start")
Key = tuple[int, int]


# -- bend --------------------------------------------------------------------------------------------------------


def prefill_tokens(rows: Rows) -> Floats:
    """Input tokens that were not read from the prefix cache, where that is known, shape (n,)."""
    cached = np.nan_to_num(rows["cache_read_tokens"].astype(np.float64), nan=0.0)
    return np.asarray(rows["input_tokens"].astype(np.float64) - np.maximum(cached, 0.0), np.float64)


def _bends(scene: Scene, t: int) -> dict[Key, Bend]:
    found: dict[Key, Bend] = {}
    for key, rows in split(window_rows(scene, "request", t, SHAPE_NS), _SOURCE):
        bend = find_bend(prefill_tokens(rows), finished_ns(scene.view.strings, rows, "ttft"))
        if bend is not None:
            found[key] = bend
    return found


_BENDS = Memo(_bends)


@rule("request", lookback_s=180, join_s=60)
def latency_knee(scene: Scene) -> Iterator[Finding]:
    """TTFT grows faster per input token past some length.

    Two joined lines against one, over 10 minutes, each minute. Thresholds: `knee_gain_bic`, `knee_ratio`; 19 of 20
    resamples must bend upwards. Tokens read from the prefix cache are left out where the answer tells them.
    """
    t, tables = _minutes(scene, _BENDS)
    for key in sorted({key for table in tables for key in table}):
        found = [table.get(key) for table in tables]
        ratio = np.array([_ratio(scene, bend) for bend in found])
        for spell in runs(scene, t, ratio >= scene.limits["knee_ratio"], ratio, t, STEP_NS):
            bend = found[spell.place]
            if bend is not None:
                yield _knee_finding(scene, key, bend, _with_minute(scene, spell))


def _minutes(scene: Scene, memo: Memo[dict[Key, Bend]]) -> tuple[Times, list[dict[Key, Bend]]]:
    t = instants(scene, STEP_NS, scene.t1 - SETTLED_NS)
    return t, [memo.at(scene, when) for when in t.tolist()]


def _ratio(scene: Scene, bend: Bend | None) -> float:
    sure = bend is not None and bend.agreed >= 0.95 and bend.gain_bic >= scene.limits["knee_gain_bic"]
    return bend.ratio if bend is not None and sure else 0.0


def _with_minute(scene: Scene, spell: Spell) -> Spell:
    """The run with the minute before its first instant."""
    first = max(spell.t0 - STEP_NS, scene.t0)
    return Spell(first, spell.t1, spell.open, spell.place, spell.weight)


def _knee_finding(scene: Scene, key: Key, bend: Bend, spell: Spell) -> Finding:
    source = request_source(scene, key)
    return spell.finding(
        "latency_knee",
        source,
        NOTE,
        title=f"TTFT grows {bend.after_ns / 1e3:.3g} us per token past {bend.tokens:,.0f} input tokens, "
        f"{bend.before_ns / 1e3:.3g} us before ({source})",
        evidence=(
            Evidence("slope_ratio", bend.ratio, "x", scene.limits["knee_ratio"], source),
            Evidence("gain_bic", bend.gain_bic, "", scene.limits["knee_gain_bic"], source),
            Evidence("knee_tokens", bend.tokens, "tokens", source=source),
            Evidence("knee_low_tokens", bend.low_tokens, "tokens", source=source),
            Evidence("knee_high_tokens", bend.high_tokens, "tokens", source=source),
            Evidence("longest_over_line", bend.effect, "x", source=source),
            Evidence("requests", float(bend.n), "requests", source=source),
        ),
        cause="longer inputs likely no longer fit one prefill step, or wait behind each other; attention grows with "
        "length squared",
        next="`opusmon probe --sweep` on a quiet server tells the input's own cost from that of the load",
    )


# -- volatility --------------------------------------------------------------------------------------------------


BEYOND = 3.0
"""Times the mean that surely more than 5 % of the requests must exceed; ln 20 for exponentially distributed times."""


@dataclass(frozen=True, slots=True)
class Scatter:
    """How far one latency of a group scatters.

    Attributes:
        source: text ids of source and start.
        field: label or model.
        group: text id of the group.
        latency: ttft or e2e.
        n: requests.
        mean_ns: their mean.
        p95_ns: their 95th percentile.
        beyond: of them over `BEYOND` times the mean, surely at least this share (0-1).
    """

    source: Key
    field: str
    group: int
    latency: str
    n: int
    mean_ns: float
    p95_ns: float
    beyond: float

    @property
    def ratio(self) -> float:
        """p95 over mean."""
        return self.p95_ns / self.mean_ns


def latency_of(scene: Scene, rows: Rows) -> tuple[str, Floats]:
    """`ttft` and its values, ns; `e2e` where nothing was streamed."""
    values = finished_ns(scene.view.strings, rows, "ttft")
    if np.isnan(values).all():
        return "e2e", finished_ns(scene.view.strings, rows, "e2e")
    return "ttft", values


def group_field(rows: Rows) -> str:
    """What requests are grouped by: label where there are labels, else model."""
    return "label" if (rows["label"] != 0).any() else "model"


def _scatters(scene: Scene, t: int) -> dict[tuple[Key, int], Scatter]:
    found: dict[tuple[Key, int], Scatter] = {}
    for key, rows in split(window_rows(scene, "request", t, SHAPE_NS), _SOURCE):
        field, (latency, values) = group_field(rows), latency_of(scene, rows)
        for group in np.unique(rows[field]).tolist():
            own = values[rows[field] == group]
            own = own[~np.isnan(own)]
            if not len(own) or not own.mean() > 0:
                continue
            mean, n = float(own.mean()), len(own)
            beyond = wilson_low(float((own > BEYOND * mean).sum()), n)
            if beyond > 0.05:
                p95 = quantile_of(own, 0.95).value
                found[key, group] = Scatter(key, field, group, latency, n, mean, p95, beyond)
    return found


_SCATTERS = Memo(_scatters)


@rule("request", lookback_s=180, join_s=60)
def volatile_latency(scene: Scene) -> Iterator[Finding]:
    """A few requests of a label (or model) take far longer than its mean.

    Thresholds: `volatility_ratio`, `volatility_warn_ratio`: p95 over mean, in 10 minutes, where surely over 5 % of
    the requests take over 3 times the mean (Wilson bound).
    """
    t = instants(scene, STEP_NS, scene.t1 - SETTLED_NS)
    tables = [_SCATTERS.at(scene, when) for when in t.tolist()]
    for key in sorted({key for table in tables for key in table}):
        ratio = np.array([table[key].ratio if key in table else 0.0 for table in tables])
        for spell in runs(scene, t, ratio >= scene.limits["volatility_ratio"], ratio, t, STEP_NS):
            yield _volatile(scene, tables[spell.place][key], _with_minute(scene, spell))


def _volatile(scene: Scene, found: Scatter, spell: Spell) -> Finding:
    source, group = request_source(scene, found.source), said(scene, found.group) or "(none)"
    warn = scene.limits["volatility_warn_ratio"]
    severity = WARN if found.ratio >= warn else NOTE
    name = found.latency.upper()
    return spell.finding(
        "volatile_latency",
        f"{source} {found.field} {group}",
        severity,
        title=f"{name} of {found.field} {group} scatters: p95 {format_duration(int(found.p95_ns))}, mean "
        f"{format_duration(int(found.mean_ns))} (n {found.n}, {source})",
        evidence=(
            Evidence(
                "p95_over_mean",
                found.ratio,
                "x",
                warn if severity == WARN else scene.limits["volatility_ratio"],
                source,
            ),
            Evidence("p95_s", found.p95_ns / NS, "s", source=source),
            Evidence("mean_s", found.mean_ns / NS, "s", source=source),
            Evidence("surely_beyond_pct", 100 * found.beyond, "%", 5, source),
            Evidence("requests", float(found.n), "requests", source=source),
        ),
        cause="a few requests likely wait for something that the others never meet: a queue, a stall, a far longer input",
        next="`opusmon triage FILE --scenarios` names what coincides with the slow ones; latency pane: slowest requests",
    )
