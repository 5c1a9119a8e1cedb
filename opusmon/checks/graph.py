"""`opusmon check graph`: can this be captured as a CUDA Graph, and if not, which line breaks it?

Every part on the GPU is a process of its own: a capture that failed can leave CUDA unusable, and one that has loaded
all there is to load says nothing of a first use.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from opusmon.checks.basis import of_torch
from opusmon.checks.graph_words import BREAKING
from opusmon.checks.result import Fact, Level, Missing, Problem, Result, Table
from opusmon.checks.run import deadline_s, run
from opusmon.checks.where import of_error
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
        failed = {"global": self._mode("global", measure=True)}
        if self.error:
            self.problems += [one for plain in failed["global"].values() for one in plain]
            return
        failed["thread_local"] = self._mode("thread_local", measure=False)
        self.is_captured = not failed["global"]
        places = sorted(failed["global"].keys() | failed["thread_local"].keys())
        for at in places:
            modes = [mode for mode, plain in failed.items() if at in plain]
            found = self._watched(modes[0], at, failed[modes[0]][at])
            self.problems += [
                replace(one, facts={**one.facts, "fails_in_modes": ", ".join(modes)}) for one in found
            ]
        if places:
            self._say("capture in mode relaxed")
            part = self._part("relaxed", first=places[0], one=True)
            self.facts.append(Fact("captured_relaxed", _captured(part), f"in mode relaxed: {_whether(part)}"))
        else:
            self.problems += self._watched("global", 0, [])
            self._cold()

    def tables(self) -> list[Table]:
        """Those of all processes, one of a title."""
        found: dict[str, Table] = {}
        for table in self._tables:
            rows = found[table.title].rows if table.title in found else ()
            found[table.title] = replace(table, rows=(*rows, *table.rows))
        return list(found.values())

    def _mode(self, mode: str, *, measure: bool) -> dict[int, list[Problem]]:
        """Capture every call in a mode; the places of those that fail, with why."""
        failed: dict[int, list[Problem]] = {}
        at, count = 0, 1
        while at < count:
            self._say(f"capture in mode {mode}")
            part = self._part(mode, first=at, measure=measure)
            if part.error:
                self._lost(mode, part)
                return failed
            count, at = int(_fact(part, "calls")), int(_fact(part, "next"))
            split = 0 if _captured(part) else 1
            if split:
                failed[at - 1] = part.problems[:split]
            self.problems += part.problems[split:]
            self._tables += part.tables
            self.facts += [fact for fact in part.facts if fact.text and fact not in self.facts]
            self.not_measured += part.not_measured
        text = f"captured in mode {mode}: {count - len(failed)} of {count}"
        self.facts.append(Fact(f"captured_{mode}", count - len(failed), text))
        return failed

    def _watched(self, mode: str, at: int, plain: list[Problem]) -> list[Problem]:
        """What looking at each operation shows while a call is captured again; `plain` is what it showed without."""
        self._say(f"capture in mode {mode}, watched")
        part = self._part(mode, first=at, one=True, watch=True)
        if part.error:
            self.not_measured.append(Missing(f"operations during the capture in mode {mode}", part.error))
        # Watching can hide a failure: what was compiled then runs as it was written.
        return [*part.problems, *plain] if part.error or _captured(part) else part.problems

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
        measure: bool = False,
    ) -> Result:
        options = {
            **self._options,
            "mode": mode,
            "first": first,
            "one": one,
            "warm_ups": warm_ups,
            "watch": watch,
            "measure": measure,
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
