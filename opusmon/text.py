"""Text from outside, for every layer: names of processes, models and hosts may come from a hostile file."""

from __future__ import annotations

import textwrap

REPLACEMENT = "?"
"""Stands for a character that may not reach the terminal."""


def printable(text: str) -> str:
    """One line that a terminal shows and does not obey: every unprintable character becomes `REPLACEMENT`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else REPLACEMENT for char in text)


def reason_of(error: BaseException) -> str:
    """What went wrong in a few words: what the operating system says of it, without its number and the path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[0].lower() + error.strerror[1:]
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def counted(number: int, noun: str) -> str:
    """`1 finding`, `2 findings`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def hanging(head: str, text: str, width: int, *, whole_words: bool = False) -> list[str]:
    """A paragraph that begins with `head` and whose other lines stand under its text; no line for no text.

    Words are not broken at hyphens, so that a command can be copied; with `whole_words` not even where they are
    longer than the width, so that a path can be.
    """
    return textwrap.wrap(
        printable(text),
        max(width, len(head) + 20),
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
        break_long_words=not whole_words,
    )
