from unittest.mock import patch

from rich.style import Style
from textual.app import App
from textual.geometry import Region

from opusmon.ui import themes
from opusmon.ui.widgets.lines import LinesWidget

FIRST = [(("one", "value"),), (("two", "bad"), (" [red]x[/]", "")), (("three", "dim"),)]


class Bare(App):
    CSS = "LinesWidget { width: 100%; height: 100%; }"

    def compose(self):
        yield LinesWidget(FIRST)

    def on_mount(self):
        found, _ = themes.load_themes()
        for theme in found.values():
            self.register_theme(theme)
        self.theme = "opusmon-dark"


def row(widget, y):
    return widget.render_line(y).text


async def test_it_shows_plain_text_and_blank_rows_below():
    async with Bare().run_test(size=(20, 5)) as pilot:
        widget = pilot.app.query_one(LinesWidget)
        await pilot.pause()
        screen = [strip.text for strip in pilot.app.screen._compositor.render_strips()]
        assert screen == [text.ljust(20) for text in ("one", "two [red]x[/]", "three", "", "")]
        assert row(widget, 1) == "two [red]x[/]"
        assert row(widget, 99).strip() == ""


async def test_only_changed_rows_are_repainted():
    async with Bare().run_test(size=(20, 5)) as pilot:
        widget = pilot.app.query_one(LinesWidget)
        await pilot.pause()
        second = [FIRST[0], (("TWO", "bad"),), FIRST[2]]
        with patch.object(widget, "refresh") as refresh:
            assert widget.set_lines(second) == 1
            refresh.assert_called_once_with(Region(0, 1, 20, 1))
            refresh.reset_mock()
            assert widget.set_lines(list(second)) == 0
            refresh.assert_not_called()
        assert row(widget, 1) == "TWO"


async def test_rows_that_come_and_go_are_repainted():
    async with Bare().run_test(size=(20, 5)) as pilot:
        widget = pilot.app.query_one(LinesWidget)
        await pilot.pause()
        assert widget.set_lines(FIRST[:1]) == 2
        await pilot.pause()
        assert row(widget, 1).strip() == ""
        assert widget.set_lines([*FIRST, (("four", ""),)]) == 3
        await pilot.pause()
        screen = [strip.text.rstrip() for strip in pilot.app.screen._compositor.render_strips()]
        assert screen == ["one", "two [red]x[/]", "three", "four", ""]


async def test_an_unchanged_row_is_the_same_strip():
    async with Bare().run_test(size=(20, 5)) as pilot:
        widget = pilot.app.query_one(LinesWidget)
        await pilot.pause()
        widget.render_line(0)
        kept = widget._strips[0]
        widget.set_lines([FIRST[0], (("new", ""),)])
        assert kept is not None
        assert widget._strips[0] is kept


async def test_styles_follow_the_theme():
    async with Bare().run_test(size=(20, 5)) as pilot:
        widget = pilot.app.query_one(LinesWidget)
        await pilot.pause()
        assert widget.styles_by_name["bad"] == Style.parse("bold #ff6f61")
        assert widget.render_line(1)._segments[0].style.color.get_truecolor().hex == "#ff6f61"
        pilot.app.theme = "okabe-ito"
        await pilot.pause()
        assert widget.render_line(1)._segments[0].style.color.get_truecolor().hex == "#f0783c"


async def test_lines_set_before_it_is_mounted_are_shown():
    class Early(App):
        def compose(self):
            widget = LinesWidget()
            widget.set_lines([(("early", ""),)])
            yield widget

    async with Early().run_test(size=(10, 2)) as pilot:
        await pilot.pause()
        assert row(pilot.app.query_one(LinesWidget), 0) == "early"


async def test_a_terminal_of_one_cell():
    async with Bare().run_test(size=(1, 1)) as pilot:
        await pilot.pause()
        pilot.app.query_one(LinesWidget).set_lines([(("wide", ""),)])
        await pilot.pause()
