"""Anchors: when one is kept, what a step is, and the conversions."""

from hypothesis import given
from hypothesis import strategies as st

from opusmon.clock import NS, Anchor, Anchors, ManualClock, SystemClock

START = 1_700_000_000 * NS


def observe_for(anchors, clock, seconds):
    for _ in range(seconds):
        kept = anchors.observe(clock.anchor())
        if kept is not None:
            anchors.add(kept)
        clock.advance(NS)


def test_an_anchor_a_minute():
    anchors, clock = Anchors(), ManualClock(5 * NS, START)
    observe_for(anchors, clock, 181)
    assert [(a.t - 5 * NS) // NS for a in anchors] == [0, 60, 120, 180]
    assert not any(a.step_ns for a in anchors)


def test_slewing_is_no_step_and_a_step_is_kept_at_once():
    anchors, clock = Anchors(), ManualClock(0, START)
    for _ in range(50):
        clock.wall_ns += 500_000  # the fastest slew: 500 ppm
        observe_for(anchors, clock, 1)
    assert len(anchors) == 1
    clock.wall_ns -= 30_000_000
    observe_for(anchors, clock, 1)
    assert anchors.last.step_ns == -30_000_000
    assert anchors.last.t == 50 * NS


def test_wall_time_around_a_step():
    anchors = Anchors([Anchor(0, START), Anchor(100 * NS, START + 102 * NS, 2 * NS)])
    assert anchors.wall(99 * NS) == START + 99 * NS
    assert anchors.wall(100 * NS) == START + 102 * NS
    assert anchors.wall(-NS) == START - NS
    assert anchors.monotonic(START + 50 * NS) == 50 * NS
    assert anchors.monotonic(START + 103 * NS) == 101 * NS


@given(st.integers(0, 10**15))
def test_conversions_are_inverse_without_steps(t):
    anchors = Anchors([Anchor(7, START), Anchor(60 * NS + 7, START + 60 * NS)])
    assert anchors.monotonic(anchors.wall(t)) == t


def test_without_anchors_the_answer_is_the_question():
    assert Anchors().wall(42) == 42
    assert Anchors().monotonic(42) == 42


def test_the_system_clock_reads_both_clocks_together():
    clock = SystemClock()
    before = clock.now()
    anchor = clock.anchor()
    assert before <= anchor.t <= clock.now()
    assert abs(anchor.offset_ns - clock.anchor().offset_ns) < 50_000_000
