"""The playhead with a clock in the test's hands."""

import pytest

from opusmon.clock import NS
from opusmon.ui.playhead import SPANS_NS, Mode, Playhead, next_sample, next_span


class World:
    def __init__(self, begin=0, edge=100):
        self.now, self.begin, self.edge = 0, begin * NS, edge * NS

    def playhead(self, **kwargs):
        return Playhead(lambda: self.now, lambda: self.begin, lambda: self.edge, **kwargs)


def test_live_is_the_edge_and_a_pause_stays():
    world = World()
    head = world.playhead(follows=True)
    assert (head.mode, head.t) == (Mode.TRACK, 100 * NS)
    world.edge = 110 * NS
    assert head.t == 110 * NS
    head.pause()
    world.edge = 181 * NS
    assert (head.t, head.behind_ns()) == (110 * NS, 71 * NS)
    head.toggle()
    assert (head.mode, head.t) == (Mode.TRACK, 181 * NS)


def test_seeking_while_live_pauses_and_stays_inside():
    world = World(begin=10)
    head = world.playhead(follows=True)
    head.seek(3 * NS)
    assert (head.mode, head.t) == (Mode.PAUSE, 10 * NS)
    head.seek(500 * NS)
    assert head.t == 100 * NS


def test_replay_plays_at_its_speed_and_stops_at_the_end():
    world = World()
    head = world.playhead(follows=False)
    world.now = 3 * NS
    assert head.t == 3 * NS
    head.set_speed(4)
    world.now = 5 * NS
    assert head.t == 11 * NS
    head.pause()
    world.now = 50 * NS
    assert head.t == 11 * NS
    head.resume()
    world.now = 1000 * NS
    assert (head.t, head.mode) == (100 * NS, Mode.PAUSE)
    head.resume()
    assert (head.t, head.mode) == (0, Mode.PLAY)


def test_seeking_while_playing_plays_on():
    world = World()
    head = world.playhead(follows=False)
    head.seek(50 * NS)
    world.now = 2 * NS
    assert (head.t, head.mode) == (52 * NS, Mode.PLAY)


def test_speeds_stop_at_both_ends():
    head = World().playhead(follows=False)
    for _ in range(20):
        head.faster(1)
    assert head.speed == 60
    for _ in range(20):
        head.faster(-1)
    assert head.speed == 0.25


@pytest.mark.parametrize(
    ("span_s", "whole_s", "direction", "expected_s"),
    [(300, 4000, 1, 900), (300, 4000, -1, 60), (3600, 4000, 1, 4000), (4000, 4000, 1, 4000), (4000, 4000, -1, 3600),
     (10, 4000, -1, 10), (10, 3, 1, 10), (86400, 172800, 1, 172800)],
)  # fmt: skip
def test_spans(span_s, whole_s, direction, expected_s):
    assert next_span(span_s * NS, whole_s * NS, direction) == expected_s * NS
    assert sorted(SPANS_NS) == list(SPANS_NS)


def test_the_rows_of_one_tick_are_one_sample():
    """Eight GPUs are read one after the other, some milliseconds apart, every second."""
    ms = 1_000_000
    rows = [1000 * ms * second + 3 * ms * gpu for second in range(1, 4) for gpu in range(8)]

    def step(t, direction):
        later, earlier = [r for r in rows if r > t], [r for r in rows if r < t]
        return (later[0] if later else None) if direction > 0 else (earlier[-1] if earlier else None)

    assert next_sample(step, 0, 1) == 1021 * ms
    assert next_sample(step, 1021 * ms, 1) == 2021 * ms
    assert next_sample(step, 1009 * ms, 1) == 2021 * ms
    assert next_sample(step, 3021 * ms, 1) is None
    assert next_sample(step, 3021 * ms, -1) == 2021 * ms
    assert next_sample(step, 2012 * ms, -1) == 1021 * ms
    assert next_sample(step, 1021 * ms, -1) is None
