"""All stalls of the span at once: when they were, how long they took, and what the time went into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opusmon.triage.severity import CRIT, NOTE, WARN
from opusmon.ui import units
from opusmon.ui.glyphs import Glyphs
from opusmon.ui.panes.base import Frame
from opusmon.ui.panes.history import Floats, Ints
from opusmon.ui.panes.stalls_state import Snapshot
from opusmon.ui.panes.stalls_words import (
    KINDS,
    MARKS,
    OTHER,
    PAGE_FAULTS,
    duration_cell,
    letter_of,
    severity_mark,
    whole,
)
from opusmon.ui.panes.streams_table import percent_words
from opusmon.ui.text import Line, fill, fit, pad
from opusmon.ui.widgets.chart import bar, strip

_MS = 1e6
EDGES_NS: tuple[float, ...] = tuple(ms * _MS for ms in (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000))
"""Lower ends of the bins of durations, but for the first bin, which begins at 0."""
LABELS: tuple[str, ...] = ("<5ms", "5ms", "10ms", "20ms", "50ms", "0.1s", "0.2s", "0.5s", "1s", "2s", "5s+")
RANGES: tuple[str, ...] = (
    *("<5 ms", "5-10 ms", "10-20 ms", "20-50 ms", "50-100 ms", "0.1-0.2 s", "0.2-0.5 s"),
    *("0.5-1 s", "1-2 s", "2-5 s", ">=5 s"),
)
UNSEEN = "+ waits under the threshold (5 ms) are not seen"
"""What no histogram of stalls can show: the first bin holds at least so many."""
LETTERS = "letters as in the list, capitals: critical"
_MOST = 2.0**62
_BIN_CELLS = 6
_GUTTER_CELLS = 11
STRIP_CELLS = _GUTTER_CELLS + _BIN_CELLS * len(LABELS)
HISTOGRAM_LINES = len(LABELS) + 2


@dataclass(frozen=True, slots=True)
class KindTotal:
    """What one kind of stall amounts to in the span.

    Attributes:
        place: of the kind in `KINDS`.
        count: how many, those folded into one row included.
        time_ns: their sum; page faults have none.
        longest_ns: the longest, as far as rows are single; NaN without any.
        level: the worst severity.
    """

    place: int
    count: int
    time_ns: float
    longest_ns: float
    level: int

    @property
    def short(self) -> str:
        """What the kind is called."""
        return KINDS[self.place].short if self.place < OTHER else "other"


def duration_counts(known: Snapshot) -> tuple[Ints, int]:
    """Stalls kept by duration, shape (len(LABELS),), and how many rows have none.

    A row that folds several counts as so many of their mean.
    """
    each_ns = known.each_ns[known.kept]
    lasted = ~np.isnan(each_ns)
    count = _counts(known)[lasted]
    bins = np.searchsorted(EDGES_NS, each_ns[lasted], side="right")
    found = np.bincount(bins, weights=count, minlength=len(LABELS))
    return np.minimum(found, _MOST).astype(np.int64), int(len(each_ns) - lasted.sum())


def _counts(known: Snapshot) -> Floats:
    """How many stalls each row kept stands for; page faults are not stalls."""
    count = known.rows["count"][known.kept]
    several = (count > 1) & (known.places[known.kept] != PAGE_FAULTS)
    return np.where(several, count, 1.0)


def kind_totals(known: Snapshot) -> list[KindTotal]:
    """Kinds kept, that with the most time first."""
    places = known.places[known.kept]
    if not len(places):
        return []
    order = np.argsort(places, kind="stable")
    lengths = np.bincount(places, minlength=OTHER + 1)
    found = np.flatnonzero(lengths)
    starts = np.cumsum(lengths[found]) - lengths[found]
    each_ns = known.each_ns[known.kept[order]]
    counts = _counts(known)[order]
    columns = (
        found,
        np.minimum(np.add.reduceat(counts, starts), _MOST).astype(np.int64),
        np.add.reduceat(np.nan_to_num(each_ns) * counts, starts),
        np.fmax.reduceat(each_ns, starts),
        np.maximum.reduceat(known.levels[known.kept[order]], starts),
    )
    totals = [KindTotal(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
    return sorted(totals, key=lambda total: (-total.time_ns, -total.count, total.place))


# -- in few lines ------------------------------------------------------------------------------------------------


def head_line(frame: Frame, known: Snapshot, filtered: str) -> list[Line]:
    """How many there are of each severity in the span, most important first, to be filled into a line."""
    counts = known.level_counts
    total = len(known.rows) + known.unread
    shown = len(known.kept)
    of = f"{shown} of {total}" if filtered or known.unread else f"{total}"
    word = "stall" if total == 1 else "stalls"
    parts: list[Line] = [((f"{of} {word} in {units.span(frame.span_ns)}", "label"),)]
    if not total:
        return parts
    if filtered:
        parts.insert(0, ((f"filter: {filtered}", "accent"),))
    for level, name in ((CRIT, "critical"), (WARN, "warning"), (NOTE, "note")):
        mark, style = severity_mark(level, frame.glyphs)
        parts.append(((f"{mark.strip()} {counts[level]} ", style if counts[level] else "dim"), (name, "dim")))
    folded = _counts(known).sum() - shown
    if folded > 0:
        parts.insert(1 + bool(filtered), ((f"{whole(folded)} more folded into them", "dim"),))
    if known.unread:
        parts.insert(1, ((f"only the newest {len(known.rows)} are read", "warn"),))
    return [*parts, ((LETTERS, "dim"),)]


def when_line(frame: Frame, known: Snapshot, width: int) -> Line:
    """The span as a row of `width` cells, oldest at the left: the letter of the worst stall that ended in each."""
    if width <= 0 or frame.span_ns <= 0:
        return ()
    t0 = frame.t - frame.span_ns
    columns = np.clip((known.rows["t"][known.kept] - t0 - 1) * width // frame.span_ns, 0, width - 1)
    kinds, base = OTHER + 1, OTHER
    code = known.levels[known.kept].astype(np.int64) * kinds + (base - known.places[known.kept]) + 1
    worst = np.zeros(width, dtype=np.int64)
    np.maximum.at(worst, columns, code)
    line: list[tuple[str, str]] = []
    for value in worst.tolist():
        level, place = divmod(value - 1, kinds)
        letter, style = (
            (letter_of(base - place, level), MARKS[level][1]) if value else (frame.glyphs.idle, "dim")
        )
        if line and line[-1][1] == style:
            line[-1] = (line[-1][0] + letter, style)
        else:
            line.append((letter, style))
    return tuple(line)


def histogram_strip(frame: Frame, known: Snapshot) -> list[Line]:
    """Two lines of `STRIP_CELLS` cells: the bins, and in each how many stalls took so long."""
    counts, unknown = duration_counts(known)
    top = int(counts.max())
    head = pad("", _GUTTER_CELLS) + "".join(label.rjust(_BIN_CELLS) for label in LABELS)
    row: list[tuple[str, str]] = [(pad(" durations", _GUTTER_CELLS), "label")]
    for place, count in enumerate(counts.tolist()):
        at_least = "+" if place == 0 else ""
        if not count:
            row.append((f"{frame.glyphs.idle}{at_least}".rjust(_BIN_CELLS), "dim"))
            continue
        number = f"{whole(count)}{at_least}"
        row.append((strip([count / top], frame.glyphs).rjust(_BIN_CELLS - len(number)), "series1"))
        row.append((number, "value"))
    if unknown:
        row.append((f"  {unknown} without one", "dim"))
    return [((head, "dim"),), tuple(row)]


def kinds_line(known: Snapshot, width: int) -> Line:
    """What the time went into, most first: `time 14.2 s: sync wait 71 %  off-cpu 20 %`."""
    totals = kind_totals(known)
    whole = sum(total.time_ns for total in totals)
    if not whole > 0:
        return ()
    parts: list[Line] = [((" time ", "label"), (units.duration(whole), "value"))]
    for total in totals:
        if total.time_ns > 0:
            share = percent_words(100 * total.time_ns / whole)
            parts.append(((f"{total.short} ", "label"), (share, "value")))
    return fill(parts, width)


# -- in many -----------------------------------------------------------------------------------------------------


def histogram_lines(frame: Frame, known: Snapshot, width: int) -> list[Line]:
    """A heading, a line for each range of durations with count, bar and share, and what is not in it."""
    counts, unknown = duration_counts(known)
    total = int(counts.sum())
    lines: list[Line] = [((f"{total} stalls by how long they took", "label"),)]
    room = min(max(width - 24, 0), 40)
    for label, count in zip(RANGES, counts.tolist(), strict=True):
        at_least = "+" if label == RANGES[0] else " "
        share = count / total if total else 0.0
        lines.append(
            (
                (label.rjust(9), "label"),
                (f"{units.number(count, 7)}{at_least}", "value" if count else "dim"),
                *bar(share, room, frame.glyphs, "series1"),
                (f" {units.percent(100 * share, 3)}", "value" if count else "dim"),
            )
        )
    missing = f"{unknown} without a duration; " if unknown else ""
    lines.append(((f"{missing}{UNSEEN}", "dim"),))
    return lines


def kind_lines(frame: Frame, known: Snapshot, width: int) -> list[Line]:
    """A heading, then a line for each kind: letter, name, count, time, share of it, longest."""
    totals = kind_totals(known)
    whole = sum(total.time_ns for total in totals)
    head = f"{'':2}{'KIND':<9} {'COUNT':>6} {'TIME':>8} {'SHARE':>6} {'LONGEST':>8}"
    lines: list[Line] = [((head, "label"), ("  threads add up", "dim"))]
    room = min(width - len(head) - 2, 20)
    return [*lines, *(_kind_line(total, whole, room, frame.glyphs) for total in totals)]


def _kind_line(total: KindTotal, whole_ns: float, room: int, glyphs: Glyphs) -> Line:
    share = total.time_ns / whole_ns if whole_ns > 0 else math.nan
    return (
        (f"{letter_of(total.place)} ", MARKS[total.level][1]),
        (pad(total.short, 9), "value"),
        (f" {units.number(total.count, 6)}", "value"),
        (f" {duration_cell(total.time_ns)}", "value"),
        (f" {percent_words(100 * share):>6}", "value"),
        (f" {duration_cell(total.longest_ns)}", "value"),
        ("  ", ""),
        *bar(share if share == share else 0.0, room, glyphs, "series1"),
    )


def beside(left: Sequence[Line], right: Sequence[Line], width: int) -> list[Line]:
    """Two columns, the left one `width` cells wide."""
    count = max(len(left), len(right))
    pairs = ((left[n] if n < len(left) else (), right[n] if n < len(right) else ()) for n in range(count))
    return [(*fit(one, width), *other) for one, other in pairs]
