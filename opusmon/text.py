"""Text from outside, for every layer: names of processes, models and hosts may come from a hostile file."""

from __future__ import annotations

REPLACEMENT = "?"
"""Stands for a character that may not reach the terminal."""


def printable(text: str) -> str:
    """One line that a terminal shows and does not obey: every unprintable character becomes `REPLACEMENT`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else REPLACEMENT for char in text)
