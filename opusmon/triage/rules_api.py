"""Rules over what clients see: errors, refusals, rate limits and retries. One finding per source, never mixed.

The other rules about the API are in the modules imported here: objectives, the engine's queue and cache, the shape of
latencies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from opusmon.clock import NS
from opusmon.quantiles import quantile_of
from opusmon.request_rows import BROKEN_OFF, finished_ns, positive, status_codes
from opusmon.request_rows import LIMITS as RATE_LIMITS
from opusmon.schema import Rows
from opusmon.slo import wilson_lows
from opusmon.times import format_duration
from opusmon.triage import rules_api_engine, rules_api_shape, rules_api_slo
from opusmon.triage.episodes import Flags, Times
from opusmon.triage.finding import Evidence, Finding
from opusmon.triage.instants import (
    WINDOW_NS,
    Floats,
    Last,
    Spell,
    Windows,
    engine_source,
    instants,
    parts,
    request_source,
    runs,
    said,
    split,
)
from opusmon.triage.retries import CHAIN_NS, MAX_RETRIES, first_starts
from opusmon.triage.scene import Scene, rule
from opusmon.triage.severity import CRIT, NOTE, WARN
from opusmon.triage.sustained import floats, spells

__all__ = ["rules_api_engine", "rules_api_shape", "rules_api_slo"]

_SOURCE = ("source", "start")
_ENGINE = ("engine", "model")
UNCOUNTED = (*BROKEN_OFF, "")
"""Requests that were broken off on this side, and those of which no end is known."""
REFUSALS = ("429", "529")


# -- how requests end --------------------------------------------------------------------------------------------


def endings(scene: Scene, rows: Rows) -> tuple[list[str], np.ndarray[tuple[int], np.dtype[np.intp]]]:
    """The different ways in which requests ended, and the place of each request's way among them, shape (n,).

    `ok`, those of `BROKEN_OFF`, `429` and `529` however the server said it, other HTTP errors as `HTTP 500`, else the
    outcome.
    """
    code = (
        rows["outcome"].astype(np.int64) << 42
        | status_codes(rows["status"]) << 32
        | rows["error"].astype(np.int64)
    )
    _, first, place = np.unique(code, return_index=True, return_inverse=True)
    status = status_codes(rows["status"][first])
    kinds = zip(rows["outcome"][first].tolist(), status.tolist(), rows["error"][first].tolist(), strict=True)
    words = [_ending(scene, *kind) for kind in kinds]
    names = sorted(set(words))
    return names, np.array([names.index(word) for word in words], np.intp)[place]


def _ending(scene: Scene, outcome: int, status: int, error: int) -> str:
    word = said(scene, outcome)
    if word in UNCOUNTED or word == "ok":
        return word
    kind = scene.text(error)
    if status == 429 or "rate_limit" in kind:
        return "429"
    if status == 529 or "overloaded" in kind:
        return "529"
    return f"HTTP {status}" if word == "upstream_http_error" and status else word


@dataclass(frozen=True, slots=True)
class _Share:
    """How often something was seen in the window before each instant; columns of shape (n,)."""

    hits: Floats
    of: Floats

    def low_pct(self) -> Floats:
        """Lower bound of the share, per cent."""
        return 100 * wilson_lows(self.hits, self.of)

    def at(self, place: int) -> tuple[float, float, float]:
        """Number, number of all, and share in per cent."""
        hits, of = float(self.hits[place]), float(self.of[place])
        return hits, of, 100 * hits / of if of else math.nan


@dataclass(frozen=True, slots=True)
class _Bad:
    """A run of instants at which requests of a source ended badly in one way.

    Attributes:
        source: who saw it.
        how: see `endings`.
        rows: those of the window of the worst instant that ended so.
        spell: the run.
        share: number, number of all, and share in per cent, in that window.
    """

    source: str
    how: str
    rows: Rows
    spell: Spell
    share: tuple[float, float, float]


def _every_bad_run(scene: Scene) -> list[_Bad]:
    return list(_bad_runs(scene))


def _bad_runs(scene: Scene) -> Iterator[_Bad]:
    """Runs of bad endings of every kind."""
    t = instants(scene)
    for key, rows in parts(scene, "request", _SOURCE, WINDOW_NS):
        names, place = endings(scene, rows)
        windows = Windows(rows["t"], t)
        valid = windows.sum(~np.isin(place, [n for n, how in enumerate(names) if how in UNCOUNTED]))
        for n, how in enumerate(names):
            if how not in ("ok", *UNCOUNTED):
                hit = place == n
                share = _Share(windows.sum(hit), valid)
                yield from _share_runs(scene, t, rows, hit, windows, share, request_source(scene, key), how)


def _share_runs(
    scene: Scene,
    t: Times,
    rows: Rows,
    hit: Flags,
    windows: Windows,
    share: _Share,
    source: str,
    how: str,
) -> Iterator[_Bad]:
    low = share.low_pct()
    on = (share.hits >= scene.limits["errors_min"]) & (low >= scene.limits["errors_warn_pct"])
    for spell in runs(scene, t, on, low, rows["t"][hit]):
        inside = windows.slice(spell.place)
        yield _Bad(source, how, rows[inside][hit[inside]], spell, share.at(spell.place))


_BAD = Last(_every_bad_run, "request")


def _severity(scene: Scene, weight: float) -> int:
    return CRIT if weight >= scene.limits["errors_crit_pct"] else WARN


def _bad_evidence(scene: Scene, bad: _Bad) -> tuple[Evidence, ...]:
    hits, of, pct = bad.share
    crit = scene.limits["errors_crit_pct"]
    limit = crit if bad.spell.weight >= crit else scene.limits["errors_warn_pct"]
    return (
        Evidence("share_pct", pct, "%", limit, bad.source),
        Evidence("surely_pct", bad.spell.weight, "%", limit, bad.source),
        Evidence("count", hits, "requests", scene.limits["errors_min"], bad.source),
        Evidence("requests", of, "requests", source=bad.source),
    )


def _error_types(scene: Scene, bad: _Bad) -> tuple[Evidence, ...]:
    """The type of most of the errors, as the server names it; nothing where it names none."""
    ids, counts = np.unique(bad.rows["error"], return_counts=True)
    kind = said(scene, int(ids[np.argmax(counts)])) if len(ids) else ""
    return (Evidence("error", kind, source=bad.source),) if kind else ()


def _title(bad: _Bad, verb: str) -> str:
    hits, of, pct = bad.share
    return f"{pct:.3g} % of requests {verb} ({hits:.0f} of {of:.0f} in {WINDOW_NS // NS} s, {bad.source})"


_CAUSES: Mapping[str, tuple[str, str]] = {
    "truncated": (
        "the stream likely broke off between the server and here: a crash, a restart, a proxy's limit",
        "look for a restart of the engine and for limits of proxies on the way",
    ),
    "timeout": (
        "the server likely took longer than the client waits",
        "compare queue time and waiting requests in the latency pane",
    ),
    "transport_error": (
        "the server was likely not there, or the network failed",
        "`opusmon doctor`, and whether the engine's process is the same as before",
    ),
}
_CLIENT_CAUSE = (
    "the server likely refuses what clients ask for: a wrong key or model, a prompt over the context, a body too large",
    "see the type of the error; it is mended where the requests are made",
)
_OTHER_CAUSE = (
    "the server likely failed on these requests, whatever status the answer began with",
    "see type and request id of the slowest and failed requests in the latency pane, and the server's log",
)


@rule("request", "engine", join_s=60)
def request_errors(scene: Scene) -> Iterator[Finding]:
    """Requests end in error: by source and by how they end, refusals (429, 529) apart.

    Thresholds: `errors_min`, `errors_warn_pct`, `errors_crit_pct`: the lower Wilson bound of the share in a minute.
    Requests that the client, or the end of opusmon, broke off are not counted.
    """
    for bad in _BAD.of(scene):
        if bad.how in REFUSALS:
            continue
        usual = _CLIENT_CAUSE if bad.how.startswith("HTTP 4") else _OTHER_CAUSE
        cause, after = _CAUSES.get(bad.how, usual)
        yield bad.spell.finding(
            "request_errors",
            f"{bad.source} {bad.how}",
            _severity(scene, bad.spell.weight),
            title=_title(bad, f"end in {bad.how.replace('_', ' ')}"),
            evidence=(*_bad_evidence(scene, bad), *_error_types(scene, bad)),
            cause=cause,
            next=after,
        )
    yield from _engine_errors(scene)


def _engine_errors(scene: Scene) -> Iterator[Finding]:
    """What engines count as failed themselves."""
    t = instants(scene)
    for key, rows in parts(scene, "engine", _ENGINE, WINDOW_NS):
        hit = rows["failed"] > 0
        if not hit.any():
            continue
        windows = Windows(rows["t"], t)
        known = ~(np.isnan(rows["finished"]) | np.isnan(rows["failed"]))
        finished = windows.sum(np.where(known, np.maximum(rows["finished"], rows["failed"]), np.nan))
        share = _Share(windows.sum(np.where(known, rows["failed"], np.nan)), finished)
        for bad in _share_runs(scene, t, rows, hit, windows, share, engine_source(scene, key), "failed"):
            yield bad.spell.finding(
                "request_errors",
                f"{bad.source} failed",
                _severity(scene, bad.spell.weight),
                title=_title(bad, "aborted, refused or in error"),
                evidence=_bad_evidence(scene, bad),
                cause="the engine counts them itself; clients that left are likely among them",
                next="see the engine's log, and the outcomes that the proxy saw in the same minute",
            )


# -- refusals ----------------------------------------------------------------------------------------------------


@rule("request", join_s=60)
def rate_limited(scene: Scene) -> Iterator[Finding]:
    """The server refuses requests because a rate limit is used up (429).

    Thresholds as for `request_errors`.
    """
    yield from _refused(
        scene,
        "rate_limited",
        "429",
        "more requests or tokens a minute than the account may send; some 429 are spending limits, which waiting "
        "does not mend: likely the former",
        "see `limit headroom` in the latency pane and the type of the error; spread the load or raise the limit",
    )


@rule("request", join_s=60)
def overloaded(scene: Scene) -> Iterator[Finding]:
    """The server refuses requests because it is overloaded (529), at once or in the middle of a stream.

    Thresholds as for `request_errors`.
    """
    yield from _refused(
        scene,
        "overloaded",
        "529",
        "the service is likely out of capacity for everyone: not this account's limit",
        "let clients back off longer, or move load to another model or region until it ends",
    )


def _refused(scene: Scene, name: str, how: str, cause: str, after: str) -> Iterator[Finding]:
    for bad in _BAD.of(scene):
        if bad.how != how:
            continue
        asked = bad.rows["retry_after_s"].astype(np.float64)
        asked = asked[np.isfinite(asked)]
        wait = (Evidence("retry_after_s", float(asked.max()), "s", source=bad.source),) if len(asked) else ()
        yield bad.spell.finding(
            name,
            f"{bad.source} {how}",
            _severity(scene, bad.spell.weight),
            title=_title(bad, f"refused with {how}"),
            evidence=(*_bad_evidence(scene, bad), *wait),
            cause=cause,
            next=after,
        )


@rule("request", join_s=60)
def rate_limit_near(scene: Scene) -> Iterator[Finding]:
    """A rate limit is nearly used up: the tightest one of a source and model, as answers tell.

    Thresholds: `headroom_note_pct`, `headroom_warn_pct`.
    """
    rows = scene.rows("request")
    if not {f"limit_{name}" for name in RATE_LIMITS} <= set(rows.dtype.names or ()):
        return
    if not (_headroom_pct(rows) < scene.limits["headroom_note_pct"]).any():
        return
    for key, mine in parts(scene, "request", _SOURCE):
        for model, own in split(mine, ("model", "model")):
            yield from _near(scene, key, model[0], own)


def _near(scene: Scene, key: tuple[int, int], model: int, rows: Rows) -> Iterator[Finding]:
    left_pct = _headroom_pct(rows).min(axis=0)
    left_pct = np.where(np.isfinite(left_pct), left_pct, np.nan)
    note, warn = scene.limits["headroom_note_pct"], scene.limits["headroom_warn_pct"]
    source, name = request_source(scene, key), said(scene, model) or "?"
    for one in spells(scene, rows, left_pct < note, 100 - left_pct, hold_ns=WINDOW_NS):
        which = RATE_LIMITS[int(np.argmin(_headroom_pct(one.row.reshape(1))))]
        severity = WARN if one.weight > 100 - warn else NOTE
        yield one.finding(
            "rate_limit_near",
            f"{source} {name}",
            severity,
            title=f"{100 - one.weight:.3g} % left of the limit of {which.replace('_', ' ')} for {name} ({source})",
            evidence=(
                Evidence("left_pct", 100 - one.weight, "%", warn if severity == WARN else note, source),
                Evidence(f"left_{which}", float(one.row[f"left_{which}"]), source=source),
                Evidence(f"limit_{which}", float(one.row[f"limit_{which}"]), source=source),
            ),
            cause="likely more load than the limit was set for; what is left fills up again within a minute",
            next="watch for 429; spread bursts over the minute or ask for a higher limit",
            pane="latency",
        )


def _headroom_pct(rows: Rows) -> Floats:
    """What is left of each limit, per cent, shape (3, n); infinite where the answer did not tell."""
    limit = np.stack([rows[f"limit_{name}"] for name in RATE_LIMITS]).astype(np.float64)
    left = np.stack([rows[f"left_{name}"] for name in RATE_LIMITS]).astype(np.float64)
    known = (limit > 0) & np.isfinite(limit) & np.isfinite(left)
    return np.where(known, 100 * left / np.where(known, limit, 1.0), np.inf)


# -- retries -----------------------------------------------------------------------------------------------------


@rule("request", join_s=60)
def retries_hide_latency(scene: Scene) -> Iterator[Finding]:
    """Many attempts are retries: users wait for all attempts, latencies of single ones hide that.

    Thresholds: `retries_min`, `retries_note_pct`, `retries_warn_pct`. A retry belongs to that failed
    attempt of the same model, label and endpoint whose next one was due nearest to it, by `retry-after` or the SDK's
    backoff: likely, not surely, the same request.
    """
    if not (floats(scene.rows("request"), "retry") > 0).any():
        return
    t = instants(scene)
    for key, rows in parts(scene, "request", _SOURCE, WINDOW_NS + MAX_RETRIES * CHAIN_NS):
        known, again = ~np.isnan(rows["retry"]), rows["retry"] > 0
        if not again.any():
            continue
        windows = Windows(rows["t"], t)
        share = _Share(windows.sum(again), windows.sum(known))
        low = share.low_pct()
        on = (share.hits >= scene.limits["retries_min"]) & (low >= scene.limits["retries_note_pct"])
        waited = first_starts(scene.view.strings, rows) if on.any() else np.empty(0)
        for spell in runs(scene, t, on, low, rows["t"][again]):
            inside = windows.slice(spell.place)
            yield _retry_finding(scene, key, rows[inside], waited[inside], spell, share.at(spell.place))


def _retry_finding(
    scene: Scene,
    key: tuple[int, int],
    rows: Rows,
    waited: Floats,
    spell: Spell,
    share: tuple[float, float, float],
) -> Finding:
    source = request_source(scene, key)
    hits, of, pct = share
    seen = finished_ns(scene.view.strings, rows, "e2e")
    single, felt = quantile_of(seen, 0.95).value, quantile_of(seen + waited, 0.95).value
    first, all_of_it = (quantile_of(positive(rows["ttft_ns"]) + more, 0.95).value for more in (0.0, waited))
    warn = scene.limits["retries_warn_pct"]
    severity = WARN if spell.weight >= warn else NOTE
    limit = warn if severity == WARN else scene.limits["retries_note_pct"]
    words = ""
    if felt > single:
        words = (
            f": E2E p95 {format_duration(int(felt))} for users, {format_duration(int(single))} per attempt"
        )
    return spell.finding(
        "retries_hide_latency",
        source,
        severity,
        title=f"{pct:.3g} % of attempts are retries ({hits:.0f} of {of:.0f} in {WINDOW_NS // NS} s, {source}){words}",
        evidence=(
            Evidence("retry_pct", pct, "%", limit, source),
            Evidence("surely_pct", spell.weight, "%", limit, source),
            Evidence("retries", hits, "requests", scene.limits["retries_min"], source),
            Evidence("e2e_p95_s", single / NS, "s", source=source),
            Evidence("e2e_p95_with_retries_s", felt / NS, "s", source=source),
            Evidence("ttft_p95_s", first / NS, "s", source=source),
            Evidence("ttft_p95_with_retries_s", all_of_it / NS, "s", source=source),
            Evidence("chained", float((waited > 0).sum()), "requests", source=source),
        ),
        cause="clients try again after refusals and errors, likely those of the same minutes",
        next="see outcomes in the latency pane; judge users' latency by the figures with retries",
    )
