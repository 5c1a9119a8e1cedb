"""Rules over what an engine says of itself: its queue, its KV cache, and whether more load still gains anything."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from opusmon.clock import NS
from opusmon.schema import Rows
from opusmon.triage.episodes import Flags, Times
from opusmon.triage.finding import Evidence, Finding
from opusmon.triage.instants import (
    SETTLED_NS,
    WINDOW_NS,
    Floats,
    Memo,
    Spell,
    Windows,
    engine_source,
    instants,
    parts,
    runs,
    split,
    window_rows,
)
from opusmon.triage.saturation import Saturation, of_rows
from opusmon.triage.scene import Scene, rule
from opusmon.triage.severity import CRIT, NOTE, WARN
from opusmon.triage.sustained import floats, spells

_ENGINE = ("engine", "model")
_TIER = 1e6
"""Weights of a worse severity are above all of a milder one."""

# -- queue -------------------------------------------------------------------------------------------------------

BLOCKS = 6
BLOCK_NS = WINDOW_NS // BLOCKS
MIN_CONCORDANT = 13
"""Of the 15 pairs of 6 blocks the rising ones less the falling ones. Kendall's test: by chance 6 of 720 orders reach
13, p = 0.008. Means of 10 s, because neighbouring scrapes of a queue are not independent."""
MAX_WAIT_S = 1e5


@rule("engine", join_s=30)
def queue_growth(scene: Scene) -> Iterator[Finding]:
    """Requests arrive faster than they are served: the queue of an engine rises over a whole minute.

    Thresholds: `queue_growth_min`; severity by the time it takes to serve the queue, its length over the rate of
    service (Little's law): `queue_wait_warn_s`, `queue_wait_crit_s`. The rise must pass Kendall's test.
    """
    least = scene.limits["queue_growth_min"]
    if not (floats(scene.rows("engine"), "waiting") >= least).any():
        return
    t = instants(scene)
    for key, rows in parts(scene, "engine", _ENGINE, WINDOW_NS):
        waiting = rows["waiting"].astype(np.float64)
        blocks = _block_means(rows["t"], waiting, t)
        with np.errstate(invalid="ignore"):
            grown = blocks[:, -1] - blocks[:, 0]
            on = (_concordant(blocks) >= MIN_CONCORDANT) & (grown >= least)
        served = _served_per_s(rows, t)
        wait_s = np.minimum(blocks[:, -1] / np.maximum(served, 1e-9), MAX_WAIT_S)
        for spell in runs(scene, t, on, np.nan_to_num(wait_s), rows["t"]):
            yield _queue_finding(scene, key, rows, t, blocks[spell.place], float(served[spell.place]), spell)


def _block_means(rows_t: Times, values: Floats, t: Times) -> Floats:
    """Means over the tenths of seconds before each instant, oldest first, shape (n, `BLOCKS`); NaN without a row."""
    columns = []
    known = ~np.isnan(values)
    for block in range(BLOCKS - 1, -1, -1):
        windows = Windows(rows_t, t - block * BLOCK_NS, BLOCK_NS)
        number = windows.sum(known)
        columns.append(np.where(number > 0, windows.sum(values) / np.maximum(number, 1), np.nan))
    return np.stack(columns, axis=1)


def _concordant(blocks: Floats) -> Floats:
    """Pairs that rise less pairs that fall, shape (n,); NaN where a block is missing."""
    first, second = np.triu_indices(BLOCKS, 1)
    return np.asarray(np.sign(blocks[:, second] - blocks[:, first]).sum(axis=1), np.float64)


def _served_per_s(rows: Rows, t: Times) -> Floats:
    """Requests that ended per second in the minute before each instant; NaN where no row says."""
    finished, dt = rows["finished"].astype(np.float64), rows["dt_ns"].astype(np.float64)
    known = ~np.isnan(finished) & (dt > 0)
    windows = Windows(rows["t"], t)
    covered_s = windows.sum(np.where(known, dt, 0.0)) / NS
    return np.where(covered_s > 0, windows.sum(finished) / np.where(covered_s > 0, covered_s, 1.0), np.nan)


def _queue_finding(
    scene: Scene, key: tuple[int, int], rows: Rows, t: Times, blocks: Floats, served: float, spell: Spell
) -> Finding:
    source = engine_source(scene, key)
    arrived = served + _grown_per_s(rows, int(t[spell.place]))
    warn, crit = scene.limits["queue_wait_warn_s"], scene.limits["queue_wait_crit_s"]
    severity = CRIT if spell.weight >= crit else WARN if spell.weight >= warn else NOTE
    wait = f"{spell.weight:.3g} s to serve it" if spell.weight < MAX_WAIT_S else "and nothing is served"
    return spell.finding(
        "queue_growth",
        source,
        severity,
        title=f"the queue of {source} grows from {blocks[0]:.0f} to {blocks[-1]:.0f} in {WINDOW_NS // NS} s, {wait}",
        evidence=(
            Evidence("queue_wait_s", spell.weight, "s", crit if severity == CRIT else warn, source),
            Evidence("waiting", float(blocks[-1]), "requests", source=source),
            Evidence("waiting_before", float(blocks[0]), "requests", source=source),
            Evidence("arrivals_per_s", arrived, "1/s", served, source),
            Evidence("served_per_s", served, "1/s", source=source),
        ),
        cause="more requests arrive than the engine ends; likely a burst, longer prompts or answers, or a slower GPU",
        next="compare input tokens and running requests with the minute before; gpu pane: is it busy?",
    )


def _grown_per_s(rows: Rows, t: int) -> float:
    """Growth of the requests in the system over the minute before `t`, per second; NaN where not known."""
    first, end = np.searchsorted(rows["t"], (t - WINDOW_NS, t), side="right")
    inside = rows["running"][first:end].astype(np.float64) + rows["waiting"][first:end]
    known = np.flatnonzero(~np.isnan(inside)) + first
    if len(known) < 2:
        return math.nan
    passed_s = (int(rows["t"][known[-1]]) - int(rows["t"][known[0]])) / NS
    return float(inside[known[-1] - first] - inside[known[0] - first]) / passed_s


# -- KV cache ----------------------------------------------------------------------------------------------------


@rule("engine", join_s=30)
def kv_pressure(scene: Scene) -> Iterator[Finding]:
    """The KV cache of an engine is nearly full, with requests waiting for it or without.

    Thresholds: `kv_high_pct` in `kv_in_a_row` scrapes. A full cache is what an engine wants under load; requests that
    wait for it, or are thrown out, make it a warning.
    """
    limit = scene.limits["kv_high_pct"]
    if not (floats(scene.rows("engine"), "kv_used_max_pct") >= limit).any():
        return
    for key, rows in parts(scene, "engine", _ENGINE):
        used = rows["kv_used_max_pct"].astype(np.float64)
        with np.errstate(invalid="ignore"):
            pressed = (rows["waiting"] > 0) | (rows["preemptions"] > 0)
            on = used >= limit
        source = engine_source(scene, key)
        for one in spells(scene, rows, on, used + _TIER * pressed, count=int(scene.limits["kv_in_a_row"])):
            waiting, pushed = float(one.row["waiting"]), float(one.row["preemptions"])
            bad = one.weight >= _TIER
            value = float(one.row["kv_used_max_pct"])
            yield one.finding(
                "kv_pressure",
                source,
                WARN if bad else NOTE,
                title=f"KV cache of {source} {value:.3g} % full"
                + (f", {waiting:.0f} requests wait" if bad else ""),
                evidence=(
                    Evidence("kv_used_max_pct", value, "%", limit, source),
                    Evidence("waiting", waiting, "requests", source=source),
                    Evidence("preemptions", pushed, "requests", source=source),
                    Evidence("running", float(one.row["running"]), "requests", source=source),
                ),
                cause="contexts held by running requests fill the cache: likely more or longer ones than it was sized for",
                next="see input tokens by label in the latency pane; fewer requests at once, or more memory for the cache",
                pane="latency",
            )


@rule("engine", join_s=60)
def preemptions(scene: Scene) -> Iterator[Finding]:
    """An engine throws requests out of its batch and computes them again later.

    Thresholds: `preemptions_min` in a minute; severity by their share of the answers that ended:
    `preemptions_crit_pct`.
    """
    if not (floats(scene.rows("engine"), "preemptions") > 0).any():
        return
    t = instants(scene)
    for key, rows in parts(scene, "engine", _ENGINE, WINDOW_NS):
        hit = rows["preemptions"] > 0
        windows = Windows(rows["t"], t)
        count, ended = windows.sum(rows["preemptions"]), windows.sum(rows["finished"])
        share = np.where(ended > 0, 100 * count / np.maximum(ended, 1), 0.0)
        crit = share >= scene.limits["preemptions_crit_pct"]
        on = count >= scene.limits["preemptions_min"]
        for spell in runs(scene, t, on, count + _TIER * crit, rows["t"][hit]):
            n = spell.place
            yield _preempted(scene, key, spell, float(count[n]), float(ended[n]), float(share[n]))


def _preempted(
    scene: Scene, key: tuple[int, int], spell: Spell, count: float, ended: float, share: float
) -> Finding:
    source = engine_source(scene, key)
    return spell.finding(
        "preemptions",
        source,
        CRIT if spell.weight >= _TIER else WARN,
        title=f"{source} preempts {count:.0f} requests in {WINDOW_NS // NS} s, {ended:.0f} ended",
        evidence=(
            Evidence("preemptions", count, "requests", scene.limits["preemptions_min"], source),
            Evidence("share_pct", share, "%", scene.limits["preemptions_crit_pct"], source),
            Evidence("finished", ended, "requests", source=source),
        ),
        cause="the KV cache likely has no room for answers that grow; their prefill is computed twice",
        next="lower the number of requests at once, or give the cache more memory; see kv in the latency pane",
    )


# -- saturation --------------------------------------------------------------------------------------------------

FIT_NS = 600 * NS
FIT_STEP_NS = 60 * NS
Fits = dict[tuple[int, int], Saturation]


def _fit_all(scene: Scene, t: int) -> Fits:
    """Engines that have a knee, with its confidence where they work past it."""
    found: Fits = {}
    for key, rows in split(window_rows(scene, "engine", t, FIT_NS), _ENGINE):
        fitted, _ = of_rows(rows, t, only_past=True)
        if fitted is not None and fitted.past_knee:
            found[key] = fitted
    return found


_FITS = Memo(_fit_all)


@rule("engine", lookback_s=180, join_s=60)
def saturated(scene: Scene) -> Iterator[Finding]:
    """An engine works at or past the knee of its throughput: more load only makes requests wait.

    Fitted over 10 minutes, each minute: see `opusmon.triage.saturation`. Thresholds: `saturated_gain_pct`,
    `saturated_loss_pct`, `saturated_past_ratio`. 9 of 10 resamples must show the knee within the loads seen.
    """
    t = instants(scene, FIT_STEP_NS, scene.t1 - SETTLED_NS)
    fits = [_FITS.at(scene, when) for when in t.tolist()]
    for key in sorted({key for found in fits for key in found}):
        gained = np.array([_gain_pct(found.get(key)) for found in fits])
        lost = np.array([found[key].loss_pct if key in found else 0.0 for found in fits])
        on = (gained < scene.limits["saturated_gain_pct"]) & _is_pressed(scene, [f.get(key) for f in fits])
        past = lost >= scene.limits["saturated_loss_pct"]
        for spell in runs(scene, t, on, np.where(past, _TIER + lost, 100 - gained), t, FIT_STEP_NS):
            yield _saturated(scene, key, fits[spell.place][key], spell)


def _is_pressed(scene: Scene, fits: Sequence[Saturation | None]) -> Flags:
    """Whether requests wait, or the load is far past the knee, shape (n,).

    Under a steady demand that is served at once throughput is what is asked for, whatever the load happens to be: that
    looks like a knee at the usual load, and is none.
    """
    ratio = scene.limits["saturated_past_ratio"]
    return np.array(
        [
            one is not None and (one.load - one.running >= 1 or one.load >= ratio * one.knee_high)
            for one in fits
        ]
    )


def _gain_pct(found: Saturation | None) -> float:
    """What twice the load would add; NaN where there is no knee, or none that resamples agree on."""
    return found.gain_pct if found is not None and found.agreed >= 0.9 else math.nan


def _saturated(scene: Scene, key: tuple[int, int], found: Saturation, spell: Spell) -> Finding:
    source = engine_source(scene, key)
    bad = spell.weight >= _TIER
    words = f"; {found.loss_pct:.0f} % under its own peak" if bad else ""
    first = max(spell.t0 - FIT_STEP_NS, scene.t0)
    told = Spell(first, spell.t1, spell.open, spell.place, spell.weight)
    return told.finding(
        "saturated",
        source,
        CRIT if bad else WARN,
        title=f"{source} is saturated: {found.load:.3g} requests in the system, knee at {found.knee:.3g}, "
        f"{found.throughput:.4g} tokens/s{words}",
        evidence=(
            Evidence("load", found.load, "requests", found.knee, source),
            Evidence(
                "gain_of_twice_the_load_pct", found.gain_pct, "%", scene.limits["saturated_gain_pct"], source
            ),
            Evidence("under_peak_pct", found.loss_pct, "%", scene.limits["saturated_loss_pct"], source),
            Evidence("knee_low", found.knee_low, "requests", source=source),
            Evidence("knee_high", found.knee_high, "requests", source=source),
            Evidence("running_at_knee", found.knee_running, "requests", source=source),
            Evidence("throughput", found.throughput, "tokens/s", source=source),
            Evidence("curve", found.curve.kind, source=source),
            Evidence("little_ratio", found.little.ratio, source=source),
        ),
        cause="likely the batch is at its cap, or memory bandwidth or the KV cache is used up: what is added, waits",
        next=f"limit requests at once to about {found.knee_running:.0f}, or add a server; gpu pane: HBM bandwidth, SM",
    )
