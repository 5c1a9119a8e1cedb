"""The characters charts, bars and borders are drawn with: braille, block or plain ASCII.

No emoji, no private-use (Nerd Font) glyphs, and no character whose width depends on the East Asian
setting of a terminal except box drawing and block elements, which terminals draw one cell wide.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Border:
    """The characters of a frame, one cell each."""

    horizontal: str
    vertical: str
    top_left: str
    top_right: str
    bottom_left: str
    bottom_right: str


@dataclass(frozen=True, slots=True)
class Glyphs:
    """One glyph set.

    Attributes:
        name: "braille", "block" or "ascii".
        levels: characters that fill a cell from the bottom, lowest first; at least one.
        bar_parts: characters that fill a cell from the left, least first; the last one is the full cell.
        track: the empty part of a bar.
        shades: heat map levels 0 to 7 for terminals without colour, in growing ink.
        idle: a measured zero in a strip.
        unknown: a missing value in a strip.
        dots: True when charts use 2 x 4 braille dots per cell.
        border: an ordinary frame.
        border_focus: the frame of the pane that has the keys; differs in shape, not only in colour.
        select: put before the selected row.
        playhead: the instant shown, on the time bar.
        span: the range shown, on the time bar.
        rest: the other time on the time bar.
    """

    name: str
    levels: str
    bar_parts: str
    track: str
    shades: str
    idle: str
    unknown: str
    dots: bool
    border: Border
    border_focus: Border
    select: str
    playhead: str
    span: str
    rest: str

    @property
    def columns_per_cell(self) -> int:
        """Values a chart can show side by side in one cell."""
        return 2 if self.dots else 1


_LINES = Border("─", "│", "┌", "┐", "└", "┘")
_DOUBLE = Border("═", "║", "╔", "╗", "╚", "╝")
_PLAIN = Border("-", "|", "+", "+", "+", "+")
_PLAIN_FOCUS = Border("=", "|", "#", "#", "#", "#")

BRAILLE = Glyphs(
    name="braille",
    levels="▁▂▃▄▅▆▇█",
    bar_parts="▏▎▍▌▋▊▉█",
    track="░",
    shades=" ⠂⠒⠖⠶⡶⣶⣿",
    idle="_",
    unknown="?",
    dots=True,
    border=_LINES,
    border_focus=_DOUBLE,
    select=">",
    playhead="┃",
    span="━",
    rest="─",
)

BLOCK = Glyphs(
    name="block",
    levels="▁▂▃▄▅▆▇█",
    bar_parts="▌█",
    track="░",
    shades=" ░░▒▒▓▓█",
    idle="_",
    unknown="?",
    dots=False,
    border=_LINES,
    border_focus=_DOUBLE,
    select=">",
    playhead="║",
    span="═",
    rest="─",
)

ASCII = Glyphs(
    name="ascii",
    levels=".:-=+*#@",
    bar_parts="#",
    track="-",
    shades=" .:-=+*#",
    idle="_",
    unknown="?",
    dots=False,
    border=_PLAIN,
    border_focus=_PLAIN_FOCUS,
    select=">",
    playhead="|",
    span="=",
    rest="-",
)

BY_NAME: Mapping[str, Glyphs] = {glyphs.name: glyphs for glyphs in (BRAILLE, BLOCK, ASCII)}
NAMES = ("auto", *BY_NAME)


def pick(name: str, env: Mapping[str, str], encoding: str) -> Glyphs:
    """The glyph set for a terminal.

    Args:
        name: "auto", "braille", "block" or "ascii".
        env: the environment; only TERM is read.
        encoding: of the terminal's locale, as Python names it.

    Raises:
        ValueError: the name is none of these.
    """
    if name != "auto":
        if name not in BY_NAME:
            raise ValueError(f"glyphs {name!r}: choose one of {', '.join(NAMES)}")
        return BY_NAME[name]
    term = env.get("TERM", "")
    if not _is_utf8(encoding) or term in ("", "dumb"):
        return ASCII
    return BLOCK if term.startswith("linux") else BRAILLE


def terminal_encoding(env: Mapping[str, str]) -> str:
    """Encoding of the terminal by the locale variables, as the C library picks them.

    Python's own answer will not do: in the C locale it sets LC_CTYPE to a UTF-8 one by itself (PEP 538), which
    changes what Python writes and not what the terminal, or the tmux server, can show.

    Args:
        env: the environment.
    """
    language = env.get("LANG", "")
    name = env.get("LC_ALL") or env.get("LC_CTYPE") or language
    coerced = (
        name in ("C.UTF-8", "C.utf8", "UTF-8") and not env.get("LC_ALL") and language in ("", "C", "POSIX")
    )
    if coerced or name in ("", "C", "POSIX"):
        return "ascii"
    return name.partition(".")[2].partition("@")[0] or "ascii"


def _is_utf8(encoding: str) -> bool:
    try:
        return codecs.lookup(encoding).name == "utf-8"
    except LookupError:
        return False
