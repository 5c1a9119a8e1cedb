"""Themes: TOML files read into Textual themes, and the rich style of each style name.

A theme file holds the fields of `textual.theme.Theme` and a `[variables]` table. Variables called
`style-NAME`, with NAME from `opusmon.ui.text.STYLES`, say how that style looks, in rich's words
(`"bold #e69f00"`); a style that the theme does not name is derived from its colours. All other variables are
Textual's own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.errors import StyleSyntaxError
from rich.style import Style
from textual.color import Color, ColorParseError
from textual.theme import BUILTIN_THEMES, Theme

from opusmon import paths
from opusmon.text import reason_of
from opusmon.ui.text import STYLES

DEFAULT = "opusmon-dark"
NO_COLOUR = "mono"
FEW_COLOURS = "high-contrast"
"""For 16-colour terminals: its colours are the terminal's own brightest ones, so none of them is approximated."""

PREFIX = "style-"
MAX_FILE_B = 64 * 1024

_COLOURS = (
    *("primary", "secondary", "warning", "error", "success", "accent"),
    *("foreground", "background", "surface", "panel", "boost"),
)
_BOOLEANS = ("dark", "ansi")
_NUMBERS = ("luminosity_spread", "text_alpha")
_TEXT_STYLES = frozenset({"none", "bold", "dim", "italic", "reverse", "strike", "underline", "not"})
_KNOWN = frozenset(field.name for field in fields(Theme))
_OKABE_ITO = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#d55e00")
_HEAT = ("#1b2a49", "#22456b", "#256489", "#35859b", "#58a6a0", "#8ec5a0", "#cbe0a3", "#fdf6b0")
"""A ramp that only grows brighter, so that it also reads in greyscale."""

_MONO = {
    "title": "bold",
    "value": "bold",
    "warn": "bold underline",
    "bad": "bold reverse",
    "select": "reverse",
    "border-focus": "bold",
    "mark": "underline",
    "key": "bold",
    "accent": "bold",
}


class ThemeError(ValueError):
    """A theme file that cannot be used; the text says which part and why."""


def load_themes(folders: Iterable[Path] | None = None) -> tuple[dict[str, Theme], list[str]]:
    """Read every `*.toml` of the theme folders.

    Args:
        folders: where to look, later ones win by theme name; `opusmon.paths.theme_dirs()` when None.

    Returns:
        The themes by name, and one message for each file that could not be used, naming file and fault.
    """
    themes: dict[str, Theme] = {}
    problems: list[str] = []
    for folder in paths.theme_dirs() if folders is None else folders:
        for path in sorted(folder.glob("*.toml")) if paths.is_there(folder) else ():
            try:
                theme = read_theme(path)
            except ThemeError as error:
                problems.append(f"theme {path}: {error}")
            else:
                themes[theme.name] = theme
    return themes, problems


def read_theme(path: Path) -> Theme:
    """Read one theme file.

    Raises:
        ThemeError: it cannot be read, is not TOML, or holds a field that does not fit.
    """
    try:
        if path.stat().st_size > MAX_FILE_B:
            raise ThemeError(f"larger than {MAX_FILE_B // 1024} KiB")
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ThemeError(reason_of(error)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ThemeError(f"not TOML: {error}") from error
    return parse_theme(body)


def parse_theme(body: Mapping[str, Any]) -> Theme:
    """Check the content of a theme file and build the theme.

    Raises:
        ThemeError: an unknown key, a missing name or primary colour, or a value that is not what its key needs.
    """
    unknown = sorted(set(body) - _KNOWN)
    if unknown:
        raise ThemeError(f"unknown key {', '.join(unknown)}")
    for key in ("name", "primary"):
        if not isinstance(body.get(key), str) or not body[key]:
            raise ThemeError(f"{key} is missing")
    for key in _COLOURS:
        _check_colour(key, body.get(key))
    for key in _BOOLEANS:
        if not isinstance(body.get(key, True), bool):
            raise ThemeError(f"{key} must be true or false")
    for key in _NUMBERS:
        value = body.get(key, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ThemeError(f"{key} must be a number from 0 to 1")
    variables = body.get("variables", {})
    _check_variables(variables)
    if body.get(
        "ansi"
    ):  # Textual's own rules for such themes refer to variables that only its own ones define
        variables = {**BUILTIN_THEMES["ansi-dark"].variables, **variables}
    return Theme(**{**body, "variables": variables})


def _check_colour(key: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise ThemeError(f"{key} must be a colour in quotes")
    try:
        Color.parse(value)
    except ColorParseError as error:
        raise ThemeError(f"{key}: {value!r} is not a colour") from error


def _check_variables(variables: object) -> None:
    if not isinstance(variables, dict):
        raise ThemeError("variables must be a table")
    for key, value in variables.items():
        if not isinstance(value, str) or not value or any(char in value for char in ";{}\n"):
            raise ThemeError(f"variables.{key} must be text in quotes")
        if not key.replace("-", "").replace("_", "").isalnum():
            raise ThemeError(f"variables: {key!r} is not a variable name")
        if key.startswith(PREFIX):
            _check_style(key, value)
        else:
            _check_textual(key, value)


def _check_textual(key: str, value: str) -> None:
    """A variable of Textual's own, put into its style sheet as it is: a wrong one there would end the app."""
    words = value.split()
    if key.endswith("-style"):
        if not set(words) <= _TEXT_STYLES:
            raise ThemeError(f"variables.{key}: {value!r} is not a text style")
        return
    if len(words) == 2 and words[1].removesuffix("%").isdecimal() and words[1].endswith("%"):
        words = words[:1]
    if words != ["auto"]:
        _check_colour(f"variables.{key}", " ".join(words))


def _check_style(key: str, value: str) -> None:
    if key.removeprefix(PREFIX) not in STYLES:
        raise ThemeError(f"variables.{key}: no such style")
    try:
        Style.parse(value)
    except StyleSyntaxError as error:
        raise ThemeError(f"variables.{key}: {value!r} is not a style") from error


def palette(theme: Theme) -> dict[str, Style]:
    """The rich style of every style name under a theme; any Textual theme will do.

    `heatN` colours the character and its background alike, so a heat map keeps its shade glyphs for terminals
    without colour and shows plain cells on the others. Themes that use the terminal's own colours (`ansi`)
    get bold, underline and reverse, except where they name a style themselves.
    """
    named = tuple(sorted((k, v) for k, v in theme.variables.items() if k.startswith(PREFIX)))
    colours = tuple(getattr(theme, key) for key in ("primary", "warning", "error", "success", "accent"))
    return dict(_palette(named, colours, theme.ansi))


@lru_cache(maxsize=32)
def _palette(
    named: tuple[tuple[str, str], ...], colours: tuple[str | None, ...], ansi: bool
) -> tuple[tuple[str, Style], ...]:
    texts = dict(_MONO) if ansi else _derived(colours)
    texts.update((key.removeprefix(PREFIX), value) for key, value in named)
    return tuple((name, Style.parse(texts.get(name, "")) if texts.get(name) else Style()) for name in STYLES)


def _derived(colours: Sequence[str | None]) -> dict[str, str]:
    """Styles of a theme that names none: from its own colours, then ours."""
    fallback = ("#0178d4", "#e69f00", "#ff6b5a", "#4ebf71", "#56b4e9")
    primary, warning, error, success, accent = (
        Color.parse(colour or other).hex6 for colour, other in zip(colours, fallback, strict=True)
    )
    texts = {
        "dim": "dim",
        "title": "bold",
        "value": "bold",
        "ok": success,
        "warn": f"bold {warning}",
        "bad": f"bold {error}",
        "accent": accent,
        "select": "reverse",
        "border": "dim",
        "border-focus": f"bold {primary}",
        "mark": f"underline {accent}",
        "key": f"bold {accent}",
    }
    texts.update((f"series{n}", colour) for n, colour in enumerate(_OKABE_ITO))
    texts.update((f"heat{n}", f"{colour} on {colour}") for n, colour in enumerate(_HEAT))
    return texts


def choose(requested: str | None, env: Mapping[str, str], color_system: str | None) -> str:
    """Name of the theme to start with.

    Args:
        requested: from the command line or settings; wins over everything.
        env: NO_COLOR is read; any value counts, the empty one too, as Textual sees it.
        color_system: what rich found: None, "standard" (16 colours), "256" or "truecolor".
    """
    if requested:
        return requested
    if "NO_COLOR" in env or color_system is None:
        return NO_COLOUR
    return FEW_COLOURS if color_system in ("standard", "windows") else DEFAULT
