"""The user's two files: config.toml, the words of the command line as its defaults, and triage.toml, limits of rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opusmon.paths import config_dir, is_there
from opusmon.text import reason_of

KEYS: dict[str, type | tuple[type, ...]] = {
    "only": str,
    "interval": str,
    "retain": str,
    "retain-size": str,
    "probe-budget": (int, float),
    "stall-threshold": str,
    "deep": bool,
    "bank-conflicts": bool,
    "sudo": bool,
    "engine": list,
    "no-discover": bool,
    "proxy": str,
    "proxy-listen": str,
    "proxy-allow": list,
    "otlp-listen": str,
    "slo": list,
    "span": str,
    "theme": str,
    "glyphs": str,
}
"""Option, as on the command line without its dashes, to the type of its value. Nothing that spends money is here."""

_SCREEN = frozenset({"span", "theme", "glyphs"})


class ConfigError(Exception):
    """The file is wrong; the text is one line that says where and what."""


def path() -> Path:
    """Where it is read from."""
    return config_dir() / "config.toml"


def defaults(file: Path | None = None, *, screen: bool = True) -> dict[str, Any]:
    """What the file says, under the names that argparse gives; empty when there is none.

    Args:
        file: instead of the usual place.
        screen: options of the screen are wanted too.

    Raises:
        ConfigError: it cannot be read, or holds something unknown.
    """
    place = file or path()
    if not is_there(place):
        return {}
    said = _read(place)
    for key, value in said.items():
        _check(place, key, value)
    return {key.replace("-", "_"): value for key, value in said.items() if screen or key not in _SCREEN}


def limits(file: Path | None = None) -> dict[str, float]:
    """Thresholds of the rules in force: the usual ones, and those that triage.toml changes.

    Args:
        file: instead of the usual place; this one must be there.

    Raises:
        ConfigError: it cannot be read, or names a limit that does not exist or a value that is none.
    """
    from opusmon.triage.limits import LimitError, overridden  # all rules' tables, which only few verbs need

    place = file or config_dir() / "triage.toml"
    try:
        return overridden(_read(place) if file is not None or is_there(place) else {})
    except LimitError as error:
        raise ConfigError(f"{place}: {error}") from error


def _read(place: Path) -> dict[str, Any]:
    import tomllib  # 3 ms that most starts need not spend

    try:
        return tomllib.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # of text, of TOML, of a number with too many digits
        raise ConfigError(f"{place}: {reason_of(error)}") from error


def _check(place: Path, key: str, value: Any) -> None:
    wanted = KEYS.get(key)
    if wanted is None:
        raise ConfigError(f"{place}: there is no option {key!r}; there is {', '.join(KEYS)}")
    right = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
    if not right or (wanted is list and not all(isinstance(one, str) for one in value)):
        kinds = {str: "a text in quotes", list: "a list of texts", bool: "true or false"}
        what = kinds.get(wanted, "a number") if isinstance(wanted, type) else "a number"
        raise ConfigError(f"{place}: {key} must be {what}")
