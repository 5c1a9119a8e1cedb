"""Whether a claim stands on the evidence it cites: the marks exist, and its subjects and numbers are in them.

This tells claims that nothing supports from those that something does; it does not tell true from false.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

_MARK = re.compile(r"\bE\d+\b")
_CLOCK = re.compile(r"\b\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?\b")
_SUBJECT = re.compile(
    r"\b(?:gpus?|links?|xid|instance|stream|pid|name-)\s*#?(?:0x[0-9a-f]+|\d+)|\b0x[0-9a-f]+\b", re.IGNORECASE
)
_QUANTILE = re.compile(r"\bp\d{2,3}(?:\.\d+)?\b|\b(?:L[12]|H\d{3}|A\d{3}|B\d{3})\b")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?")
_LEVELS = re.compile(r"(\d+(?:\.\d+)?) -> (\d+(?:\.\d+)?)")
_TOLERANCE = 0.03
"""Numbers may be rounded."""
_FEW = 2.0
"""Counting to two ("both GPUs", "one link") claims nothing."""


def doubts(claim: str, cited: Sequence[str], evidence: Mapping[str, str]) -> tuple[str, ...]:
    """Why a claim is not supported, in words; empty where it is.

    Args:
        claim: one or more sentences.
        cited: marks of the evidence that it is said to rest on.
        evidence: the lines that were given, by mark.
    """
    known = [mark for mark in cited if mark in evidence]
    # What a claim mentions counts as cited, and must exist as well.
    mentioned = [mark for mark in _MARK.findall(claim) if mark not in cited]
    unknown = [mark for mark in (*cited, *mentioned) if mark not in evidence]
    found = [f"{mark} is not in the evidence" for mark in dict.fromkeys(unknown)]
    if not known:
        return (*found, "it cites no evidence") if not found else tuple(found)
    text = " ".join(evidence[mark] for mark in known)
    found += [f"{one} is not in what it cites" for one in _unmet_subjects(claim, text)]
    found += [f"{one} is not in what it cites" for one in _unmet_numbers(claim, [evidence[m] for m in known])]
    return tuple(found)


def _unmet_subjects(claim: str, text: str) -> list[str]:
    """GPUs, links, streams, XIDs and stand-ins that the cited lines do not have."""
    have = {_subject(one) for one in _SUBJECT.findall(text)}
    have |= {part for one in have for part in one.split() if part.startswith("0x")}
    return [
        one
        for one in dict.fromkeys(_SUBJECT.findall(claim))
        if _subject(one) not in have and not _listed(one, text)
    ]


def _subject(text: str) -> str:
    return re.sub(r"\s+", " ", text.lower().replace("#", "")).replace("gpus", "gpu").replace("links", "link")


def _listed(subject: str, text: str) -> bool:
    """A link in a list of them: `3 of 18 links: 7, 9, 12`, or all of them."""
    number = re.search(r"\d+$", subject)
    if not subject.lower().startswith("link") or number is None:
        return False
    lists = re.findall(r"(\d+) of (\d+) links(?:: ([\d, ]+))?", text)
    return any(some == every or number[0] in re.findall(r"\d+", which) for some, every, which in lists)


def _unmet_numbers(claim: str, cited: Sequence[str]) -> list[str]:
    """Numbers and times of the claim that are neither in the cited lines nor follow from two of one line."""
    clocks = " ".join(cited)
    unmet = [clock for clock in _CLOCK.findall(claim) if clock not in clocks]
    allowed = [number for line in cited for number in _allowed(line)] + list(_apart_s(cited))
    for text in _NUMBER.findall(_bare(claim)):
        value = abs(_value(text))
        if value > _FEW and not any(_near(value, one) for one in allowed):
            unmet.append(text)
    return list(dict.fromkeys(unmet))


def _bare(text: str) -> str:
    """Text without the digits that are no amounts: marks, times, subjects, quantiles."""
    for pattern in (_MARK, _CLOCK, _SUBJECT, _QUANTILE):
        text = pattern.sub(" ", text)
    return text


def _value(text: str) -> float:
    return float(text.replace(",", "").lstrip("+"))


def _allowed(line: str) -> Iterator[float]:
    """The amounts of a line, and what follows from its two levels; also in the next units."""
    values = [abs(_value(text)) for text in _NUMBER.findall(_bare(line))]
    for before, after in _LEVELS.findall(line):
        values += _derived(float(before), float(after))
    for value in values:
        yield from (value, value * 1000, value / 1000)


def _derived(before: float, after: float) -> Iterator[float]:
    """Difference, ratios and changes in per cent of two levels."""
    yield abs(after - before)
    for one, other in ((before, after), (after, before)):
        if other:
            yield one / other
            yield 100 * abs(one - other) / other


def _apart_s(cited: Sequence[str]) -> Iterator[float]:
    """Seconds between any two times in the cited lines."""
    times = [_seconds(clock) for clock in _CLOCK.findall(" ".join(cited))]
    for one, other in combinations(times, 2):
        yield abs(one - other)


def _seconds(clock: str) -> float:
    parts = [float(part) for part in clock.split(":")]
    return 3600 * parts[0] + 60 * parts[1] + (parts[2] if len(parts) > 2 else 0.0)


def _near(value: float, other: float) -> bool:
    return abs(value - other) <= max(_TOLERANCE * abs(other), 0.051)
