"""From the samples of a page to the figures of channel `engine`, per model: pure functions over the tables in `kinds`.

Ranks are combined before anything else: counts are summed, shares are averaged and their highest is kept, histogram
buckets are added. What an engine does not publish stays away from `Figures.values`, with the reason in `missing`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from opusmon.collectors.engine.deltas import Step
from opusmon.collectors.engine.page import Labels, Samples
from opusmon.collectors.engine.vocabulary import EngineKind, Mean, Pick, Ratio
from opusmon.quantiles import NAN, Buckets, buckets, merge
from opusmon.text import printable

MAX_MODELS = 32
MAX_MODEL_CHARS = 200
_ALWAYS = {"ranks", "restarts"}
"""What is told of every model; one without more is a stray series."""
_MOST_SHARE = 1.05
"""A share of a cache above this, or below 0, is a sentinel or another unit."""


@dataclass(slots=True)
class Figures:
    """What a page says of one model.

    Attributes:
        model: its name, "" where the page does not say.
        values: field of `engine` to number; NaN where this window has nothing to divide by.
        buckets: entry of `METRICS` to the observations of this window; no entry without any.
        missing: field to the reason why it is not there.
        bare: entries of `METRICS` that came without whole buckets.
        gauged: fields from a gauge that the engine averages in its own way, not of this window.
    """

    model: str = ""
    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, Buckets] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    bare: set[str] = field(default_factory=set)
    gauged: set[str] = field(default_factory=set)


def collapse(samples: Samples, copies: frozenset[str]) -> Samples:
    """Make one series of those that differ only in these labels, with the highest of their values."""
    if not copies:
        return samples
    out: Samples = {}
    for name, series in samples.items():
        kept = out[name] = {}
        for labels, value in series.items():
            short = _without(labels, copies)
            kept[short] = max(value, kept.get(short, value))
    return out


def figures(kind: EngineKind, samples: Samples, step: Step, dt_ns: int) -> list[Figures]:
    """One entry per model, by name; at most `MAX_MODELS`.

    Args:
        kind: what the page is from.
        samples: of the page, after `collapse`.
        step: what `Deltas.advance` made of them.
        dt_ns: time since the scrape before.
    """
    counted = not (step.first or step.restarted)
    gains = by_model(step.gains, kind.model_labels)
    found = []
    for model, own in sorted(by_model(samples, kind.model_labels).items())[:MAX_MODELS]:
        entry = Figures(model)
        _now(entry, kind, own)
        if counted:
            _window(entry, kind, gains.get(model, {}), dt_ns / 1e9)
        entry.values["restarts"] = NAN if step.first else float(step.restarted)
        found.append(entry)
    return [entry for entry in found if entry.values.keys() - _ALWAYS] or found[:1]


def by_model(samples: Samples, names: tuple[str, ...]) -> dict[str, Samples]:
    """Samples per model; those without one belong to the only model there is, else to ""."""
    parts: dict[str, Samples] = {}
    for name, series in samples.items():
        for labels, value in series.items():
            parts.setdefault(_model(labels, names), {}).setdefault(name, {})[labels] = value
    nameless = parts.pop("", None)
    if nameless is None:
        return parts
    target = next(iter(parts.values())) if len(parts) == 1 else parts.setdefault("", {})
    for name, series in nameless.items():
        target.setdefault(name, {}).update(series)
    return parts


def _now(entry: Figures, kind: EngineKind, samples: Samples) -> None:
    """Gauges: the state when the page was made."""
    for name, alternatives in kind.gauges.items():
        _put(entry, name, alternatives, _first(_total(samples, pick) for pick in alternatives))
    for name, pick in kind.shares.items():
        _share(entry, name, pick, kind, samples)
    entry.values["ranks"] = float(_ranks(samples, kind.rank_labels))
    _kv(entry, kind, samples)


def _share(entry: Figures, name: str, pick: Pick, kind: EngineKind, samples: Samples) -> None:
    """A gauge in place of the growth of counters, where those are not on the page."""
    if any(_ratio(samples, ratio) is not None for ratio in kind.ratios.get(name, ())):
        return
    shares = _shares(samples, pick)
    _put(entry, name, (pick,), 100 * float(np.mean(shares)) if shares else None)
    if shares:
        entry.gauged.add(name)


def _kv(entry: Figures, kind: EngineKind, samples: Samples) -> None:
    shares = _shares(samples, kind.kv) if kind.kv else []
    if not shares and kind.kv_of:
        used = _ratio(samples, kind.kv_of)
        shares = [] if used is None or math.isnan(used) else [used]
    if not shares:
        for name in ("kv_used_pct", "kv_used_max_pct"):
            _put(entry, name, (kind.kv,) if kind.kv else (), None)
        return
    entry.values["kv_used_pct"] = 100 * float(np.mean(shares))
    entry.values["kv_used_max_pct"] = 100 * max(shares)


def _window(entry: Figures, kind: EngineKind, gains: Samples, dt_s: float) -> None:
    """Growth of counters since the scrape before."""
    for name, parts in kind.counts.items():
        _put(entry, name, parts, _sum_all(gains, parts))
    for name, parts in kind.rates.items():
        gained = _sum_all(gains, parts)
        _put(entry, name, parts, gained / dt_s if gained is not None and dt_s > 0 else None)
    for name, ratios in kind.ratios.items():
        share = _first(_ratio(gains, ratio) for ratio in ratios)
        if share is not None:
            entry.values[name] = 100 * share
        elif name not in entry.gauged:
            _put(entry, name, tuple(ratio.part for ratio in ratios), None)
    for name, pick in kind.latencies.items():
        _latency(entry, name, pick, gains)
    for name, mean in kind.means.items():
        _mean(entry, name, mean, gains)


def _put(entry: Figures, name: str, parts: Iterable[Pick], value: float | None) -> None:
    """Keep a value, or the names that were looked for in vain."""
    if value is None:
        entry.missing[name] = ", ".join(dict.fromkeys(pick.names[0] for pick in parts))
    else:
        entry.values[name] = value


def _latency(entry: Figures, name: str, pick: Pick, gains: Samples) -> None:
    """A histogram, or a summary that has at least a sum and a count."""
    base = next((base for base in pick.names if _counted(gains, base)), None)
    if base is None:
        entry.missing[f"{name}_n"] = entry.missing[f"{name}_sum_s"] = pick.names[0]
        return
    ladders = _ladders(gains.get(f"{base}_bucket", {}), pick)
    parts = [_rungs(ladder, pick.scale) for ladder in ladders]
    found = merge([part for part in parts if part is not None])
    n = _sum(gains, Pick((f"{base}_count",), pick.where))
    total = _sum(gains, Pick((f"{base}_sum",), pick.where, pick.scale))
    entry.values[f"{name}_n"] = found.n if n is None else n
    entry.values[f"{name}_sum_s"] = NAN if total is None or total < 0 else total
    if not parts or None in parts:
        entry.bare.add(name)
    elif found.n:
        entry.buckets[name] = found


def _counted(gains: Samples, base: str) -> bool:
    return f"{base}_bucket" in gains or f"{base}_count" in gains


def _mean(entry: Figures, name: str, mean: Mean, gains: Samples) -> None:
    n, total = _sum(gains, mean.number), _sum(gains, mean.total)
    entry.bare.add(name)
    _put(entry, f"{name}_n", (mean.number,), n)
    _put(entry, f"{name}_sum_s", (mean.total,), total)


def _ladders(series: Mapping[Labels, float], pick: Pick) -> list[list[tuple[float, float]]]:
    """Edge and growth of the cumulative buckets of each series, by edge."""
    found: dict[Labels, list[tuple[float, float]]] = {}
    for labels, gain in series.items():
        others, edge = _edge(labels)
        if _accepted(labels, pick) and not math.isnan(edge):
            found.setdefault(others, []).append((edge, gain))
    return [sorted(ladder) for ladder in found.values()]


def _rungs(ladder: list[tuple[float, float]], scale: float) -> Buckets | None:
    """Observations per bucket; None when the last edge is finite or a lower bucket gained more than a higher one."""
    edges, gains = (np.array(column) for column in zip(*ladder, strict=True))
    count = np.diff(gains, prepend=0.0)
    if not math.isinf(edges[-1]) or bool((count < 0).any()):
        return None
    lowest = 0.0 if edges[0] > 0 else -np.inf
    return buckets(np.concatenate(([lowest], edges[:-1])) * scale, edges * scale, count)


def _total(samples: Samples, pick: Pick) -> float | None:
    """A gauge, all ranks together; None without an accepted series: a state that is not told is not 0."""
    name = _name(samples, pick)
    values = list(_values(samples[name], pick)) if name else []
    return pick.scale * sum(values) if values else None


def _sum(samples: Samples, pick: Pick) -> float | None:
    """Growth of a counter, all series together: 0 where none is accepted; None when the page has no such metric."""
    name = _name(samples, pick)
    if name is None:
        return None
    return pick.scale * sum(_values(samples[name], pick))


def _sum_all(samples: Samples, parts: Iterable[Pick]) -> float | None:
    """Sum over those of the picks that are on the page; None when none is."""
    sums = [value for pick in parts if (value := _sum(samples, pick)) is not None]
    return sum(sums) if sums else None


def _ratio(samples: Samples, ratio: Ratio) -> float | None:
    """Part over whole, NaN when the whole is 0; None when the page lacks one of them."""
    part = _sum(samples, ratio.part)
    wholes = [_sum(samples, pick) for pick in ratio.whole]
    if part is None or None in wholes:
        return None
    whole = sum(value for value in wholes if value is not None)
    return part / whole if whole > 0 else NAN


def _shares(samples: Samples, pick: Pick) -> list[float]:
    """The gauge of each rank, without sentinels."""
    name = _name(samples, pick)
    values = _values(samples[name], pick) if name else iter(())
    return [value * pick.scale for value in values if 0 <= value <= _MOST_SHARE]


def _name(samples: Samples, pick: Pick) -> str | None:
    return next((name for name in pick.names if name in samples), None)


def _values(series: Mapping[Labels, float], pick: Pick) -> Iterator[float]:
    return (value for labels, value in series.items() if _accepted(labels, pick))


def _accepted(labels: Labels, pick: Pick) -> bool:
    """A label that `where` names has an accepted value; one that is not there has the value ""."""
    if not pick.where:
        return True
    held = dict(labels)
    return all(held.get(name, "") in accepted for name, accepted in pick.where.items())


def _first(values: Iterable[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


def _ranks(samples: Samples, names: frozenset[str]) -> int:
    """How many ranks the series come from, 1 where they do not say."""
    found = {
        tuple(pair for pair in labels if pair[0] in names) for series in samples.values() for labels in series
    }
    return max(1, len(found - {()}))


@lru_cache(maxsize=50_000)
def _edge(labels: Labels) -> tuple[Labels, float]:
    """The labels without `le`, and its number; NaN when it is none."""
    others = tuple(pair for pair in labels if pair[0] != "le")
    try:
        return others, float(dict(labels)["le"])
    except (KeyError, ValueError):
        return others, NAN


@lru_cache(maxsize=50_000)
def _without(labels: Labels, names: frozenset[str]) -> Labels:
    return tuple(pair for pair in labels if pair[0] not in names)


@lru_cache(maxsize=50_000)
def _model(labels: Labels, names: tuple[str, ...]) -> str:
    held = dict(labels)
    model = next((held[name] for name in names if name in held), "")
    return printable(model[:MAX_MODEL_CHARS])
