"""Percentiles of the latency pane, block by block: one source, one start of the clock, never mixed with another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np

from opusmon.channels import ENGINE
from opusmon.quantiles import NONE, Quantile, buckets, enough, quantile, quantile_of
from opusmon.request_rows import finished_ns
from opusmon.schema import Rows, conform
from opusmon.ui.panes.base import Frame, View
from opusmon.ui.panes.latency_buckets import BucketRows, engine_means, engine_rows, means_of, recent_sums
from opusmon.ui.panes.latency_read import (
    ENGINE_LOOKBACK_NS,
    NOW_NS,
    Array,
    Floats,
    Ints,
    Requests,
)
from opusmon.ui.panes.streams_table import short_number
from opusmon.ui.text import clean

QUANTILES = (0.50, 0.95, 0.99)
ENGINE_METRICS = (("ttft", "TTFT"), ("itl", "ITL"), ("tpot", "TPOT"), ("e2e", "E2E"), ("queue", "QUEUE"))
REQUEST_METRICS = (("ttft", "TTFT"), ("tpot", "TPOT"), ("gap_mean", "GAP"), ("e2e", "E2E"))
"""A proxy sees chunks, not tokens: the mean gap of a request is no inter-token latency and is not called so."""
ENGINE_START = "arrival at the engine"
STALE_INTERVALS = 2.5
PERCENT = 100.0


@dataclass(frozen=True, slots=True)
class Figures:
    """One latency over one time.

    Attributes:
        n: observations.
        mean_ns: their mean; NaN without any, or where only buckets are known.
        p: their 50th, 95th and 99th percentiles, ns.
    """

    n: float = 0.0
    mean_ns: float = math.nan
    p: tuple[Quantile, ...] = (NONE, NONE, NONE)

    @property
    def p95(self) -> Quantile:
        """The 95th percentile, ns."""
        return self.p[1]

    @property
    def volatility_pct(self) -> float:
        """The 95th percentile over the mean, per cent of the mean; NaN where there is only a bound."""
        if self.p95.kind not in ("exact", "interpolated") or not self.mean_ns > 0:
            return math.nan
        return PERCENT * (self.p95.value - self.mean_ns) / self.mean_ns

    def is_rough(self, q: float) -> bool:
        """Too few observations for this percentile: under 20 for p95, under 100 for p99."""
        return not enough(self.n, q)


@dataclass(frozen=True, slots=True)
class Metric:
    """A latency of a source, in the last minute and over the span.

    Attributes:
        field: ttft, itl, tpot, gap_mean, e2e or queue.
        name: as shown.
        now: the last 60 s.
        span: the span, or as much of it as `Block.covers_ns` says.
    """

    field: str
    name: str
    now: Figures
    span: Figures


@dataclass(frozen=True, slots=True)
class Block:
    """What one source says.

    Attributes:
        source: engine, proxy, canary or otlp.
        start: where its clocks start.
        title: what it is, in words.
        engine: text ids of engine and model; None for requests.
        start_id: text ids of source and start; None for engines.
        covers_ns: what "over the span" covers.
        age_ns: playhead minus the newest row.
        interval_ns: between scrapes; 0 for requests.
        metrics: those that were seen at all.
    """

    source: str
    start: str
    title: str
    engine: tuple[int, int] | None
    start_id: tuple[int, int] | None
    covers_ns: int
    age_ns: int
    interval_ns: int
    metrics: tuple[Metric, ...]

    @property
    def stale(self) -> bool:
        """Scrapes have stopped coming; requests come when they come."""
        return 0 < STALE_INTERVALS * self.interval_ns < self.age_ns

    def metric(self, field: str) -> Metric | None:
        """One of its latencies."""
        return next((metric for metric in self.metrics if metric.field == field), None)


def count_words(value: float) -> str:
    """At most five digits: `5`, `0.4`, `4100`, `12k`; what is whole has no decimals."""
    return f"{value:.0f}" if 0 <= value < 9999.5 and value == int(value) else short_number(value)


def figures_of(values: Array) -> Figures:
    """Of single observations in ns; NaN among them are left out."""
    numbers = values[~np.isnan(values)].astype(np.float64)
    if not len(numbers):
        return Figures()
    return Figures(
        float(len(numbers)), float(numbers.mean()), tuple(quantile_of(numbers, q) for q in QUANTILES)
    )


# -- requests ----------------------------------------------------------------------------------------------------


def request_blocks(frame: Frame, requests: Requests) -> list[Block]:
    """One per source and start of the clock, the one with most requests first."""
    parts = sorted(requests.parts.items(), key=lambda item: -len(item[1]))
    return [_request_block(frame, requests, key, rows) for key, rows in parts]


def _request_block(frame: Frame, requests: Requests, key: tuple[int, int], rows: Rows) -> Block:
    text = frame.view.strings.text
    source, start = key
    recent = int(np.searchsorted(rows["t"], frame.t - NOW_NS, side="right"))
    begin = int(np.searchsorted(rows["t"], frame.t - frame.span_ns, side="right"))
    metrics = []
    for field, name in REQUEST_METRICS:
        values = finished_ns(frame.view.strings, rows, field)
        if not np.isnan(values).all():
            metrics.append(Metric(field, name, figures_of(values[recent:]), figures_of(values[begin:])))
    return Block(
        source=clean(text(source)) or "?",
        start=clean(text(start)) or "unknown start",
        title=_models(frame.view, rows),
        engine=None,
        start_id=key,
        covers_ns=min(requests.covers_ns, frame.span_ns),
        age_ns=frame.t - int(rows["t"][-1]),
        interval_ns=0,
        metrics=tuple(metrics),
    )


def _models(view: View, rows: Rows) -> str:
    """The model, or how many there are."""
    ids = np.unique(rows["model"]).tolist()
    names = sorted({clean(view.strings.text(number)) for number in ids} - {""})
    return names[0] if len(names) == 1 else f"{len(names)} models" if names else ""


# -- engines -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine and model at the playhead.

    Attributes:
        key: text ids of engine and model.
        row: its newest row.
        recent: its rows of the last minute.
        age_ns: playhead minus time of the newest row.
    """

    key: tuple[int, int]
    row: Mapping[str, float]
    recent: Rows
    age_ns: int

    def total(self, name: str) -> float:
        """Sum of a field over the last minute; NaN where no row has it."""
        values = self.recent[name]
        known = values[~np.isnan(values)]
        return float(known.sum()) if len(known) else math.nan

    def mean(self, name: str) -> float:
        """Mean of a field over the time of the last minute's rows; NaN where no row has it."""
        values, weights = self.recent[name].astype(np.float64), self.recent["dt_ns"].astype(np.float64)
        known = ~np.isnan(values) & (weights > 0)
        return float(np.average(values[known], weights=weights[known])) if known.any() else math.nan


def read_engines(frame: Frame) -> list[Engine]:
    """The engines that were scraped of late, those with most requests waiting first."""
    newest = conform(frame.view.latest(ENGINE.name, frame.t, ENGINE_LOOKBACK_NS), ENGINE)
    if not len(newest):
        return []
    recent = engine_rows(frame, frame.t - NOW_NS)
    names = newest.dtype.names or ()
    found = []
    for values in newest.tolist():
        row = dict(zip(names, values, strict=True))
        key = (row["engine"], row["model"])
        own = recent[(recent["engine"] == key[0]) & (recent["model"] == key[1])]
        found.append(Engine(key, row, own, frame.t - row["t"]))
    return sorted(found, key=lambda engine: (-_known(engine.row["waiting"]), engine.key))


def _known(value: float) -> float:
    return value if value == value else -1.0


def engine_blocks(
    frame: Frame, engines: Sequence[Engine], known: BucketRows | None, step_ns: int
) -> list[Block]:
    """One per engine and model.

    Args:
        frame: what and when.
        engines: from `read_engines`.
        known: the buckets of the span; None without any.
        step_ns: width of the bins that a wide span is read in.
    """
    if not engines:
        return []
    names = [name for name, _ in ENGINE_METRICS]
    spans = engine_means(frame, names, step_ns)
    over = known.sums(frame.t - frame.span_ns) if known is not None else np.empty(0)
    recent = recent_sums(frame, known) if known is not None else np.empty(0)
    found = []
    for engine in engines:
        columns = {f: engine.recent[f] for name in names for f in (f"{name}_n", f"{name}_sum_s")}
        nows = means_of(engine.recent, columns, names)
        metrics = []
        for field, name in ENGINE_METRICS:
            own = known.of(field, [engine.key]) if known is not None else np.empty(0, np.int64)
            key = (*engine.key, field)
            now = _figures(known, own, recent, nows.get(key, (0.0, 0.0)))
            span = _figures(known, own, over, spans.get(key, (0.0, 0.0)))
            if now.n or span.n:
                metrics.append(Metric(field, name, now, span))
        found.append(_engine_block(frame, engine, tuple(metrics)))
    return found


def _figures(known: BucketRows | None, own: Ints, sums: Floats, mean: tuple[float, float]) -> Figures:
    """Of a histogram, and of the sum and number that the engine gives beside it."""
    n, total_ns = mean
    mean_ns = total_ns / n if n > 0 else math.nan
    if known is None or not len(own):
        return Figures(n, mean_ns)
    given = buckets(known.lo_ns[own], known.hi_ns[own], sums[own])
    return Figures(given.n or n, mean_ns, tuple(quantile(given, q) for q in QUANTILES))


def _engine_block(frame: Frame, engine: Engine, metrics: tuple[Metric, ...]) -> Block:
    text = frame.view.strings.text
    where, model = text(engine.key[0]), clean(text(engine.key[1]))
    kind = clean(text(int(engine.row["kind"]))) or "engine"
    words = (kind, short_place(clean(where)), model)
    return Block(
        source="engine",
        start=ENGINE_START,
        title=" ".join(word for word in words if word),
        engine=engine.key,
        start_id=None,
        covers_ns=frame.span_ns,
        age_ns=engine.age_ns,
        interval_ns=int(engine.row["dt_ns"]),
        metrics=metrics,
    )


def short_place(where: str) -> str:
    """`:8000` for an engine on this host at the usual path, else `host:8000` or `:8000/path`."""
    try:
        parts = urlsplit(f"//{where}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return where
    name = "" if host in ("localhost", "::1") or host.startswith("127.") else host
    path = "" if parts.path in ("", "/", "/metrics") else parts.path
    return f"{name}:{port}{path}" if port else f"{name or host}{path}"
