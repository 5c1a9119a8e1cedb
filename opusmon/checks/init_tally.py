"""Outcomes counted, and how long things took."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from opusmon.checks.init_fork import Ended
from opusmon.checks.init_race import WORKS
from opusmon.checks.init_scenarios import EMPTY, Kind, Scenario
from opusmon.checks.result import Table, Value

MOST_HANGS = 3
"""A scenario that has hung this often is not repeated: each costs the whole limit."""

_COLUMNS = ("scenario", "loading", "mode", "who", "outcome", "n", "of", "all_inside", "median_ms")
_EXPECTED = {"safe": "must work", "init": "must work", "unsafe": "what it is"}


@dataclass(slots=True)
class Count:
    """Repetitions of one scenario.

    Attributes:
        name, part, kind, text, loading, mode: of the scenario.
        outcomes: of each actor.
        ms: of repetitions that ended by themselves.
        done: repetitions.
        worked: those in which every actor's work went well.
        hangs: those that were killed because they ran too long.
        raced: repetitions of which it is known whether all threads were inside at one moment.
        overlapped: those where they were.
        absent: why it cannot be done here, "" when it can.
    """

    name: str
    part: str
    kind: Kind
    text: str
    loading: str
    mode: str
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    ms: list[float] = field(default_factory=list)
    done: int = 0
    worked: int = 0
    hangs: int = 0
    raced: int = 0
    overlapped: int = 0
    absent: str = ""

    @classmethod
    def of(cls, scenario: Scenario) -> Count:
        """Nothing counted yet."""
        return cls(
            scenario.name, scenario.part, scenario.kind, scenario.text, scenario.loading, scenario.mode
        )

    @property
    def over(self) -> bool:
        """There is no use in another repetition."""
        return bool(self.absent) or self.hangs >= MOST_HANGS

    def add(self, ended: Ended) -> None:
        """One repetition has ended."""
        said = ended.said
        if said is not None and "absent" in said:
            self.absent = str(said["absent"])
            return
        self.done += 1
        if said is None or "outcomes" not in said:
            self.hangs += ended.hung
            self._count("", without_answer(ended))
            return
        self.ms.append(float(said["ms"]))
        self.worked += all(outcome == WORKS for outcome in said["outcomes"].values())
        for who, outcome in said["outcomes"].items():
            self._count(str(who), str(outcome))
        if said["overlapped"] is not None:
            self.raced += 1
            self.overlapped += bool(said["overlapped"])

    def _count(self, who: str, outcome: str) -> None:
        self.outcomes.setdefault(who, Counter())[outcome] += 1

    def packed(self) -> dict[str, Any]:
        """As JSON values, for another process."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "outcomes": {who: dict(counter) for who, counter in self.outcomes.items()}}

    @classmethod
    def unpacked(cls, values: dict[str, Any]) -> Count:
        """What packed() gave."""
        outcomes = {who: Counter(counter) for who, counter in values["outcomes"].items()}
        return cls(**{**values, "outcomes": outcomes})

    @property
    def empty(self) -> int:
        """Captures that gave a graph without nodes."""
        return sum(counter[EMPTY] for counter in self.outcomes.values())

    @property
    def median_ms(self) -> float | None:
        """Of a repetition; None when none ended by itself."""
        return median(self.ms) if self.ms else None

    def failures(self, who: str | None = None) -> str:
        """`18 x 900 unsupported in capture at cuMemAlloc_v2`, most frequent first; "" when all works."""
        total: Counter[str] = Counter()
        for actor, counter in self.outcomes.items():
            if who is None or actor == who:
                total.update(counter)
        del total[WORKS]
        return "; ".join(f"{count:,} x {outcome}" for outcome, count in total.most_common())

    def label(self) -> str:
        """The scenario in words, with its loading and mode."""
        how = ", ".join(word for word in (self.loading, self.mode) if word)
        return f"{self.text} ({how})" if how else self.text


def without_answer(ended: Ended) -> str:
    """How a fork ended that did not do what it should: `crash SIGSEGV in cuInit`, `3 not initialized at ...`."""
    inside = f" in {', '.join(ended.inside)}" if ended.inside else ""
    if ended.hung:
        return f"hangs{inside}"
    if ended.signal:
        return f"crash {ended.signal}{inside}"
    if ended.said is not None:
        return re.sub("^(CudaError|OSError): ", "", str(ended.said.get("raised", "no answer")))
    return f"ended without an answer{inside}"


def outcome_table(title: str, counts: Iterable[Count]) -> Table:
    """A row for each scenario, actor and outcome; `all inside` counts the races in which the threads did race."""
    rows: list[tuple[Value, ...]] = []
    for count in counts:
        for who, counter in count.outcomes.items():
            for outcome, n in counter.most_common():
                words = (count.name, count.loading or "-", count.mode or "-", who or "-", outcome)
                inside = count.overlapped if count.raced else None
                rows.append((*words, n, count.done, inside, count.median_ms))
    return Table(title, _COLUMNS, tuple(rows))


def legend(title: str, counts: Iterable[Count]) -> Table:
    """What each scenario is."""
    texts = {count.name: (count.text, _EXPECTED[count.kind]) for count in counts}
    return Table(
        title, ("scenario", "what", "expected"), tuple((name, *words) for name, words in texts.items())
    )


@dataclass(slots=True)
class Costs:
    """Milliseconds of each step of first use, by step and loading.

    Attributes:
        ms: step and loading to what was measured.
        failed: why a repetition gave nothing, each once.
    """

    ms: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    failed: list[str] = field(default_factory=list)

    def add(self, loading: str, ended: Ended) -> None:
        """One process has ended."""
        said = ended.said
        if said is None or "raised" in said:
            why = without_answer(ended)
            if why not in self.failed:
                self.failed.append(why)
            return
        self.take(loading, said)

    def take(self, loading: str, steps: dict[str, float]) -> None:
        """Steps of one process."""
        for step, ms in steps.items():
            self.ms[step, loading].append(float(ms))

    def median_ms(self, step: str, loading: str) -> float | None:
        """Median of a step; None when it was not measured."""
        values = self.ms.get((step, loading))
        return median(values) if values else None

    def table(self, title: str) -> Table:
        """A row for each step and loading."""
        rows: tuple[tuple[Value, ...], ...] = tuple(
            (step, loading or "-", median(values), min(values), max(values), len(values))
            for (step, loading), values in self.ms.items()
        )
        return Table(title, ("step", "loading", "median_ms", "min_ms", "max_ms", "n"), rows)
