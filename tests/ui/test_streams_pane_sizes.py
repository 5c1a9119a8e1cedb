import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opusmon.clock import NS
from opusmon.ui.glyphs import BY_NAME as GLYPHS
from opusmon.ui.panes.base import Frame, PaneState, Size
from opusmon.ui.panes.streams_state import SORTS
from opusmon.ui.panes.streams_table import short_duration, short_number

from .fakestreams import (
    IDLE,
    PANE,
    FakeStreams,
    add_gpus,
    add_status,
    one,
    phases,
    serving,
)
from .fakeview import END, NAN, assert_fills

VIEWS = [
    FakeStreams(),
    one(),
    one(**dict.fromkeys(IDLE, NAN), since_launch_ns=NAN, launch_call_ns=NAN, launch_call_max_ns=NAN),
    one(
        process="日本語" * 9, thread="日本" * 9, stream=2**64 - 1, pid=2**31 - 1, **dict.fromkeys(IDLE, 1e15)
    ),
    one(dt_ns=0),
    serving(others=30, gpus=3),
    phases(),
    add_gpus(FakeStreams()),
]
add_status(VIEWS[-1], END - 30 * NS)
add_status(VIEWS[5], channel="stream", field="launches", state="stale", reason="counted now and then")


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(VIEWS),
    st.integers(0, 240),
    st.integers(0, 60),
    st.sampled_from(list(GLYPHS.values())),
    st.builds(
        PaneState,
        selected=st.integers(0, 40),
        scroll=st.integers(0, 40),
        filter=st.sampled_from(["", "vllm", "zzz"]),
        sort=st.sampled_from(["", *SORTS]),
        detail=st.booleans(),
        maximized=st.booleans(),
    ),
    st.sampled_from([0, 1, NS, 60 * NS, 300 * NS, 86_400 * NS]),
)
def test_exactly_the_size(view, width, height, glyphs, state, span_ns):
    it = Frame(view, END + NS // 3, span_ns, Size(width, height), glyphs, state)
    assert_fills(PANE, it)


@pytest.mark.parametrize(
    ("ns", "words"),
    [
        (0, "0"),
        (412e6, "412 ms"),
        (84.2e6, "84 ms"),
        (8.44e6, "8.4 ms"),
        (999.6e6, "1 s"),
        (1.94e9, "1.9 s"),
        (59.6e9, "1 m"),
        (90e9, "1.5 m"),
        (7200e9, "2 h"),
        (200 * 3600e9, "200 h"),
        (2000 * 3600e9, "83 d"),
        (5, "5 ns"),
        (NAN, "--"),
    ],
)
def test_short_durations(ns, words):
    assert short_duration(ns) == words


def test_short_numbers():
    assert [short_number(value) for value in (0, 0.44, 9.96, 610, 9999, 12_345, NAN)] == [
        *("0", "0.4", "10", "610", "9999", "12k", "--")
    ]


@given(st.floats(0, 1e17))
def test_short_durations_fit_their_column(ns):
    assert len(short_duration(ns)) <= 6
