from pathlib import Path

import pytest
from rich.style import Style
from textual.app import App
from textual.color import Color
from textual.theme import BUILTIN_THEMES

from opusmon.ui import themes
from opusmon.ui.text import STYLES

FOLDER = Path(themes.__file__).parents[2] / "themes"
NAMES = ["high-contrast", "mono", "okabe-ito", "opusmon-dark", "opusmon-light"]
COLOURED = [name for name in NAMES if name != "mono"]
READ_AS_TEXT = [
    "value",
    "label",
    "dim",
    "title",
    "ok",
    "warn",
    "bad",
    "accent",
    "mark",
    "key",
    "border-focus",
]


def shipped():
    found, problems = themes.load_themes([FOLDER])
    assert problems == []
    return found


def luminance(colour: Color) -> float:
    """WCAG 2 relative luminance."""
    parts = [part / 255 for part in (colour.r, colour.g, colour.b)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio."""
    high, low = sorted((luminance(Color.parse(one)), luminance(Color.parse(other))), reverse=True)
    return (high + 0.05) / (low + 0.05)


def hex_of(style: Style, part: str = "color") -> str:
    return getattr(style, part).get_truecolor().hex


def test_contrast_is_the_published_one():
    assert contrast("#ffffff", "#000000") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # the well-known near miss


def test_the_shipped_themes_are_these_five():
    assert sorted(shipped()) == NAMES
    assert themes.DEFAULT in NAMES
    assert themes.NO_COLOUR in NAMES
    assert themes.FEW_COLOURS in NAMES


@pytest.mark.parametrize("name", COLOURED)
@pytest.mark.parametrize("style", READ_AS_TEXT)
def test_text_can_be_read(name, style):
    theme = shipped()[name]
    colour = hex_of(themes.palette(theme)[style])
    for ground in (theme.background, theme.surface):
        assert contrast(colour, ground) >= 4.5, f"{name} {style} on {ground}"


@pytest.mark.parametrize("name", COLOURED)
def test_plain_text_and_the_selected_row_can_be_read(name):
    theme = shipped()[name]
    assert contrast(theme.foreground, theme.background) >= 7
    select = themes.palette(theme)["select"]
    assert contrast(hex_of(select), hex_of(select, "bgcolor")) >= 4.5


@pytest.mark.parametrize("name", COLOURED)
def test_charts_can_be_seen(name):
    theme = shipped()[name]
    for number in range(6):
        assert contrast(hex_of(themes.palette(theme)[f"series{number}"]), theme.background) >= 3


@pytest.mark.parametrize("name", ["opusmon-dark", "opusmon-light", "okabe-ito"])
def test_the_heat_ramp_is_monotone_so_that_it_survives_greyscale(name):
    ramp = [luminance(Color.parse(hex_of(themes.palette(shipped()[name])[f"heat{n}"]))) for n in range(8)]
    assert ramp == sorted(ramp, reverse=name == "opusmon-light")
    assert len(set(ramp)) == 8


def test_okabe_ito_series_are_the_published_colours():
    published = {"#e69f00", "#56b4e9", "#009e73", "#f0e442", "#d55e00", "#cc79a7"}
    palette = themes.palette(shipped()["okabe-ito"])
    assert {hex_of(palette[f"series{n}"]) for n in range(6)} == published


def test_mono_uses_no_colour_and_still_tells_what_matters_apart():
    palette = themes.palette(shipped()["mono"])
    assert all(style.color is None and style.bgcolor is None for style in palette.values())
    assert len({palette[name] for name in ("", "warn", "bad", "value", "select")}) == 5


@pytest.mark.parametrize("name", [*NAMES, *BUILTIN_THEMES])
def test_every_style_name_has_a_style_in_any_theme(name):
    theme = {**BUILTIN_THEMES, **shipped()}[name]
    assert set(themes.palette(theme)) == set(STYLES)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("name = 'x'\nprimary = ", "not TOML"),
        ("name = 'x'\nprimary = '#00f'\nprimry = '#fff'", "unknown key primry"),
        ("name = 'x'\nprimary = 'blurple'", "primary: 'blurple' is not a colour"),
        ("name = 'x'\nprimary = 7", "primary is missing"),
        ("name = 'x'\nprimary = '#00f'\nsurface = 7", "surface must be a colour in quotes"),
        ("primary = '#00f'", "name is missing"),
        ("name = 'x'\nprimary = '#00f'\ndark = 'yes'", "dark must be true or false"),
        ("name = 'x'\nprimary = '#00f'\ntext_alpha = 3", "text_alpha must be a number from 0 to 1"),
        ("name = 'x'\nprimary = '#00f'\nvariables = 3", "variables must be a table"),
        (
            "name = 'x'\nprimary = '#00f'\n[variables]\nstyle-wrn = 'red'",
            "variables.style-wrn: no such style",
        ),
        (
            "name = 'x'\nprimary = '#00f'\n[variables]\nstyle-warn = 'blod red'",
            "variables.style-warn: 'blod red'",
        ),
        ("name = 'x'\nprimary = '#00f'\n[variables]\na = 'b; color: red'", "variables.a must be text"),
        (
            "name = 'x'\nprimary = '#00f'\n[variables]\n'a b' = 'red'",
            "variables: 'a b' is not a variable name",
        ),
        (
            "name = 'x'\nprimary = '#00f'\n[variables]\nscrollbar = 'zzz'",
            "variables.scrollbar: 'zzz' is not a colour",
        ),
        (
            "name = 'x'\nprimary = '#00f'\n[variables]\nblock-cursor-text-style = 'loud'",
            "'loud' is not a text style",
        ),
        ("a = " + "[" * 5000, "not TOML"),
        ("# " + "x" * 70_000, "larger than 64 KiB"),
    ],
)
def test_a_bad_file_is_one_message_and_the_others_still_load(tmp_path, text, fault):
    (tmp_path / "bad.toml").write_text(text)
    (tmp_path / "good.toml").write_text("name = 'good'\nprimary = '#0000ff'\n")
    found, problems = themes.load_themes([tmp_path])
    assert list(found) == ["good"]
    assert len(problems) == 1
    assert str(tmp_path / "bad.toml") in problems[0]
    assert fault in problems[0]
    assert "\n" not in problems[0]


def test_bytes_that_are_no_text_and_folders_named_like_themes(tmp_path):
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00name")
    (tmp_path / "folder.toml").mkdir()
    found, problems = themes.load_themes([tmp_path, tmp_path / "absent"])
    assert found == {}
    assert len(problems) == 2


def test_a_later_folder_wins_by_name(tmp_path):
    (tmp_path / "mine.toml").write_text("name = 'opusmon-dark'\nprimary = '#123456'\n")
    found, _ = themes.load_themes([FOLDER, tmp_path])
    assert found["opusmon-dark"].primary == "#123456"


@pytest.mark.parametrize(
    ("requested", "env", "color_system", "expected"),
    [
        (None, {}, "truecolor", "opusmon-dark"),
        (None, {}, "256", "opusmon-dark"),
        (None, {}, "standard", "high-contrast"),
        (None, {}, None, "mono"),
        (None, {"NO_COLOR": "1"}, "truecolor", "mono"),
        (None, {"NO_COLOR": ""}, "truecolor", "mono"),
        ("okabe-ito", {"NO_COLOR": "1"}, "standard", "okabe-ito"),
    ],
)
def test_choose(requested, env, color_system, expected):
    assert themes.choose(requested, env, color_system) == expected


def test_variables_of_the_builtin_themes_pass_the_checks():
    for theme in BUILTIN_THEMES.values():
        themes.parse_theme({"name": "copy", "primary": theme.primary, "variables": theme.variables})


@pytest.mark.parametrize("name", NAMES)
async def test_textual_accepts_the_theme(name):
    class Bare(App):
        CSS = "Screen { background: $background; color: $foreground; }"

        def on_mount(self):
            self.register_theme(shipped()[name])
            self.theme = name

    app = Bare()
    async with app.run_test(size=(20, 5)) as pilot:
        await pilot.pause()
        assert app.current_theme.name == name
