"""What is missing at an instant, and why: all that the foot of a pane has room for only one of. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from opusmon.channels import GPU, L2
from opusmon.clock import Anchors
from opusmon.slo import COLLECTOR as SLO
from opusmon.slo import objectives, problems
from opusmon.times import format_wall
from opusmon.ui.panes.base import View
from opusmon.ui.panes.gpu_deep import NOTE as DEEP_NOTE
from opusmon.ui.panes.statuses import STATUS_LOOKBACK_NS, Status, read_statuses, troubles
from opusmon.ui.text import Line, hanging

NOTHING = "nothing is said to be missing at this time"
_WHO_CELLS = 9
_BROKEN = ("error", "restarting", "no_permission", "stale")
"""States that need a look; the others are limits, or what was not asked for."""


def missing_lines(view: View, anchors: Anchors, t: int, width: int) -> list[Line]:
    """Every reason in force at the playhead, one paragraph each: what is broken first, what does not run last.

    Args:
        view: what was measured.
        anchors: of the session.
        t: the playhead, monotonic ns.
        width: cells there are.
    """
    said = read_statuses(view, t)
    found = [one for one in (*troubles(said), *_not_asked(view, t, said)) if one.collector != SLO]
    lines: list[Line] = []
    for same in _alike(found):
        lines.extend(_paragraph(same, width))
    for words in _slo_problems(said):
        lines.extend(hanging(((f"! {SLO:<{_WHO_CELLS}}", "warn"),), words, "value", width))
    if not lines:
        return [((NOTHING, "dim"),)]
    when = f"at {format_wall(anchors, t)}; collectors say what holds again every minute"
    return [((when, "dim"),), *lines]


def _not_asked(view: View, t: int, said: tuple[Status, ...]) -> list[Status]:
    """L2 where nothing was said of it: nobody asked for it."""
    if any(one.collector == L2.name for one in said) or len(view.latest(L2.name, t, STATUS_LOOKBACK_NS)):
        return []
    if not len(view.latest(GPU.name, t, STATUS_LOOKBACK_NS)):
        return []
    return [Status(L2.name, "", "", "", "unavailable", DEEP_NOTE.removeprefix("L2: "), "")]


def _alike(found: list[Status]) -> list[list[Status]]:
    """Those with one reason together: a GPU that lacks ten fields for one reason is one paragraph."""
    groups: dict[tuple[str, ...], list[Status]] = {}
    for one in sorted(found, key=_place):
        groups.setdefault((one.state, one.why, one.remedy), []).append(one)
    return list(groups.values())


def _place(one: Status) -> tuple[bool, bool]:
    """A collector that broke comes before values that are kept from us, one that does not run after all limits."""
    is_limit = one.state not in _BROKEN
    return is_limit, one.is_whole == is_limit


def _paragraph(same: list[Status], width: int) -> Iterator[Line]:
    first = same[0]
    is_broken = first.state in _BROKEN
    sign, style = ("!", "warn") if is_broken else (" ", "label")
    collectors = list(dict.fromkeys(one.collector for one in same))
    who = first.collector if len(collectors) == 1 else "several"
    head: Line = ((f"{sign} {who:<{_WHO_CELLS}}", style),)
    yield from hanging(head, f"{first.why} ({first.state.replace('_', ' ')})", "value", width)
    below: Line = ((" " * (_WHO_CELLS + 2), ""),)
    parts = {name: _of([one for one in same if one.collector == name]) for name in collectors}
    of = parts[who] if who in parts else "; ".join(f"{name} {part}".rstrip() for name, part in parts.items())
    if of:
        yield from hanging(below, of, "dim", width)
    if first.remedy:
        yield from hanging(below, first.remedy, "accent", width)


def _of(same: list[Status]) -> str:
    """`gpu 0: nvlink_rx_bps, nvlink_tx_bps; gpu 1: nvlink`: the fields by scope; a channel where it is all of it."""
    by_scope: dict[str, list[str]] = {}
    for one in same:
        by_scope.setdefault(one.scope, []).append(one.field or one.channel)
    parts = []
    for scope, names in by_scope.items():
        named = ", ".join(dict.fromkeys(name for name in names if name))
        parts.append(f"{scope}: {named}" if scope and named else scope or named)
    return "; ".join(part for part in parts if part)


def _slo_problems(said: tuple[Status, ...]) -> list[str]:
    """Objectives that cannot be read, or can never be judged."""
    slos, wrong = objectives(one.reason for one in said if one.collector == SLO)
    return [*wrong, *(words for slo in slos for words in problems(slo))]
