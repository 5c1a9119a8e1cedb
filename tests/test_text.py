"""Text from outside, before any layer prints it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusmon.text import hanging, printable
from opusmon.ui.text import clean


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("Modèle-7B 日本語", "Modèle-7B 日本語"),
        ("\x1b[31mred\x1b[0m", "?[31mred?[0m"),
        ("two\nlines\tand \x9b2J", "two?lines?and ?2J"),
        ("abc\u202egnp.exe", "abc?gnp.exe"),
        ("lone \udc80 surrogate", "lone ? surrogate"),
        ("\x7f\u2028\xa0", "???"),
    ],
)
def test_what_a_terminal_would_obey_is_replaced(text: str, expected: str) -> None:
    assert printable(text) == expected


@given(st.text(st.characters()))
def test_one_line_of_the_same_length_comes_out_and_stays(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) == len(text)
    assert printable(shown) == shown
    assert all(new in (old, "?") for old, new in zip(text, shown, strict=True))


@given(st.text(st.characters()))
def test_the_screen_takes_no_more_than_the_printed_line(text: str) -> None:
    assert printable(clean(text)) == clean(text)


def test_a_paragraph_hangs_under_the_text_of_its_head():
    assert hanging("  fix: ", "modprobe nvidia && opusmon doctor --json again", 31) == [
        "  fix: modprobe nvidia &&",
        "       opusmon doctor --json",
        "       again",
    ]
    assert hanging("a ", "\x1b[1mb", 80) == ["a ?[1mb"]
    assert hanging("head: ", "", 80) == []
