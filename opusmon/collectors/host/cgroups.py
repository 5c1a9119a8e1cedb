"""Rows of channel `cgroup`: the groups of the watched processes, and those above them that set a limit.

`cpu_quota_cores` and `mem_limit_b` are the tightest on the way to the root; usage and counts are the group's own. A
group above that sets a limit has a row too, because only its own usage says how near that limit is.

The kernel adds up the time held back over the run queues (one for each CPU). `throttled_pct` divides it by the run
queues that wanted to run, never less than one: throttled / max(time, throttled + used). One busy thread held to half
a core reads 50 %, and so do eight threads held to four.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from opusmon.channels import CGROUP
from opusmon.clock import NS, Clock
from opusmon.collectors.host import cgroup_files as files
from opusmon.collectors.host.cgroup_tree import V2, Controller, Hierarchy, Paths, Step, cut, label
from opusmon.collectors.host.files import MALFORMED
from opusmon.collectors.host.pressure import share
from opusmon.collectors.host.reading import Answer, Rates, Row
from opusmon.collectors.missing import Missing
from opusmon.collectors.notes import Key

MAX_GROUPS = 64
ELSEWHERE = Missing("not_supported", "the group is in no tree of this controller that can be seen from here")
SHARED = Missing(
    "not_supported", "this controller counts its processes in another group, together with others"
)
HIDDEN_ABOVE = Missing(
    "unavailable",
    "limits set above this container cannot be seen from inside it: a tighter one may hold",
    "run opusmon on the host itself",
)

_COLUMNS = tuple(field.name for field in CGROUP.fields if field.name not in ("cgroup", "dt_ns"))
_CPU = ("cpu_cores", "cpu_quota_cores", "throttled_pct", "throttled_periods_pct")
_MEMORY = ("mem_used_b", "mem_limit_b", "mem_cache_b", "oom_kills", "limit_hits")


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A row of `cgroup` before its text is interned; `values` in column order after `dt_ns`."""

    t: int
    cgroup: str
    dt_ns: int
    values: list[float]


@dataclass(slots=True)
class Level:
    """One group's CPU as read in this turn.

    Attributes:
        made: inode of its folder: a group that was removed and made again has another.
        counters: what makes rates of its counters.
        cpu: the reading.
        rates: its counters per second.
    """

    made: int
    counters: Rates
    cpu: files.Cpu
    rates: dict[str, Answer]


class Groups:
    """Reads groups.

    Args:
        trees: the mounted hierarchies.
        clock: time of the rows.

    Attributes:
        missing: why fields of the last rows have no value.
    """

    def __init__(self, trees: Mapping[Controller, Hierarchy], clock: Clock) -> None:
        self.missing: dict[Key, Missing] = {}
        self._trees, self._clock = trees, clock
        self._levels: dict[str, Level] = {}
        self._before: dict[str, Level] = {}
        self._limits: dict[str, files.Limit] = {}
        self._pressure: dict[str, Rates] = {}
        self._seen: dict[str, int] = {}

    def read(self, members: Mapping[str, Paths]) -> list[GroupRow]:
        """A row for each group seen the second time or more; rates cover the time since the call before.

        Args:
            members: the groups of the watched processes by what they are called.
        """
        self._before, self._levels = self._levels, {}
        self._limits = {}
        groups = self._with_limits_above(members)
        self.missing = dict(self._limits_unseen()) if groups else {}
        self._pressure = {name: self._pressure.get(name) or Rates() for name in groups}
        seen, self._seen = self._seen, {}
        rows = []
        for name, paths in groups.items():
            t = self._seen[name] = self._clock.now()
            row = self._row(name, paths)
            if name in seen:
                rows.append(GroupRow(t, name, t - seen[name], row.record(_COLUMNS)))
                self.missing |= row.reasons(CGROUP, name)
        return rows

    def _limits_unseen(self) -> Iterator[tuple[Key, Missing]]:
        cpu, memory = (self._trees.get(c) or self._trees.get(V2) for c in ("cpu", "memory"))
        if cpu is not None and not cpu.whole:
            yield (CGROUP.name, "cpu_quota_cores", ""), HIDDEN_ABOVE
        if memory is not None and not memory.whole and "memory" not in self._trees:
            yield (CGROUP.name, "mem_limit_b", ""), HIDDEN_ABOVE

    # Which groups

    def _with_limits_above(self, groups: Mapping[str, Paths]) -> dict[str, Paths]:
        out = dict(list(groups.items())[:MAX_GROUPS])
        for name, paths in groups.items():
            for top in self._limiting(name, paths):
                if len(out) < MAX_GROUPS:
                    above = cut(paths, top)
                    out.setdefault(label(above), above)
        return out

    def _limiting(self, name: str, paths: Paths) -> Iterator[str]:
        """Paths of the other groups on the way to the root that have a limit of their own."""
        for step in self._steps("cpu", paths):
            if not called(step, name) and self._level(step, paths).cpu.quota_cores is not None:
                yield step.path
        for step in self._steps("memory", paths):
            if not called(step, name) and self._limit(step) is not None:
                yield step.path

    def _steps(self, controller: Controller, paths: Paths) -> list[Step]:
        """The way to the root in the tree that has the controller; empty when the group is not in view."""
        place = controller if controller in self._trees else V2
        tree, path = self._trees.get(place), paths.get(place)
        return [] if tree is None or path is None else tree.steps(path) or []

    # A row

    def _row(self, name: str, paths: Paths) -> Row:
        row = Row()
        self._cpu(row, name, paths)
        self._memory(row, name, paths)
        waited: dict[str, int] = {}
        for what in ("cpu", "memory"):
            answer = self._waited(name, paths, what)
            column = f"{what.replace('memory', 'mem')}_pressure_pct"
            if isinstance(answer, Missing):
                row.put(column, answer)
            else:
                waited[column] = answer
        for column, rate in self._pressure[name].update(waited, self._clock.now()).items():
            row.put(column, share(rate))
        return row

    def _cpu(self, row: Row, name: str, paths: Paths) -> None:
        steps = self._steps("cpu", paths)
        levels = [self._level(step, paths) for step in steps]
        if not levels:
            row.put_all(_CPU, ELSEWHERE)
            return
        used = levels[0].rates.get("usage_ns", levels[0].cpu.missing) if called(steps[0], name) else SHARED
        row.put("cpu_cores", used if isinstance(used, Missing) else used / NS)
        _put_tightest(row, "cpu_quota_cores", [level.cpu.quota_cores for level in levels])
        limited = [level.rates for level in levels if level.cpu.quota_cores is not None]
        row.put("throttled_pct", _largest(map(held_back_pct, limited)))
        row.put("throttled_periods_pct", _largest(map(periods_pct, limited)))

    def _level(self, step: Step, paths: Paths) -> Level:
        """A group's CPU, read once a turn however many groups lie below it."""
        if step.folder not in self._levels:
            self._levels[step.folder] = self._read_level(step, paths)
        return self._levels[step.folder]

    def _read_level(self, step: Step, paths: Paths) -> Level:
        try:
            made = Path(step.folder).stat().st_ino
        except OSError:
            made = 0
        before = self._before.get(step.folder)
        counters = before.counters if before is not None and before.made == made else Rates()
        cpu = self._read_cpu(step, paths)
        return Level(made, counters, cpu, counters.update(cpu.counters, self._clock.now()))

    def _read_cpu(self, step: Step, paths: Paths) -> files.Cpu:
        if "cpu" not in self._trees:
            return files.cpu_v2(step.folder)
        usage = {other.path: other.folder for other in self._steps("cpuacct", paths)}
        return files.cpu_v1(step.folder, usage.get(step.path) if "cpuacct" in self._trees else None)

    def _memory(self, row: Row, name: str, paths: Paths) -> None:
        steps = self._steps("memory", paths)
        if not steps:
            row.put_all(_MEMORY, ELSEWHERE)
            return
        own = self._own_memory(steps[0]) if called(steps[0], name) else files.missing_memory(SHARED)
        row.put("mem_used_b", own.used_b)
        row.put("mem_cache_b", own.cache_b)
        row.put("limit_hits", own.limit_hits)
        row.put("oom_kills", own.oom_kills)
        _put_tightest(row, "mem_limit_b", [own.limit_b, *(self._limit(step) for step in steps)])

    def _own_memory(self, step: Step) -> files.Memory:
        if "memory" in self._trees:
            return files.memory_v1(step.folder)
        tree = self._trees[V2]
        if tree.whole and step.folder == tree.point:
            return files.missing_memory(files.NOT_COUNTED)
        return files.memory_v2(step.folder)

    def _limit(self, step: Step) -> files.Limit:
        """A group's own memory limit, read once a turn."""
        if step.folder not in self._limits:
            read = files.limit_v1 if "memory" in self._trees else files.limit_v2
            self._limits[step.folder] = read(step.folder)
        return self._limits[step.folder]

    def _waited(self, name: str, paths: Paths, what: str) -> int | Missing:
        """From the v2 tree, if the process is in the same group there: else it is the pressure of something else."""
        steps = self._steps(V2, paths)
        if not steps or not called(steps[0], name):
            return files.NO_PSI_V1
        return files.waited_us(steps[0].folder, what)


def called(step: Step, name: str) -> bool:
    """Whether a group has the name of the row, so that what it counts is the row's."""
    return label({V2: step.path}) == name


def held_back_pct(rates: Mapping[str, Answer]) -> Answer:
    """Share of time that tasks were held back, from throttled and used ns per second; see the module."""
    held, used = rates.get("throttled_ns", MALFORMED), rates.get("usage_ns", 0.0)
    if isinstance(held, Missing):
        return held
    return held * 100 / max(NS, held + (0.0 if isinstance(used, Missing) else used))


def periods_pct(rates: Mapping[str, Answer]) -> Answer:
    """Share of the enforcement periods in which tasks were held back; none passed while nothing ran."""
    held, periods = rates.get("nr_throttled", MALFORMED), rates.get("nr_periods", MALFORMED)
    if isinstance(held, Missing):
        return held
    if isinstance(periods, Missing):
        return periods
    # A period is counted when it ends, a little after what was held back in it.
    return min(100.0, held * 100 / periods) if periods else 0.0


def _largest(answers: Iterable[Answer]) -> Answer:
    """The largest, 0 of none (nothing can hold it back); missing when one is."""
    largest = 0.0
    for answer in answers:
        if isinstance(answer, Missing):
            return answer
        largest = max(largest, answer)
    return largest


def _put_tightest(row: Row, name: str, limits: Iterable[files.Limit]) -> None:
    """The smallest limit; NaN without a reason when there is none; missing when one is not known."""
    tightest = math.inf
    for limit in limits:
        if isinstance(limit, Missing):
            row.put(name, limit)
            return
        tightest = min(tightest, limit if limit is not None else math.inf)
    if tightest < math.inf:
        row.put(name, tightest)
