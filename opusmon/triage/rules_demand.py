"""Rules over causes that lie with clients and on the way to the engine: longer inputs, and time lost upstream."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from opusmon.clock import NS
from opusmon.request_rows import ended, finished_ns
from opusmon.schema import Rows
from opusmon.times import format_duration
from opusmon.triage.episodes import Flags, Times
from opusmon.triage.finding import Evidence, Finding
from opusmon.triage.instants import (
    WINDOW_NS,
    Floats,
    Spell,
    Windows,
    instants,
    parts,
    request_source,
    runs,
    said,
    split,
)
from opusmon.triage.scene import Scene, rule
from opusmon.triage.severity import NOTE, WARN
from opusmon.triage.sustained import floats

_SOURCE = ("source", "start")
BEFORE_NS = 300 * NS
"""What a minute is compared with: the five before it."""


def _mean(total: Floats, n: Floats) -> Floats:
    """Total over n, NaN where there are none.

    Totals are of whole numbers, whose sums are exact: so a mean is the same wherever a look begins.
    """
    return np.where(n > 0, total / np.maximum(n, 1), np.nan)


# -- longer inputs -----------------------------------------------------------------------------------------------


@rule("request", lookback_s=480, join_s=60)
def long_inputs(scene: Scene) -> Iterator[Finding]:
    """Inputs are far longer than in the minutes before, and first tokens come later.

    Thresholds: `long_inputs_ratio`, `long_inputs_slower_ratio`, `long_inputs_min`: means of the answers that ended in a
    minute against the five minutes before. Tokens read from the prefix cache are left out where the answer tells them.
    """
    t = instants(scene)
    for key, rows in parts(scene, "request", _SOURCE, WINDOW_NS + BEFORE_NS):
        tokens = floats(rows, "input_tokens") - np.maximum(
            np.nan_to_num(floats(rows, "cache_read_tokens")), 0
        )
        ttft = np.rint(finished_ns(scene.view.strings, rows, "ttft"))
        known = ~np.isnan(tokens + ttft)
        yield from _lengths(scene, key, t, rows["t"][known], tokens[known], ttft[known])


def _lengths(
    scene: Scene, key: tuple[int, int], t: Times, rows_t: Times, tokens: Floats, ttft: Floats
) -> Iterator[Finding]:
    limits = scene.limits
    now, before = Windows(rows_t, t), Windows(rows_t, t - WINDOW_NS, BEFORE_NS)
    n, n_before = (np.asarray(one.end - one.first, np.float64) for one in (now, before))
    length, usual = _mean(now.sum(tokens), n), _mean(before.sum(tokens), n_before)
    wait, short = _mean(now.sum(ttft), n), _mean(before.sum(ttft), n_before)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio, slower = length / usual, wait / short
    on: Flags = (np.minimum(n, n_before) >= limits["long_inputs_min"]) & (
        ratio >= limits["long_inputs_ratio"]
    )
    on &= slower >= limits["long_inputs_slower_ratio"]
    source = request_source(scene, key)
    for spell in runs(scene, t, on, np.nan_to_num(ratio), rows_t):
        at = spell.place
        yield spell.finding(
            "long_inputs",
            source,
            WARN,
            title=f"inputs are {ratio[at]:.1f} times as long as before, {length[at]:,.0f} tokens on average, and TTFT is "
            f"{slower[at]:.1f} times as long ({source})",
            evidence=(
                Evidence("length_ratio", float(ratio[at]), "x", limits["long_inputs_ratio"], source),
                Evidence("ttft_ratio", float(slower[at]), "x", limits["long_inputs_slower_ratio"], source),
                Evidence("input_tokens", float(length[at]), "tokens", source=source),
                Evidence("input_tokens_before", float(usual[at]), "tokens", source=source),
                Evidence("ttft_s", float(wait[at]) / NS, "s", source=source),
                Evidence("requests", float(n[at]), "requests", limits["long_inputs_min"], source),
            ),
            cause="clients send far longer prompts than before; their prefill delays all others likely as well",
            next="see input tokens by label in the latency pane: who sends them; give them an engine or a queue of their own",
        )


# -- lost on the way ---------------------------------------------------------------------------------------------


@rule("request", lookback_s=240, join_s=60)
def slow_upstream(scene: Scene) -> Iterator[Finding]:
    """First tokens come to the proxy much later than the engine gives them: the time is lost between the two.

    Thresholds: `upstream_lost_s`, `upstream_min`, means over a minute, and more than the engine itself takes. Compared are
    requests and engines of the same model, as the engine publishes it; others may be served elsewhere.
    """
    engines = dict(_by_model(scene))
    if not engines:
        return
    t = instants(scene)
    for key, mine in parts(scene, "request", _SOURCE, 2 * WINDOW_NS):
        for (model, _), rows in split(mine, ("model", "model")):
            if model in engines:
                yield from _lost(scene, key, model, t, rows, engines[model])


def _by_model(scene: Scene) -> Iterator[tuple[int, Rows]]:
    """Rows of the engines that tell their model and TTFT, by model."""
    for (model, _), rows in parts(scene, "engine", ("model", "model"), WINDOW_NS):
        if model and (floats(rows, "ttft_n") > 0).any():
            yield model, rows


def _lost(
    scene: Scene, key: tuple[int, int], model: int, t: Times, rows: Rows, engine: Rows
) -> Iterator[Finding]:
    limits = scene.limits
    rows = rows[ended(scene.view.strings, rows, "ok")]
    ttft, e2e = np.rint(floats(rows, "ttft_ns")), floats(rows, "e2e_ns")
    # Of the same minute are first tokens; answers that go on for longer are left out.
    fit = ~np.isnan(ttft) & (e2e - ttft <= WINDOW_NS)
    rows, ttft, first = rows[fit], ttft[fit], (rows["t"] - e2e + ttft)[fit].astype(np.int64)
    n, total = _of_minute(rows["t"], first, ttft, t)
    windows = Windows(engine["t"], t)
    n_engine = windows.sum(engine["ttft_n"])
    own_ns = _mean(windows.sum(np.rint(NS * floats(engine, "ttft_sum_s"))), n_engine)
    seen_ns = _mean(total, n)
    lost_s = (seen_ns - own_ns) / NS
    with np.errstate(invalid="ignore"):
        on: Flags = (np.minimum(n, n_engine) >= limits["upstream_min"]) & (lost_s * NS >= own_ns)
        on &= lost_s >= limits["upstream_lost_s"]
    for spell in runs(scene, t, on, np.nan_to_num(lost_s), rows["t"]):
        yield _lost_finding(scene, key, model, spell, float(seen_ns[spell.place]), float(own_ns[spell.place]))


def _of_minute(end: Times, first: Times, values: Floats, t: Times) -> tuple[Floats, Floats]:
    """Number and sum of those that began to answer in the minute before each instant and ended by it, shape (n,) each.

    No answer took longer than a minute, so those whose first token was before that minute have ended.
    """
    order = np.argsort(first, kind="stable")
    by_end, by_first = (np.concatenate(([0.0], np.cumsum(column))) for column in (values, values[order]))
    last, begin = (
        np.searchsorted(end, t, side="right"),
        np.searchsorted(first[order], t - WINDOW_NS, side="right"),
    )
    return np.asarray(last - begin, np.float64), by_end[last] - by_first[begin]


def _lost_finding(
    scene: Scene, key: tuple[int, int], model: int, spell: Spell, seen_ns: float, own_ns: float
) -> Finding:
    source, limit = request_source(scene, key), scene.limits["upstream_lost_s"]
    seen, own = format_duration(int(seen_ns)), format_duration(int(own_ns))
    return spell.finding(
        "slow_upstream",
        f"{source} {said(scene, model)}",
        WARN if spell.weight >= limit else NOTE,
        title=f"first tokens of {said(scene, model)} take {seen} as {source} sees it, {own} in the engine: "
        f"{spell.weight:.2g} s are lost on the way",
        evidence=(
            Evidence("lost_s", spell.weight, "s", limit, source),
            Evidence("ttft_s", seen_ns / NS, "s", source=source),
            Evidence("ttft_s", own_ns / NS, "s", source="engine"),
        ),
        cause="likely the network, a load balancer or the engine's API server, which count before the engine's own clock runs",
        next="ping and traceroute to the upstream; see the CPU of the API server's process (stalls pane)",
    )
