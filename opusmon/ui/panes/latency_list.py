"""The slowest requests, those in flight among them: which come first, and what took their time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from opusmon.request_rows import positive
from opusmon.schema import Rows
from opusmon.ui import units
from opusmon.ui.glyphs import Glyphs
from opusmon.ui.panes.base import Frame
from opusmon.ui.panes.latency_numbers import count_words
from opusmon.ui.panes.latency_read import Floats, Requests, outcome_word, since
from opusmon.ui.panes.streams_table import number_style, short_duration
from opusmon.ui.text import Align, Line, abbreviated, clean, columns

SORTS = ("e2e", "ttft", "tpot", "newest", "input", "output")
IN_FLIGHT = "+"
"""Behind a time that still grows."""
PHASE_SHADES = (2, 4, 7)
"""Ink of the three parts of a bar, of `Glyphs.shades`."""
PHASE_STYLES = ("series1", "series3", "series0")
PHASE_NAMES = ("headers", "first token", "answer")
_FINE = frozenset({"ok", "sending", "waiting", "thinking", "answering", "ending"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One request of the list.

    Attributes:
        source: text id of who saw it.
        number: of the request in the session and source.
        row: its `request` row; None while it is in flight.
        open: its `request_open` row; None when it has ended.
        age_ns: from its start to its end, or to the playhead.
    """

    source: int
    number: int
    row: Rows | None
    open: Rows | None
    age_ns: float

    @property
    def in_flight(self) -> bool:
        """It has not ended."""
        return self.open is not None

    def get(self, name: str) -> float:
        """A number of its row; NaN where it has none."""
        given = self.row if self.row is not None else self.open
        if given is None or name not in (given.dtype.names or ()):
            return math.nan
        value = float(given[name][0])
        return value if math.isfinite(value) else math.nan

    def text(self, frame: Frame, name: str) -> str:
        """A text of its row, cleaned; "" where it has none."""
        value = self.get(name)
        return clean(frame.view.strings.text(int(value))) if value == value else ""

    @property
    def phases(self) -> tuple[float, float, float]:
        """Time (ns) to the headers, from there to the first token, and the rest; NaN where it is not known."""
        headers, first = self.get("headers_ns"), self.get("ttft_ns")
        if self.in_flight and first != first:
            return self.age_ns, 0.0, 0.0
        rest = self.age_ns - (first if first == first else headers)
        return headers, first - headers if headers == headers else first, rest


@dataclass(frozen=True, slots=True, eq=False)
class Slowest:
    """All requests in the order of the list; they become entries when they are drawn.

    Attributes:
        ended: rows that ended.
        open: rows in flight.
        order: places, in `ended` first, then in `open`.
        t: the playhead.
    """

    ended: Rows
    open: Rows
    order: np.ndarray[tuple[int], np.dtype[np.int64]]
    t: int

    def __len__(self) -> int:
        return len(self.order)

    def entry(self, place: int) -> Entry:
        """The request at a place of the list."""
        index = int(self.order[place])
        if index < len(self.ended):
            row = self.ended[index : index + 1]
            took_ns = float(positive(row["e2e_ns"])[0])
            return Entry(int(row["source"][0]), int(row["number"][0]), row, None, took_ns)
        row = self.open[index - len(self.ended) :][:1]
        age_ns = float(positive(row["age_ns"])[0]) + self.t - int(row["t"][0])
        return Entry(int(row["source"][0]), int(row["number"][0]), None, row, age_ns)


def slowest(frame: Frame, requests: Requests, in_flight: Rows) -> Slowest:
    """Requests of the span and in flight, in the order that the reader chose."""
    ended = since(requests.rows, frame.t - frame.span_ns)
    sort = frame.state.sort if frame.state.sort in SORTS else SORTS[0]
    keys = np.concatenate([_keys(sort, ended, None), _keys(sort, in_flight, frame.t)])
    order = np.argsort(-np.where(np.isfinite(keys), keys, -1.0), kind="stable")
    return Slowest(ended, in_flight, order, frame.t)


def _keys(sort: str, rows: Rows, t: int | None) -> Floats:
    """What is sorted by, the largest first. An age that grows counts as what it will be at least."""
    n = len(rows)
    if not n:
        return np.empty(0)
    if sort == "newest":
        return rows["t"].astype(np.float64) if t is None else np.full(n, float(t))
    if t is None:
        field = {"input": "input_tokens", "output": "output_tokens"}.get(sort, f"{sort}_ns")
        return rows[field].astype(np.float64)
    age = rows["age_ns"] + (t - rows["t"])
    if sort == "e2e":
        return np.asarray(age, dtype=np.float64)
    return np.where(np.isnan(rows["ttft_ns"]), age, rows["ttft_ns"]) if sort == "ttft" else np.full(n, np.nan)


# -- drawing -----------------------------------------------------------------------------------------------------

Cell = Callable[[Frame, Entry, int, float], Line]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the list.

    Attributes:
        title: heading.
        width: cells.
        rank: the lower, the earlier it gets room.
        cell: draws it, given its width and the longest time in sight (ns).
        align: of heading and cell.
        grow: most cells when there is room to spare.
        sort: the order it shows.
    """

    title: str
    width: int
    rank: int
    cell: Cell
    align: Align = ">"
    grow: int = 0
    sort: str = ""


def _time(field: str) -> Cell:
    def cell(frame: Frame, entry: Entry, width: int, longest: float) -> Line:
        del frame, width, longest
        value = entry.get(field)
        return ((short_duration(value), number_style(value)),)

    return cell


def _count(field: str) -> Cell:
    def cell(frame: Frame, entry: Entry, width: int, longest: float) -> Line:
        del frame, width, longest
        value = entry.get(field)
        return ((count_words(value), number_style(value)),)

    return cell


def _age_cell(frame: Frame, entry: Entry, width: int, longest: float) -> Line:
    del frame, width, longest
    mark = IN_FLIGHT if entry.in_flight else " "
    return ((f"{short_duration(entry.age_ns)}{mark}", "accent" if entry.in_flight else "value"),)


def _text_cell(field: str) -> Cell:
    def cell(frame: Frame, entry: Entry, width: int, longest: float) -> Line:
        del longest
        return ((abbreviated(entry.text(frame, field), width), "label"),)

    return cell


def _outcome_cell(frame: Frame, entry: Entry, width: int, longest: float) -> Line:
    del longest
    word = outcome_of(frame, entry)
    style = "accent" if entry.in_flight else "dim" if word in _FINE else "warn"
    mark = "" if word in _FINE else "! "
    return ((abbreviated(f"{mark}{word}", width), style),)


def outcome_of(frame: Frame, entry: Entry) -> str:
    """How a request ended, or what it is doing."""
    if entry.in_flight:
        return entry.text(frame, "phase") or "in flight"
    return outcome_word(frame.view, int(entry.get("outcome")), entry.get("status"))


def _ago_cell(frame: Frame, entry: Entry, width: int, longest: float) -> Line:
    del width, longest
    return ((short_duration(frame.t - entry.get("t")) if not entry.in_flight else "now", "dim"),)


def _bar_cell(frame: Frame, entry: Entry, width: int, longest: float) -> Line:
    return phase_bar(entry, width, longest, frame.glyphs)


def phase_bar(entry: Entry, width: int, longest_ns: float, glyphs: Glyphs) -> Line:
    """Time to the headers, to the first token and of the answer, by ink and colour; `longest_ns` fills the bar."""
    if not (entry.age_ns > 0 and longest_ns > 0):
        return ()
    known = [part if part == part and part > 0 else 0.0 for part in entry.phases]
    total = min(max(round(width * entry.age_ns / longest_ns), 1), width)
    ends = [round(total * min(sum(known[: n + 1]) / entry.age_ns, 1.0)) for n in range(3)]
    ends[-1] = total
    begins = [0, *ends[:-1]]
    return tuple(
        (glyphs.shades[shade] * (end - begin), style)
        for begin, end, shade, style in zip(begins, ends, PHASE_SHADES, PHASE_STYLES, strict=True)
        if end > begin
    )


COLUMNS: tuple[Column, ...] = (
    Column("E2E", 8, 0, _age_cell, sort="e2e"),
    Column("TTFT", 7, 1, _time("ttft_ns"), sort="ttft"),
    Column("TPOT", 7, 5, _time("tpot_ns"), sort="tpot"),
    Column("", 12, 3, _bar_cell, "<", 60),
    Column("IN", 5, 4, _count("input_tokens"), sort="input"),
    Column("OUT", 5, 6, _count("output_tokens"), sort="output"),
    Column("OUTCOME", 11, 2, _outcome_cell, "<", 16),
    Column("MODEL", 12, 7, _text_cell("model"), "<", 28),
    Column("LABEL", 8, 8, _text_cell("label"), "<", 16),
    Column("ENDED", 6, 9, _ago_cell, sort="newest"),
    Column("SOURCE", 6, 10, _text_cell("source"), "<"),
    Column("ID", 12, 11, _text_cell("id"), "<", 28),
)
Plan = Sequence[tuple[Column, int]]


def layout(width: int) -> Plan:
    """The columns that fit, and their cells; what is left goes to those that grow, in the order of their rank."""
    kept: list[Column] = []
    left = width - 1
    for column in sorted(COLUMNS, key=lambda item: item.rank):
        if column.width + 1 <= left:
            kept.append(column)
            left -= column.width + 1
    widths = {column.rank: column.width for column in kept}
    for column in kept:
        more = min(max(column.grow - column.width, 0), left)
        widths[column.rank] += more
        left -= more
    return [(column, widths[column.rank]) for column in COLUMNS if column.rank in widths]


def list_lines(frame: Frame, found: Slowest, first: int, count: int, chosen: int) -> list[Line]:
    """A heading and `count` requests from place `first` on."""
    plan = layout(frame.size.width)
    entries = [found.entry(place) for place in range(first, min(first + count, len(found)))]
    longest = max((entry.age_ns for entry in entries if entry.age_ns == entry.age_ns), default=0.0)
    lines = [_head(frame, plan)]
    for place, entry in enumerate(entries, first):
        row = [(column.cell(frame, entry, width, longest), width, column.align) for column, width in plan]
        mark = frame.glyphs.select if place == chosen else " "
        lines.append(((mark, "select" if place == chosen else ""), *columns(row)))
    return lines


def _head(frame: Frame, plan: Plan) -> Line:
    sort = frame.state.sort if frame.state.sort in SORTS else SORTS[0]
    row: list[tuple[Line, int, Align]] = []
    for column, width in plan:
        is_order = column.sort == sort
        title: Line = ((column.title + "*" * is_order, "accent" if is_order else "label"),)
        row.append((title if column.title else _legend(width, frame.glyphs), width, column.align))
    return ((" ", ""), *columns(row))


def _legend(width: int, glyphs: Glyphs) -> Line:
    """What the parts of a bar are, as far as there is room."""
    spans: list[tuple[str, str]] = []
    left = width
    for name, shade, style in zip(PHASE_NAMES, PHASE_SHADES, PHASE_STYLES, strict=True):
        if len(name) + 3 > left:
            break
        spans += [(glyphs.shades[shade], style), (f" {name} ", "label")]
        left -= len(name) + 3
    return tuple(spans)


def tokens_words(entry: Entry) -> str:
    """`in 12k out 512`: what went in and came out."""
    return f"in {count_words(entry.get('input_tokens'))} out {count_words(entry.get('output_tokens'))}"


def share_words(part: float, whole: float) -> str:
    """A share in words; "--" where either is not known."""
    return units.percent(100 * part / whole, 0) if whole > 0 and part == part else units.MISSING
