"""Styled lines of plain text, measured in terminal cells.

A line is a tuple of spans, a span is (text, style name). Style names are a closed set; what they look like
is the theme's business. Text has no markup meaning anywhere. Text from outside (process names, model names,
headers) goes through `clean` before it becomes a span.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from opusmon.text import REPLACEMENT

if TYPE_CHECKING:
    from opusmon.ui.glyphs import Glyphs

Span = tuple[str, str]
Line = tuple[Span, ...]
Align = Literal["<", ">"]

STYLES: tuple[str, ...] = (
    "",
    "dim",
    "title",
    "value",
    "label",
    "ok",
    "warn",
    "bad",
    "accent",
    *(f"series{n}" for n in range(6)),
    *(f"heat{n}" for n in range(8)),
    "select",
    "border",
    "border-focus",
    "mark",
    "key",
)
"""Every style name a span may carry."""

CUT_OFF = "~"
"""Stands where text was cut off."""

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement, modes
    r"|\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # OSC, DCS, SOS, PM, APC up to their terminator
    r"|\x1b[ -/]*[0-~]"  # two-character escapes
    r"|\x9b[0-?]*[ -/]*[@-~]"  # CSI as one C1 byte
)
_UNSAFE_WIDTH = (
    (0x0600, 0x0605),  # Arabic number signs: drawn with zero or one cell
    (0x115F, 0x11FF),  # conjoining Hangul: joins what precedes it
    (0x3164, 0x3164),  # Hangul filler: drawn with no cell, one or two
    (0x4DC0, 0x4DFF),  # hexagrams: one or two cells by the version of Unicode
    (0xA960, 0xA97F),  # conjoining Hangul, extended A
    (0xD7B0, 0xD7FF),  # conjoining Hangul, extended B
    (0x2600, 0x27BF),  # symbols that many terminals draw as two-cell emoji
    (0x2B00, 0x2BFF),  # arrows and stars, likewise
    (0xFFA0, 0xFFA0),  # halfwidth Hangul filler
    (0x1D300, 0x1D376),  # monograms and counting rods: as the hexagrams
    (0x1F000, 0x1FAFF),  # emoji
)


def _char(char: str) -> str:
    """What may be shown for one character: itself, a space, or the replacement."""
    if char in "\t\n\r\v\f":
        return " "
    if not char.isprintable() or (char != " " and unicodedata.category(char)[0] in "MCZ"):
        return REPLACEMENT
    code = ord(char)
    if any(low <= code <= high for low, high in _UNSAFE_WIDTH):
        return REPLACEMENT
    return char


@lru_cache(maxsize=4096)
def _clean(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_char, _ESCAPES.sub("", text)))


def clean(text: str, width: int | None = None) -> str:
    """Make text from outside safe to print: one line, no control, no escapes, no bidi overrides, known width.

    Whole escape sequences are removed; every other character that is not plain printable text, combining
    marks and emoji included, becomes `REPLACEMENT`; tabs and line ends become spaces.

    Args:
        text: anything.
        width: when given, the result is cut to at most this many cells.
    """
    safe = _clean(text)
    return safe if width is None else cut(safe, width)


def cells(text: str) -> int:
    """Terminal cells that cleaned text takes."""
    return len(text) if text.isascii() else _wide_cells(text)


@lru_cache(maxsize=4096)
def _wide_cells(text: str) -> int:
    return len(text) + sum(unicodedata.east_asian_width(char) in "WF" for char in text)


def cut(text: str, width: int) -> str:
    """The start of the text that fits in `width` cells; a two-cell character is never halved."""
    if cells(text) <= width:
        return text
    if text.isascii():
        return text[: max(width, 0)]
    used = 0
    for place, char in enumerate(text):
        used += 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if used > width:
            return text[:place]
    return text


def abbreviated(text: str, width: int) -> str:
    """The text in at most `width` cells, at least one; it ends with `CUT_OFF` when something was cut off."""
    return text if cells(text) <= width else cut(text, width - 1) + CUT_OFF


def line_cells(line: Line) -> int:
    """Terminal cells that a line takes."""
    return sum(cells(text) for text, _ in line)


def plain(line: Line) -> str:
    """The text of a line without its styles."""
    return "".join(text for text, _ in line)


def fit(line: Line, width: int, style: str = "") -> Line:
    """Cut or pad a line to exactly `width` cells.

    Args:
        line: spans.
        width: cells; negative counts as 0.
        style: of the padding.
    """
    left = max(width, 0)
    out: list[Span] = []
    for text, name in line:
        size = len(text) if text.isascii() else _wide_cells(text)  # as `cells`; this is the hottest loop
        if size > left:
            text = cut(text, left)
            size = cells(text)
            if text:
                out.append((text, name))
                left -= size
            break
        if text:
            out.append((text, name))
            left -= size
    if left:
        out.append((" " * left, style))
    return tuple(out)


def fit_lines(lines: Iterable[Line], width: int, height: int) -> list[Line]:
    """Exactly `height` lines of exactly `width` cells: cut at the right and the bottom, padded with blanks."""
    height = max(height, 0)
    fitted = [fit(line, width) for line, _ in zip(lines, range(height), strict=False)]
    fitted.extend([fit((), width)] * (height - len(fitted)))
    return fitted


def pad(text: str, width: int, align: Align = "<") -> str:
    """Text cut or padded to exactly `width` cells, to the left or to the right."""
    size = cells(text)
    if size > width:
        text = cut(text, width)
        size = cells(text)
    blank = " " * (width - size)
    return text + blank if align == "<" else blank + text


def columns(row: Sequence[tuple[Line, int, Align]], gap: int = 1) -> Line:
    """Cells of a table row side by side.

    Args:
        row: (spans, width in cells, alignment) of each cell.
        gap: blanks between two cells.
    """
    out: list[Span] = []
    for spans, width, align in row:
        if out and gap:
            out.append((" " * gap, ""))
        if align == "<":
            out.extend(fit(spans, width))
            continue
        blank = width - line_cells(spans)
        if blank > 0:
            out.append((" " * blank, ""))
        out.extend(fit(spans, min(width, width - max(blank, 0))))
    return tuple(out)


def join(parts: Iterable[Line], separator: str = "  ") -> Line:
    """The non-empty parts one after another with the separator between them."""
    out: list[Span] = []
    for part in parts:
        if not part:
            continue
        if out:
            out.append((separator, ""))
        out.extend(part)
    return tuple(out)


def fill(parts: Iterable[Line], width: int, separator: str = "  ") -> Line:
    """Like `join`, but leaves out each part that no longer fits in `width` cells."""
    kept: list[Line] = []
    used = 0
    for part in parts:
        size = line_cells(part)
        step = size + (len(separator) if kept else 0)
        if size and used + step <= width:
            kept.append(part)
            used += step
    return join(kept, separator)


def shorten(line: Line, width: int) -> Line:
    """The line in at most `width` cells; the last one is `CUT_OFF` when something was cut off."""
    if line_cells(line) <= width:
        return line
    kept = fit(line, width - 1)
    return (*kept, (CUT_OFF, kept[-1][1])) if width > 0 and kept else fit(((CUT_OFF, ""),), width)


def spread(left: Line, right: Line, width: int) -> Line:
    """`left` at the left edge and `right` at the right edge; the right part is dropped when both do not fit."""
    blank = width - line_cells(left) - line_cells(right)
    return (*left, (" " * blank, ""), *right) if blank > 0 and right else fit(left, width)


def restyle(line: Line, style: str, keep: frozenset[str] = frozenset()) -> Line:
    """The same text in one style, apart from spans whose style is in `keep`."""
    return tuple((text, name if name in keep else style) for text, name in line)


def merge(line: Line) -> Line:
    """The same line with neighbouring spans of one style joined."""
    out: list[Span] = []
    for text, name in line:
        if out and out[-1][1] == name:
            out[-1] = (out[-1][0] + text, name)
        elif text:
            out.append((text, name))
    return tuple(out)


def box(
    lines: Sequence[Line], title: str, width: int, height: int, *, focused: bool, glyphs: Glyphs
) -> list[Line]:
    """A frame around lines, with a title in its upper edge.

    Args:
        lines: the inside; cut and padded to (width - 2) x (height - 2).
        title: outside text is allowed; it is cleaned and cut.
        width: of the whole, cells.
        height: of the whole, lines.
        focused: draw the frame of the pane that has the keys.
        glyphs: the frame's characters.

    Returns:
        Exactly `height` lines of exactly `width` cells; a box too small for a frame shows its lines bare.
    """
    if width < 2 or height < 2:
        return fit_lines(lines, width, height)
    edge = glyphs.border_focus if focused else glyphs.border
    style = "border-focus" if focused else "border"
    words = clean(f" {title} ", width - 3) if title and width > 6 else ""
    rest = edge.horizontal * (width - 3 - cells(words))
    side = (edge.vertical, style)
    top: Line = ((edge.top_left + edge.horizontal, style), (words, "title"), (rest + edge.top_right, style))
    if width < 3:
        top = ((edge.top_left + edge.top_right, style),)
    bottom: Line = ((edge.bottom_left + edge.horizontal * (width - 2) + edge.bottom_right, style),)
    inside = [(side, *line, side) for line in fit_lines(lines, width - 2, height - 2)]
    return [top, *inside, bottom]


def wrapped(text: str, width: int, indent: str, style: str) -> list[Line]:
    """A paragraph on as many lines as it needs; commands are not hyphenated, so that they can be copied."""
    return [((line, style),) for line in _wrap(clean(text), max(width, len(indent) + 1), indent)]


@lru_cache(maxsize=4096)
def _wrap(text: str, width: int, indent: str) -> tuple[str, ...]:
    """A sheet of thousands of paragraphs is drawn every second, mostly the same ones."""
    return tuple(
        textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    )


def hanging(head: Line, text: str, style: str, width: int) -> Iterator[Line]:
    """A paragraph after a head, on as many lines as it needs."""
    left = line_cells(head)
    for n, line in enumerate(wrapped(text, max(width - left, 20), "", style)):
        yield (*(head if n == 0 else ((" " * left, ""),)), *line)
