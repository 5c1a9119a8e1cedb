"""What the rules found, on the screen: marks, a list, one in full."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from opusmon.clock import Anchors
from opusmon.times import format_wall
from opusmon.triage.finding import Finding, by_time
from opusmon.triage.report import when, words
from opusmon.triage.severity import CRIT, NOTE, WARN
from opusmon.ui.text import Line, hanging

FINDING_MARKS: dict[int, tuple[str, str]] = {CRIT: ("!!", "bad"), WARN: ("!", "warn"), NOTE: ("i", "mark")}
"""Severity to sign and style."""
KINDS: dict[int, str] = {CRIT: "critical", WARN: "warning", NOTE: "info"}
"""Severity to the kind of its mark on the time bar."""
_ROOM = 104
"""Most cells of a line."""
NONE_YET = "the rules have found nothing in what has been looked at"


def covering(findings: Iterable[Finding], t: int) -> list[Finding]:
    """Those that hold at an instant, in the order given."""
    return [one for one in findings if one.t0 <= t and (one.open or t <= one.t1)]


def sheet_lines(
    ranked: list[Finding], anchors: Anchors, t: int, progress: str, width: int = _ROOM
) -> list[Line]:
    """All findings, those at the playhead first and in full, the others by time.

    Args:
        ranked: findings in the order in which `opusmon triage` tells them.
        anchors: of the session.
        t: the playhead, monotonic ns.
        progress: how far the session has been looked at, "" for all of it.
        width: cells there are.
    """
    lines: list[Line] = [((progress, "dim"),)] if progress else []
    if not ranked:
        return [*lines, ((NONE_YET, "dim"),)]
    now = covering(ranked, t)
    if now:
        lines.append(((f"at {format_wall(anchors, t)}", "title"),))
        for one in now:
            lines.extend(_full(one, anchors, min(width, _ROOM)))
    shown = {id(one) for one in now}
    others = sorted((one for one in ranked if id(one) not in shown), key=by_time)
    if others:
        lines.append((("at other times (n and N go there)", "title"),))
        for one in others:
            lines.extend(_short(one, anchors, min(width, _ROOM)))
    return lines


def _short(one: Finding, anchors: Anchors, width: int) -> Iterator[Line]:
    sign, style = FINDING_MARKS[one.severity]
    head = ((f"{sign:<3}", style), (f"{format_wall(anchors, one.t0)}  ", "label"))
    return hanging(head, one.title, "value", width)


def _full(one: Finding, anchors: Anchors, width: int) -> Iterator[Line]:
    sign, style = FINDING_MARKS[one.severity]
    yield from hanging(((f"{sign:<3}", style),), one.title, "value", width)
    yield from hanging((("   ", ""),), f"{one.subject}  {when(one, anchors)}", "label", width)
    for evidence in one.evidence:
        yield from hanging((("   ", ""),), words(evidence), "dim", width)
    for head, text, style in (("cause", one.cause, ""), ("next", one.next, "value")):
        yield from hanging(((f"   {head:<7}", "label"),), text, style, width)
    yield ()
