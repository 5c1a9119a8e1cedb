"""The dashboard driven by keys and mouse over the bundled recording, with a clock in the test's hands."""

import contextlib
import re
import shutil
from pathlib import Path

import pytest
from sessions import DATA, h200x2
from textual.keys import _character_to_key
from textual.widgets import Input

from opusmon.clock import NS, ManualClock
from opusmon.recording import Recording
from opusmon.session import ReplaySession
from opusmon.times import format_wall
from opusmon.ui.app import OpusmonApp
from opusmon.ui.glyphs import ASCII, BRAILLE
from opusmon.ui.keys import OTHER_KEYS, PANE_KEYS, TIME_KEYS
from opusmon.ui.playhead import Mode
from opusmon.ui.screens.dashboard import Dashboard, playhead_of
from opusmon.ui.text import plain
from opusmon.ui.widgets.lines import LinesWidget


class Driver:
    def __init__(self, app, pilot, clock):
        self.app, self.pilot, self.clock = app, pilot, clock

    @property
    def board(self):
        return next(screen for screen in self.app.screen_stack if isinstance(screen, Dashboard))

    @property
    def head(self):
        return self.board.playhead

    def at_s(self):
        """Seconds of session time at the playhead."""
        return (self.head.t - self.app.session.window.t0) / NS

    async def press(self, *keys):
        await self.pilot.press(*keys)
        await self.pilot.pause()
        if self.app.screen is self.board:
            self.board.frame()

    async def answer(self, text):
        self.app.screen.query_one(Input).value = ""
        await self.pilot.press(
            *[{" ": "space", ":": "colon", "-": "minus", ".": "full_stop"}.get(c, c) for c in text]
        )
        await self.pilot.press("enter")
        await self.pilot.pause()

    def lines(self, selector=None):
        """What the widgets of the current screen show, as plain text."""
        found = (
            self.app.screen.query(LinesWidget) if selector is None else [self.app.screen.query_one(selector)]
        )
        return [plain(line) for widget in found if widget.display for line in widget.lines]

    def text(self, selector=None):
        return "\n".join(self.lines(selector))


@contextlib.asynccontextmanager
async def replay(size=(160, 50), path=None, follow=False, glyphs=BRAILLE, **kwargs):
    clock = ManualClock()
    session = ReplaySession(Recording.open(path or h200x2()), clock, follow=follow)
    playhead = playhead_of(session, clock.now)
    playhead.pause()
    app = OpusmonApp(session, glyphs=glyphs, playhead=playhead, environ=kwargs.pop("environ", {}), **kwargs)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield Driver(app, pilot, clock)
    session.close()


async def test_space_pauses_and_plays_at_the_speed_of_the_clock():
    async with replay() as it:
        begin = it.at_s()
        await it.press("space")
        assert it.head.mode is Mode.PLAY
        it.clock.advance(5 * NS)
        assert it.at_s() == pytest.approx(begin + 5)
        await it.press("greater_than_sign", "space")
        assert it.head.speed == 2
        assert "PAUSED" in it.text("#header")


async def test_samples_are_stepped_by_both_pairs_of_keys():
    async with replay() as it:
        it.head.seek(it.app.session.window.t0 + 60 * NS)
        times = []
        for key in ("t", "right_square_bracket", "T", "left_square_bracket"):
            await it.press(key)
            times.append(it.head.t)
        window = it.app.session.window
        samples = set(window.query("gpu", 0, window.t1)["t"].tolist())
        assert set(times) <= samples
        assert times[2] == times[0]
        for earlier, later in ((times[0], times[1]), (times[3], times[0])):
            assert 0.9 < (later - earlier) / NS < 1.2  # the demo was sampled each second


async def test_jumping_and_going_to_a_time():
    async with replay() as it:
        await it.press("g")
        await it.answer("60s")
        assert it.at_s() == pytest.approx(60)
        await it.press("j")
        await it.answer("30s")
        assert it.at_s() == pytest.approx(90)
        await it.press("J")
        await it.answer("1m")
        assert it.at_s() == pytest.approx(30)
        await it.press("b")
        await it.answer("-10s")
        window = it.app.session.window
        assert (window.t1 - it.head.t) / NS == pytest.approx(10)


async def test_an_answer_that_cannot_be_used_keeps_the_question_and_says_why():
    async with replay() as it:
        before = it.head.t
        await it.press("g")
        await it.answer("9h")
        problem = it.app.screen.query_one("#problem")
        assert "9h" in str(problem.render())
        assert problem.region.height == 1
        assert it.app.screen.query_one("#answer").region.height == 1
        assert it.app.screen is not it.board
        await it.press("escape")
        assert it.app.screen is it.board
        assert it.head.t == before


async def test_marks_are_visited_in_order_and_named():
    async with replay() as it:
        await it.press("n")
        assert "bookmark: idle" in it.text("#footer")
        await it.press("n")
        assert "hbm copy on gpu 0" in it.text("#footer")
        first = it.head.t
        await it.press("n", "N")
        assert it.head.t == first


async def test_the_known_load_is_on_the_screen():
    """The copy moved 4.27 TB/s by the load's own count."""
    async with replay() as it:
        it.head.seek(it.app.session.window.t0 + 35 * NS)
        it.board.frame()
        shown = it.text("#pane-gpu")
        assert "4.2" in shown
        assert "TB/s" in shown
        assert "/140 GiB" in shown
        header = it.text("#header")
        assert "2 x H200" in header
        assert "driver 580.159.04" in header


async def test_panes_are_chosen_cycled_and_maximized():
    async with replay() as it:
        assert it.board._current == 2
        await it.press("4")
        assert it.board._current == 4
        await it.press("tab")
        assert it.board._current == 1
        await it.press("shift+tab")
        assert it.board._current == 4
        await it.press("2", "m")
        sizes = {pane.pane.name: pane.size for pane in it.board._panes if pane.display}
        assert list(sizes) == ["gpu"]
        assert sizes["gpu"].width == 160
        await it.press("escape")
        assert sum(pane.display for pane in it.board._panes) == 4
        await it.press("enter")
        assert sum(pane.display for pane in it.board._panes) == 1


async def test_a_pane_chosen_while_another_is_maximized_is_maximized():
    async with replay() as it:
        it.head.seek(it.app.session.window.t0 + 75 * NS)
        await it.press("2", "m")
        assert it.text("#pane-gpu").count("H200") == 1  # one GPU in full
        await it.press("1", "2")
        assert it.text("#pane-gpu").count("H200") == 1
        assert [pane.pane.number for pane in it.board._panes if pane.state.maximized] == [2]
        await it.press("tab")
        assert [pane.pane.number for pane in it.board._panes if pane.state.maximized] == [3]
        await it.press("2", "escape")
        assert it.text("#pane-gpu").count("H200") == 2


async def test_panes_without_a_collector_say_why_and_what_to_do():
    async with replay() as it:
        it.head.seek(it.app.session.window.t0 + 60 * NS)
        it.board.frame()
        for name, words in (
            ("latency", "No latency has been measured"),
            ("streams", "collector yet"),  # what the version that recorded it had to say
            ("stalls", "collector yet"),
        ):
            shown = it.text(f"#pane-{name}")
            assert words in shown
            assert "It would show" in shown


async def test_spans_go_from_ten_seconds_to_the_whole_session():
    async with replay() as it:
        for _ in range(9):
            await it.press("minus")
        assert it.board.span_ns == 10 * NS
        for _ in range(9):
            await it.press("plus")
        window = it.app.session.window
        assert it.board.span_ns == window.t1 - window.t0
        assert "span 3m" in it.text("#timebar")


async def test_processes_filter_and_sort():
    async with replay() as it:
        it.head.seek(it.app.session.window.t0 + 60 * NS)
        await it.press("1", "p")
        assert it.board._current == 2
        assert "python3" in it.text("#pane-gpu")
        await it.press("slash")
        await it.answer("nosuch")
        it.board.frame()
        assert "python3" not in it.text("#pane-gpu")
        await it.press("escape")
        assert "python3" in it.text("#pane-gpu")
        await it.press("s")
        assert it.board._pane().state.sort
        await it.press("1", "s")
        assert it.board._pane().state.sort


async def test_a_filter_stands_in_the_title_and_not_between_the_reader_and_other_panes():
    async with replay(path=DATA / "drill" / "memory_grows.opusmon") as it:
        it.head.seek(it.app.session.window.t0 + 60 * NS)
        for pane, name in (("1", "latency"), ("2", "gpu"), ("3", "streams"), ("4", "stalls")):
            await it.press(pane, "slash")
            await it.answer("no such " + "x" * 30)
            it.board.frame()
            assert it.lines(f"#pane-{name}")[0].startswith(
                f'╔═ {pane} {name}  filter "no such xxxxxxxxxxxxxxx~"'
            )
        await it.pilot.resize_terminal(80, 24)
        await it.pilot.pause()
        it.board.frame()
        assert "TTFT" in it.text("#pane-latency")  # of the requests that the filter leaves out
        await it.press("1", "escape")
        assert "filter" not in it.lines("#pane-latency")[0]


async def test_a_message_too_long_for_its_line_is_marked_as_cut_off():
    async with replay(size=(80, 24)) as it:
        it.board.say("word " * 30)
        assert it.text("#footer").endswith("wor~")
        assert len(it.text("#footer")) == 80


async def test_the_speed_of_the_replay_is_said_while_it_is_paused():
    async with replay() as it:
        await it.press("greater_than_sign")
        assert "replay speed x2" in it.text("#footer")
        await it.press("less_than_sign", "less_than_sign")
        assert "replay speed x0.5" in it.text("#footer")


async def test_help_cost_and_palette_open_and_close():
    async with replay() as it:
        it.head.seek(it.app.session.window.t0 + 60 * NS)
        await it.press("question_mark")
        assert "previous sample" in it.text("#sheet")
        await it.press("escape", "c")
        shown = it.text("#sheet")
        assert "gpu" in shown
        assert "nvml" in shown
        await it.press("escape")
        for key in ("colon", "ctrl+p"):
            await it.press(key)
            assert type(it.app.screen).__name__ == "CommandPalette"
            await it.press("escape")
            assert it.app.screen is it.board


async def test_a_maximized_latency_pane_has_a_request_beside_gpu_and_stalls():
    """At 160x50, on two GPUs: how busy the first one was, and where threads stood still meanwhile."""
    async with replay(path=DATA.parents[1] / "opusmon" / "demo" / "incident.opusmon") as it:
        it.head.seek(it.app.session.window.t0 + 80 * NS)
        await it.press("1", "m")
        words = [line.split()[1:3] for line in it.lines("#pane-latency") if len(line.split()) > 2]
        places = [words.index(wanted) for wanted in (["last", "token"], ["GPU", "0"])]
        (stalls,) = [n for n, each in enumerate(words) if each[0] == "stalls"]
        assert places == sorted(places)
        assert stalls == places[-1] + 1


async def test_histories_without_room_are_counted_on_a_line_of_their_own():
    """Not over the newest values of the last one."""
    async with replay(size=(80, 24), path=DATA.parents[1] / "opusmon" / "demo" / "incident.opusmon") as it:
        it.head.seek(it.app.session.window.t0 + 80 * NS)
        await it.press("2", "m")
        (line,) = [line for line in it.lines("#pane-gpu") if " more histories" in line]
        assert re.fullmatch(r"║ \+\d+ more histories: a taller terminal shows them +║", line)


async def test_the_order_of_the_requests_is_said_without_colour():
    async with replay(path=DATA / "drill" / "memory_grows.opusmon", environ={"NO_COLOR": "1"}) as it:
        it.head.seek(it.app.session.window.t0 + 60 * NS)
        it.board.frame()
        await it.press("1")
        stars = []
        for _ in range(3):
            stars.append(re.findall(r"(\w+)\*", it.text("#pane-latency")))
            await it.press("s")
        assert stars == [["E2E"], ["TTFT"], ["TPOT"]]
        assert it.text("#footer").strip() == "latency sorted by newest"


@pytest.mark.parametrize("keys", [("s",), ("slash", "p", "y", "enter")])
async def test_a_sort_or_filter_of_the_processes_shows_them(keys):
    """In a terminal that has no room for them unasked, the keys would do nothing that can be seen."""
    async with replay(size=(80, 24)) as it:
        await it.press("2")
        assert not it.board._pane().state.processes
        await it.press(*keys)
        assert it.board._pane().state.processes
        await it.press("4", *keys)
        assert not it.board._pane().state.processes


async def test_the_wheel_turns_a_sheet_by_lines():
    async with replay(size=(80, 24)) as it:
        await it.press("question_mark")
        left = [int(re.search(r"down: (\d+) more", it.lines("#sheet")[0]).group(1))]
        for _ in range(2):
            it.app.screen.on_mouse_scroll_down()
            left.append(int(re.search(r"down: (\d+) more", it.lines("#sheet")[0]).group(1)))
        assert left == [left[0], left[0] - 3, left[0] - 6]


async def test_in_ascii_the_palette_is_ascii():
    """A terminal in LANG=C shows Textual's frames, its scroll bar and the dots of its placeholder as rubbish."""
    async with replay(size=(80, 24), glyphs=ASCII, environ={"NO_COLOR": "1"}) as it:
        await it.press("colon")
        await it.pilot.pause(0.5)
        svg = it.app.export_screenshot()
        assert "pane:&#160;filter" in svg
        drawn = "".join(re.findall(r"<text[^>]*>([^<]*)", svg))
        assert [char for char in drawn if not char.isascii()] == []


async def test_every_key_that_the_help_names_is_bound():
    names = {"1-4": "1 2 3 4", "page": "pageup pagedown", "shift": "shift+tab"}
    async with replay() as it:
        bound = {key for place in (it.app, it.board) for key in place._bindings.key_to_bindings}
        for keys, words in (*TIME_KEYS, *PANE_KEYS, *OTHER_KEYS):
            for name in " ".join(names.get(key, key) for key in keys.split()).split():
                key = _character_to_key(name) if len(name) == 1 else name
                assert key in bound, (name, words)
        assert {"ctrl+p", "ctrl+q", "ctrl+c"} <= bound


async def test_the_palette_offers_the_themes_that_opusmon_themes_lists():
    async with replay() as it:
        offered = [one.title.removeprefix("theme: ") for one in it.app.get_system_commands(it.board)]
        listed = {path.stem for path in (Path(__file__).parents[2] / "themes").glob("*.toml")}
        assert listed | {"opusmon-dark"} <= set(offered)
        assert not {"nord", "textual-ansi", "ansi-light"} & set(offered)


@pytest.mark.parametrize(
    ("entry", "key", "title"),
    [
        ("show: findings", "f", "findings"),
        ("show: explain what moved first", "e", "what moved first"),
        ("show: what is missing, and why", "w", "what is missing, and why"),
        ("show: cost", "c", "what watching costs"),
        ("show: help", "?", "help"),
    ],
)
async def test_the_palette_shows_what_its_key_shows(entry, key, title):
    async with replay() as it:
        it.head.seek(it.app.session.window.t0 + 75 * NS)
        for _ in range(3):
            await it.press("minus")
        (found,) = [one for one in it.app.get_system_commands(it.board) if one.title == entry]
        assert found.help == key
        found.callback()
        await it.pilot.pause()
        await it.pilot.pause()
        shown = it.lines("#sheet")[0]
        assert title in shown
        await it.press("escape", key)
        await it.pilot.pause()
        assert it.lines("#sheet")[0] == shown


@pytest.mark.parametrize("opener", ["", "question_mark", "c", "m"])
async def test_q_leaves_from_anywhere(opener):
    async with replay() as it:
        if opener:
            await it.press(opener)
        await it.pilot.press("q")
        await it.pilot.pause()
        assert not it.app.is_running or it.app._exit


async def test_ctrl_c_leaves_while_typing():
    async with replay() as it:
        await it.press("g")
        await it.pilot.press("ctrl+c")
        await it.pilot.pause()
        assert not it.app.is_running or it.app._exit


async def test_a_replayed_file_is_not_written_to(tmp_path):
    copy = tmp_path / "copy.opusmon"
    shutil.copyfile(h200x2(), copy)
    before = copy.read_bytes()
    async with replay(path=copy) as it:
        it.head.seek(it.app.session.window.t0 + 61 * NS)
        await it.press("r")
        await it.answer("[red]look here[/]")
        it.board.frame()
        assert "not changed" in it.text("#footer")
        it.head.seek(it.app.session.window.t0 + 60 * NS)
        await it.press("n")
        assert "bookmark: [red]look here[/]" in it.text("#footer")
    assert copy.read_bytes() == before


@pytest.mark.parametrize(
    "size", [(80, 24), (100, 30), (160, 50), (240, 70), (1, 1), (2, 3), (40, 8), (300, 20)]
)
async def test_every_size_draws(size):
    async with replay(size=size) as it:
        it.head.seek(it.app.session.window.t0 + 60 * NS)
        it.board.frame()
        for widget in it.board.query(LinesWidget):
            assert all(len(plain(line)) <= max(size[0], 1) for line in widget.lines)
        for key in ("m", "m", "4", "question_mark", "escape", "g", "escape"):
            await it.press(key)


async def test_a_small_terminal_shows_one_pane_and_a_line_for_each_other():
    async with replay(size=(80, 24)) as it:
        it.head.seek(it.app.session.window.t0 + 60 * NS)
        it.board.frame()
        heights = {pane.pane.name: pane.size.height for pane in it.board._panes}
        assert heights == {"latency": 1, "gpu": 18, "streams": 1, "stalls": 1}
        assert "latency" in it.text("#pane-latency")
        await it.press("3")
        it.board.frame()
        assert it.text("#pane-gpu").count("\n") == 0
        assert "gpu" in it.text("#pane-gpu")
        header = it.text("#header")
        assert "PAUSED" in header


async def test_resizing_changes_the_layout():
    async with replay(size=(160, 50)) as it:
        await it.pilot.resize_terminal(80, 24)
        await it.pilot.pause()
        it.board.frame()
        assert {pane.size.height for pane in it.board._panes} == {1, 18}
        await it.pilot.resize_terminal(160, 50)
        await it.pilot.pause()
        assert {pane.size.width for pane in it.board._panes} == {80}


async def test_the_time_bar_is_clicked():
    async with replay() as it:
        await it.pilot.click("#timebar", offset=(90, 0))
        await it.pilot.pause()
        window = it.app.session.window
        label = len(" span 5m    ")
        share = (90 - label) / (160 - label - 6 - 1)
        assert it.at_s() == pytest.approx(share * (window.t1 - window.t0) / NS, rel=0.02)


async def test_a_pane_is_chosen_by_a_click_and_maximized_by_two():
    async with replay() as it:
        await it.pilot.click("#pane-stalls")
        await it.pilot.pause()
        assert it.board._current == 4
        await it.pilot.click("#pane-gpu", times=2)
        await it.pilot.pause()
        assert [pane.pane.name for pane in it.board._panes if pane.display] == ["gpu"]


async def test_ascii_glyphs_and_no_colour():
    async with replay(glyphs=ASCII, environ={"NO_COLOR": "1"}) as it:
        it.head.seek(it.app.session.window.t0 + 60 * NS)
        it.board.frame()
        assert it.text().isascii()
        assert it.app.theme == "mono"


async def test_a_bad_theme_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "opusmon" / "themes"
    folder.mkdir(parents=True)
    (folder / "broken.toml").write_text('name = "broken"\nprimary = "[bold]mauve-ish"\n')
    async with replay() as it:
        await it.pilot.pause()
        assert "broken.toml" in it.text("#footer")
        assert "broken" not in it.app.available_themes
        assert "opusmon-light" in it.app.available_themes


async def test_an_unknown_theme_is_said():
    async with replay(theme="nope") as it:
        await it.pilot.pause()
        assert "no theme is named 'nope'" in it.text("#footer")


async def test_what_did_not_change_is_not_drawn():
    async with replay() as it:
        it.board.frame()
        calls = []
        it.board._panes[1].draw = lambda *args: calls.append(args)
        it.board.frame()
        assert calls == []
        it.head.seek(it.head.t + 30 * NS)
        it.board.frame()
        assert len(calls) == 1


async def test_e_says_what_moved_first_in_the_span_shown():
    async with replay() as it:
        window = it.app.session.window
        it.head.seek(window.t0 + 75 * NS)  # the matmul has begun: power is capped
        for _ in range(3):
            await it.press("minus")
        assert it.board.span_ns == 30 * NS
        await it.press("e")
        await it.pilot.pause()
        shown = it.text("#sheet")
        assert "what moved first" in shown
        assert "correlation" in shown
        await it.press("escape")
        it.head.seek(window.t0 + 3 * NS)
        await it.press("e")
        assert it.app.screen is it.board  # too little before it to compare with, and it says so
        assert "too little" in it.text("#footer")
        assert "--" not in it.text("#footer")  # no words of the command line


async def test_e_compares_the_halves_of_a_session_shorter_than_its_span():
    async with replay() as it:
        window = it.app.session.window
        it.head.seek(window.t0 + 90 * NS)
        assert it.board.span_ns == 300 * NS
        await it.press("e")
        middle, playhead = (format_wall(window.anchors, window.t0 + s * NS) for s in (45, 90))
        assert f"{middle} to {playhead}" in it.text("#sheet")
