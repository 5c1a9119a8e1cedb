"""Findings as text for people, as Markdown for a ticket, as JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from opusmon.clock import Anchors
from opusmon.text import counted, hanging, printable
from opusmon.times import format_duration, format_iso, format_wall
from opusmon.triage.finding import SEVERITIES, Evidence, Finding
from opusmon.triage.rank import rank
from opusmon.triage.severity import CRIT, NOTE, WARN

SIGNS = {CRIT: "!!", WARN: "!", NOTE: "i"}
FORMAT = 1
"""Version of the JSON document; it grows when a key changes its meaning, not when one is added."""
_WIDTH = 100
_INDENT = " " * 3


def document(findings: Sequence[Finding], anchors: Anchors, source: str) -> dict[str, Any]:
    """All of it for programs, wall times added. `rank` is the place in the order of `as_text`, from 1.

    Args:
        findings: in the order of time.
        anchors: of the session; without any there is no wall time.
        source: name of the recording.
    """
    places = {id(finding): place for place, finding in enumerate(rank(findings), 1)}
    return {
        "format": FORMAT,
        "recording": source,
        "findings": [
            {
                **finding.to_json(),
                "rank": places[id(finding)],
                "time0": _iso(anchors, finding.t0),
                "time1": _iso(anchors, finding.t1),
            }
            for finding in findings
        ],
    }


def _iso(anchors: Anchors, t: int) -> str | None:
    return format_iso(anchors, t) if len(anchors) else None


def as_json(findings: Sequence[Finding], anchors: Anchors, source: str) -> str:
    """`document` as text."""
    return json.dumps(document(findings, anchors, source), indent=2)


def as_text(findings: Sequence[Finding], anchors: Anchors) -> str:
    """One paragraph per finding, likely causes of the worst first: see `opusmon.triage.rank`."""
    if not findings:
        return "nothing found\n"
    paragraphs = ["\n".join(_paragraph(finding, anchors)) for finding in rank(findings)]
    return "\n\n".join([_count(findings), *paragraphs]) + "\n"


def as_markdown(findings: Sequence[Finding], anchors: Anchors, source: str) -> str:
    """A section per finding for a ticket, in the order of `as_text`."""
    lines = [f"## opusmon triage of {_escaped(source)}", "", _count(findings)]
    for finding in rank(findings):
        lines += [
            "",
            f"### {SIGNS[finding.severity]} {_escaped(finding.title)}",
            "",
            f"- **when** {when(finding, anchors)}",
            f"- **what** {_escaped(finding.subject)} (`{finding.rule}`, {SEVERITIES[finding.severity]})",
            *(f"- **evidence** {_escaped(words(one))}" for one in finding.evidence),
            f"- **cause** {_escaped(finding.cause)}",
            f"- **next** {_escaped(finding.next)}",
        ]
    return "\n".join(lines) + "\n"


def when(finding: Finding, anchors: Anchors) -> str:
    """`14:03:21 - 14:05:02 (1m41s), not seen to end`."""
    length = format_duration(finding.t1 - finding.t0)
    begin, end = (format_wall(anchors, t) for t in (finding.t0, finding.t1))
    still = ", not seen to end" if finding.open else ""
    return f"{begin} - {end} ({length}){still}" if finding.t1 > finding.t0 else f"{begin}{still}"


def words(one: Evidence) -> str:
    """`hbm_bw_pct 97.1 % (limit 95 %), gpu`."""
    value = one.value if isinstance(one.value, str) else _measure(one.value, one.unit)
    limit = "" if math.isnan(one.threshold) else f" (limit {_measure(one.threshold, one.unit)})"
    source = f", {one.source}" if one.source else ""
    return printable(f"{one.name} {value}{limit}{source}")


def _measure(value: float, unit: str) -> str:
    """A number with its unit; nanoseconds as people say them."""
    if unit == "ns" and math.isfinite(value):
        return format_duration(int(value))
    return f"{number(value)} {unit}".rstrip()


def number(value: float) -> str:
    """Up to four digits that matter; thousands apart."""
    if math.isnan(value):
        return "--"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _count(findings: Sequence[Finding]) -> str:
    counts = {level: sum(one.severity == level for one in findings) for level in (CRIT, WARN, NOTE)}
    names = {CRIT: ("critical", "critical"), WARN: ("warning", "warnings"), NOTE: ("note", "notes")}
    said = ", ".join(f"{count} {names[level][count != 1]}" for level, count in counts.items() if count)
    return f"{counted(len(findings), 'finding')}: {said}" if findings else "nothing found"


def _paragraph(finding: Finding, anchors: Anchors) -> Iterator[str]:
    yield f"{SIGNS[finding.severity]:<3}{when(finding, anchors)}  {printable(finding.subject)}  [{finding.rule}]"
    yield from hanging(_INDENT, finding.title, _WIDTH)
    for one in finding.evidence:
        yield from hanging(f"{_INDENT}- ", words(one), _WIDTH)
    yield from hanging(f"{_INDENT}cause: ", finding.cause, _WIDTH)
    yield from hanging(f"{_INDENT}next: ", finding.next, _WIDTH)


def _escaped(text: str) -> str:
    """Names from outside must not become markup."""
    return "".join(f"\\{char}" if char in "\\`*_{}[]<>#|&~" else char for char in printable(text))
