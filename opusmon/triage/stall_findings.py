"""What the rules about stalls share: rows by kind, and how a bout is told."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opusmon.channels import STALL
from opusmon.schema import Rows
from opusmon.times import format_duration
from opusmon.triage.cuda_names import innermost
from opusmon.triage.episodes import Flags
from opusmon.triage.finding import Evidence, Finding
from opusmon.triage.scene import Scene
from opusmon.triage.severity import (
    CRIT,
    NONE,
    NOTE,
    STALL_LIMITS,
    WARN,
    Ids,
    Levels,
    distinct,
    stall_severity,
)
from opusmon.triage.stall_bouts import Bout, Sums
from opusmon.triage.stream_spells import is_one_of


def of_kinds(scene: Scene, *kinds: str, lookback_ns: int = 0) -> Rows:
    """Stalls of some kinds, in time order."""
    rows = scene.rows("stall", lookback_ns)
    if not set(STALL.by_name) <= set(rows.dtype.names or ()):  # a recording of an older version
        return np.empty(0, STALL.dtype)
    numbers = [number for number in distinct(rows["kind"]) if scene.text(number) in kinds]
    found: Rows = rows[is_one_of(rows["kind"], numbers)]
    return found


def begin_with(scene: Scene, ids: Ids, starts: Sequence[str]) -> Flags:
    """Whether the texts of ids begin with one of some words, shape (n,)."""
    return is_one_of(
        ids, [number for number in distinct(ids) if scene.text(number).startswith(tuple(starts))]
    )


def severity_of(scene: Scene, rows: Rows) -> Levels:
    """Severity of stalls; there are none at most times, and nothing is to be looked up then."""
    return stall_severity(rows, scene.view.strings) if len(rows) else np.empty(0, np.int8)


def each_counts(sums: Sums) -> Levels:
    """Of kinds that are rare each one counts, as bad as it is."""
    levels = np.where(sums.warn > 0, WARN, np.where(sums.calls > 0, NOTE, NONE))
    return np.where(sums.crit > 0, CRIT, levels).astype(np.int8)


def evidence_of(scene: Scene, one: Bout, kind: str) -> tuple[Evidence, ...]:
    """Count, total, longest, share of the time, and the most common stack, of the worst minute."""
    limits = STALL_LIMITS[kind]
    level = {NOTE: limits.note, WARN: limits.warn, CRIT: limits.crit}[one.severity]
    name, value = ("worst_second_ns", one.longest_row_ns) if limits.summed else ("longest_ns", one.longest_ns)
    found = [
        Evidence(name, value, "ns", level if np.isfinite(level) and level > 0 else np.nan),
        Evidence("count", float(one.calls)),
        Evidence("total_ns", one.total_ns, "ns"),
        Evidence("share_pct", one.share_pct, "%"),
    ]
    if stack := one.stack:
        found.append(Evidence("stack", innermost(scene.text(stack))))
    return tuple(found)


def numbers_of(one: Bout, *, each: bool = True) -> str:
    """`25 times in 8 s, 1.2 s in all, longest 210 ms`; a single one with its length only.

    Args:
        one: what is told.
        each: how long each one took is known.
    """
    total = format_duration(int(one.total_ns))
    if one.calls <= 1:
        return f"once, {total}"
    longest = f", longest {format_duration(int(one.longest_ns))}" if each else ""
    return f"{one.calls} times in {format_duration(one.span_ns)}, {total} in all{longest}"


def stall_finding(
    rule_name: str,
    subject: str,
    one: Bout,
    title: str,
    evidence: tuple[Evidence, ...],
    *,
    cause: str,
    next: str,  # noqa: A002  (the field's name)
    is_state: bool = True,
) -> Finding:
    """A finding of a bout, with its range, severity and weight.

    Args:
        rule_name: the rule.
        subject: what it is about.
        one: the bout.
        title: one line.
        evidence: the most telling first.
        cause: the likely cause.
        next: what to look at or run.
        is_state: it goes on while there are more; a single event does not.
    """
    return Finding(
        rule_name,
        subject,
        one.severity,
        one.t0,
        one.t1,
        title,
        evidence,
        cause,
        next,
        "stalls",
        open=one.open and is_state,
        weight=one.weight,
    )
