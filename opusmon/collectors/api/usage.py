"""Token counts as servers report them: flat, the last value of a field wins."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_MAX_NAMES = 64
_MAX_DEPTH = 3
_MAX_MORE = 512
_HUGE = 1e15
"""No count of tokens is over this; a number that is would not fit a column."""


def number(value: object) -> float:
    """A finite number of usual size, else NaN; booleans are no numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if -_HUGE < value < _HUGE else math.nan


class Usage:
    """The usage of one request, merged from as many reports as there are.

    Reports are cumulative: a field that is there and not null replaces the one before, nothing is added.

    Attributes:
        values: number by name; nested ones as `outer.inner`.
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def merge(self, report: object, prefix: str = "", depth: int = 1) -> None:
        """Take over the numbers of a report; anything else in it is ignored."""
        if not isinstance(report, Mapping) or depth > _MAX_DEPTH:
            return
        for name, value in list(report.items())[:_MAX_NAMES]:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                continue
            full = prefix + name
            if isinstance(value, Mapping):
                self.merge(value, full + ".", depth + 1)
            elif not math.isnan(known := number(value)) and (
                full in self.values or len(self.values) < _MAX_NAMES
            ):
                self.values[full] = known

    def get(self, *names: str) -> float:
        """The first of these that was reported and is not negative; NaN without any."""
        for name in names:
            value = self.values.get(name, math.nan)
            if value >= 0:
                return value
        return math.nan

    def more(self, known: frozenset[str]) -> str:
        """The fields that are not among `known`, as `name=number, ...`, cut at whole fields to 512 characters."""
        parts: list[str] = []
        for name in sorted(self.values.keys() - known):
            parts.append(f"{name}={_plain(self.values[name])}")
            if sum(map(len, parts)) + 2 * len(parts) > _MAX_MORE:
                parts.pop()
                break
        return ", ".join(parts)


def _plain(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)
