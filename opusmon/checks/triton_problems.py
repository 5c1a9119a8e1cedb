"""What keeps a target's Triton kernels off the fast path, from the traces of a cold and a warm pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from opusmon.checks.result import Level, Problem, Value
from opusmon.checks.triton_caches import CacheState
from opusmon.checks.triton_trace import At, Compilation, Trace, Tune
from opusmon.checks.triton_why import Change, nearest, remedy
from opusmon.checks.where import Place
from opusmon.jit_words import JIT, WARM_UP, WORDS
from opusmon.text import counted

AUTOTUNING = "autotuning"
FIRST = "first use"
INDUCTOR = "written by inductor"
_MAX_NAMED = 3
_VOLATILE = ("tmpfs", "overlay", "ramfs")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a kernel was compiled: in words, and what changed since the nearest earlier time, if that is why."""

    kind: str
    text: str
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class _Why:
    """A compilation with its reason, and what it took after a restart."""

    what: Compilation
    reason: Reason
    restart_ms: float | None


def reasons(trace: Trace) -> list[Reason]:
    """One for each compilation of a trace, in order."""
    earlier: dict[tuple[str, str], list[Compilation]] = {}
    found = []
    for one in trace.compilations:
        known = earlier.setdefault((one.kernel, one.defined.where), [])
        found.append(_reason(one, known))
        known.append(one)
    return found


def _reason(one: Compilation, earlier: Sequence[Compilation]) -> Reason:
    if one.at.tune >= 0:
        return Reason("autotune", AUTOTUNING)
    if one.maker == "inductor":
        return Reason("recompile_inductor", INDUCTOR)
    if not earlier:
        return Reason("first_use", FIRST)
    changes = tuple(nearest([other.what for other in earlier], one.what))
    if changes:
        return Reason(f"recompile_{changes[0].kind}", "; ".join(change.text for change in changes), changes)
    if all(one.function != other.function for other in earlier):
        return Reason("recompile_function", "the kernel's function was made anew")
    return Reason(
        "recompile_other", "its source, a global, the GPU or an option that is not compared changed"
    )


def problems(cold: Trace, warm: Trace, caches: Sequence[CacheState]) -> list[Problem]:
    """All of them, those of the serving path first."""
    labels = [times.label for times in cold.times]
    whys = [
        _Why(*one) for one in zip(cold.compilations, reasons(cold), after_restart(cold, warm), strict=True)
    ]
    found = [
        *_recompilations(whys, labels),
        *_first_uses(whys, labels),
        *_inductor(whys, labels),
        *_tunes(cold, warm, labels),
        *_restart(cold, warm),
        *_caches(cold, caches),
    ]
    return sorted(found, key=lambda problem: problem.level != "problem")


def bucket(at: At, labels: Sequence[str]) -> str:
    """The label of a call's inputs."""
    if at.case < 0:
        return "making the inputs"
    return labels[at.case] if at.case < len(labels) else f"inputs {at.case + 1}"


def _level(at: At) -> Level:
    return "note" if at.is_first else "problem"


def _when(ats: Iterable[At], labels: Sequence[str]) -> str:
    """`batch=8, batch=9 (a later call)`."""
    names = dict.fromkeys(bucket(at, labels) + (" (a later call)" if at.call else "") for at in ats)
    return _some(names)


def _some(texts: Iterable[str], between: str = ", ") -> str:
    held = list(texts)
    more = len(held) - _MAX_NAMED
    return between.join(held[:_MAX_NAMED]) + (f"{between}and {more} more" if more > 0 else "")


def after_restart(cold: Trace, warm: Trace) -> list[float | None]:
    """What each compilation of a trace took with a filled cache directory, ms; None where it was not seen there.

    Of equal ones the first belongs to the first, the second to the second.
    """
    held: dict[str, list[float]] = {}
    for other in reversed(warm.compilations):
        held.setdefault(_identity(other), []).append(other.ms)
    return [times.pop() if (times := held.get(_identity(one))) else None for one in cold.compilations]


def _identity(one: Compilation) -> str:
    return repr((one.kernel, one.defined.where, one.what))


def _facts(held: Sequence[_Why], labels: Sequence[str]) -> dict[str, Value]:
    facts: dict[str, Value] = {"compilations": len(held), "compile_ms": sum(one.what.ms for one in held)}
    if all("cubin" in one.what.stages for one in held):
        facts["ptxas_ms"] = sum(one.what.stages["cubin"] for one in held)
    again = [one.restart_ms for one in held if one.restart_ms is not None]
    if len(again) == len(held):
        facts["after_restart_ms"] = sum(again)
    facts["bucket"] = _when((one.what.at for one in held), labels)
    if held[0].what.defined.where:
        facts["defined"] = held[0].what.defined.where
    return facts


def _recompilations(whys: Sequence[_Why], labels: Sequence[str]) -> Iterator[Problem]:
    """Those of one kernel at one line by changes of the same arguments are one problem."""
    groups: dict[tuple[object, ...], list[_Why]] = {}
    for why in whys:
        if why.reason.kind.startswith("recompile_") and why.what.maker == "triton":
            one, changed = why.what, tuple((change.kind, change.argument) for change in why.reason.changes)
            key = (one.kernel, one.defined, one.launched, why.reason.kind, changed, one.at.is_first)
            groups.setdefault(key, []).append(why)
    for held in groups.values():
        one, reason = held[0].what, held[0].reason
        verb = "looked up in the cache directory" if all(why.what.cached for why in held) else "compiled"
        times = "again" if len(held) == 1 else f"{len(held)} more times"
        texts = _some(dict.fromkeys(why.reason.text for why in held), "; ")
        place = _place(one.launched, one.defined)
        yield Problem(
            reason.kind,
            f"{one.kernel} was {verb} {times}: {texts}",
            place.where,
            place.line,
            change=_change(reason),
            level=_level(one.at),
            facts=_facts(held, labels),
        )


def _place(launched: Place, defined: Place) -> Place:
    return launched if launched.where else defined


def _change(reason: Reason) -> str:
    if reason.kind == "recompile_function":
        return "define the kernel once, at the top of a module"
    ways = remedy(reason.changes)
    return f"{ways}; else {WARM_UP}" if ways else WARM_UP


def _first_uses(whys: Sequence[_Why], labels: Sequence[str]) -> Iterator[Problem]:
    first = [
        why.what
        for why in whys
        if why.what.at.is_first and why.reason.kind in ("first_use", "recompile_inductor")
    ]
    if first:
        names = _some(dict.fromkeys(one.kernel for one in first))
        yield Problem(
            "first_use",
            f"{counted(len(first), 'kernel')} compiled at the first call ({names}): {WORDS[JIT]} that only a filled "
            "cache directory spares",
            change="fill a directory once with such calls, and point TRITON_CACHE_DIR of every server at it or a copy",
            level="note",
            facts={"compilations": len(first), "compile_ms": sum(one.ms for one in first)},
        )
    for why in whys:
        if why.reason.kind == "first_use" and not why.what.at.is_first:
            one, place = why.what, _place(why.what.launched, why.what.defined)
            yield Problem(
                "first_use",
                f"{one.kernel} was compiled for the first time after the first call: {_when([one.at], labels)}",
                place.where,
                place.line,
                change=WARM_UP,
                facts=_facts([why], labels),
            )


def _inductor(whys: Sequence[_Why], labels: Sequence[str]) -> Iterator[Problem]:
    by_call: dict[tuple[int, int], list[_Why]] = {}
    for why in whys:
        if why.reason.kind == "recompile_inductor" and not why.what.at.is_first:
            by_call.setdefault((why.what.at.case, why.what.at.call), []).append(why)
    for held in by_call.values():
        one = held[0].what
        yield Problem(
            "recompile_inductor",
            f"torch.compile wrote and compiled {counted(len(held), 'kernel')} anew: {_when([one.at], labels)}",
            one.launched.where,
            one.launched.line,
            change=f"`opusmon check compile` names the guard that failed; else {WARM_UP}",
            facts=_facts(held, labels),
        )


def _tunes(cold: Trace, warm: Trace, labels: Sequence[str]) -> Iterator[Problem]:
    groups: dict[tuple[object, ...], list[Tune]] = {}
    for one in cold.tunes:
        if not one.cached:
            groups.setdefault((one.kernel, one.defined, one.launched, one.at.is_first), []).append(one)
    for held in groups.values():
        first = held[0]
        keys = _some(dict.fromkeys(one.key for one in held if one.key))
        for_keys = f" for the new key{'s' if len(held) > 1 else ''} {keys}" if keys else ""
        times = "" if len(held) == 1 else f"{len(held)} times "
        place = _place(first.launched, first.defined)
        facts: dict[str, Value] = {
            "autotune_runs": len(held),
            "configurations": sum(one.configs for one in held),
            "autotune_ms": sum(one.ms for one in held),
            "compilations": sum(
                one.at.tune >= 0 and cold.tunes[one.at.tune] in held for one in cold.compilations
            ),
            "bucket": _when((one.at for one in held), labels),
        }
        tuned = {(one.kernel, one.key) for one in held}
        facts["after_restart_ms"] = sum(one.ms for one in warm.tunes if (one.kernel, one.key) in tuned)
        yield Problem(
            "autotune",
            f"{first.kernel} was tuned {times}by trial{for_keys}",
            place.where,
            place.line,
            change="let fewer values tell the keys apart (round them up to buckets), or give one configuration; "
            "else warm up with each key"
            if not first.at.is_first
            else "",
            level=_level(first.at),
            facts=facts,
        )


def _restart(cold: Trace, warm: Trace) -> Iterator[Problem]:
    """What a restarted worker does again although the cache directory is filled."""
    tuned = [one for one in warm.tunes if not one.cached]
    if tuned:
        yield Problem(
            "autotune_restart",
            f"a restarted worker tunes again, with a filled cache directory too: {counted(len(tuned), 'autotune run')}",
            change=_keep_tuning(tuned, can=cold.tuning_cache),
            level="note",
            facts={"autotune_runs": len(tuned), "autotune_ms": sum(one.ms for one in tuned)},
        )
    missed = [one for one in warm.compilations if not one.cached]
    if missed:
        yield Problem(
            "cache_miss",
            f"a restarted worker compiles {counted(len(missed), 'kernel')} again that the cache directory should hold: "
            f"{_some(dict.fromkeys(one.kernel for one in missed))}",
            missed[0].launched.where,
            missed[0].launched.line,
            change="unset TRITON_ALWAYS_COMPILE; do not let source or constants of a kernel differ from process to process",
            facts={"compilations": len(missed), "compile_ms": sum(one.ms for one in missed)},
        )


def _keep_tuning(tuned: Sequence[Tune], *, can: bool) -> str:
    if any(one.maker == "triton" for one in tuned) and can:
        return "TRITON_CACHE_AUTOTUNING=1 keeps the results in the cache directory (not for configurations with a pre_hook)"
    return "this Triton does not keep results of autotuning: tune before the server is ready"


def _caches(cold: Trace, caches: Sequence[CacheState]) -> Iterator[Problem]:
    """Of a directory only where it was used: inductor's where that was at work, Triton's by all kernels."""
    makers = {one.maker for one in cold.compilations} | {one.maker for one in cold.tunes}
    for state in caches:
        if not makers or (state.name == "inductor" and "inductor" not in makers):
            continue
        variable = "TRITON_CACHE_DIR" if state.name == "Triton" else "TORCHINDUCTOR_CACHE_DIR"
        if not state.writable:
            yield Problem(
                "cache_not_writable",
                f"this user may not write to {state.name}'s cache directory {state.path}: nothing is kept, "
                "and compiling can fail",
                change=f"set {variable} to a directory that the server may write and that outlives it",
            )
        elif state.filesystem.split(" ")[0] in _VOLATILE:
            yield Problem(
                "cache_volatile",
                f"{state.name}'s cache directory {state.path} lies on {state.filesystem}: "
                "it is empty again after the next start of the host or container",
                change=f"set {variable} to a directory on a volume that stays",
                level="note",
            )
