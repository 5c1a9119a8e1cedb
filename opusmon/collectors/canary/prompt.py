"""Prompts of a wanted length that no prefix cache has seen, made of words that mean nothing."""

from __future__ import annotations

import secrets

_WORDS = (
    "apple",
    "river",
    "table",
    "green",
    "window",
    "paper",
    "music",
    "garden",
    "stone",
    "winter",
    "letter",
)
"""Common words, about one token each: words measure tokens until the server has counted a prompt."""
_ASK = "Ignore the words above. Count from one upwards, in words."
FIXED_TOKENS = 48
"""Unique head, question and chat template, about."""
MOST_PER_WORD = 2.0
"""Reserved per word until the server's own count is known."""


def prompt(tokens: float, per_word: float = 1.0) -> str:
    """A prompt of about so many tokens; its head is random, so that it shares no prefix with any other.

    Args:
        tokens: wanted length, question and chat template included.
        per_word: tokens of a word, as the server counted them before.
    """
    count = max(0, round((tokens - FIXED_TOKENS) / per_word))
    filler = " ".join(_WORDS[place % len(_WORDS)] for place in range(count))
    return f"{secrets.token_hex(8)}\n{filler}\n{_ASK}"


def words(tokens: float) -> int:
    """Filler words of a prompt of so many tokens at one token a word."""
    return max(0, round(tokens - FIXED_TOKENS))


def bound(tokens: float) -> int:
    """The most tokens that a prompt of about so many can turn out to be, before the server has counted one."""
    return round(MOST_PER_WORD * (words(tokens) + FIXED_TOKENS))
