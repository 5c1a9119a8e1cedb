import unicodedata

import pytest

from opusmon.ui import glyphs
from opusmon.ui.text import CUT_OFF


@pytest.mark.parametrize(
    ("name", "env", "encoding", "expected"),
    [
        ("auto", {"TERM": "xterm-256color"}, "utf-8", "braille"),
        ("auto", {"TERM": "xterm-256color"}, "UTF8", "braille"),
        ("auto", {"TERM": "tmux-256color"}, "ANSI_X3.4-1968", "ascii"),
        ("auto", {"TERM": "xterm"}, "ISO-8859-1", "ascii"),
        ("auto", {"TERM": "linux"}, "utf-8", "block"),
        ("auto", {"TERM": "linux"}, "ascii", "ascii"),
        ("auto", {"TERM": "dumb"}, "utf-8", "ascii"),
        ("auto", {}, "utf-8", "ascii"),
        ("auto", {"TERM": "xterm"}, "no-such-encoding", "ascii"),
        ("braille", {"TERM": "dumb"}, "ascii", "braille"),
        ("ascii", {"TERM": "xterm"}, "utf-8", "ascii"),
    ],
)
def test_pick(name, env, encoding, expected):
    assert glyphs.pick(name, env, encoding).name == expected


def test_an_unknown_set_is_one_line_that_names_the_others():
    with pytest.raises(ValueError, match="'emoji': choose one of auto, braille, block, ascii"):
        glyphs.pick("emoji", {}, "utf-8")


def characters(chosen: glyphs.Glyphs) -> str:
    singles = [chosen.track, chosen.idle, chosen.unknown, chosen.select, CUT_OFF]
    bars = [chosen.playhead, chosen.span, chosen.rest]
    edges = [
        getattr(border, name)
        for border in (chosen.border, chosen.border_focus)
        for name in border.__dataclass_fields__
    ]
    assert all(len(char) == 1 for char in [*singles, *bars, *edges])
    return "".join([chosen.levels, chosen.bar_parts, chosen.shades, *singles, *bars, *edges])


def test_ascii_is_ascii():
    assert characters(glyphs.ASCII).isascii()


@pytest.mark.parametrize("chosen", [glyphs.BRAILLE, glyphs.BLOCK])
def test_only_narrow_characters_and_no_private_use_or_emoji(chosen):
    for char in characters(chosen):
        wide = unicodedata.east_asian_width(char)
        drawing = 0x2500 <= ord(char) <= 0x259F  # box drawing and block elements
        assert wide in ("N", "Na") or (wide == "A" and drawing), char
        assert unicodedata.category(char) != "Co"
        assert char.isascii() or 0x2500 <= ord(char) <= 0x259F or 0x2800 <= ord(char) <= 0x28FF


@pytest.mark.parametrize("chosen", glyphs.BY_NAME.values())
def test_heat_map_shades_are_eight(chosen):
    assert len(chosen.shades) == 8


@pytest.mark.parametrize("chosen", glyphs.BY_NAME.values())
def test_the_focused_frame_differs_in_shape(chosen):
    assert chosen.border.horizontal != chosen.border_focus.horizontal


@pytest.mark.parametrize(
    ("env", "encoding"),
    [
        ({"LANG": "en_US.UTF-8"}, "UTF-8"),
        ({"LANG": "C.UTF-8"}, "UTF-8"),
        ({"LANG": "de_DE.ISO-8859-1"}, "ISO-8859-1"),
        ({"LANG": "de_DE.ISO-8859-15@euro"}, "ISO-8859-15"),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, "ascii"),  # what Python makes of LANG=C
        ({"LC_CTYPE": "C.UTF-8"}, "ascii"),  # and of no locale at all
        ({"LANG": "C", "LC_ALL": "C.UTF-8"}, "UTF-8"),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "C"}, "ascii"),
        ({"LANG": "C", "LC_CTYPE": "en_US.UTF-8"}, "UTF-8"),
        ({"LANG": "en_US"}, "ascii"),
        ({}, "ascii"),
    ],
)
def test_the_encoding_is_the_locales_and_not_what_python_makes_of_it(env, encoding):
    assert glyphs.terminal_encoding(env) == encoding
