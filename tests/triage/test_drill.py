"""The drill: sessions with known causes. The right one must be the top finding, quiet ones must have none.

The table of precision and recall is printed; see it with `pytest -s tests/triage/test_drill.py`, CI shows it in its output.
"""

from itertools import pairwise

import pytest
from drill.host import T0
from drill.library import SCENARIOS
from drill.score import PLANTED, QUIET, drill, is_right, is_top, moved, table, told

from opusmon.clock import NS
from opusmon.triage.explain import explain
from opusmon.triage.severity import NOTE

ORDERED = [one for one in PLANTED if one.order]
LEAST_RIGHT = 0.95
"""19 of 20."""
EARLY_S = 62
"""Rules over a minute say that a finding began with the first row of that minute."""


@pytest.fixture(scope="module")
def drilled():
    return drill()


def test_the_library_is_large_enough():
    assert len(PLANTED) >= 20
    assert len(QUIET) >= 5
    assert all(300 <= one.seconds <= 900 for one in SCENARIOS.values())


def test_the_right_cause_is_the_top_finding(drilled, capsys):
    with capsys.disabled():
        print("", *table(drilled), sep="\n")
    wrong = {one.name: told(drilled[one.name][:4]) for one in PLANTED if not is_top(one, drilled[one.name])}
    assert len(wrong) <= (1 - LEAST_RIGHT) * len(PLANTED), wrong


@pytest.mark.parametrize("scenario", QUIET, ids=lambda one: one.name)
def test_quiet_sessions_have_nothing(drilled, scenario):
    """Notes that say that all is as it should be are named by the scenario: a GPU-bound batch job is GPU-bound."""
    found = drilled[scenario.name]
    assert told([one for one in found if one.severity > NOTE or one.rule not in scenario.allowed]) == []


@pytest.mark.parametrize("scenario", PLANTED, ids=lambda one: one.name)
def test_nothing_is_wrong_before_the_cause(drilled, scenario):
    early = T0 + (scenario.at - EARLY_S) * NS
    found = [one for one in drilled[scenario.name] if one.severity > NOTE and one.rule not in scenario.beside]
    assert told([one for one in found if one.t0 < early and one.rule != scenario.rule]) == []


@pytest.mark.parametrize("scenario", PLANTED, ids=lambda one: one.name)
def test_the_cause_is_dated_when_it_was_planted(drilled, scenario):
    """A growth is told once it has gone on for its window; all others within half a minute."""
    late_s = {"hbm_filling": 125, "cgroup_memory_near_limit": 40, "memory_pressure": 60, "throttled": 40}
    (first, *_) = [one for one in drilled[scenario.name] if is_right(scenario, one)]
    begun_s = (first.t0 - T0) / NS
    assert scenario.at - EARLY_S <= begun_s <= scenario.at + late_s.get(scenario.rule, 30)


@pytest.mark.parametrize("scenario", ORDERED, ids=lambda one: one.name)
def test_what_moved_first_is_what_was_planted_first(scenario):
    begin_s = scenario.at - 5 + min(after_s or 0 for after_s, _, _ in scenario.order)
    view = scenario.host().window()
    found = explain(view, T0 + begin_s * NS, T0 + (scenario.at + 180) * NS, shown=60)
    steps = [moved(found, channel, name, T0) for _, channel, name in scenario.order]
    assert [number for number, _, _ in steps] == sorted(number for number, _, _ in steps), steps
    for (_, before, _), (_, _, after) in pairwise(steps):
        assert after >= before, steps
    timed = [
        (after_s, one)
        for (after_s, *_), one in zip(scenario.order, steps, strict=True)
        if after_s is not None
    ]
    for after_s, (_, lo, hi) in timed:
        assert lo - 1 <= scenario.at + after_s <= hi + 1, steps
    middles = [lo + hi for _, (_, lo, hi) in timed]
    assert middles == sorted(set(middles)), steps
