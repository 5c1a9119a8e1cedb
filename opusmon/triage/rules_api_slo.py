"""Rules about service level objectives: whose error budget burns, how fast, and who saw it.

The objectives are those in force at each instant, as `status` rows of collector "slo" say. Without one there is
nothing to find. Each source is judged by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from opusmon.channels import BY_NAME, KEYFRAME_NS, STATUS
from opusmon.clock import NS
from opusmon.schema import Rows, conform
from opusmon.slo import COLLECTOR, Burn, Slo, Tally, are_enough, burn, channel_of, no_sums, objectives
from opusmon.slo import Rule as Alert
from opusmon.slo_past import CHUNK_NS, CHUNK_SLOTS, LONGEST_NS, SETTLED_NS, SLOT_NS, Floats, Kept, chunk_sums
from opusmon.times import format_duration
from opusmon.triage.episodes import Flags, Times
from opusmon.triage.finding import Evidence, Finding
from opusmon.triage.instants import Last, Spell, engine_source, instants, parts, request_source, runs
from opusmon.triage.scene import Scene, rule
from opusmon.triage.severity import CRIT, WARN

IN_FORCE_NS = KEYFRAME_NS + 5 * NS
"""An objective is said again every 60 s; one that has not been for longer is no longer in force."""
RECENT_NS = 300 * NS
"""Without a bad request for this long nothing burns, whatever a long window still holds."""
_CHANNELS = ("request", "engine", "engine_bucket")
_KEYS = {
    "request": ("source", "start"),
    "engine": ("engine", "model"),
    "engine_bucket": ("engine", "model"),
}
_NAMES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E", "queue": "queue time"}
_KEPT = Kept()


@dataclass(frozen=True, slots=True)
class _Source:
    """An objective and a source that may see it.

    Attributes:
        slo: the objective.
        channel: where it is read.
        key: text ids of the source.
        rows: those of the scene.
    """

    slo: Slo
    channel: str
    key: tuple[int, int]
    rows: Rows


@dataclass(frozen=True, slots=True)
class _Watched:
    """An objective and a source, with what it saw.

    Attributes:
        slo: the objective.
        channel: where it is read.
        key: text ids of the source.
        t: instants, shape (n,).
        on: whether the objective is in force at each, shape (n,).
        known: judged requests by slot.
        edges: their sums up to each slot, shape (4, slots + 1).
        alerts: those that can fire, shortest windows first.
    """

    slo: Slo
    channel: str
    key: tuple[int, int]
    t: Times
    on: Flags
    known: Tally
    edges: Floats
    alerts: Sequence[Alert]


def _tallied(scene: Scene, t: Times, on: Flags, source: _Source) -> _Watched:
    alerts = [
        alert for alert in source.slo.rules if alert.long_ns <= LONGEST_NS and source.slo.reaches(alert)
    ]
    known = _tally(scene, source, max([CHUNK_NS, *(alert.long_ns for alert in alerts)]))
    edges = np.concatenate((no_sums(1), np.cumsum(known.sums, axis=1)), axis=1)
    return _Watched(source.slo, source.channel, source.key, t, on, known, edges, alerts)


@rule(*_CHANNELS, lookback_s=360, join_s=60)
def slo_burn_fast(scene: Scene) -> Iterator[Finding]:
    """An objective's budget burns so fast that it is gone within hours.

    The alert with the shortest windows of the SRE workbook: for a budget of 30 days a burn over 14.4 in an hour and
    in 5 minutes. At least 3 bad requests of 20, or so many that luck is ruled out.
    """
    for one in _WATCHED.of(scene):
        yield from _burning("slo_burn_fast", scene, one, one.alerts[:1], ())


@rule(*_CHANNELS, lookback_s=360, join_s=60)
def slo_burn_slow(scene: Scene) -> Iterator[Finding]:
    """An objective's budget burns faster than it may, though not as fast as `slo_burn_fast` says.

    The alerts with the longer windows, of at most 6 hours: for a budget of 30 days a burn over 6 in 6 hours and in
    half an hour.
    """
    for one in _WATCHED.of(scene):
        yield from _burning("slo_burn_slow", scene, one, one.alerts[1:], one.alerts[:1])


def _watched(scene: Scene) -> list[_Watched]:
    """Objectives in force and the sources that see them, tallied."""
    t = instants(scene, SLOT_NS)
    pairs = [
        (slo, on, channel)
        for slo, on in _in_force(scene, t)
        for channel in (channel_of(slo, engine=False), channel_of(slo, engine=True))
        if channel
    ]
    sources = {
        channel: list(parts(scene, channel, _KEYS[channel])) for channel in {pair[2] for pair in pairs}
    }
    return [
        _tallied(scene, t, on, _Source(slo, channel, key, rows))
        for slo, on, channel in pairs
        for key, rows in sources[channel]
    ]


_WATCHED = Last(_watched, *_CHANNELS, "status")


def _in_force(scene: Scene, t: Times) -> list[tuple[Slo, Flags]]:
    """Objectives, and at which instants each is in force."""
    rows = conform(scene.rows("status", IN_FORCE_NS), STATUS)
    ids = rows["collector"] if len(rows) else np.empty(0, np.uint32)
    mine = rows[np.isin(ids, [n for n in np.unique(ids).tolist() if scene.text(n) == COLLECTOR])]
    found: dict[Slo, Flags] = {}
    series: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for row in mine[["t", "reason", *STATUS.key]].tolist():
        series.setdefault(row[2:], []).append(row[:2])
    for told in series.values():
        for reason in {reason for _, reason in told}:
            for slo in objectives([scene.text(reason)])[0]:
                on = _held(t, told, reason)
                found[slo] = found[slo] | on if slo in found else on
    return [(slo, on) for slo, on in found.items() if on.any()]


def _held(t: Times, told: Sequence[tuple[int, int]], reason: int) -> Flags:
    """At which instants the newest row of a series says this."""
    times = np.array([when for when, _ in told], np.int64)
    says = np.array([said == reason for _, said in told])
    place = np.searchsorted(times, t, side="right") - 1
    newest = np.maximum(place, 0)
    return np.asarray((place >= 0) & says[newest] & (t - times[newest] < IN_FORCE_NS), np.bool_)


# -- sums --------------------------------------------------------------------------------------------------------


def _tally(scene: Scene, one: _Source, longest_ns: int) -> Tally:
    """Judged requests of a source by slot, as far back as any alert looks from the first instant."""
    first = (scene.t0 - longest_ns) // CHUNK_NS
    settled = (scene.t1 - SETTLED_NS) // CHUNK_NS

    def judged(number: int) -> tuple[Floats, int]:
        return _chunk(scene, one, number)

    past = _KEPT.past(scene.view, (one.slo.text, one.channel, *one.key), first, settled, judged)
    fresh = [judged(number)[0] for number in range(settled, scene.t1 // CHUNK_NS + 1)]
    begin = settled - past.shape[1] // CHUNK_SLOTS
    return Tally(begin * CHUNK_NS, SLOT_NS, np.concatenate([past, *fresh], axis=1))


def _chunk(scene: Scene, one: _Source, number: int) -> tuple[Floats, int]:
    begin, end = number * CHUNK_NS, min((number + 1) * CHUNK_NS, scene.t1)
    rows = _read(scene, one, begin, end)
    return chunk_sums(one.slo, rows, scene.view.strings.text, begin)


def _read(scene: Scene, one: _Source, begin: int, end: int) -> Rows:
    """Rows of the source in (begin, end]: from the scene where it holds them all."""
    if begin >= scene.t0:
        first, last = np.searchsorted(one.rows["t"], (begin, end), side="right")
        return one.rows[first:last]
    rows = conform(scene.view.query(one.channel, begin, end), BY_NAME[one.channel])
    names = _KEYS[one.channel]
    mine: Rows = rows[(rows[names[0]] == one.key[0]) & (rows[names[1]] == one.key[1])]
    return mine


# -- burning -----------------------------------------------------------------------------------------------------


def _burning(
    name: str, scene: Scene, one: _Watched, alerts: Sequence[Alert], before: Sequence[Alert]
) -> Iterator[Finding]:
    """Findings of one objective and source: where one of the alerts fires, and none of those before it."""
    now = (one.t - one.known.first_t) // SLOT_NS
    worse = ~one.on
    for alert in before:
        worse |= _fires(one.slo, one.edges, now, alert)[0]
    bad_slots = np.flatnonzero(one.known.sums[0] > one.known.sums[2])
    hits = one.known.first_t + (bad_slots + 1) * SLOT_NS
    for alert in alerts:
        fires, weight = _fires(one.slo, one.edges, now, alert)
        for found in runs(scene, one.t, fires & ~worse, weight, hits, RECENT_NS):
            spell = replace(found, t0=max(found.t0 - SLOT_NS, scene.t0))  # the slot begins there
            yield _burn_finding(name, scene, one, alert, spell)
        worse |= fires


def _fires(slo: Slo, edges: Floats, now: Times, alert: Alert) -> tuple[Flags, Floats]:
    """At which instants an alert fires, and the burn of its long window, shape (n,) each."""
    low: list[Floats] = []
    counts: list[Floats] = []
    for window_ns in (alert.long_ns, alert.short_ns):
        begin = np.maximum(now - window_ns // SLOT_NS, 0)
        valid, _, perhaps, _ = edges[:, now] - edges[:, begin]
        low.append((valid - perhaps) / np.where(valid > 0, valid * slo.budget, np.inf))
        counts += [valid - perhaps, valid]
    on = (low[0] > alert.burn) & (low[1] > alert.burn) & are_enough(slo.budget, counts[0], counts[1])
    return on, low[0]


def _burn_finding(name: str, scene: Scene, one: _Watched, alert: Alert, spell: Spell) -> Finding:
    slo, known, t = one.slo, one.known, int(one.t[spell.place])
    long, short = burn(slo, known, t, alert.long_ns), burn(slo, known, t, alert.short_ns)
    source = (engine_source if one.channel != "request" else request_source)(scene, one.key)
    return spell.finding(
        name,
        f"{slo.text} {source}",
        CRIT if alert.severity == "page" else WARN,
        title=f"{slo.text} burns its budget at {_burn_words(long, short)}: {long.bad:.0f} of {long.valid:.0f}"
        f" requests bad, by {source}",
        evidence=(
            Evidence("burn_long", long.low, "x", alert.burn, source),
            Evidence("burn_short", short.low, "x", alert.burn, source),
            Evidence("bad", long.bad, "requests", source=source),
            *([Evidence("failed", long.failed, "requests", source=source)] if long.failed else []),
            Evidence("valid", long.valid, "requests", source=source),
            Evidence("bad_pct", 100 * long.bad / long.valid, "%", 100 * slo.budget, source),
            *([Evidence("limit_s", slo.limit_ns / NS, "s")] if not math.isnan(slo.limit_ns) else []),
        ),
        cause=_cause(slo, long),
        next="`opusmon explain FILE --from A --to B` over this range: what moved first; latency pane: "
        + ("failed requests, and the server's log" if long.mostly_failed else "slowest requests"),
    )


def _cause(slo: Slo, seen: Burn) -> str:
    """What made requests bad: their time, or an error, which is bad in every objective."""
    end = "for more requests than the objective allows, since the first bad one shown"
    if not slo.limit_ns > 0:
        return f"likely errors {end}"
    late = f"{_NAMES[slo.metric]} over {format_duration(int(slo.limit_ns))}"
    if not seen.failed:
        return f"likely {late} {end}"
    if seen.failed >= seen.bad:
        return f"errors, which are bad in this objective too, {end}; none was bad for its {_NAMES[slo.metric]} alone"
    if seen.mostly_failed:
        return f"errors, which are bad in this objective too, more than {late}, {end}"
    return f"likely {late}, more than errors, {end}"


def _burn_words(long: Burn, short: Burn) -> str:
    """`14.9x over 1h and 20x over 5m`; of windows that were not seen whole, what was."""
    spans = [min(one.window_ns, one.covered_ns) for one in (long, short)]
    words = [
        f"{one.low:.3g}x over {format_duration(span)}" for one, span in zip((long, short), spans, strict=True)
    ]
    return words[0] if spans[0] == spans[1] else " and ".join(words)
