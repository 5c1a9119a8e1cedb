"""The latency pane: what requests take, by engine, proxy, canary and telemetry, each on its own.

Sources are never mixed into one number: every block of figures names its source and where its clocks start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from opusmon.collectors import shows
from opusmon.slo import Slo, problems
from opusmon.ui import units
from opusmon.ui.panes.base import Frame, Size, first_shown
from opusmon.ui.panes.gpu_process import more_line
from opusmon.ui.panes.gpu_rows import settle
from opusmon.ui.panes.latency_facts import FINE, Group, groups
from opusmon.ui.panes.latency_heat import MIN_LINES, heat_field, heat_lines
from opusmon.ui.panes.latency_list import SORTS, list_lines
from opusmon.ui.panes.latency_numbers import Block, count_words
from opusmon.ui.panes.latency_read import REMEDIES
from opusmon.ui.panes.latency_request import request_lines
from opusmon.ui.panes.latency_rows import (
    WAITING_HIGH,
    block_lines,
    facts_line,
    head_line,
    quantile_words,
    share_words,
)
from opusmon.ui.panes.latency_state import Snapshot, absent, snapshot
from opusmon.ui.panes.latency_words import (
    GROUP_CELLS,
    burn_words,
    group_line,
    group_lines,
    shown_check,
    slo_line,
    worst_first,
)
from opusmon.ui.panes.statuses import WRONG_RANK, Status, trouble_line, troubles
from opusmon.ui.panes.waiting import NO_DATA
from opusmon.ui.text import Line, clean, fill, fit, fit_lines, line_cells, wrapped

LEVELS = ((0, 0), (1, 1), (1, 2), (1, 3), (2, 3), (3, 3))
"""How much of the first source is shown, and of the others, until there is room for the rest; see `chosen_metrics`."""
BESIDE_CELLS = GROUP_CELLS + 82
"""From this width on the groups stand beside the numbers."""
TALL_LINES = 30
"""From this height on a maximized pane has room for everything."""
LIST_LINES, REQUEST_LINES, GROUP_LINES = 3, 9, 12
BESIDE_LINES = 12
"""A request's clocks, what a GPU and the stalls did meanwhile, and its main numbers."""
MAX_HEAT_LINES = 16
MAX_REASONS = 6
GOOD_MAP_LINES = 5
"""A map with less is coarse: what matters less than it waits for more room."""
_INDENT = "  "
_QUIET = 9
"""Rank of what nobody wanted to run: behind all that is missing."""


class LatencyPane:
    """The pane itself; it keeps nothing between frames."""

    name: ClassVar[str] = "latency"
    number: ClassVar[int] = 1
    channel: ClassVar[str] = "request"
    sorts: ClassVar[tuple[str, ...]] = SORTS

    def title(self, frame: Frame) -> str:
        """`1 latency  vllm :8000 1 s | proxy`; the age of an engine is added when scrapes fail to come."""
        known = snapshot(frame)
        if known.is_empty:
            running = any(status.is_whole and status.is_ok for status in known.statuses)
            return f"{self.number} {self.name}  {'nothing yet' if running else 'off'}"
        names = list(dict.fromkeys(_source_words(block) for block in known.blocks)) or ["in flight"]
        return f"{self.number} {self.name}  {' | '.join(names)}"

    def render(self, frame: Frame) -> list[Line]:
        """Exactly `size.height` lines of exactly `size.width` cells."""
        width, height = frame.size.width, frame.size.height
        if width <= 0 or height <= 0:
            return fit_lines((), width, height)
        known = snapshot(frame)
        if known.is_empty:
            return fit_lines(_off_lines(known, width), width, height)
        notes = _notes(known) if height > 4 else []
        room = height - bool(notes)
        body = [settle(line, width) for line in _body(frame, known, room)[:room]]
        foot = [settle(line, width) for line in _foot(notes, width, height - len(body))]
        return [*body, *[settle((), width)] * (height - len(body) - len(foot)), *foot]

    def summary(self, frame: Frame) -> Line:
        """The worst number first: a burning objective, then TTFT or E2E, then the queue and the errors."""
        width = frame.size.width
        known = snapshot(frame)
        head: Line = ((f"{self.number} {self.name}  ", "title"),)
        if known.is_empty:
            sources = sorted(absent(known), key=lambda source: source.is_unasked)
            words = "; ".join(f"{source.name}: {source.reason}" for source in sources if source.reason)
            return fit((*head, (words or NO_DATA, "dim")), width)
        return fit((*head, *fill(_summary(known), width - line_cells(head))), width)

    def items(self, frame: Frame) -> int:
        """Requests of the list."""
        return len(snapshot(frame).slowest)


def _source_words(block: Block) -> str:
    if block.source != "engine":
        return block.source
    age = f" stale {block.age_ns / 1e9:.0f} s" if block.stale else ""
    interval = units.duration(float(f"{block.interval_ns:.1e}"))
    return f"{block.title} {interval}{age}"


# -- nothing to show ---------------------------------------------------------------------------------------------


def _off_lines(known: Snapshot, width: int) -> list[Line]:
    """Each source with its reason and the command that enables it, then what would be here."""
    said = sorted(
        filter(_tells, known.statuses),
        key=lambda one: (one.is_unasked, one.is_ok, one.rank, not one.is_whole),
    )
    silent = [source for source in absent(known) if source.name not in {status.collector for status in said}]
    lines: list[Line] = [(("No latency has been measured at this time.", "value"),), ()]
    for status in said[:MAX_REASONS]:
        name = f"{status.collector} {status.scope}".strip()
        words = status.reason or ("runs, and has seen nothing yet" if status.state == "ok" else status.state)
        enable = REMEDIES.get(status.collector, "") if status.is_whole and not status.is_ok else ""
        remedy = status.remedy or enable
        lines += wrapped(f"{name}: {words}", width, "", "label")
        lines += wrapped(remedy, width, _INDENT, "accent")
    if silent:
        lines += wrapped(f"Not in this session: {', '.join(s.name for s in silent)}", width, "", "label")
    for source in silent:
        lines += wrapped(source.remedy, width, _INDENT, "accent")
    lines += [(), (("It would show:", "label"),)]
    for words in shows.LATENCY:
        lines += wrapped(words, width, _INDENT, "dim")
    return lines


def _tells(status: Status) -> bool:
    """Whether it helps where nothing was measured: what single figures of a request lack does not."""
    return status.collector != "slo" and not (status.field and status.rank > WRONG_RANK)


# -- one line ----------------------------------------------------------------------------------------------------


def _summary(known: Snapshot) -> list[Line]:
    parts: list[Line] = []
    worst = worst_first(known.verdicts)
    if worst and worst[0].evaluation.state in ("page", "ticket"):
        check = shown_check(worst[0])
        burn = burn_words(check.short) if check is not None else ""
        parts.append((("!! ", "bad"), (f"SLO {worst[0].slo.text} burn {burn}", "bad")))
    parts += [_worst_latency(known), *_engine_alarms(known), *_request_alarms(known)]
    if not parts[-1:] or not any(parts):
        parts.append((("no request in the span", "dim"),))
    return [part for part in parts if part]


def _worst_latency(known: Snapshot) -> Line:
    """The p95 of the first latency of the most important source, now or else over the span."""
    for block in known.blocks:
        for metric in block.metrics:
            figures, words = (metric.now, "") if metric.now.n else (metric.span, " over the span")
            given = figures.p95
            if given.kind == "none":
                continue
            rough = figures.is_rough(0.95)
            over = not rough and known.is_over(block, metric.field, 0.95, given.value)
            value = f"{quantile_words(given, rough=rough)}{' !' if over else ''}{words}"
            style = "bad" if over else "dim" if rough else "value"
            return ((f"{block.source} {metric.name} p95 ", "label"), (value, style))
    return ()


def _engine_alarms(known: Snapshot) -> list[Line]:
    parts: list[Line] = []
    for engine in known.engines.values():
        waiting = engine.row["waiting"]
        if waiting == waiting:
            mark, style = (" !", "warn") if waiting >= WAITING_HIGH else ("", "value")
            parts.append((("waiting ", "label"), (f"{count_words(waiting)}{mark}", style)))
        break
    return parts


def _request_alarms(known: Snapshot) -> list[Line]:
    parts: list[Line] = []
    for facts in list(known.facts.values())[:1]:
        bad = [(word, share) for word, share in facts.outcomes if word not in FINE]
        parts += [((f"{word} ", "label"), (f"{share_words(share)} !", "warn")) for word, share in bad[:3]]
    return parts


# -- the pane's parts --------------------------------------------------------------------------------------------


def _body(frame: Frame, known: Snapshot, height: int) -> list[Line]:
    numbers = _numbers(frame, known, height)
    room = height - len(numbers)
    opened = frame.state.detail or frame.state.maximized
    request = _request(frame, known, _request_height(frame, known, height, room)) if opened else []
    table = _groups(frame, known, room - len(request))
    room -= len(request) + len(table)
    low = opened and height < TALL_LINES
    listed = room if low else _list_height(known, room)
    most = MAX_HEAT_LINES * (2 if not listed or height > 2 * TALL_LINES else 1)
    heat = _heat(frame, known, min(room - listed, most))
    return [*numbers, *table, *heat, *_list(frame, known, room - len(heat)), *request]


def _numbers(frame: Frame, known: Snapshot, height: int) -> list[Line]:
    """Figures of all sources, in a wide pane with the groups beside them; in a low one fewer of them."""
    width = frame.size.width
    if width < BESIDE_CELLS:
        return _figures(frame, known, height)
    left = width - GROUP_CELLS - 2
    numbers = _figures(replace(frame, size=Size(left, frame.size.height)), known, height)
    beside = group_lines(_grouped(frame, known), GROUP_CELLS, len(numbers), frame.glyphs)
    beside += [()] * (len(numbers) - len(beside))
    return [(*fit(line, left + 1), *other) for line, other in zip(numbers, beside, strict=True)]


def _figures(frame: Frame, known: Snapshot, height: int) -> list[Line]:
    lines: list[Line] = []
    low = height < TALL_LINES and (frame.state.detail or frame.state.maximized)
    most = 1 if low else max(height // 7, 1)
    spare = LIST_LINES + (REQUEST_LINES if low else MIN_LINES + 1)
    for levels in LEVELS:
        lines = _figures_at(frame, known, levels, height, most)
        if height - len(lines) >= spare:
            break
    return lines


def _figures_at(frame: Frame, known: Snapshot, levels: tuple[int, int], height: int, most: int) -> list[Line]:
    lines: list[Line] = [head_line(frame, frame.span_ns)] if known.blocks else []
    for place, block in enumerate(known.blocks[:most]):
        lines += block_lines(frame, known, block, levels[min(place, 1)])
        facts = facts_line(frame, known, block)
        lines += [facts] if facts else []
    hidden = len(known.blocks) - most
    if hidden > 0 and most > 1:
        lines.append(((f" +{hidden} more sources: a taller pane shows them", "dim"),))
    slos = worst_first(known.verdicts)
    room = 1 if levels[0] > 1 or most == 1 else max(height // 10, 1)
    return [*lines, *(slo_line(verdict, frame.size.width) for verdict in slos[:room])]


def _grouped(frame: Frame, known: Snapshot, *, by_text: bool = True) -> Mapping[str, Sequence[Group]]:
    block = next((block for block in known.blocks if block.start_id is not None), None)
    if block is None or block.start_id is None:
        return {}
    return groups(frame, known.requests, block.start_id, by_text=by_text)


def _groups(frame: Frame, known: Snapshot, room: int) -> list[Line]:
    """Volatility by size and label under the numbers: as tables where there is room, else in a line."""
    width = frame.size.width
    if width >= BESIDE_CELLS or room <= LIST_LINES + GOOD_MAP_LINES:
        return []
    tables = frame.state.maximized and room >= 2 * GROUP_LINES + LIST_LINES + MIN_LINES
    found = _grouped(frame, known, by_text=tables)
    if tables:
        return [((" ", ""), *line) for line in group_lines(found, width - 2, GROUP_LINES, frame.glyphs)]
    return [group_line(title, items, width) for title, items in list(found.items())[:1]]


def _list_height(known: Snapshot, room: int) -> int:
    """Lines of the list: what it needs, at most a good part of the room where the map needs some."""
    wanted = len(known.slowest) + 1 if len(known.slowest) else 0
    has_map = any(heat_field(block) for block in known.blocks)
    if not has_map or not wanted:
        return min(wanted, room)
    if room < LIST_LINES + MIN_LINES + 1:
        return 0 if room >= MIN_LINES + 1 else room
    return min(wanted, max(LIST_LINES, room * 2 // 5))


def _heat(frame: Frame, known: Snapshot, height: int) -> list[Line]:
    """The map of the first source that has one."""
    block = next((block for block in known.blocks if heat_field(block)), None)
    if block is None:
        return []
    limits = known.limits_ns(heat_field(block))
    return heat_lines(frame, block, known.requests, known.buckets, height, limits)


def _chosen(frame: Frame, known: Snapshot) -> int:
    return min(max(frame.state.selected, 0), len(known.slowest) - 1)


def _list(frame: Frame, known: Snapshot, room: int) -> list[Line]:
    """As many of the slowest requests as have room, and a line for the others."""
    count = len(known.slowest)
    if room < 2:
        return []
    wanted = clean(frame.state.filter)
    if not count:
        words = f'no request matches "{wanted}"' if wanted else "no request in the span"
        return [((f" {words}", "dim"),)] if known.facts or wanted else []
    note = ((f' filter "{wanted}": {len(known.requests.rows)} of {known.requests.total} requests', "accent"),)
    head: list[Line] = [note] if wanted and room > LIST_LINES else []
    room -= len(head) + 1
    shown = room - 1 if count > room > 2 else room
    chosen = _chosen(frame, known)
    first = first_shown(chosen, frame.state.scroll, count, shown)
    lines = [*head, *list_lines(frame, known.slowest, first, shown, chosen)]
    below = count - first - shown
    return [*lines, more_line(first, below)] if shown < room else lines


def _request_height(frame: Frame, known: Snapshot, height: int, room: int) -> int:
    """Lines of the selected request: all it can use when asked for, else what the others leave."""
    if not len(known.slowest) or room <= 0:
        return 0
    if frame.state.detail:
        return max(room - LIST_LINES, min(room, REQUEST_LINES))
    if height < TALL_LINES:
        return max(min(room - LIST_LINES, REQUEST_LINES + 6), 0)
    return max(min(room * 2 // 5, 22), min(room // 2, BESIDE_LINES), min(room, REQUEST_LINES))


def _request(frame: Frame, known: Snapshot, room: int) -> list[Line]:
    if room <= 0 or not len(known.slowest):
        return []
    return request_lines(frame, known.slowest.entry(_chosen(frame, known)), room)


Note = tuple[int, str, str]
"""Rank, what is missing and why, and what mends it."""


def _notes(known: Snapshot) -> list[Note]:
    """What is missing, what matters most first: sources that should run and do not, then what others lack."""
    silent = [source for source in absent(known) if source.reason]
    notes = [
        (_QUIET if source.is_unasked else 0, f"{source.name}: {source.reason}", source.remedy)
        for source in silent
    ]
    present = {block.source for block in known.blocks}
    for status in troubles(known.statuses):
        if status.collector == "slo" or (status.is_whole and status.collector not in present):
            continue
        where = " ".join(word for word in (status.collector, status.scope, status.field) if word)
        notes.append((status.rank, f"{where}: {status.why}", status.remedy))
    notes += [(WRONG_RANK, words, "") for words in known.wrong_slos]
    notes += [(WRONG_RANK + 1, words, "") for v in _once(known) for words in problems(v)]
    return sorted(notes, key=lambda note: note[0])


def _foot(notes: Sequence[Note], width: int, room: int) -> list[Line]:
    """A line for each, as far as there is room; the last one says how many more there are."""
    lines: list[Line] = []
    for rank, words, remedy in notes[:room]:
        others = len(notes) - room if len(lines) == room - 1 else 0
        line = trouble_line(words, remedy, max(others, 0), width - 1, is_wrong=rank <= WRONG_RANK)
        lines.append(fit(((" ", ""), *line), width))
    return lines


def _once(known: Snapshot) -> Sequence[Slo]:
    """The objectives, each once."""
    return list({verdict.slo.text: verdict.slo for verdict in known.verdicts}.values())
