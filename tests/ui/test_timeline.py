from hypothesis import given
from hypothesis import strategies as st

from opusmon.ui.glyphs import ASCII, BY_NAME
from opusmon.ui.marks import Place
from opusmon.ui.text import line_cells, plain
from opusmon.ui.widgets.timeline import MARKS, TimeBar, column_of, time_at, timeline


def test_span_playhead_and_marks():
    marks = [Place(20, "capture"), Place(30, "jit"), Place(50, "critical"), Place(70, "strange")]
    bar = TimeBar(0, 100, playhead=100, span_ns=20, marks=marks)
    assert plain(timeline(bar, 21, ASCII)) == "----c-j---!!--*-====|"


def test_the_span_is_bright_and_the_rest_is_dim():
    line = timeline(TimeBar(0, 100, playhead=50, span_ns=50), 11, ASCII)
    assert line == (("=====", "accent"), ("|", "title"), ("-----", "dim"))


def test_the_more_important_mark_wins_a_cell():
    marks = [Place(50, "bookmark"), Place(50, "xid"), Place(50, "gap")]
    assert plain(timeline(TimeBar(0, 100, 0, 0, marks), 11, ASCII))[5] == "x"


def test_a_critical_mark_at_the_right_edge_keeps_both_letters():
    assert plain(timeline(TimeBar(0, 100, 0, 0, [Place(100, "critical")]), 11, ASCII)).endswith("!!")


def test_marks_outside_the_session_are_not_drawn():
    marks = [Place(-5, "xid"), Place(101, "xid")]
    assert "x" not in plain(timeline(TimeBar(0, 100, 50, 10, marks), 21, ASCII))


def test_columns_and_times():
    bar = TimeBar(1000, 2000, 2000, 0)
    assert column_of(bar, 1000, 101) == 0
    assert column_of(bar, 2000, 101) == 100
    assert column_of(bar, 1500, 101) == 50
    assert column_of(bar, 0, 101) == 0
    assert column_of(bar, 9999, 101) == 100
    assert time_at(bar, 50, 101) == 1500
    assert time_at(bar, -3, 101) == 1000
    assert time_at(bar, 500, 101) == 2000


@given(st.integers(0, 10**15), st.integers(0, 10**15), st.integers(1, 300), st.integers(0, 299))
def test_a_click_means_an_instant_that_is_drawn_where_it_was_clicked(t0, length, width, column):
    bar = TimeBar(t0, t0 + length, t0 + length, 0)
    t = time_at(bar, column, width)
    assert bar.t0 <= t <= bar.t1
    if column < width and length >= width:
        assert column_of(bar, t, width) == column


@given(
    st.integers(-10, 10**12),
    st.integers(-10, 10**12),
    st.integers(0, 10**12),
    st.integers(0, 10**12),
    st.lists(st.builds(Place, st.integers(-10, 10**12), st.sampled_from([*MARKS, "other"])), max_size=20),
    st.integers(-1, 260),
    st.sampled_from(list(BY_NAME)),
)
def test_any_bar_has_exactly_its_width(t0, t1, playhead, span_ns, marks, width, name):
    line = timeline(TimeBar(t0, t1, playhead, span_ns, marks), width, BY_NAME[name])
    assert line_cells(line) == max(width, 0)
