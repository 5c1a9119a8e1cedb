"""Objectives and groups of the latency pane in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opusmon.clock import NS
from opusmon.slo import Burn, Check, enough
from opusmon.ui import units
from opusmon.ui.glyphs import Glyphs
from opusmon.ui.panes.latency_facts import Group
from opusmon.ui.panes.latency_numbers import Figures, count_words
from opusmon.ui.panes.latency_rows import ROUGH, quantile_words, share_words, volatility_words
from opusmon.ui.panes.latency_slo import Verdict
from opusmon.ui.panes.streams_table import number_style, short_duration
from opusmon.ui.text import Line, Span, abbreviated, fill, pad
from opusmon.ui.widgets.chart import bar

_STATES = {
    "page": ("!! page", "bad"),
    "ticket": ("! ticket", "warn"),
    "few": (f"{ROUGH} too few requests to say", "dim"),
    "ok": ("ok", "ok"),
    "unknown": ("no requests seen", "dim"),
}
_RANK = ("page", "ticket", "few", "ok", "unknown")


def worst_first(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Objectives in the order of what they need from a person, then by how fast they burn.

    Each comes by its worst source first, then once more by the others.
    """
    ordered = sorted(verdicts, key=_need)
    first = list({verdict.slo.text: verdict for verdict in reversed(ordered)}.values())[::-1]
    first.sort(key=_need)
    return [*first, *(verdict for verdict in ordered if verdict not in first)]


def _need(verdict: Verdict) -> tuple[int, float]:
    check = shown_check(verdict)
    low = check.long.low if check is not None else verdict.evaluation.seen.low
    return _RANK.index(verdict.evaluation.state), -low if low == low else 0.0


def _state_words(verdict: Verdict) -> Span:
    """The state; a budget that burns too fast and no alert yet is no "ok"."""
    found = verdict.evaluation
    check = shown_check(verdict)
    seen = check.long if check is not None else found.seen
    if found.state in ("ok", "unknown") and seen.low > 1 and enough(verdict.slo, seen):
        return ("! burning", "warn")
    return _STATES[found.state if check is not None or seen.low != seen.low else "ok"]


def slo_line(verdict: Verdict, width: int) -> Line:
    """`SLO ttft_p95<800ms by proxy  !! page  burn 6.2x/1h 14.9x/5m  budget left 71 % of 1d, 3h seen`."""
    parts: list[Line] = [
        ((f"SLO {verdict.slo.text} ", "title"), (f"by {verdict.block.source}", "dim")),
        (_state_words(verdict),),
        *_burns(verdict),
        _budget(verdict),
    ]
    if verdict.bracket_ns is not None:
        low, high = (short_duration(edge) for edge in verdict.bracket_ns)
        parts.append(((f"limit is inside the bucket {low} to {high}", "dim"),))
    return ((" ", ""), *fill([part for part in parts if part], width - 1))


def shown_check(verdict: Verdict) -> Check | None:
    """The rule to show: the worst one, the shortest windows first."""
    checks = verdict.evaluation.checks
    return min(checks, key=lambda check: _RANK.index(check.state), default=None)


def _burns(verdict: Verdict) -> list[Line]:
    check = shown_check(verdict)
    windows = [check.long, check.short] if check is not None else [verdict.evaluation.seen]
    known = [window for window in windows if window.low == window.low]
    if len(known) > 1 and known[0].covered_ns <= 1.1 * known[1].window_ns:
        known = known[1:]  # nothing is older than the short window: they are the same
    if not known:
        return []
    words = " ".join(f"{burn_words(window)}/{_window_words(window)}" for window in known)
    return [(("burn ", "label"), (words, "value"))]


def burn_words(given: Burn) -> str:
    """`6.2x`, or `6.2-8x` where the limit lies between bucket edges."""
    low, high = _times(given.low), _times(given.high)
    return f"{low}x" if low == high else f"{low}-{high}x"


def _times(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0") if value < 99.95 else f"{value:.0f}"


def _window_words(given: Burn) -> str:
    whole = units.span(given.window_ns)
    if given.covered_ns >= 0.9 * given.window_ns:
        return whole
    unit = 60 * NS if given.covered_ns >= 60 * NS else NS
    return units.span(max(given.covered_ns // unit * unit, NS))


def _budget(verdict: Verdict) -> Line:
    low, high = (100 * value for value in verdict.evaluation.left)
    if low != low:
        return ()
    least, most = (share_words(value) if value >= 0 else f"{value:.0f} %" for value in (low, high))
    words = least if least == most else f"{least} to {most}"
    seen = _window_words(verdict.evaluation.seen)
    return (
        ("budget left ", "label"),
        (words, "bad" if high <= 0 else "value"),
        (f" of {units.span(verdict.slo.period_ns)}, {seen} seen", "dim"),
    )


# -- groups ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _GroupCells:
    name: int = 16
    value: int = 9
    count: int = 6
    volatility: int = 9


_GROUP = _GroupCells()
GROUP_CELLS = _GROUP.name + 2 * _GROUP.value + _GROUP.count + _GROUP.volatility + 2
_BAR_FULL_PCT = 400.0


def group_line(title: str, found: Sequence[Group], width: int) -> Line:
    """`p95 over mean, TTFT by input tokens  <1k +85 %  1-4k ~+120 %`."""
    parts: list[Line] = [((f"p95 over mean, {title}", "label"),)]
    parts += [
        ((f"{group.name} ", "label"), (volatility_words(group.figures), _rough_style(group.figures)))
        for group in found
    ]
    return ((" ", ""), *fill(parts, width - 1))


def group_lines(given: Mapping[str, Sequence[Group]], width: int, height: int, glyphs: Glyphs) -> list[Line]:
    """A table for each way of grouping: number, mean, p95, and how far the one is over the other."""
    lines: list[Line] = []
    for title, found in given.items():
        if len(lines) + 2 > height:
            break
        lines.append(_group_head(title))
        room = height - len(lines)
        lines += [_group_row(group, width, glyphs) for group in found[:room]]
    return lines[:height]


def _group_head(title: str) -> Line:
    words = (
        title.ljust(_GROUP.name + _GROUP.count)
        + "mean".rjust(_GROUP.value - 1)
        + "p95".rjust(_GROUP.value)
        + "p95/mean".rjust(_GROUP.volatility + 1)
    )
    return ((words, "label"),)


def _group_row(group: Group, width: int, glyphs: Glyphs) -> Line:
    figures = group.figures
    style = _rough_style(figures)
    rough = figures.is_rough(0.95)
    name = abbreviated(group.name, _GROUP.name)
    room = min(width - GROUP_CELLS, 24)
    value = figures.volatility_pct
    drawn = (
        bar(value / _BAR_FULL_PCT, room, glyphs, "series1")
        if value == value and room > 3 and not rough
        else ()
    )
    return (
        (pad(name, _GROUP.name), "value"),
        (count_words(group.n).rjust(_GROUP.count), "dim"),
        (short_duration(figures.mean_ns).rjust(_GROUP.value), number_style(figures.mean_ns)),
        (quantile_words(figures.p95, rough=rough).rjust(_GROUP.value), style),
        (volatility_words(figures).rjust(_GROUP.volatility), style),
        (" ", ""),
        *drawn,
    )


def _rough_style(figures: Figures) -> str:
    return "dim" if figures.is_rough(0.95) or not figures.n else "value"
