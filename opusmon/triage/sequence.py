"""A comparison in words: the sequence of what moved, as text for a terminal and a ticket, and as a document."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from opusmon.clock import NS
from opusmon.text import hanging, printable
from opusmon.times import format_duration, format_iso, format_wall
from opusmon.triage.explain import Change, Explanation, Step
from opusmon.triage.explain_events import Event
from opusmon.triage.explain_words import amounts, words

WIDTH = 80
CORRELATION = "An order in time is a correlation: what moved first is where to look first, not proof that it was the cause."
NEAR_NS = 10 * NS
"""What began in a gap between the ranges longer than this had begun "by" its end."""
_TIME_COLUMNS = 11
_BOUND_COLUMNS = 9

Named = Callable[[str, Sequence[str]], str]
"""Puts names into a text: `plain_names`, or something that hides them."""


def plain_names(text: str, names: Sequence[str]) -> str:
    """The text with its names, without what a terminal would obey."""
    shown = (printable(name) or "?" for name in names)
    return printable(text.format(*shown))


def change_words(change: Change, named: Named = plain_names) -> str:
    """`gpu 0 link 7 NVLink TX halves (12.1 -> 6.0 GB/s)`, `TTFT p95 (proxy) +640 ms (0.41 -> 1.05 s)`."""
    name = words(change.channel, change.quantity).name
    who = named(change.subject, change.names)
    subject = f"{name} {who}" if who.startswith("(") else f"{who} {name}".strip()
    levels = amounts(change.unit, change.shift.before, change.shift.after)
    note = f"; {change.note}" if change.note else ""
    return f"{subject} {verb(change)} ({levels}{note})"


def verb(change: Change) -> str:
    """What a level did: `halves`, `x3.4`, `+640 ms`, `starts`."""
    about = words(change.channel, change.quantity)
    before, after = change.shift.before, change.shift.after
    least = max(2 * change.floor, 0.02 * max(abs(before), abs(after)))
    end = "" if about.plural else "s"
    if change.shift.ramp:
        return f"{'climb' if after > before else 'sink'}{end}"
    if abs(before) <= least:
        return f"start{end}"
    if abs(after) <= least:
        return f"stop{end}" if not about.added else f"fall{end} to nothing"
    if about.added:
        return f"{'+' if after > before else '-'}{amounts(change.unit, abs(after - before))}"
    return _ratio(after / before, end)


def _ratio(ratio: float, end: str) -> str:
    if 1.9 <= ratio <= 2.1:
        return f"double{end}"
    if 0.475 <= ratio <= 0.525:
        return f"halve{end}"
    if ratio > 2.1:
        return f"x{ratio:.1f}" if ratio < 10 else f"x{ratio:.0f}"
    return f"{100 * (ratio - 1):+.0f} %"


def event_words(event: Event, named: Named = plain_names) -> str:
    """`gpu 0: XID 79 (...)`, with how many there were."""
    text = named(event.text, event.names)
    if event.count == 1:
        return text
    return f"{text}, {event.count} times in {format_duration(event.last - event.t)}"


# -- text --------------------------------------------------------------------------------------------------------


def render(told: Explanation, width: int = WIDTH, named: Named = plain_names) -> str:
    """The comparison as text, without a newline at the end.

    Args:
        told: what `explain` found.
        width: columns of the terminal.
        named: how names from outside are shown.
    """
    return "\n".join(lines(told, width, named))


def lines(told: Explanation, width: int = WIDTH, named: Named = plain_names) -> list[str]:
    """The lines of `render`."""
    out = [*hanging("", head_words(told), width), ""]
    for step in told.steps:
        out.extend(_step_lines(told, step, width, named))
    if not told.changes:
        out.extend(hanging("", "Nothing changed: no series left its level.", width))
    if told.more:
        out.extend(hanging("", _more(told, named), width))
    if told.events_left_out:
        out.extend(
            hanging("", f"{told.events_left_out} more events, of the commoner kinds, are left out.", width)
        )
    out += ["", *hanging("", _foot(told), width)]
    return out


def head_words(told: Explanation) -> str:
    """What was compared with what: ranges, number of series, channels."""
    a, b = (format_wall(told.anchors, t) for t in (told.a, told.b))
    c, d = (format_wall(told.anchors, t) for t in told.before)
    return (
        f"{a} to {b} ({format_duration(told.b - told.a)}) against {c} to {d}: {told.compared} series of"
        f" {', '.join(told.channels) or 'no channel'}"
        + (f"; {told.skipped} more had too few samples" if told.skipped else "")
        + "."
    )


def _foot(told: Explanation) -> str:
    chance = f"Of {told.compared} series that do not change, up to {told.chance:.1f} would be listed by chance, more of those that wander."
    if not told.changes:
        return chance
    doubt = " ~ may as well have been before the line above." if any(s.unsure for s in told.steps) else ""
    return f"Times are those of the onsets.{doubt} {chance} {CORRELATION}"


def _more(told: Explanation, named: Named) -> str:
    names = [change_words(one, named) for one in told.more[:6]]
    rest = len(told.more) - len(names)
    return f"Moved less: {'; '.join(names)}" + (f"; and {rest} more" if rest else "") + "."


def _step_lines(told: Explanation, step: Step, width: int, named: Named) -> Iterator[str]:
    """The first line of a step bears its time; the others are at the same time, as far as can be told."""
    at = "~" * step.unsure + time_words(told, step)
    bound = bound_words(told, step)
    texts = [event_words(one, named) for one in step.events]
    texts += [change_words(one, named) + until_words(told, one) for one in step.changes]
    for number, text in enumerate(texts):
        head = f"{at:<{_TIME_COLUMNS}}{bound:<{_BOUND_COLUMNS}}" if not number else " " * 18 + "& "
        yield from hanging(head, text, width)


def time_words(told: Explanation, step: Step) -> str:
    """Wall time of a step, tenths only where the samples tell them; "by" where it was so from the start."""
    if step.lo < told.spans.zone0 < step.hi and step.hi - step.lo > NEAR_NS:
        return f"by {format_wall(told.anchors, step.hi)}"
    return format_wall(told.anchors, (step.lo + step.hi) // 2, 0 if step.hi - step.lo >= NS else 1)


def bound_words(told: Explanation, step: Step) -> str:
    """`+-0.5 s`; nothing for an event."""
    if time_words(told, step).startswith("by"):
        return ""
    half_s = (step.hi - step.lo) / 2 / NS
    if not half_s:
        return ""
    return f"+-{half_s:.1f} s" if half_s < 10 else f"+-{math.ceil(half_s)} s"


def until_words(told: Explanation, change: Change) -> str:
    """When a change was over, if it was."""
    return f" until {format_wall(told.anchors, change.shift.end)}" if change.shift.end is not None else ""


# -- document ----------------------------------------------------------------------------------------------------


def to_json(told: Explanation) -> dict[str, Any]:
    """The comparison for programs: JSON types, times as monotonic ns and ISO 8601, missing numbers null."""
    return {
        "a": told.a,
        "b": told.b,
        "before": list(told.before),
        "start": format_iso(told.anchors, told.a),
        "end": format_iso(told.anchors, told.b),
        "compared": told.compared,
        "skipped": told.skipped,
        "channels": list(told.channels),
        "expected_by_chance": told.chance,
        "steps": [_step_json(told, step) for step in told.steps],
        "more": [_change_json(told, change) for change in told.more],
        "events_left_out": told.events_left_out,
        "note": CORRELATION,
    }


def _step_json(told: Explanation, step: Step) -> dict[str, Any]:
    return {
        "t0": step.lo,
        "t1": step.hi,
        "order_unsure": step.unsure,
        "time": format_iso(told.anchors, (step.lo + step.hi) // 2),
        "changes": [_change_json(told, change) for change in step.changes],
        "events": [_event_json(told, event) for event in step.events],
    }


def _change_json(told: Explanation, change: Change) -> dict[str, Any]:
    shift = change.shift
    return {
        "channel": change.channel,
        "quantity": change.quantity,
        "subject": plain_names(change.subject, change.names),
        "text": change_words(change),
        "unit": change.unit,
        "before": _number(shift.before),
        "after": _number(shift.after),
        "effect": _number(shift.effect),
        "score": _number(shift.score),
        "onset": [shift.lo, shift.hi],
        "time": format_iso(told.anchors, shift.onset),
        "until": shift.end,
        "ramp": shift.ramp,
    }


def _event_json(told: Explanation, event: Event) -> dict[str, Any]:
    return {
        "t": event.t,
        "last": event.last,
        "time": format_iso(told.anchors, event.t),
        "kind": printable(event.kind),
        "text": plain_names(event.text, event.names),
        "count": event.count,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
