"""How much probes may cost, and how that is kept: pure arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusmon.clock import NS
from opusmon.collectors.ebpf.budget import MAX_EVERY, Budget, Bursts, divided
from opusmon.collectors.ebpf.stream_timing import BURST_NS, MAX_CYCLE_NS, cycle_ns


def test_a_burst_of_one_interval_in_n() -> None:
    bursts = Bursts(1.0)
    bursts.measured(6_000, NS, 1_500)  # 0.9 % of a core
    assert (bursts.every, bursts.wanted) == (1, True)
    bursts.measured(92_000, NS, 1_500)  # 13.8 %
    assert (bursts.every, bursts.wanted, bursts.soon) == (14, False, False)
    for _ in range(12):
        bursts.passed()
        assert not bursts.wanted
    assert bursts.soon
    bursts.passed()
    assert bursts.wanted
    bursts.measured(100, NS, 1_500)
    assert bursts.every == 1


def test_hits_while_probes_come_and_go_are_part_of_the_cost() -> None:
    bursts = Bursts(1.0)
    bursts.measured(90_000, NS, 1_500)  # 13.5 %
    bursts.passed(20_000)
    for _ in range(12):
        bursts.passed(0)
    bursts.measured(90_000, NS, 1_500)
    assert bursts.every == 17  # 110,000 hits a cycle


@given(st.integers(0, 10**9), st.integers(10**8, 10**10), st.floats(0, 50))
def test_the_mean_cost_stays_within_the_budget(hits: int, dt_ns: int, budget: float) -> None:
    bursts = Bursts(budget)
    bursts.measured(hits, dt_ns, 1_500)
    share = hits * 1_500 / dt_ns
    assert bursts.every == MAX_EVERY or share / bursts.every <= budget / 100 * (1 + 1e-9)
    assert 1 <= bursts.every <= MAX_EVERY


PARTS = {"launch": 0.6, "poll": 0.2, "timing": 0.2}


def test_what_a_group_does_not_want_goes_to_the_others_by_their_parts() -> None:
    assert divided(1.0, {"launch": 9.0, "poll": 9.0, "timing": 9.0}, PARTS) == pytest.approx(PARTS)
    # polls want nothing: 1 % is divided 3 to 1
    rest = {"launch": 0.75, "poll": 0.0, "timing": 0.25}
    assert divided(1.0, {"launch": 9.0, "poll": 0.0, "timing": 9.0}, PARTS) == pytest.approx(rest)
    # timing wants 0.1 of its 0.2; the 0.1 is divided between the others 3 to 1
    rest = {"launch": 0.675, "poll": 0.225, "timing": 0.1}
    assert divided(1.0, {"launch": 9.0, "poll": 9.0, "timing": 0.1}, PARTS) == pytest.approx(rest)


@given(
    st.floats(0.01, 10),
    st.fixed_dictionaries({name: st.floats(0, 100) for name in PARTS}),
)
def test_all_groups_together_keep_within_the_budget(budget: float, wants: dict[str, float]) -> None:
    allowed = divided(budget, wants, PARTS)
    assert allowed.keys() == PARTS.keys()
    assert sum(allowed.values()) == pytest.approx(budget)
    for name, part in PARTS.items():
        assert allowed[name] >= min(wants[name], part * budget) * (1 - 1e-9)  # none is worse off than alone
    them = Budget(budget, PARTS)
    for name in PARTS:
        them.saw(name, int(wants[name] * 10_000), NS, 1_000)  # 10,000 hits of 1 us in a second are 1 %
    seen = {name: int(wants[name] * 10_000) / 10_000 for name in PARTS}
    assert {name: them.allowed_pct(name) for name in PARTS} == pytest.approx(divided(budget, seen, PARTS))


@given(st.integers(0, 10**6), st.integers(10**8, 10**10), st.floats(0.1, 10))
def test_a_group_that_takes_less_than_its_part_is_always_on(hits: int, dt_ns: int, budget: float) -> None:
    them, bursts = Budget(budget, PARTS), Bursts(budget)
    them.saw("poll", 10**9, NS, 1_500)
    them.saw("timing", 10**9, NS, 1_500)
    them.saw("launch", hits, dt_ns, 1_500)
    bursts.allow(them.allowed_pct("launch"))
    bursts.measured(hits, dt_ns, 1_500)
    assert (bursts.every == 1) == (hits * 1_500 / dt_ns <= 0.6 * budget / 100)


@given(st.floats(0, 1e12), st.floats(0.001, 10))
def test_a_burst_and_its_pause_keep_within_what_is_allowed(cost_ns: float, allowed_pct: float) -> None:
    cycle = cycle_ns(cost_ns, allowed_pct)
    assert 2 * BURST_NS <= cycle <= MAX_CYCLE_NS
    assert cycle == MAX_CYCLE_NS or cost_ns / cycle <= allowed_pct / 100 * (1 + 1e-6)
