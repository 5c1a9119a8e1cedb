"""`opusmon check graph`, the part on the GPU: one process captures in one mode, replays, compares and times.

A capture that fails can leave CUDA unusable, so the process ends with the first that does.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from opusmon.checks.basis import use_gpu
from opusmon.checks.differences import Difference, difference
from opusmon.checks.graph_inputs import (
    Values,
    input_tensors,
    keep,
    key,
    memory_of,
    named,
    other_values,
    restore,
    tensors,
)
from opusmon.checks.graph_record import Recorder
from opusmon.checks.graph_watch import Driver, Watch
from opusmon.checks.graph_words import code_of, kind_of, problem, said
from opusmon.checks.result import Fact, Missing, Problem, Result, Table, Value
from opusmon.checks.target import Case, cases, load
from opusmon.checks.timing import on_gpu
from opusmon.checks.where import NOWHERE, of_error
from opusmon.checks.worker import Say

WARM_UPS = 3
"""Calls before a capture, on a side stream, as the notes on CUDA Graphs in torch's documentation have it."""

Row = tuple[Value, ...]
"""Of a table."""

TIMES = "times, medians"

COLUMNS = (
    "inputs",
    "capture_ms",
    "eager_ms",
    "replay_ms",
    "eager_gpu_ms",
    "replay_gpu_ms",
    "eager_per_replay",
    "pool_mib",
)
"""Of the table TIMES. `_ms` is until the GPU is done, as the host sees it; `_gpu_ms` is between two CUDA events."""

COMPARED = "replay against eager"

TOLERANCE = (
    "replays and eager results are the same when off by at most 1e-5 (float64 1e-7) + rtol * largest value, rtol 1.3e-6 "
    "for float32, 1.6e-2 for bfloat16, 1e-3 for float16, 1e-7 for float64, one step for float8 without the 1e-5; "
    "complex numbers as their parts, and all else has to be equal"
)

COMPARED_COLUMNS = ("inputs", "values", "furthest_off", "max_abs_difference", "max_rel_difference", "same")
"""Of the table COMPARED; the relative difference is a part of the largest value expected."""


@dataclass(slots=True)
class Captured:
    """A capture, or why there is none.

    Attributes:
        graph: what was captured.
        out: what the function returned meanwhile.
        ms: how long it took, the call included.
        pool_b: memory that it reserved.
        empty: torch says that it holds nothing.
        raised: what the user's code raised.
        ended: what ending the capture raised.
        elsewhere: what CUDA refused to a thread that died of it.
        watch: what was seen, when it was watched.
    """

    graph: Any
    out: Any = None
    ms: float = 0.0
    pool_b: int = 0
    empty: bool = False
    raised: Exception | None = None
    ended: Exception | None = None
    elsewhere: Exception | None = None
    watch: Watch | None = None

    @property
    def failed(self) -> bool:
        """There is none."""
        return self.raised is not None or self.ended is not None


def check(options: Mapping[str, Any], say: Say) -> Result:
    """Capture each of the target's calls from `options["first"]` on, until one fails.

    Options:
        mode: `global`, `thread_local` or `relaxed`.
        warm_ups: calls before each capture.
        watch: look at each operation and line meanwhile, for their names; slower.
        measured: places of the calls that need not be replayed, compared and timed as well; None when none is.
        other_threads: in another mode it is captured, which minds no other threads: they are at fault.
        one: stop after the first.

    The facts without a text are for the caller: `calls` there are, `next` is the place of the first that was not tried,
    `captured` says whether the last one was.
    """
    say("loading the target")
    found = cases(load(options["target"]), options.get("buckets") or {})
    use_gpu(found)
    result = Result("graph-capture", options["target"])
    rows: list[Row] = []
    compared: list[Row] = []
    at = options["first"]
    for case in found[at : at + 1] if options["one"] else found[at:]:
        at += 1
        captured = _capture(case, options, say)
        result.problems += _outside(captured)
        if captured.failed:
            result.problems.insert(0, _failure(captured, options))
            break
        if captured.empty:
            result.problems.append(problem("empty_graph", "no work of the GPU was captured", NOWHERE))
        if options["measured"] is not None and at - 1 not in options["measured"]:
            say(f"replaying it {case.label}".rstrip())
            try:
                compared += _compared(case, captured, found, result)
                rows.append(_timed_both(case, captured))
            except torch.OutOfMemoryError as error:
                result.not_measured.append(Missing(f"replay {case.label}".rstrip(), said(str(error))))
    if compared:
        result.facts.append(Fact("tolerance", TOLERANCE, TOLERANCE))
        result.tables.append(Table(COMPARED, COMPARED_COLUMNS, tuple(compared)))
    if rows:
        result.tables.append(Table(TIMES, COLUMNS, tuple(rows)))
    result.facts += [
        Fact("calls", len(found), ""),
        Fact("next", at, ""),
        Fact("captured", not captured.failed, ""),
    ]
    return result


def _capture(case: Case, options: Mapping[str, Any], say: Say) -> Captured:
    mode = options["mode"]
    kept = keep(case)
    stream = torch.cuda.Stream()
    if options["warm_ups"]:
        say(f"warm-up {case.label}".rstrip())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(options["warm_ups"]):
                case.call()
            if options["watch"]:
                # What recording itself imports and sets up must not fall into the capture.
                with Recorder(on_gpu=True).recording():
                    case.call()
        torch.cuda.current_stream().wait_stream(stream)
    restore(kept)
    torch.cuda.synchronize()
    say(f"capturing in mode {mode} {case.label}".rstrip())
    captured = Captured(torch.cuda.CUDAGraph())
    if options["watch"]:
        captured.watch = Watch(Driver(), stream.cuda_stream)
    context = torch.cuda.graph(captured.graph, stream=stream, capture_error_mode=mode)
    reserved = 0
    start = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as warned, _refused_to_threads() as refused, context:
            warnings.simplefilter("always")
            reserved = torch.cuda.memory_reserved()
            start = time.perf_counter()
            try:
                with captured.watch.watching() if captured.watch else nullcontext():
                    captured.out = case.call()
            except Exception as error:
                captured.raised = error
    except Exception as error:
        captured.ended = error
    captured.ms = (time.perf_counter() - start) * 1e3
    captured.elsewhere = refused[0] if refused else None
    if not captured.failed:
        captured.pool_b = torch.cuda.memory_reserved() - reserved
        captured.empty = any("CUDA Graph is empty" in str(one.message) for one in warned)
    return captured


@contextmanager
def _refused_to_threads() -> Iterator[list[Exception]]:
    """Errors of a capture that threads die of, while it lasts; their tracebacks are printed as ever."""
    errors: list[Exception] = []
    original = threading.excepthook

    def hook(died: threading.ExceptHookArgs) -> None:
        if isinstance(died.exc_value, Exception) and code_of(str(died.exc_value)):
            errors.append(died.exc_value)
        original(died)

    threading.excepthook = hook
    try:
        yield errors
    finally:
        threading.excepthook = original


def _outside(captured: Captured) -> list[Problem]:
    """Work that ran while the capture went on, but is no part of it."""
    if captured.watch is None:
        return []
    seen = {(one.kind, one.place): one for one in reversed(captured.watch.outside)}
    return [problem(one.kind, one.op, one.place) for one in reversed(seen.values())]


def _failure(captured: Captured, options: Mapping[str, Any]) -> Problem:
    """The first operation that the capture did not take."""
    error = captured.elsewhere or captured.raised or captured.ended
    code = code_of(str(error))
    ended_code = code_of(str(captured.ended)) if captured.ended else None
    watch = captured.watch
    first = captured.elsewhere or captured.raised
    at, seen, op = (of_error(first) if first else NOWHERE), None, ""
    if watch is not None:
        if watch.broke != NOWHERE:
            at, op = watch.broke, watch.broke_op
        seen, seen_op = watch.kind_at(at)
        op = seen_op or op
    if not captured.raised and code == 904 and watch is not None and watch.forked:
        op, at = list(watch.forked.values())[-1]
    raised_here = captured.raised is not None and of_error(captured.raised) == at
    op = op or (_function(captured.raised) if raised_here else "") or at.line
    kind = "lazy_load" if not options["warm_ups"] else kind_of(code, at.line, seen)
    words = said(str(error))
    if ended_code and ended_code != code:
        words = f"{words}; at the end {said(str(captured.ended))}"
    # Then CUDA says no more than that something before has broken it.
    late = watch is None and code == 901
    lead = "broken before, noticed here: " if late and at.where else ""
    if options["other_threads"]:
        kind = "other_thread"
        is_there = captured.elsewhere is not None or (watch is not None and watch.is_elsewhere)
        lead = "" if is_there or not at.where else "noticed here: "
    return problem(kind, op, at, code=words, lead=lead)


def _function(error: Exception | None) -> str:
    """Name of the function of torch that raised, "" when it was none."""
    trace = error.__traceback__ if error else None
    name = ""
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        name = f"{module}.{trace.tb_frame.f_code.co_name}" if module.startswith("torch") else ""
        trace = trace.tb_next
    return name


def _timed_both(case: Case, captured: Captured) -> Row:
    """The function itself and its replay."""
    kept = keep(case)
    mutates = not _equal(kept, case.call)
    restore(kept)
    again: Callable[[], None] = (lambda: restore(kept)) if mutates else (lambda: None)
    eager, eager_gpu = on_gpu(case.call, again)
    replay, replay_gpu = on_gpu(captured.graph.replay, again)
    return (
        case.name,
        captured.ms,
        eager.median_ms,
        replay.median_ms,
        eager_gpu.median_ms,
        replay_gpu.median_ms,
        eager.median_ms / replay.median_ms,
        captured.pool_b / 2**20,
    )


def _equal(kept: Values, call: Callable[[], Any]) -> bool:
    """Whether a call leaves inputs and buffers as they were."""
    restore(kept)
    call()
    return difference(
        *([(str(place), pair[side]) for place, pair in enumerate(kept)] for side in (0, 1)), by_largest=True
    ).same


def _compared(case: Case, captured: Captured, found: Sequence[Case], result: Result) -> list[Row]:
    """Replay and function with the inputs as given, then with others in the same tensors."""
    kept = keep(case)
    label = f"{case.label}: " if case.label else ""
    own = difference(_run(case, case.call, kept), _run(case, case.call, kept), by_largest=True)
    if not own.same:
        why = "the function's own result changes from call to call with the same inputs and seed"
        result.not_measured.append(Missing(f"{label}replay against eager", f"{why} ({own.words})"))
        return []
    rows: list[Row] = []
    for what, values in [("as given", kept), *_others(case, found, kept, result)]:
        expected = _run(case, case.call, values)
        got = _run(case, captured.graph.replay, values, captured.out)
        apart = difference(got, expected, by_largest=True)
        rows.append((case.name, what, apart.path, apart.max_abs, apart.max_rel, apart.same))
        if not apart.same:
            result.problems.append(_stale(case, what, apart))
    restore(kept)
    if aliased := _aliases(case, captured.out):
        result.facts.append(Fact("aliased_outputs", len(aliased), f"{label}{', '.join(aliased)}"))
    return rows


def _stale(case: Case, what: str, apart: Difference) -> Problem:
    what = f"inputs: {what}"
    on_host = [name for name, tensor in input_tensors(case) if not tensor.is_cuda]
    suspects = f"{what}; in the host's memory: {', '.join(on_host)}" if on_host else what
    return problem(
        "stale_result",
        suspects,
        NOWHERE,
        facts={"max_abs_difference": apart.max_abs, "max_rel_difference": apart.max_rel},
    )


def _run(
    case: Case, call: Callable[[], Any], values: Values, out: Any = None
) -> list[tuple[str, torch.Tensor]]:
    """Copies of what a call gives and of the inputs after it, from given values and one seed."""
    restore(values)
    # What the function does on streams of its own may not wait for the copies.
    torch.cuda.synchronize()
    torch.manual_seed(0)
    made = call()
    torch.cuda.synchronize()
    found = [*tensors(made if out is None else out), *input_tensors(case)]
    return [(name, tensor.detach().clone()) for name, tensor in found]


def _others(case: Case, found: Sequence[Case], kept: Values, result: Result) -> list[tuple[str, Values]]:
    """Other values for the same tensors: made ones for what is floating, and those of the calls of the same shapes."""
    tried: list[tuple[str, Values]] = []
    inputs = dict(input_tensors(case))
    made = {name: other for name, tensor in inputs.items() if (other := other_values(tensor)) is not None}
    if made:
        tried.append(
            ("floats halved, in reverse", [*kept, *((inputs[name], value) for name, value in made.items())])
        )
    same = [other for other in found if other is not case and other.fn is case.fn and key(other) == key(case)]
    for other in same[:1]:
        theirs = named(other)
        values = [(tensor, theirs[name].detach().clone()) for name, tensor in inputs.items()]
        tried.append((f"those of {other.label}", [*kept, *values]))
    if (fixed := sorted(inputs.keys() - made.keys())) and not same:
        result.not_measured.append(
            Missing(
                f"other values of {', '.join(fixed)}",
                "whole numbers could leave their range; a second bucket of the same shapes gives them",
            )
        )
    return tried


def _aliases(case: Case, out: Any) -> list[str]:
    """Outputs that are views of inputs: the next call's inputs overwrite them."""
    places = {memory_of(tensor): name for name, tensor in input_tensors(case)}
    found = [(name, places.get(memory_of(tensor))) for name, tensor in tensors(out) if memory_of(tensor)]
    return [f"{name} lies in the memory of the input {source}" for name, source in found if source]
