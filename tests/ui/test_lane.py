"""The event lane under the time bar: a row for each pane on screen, its marks column by column under the time."""

import html

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusmon.clock import NS
from opusmon.ui.glyphs import ASCII, BY_NAME
from opusmon.ui.keys import sheet_lines
from opusmon.ui.lane import END_CELLS, bar_width, has_lane, label, time_lines
from opusmon.ui.marks import Place, by_pane
from opusmon.ui.panes import PANES
from opusmon.ui.text import line_cells, plain
from opusmon.ui.widgets.panels import TimeBarWidget
from opusmon.ui.widgets.timeline import MARKS, TimeBar, column_of, lane_row

from .test_dashboard import replay
from .test_findings import T0, look, night, write_recording

ALL = [(pane.number, pane.name) for pane in PANES]
HEAD = len(label(300 * NS))


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """HBM bandwidth at its limit from 60 to 89 s and from 150 to 180 s, an XID at 75.5 s; a capture fails at 100 s."""
    session = night()
    session.add("stall", 100, kind="capture", pid=42, tid=42, process="vllm", thread="vllm", code=901.0)
    return write_recording(session, tmp_path_factory.mktemp("lane") / "night.opusmon")


# -- one row, pure -----------------------------------------------------------------------------------------------


def test_a_row_has_its_marks_where_the_bar_has_them_and_the_playhead_goes_through():
    marks = [Place(20, "capture"), Place(30, "jit"), Place(50, "critical"), Place(70, "strange")]
    assert plain(lane_row(TimeBar(0, 100, 80, 20, marks), 21, ASCII)) == "    c j   !!  * |    "


def test_what_lasts_is_drawn_from_its_begin_to_its_end():
    marks = [Place(20, "warning", dur_ns=40), Place(80, "critical", dur_ns=20)]
    line = lane_row(TimeBar(0, 100, 0, 0, marks), 11, ASCII)
    assert plain(line) == "| !==== !!="
    assert [style for text, style in line if "=" in text] == ["warn", "bad"]


def test_the_worst_of_what_lasts_has_the_cell_in_either_order():
    marks = [Place(0, "warning", dur_ns=100), Place(20, "critical", dur_ns=40), Place(50, "info", dur_ns=40)]
    for given_marks in (marks, marks[::-1]):
        line = lane_row(TimeBar(0, 100, 0, 0, given_marks), 11, ASCII)
        assert plain(line) == "!=!!=i====="
        assert line == (("!=", "warn"), ("!!=", "bad"), ("i", "mark"), ("=", "bad"), ("====", "warn"))


def test_the_worst_mark_has_the_cell():
    assert [style for _, style in MARKS.values()] == sorted(
        (style for _, style in MARKS.values()), key=["bad", "warn", "mark", "accent", "dim"].index
    )
    marks = [Place(50, "jit"), Place(50, "warning"), Place(50, "xid"), Place(50, "info")]
    assert plain(lane_row(TimeBar(0, 100, 0, 0, marks), 11, ASCII)) == "|    x     "


def test_what_began_before_the_session_is_marked_at_its_edge_while_it_lasts():
    marks = [
        Place(-50, "warning", dur_ns=80),
        Place(-50, "jit"),
        Place(-50, "xid", dur_ns=49),
        Place(101, "xid"),
    ]
    assert plain(lane_row(TimeBar(0, 100, 100, 0, marks), 11, ASCII)) == "!===      |"


# -- all lines, pure ---------------------------------------------------------------------------------------------


def lines_of(places, panes=ALL, width=60, playhead=100, current=2):
    bar = TimeBar(0, 100, playhead, 300 * NS)
    return [plain(line) for line in time_lines(bar, places, panes, current, "now", width, ASCII)]


def test_each_pane_has_its_marks_and_the_bar_what_is_of_no_pane():
    places = [
        Place(10, "bookmark", "here"),
        Place(20, "warning", "", "latency", 20),
        Place(30, "xid", "", "gpu"),
        Place(30, "xid", "", "gpu"),
        Place(40, "info", "", "streams"),
        Place(50, "capture", "", "stalls"),
        Place(60, "gap"),
    ]
    assert lines_of(places, width=HEAD + 11 + END_CELLS) == [
        " span 5m    =b====g===| now  ",
        " 1 latency    !==     |    1 ",
        " 2 gpu         x      |    2 ",
        " 3 streams      i     |    1 ",
        " 4 stalls        c    |    1 ",
    ]


def test_without_rows_every_mark_is_on_the_bar_and_with_some_what_has_no_row():
    places = [
        Place(20, "xid", "", "gpu"),
        Place(50, "capture", "", "stalls"),
        Place(80, "jit", "", "unknown"),
    ]
    assert lines_of(places, [], HEAD + 11 + END_CELLS) == [" span 5m    ==x==c==j=| now  "]
    assert lines_of(places, [(2, "gpu")], HEAD + 11 + END_CELLS) == [
        " span 5m    =====c==j=| now  ",
        " 2 gpu        x       |    1 ",
    ]


def test_only_what_is_drawn_is_counted():
    places = [Place(-1, "xid", "", "gpu"), Place(-9, "warning", "", "gpu", 39), Place(101, "xid", "", "gpu")]
    assert lines_of(places, [(2, "gpu")], HEAD + 11 + END_CELLS)[1] == " 2 gpu      !===      |    1 "


def test_the_pane_that_has_the_keys_is_told_by_its_label():
    bar = TimeBar(0, 100, 100, 300 * NS)
    lines = time_lines(bar, [], ALL, 3, "now", 60, ASCII)
    assert [line[0][1] for line in lines] == ["label", "label", "label", "title", "label"]


@given(
    st.lists(
        st.builds(
            Place,
            st.integers(-10, 1200),
            st.sampled_from([*MARKS, "other"]),
            st.just(""),
            st.sampled_from(["", "latency", "gpu", "streams", "stalls", "other"]),
            st.integers(0, 1200),
        ),
        max_size=30,
    ),
    st.integers(0, 260),
    st.integers(-10, 1200),
    st.sampled_from(list(BY_NAME)),
)
def test_all_lines_have_exactly_the_width_and_every_mark_a_column_that_shows_one(places, width, t, name):
    bar = TimeBar(0, 1000, t, 300 * NS)
    lines = time_lines(bar, places, ALL, 1, "end", width, BY_NAME[name])
    assert [line_cells(line) for line in lines] == [width] * 5
    if name == "ascii":
        assert all(plain(line).isascii() for line in lines)
    room = bar_width(bar.span_ns, width)
    for place in places:
        if room > 1 and 0 <= place.t <= 1000:
            row = [number for number, name in ALL if name == place.pane]
            shown = plain(lines[row[0] if row else 0])[HEAD + column_of(bar, place.t, room)]
            assert shown in {letter for letters, _ in [*MARKS.values(), ("*", "")] for letter in letters}


def test_places_of_a_pane_keep_their_order():
    places = [
        Place(1, "jit", "", "stalls"),
        Place(2, "xid", "", "gpu"),
        Place(3, "jit", "", "stalls"),
        Place(4, "gap"),
    ]
    found = by_pane(places, ["gpu", "stalls", "latency"])
    assert found == {"": [places[3]], "gpu": [places[1]], "stalls": [places[0], places[2]], "latency": []}


def test_there_is_a_lane_where_there_is_room_or_where_it_is_wanted():
    assert [height for height in range(60) if has_lane(height, None)] == list(range(40, 60))
    assert [height for height in range(60) if has_lane(height, True)] == list(range(20, 60))
    assert not any(has_lane(height, False) for height in range(60))


# -- on the screen -----------------------------------------------------------------------------------------------


def row_of(it, number):
    """The row of a pane without its label and its count."""
    (line,) = [line for line in it.lines("#timebar")[1:] if line.startswith(f" {number} ")]
    return line[HEAD:-END_CELLS]


async def test_findings_and_events_are_in_the_row_of_their_pane(recording):
    async with replay(path=recording, glyphs=ASCII) as it:
        await look(it, 10)
        lines = it.lines("#timebar")
        assert [line[:HEAD].split() for line in lines] == [
            ["span", "5m"],
            ["1", "latency"],
            ["2", "gpu"],
            ["3", "streams"],
            ["4", "stalls"],
        ]
        assert not set("!xcj") & set(lines[0])
        gpu, stalls = row_of(it, 2), row_of(it, 4)
        window = it.app.session.window
        column = lambda t_s: round((T0 + t_s * NS - window.t0) / (window.t1 - window.t0) * (len(gpu) - 1))  # noqa: E731
        for t_s in (60, 150):
            assert "!" in gpu[column(t_s) - 1 : column(t_s) + 2]
        assert "!!" in gpu[column(75.5) - 2 : column(75.5) + 3]
        lasts = [n for n, char in enumerate(gpu) if char in "=!"]
        assert (np.diff(lasts) == 1).sum() == len(lasts) - 2  # two stretches
        assert min(lasts) == pytest.approx(column(60), abs=1)
        assert [n for n in lasts if n < column(120)][-1] == pytest.approx(column(89), abs=1)
        assert "!!" in stalls[column(100) - 2 : column(100) + 3]
        assert set(row_of(it, 1)) == set(row_of(it, 3)) == {" ", "|"}


@pytest.mark.parametrize(("size", "wanted"), [((160, 50), True), ((80, 24), False)])
async def test_it_is_in_the_picture_of_a_screen(recording, size, wanted):
    async with replay(path=recording, size=size) as it:
        await look(it, 80)
        await it.pilot.pause()
        drawn = html.unescape(it.app.export_screenshot()).replace("\N{NO-BREAK SPACE}", " ")
        assert (
            all(f"> {number} {name}{' ' * (HEAD - 3 - len(name))}" in drawn for number, name in ALL) is wanted
        )


@pytest.mark.parametrize("size", [(80, 24), (160, 39), (40, 10), (1, 1)])
async def test_in_a_small_terminal_all_marks_are_on_one_line(recording, size):
    async with replay(path=recording, size=size, glyphs=ASCII) as it:
        await look(it, 10)
        assert len(it.lines("#timebar")) == 1
        if size[0] >= 80:
            assert it.text("#timebar").count("!") >= 4


async def test_l_puts_it_away_and_back_and_shows_it_where_it_is_not_usual(recording):
    async with replay(path=recording) as it:
        heights = []
        for _ in range(3):
            heights.append((len(it.lines("#timebar")), it.board.query_one(TimeBarWidget).size.height))
            await it.press("l")
        assert heights == [(5, 5), (1, 1), (5, 5)]
        await it.pilot.resize_terminal(80, 24)
        await it.pilot.pause()
        it.board.frame()
        assert len(it.lines("#timebar")) == 1  # put away by the third press
        await it.press("l")
        assert [pane.size.height for pane in it.board._panes] == [1, 14, 1, 1]
        assert len(it.lines("#timebar")) == 5
        await it.pilot.resize_terminal(80, 19)
        await it.pilot.pause()
        it.board.frame()
        assert len(it.lines("#timebar")) == 1
        await it.press("l")
        assert "no event lane under 20 lines" in it.text("#footer")


async def test_pressed_twice_it_is_as_usual_again(recording):
    async with replay(path=recording) as it:
        await it.press("l")
        await it.press("l")
        for size, lines in (((80, 24), 1), ((160, 50), 5)):
            await it.pilot.resize_terminal(*size)
            await it.pilot.pause()
            it.board.frame()
            assert len(it.lines("#timebar")) == lines


async def test_a_maximized_pane_has_the_only_row_and_the_bar_the_marks_of_the_others(recording):
    async with replay(path=recording, glyphs=ASCII) as it:
        await look(it, 10)
        await it.press("4", "m")
        it.board.frame()
        bar, row = it.lines("#timebar")
        assert row.startswith(" 4 stalls ")
        assert bar.count("!") >= 4
        assert it.board.query_one(TimeBarWidget).size.height == 2
        await it.press("2")
        it.board.frame()
        bar, row = it.lines("#timebar")
        assert row.startswith(" 2 gpu ")
        assert "!" in bar
        await it.press("escape")
        it.board.frame()
        assert len(it.lines("#timebar")) == 5


@pytest.mark.parametrize("row", range(5))
async def test_a_click_on_any_row_is_a_click_on_the_time(recording, row):
    async with replay(path=recording) as it:
        await look(it, 10)
        await it.pilot.click("#timebar", offset=(HEAD + 71, row))
        await it.pilot.pause()
        window = it.app.session.window
        share = 71 / (bar_width(300 * NS, 160) - 1)
        assert it.at_s() == pytest.approx(share * (window.t1 - window.t0) / NS, abs=1)


async def test_the_keys_between_marks_go_through_all_rows(recording):
    async with replay(path=recording) as it:
        await look(it, 10)
        went = set()
        for _ in range(12):
            await it.press("n")
            went.add((it.head.t - T0) / NS)
        assert {60, 75.5, 100, 150} <= went


async def test_marks_are_read_once_a_frame(recording):
    async with replay(path=recording) as it:
        await look(it, 10)
        reads = []
        update = it.board.places.update
        it.board.places.update = lambda: (reads.append(1), update())[1]
        it.head.seek(it.head.t + NS)
        it.board.frame()
        assert len(reads) == 1


async def test_in_ascii_without_colour_it_is_ascii(recording):
    async with replay(path=recording, glyphs=ASCII, environ={"NO_COLOR": "1"}) as it:
        await look(it, 80)
        assert len(it.lines("#timebar")) == 5
        assert it.text("#timebar").isascii()


def test_the_help_has_the_key_and_every_letter():
    words = "\n".join(plain(line) for line in sheet_lines())
    assert "  l        event lane" in words
    at = words.index("marks on the time bar")
    heads = words[at : words.index("what the words mean")]
    letters = {word for line in heads.splitlines()[1:] for word in line[2:11].split()}
    assert {letters for letters, _ in MARKS.values()} <= letters
