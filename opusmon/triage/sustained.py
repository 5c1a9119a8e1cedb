"""When a condition held, told from the samples around it alone, so that it does not matter where a look begins.

A state that began long ago (hysteresis between two thresholds) cannot be known from a piece of a recording. So what
keeps a finding from flickering is time: it takes samples in a row to begin, and the rule's `join_s` without any to
end. `weight` of a finding is that of its worst sample, and its words are about that sample only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from opusmon.channels import BY_NAME
from opusmon.schema import Rows, conform
from opusmon.triage.episodes import Episode, Flags, Times
from opusmon.triage.finding import Evidence, Finding
from opusmon.triage.scene import Scene, gap_ns

Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]


def floats(rows: Rows, name: str) -> Floats:
    """A field as float64, shape (n,); all NaN where the rows (of an older recording) do not have it.

    Infinities, which no collector writes, are missing values too.
    """
    if name not in (rows.dtype.names or ()):
        return np.full(len(rows), np.nan)
    # A file may hold a signalling NaN, and casting that one warns.
    with np.errstate(invalid="ignore"):
        values = rows[name].astype(np.float64)
    endless = np.isinf(values)
    if endless.any():
        values[endless] = np.nan
    return values


def rows_of(scene: Scene, channel: str, lookback_ns: int = 0) -> Rows:
    """Rows of a channel with every column it has today, even from a recording of another version.

    Columns that are not there are NaN or 0; without those that tell the series apart there are no rows. As with
    `Scene.rows`, rows up to `lookback_ns` before the range are among them: what only stands beside the samples of
    another channel is needed for the first of those as well.
    """
    rows, known = scene.rows(channel, lookback_ns), BY_NAME[channel]
    if not set(known.key) <= set(rows.dtype.names or ()):
        return np.empty(0, known.dtype)
    return conform(rows, known)


def sustained(t: Times, on: Flags, *, count: int = 1, gap_ns: int, hold_ns: int = 0) -> list[Episode]:
    """Stretches of at least `count` samples in a row that are on.

    Args:
        t: times of the samples whose value is known, ascending, shape (n,), ns.
        on: the condition holds, shape (n,).
        count: samples in a row that it takes.
        gap_ns: samples further apart than this are not in a row.
        hold_ns: stretches at most this far apart are one.
    """
    if not on.any():
        return []
    both = on[1:] & on[:-1]
    both &= np.diff(t) <= gap_ns
    places = np.flatnonzero(on)
    # Of the places that are on, the first of a stretch has no link to the one before.
    begins = np.concatenate(([True], ~both[places[1:] - 1]))
    firsts, lasts = places[begins], places[np.concatenate((begins[1:], [True]))]
    if count > 1:
        lasting = lasts - firsts + 1 >= count
        firsts, lasts = firsts[lasting], lasts[lasting]
    if len(firsts) > 1:
        apart = t[firsts[1:]] - t[lasts[:-1]] > hold_ns
        firsts = firsts[np.concatenate(([True], apart))]
        lasts = lasts[np.concatenate((apart, [True]))]
    end = len(t) - 1
    return [Episode(a, b, open=b == end) for a, b in zip(firsts.tolist(), lasts.tolist(), strict=True)]


# `instants.Spell` says why there are two.
@dataclass(frozen=True, slots=True)
class Spell:
    """A stretch over which a condition held, and its worst sample.

    Attributes:
        t0: time of its first sample, monotonic ns.
        t1: time of its last one.
        open: that is the newest sample, and it is current.
        row: the worst sample; of equals the latest.
        weight: how bad that one is.
        place: where it is among the rows that were given.
    """

    t0: int
    t1: int
    open: bool
    row: np.void
    weight: float
    place: int = 0

    @property
    def t(self) -> int:
        """Time of the worst sample, monotonic ns."""
        return int(self.row["t"])

    def finding(
        self,
        rule: str,
        subject: str,
        severity: int,
        *,
        title: str,
        evidence: tuple[Evidence, ...],
        cause: str,
        next: str,  # noqa: A002  (the field's name)
        pane: str = "gpu",
    ) -> Finding:
        """A finding over this stretch; evidence whose value is missing is left out."""
        return Finding(
            rule,
            subject,
            severity,
            self.t0,
            self.t1,
            title,
            tuple(one for one in evidence if one.value == one.value),
            cause,
            next,
            pane,
            open=self.open,
            weight=self.weight,
        )


def spells(
    scene: Scene, rows: Rows, on: Flags, rank: Floats, *, count: int = 1, hold_ns: int = 0
) -> Iterator[Spell]:
    """Stretches of one series over which a condition held.

    Args:
        scene: what is looked at.
        rows: the series, shape (n,).
        on: the condition holds, shape (n,).
        rank: how bad each sample is, shape (n,); NaN where that is not known: such samples are passed over.
        count: samples in a row that it takes.
        hold_ns: stretches at most this far apart are one.
    """
    if not on.any():
        return
    gap = gap_ns(rows)
    places = np.flatnonzero(~np.isnan(rank))
    t, on, rank = rows["t"][places], on[places], rank[places]
    for one in sustained(t, on, count=count, gap_ns=gap, hold_ns=hold_ns):
        counted = np.where(on[one.slice], rank[one.slice], -np.inf)
        worst = one.last - int(np.argmax(counted[::-1]))
        place = int(places[worst])
        current = one.open and scene.t1 - int(t[one.last]) <= gap
        yield Spell(int(t[one.first]), int(t[one.last]), current, rows[place], float(rank[worst]), place)


def grown(t: Times, count: Floats, most_ns: float) -> Floats:
    """How much a count has grown since the sample before, shape (n,); 0 where it went back.

    Also 0 where the sample before is more than `most_ns` away: what happened in between cannot be placed.
    """
    more = np.diff(count, prepend=count[:1])
    return np.where((more > 0) & (np.diff(t, prepend=t[:1]) <= most_ns), more, 0.0)


def as_of(rows: Rows, name: str, t: Times, age_ns: int) -> Floats:
    """A field of the newest row that is not after each of `t`, shape of `t`; NaN where there is none so recent."""
    if not len(rows):
        return np.full(len(t), np.nan)
    place = np.searchsorted(rows["t"], t, side="right") - 1
    known = (place >= 0) & (t - rows["t"][place] <= age_ns)
    return np.where(known, floats(rows, name)[place], np.nan)


def newest_at(rows: Rows, t: int, age_ns: int) -> np.void | None:
    """The newest of rows in time order that is not after `t` and at most `age_ns` old then."""
    place = int(np.searchsorted(rows["t"], t, side="right")) - 1
    return rows[place] if place >= 0 and t - int(rows["t"][place]) <= age_ns else None


def number(row: np.void | None, name: str) -> float:
    """A field of a row; NaN where there is no row, no such field or no finite number."""
    value = float(row[name]) if row is not None and name in (row.dtype.names or ()) else math.nan
    return value if math.isfinite(value) else math.nan


def word(scene: Scene, row: np.void, name: str) -> str:
    """A text field of a row; "?" where it is not there."""
    return scene.text(row[name]) if name in (row.dtype.names or ()) else "?"
