import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from opusmon.ui import glyphs
from opusmon.ui.text import (
    STYLES,
    box,
    cells,
    clean,
    columns,
    cut,
    fill,
    fit,
    fit_lines,
    join,
    line_cells,
    merge,
    pad,
    plain,
    restyle,
    shorten,
    spread,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vllm serve", "vllm serve"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07name", "name"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x9b2Jclear", "clear"),
        ("\x1bPq#0\x1b\\x", "x"),
        ("\x1bc", ""),
        ("a\x1b", "a?"),
        ("bell\x07null\x00", "bell?null?"),
        ("two\nlines\tand tab\r", "two lines and tab "),
        ("abc\u202egnp.exe", "abc?gnp.exe"),
        ("\u2066isolate\u2069", "?isolate?"),
        ("zero\u200bwidth\ufeff", "zero?width?"),
        ("e\u0301", "e?"),
        ("\U0001f525 fire", "? fire"),
        ("[bold red]not markup[/]", "[bold red]not markup[/]"),
        ("日本語モデル", "日本語モデル"),
        ("Modèle-7B", "Modèle-7B"),
        ("lone \ud800 surrogate", "lone ? surrogate"),
        ("private \ue0b0", "private ?"),
    ],
)
def test_clean(text, expected):
    assert clean(text) == expected


def test_clean_cuts_by_cells_and_never_halves_a_wide_character():
    assert clean("日本語", 5) == "日本"
    assert clean("日本語", 6) == "日本語"
    assert clean("abcdef", 3) == "abc"
    assert clean("abc", 0) == ""


def test_every_character_that_clean_lets_through_has_the_width_the_terminal_library_gives_it():
    wrong = []
    for code in range(sys.maxunicode + 1):
        char = clean(chr(code))
        if cells(char) != cell_len(char):
            wrong.append(f"U+{code:04X}")
    assert wrong == []


@given(st.text(max_size=60))
def test_clean_text_is_one_printable_line(text):
    safe = clean(text)
    assert safe.isprintable()
    assert not any(ord(char) < 32 or 0x7F <= ord(char) < 0xA0 for char in safe)
    assert clean(safe) == safe


@given(st.text(max_size=40), st.integers(-3, 50))
def test_cut_never_exceeds_its_width(text, width):
    short = cut(clean(text), width)
    assert cells(short) <= max(width, 0)
    assert clean(text).startswith(short)


spans = st.lists(st.tuples(st.text(max_size=12).map(clean), st.sampled_from(STYLES)), max_size=6).map(tuple)


@given(spans, st.integers(-2, 60))
def test_fit_gives_exactly_the_width(line, width):
    assert line_cells(fit(line, width)) == max(width, 0)


@given(st.lists(spans, max_size=5), st.integers(0, 40), st.integers(-1, 8))
def test_fit_lines_gives_exactly_the_size(lines, width, height):
    fitted = fit_lines(lines, width, height)
    assert len(fitted) == max(height, 0)
    assert {line_cells(line) for line in fitted} <= {width}


@given(spans)
def test_merge_keeps_the_text_and_leaves_no_equal_neighbours(line):
    merged = merge(line)
    assert plain(merged) == plain(line)
    assert all(a[1] != b[1] for a, b in pairwise(merged))


def test_a_wide_character_at_the_edge_becomes_padding():
    assert plain(fit((("日本", "value"),), 3)) == "日 "


def test_pad_and_columns_line_up():
    assert pad("7", 3, ">") == "  7"
    assert pad("name", 6) == "name  "
    assert pad("too long", 3) == "too"
    row = columns([((("ab", ""),), 4, "<"), ((("12", "value"),), 5, ">"), ((("toolong", ""),), 3, ">")])
    assert plain(row) == "ab      12 too"


def test_join_and_fill_skip_what_is_empty_or_does_not_fit():
    parts = [(("one", ""),), (), (("three", ""),), (("x", ""),)]
    assert plain(join(parts)) == "one  three  x"
    assert plain(fill(parts, 6)) == "one  x"
    assert fill([(("long", ""),)], 3) == ()


def test_spread_and_restyle():
    assert plain(spread((("l", ""),), (("r", ""),), 6)) == "l    r"
    assert plain(spread((("left", ""),), (("right", ""),), 6)) == "left  "
    assert restyle((("a", "value"), ("b", "bad")), "dim", frozenset({"bad"})) == (("a", "dim"), ("b", "bad"))


def test_box_in_ascii():
    lines = [(("ab", ""),), (("cdefghijkl", ""),)]
    shown = [plain(line) for line in box(lines, "2 gpu", 12, 5, focused=False, glyphs=glyphs.ASCII)]
    assert shown == [
        "+- 2 gpu --+",
        "|ab        |",
        "|cdefghijkl|",
        "|          |",
        "+----------+",
    ]


def test_a_focused_box_looks_different_without_colour():
    focused = box([], "x", 10, 3, focused=True, glyphs=glyphs.BRAILLE)
    other = box([], "x", 10, 3, focused=False, glyphs=glyphs.BRAILLE)
    assert plain(focused[0]) == "╔═ x ════╗"
    assert plain(other[0]) == "┌─ x ────┐"
    assert focused[0][0][1] == "border-focus"


def test_a_title_from_outside_cannot_escape_the_box():
    top = plain(box([], "\x1b[2Jevil\nname", 14, 3, focused=False, glyphs=glyphs.ASCII)[0])
    assert top == "+- evil name +"


@given(
    st.integers(0, 30),
    st.integers(0, 8),
    st.text(max_size=20),
    st.booleans(),
    st.sampled_from(list(glyphs.BY_NAME)),
)
def test_box_has_exactly_its_size(width, height, title, focused, name):
    lines = box(
        [(("日本語 inside", ""),)], title, width, height, focused=focused, glyphs=glyphs.BY_NAME[name]
    )
    assert len(lines) == height
    assert {line_cells(line) for line in lines} <= {width}


def test_what_is_cut_off_is_marked():
    line = (("one ", "label"), ("two", "value"))
    assert shorten(line, 7) is line
    assert shorten(line, 6) == (("one ", "label"), ("t", "value"), ("~", "value"))
    assert plain(shorten((("日本語", ""),), 4)) == "日 ~"
    assert [plain(shorten(line, width)) for width in (2, 1, 0, -1)] == ["o~", "~", "", ""]
