"""How well the drill goes: the top finding of each session against the cause that was planted."""

from __future__ import annotations

from collections import Counter

from drill import in_cuda, in_traffic, on_gpus, on_host
from drill.host import T0
from drill.library import SCENARIOS
from opusmon.clock import NS
from opusmon.triage.rank import rank
from opusmon.triage.run import look_over
from opusmon.triage.severity import NOTE

MODULES = (on_gpus, on_host, in_cuda, in_traffic)
"""Importing them fills the library."""
PLANTED = [one for one in SCENARIOS.values() if one.rule]
QUIET = [one for one in SCENARIOS.values() if not one.rule]


def drill(seed=None, order=rank):
    """What is found in each session, in the order in which it is told; each session is made once and let go."""
    found = {}
    for number, one in enumerate(SCENARIOS.values()):
        view = one.host(None if seed is None else 1000 * seed + number).window()
        found[one.name] = order(look_over(view, view.t0 - 1, view.t1))
    return found


def is_right(scenario, finding):
    """Whether a finding is the planted cause."""
    return finding.rule == scenario.rule and scenario.subject in finding.subject


def top(found):
    """The first finding that is more than a note."""
    return found[0] if found and found[0].severity > NOTE else None


def table(drilled):
    """Precision and recall of the top finding by rule; "any" counts sessions in which it is found at any place."""
    named, right, planted, anywhere = Counter(), Counter(), Counter(), Counter()
    for one in SCENARIOS.values():
        first = top(drilled[one.name])
        if first is not None:
            named[first.rule] += 1
        if one.rule:
            planted[one.rule] += 1
            right[one.rule] += first is not None and is_right(one, first)
            anywhere[one.rule] += any(is_right(one, finding) for finding in drilled[one.name])
    lines = [f"{'cause':<28}{'sessions':>9}{'top':>5}{'any':>5}{'precision':>11}{'recall':>8}"]
    lines += [
        _line(rule, planted[rule], right[rule], anywhere[rule], named[rule])
        for rule in sorted(planted | named)
    ]
    lines.append(_line("all", *(sum(count.values()) for count in (planted, right, anywhere, named))))
    quiet = sum(top(drilled[one.name]) is not None for one in QUIET)
    return [*lines, f"quiet sessions: {len(QUIET)}, with a warning: {quiet}"]


def _line(rule, planted, right, anywhere, named):
    precision = f"{right / named:.2f}" if named else "--"
    recall = f"{right / planted:.2f}" if planted else "--"
    return f"{rule:<28}{planted:>9}{right:>5}{anywhere:>5}{precision:>11}{recall:>8}"


def is_top(scenario, found):
    """Whether the first thing told is the planted cause."""
    first = top(found)
    return first is not None and is_right(scenario, first)


def told(found):
    """Findings in short: severity, rule, subject, second at which it began."""
    return [(one.severity, one.rule, one.subject, (one.t0 - T0) // NS) for one in found]


def moved(found, channel, name, t0):
    """Number of the step in which something moved or happened, and the bounds of its onset in s after `t0`: of several series that
    say the same the one that is surest of it."""
    subject, _, quantity = name.rpartition(" ")
    series = [
        (one.shift.hi - one.shift.lo, number, one.shift.lo, one.shift.hi)
        for number, step in enumerate(found.steps)
        for one in step.changes
        if one.channel == channel and one.quantity.startswith(quantity) and subject in one.subject
    ]
    happened = [
        (0, number, one.t, one.t)
        for number, step in enumerate(found.steps)
        for one in step.events
        if channel in ("gpu_event", "stall") and one.kind == name
    ]
    assert series + happened, f"{channel} {name} is in no step"
    _, number, lo, hi = min(series + happened)
    return number, (lo - t0) / NS, (hi - t0) / NS
