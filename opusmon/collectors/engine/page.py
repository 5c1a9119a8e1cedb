"""A metrics page in the Prometheus text format or OpenMetrics, as samples.

Written here and not taken from prometheus_client because a page under an incident is not always a good one: one bad
line must not cost the rest, and parsing must not cost the host 10 % of a core. tests/bench/bench_engine.py measures
both on a page of 640 kB: 97 ms there; here 60 ms the first time and 8 ms in later scrapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

Labels = tuple[tuple[str, str], ...]
"""Label names and values of a sample, sorted by name; a label with an empty value is the same as none."""
Samples = dict[str, dict[Labels, float]]
"""Sample name (`_bucket`, `_sum`, `_total` included) to its series."""

_SAMPLE = re.compile(
    r"(([a-zA-Z_:][\w:]*)"
    r'(?:[ \t]*\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?)'
    r"[ \t]+(\S+)"
    r"(?:[ \t]+-?[\d.eE+-]+)?[ \t]*(?:# .*)?",  # a timestamp, an exemplar
    re.ASCII,
)
_LABEL = re.compile(r'\s*([a-zA-Z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,|$)', re.ASCII)
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n"}
_MEMO_LIMIT = 20_000


class PageError(ValueError):
    """The answer is not a whole metrics page; the text says why and holds nothing of the page."""


class Wanted(Protocol):
    """Tells sample names to keep; a frozenset is one."""

    def __contains__(self, name: object, /) -> bool:
        """Whether to keep samples of that name."""
        ...


@dataclass(slots=True)
class Page:
    """What was read.

    Attributes:
        samples: the wanted samples that have a value; NaN and infinite ones are left out.
        names: all sample names, wanted or not, to the number of their series.
        unreadable: lines that are neither a comment nor a sample.
        repeated: series that were there before on the same page; the first value counts.
        valueless: wanted samples that were NaN or infinite.
    """

    samples: Samples = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    unreadable: int = 0
    repeated: int = 0
    valueless: int = 0


class Reader:
    """Parses the pages of one engine; it remembers the names and labels of lines, which return in each scrape.

    Args:
        wanted: sample names to keep.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._memo: dict[str, tuple[str, Labels]] = {}

    def read(self, text: str) -> Page:
        """Parse a page.

        Raises:
            PageError: it is empty, cut short, or no metrics page.
        """
        _whole(text)
        page = Page()
        for line in text.split("\n"):
            if line and line[0] not in "#{\r":  # "{" opens names in quotes, which no engine uses
                self._line(line, page)
        if not page.names:
            raise PageError("the answer holds no metrics")
        return page

    def _line(self, line: str, page: Page) -> None:
        head, _, value_text = line.rpartition(" ")
        series = self._memo.get(head)
        if series is None:
            match = _SAMPLE.fullmatch(line.strip())
            wanted = match is not None and match[2] in self._wanted
            labels = parse_labels(match[3] or "") if match and wanted else ()
            if match is None or labels is None:
                page.unreadable += bool(line.strip())
                return
            series, value_text = (match[2], labels), match[4]
            if match[1] == head and len(self._memo) < _MEMO_LIMIT:
                self._memo[head] = series
        name = series[0]
        page.names[name] = page.names.get(name, 0) + 1
        if name in self._wanted:
            _keep(page, *series, value_text)


def _keep(page: Page, name: str, labels: Labels, value_text: str) -> None:
    value = _number(value_text)
    if value is None:
        page.unreadable += 1
        return
    if not math.isfinite(value):
        page.valueless += 1
        return
    series = page.samples.setdefault(name, {})
    if labels in series:
        page.repeated += 1
    else:
        series[labels] = value


def parse_labels(text: str) -> Labels | None:
    """Labels from what stands between the braces; None when it is malformed or names a label twice."""
    pairs = list(_pairs(text))
    names = {name for name, _ in pairs}
    if None in names or len(names) < len(pairs):
        return None
    return tuple(sorted((name or "", value) for name, value in pairs if value))


def _pairs(text: str) -> Iterator[tuple[str | None, str]]:
    """Label by label; (None, "") where the text makes no sense."""
    place = 0
    while place < len(text) and not (place and text[place:].isspace()):
        match = _LABEL.match(text, place)
        if match is None:
            yield None, ""
            return
        value = match[2]
        yield match[1], _ESCAPE.sub(_unescape, value) if "\\" in value else value
        place = match.end()


def _unescape(match: re.Match[str]) -> str:
    return _ESCAPED.get(match[1], match[1])


def _number(text: str) -> float | None:
    try:
        return float(text) if "_" not in text else None  # Python alone reads 1_0 as a number
    except ValueError:
        return None


def _whole(text: str) -> None:
    """See that the page is text and has its end.

    Raises:
        PageError: it is not, or has not.
    """
    if not text.strip():
        raise PageError("the answer is empty")
    if "\0" in text[:4096]:
        raise PageError("the answer is not text")
    if text.lstrip()[0] in "<[" or text.lstrip()[:2] in ('{"', "{}", "{\n", "{ "):
        raise PageError("the answer is HTML or JSON, not metrics")
    if not text.endswith("\n") and not text.endswith("# EOF"):
        raise PageError("the page is cut short: its last line has no end")
