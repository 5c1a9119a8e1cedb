"""`opusmon check graph`: can this be captured as a CUDA Graph, and if not, which line breaks it?

Every part on the GPU is a process of its own: a capture that failed can leave CUDA unusable, and one that has loaded
all there is to load says nothing of a first use.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from opusmon.checks.basis import of_torch
from opusmon.checks.graph_words import BREAKING, problem
from opusmon.checks.result import Fact, Level, Missing, Problem, Result, Table
from opusmon.checks.run import deadline_s, run
from opusmon.checks.where import Place, of_error
from opusmon.checks.worker import NEEDS_GPU, Say, needs_gpu, use_own_caches

_STATIC = "static: "


def check(options: Mapping[str, Any], say: Say) -> Result:
    """Check the target on the GPU when its tensors are there, else say what can be said without one."""
    import torch

    # The processes of the captures inherit them, so that what one has compiled the next one loads.
    use_own_caches()
    if not torch.cuda.is_available():
        return _without_gpu(options, say)
    until_s = deadline_s(options)
    say("static part")
    result = run("graph-static", options, limit_s=until_s - time.monotonic(), own_group=False, say=say)
    result.check = "graph"
    if result.error or not _on_gpu(result):
        return result
    captures = Captures(options, say, until_s)
    captures.all()
    device = next(name for name in str(_fact(result, "devices")).split() if name.startswith("cuda"))
    result.basis = f"measured on {of_torch(device)}; `static:` where a recorded call says so"
    result.problems = merged(captures.problems, result.problems, captured=captures.is_captured)
    result.facts += captures.facts
    result.tables = [*captures.tables(), *result.tables]
    result.not_measured += captures.not_measured
    result.error, result.remedy = captures.error, captures.remedy
    return result


def _without_gpu(options: Mapping[str, Any], say: Say) -> Result:
    from opusmon.checks.graph_static import check as static_part

    try:
        return static_part(options, say)
    except (AssertionError, RuntimeError) as error:
        if not needs_gpu(error):
            raise
        where, line = of_error(error)
        why = f"the target needs a GPU, and torch sees none: {where}: {line}"
        return Result("graph", options["target"], error=why, remedy=NEEDS_GPU)


def merged(measured: list[Problem], static: list[Problem], *, captured: bool) -> list[Problem]:
    """What the captures showed first, then what a recorded call showed on other lines.

    What only the recording names is a suspicion: where everything was captured, what a capture would have refused
    is a note.
    """
    kept: dict[tuple[str, str], Problem] = {}
    for one in measured:
        kept.setdefault((one.kind, one.where), one)
    places = {where for _, where in kept if where}
    for one in static:
        if one.where in places and one.kind in BREAKING:
            continue
        level: Level = "note" if captured and one.kind in BREAKING else one.level
        kept.setdefault((one.kind, one.where), replace(one, what=_STATIC + one.what, level=level))
    return list(kept.values())


def of_other_threads(noticed: Problem) -> Problem:
    """A capture that failed, when it is known that other threads broke it: the line is where that was noticed."""
    place = Place(noticed.where, noticed.line)
    lead = "noticed here: " if noticed.where else ""
    return problem("other_thread", noticed.line, place, code=noticed.code, lead=lead)


@dataclass(slots=True)
class Mode:
    """What came of the captures in one mode.

    Attributes:
        name: `global` or `thread_local`.
        failed: places of the calls that fail, with why.
        captured: places of those that work. A process that died leaves its calls in neither.
    """

    name: str
    failed: dict[int, list[Problem]] = field(default_factory=dict)
    captured: list[int] = field(default_factory=list)


class Captures:
    """The processes that capture, and what they found.

    Attributes:
        is_captured: every call was, in the global mode.
        error: why that could not be seen to the end, "" when it was.
        remedy: what to do about that.
    """

    def __init__(self, options: Mapping[str, Any], say: Say, until_s: float) -> None:
        self.problems: list[Problem] = []
        self.facts: list[Fact] = []
        self.not_measured: list[Missing] = []
        self.is_captured = False
        self.error = ""
        self.remedy = ""
        self._until_s = until_s
        self._options = options
        self._say = say
        self._tables: list[Table] = []

    def all(self) -> None:
        """Both modes for every call; what fails once more for its name, else once without a warm-up."""
        strict = self._mode("global", measured=[])
        if self.error:
            self.problems += [one for plain in strict.failed.values() for one in plain]
            return
        # What only this mode captures is replayed and timed in it.
        own = self._mode("thread_local", measured=strict.captured)
        self.is_captured = not strict.failed
        places = sorted(strict.failed.keys() | own.failed.keys())
        # What breaks a capture, or runs outside of it, comes before what a replay showed.
        causes: list[Problem] = []
        for at in places:
            modes = [mode for mode in (strict, own) if at in mode.failed]
            found = self._watched(modes[0].name, at, modes[0].failed[at], others=at in own.captured)
            failing = {"fails_in_modes": ", ".join(mode.name for mode in modes)}
            causes += [replace(one, facts={**one.facts, **failing}) for one in found]
        if places:
            self._say("capture in mode relaxed")
            part = self._part("relaxed", first=places[0], one=True)
            self.facts.append(Fact("captured_relaxed", _captured(part), f"in mode relaxed: {_whether(part)}"))
        else:
            causes = self._watched("global", 0, [], others=False)
            self._cold()
        self.problems = causes + self.problems

    def tables(self) -> list[Table]:
        """Those of all processes, one of a title."""
        found: dict[str, Table] = {}
        for table in self._tables:
            rows = found[table.title].rows if table.title in found else ()
            found[table.title] = replace(table, rows=(*rows, *table.rows))
        return list(found.values())

    def _mode(self, mode: str, *, measured: list[int]) -> Mode:
        """Capture every call in a mode, and measure those that are not in `measured`."""
        tried = Mode(mode)
        at, count = 0, 1
        while at < count:
            self._say(f"capture in mode {mode}")
            first, part = at, self._part(mode, first=at, measured=measured)
            if part.error:
                self._lost(mode, part)
                return tried
            count, at = int(_fact(part, "calls")), int(_fact(part, "next"))
            split = 0 if _captured(part) else 1
            tried.captured += range(first, at - split)
            if split:
                tried.failed[at - 1] = part.problems[:split]
            self.problems += part.problems[split:]
            self._tables += part.tables
            self.facts += [fact for fact in part.facts if fact.text and fact not in self.facts]
            self.not_measured += part.not_measured
        text = f"captured in mode {mode}: {len(tried.captured)} of {count}"
        self.facts.append(Fact(f"captured_{mode}", len(tried.captured), text))
        return tried

    def _watched(self, mode: str, at: int, plain: list[Problem], *, others: bool) -> list[Problem]:
        """What looking at each operation shows while a call is captured again.

        Args:
            mode: how it is captured.
            at: place of the call.
            plain: what the capture showed without looking.
            others: other threads are at fault.
        """
        self._say(f"capture in mode {mode}, watched")
        part = self._part(mode, first=at, one=True, watch=True, other_threads=others)
        if part.error:
            self.not_measured.append(Missing(f"operations during the capture in mode {mode}", part.error))
        elif not _captured(part):
            return part.problems
        if others:
            plain = [of_other_threads(one) for one in plain]
        # Watching can hide a failure: what was compiled then runs as it was written.
        return [*part.problems, *plain]

    def _cold(self) -> None:
        """Whether the first call of a process can be captured."""
        self._say("capture without a warm-up")
        part = self._part("global", first=0, one=True, warm_ups=0)
        if part.error:
            self.not_measured.append(Missing("capture without a warm-up", part.error))
            return
        self.facts.append(Fact("captured_cold", _captured(part), f"without a warm-up: {_whether(part)}"))
        if not _captured(part):
            self.problems.append(replace(part.problems[0], level="note"))

    def _part(
        self,
        mode: str,
        *,
        first: int,
        one: bool = False,
        warm_ups: int = 3,
        watch: bool = False,
        measured: list[int] | None = None,
        other_threads: bool = False,
    ) -> Result:
        options = {
            **self._options,
            "mode": mode,
            "first": first,
            "one": one,
            "warm_ups": warm_ups,
            "watch": watch,
            "measured": measured,
            "other_threads": other_threads,
        }
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            return Result("graph-capture", error="the time limit", remedy="--time-limit gives it longer")
        return run("graph-capture", options, limit_s=left_s, own_group=False, say=self._say)

    def _lost(self, mode: str, part: Result) -> None:
        """A process that ended before it said how the capture went; without the global mode there is no verdict."""
        what = f"capture in mode {mode}"
        if mode == "global":
            self.error, self.remedy = f"{what}: {part.error}", part.remedy
        else:
            self.not_measured.append(Missing(what, part.error))


def _fact(part: Result, name: str) -> Any:
    return next((fact.value for fact in part.facts if fact.name == name), None)


def _captured(part: Result) -> bool:
    return _fact(part, "captured") is True


def _whether(part: Result) -> str:
    if part.error:
        return f"not known, {part.error}"
    if _captured(part):
        return "it is captured"
    return f"it fails, {part.problems[0].code}" if part.problems else "it fails"


def _on_gpu(static: Result) -> bool:
    return "cuda" in str(_fact(static, "devices"))
