"""What a rule finds: a conclusion with the range, the numbers and the thresholds that made it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from opusmon.triage.severity import CRIT, NOTE, WARN

SEVERITIES: Mapping[int, str] = {NOTE: "note", WARN: "warning", CRIT: "critical"}


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number that speaks for a finding.

    Attributes:
        name: what was measured, in the words of the channel's fields.
        value: what it was.
        unit: of value and threshold, "" for none.
        threshold: what it was compared with; NaN where it only illustrates.
        source: whose number it is, for example "proxy" or "engine 127.0.0.1:8000/metrics".
    """

    name: str
    value: float | str
    unit: str = ""
    threshold: float = math.nan
    source: str = ""

    def to_json(self) -> dict[str, Any]:
        """For programs; numbers that are missing are null."""
        body: dict[str, Any] = {"name": self.name, "value": _plain(self.value)}
        if self.unit:
            body["unit"] = self.unit
        if not math.isnan(self.threshold):
            body["threshold"] = _plain(self.threshold)
        if self.source:
            body["source"] = self.source
        return body


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, or was.

    Attributes:
        rule: name of the rule that found it.
        subject: what it is about ("gpu 0", "python 1234"): with the rule, what makes two findings the same one.
        severity: `NOTE`, `WARN` or `CRIT`.
        t0: the evidence begins, monotonic ns.
        t1: it ends, or was last measured; that may be before the end of what was looked at (a sample every few
            seconds, a minute that is still filling).
        title: one line, with the worst number.
        evidence: the most telling first.
        cause: the likely cause, in one sentence.
        next: what to look at or run next, in one sentence or command.
        pane: the pane that shows it best.
        open: it was not seen to end: nothing measured after `t1` says that it is over.
        weight: how bad the worst of it is, on the rule's own scale: where two become one, the words and the evidence
            of the weightier stay. So a rule whose words are about the worst moment says the same however a recording
            is cut into pieces.
    """

    rule: str
    subject: str
    severity: int
    t0: int
    t1: int
    title: str
    evidence: tuple[Evidence, ...]
    cause: str
    next: str
    pane: str = "gpu"
    open: bool = False
    weight: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """Rule and subject."""
        return self.rule, self.subject

    def to_json(self) -> dict[str, Any]:
        """For programs; times stay monotonic ns, whoever has anchors adds wall time."""
        return {
            "rule": self.rule,
            "subject": self.subject,
            "severity": SEVERITIES[self.severity],
            "t0": self.t0,
            "t1": self.t1,
            "open": self.open,
            "title": self.title,
            "evidence": [one.to_json() for one in self.evidence],
            "cause": self.cause,
            "next": self.next,
        }


def _plain(value: float | str) -> float | str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def by_time(one: Finding) -> tuple[int, int, str, str]:
    """Sorts findings by when they begin, of one instant the worse first."""
    return one.t0, -one.severity, one.rule, one.subject


def merge(findings: Iterable[Finding], join_ns: int) -> list[Finding]:
    """Findings of one rule and subject that overlap, or lie at most `join_ns` apart, become one.

    The weightier one, of equals the worse one, of those the later, gives the words; the worse one the severity. The
    order is that of `t0`, the worse first.
    """
    merged: dict[tuple[str, str], list[Finding]] = {}
    for finding in sorted(findings, key=lambda one: (one.t0, one.t1)):
        row = merged.setdefault(finding.key, [])
        if row and finding.t0 <= row[-1].t1 + join_ns:
            row[-1] = _joined(row[-1], finding)
        else:
            row.append(finding)
    every = [finding for row in merged.values() for finding in row]
    return sorted(every, key=by_time)


def _joined(first: Finding, second: Finding) -> Finding:
    told = max(second, first, key=lambda one: (one.weight, one.severity))  # of equals the one named first
    last = first if first.t1 > second.t1 else second
    severity = max(first.severity, second.severity)
    t0, t1 = min(first.t0, second.t0), max(first.t1, second.t1)
    return replace(told, severity=severity, t0=t0, t1=t1, open=last.open)
