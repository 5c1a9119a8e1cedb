"""The tables and facts of `check triton`: what first calls pay, compilations, autotune runs, cache directories."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from opusmon.checks.result import Fact, Table, Value
from opusmon.checks.triton_caches import CacheState
from opusmon.checks.triton_problems import after_restart, bucket, reasons
from opusmon.checks.triton_trace import Compilation, Launcher, Load, Trace
from opusmon.jit_words import JIT, MODULE, WORDS

_Event = TypeVar("_Event", Compilation, Load, Launcher)

MAX_ROWS = 100
"""Of a table; its title says how many there were."""
_LOWERING = ("ttir", "ttgir", "llir", "ptx")

COLD = "empty caches (a first deployment)"
WARM = "filled cache directory, new process (a restarted worker)"

_PAYS = (
    "bucket",
    "first_ms",
    "steady_ms",
    "pays_ms",
    "compiled",
    "from_cache",
    "compile_ms",
    "loads",
    "load_ms",
    "launcher_ms",
    "tuned",
    "autotune_ms",
    "rest_ms",
)
_COMPILATIONS = (
    "kernel",
    "defined",
    "launched",
    "bucket",
    "call",
    "why",
    "cached",
    "ms",
    "frontend_ms",
    "lowering_ms",
    "ptxas_ms",
    "after_restart_ms",
)
_TUNES = ("kernel", "launched", "bucket", "key", "configs", "ms", "best", "cached")
_CACHES = (
    "cache",
    "directory",
    "named_by",
    "exists",
    "entries",
    "files",
    "size_mb",
    "writable",
    "filesystem",
    "last_change",
)


def pays(trace: Trace, title: str) -> Table:
    """What the first call of each bucket takes above a steady one, and for what.

    Times of what happens within autotuning count there alone. The rest is other first use (libraries, allocations, tracing by
    dynamo), and noise.
    """
    rows: list[tuple[Value, ...]] = []
    labels = [times.label for times in trace.times]
    for number, times in enumerate(trace.times):
        extra = times.first_ms - times.steady_ms
        compiled = _of(trace.compilations, number)
        loads, launchers = _of(trace.loads, number), _of(trace.launchers, number)
        tunes = [one for one in trace.tunes if (one.at.case, one.at.call) == (number, 0)]
        parts = [
            sum(one.ms for one in compiled),
            sum(one.ms for one in loads),
            sum(one.ms for one in launchers),
            sum(one.ms for one in tunes),
        ]
        cached = [one.cached for one in trace.compilations if (one.at.case, one.at.call) == (number, 0)]
        all_loads = sum((one.at.case, one.at.call) == (number, 0) for one in trace.loads)
        rows.append(
            (
                labels[number],
                times.first_ms,
                times.steady_ms,
                extra,
                cached.count(False),
                cached.count(True),
                parts[0],
                all_loads,
                parts[1],
                parts[2],
                len(tunes),
                parts[3],
                extra - sum(parts),
            )
        )
    return Table(f"what first calls pay: {title}", _PAYS, tuple(rows))


def _of(events: Sequence[_Event], case: int) -> list[_Event]:
    """Those of the first call of a case, outside of autotuning."""
    return [one for one in events if (one.at.case, one.at.call, one.at.tune) == (case, 0, -1)]


def compilations(cold: Trace, warm: Trace) -> Table:
    """Every kernel that was compiled, in order, with the reason."""
    labels = [times.label for times in cold.times]
    rows: list[tuple[Value, ...]] = []
    held = list(zip(cold.compilations, reasons(cold), after_restart(cold, warm), strict=True))
    for one, reason, restart_ms in held[:MAX_ROWS]:
        stages = one.stages
        rows.append(
            (
                one.kernel,
                one.defined.where,
                one.launched.where,
                bucket(one.at, labels),
                one.at.call + 1,
                reason.text,
                one.cached,
                one.ms,
                stages.get("frontend"),
                sum(stages.get(name, 0.0) for name in _LOWERING) if stages else None,
                stages.get("cubin"),
                restart_ms,
            )
        )
    return Table(_title(WORDS[JIT], len(cold.compilations)), _COMPILATIONS, tuple(rows))


def tunes(trace: Trace, title: str) -> Table:
    """Every autotune run."""
    labels = [times.label for times in trace.times]
    rows = tuple(
        (
            one.kernel,
            one.launched.where,
            bucket(one.at, labels),
            one.key,
            one.configs,
            one.ms,
            one.best,
            one.cached,
        )
        for one in trace.tunes[:MAX_ROWS]
    )
    return Table(_title(f"autotune runs: {title}", len(trace.tunes)), _TUNES, rows)


def _title(text: str, number: int) -> str:
    return text if number <= MAX_ROWS else f"{text} (the first {MAX_ROWS} of {number})"


def caches(states: Iterable[CacheState]) -> Table:
    """The user's own directories; the check wrote to none of them."""
    return Table(
        "cache directories of this user (only read)",
        _CACHES,
        tuple(
            (
                one.name,
                one.path,
                one.chosen_by,
                one.exists,
                one.entries if one.exists else None,
                _least(one.files, one),
                _least(one.size_b / 1e6, one),
                one.writable,
                one.filesystem or None,
                _ago(one.changed_s),
            )
            for one in states
        ),
    )


def _least(number: float, state: CacheState) -> Value:
    """A number of the files; where not all were counted, that there may be more."""
    if not state.exists:
        return None
    return number if state.is_whole else f"{number:,.0f} or more"


def _ago(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def facts(cold: Trace, warm: Trace) -> list[Fact]:
    """The sums, and what a recording of a serving process calls all this."""
    found = []
    if cold.times and not cold.compilations and not cold.tunes:
        found.append(Fact("kernels", 0, "this target compiled no Triton kernel"))
    for name, trace, title in (("cold", cold, COLD), ("warm", warm, WARM)):
        if trace.times:
            paid = sum(times.first_ms - times.steady_ms for times in trace.times)
            words = f"{paid:,.0f}" if paid >= 10 else f"{paid:.2g}"
            found.append(
                Fact(
                    f"first_calls_{name}_ms",
                    paid,
                    f"{title}: the first calls of all buckets take {words} ms more than steady ones",
                )
            )
    if cold.compilations or cold.tunes:
        found.append(
            Fact(
                "seen_as",
                f"{JIT}, {MODULE}",
                f'the stalls of a recording show the same in a serving process: {WORDS[JIT]} (kind "{JIT}") for ptxas and '
                f'the C compiler of launchers, {WORDS[MODULE]} (kind "{MODULE}") for loads; autotuning shows as both, '
                "many launches and waits",
            )
        )
    found += [Fact("remark", text, text) for text in dict.fromkeys((*cold.facts, *warm.facts))]
    return found
