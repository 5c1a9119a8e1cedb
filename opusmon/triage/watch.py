"""The rules at work on a session that grows, or one that is read piece by piece: what they have found so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from opusmon.clock import NS
from opusmon.triage.finding import Finding, by_time, merge
from opusmon.triage.rank import rank
from opusmon.triage.run import rules, run_rule
from opusmon.triage.scene import Scene, View
from opusmon.triage.trail import Trail

STEP_NS = 120 * NS
"""How far a look goes: of a day of eight GPUs that is 45 ms, so that a key in between is answered at once."""
KEEP = 2000
"""Findings kept, the newest ones: a night in which everything is wrong must not fill the memory."""


BUDGET_PCT = 2.0
"""What looking may cost of a core while a session is watched live."""
MAX_PACE_NS = 10 * NS
"""However dear looking is, what is wrong is told so soon."""


class Watch:
    """Findings of a session, up to where it has been looked at.

    Args:
        view: the session.
        limits: thresholds in force; the usual ones by default.
        spent: CPU time of this thread so far, ns.

    Attributes:
        findings: in the order of time.
        version: grows whenever `findings` changes.
        until: looked at up to here, monotonic ns; None before the first look.
        pace_ns: time between looks that keeps them to `BUDGET_PCT` of a core, going by what the last one cost.
    """

    def __init__(
        self,
        view: View,
        limits: Mapping[str, float] | None = None,
        spent: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._view = view
        self._trail: Trail | None = None
        self._limits = limits
        self._by_rule: dict[str, list[Finding]] = {}
        self.findings: list[Finding] = []
        self.version = 0
        self.until: int | None = None
        self.pace_ns = 0
        self._ranked: tuple[int, list[Finding]] = (0, [])
        self._spent = spent

    def advance(self, t0: int, t1: int) -> bool:
        """Look at what is new, `STEP_NS` of it at most.

        Args:
            t0: start of the session, monotonic ns.
            t1: its end now.

        Returns:
            Whether all up to `t1` has been looked at.
        """
        begin = t0 - 1 if self.until is None else self.until
        end = min(t1, begin + STEP_NS)
        if end <= begin:
            return True
        began_ns = self._spent()
        view = self._seen_by(begin, t1)
        scenes: dict[int, Scene] = {}
        changed = False
        for one in rules().values():
            start = max(t0 - 1, begin - one.lookback_ns)
            if start not in scenes:
                scenes[start] = Scene(view, start, end, *(() if self._limits is None else (self._limits,)))
            held = self._by_rule.get(one.name, [])
            fresh = merge(run_rule(one, scenes[start]), one.join_ns)
            if not fresh and not any(finding.open for finding in held):
                continue
            now = merge([*_settled(held), *fresh], one.join_ns)
            changed |= now != held
            self._by_rule[one.name] = now[-KEEP:]
        self.until = end
        if changed:
            self._gather()
        self.pace_ns = min(MAX_PACE_NS, int((self._spent() - began_ns) / (BUDGET_PCT / 100)))
        return end == t1

    def _seen_by(self, begin: int, t1: int) -> View:
        """The session; with its rows held from look to look while there is much to catch up with.

        At the end of one that grows rows may still come in that belong before others.
        """
        if t1 - begin <= STEP_NS:
            self._trail = None
            return self._view
        if self._trail is None:
            reach_ns = STEP_NS + max(one.lookback_ns for one in rules().values())
            self._trail = Trail(self._view, reach_ns)
        return self._trail

    def worst(self, t: int) -> tuple[int, int]:
        """How many findings cover an instant, and the worst severity among them; (0, 0) when there is none."""
        now = [
            finding.severity
            for finding in self.findings
            if finding.t0 <= t and (finding.open or t <= finding.t1)
        ]
        return len(now), max(now, default=0)

    def ranked(self) -> list[Finding]:
        """`findings` in the order in which `opusmon triage` tells them; two thousand take half a second to rank."""
        if self._ranked[0] != self.version:
            self._ranked = (self.version, rank(self.findings))
        return self._ranked[1]

    def _gather(self) -> None:
        every = [finding for found in self._by_rule.values() for finding in found]
        every.sort(key=by_time)
        # What still holds stays, however long ago it began.
        old, new = every[:-KEEP], every[-KEEP:]
        self.findings = [one for one in old if one.open] + new
        self.version += 1


def _settled(held: list[Finding]) -> list[Finding]:
    """What was found before, as closed: what still holds is found again, as open."""
    return [replace(finding, open=False) if finding.open else finding for finding in held]
