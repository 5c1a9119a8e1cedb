"""What requests came to and what the server had to do: outcomes, rates, limits, queue and cache."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from opusmon.clock import NS
from opusmon.quantiles import NONE, mean, quantile_of
from opusmon.request_rows import (
    BROKEN_OFF,
    LIMITS,
    SIZE_CLASSES,
    UNKNOWN_SIZE,
    finished_ns,
    positive,
    size_class,
)
from opusmon.schema import Rows
from opusmon.ui.panes.base import Frame, View
from opusmon.ui.panes.latency_numbers import Figures, figures_of
from opusmon.ui.panes.latency_read import (
    NOW_NS,
    SHORT,
    Array,
    Flags,
    Floats,
    Requests,
    outcome_codes,
    outcome_word,
    since,
)
from opusmon.ui.text import clean

MAX_GROUPS = 12
FINE = ("ok", *(SHORT[outcome] for outcome in BROKEN_OFF))
"""Words of outcomes that say nothing against the server."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """What is left of the tightest rate limit.

    Attributes:
        pct: per cent of the limit.
        name: requests, input_tokens or output_tokens.
        age_ns: since the server said so.
    """

    pct: float
    name: str
    age_ns: int


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Requests of one source and start.

    Attributes:
        n: ended in the time covered.
        outcomes: share of each, per cent, `ok` first, the others by size.
        per_s: requests that ended per second in the last minute.
        output_tps: output tokens of those requests per second; NaN when none has a number.
        cache_read_pct: prompt tokens read from the cache, per cent, over the span.
        retries_pct: attempts that were retries, per cent; NaN when no client said.
        headroom: of the tightest limit; None when no server told one.
        own_ns: median time that opusmon added before the first token; NaN where it is no proxy.
    """

    n: int
    outcomes: tuple[tuple[str, float], ...]
    per_s: float
    output_tps: float
    cache_read_pct: float
    retries_pct: float
    headroom: Headroom | None
    own_ns: float


def request_facts(frame: Frame, requests: Requests, start_id: tuple[int, int]) -> RequestFacts:
    """The facts of one source of requests."""
    rows = requests.of(start_id)
    recent, span = since(rows, frame.t - NOW_NS), since(rows, frame.t - frame.span_ns)
    begins = rows["t"] - np.nan_to_num(positive(rows["e2e_ns"]), nan=0.0)
    cover_s = min(NOW_NS, max(frame.t - float(begins.min()), NS)) / 1e9 if len(rows) else 60.0
    return RequestFacts(
        n=len(span),
        outcomes=outcome_shares(frame.view, span),
        per_s=len(recent) / cover_s,
        output_tps=_sum(recent["output_tokens"]) / cover_s,
        cache_read_pct=_ratio_pct(span["cache_read_tokens"], span["input_tokens"]),
        retries_pct=_retries_pct(span["retry"]),
        headroom=headroom(frame.t, span),
        own_ns=figures_of(positive(span["own_ns"])).p[0].value,
    )


def outcome_shares(view: View, rows: Rows) -> tuple[tuple[str, float], ...]:
    """How requests ended, per cent; HTTP errors by their status."""
    counts: dict[str, int] = {}
    found, number = np.unique(outcome_codes(rows), return_counts=True)
    for key, count in zip(found.tolist(), number.tolist(), strict=True):
        word = outcome_word(view, key >> 16, key & 0xFFFF)
        counts[word] = counts.get(word, 0) + count
    ordered = sorted(counts.items(), key=lambda item: (item[0] != "ok", -item[1], item[0]))
    return tuple((word, 100.0 * count / len(rows)) for word, count in ordered)


def headroom(t: int, rows: Rows) -> Headroom | None:
    """The lowest share left of any limit, by the newest answer of each model that named it."""
    found: list[Headroom] = []
    for name in LIMITS:
        limit, left = rows[f"limit_{name}"], rows[f"left_{name}"]
        known = np.flatnonzero((limit > 0) & np.isfinite(limit) & np.isfinite(left))
        newest = {
            model: place for place, model in zip(known.tolist(), rows["model"][known].tolist(), strict=True)
        }
        found += [
            Headroom(100.0 * float(left[p]) / float(limit[p]), name, t - int(rows["t"][p]))
            for p in newest.values()
        ]
    return min(found, key=lambda item: item.pct, default=None)


def _sum(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(known.sum()) if len(known) else math.nan


def _ratio_pct(part: Array, whole: Array) -> float:
    known = np.isfinite(part) & np.isfinite(whole)
    total = float(whole[known].sum())
    return 100.0 * float(part[known].sum()) / total if total > 0 else math.nan


def _retries_pct(retry: Array) -> float:
    known = retry[~np.isnan(retry)]
    return 100.0 * float((known > 0).mean()) if len(known) else math.nan


# -- groups ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that have something in common.

    Attributes:
        name: size class, label or model.
        n: requests.
        figures: mean and p95 of their TTFT, of E2E where nothing is streamed.
    """

    name: str
    n: int
    figures: Figures


def groups(
    frame: Frame, requests: Requests, start_id: tuple[int, int], *, by_text: bool = True
) -> Mapping[str, Sequence[Group]]:
    """Volatility by input size, and by label where there are labels, else by model; over the span.

    Args:
        frame: what and when.
        requests: all of them.
        start_id: source and start of those that count.
        by_text: by label or model too.
    """
    rows = since(requests.of(start_id), frame.t - frame.span_ns)
    if not len(rows):
        return {}
    values = finished_ns(frame.view.strings, rows, "ttft")
    name = "TTFT"
    if np.isnan(values).all():
        values, name = finished_ns(frame.view.strings, rows, "e2e"), "E2E"
    found = {f"{name} by input tokens": _by_size(rows["input_tokens"], values)}
    if by_text:
        field = "label" if (rows["label"] != 0).any() else "model"
        found[f"{name} by {field}"] = _by_text(frame.view, rows[field], values)
    return found


def _by_size(tokens: Floats, values: Floats) -> list[Group]:
    names = [*(name for name, _ in SIZE_CLASSES), UNKNOWN_SIZE]
    number = size_class(tokens)
    return [_group(name, number == n, values) for n, name in enumerate(names) if (number == n).any()]


def _by_text(view: View, ids: Array, values: Floats) -> list[Group]:
    found, counts = np.unique(ids, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:MAX_GROUPS]
    return [_group(clean(view.strings.text(int(n))) or "(none)", ids == n, values) for n in found[order]]


def _group(name: str, mine: Flags, values: Floats) -> Group:
    own = values[mine]
    own = own[~np.isnan(own)]
    n = float(len(own))
    figures = Figures(n, mean(float(own.sum()), n), (NONE, quantile_of(own, 0.95), NONE))
    return Group(name, int(mine.sum()), figures)
