"""The numbers of the latency pane as lines: percentiles by source, and what else a source says."""

from __future__ import annotations

import math
from collections.abc import Sequence

from opusmon.quantiles import Quantile
from opusmon.ui import units
from opusmon.ui.panes.base import Frame
from opusmon.ui.panes.latency_facts import FINE, Headroom, RequestFacts
from opusmon.ui.panes.latency_numbers import QUANTILES, Block, Engine, Figures, Metric, count_words
from opusmon.ui.panes.latency_read import NOW_NS
from opusmon.ui.panes.latency_state import Snapshot
from opusmon.ui.panes.streams_table import number_style, short_duration
from opusmon.ui.text import Line, Span, fill

ROUGH = "~"
"""Before a percentile of too few requests: under 20 for p95, under 100 for p99."""
LABEL_CELLS, VALUE_CELLS, COUNT_CELLS, EXTRA_CELLS = 6, 10, 6, 8
KV_HIGH_PCT = 90.0
WAITING_HIGH = 8
HEADROOM_LOW_PCT = 20.0
_NOW, _SPAN = 0, 1

Place = tuple[int, str]
"""A column of the table: now or span, and p50, p95, p99, n, mean or vol."""

_RANKED: tuple[Place, ...] = (
    *((_NOW, "p95"), (_SPAN, "p95"), (_NOW, "n"), (_NOW, "p99"), (_NOW, "p50"), (_SPAN, "p99")),
    *((_SPAN, "n"), (_SPAN, "p50"), (_SPAN, "vol"), (_NOW, "mean"), (_SPAN, "mean"), (_NOW, "vol")),
)
"""Which columns get room first."""
_ORDER = ("mean", "p50", "p95", "p99", "vol", "n")
_CELLS = {"n": COUNT_CELLS, "vol": EXTRA_CELLS}


def places(width: int) -> list[Place]:
    """The columns that fit beside the names, from the left."""
    left = width - LABEL_CELLS
    kept: list[Place] = []
    for place in _RANKED:
        size = _CELLS.get(place[1], VALUE_CELLS)
        if size > left:
            break
        kept.append(place)
        left -= size
    return sorted(kept, key=lambda place: (place[0], _ORDER.index(place[1])))


def head_line(frame: Frame, covers_ns: int) -> Line:
    """Headings: the first column of each half says what time it covers."""
    spans: list[Span] = [(" " * LABEL_CELLS, "")]
    said: set[int] = set()
    for half, name in places(frame.size.width):
        width = _CELLS.get(name, VALUE_CELLS)
        words = "p95/avg" if name == "vol" else name
        if half not in said:
            said.add(half)
            words = f"{'60s' if half == _NOW else units.span(covers_ns) or '0s'} {words}"
        spans.append((f"{words} ".rjust(width)[-width:], "label"))
    return tuple(spans)


def block_lines(frame: Frame, known: Snapshot, block: Block, level: int) -> list[Line]:
    """A source: what it is and where its clocks start, then its latencies; see `chosen_metrics`."""
    head: list[Line] = [
        ((f" {block.source}", "title"),),
        ((block.title, "value"),) if block.title else (),
        ((f"start: {block.start}", "dim"),),
    ]
    if block.stale:
        head.append(((f"! stale {block.age_ns / 1e9:.0f} s", "warn"),))
    if 0 < block.covers_ns < frame.span_ns:
        head.append(((f"last {units.span(block.covers_ns)} only", "dim"),))
    lines = [fill(head, frame.size.width, " ")]
    lines += [_metric_line(frame, known, block, metric) for metric in chosen_metrics(block, level)]
    return lines


_CORE = ("ttft", "itl", "tpot", "e2e", "queue")
_BRIEF = {"engine": ("ttft", "queue")}


def chosen_metrics(block: Block, level: int) -> Sequence[Metric]:
    """The latencies to show where room is short: 0 all, 1 without twins of others, 2 two of them, 3 one."""
    if level == 0:
        return block.metrics
    core = [m for m in block.metrics if m.field in _CORE]
    if block.metric("itl") is not None:
        core = [m for m in core if m.field != "tpot"]
    if level == 2:
        wanted = _BRIEF.get(block.source, ("ttft", "e2e"))
        core = [m for m in core if m.field in wanted] or core[:2]
    return (core or list(block.metrics))[: 1 if level > 2 else None]


def _metric_line(frame: Frame, known: Snapshot, block: Block, metric: Metric) -> Line:
    spans: list[Span] = [(f" {metric.name}".ljust(LABEL_CELLS), "label")]
    for half, name in places(frame.size.width):
        figures = metric.now if half == _NOW else metric.span
        words, style = _cell(known, block, metric.field, figures, name)
        spans.append((words.rjust(_CELLS.get(name, VALUE_CELLS)), style))
    return tuple(spans)


def _cell(known: Snapshot, block: Block, field: str, figures: Figures, name: str) -> Span:
    """One number; every cell ends with a blank or with "!"."""
    if name == "n":
        return (f"{count_words(figures.n)} ", "dim")
    if name == "vol":
        rough = figures.is_rough(0.95)
        words = volatility_words(figures)
        return (f"{words} ", "dim" if rough or words == units.MISSING else "value")
    if name == "mean":
        return (f"{short_duration(figures.mean_ns)} ", number_style(figures.mean_ns))
    place = ("p50", "p95", "p99").index(name)
    given = figures.p[place]
    if given.kind == "none" and figures.mean_ns == figures.mean_ns and place < 2:
        return ("mean ", "dim") if place == 0 else (f"{short_duration(figures.mean_ns)} ", "value")
    q = QUANTILES[place]
    rough = figures.is_rough(q)
    if not rough and known.is_over(block, field, q, given.value) and given.kind != "at_most":
        return (f"{quantile_words(given)}!", "bad")
    return (f"{quantile_words(given, rough=rough)} ", "dim" if rough or given.kind == "none" else "value")


def quantile_words(given: Quantile, *, rough: bool = False) -> str:
    """`1.9 s`, `<=10 ms`, `>10 s`, and with too few samples `~1.9 s`."""
    if given.kind == "none":
        return units.MISSING
    sign = {"at_most": "<=", "over": ">"}.get(given.kind, "")
    return f"{ROUGH if rough else ''}{sign}{short_duration(given.value)}"


def volatility_words(figures: Figures) -> str:
    """`+128 %`: the p95 over the mean; with too few samples `~+128 %`."""
    value = figures.volatility_pct
    if not math.isfinite(value):
        return units.MISSING
    return f"{ROUGH if figures.is_rough(0.95) else ''}{round(value) + 0:+d} %"


# -- facts -------------------------------------------------------------------------------------------------------


def facts_line(frame: Frame, known: Snapshot, block: Block) -> Line:
    """What a source says beside latencies, the most telling first; what does not fit is left out."""
    if block.engine is not None and block.engine in known.engines:
        parts = engine_parts(known.engines[block.engine])
    elif block.start_id is not None and block.start_id in known.facts:
        parts = request_parts(known.facts[block.start_id], known.in_flight(block.start_id))
    else:
        return ()
    shown = [part for part in parts if part]
    return ((" ", ""), *fill(shown, frame.size.width - 1)) if shown else ()


def engine_parts(engine: Engine) -> list[Line]:
    """Queue, cache and throughput; sums and means are of the last minute."""
    waiting, kv = engine.row["waiting"], engine.row["kv_used_pct"]
    fullest = engine.row["kv_used_max_pct"]
    preempted, restarts = engine.total("preemptions"), engine.total("restarts")
    failed = engine.total("failed")
    return [
        _fact("running", count_words(engine.row["running"])),
        _fact("waiting", count_words(waiting), alarm=waiting >= WAITING_HIGH),
        _fact("KV", _pct(kv), alarm=kv >= KV_HIGH_PCT),
        _fact("fullest rank", _pct(fullest), alarm=fullest >= KV_HIGH_PCT) if fullest > kv + 1 else (),
        _known("out", engine.mean("output_tps"), " tok/s"),
        _known("prefix", engine.mean("prefix_hit_pct"), " %"),
        _fact("preempted", count_words(preempted), alarm=True) if preempted > 0 else (),
        _fact("restarted", count_words(restarts), alarm=True) if restarts > 0 else (),
        _fact("failed", count_words(failed), alarm=True) if failed > 0 else (),
        _known("in", engine.mean("input_tps"), " tok/s"),
        _known("graphs", engine.mean("graph_pct"), " %"),
        _known("preempted", preempted, "") if preempted == 0 else (),
        _known("spec accepted", engine.mean("spec_accept_pct"), " %"),
        _fact("scrape", short_duration(engine.row["scrape_ns"])),
    ]


def request_parts(facts: RequestFacts, in_flight: int) -> list[Line]:
    """Outcomes, limits and rates."""
    parts = [_outcome(word, share) for word, share in facts.outcomes[:6]]
    parts.append(_headroom(facts.headroom))
    retries = facts.retries_pct
    return [
        *parts,
        _fact("", f"{count_words(facts.per_s)} req/s"),
        _fact("in flight", str(in_flight)) if in_flight else (),
        _fact("retries", share_words(retries), alarm=retries >= 1) if retries > 0 else (),
        _known("out", facts.output_tps, " tok/s"),
        _known("from cache", facts.cache_read_pct, " %"),
        _fact("opusmon adds", short_duration(facts.own_ns)) if facts.own_ns == facts.own_ns else (),
    ]


def _headroom(left: Headroom | None) -> Line:
    """The tightest limit; limits fill up again within a minute, so an old answer is no alarm and says its age."""
    if left is None:
        return ()
    old = left.age_ns > NOW_NS
    name = left.name.replace("_", " ")
    where = f"{name}, {short_duration(left.age_ns)} ago" if old else name
    return _fact(
        "limit headroom", f"{left.pct:.0f} % ({where})", alarm=left.pct < HEADROOM_LOW_PCT and not old
    )


def _outcome(word: str, share: float) -> Line:
    return _fact(word, share_words(share), alarm=word not in FINE)


def share_words(share_pct: float) -> str:
    """`98.2 %`; what is not all is not rounded to all, and what is not none not to none."""
    if not math.isfinite(share_pct):
        return units.MISSING
    if 99.95 <= share_pct < 100:
        return ">99.9 %"
    return "<0.1 %" if 0 < share_pct < 0.05 else f"{share_pct:.1f}".removesuffix(".0") + " %"


def _fact(label: str, words: str, *, alarm: bool = False) -> Line:
    name: Line = ((f"{label} ", "label"),) if label else ()
    missing = words == units.MISSING
    return (*name, (f"{words} !" if alarm else words, "warn" if alarm else "dim" if missing else "value"))


def _known(label: str, value: float, unit: str) -> Line:
    return _fact(label, f"{count_words(value)}{unit}") if value == value else ()


def _pct(value: float) -> str:
    return units.percent(value, 0) if value == value else units.MISSING
