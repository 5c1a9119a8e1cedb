"""What moved first: a range of time against the one before it, across every channel.

Every series that left its level is found with its onset (`changes`), duplicates of one movement are folded, and what
is left is put in the order of the onsets, with the events of that time between. An order in time is a correlation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from opusmon.clock import NS, Anchors
from opusmon.times import format_duration
from opusmon.triage import changes
from opusmon.triage.changes import Shift
from opusmon.triage.explain_counts import counts
from opusmon.triage.explain_events import Event, events
from opusmon.triage.explain_series import Series, Spans, gauges, own
from opusmon.triage.explain_words import family, words
from opusmon.triage.scene import View

MARGIN_SHARE = 4
"""A change is looked for from a quarter of the range's length before it on: what moved first moved before the page."""
SHOWN = 24
"""Movements told one by one, those of largest effect and the first ones; the rest is named."""
MOST_EVENTS = 40
MIN_RANGE_NS = 4 * NS
LEAST_BEFORE_NS = 15 * NS
"""A short range is compared with more than its own length: with one sample a second, `changes.MIN_BASE` and some spare."""
ABSURD = 1e30
"""Nothing that is measured is so large; squares of it would not fit."""


class ExplainError(ValueError):
    """Ranges that cannot be compared; one line that says what to give instead."""


@dataclass(frozen=True, slots=True)
class Change:
    """A series, or several that say the same, that left its level.

    Attributes:
        channel: where it is from.
        quantity: field or derived quantity.
        subject: whose it is, with `{0}`, `{1}` in the places of `names`.
        names: text from outside.
        unit: of the levels.
        shift: levels, onset and certainty.
        note: what was folded into it, in words.
        part: number of the link, -1 for none.
        whole: subject of all links together.
        floor: noise that the unit always has.
    """

    channel: str
    quantity: str
    subject: str
    names: tuple[str, ...]
    unit: str
    shift: Shift
    note: str = ""
    part: int = -1
    whole: str = ""
    floor: float = 0.0

    @property
    def rising(self) -> bool:
        """The level went up."""
        return self.shift.after > self.shift.before


@dataclass(frozen=True, slots=True)
class Step:
    """What moved or happened at one time, as far as the samples tell.

    Attributes:
        lo: it was after this, monotonic ns.
        hi: and at most at this.
        changes: by effect.
        events: by time.
        unsure: it may as well have been before the step before it, whose bounds overlap these.
    """

    lo: int
    hi: int
    changes: tuple[Change, ...]
    events: tuple[Event, ...]
    unsure: bool = False


@dataclass(frozen=True, slots=True)
class Explanation:
    """The comparison of two ranges.

    Attributes:
        spans: the ranges in which level and change were looked for.
        a: the range in question begins after this, monotonic ns.
        b: and ends here.
        before: the range it was compared with.
        steps: by onset.
        more: movements of smaller effect that are in no step, by effect.
        compared: series that were compared.
        skipped: series with too few samples for it.
        channels: names of the channels compared.
        anchors: for wall time.
        events_left_out: events there were besides those in the steps.
    """

    spans: Spans
    a: int
    b: int
    before: tuple[int, int]
    steps: tuple[Step, ...]
    more: tuple[Change, ...]
    compared: int
    skipped: int
    channels: tuple[str, ...]
    anchors: Anchors
    events_left_out: int = 0

    @property
    def changes(self) -> list[Change]:
        """All movements in steps, by effect."""
        every = [change for step in self.steps for change in step.changes]
        return sorted(every, key=lambda one: -one.shift.effect)

    @property
    def chance(self) -> float:
        """Movements to expect, at most, if nothing had changed at all."""
        return self.compared * changes.FALSE_ALARMS


def explain(
    view: View,
    a: int,
    b: int,
    before: tuple[int, int] | None = None,
    *,
    margin_ns: int | None = None,
    shown: int = SHOWN,
) -> Explanation:
    """Compare the range (a, b] with the one before it.

    Args:
        view: what was measured.
        a: start of the range, monotonic ns.
        b: its end.
        before: the range to compare with; by default that of the same length before `a`, or the 15 s before the
            margin where that is more.
        margin_ns: how far before `a` a change is looked for; a quarter of the range by default.
        shown: most movements to put in steps.

    Raises:
        ExplainError: the ranges are empty, overlap, or hold nothing to compare.
    """
    spans = _spans(view, a, b, before, margin_ns)
    # A file may hold anything: what is no number, or follows from none, counts as missing.
    with np.errstate(all="ignore"):
        found, compared, skipped, channels = _moved([*gauges(view, spans), *counts(view, spans)], spans)
    if not compared:
        raise ExplainError(
            f"no series has {changes.MIN_BASE} samples before the range and {changes.MIN_ZONE} in it; widen the ranges"
        )
    folded = sorted(fold(found, _links_of(found)), key=lambda one: -one.shift.effect)
    first = sorted(folded, key=lambda one: one.shift.onset)[: max(1, shown // 4)]
    kept = [*first, *(one for one in folded if one not in first)][:shown]
    happened, left_out = _rarest(events(view, spans.zone0, spans.zone1))
    steps = in_order(kept, happened)
    rest = tuple(one for one in folded if one not in kept)
    against = before or (spans.base0, a)
    return Explanation(
        spans, a, b, against, tuple(steps), rest, compared, skipped, tuple(channels), view.anchors, left_out
    )


def _rarest(happened: Sequence[Event]) -> tuple[list[Event], int]:
    """At most `MOST_EVENTS` events, those of the rarer kinds first, and how many are left out."""
    # The text of a mark begins with its own kind.
    kinds = [one.text if one.kind == "mark" else one.kind for one in happened]
    of_kind = Counter(kinds)
    ranked = [
        one
        for _, _, one in sorted(
            (of_kind[k], n, one) for n, (k, one) in enumerate(zip(kinds, happened, strict=True))
        )
    ]
    kept = sorted(ranked[:MOST_EVENTS], key=lambda one: one.t)
    return kept, len(happened) - len(kept)


def _spans(view: View, a: int, b: int, before: tuple[int, int] | None, margin_ns: int | None) -> Spans:
    """The ranges of baseline and zone, within what the view has.

    Raises:
        ExplainError: see `explain`.
    """
    if b - a < MIN_RANGE_NS:
        raise ExplainError(
            f"the range to explain is under {format_duration(MIN_RANGE_NS)}; give --to further on"
        )
    begin = getattr(view, "t0", None)
    margin = (b - a) // MARGIN_SHARE if margin_ns is None else margin_ns
    if before is None:
        base1 = a - margin
        base0 = min(2 * a - b, base1 - LEAST_BEFORE_NS)
    else:
        base0, base1 = before
        if base1 > a or base0 >= base1:
            raise ExplainError(
                "the range to compare with must end before the one to explain; change --before"
            )
        margin = min(margin, a - base1)
    base0 = max(base0, int(begin) - 1) if begin else base0
    if base1 - base0 < MIN_RANGE_NS:
        raise ExplainError(
            "there is too little of the session before the range to compare with; give --from later, or --before"
        )
    return Spans(base0, base1, a - margin, b)


def _moved(
    every: Sequence[Series], spans: Spans
) -> tuple[list[tuple[Series, Shift | None]], int, int, list[str]]:
    """What each series did, how many were compared, how many had too few samples, and the channels compared."""
    found: list[tuple[Series, Shift | None]] = []
    skipped = 0
    for series in every:
        if own(series):
            continue
        here, n_base = spans.select(series.t)
        t, x = series.t[here], series.x[here]
        known = np.abs(x) < ABSURD
        if not known.any():
            continue  # a status row says why; nothing to count
        n_known = int(np.count_nonzero(known[:n_base]))
        if not changes.enough(n_known, int(np.count_nonzero(known)) - n_known):
            skipped += 1
            continue
        x = np.where(known, x, np.nan)
        shift = changes.find_shift(t, x, n_base, series.dt_ns, series.floor)
        found.append((series, shift))
    return found, len(found), skipped, sorted({series.channel for series, _ in found})


# -- folding -----------------------------------------------------------------------------------------------------


def _links_of(found: Iterable[tuple[Series, Shift | None]]) -> dict[tuple[str, str, str], int]:
    """How many links each quantity of a subject has, moved or not."""
    links: dict[tuple[str, str, str], int] = {}
    for series, _ in found:
        if series.part >= 0:
            key = (series.channel, series.quantity, series.whole)
            links[key] = links.get(key, 0) + 1
    return links


def fold(
    found: Iterable[tuple[Series, Shift | None]], links: dict[tuple[str, str, str], int]
) -> list[Change]:
    """The changes, with those that say the same thing as one."""
    every = [
        Change(s.channel, s.quantity, s.subject, s.names, s.unit, shift, "", s.part, s.whole, s.floor)
        for s, shift in found
        if shift is not None
    ]
    parts = [one for one in every if one.part >= 0]
    rest = [one for one in every if one.part < 0]
    return _same_quantity([*rest, *_folded_links(parts, links)])


def _folded_links(parts: Sequence[Change], links: dict[tuple[str, str, str], int]) -> Iterator[Change]:
    """Links of one subject that moved together as one change."""
    rows: dict[tuple[str, str, str, bool], list[Change]] = {}
    for one in parts:
        rows.setdefault((one.channel, one.quantity, one.whole, one.rising), []).append(one)
    for key, row in rows.items():
        for group in together(row):
            yield group[0] if len(group) == 1 else _joined_links(group, links[key[:3]])


def _joined_links(group: Sequence[Change], total: int) -> Change:
    """One change of several links: the middle of their levels, the bounds that all of them allow."""
    numbers = sorted(one.part for one in group)
    lo, hi = _bounds(group)
    shifts = [one.shift for one in group]
    shift = replace(
        shifts[0],
        lo=lo,
        hi=hi,
        before=float(np.median([one.before for one in shifts])),
        after=float(np.median([one.after for one in shifts])),
        effect=float(np.median([one.effect for one in shifts])),
    )
    which = (
        "" if len(group) == total else ": " + ", ".join(map(str, numbers[:6])) + ", ..." * (len(numbers) > 6)
    )
    note = f"{len(group)} of {total} links{which}"
    return replace(group[0], subject=f"{group[0].whole}, per link", shift=shift, note=note, part=-1)


def _same_quantity(every: Sequence[Change]) -> list[Change]:
    """Of changes of one quantity of one subject at one time, in one direction, the best one to tell."""
    rows: dict[tuple[object, ...], list[Change]] = {}
    for one in every:
        name, _ = family(one.channel, one.quantity)
        rows.setdefault((name, one.whole or one.subject, one.names, one.rising), []).append(one)
    return [_best(group) for row in rows.values() for group in together(row)]


def _best(group: Sequence[Change]) -> Change:
    """The one to tell: sums over links carry the note of the links; else by the order of `family`."""
    ranked = sorted(
        group, key=lambda one: (family(one.channel, one.quantity)[1], one.part >= 0, -one.shift.effect)
    )
    best = ranked[0]
    notes = [one.note for one in ranked if one.note]
    single = [one for one in ranked if one.part >= 0]
    if single:
        best = single[0]
    elif not best.note:
        also = sorted(
            {words(one.channel, one.quantity).name for one in ranked}
            - {words(best.channel, best.quantity).name}
        )
        notes += [f"also {', '.join(also)}"] if also else []
    return replace(best, note="; ".join(notes))


# -- order -------------------------------------------------------------------------------------------------------


def together(every: Iterable[Change]) -> list[list[Change]]:
    """Groups of changes whose onsets cannot be told apart: within a group all bounds overlap."""
    groups: list[list[Change]] = []
    for one in sorted(every, key=lambda change: (change.shift.onset, change.shift.lo)):
        if groups:
            lo, hi = _common(groups[-1])
            if max(lo, one.shift.lo) <= min(hi, one.shift.hi):
                groups[-1].append(one)
                continue
        groups.append([one])
    return groups


def _common(group: Sequence[Change]) -> tuple[int, int]:
    """The bounds that all of a group allow."""
    return max(one.shift.lo for one in group), min(one.shift.hi for one in group)


def _hull(group: Sequence[Change]) -> tuple[int, int]:
    """The bounds that any of a group allows."""
    return min(one.shift.lo for one in group), max(one.shift.hi for one in group)


def _bounds(group: Sequence[Change]) -> tuple[int, int]:
    """Bounds to tell for a group: what all allow, unless they only just touch; then they need not be one moment."""
    lo, hi = _common(group)
    narrowest = min(one.shift.hi - one.shift.lo for one in group)
    return (lo, hi) if 2 * (hi - lo) >= narrowest else _hull(group)


def in_order(every: Sequence[Change], happened: Sequence[Event]) -> list[Step]:
    """Changes and events as steps in the order of time.

    An event joins the step that it cannot be told apart from: within the bounds of one of its changes, and within a
    second of those that all of them allow.
    """
    left = list(happened)
    steps: list[Step] = []
    for group in together(every):
        lo, hi = _bounds(group)
        first, last = _hull(group)
        inside = tuple(one for one in left if max(first, lo - NS) < one.t <= min(last, hi + NS))
        left = [one for one in left if one not in inside]
        ranked = sorted(group, key=lambda one: -one.shift.effect)
        steps.append(Step(lo, hi, tuple(ranked), inside))
    steps += [Step(one.t, one.t, (), (one,)) for one in left]
    return _with_doubt(sorted(steps, key=lambda one: ((one.lo + one.hi) // 2, one.lo)))


def _with_doubt(steps: Sequence[Step]) -> list[Step]:
    """The steps, those marked of which something may have been before something of a step before."""
    marked: list[Step] = []
    until = -1
    for step in steps:
        lo, hi = _hull(step.changes) if step.changes else (step.lo, step.hi)
        marked.append(replace(step, unsure=lo < until))
        until = max(until, hi)
    return marked
