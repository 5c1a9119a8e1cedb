"""`opusmon check compile`: what torch.compile makes of the user's code."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opusmon.checks.basis import of_torch, use_gpu
from opusmon.checks.quiet import quiet
from opusmon.checks.result import Fact, Missing, Problem, Result, Table, Value, one_line
from opusmon.checks.target import cases, load
from opusmon.checks.worker import Say, use_own_caches
from opusmon.text import counted

if TYPE_CHECKING:
    from opusmon.checks.compiled_trace import Run
    from opusmon.checks.differences import Difference
    from opusmon.checks.target import Case

ROUNDING = 2.0
"""Times eager's own error against float64 that compiled code may be off, as in torch's own benchmark comparisons."""

_TIMED = "kernels, times and the difference of results"


def check(options: Mapping[str, Any], say: Say) -> Result:
    """Trace and compile the target over its inputs.

    Args:
        options: `target` and `buckets`.
        say: told of each stage.

    Raises:
        TargetError: the target is none.
        Exception: what the user's code raises in eager.
    """
    result = Result("compile", str(options["target"]))
    _use_own_caches()
    say("importing torch")
    from opusmon.checks import compiled_ops
    from opusmon.checks.compiled_inductor import start
    from opusmon.checks.compiled_inputs import plain

    compiled_ops.torch_namespaces()
    say("loading the target")
    make = load(result.target)
    given = plain(cases(make, options.get("buckets") or {}))
    registered = compiled_ops.others()
    # The user's module may have set its own.
    _use_own_caches()
    device = use_gpu(given)
    result.basis = _basis(device)
    _operators(result, given, registered, say)
    traced = _traced(result, given, say)
    runs = [traced]
    if traced.error is not None:
        result.not_measured.append(Missing(_TIMED, "torch.compile raised before it came to that"))
    else:
        say("starting inductor")
        try:
            with quiet(options):
                start_s = start(device)
            result.facts.append(_seconds("inductor_start_s", start_s, "inductor's own first compilation"))
        except Exception as error:
            result.not_measured.append(Missing(_TIMED, _no_inductor(error, device)))
        else:
            runs += _compiled(result, given, device, options, say)
    from opusmon.checks.compiled_problems import of_limits, of_recompiles

    result.problems += of_recompiles(runs)
    result.problems += of_limits(limit for run in runs for call in run.calls for limit in call.limits)
    return result


def _use_own_caches() -> None:
    """Neither read nor fill the caches of the user's programs; say what we ask torch to say."""
    use_own_caches()
    os.environ.pop("TORCH_LOGS", None)


def _basis(device: Any) -> str:
    import torch

    if device is None:
        threads = torch.get_num_threads()
        return f"run on the CPU ({counted(threads, 'thread')}), torch {torch.__version__}"
    return f"measured on {of_torch(device)}"


def _operators(result: Result, given: Sequence[Case], registered: set[str], say: Say) -> None:
    """Run in eager, then check the custom operators that were called."""
    from opusmon.checks.compiled_ops import called, opcheck, problems, table

    before = called(given, say)
    for operator in before:
        try:
            opcheck(operator, say)
        except ImportError as error:
            result.not_measured.append(Missing("torch.library.opcheck", f"this torch lacks it: {error}"))
            break
        result.problems += problems(operator)
    else:
        if before:
            result.tables.append(table(before))
    result.facts.append(
        Fact("custom_operators", len(before), f"custom operators called: {len(before) or 'none'}")
    )
    rest = sorted(registered - {operator.name for operator in before})
    if rest:
        shown = ", ".join(rest[:5]) + (", ..." if len(rest) > 5 else "")
        result.not_measured.append(
            Missing(
                f"{len(rest)} registered operator{'s' if len(rest) > 1 else ''} ({shown})",
                "not called as such with these inputs",
            )
        )


def _traced(result: Result, given: Sequence[Case], say: Say) -> Run:
    """Graphs and their breaks."""
    from opusmon.checks.compiled_problems import of_breaks, trace_table
    from opusmon.checks.compiled_trace import trace

    run, graphs = trace(given, say)
    result.problems += of_breaks(one for call in run.calls for one in call.breaks)
    if run.error is not None:
        result.problems.append(_failed(run, "torch.compile raises"))
    elif not graphs:
        what = "dynamo makes no graph of it: all of it runs in eager"
        result.problems.append(Problem("not_compiled", what))
    first = [graph for graph in graphs if graph.call == 0]
    operations = sum(graph.operations for graph in first)
    breaks = len({one.place for call in run.calls for one in call.breaks})
    result.facts += [
        Fact("graphs", len(first), f"graphs at the first call: {len(first)}"),
        Fact("operations", operations, f"operations in them: {operations}"),
        Fact("graph_breaks", breaks, f"lines where a graph breaks: {breaks}"),
    ]
    result.tables.append(trace_table(run, graphs))
    return run


def _compiled(
    result: Result, given: Sequence[Case], device: Any, options: Mapping[str, Any], say: Say
) -> list[Run]:
    """Kernels, results and times; CUDA Graphs on a GPU."""
    from opusmon.checks import compiled_inductor as inductor
    from opusmon.checks.compiled_problems import compile_table, times_mixed
    from opusmon.checks.compiled_trace import graphs_made, recompile_limit

    run = inductor.compiled(given, say)
    result.tables.append(compile_table(run, "compiled with inductor, in this order"))
    if run.error is not None:
        result.problems.append(_failed(run, "inductor raises"))
        result.not_measured.append(Missing("times and the difference of results", "inductor raised"))
        return [run]
    first = run.calls[0]
    result.facts += [
        Fact("kernels", first.kernels, f"kernels generated for them: {first.kernels}"),
        Fact(
            "external_calls",
            first.external_calls,
            f"calls of library kernels and custom operators in them: {first.external_calls}",
        ),
        _seconds("first_call_s", first.seconds, "first call, compiling included"),
    ]
    with quiet(options), graphs_made() as in_results:
        _compare(result, given, run, say)
    columns = [("compiled", run)]
    if device is None:
        result.not_measured.append(
            Missing("whether CUDA Graphs are skipped", "all inputs and parameters are on the CPU")
        )
    else:
        columns += _with_cudagraphs(result, given, say)
    with quiet(options), graphs_made() as in_times:
        result.tables.append(_times(result, given, columns, gpu=device is not None, say=say))
    if why := times_mixed(run.calls, recompile_limit(), sum(in_results + in_times)):
        result.not_measured.append(Missing("times of compiled code alone", why))
    return [run]


def _with_cudagraphs(result: Result, given: Sequence[Case], say: Say) -> list[tuple[str, Run]]:
    from opusmon.checks.compiled_inductor import with_cudagraphs
    from opusmon.checks.compiled_problems import compile_table, of_skips

    run = with_cudagraphs(given, say)
    result.problems += of_skips(skip for call in run.calls for skip in call.skips)
    result.tables.append(compile_table(run, "compiled with CUDA Graphs (reduce-overhead), in this order"))
    if run.error is not None:
        result.problems.append(_failed(run, "mode reduce-overhead raises"))
        return []
    return [("CUDA Graphs", run)]


def _compare(result: Result, given: Sequence[Case], run: Run, say: Say) -> None:
    """Results of compiled and eager code, and what they leave in their inputs."""
    from opusmon.checks import compiled_times

    rows = []
    for case, fn in zip(given, run.functions, strict=True):
        label = case.name
        say(f"comparing results: {label}")
        eager, same = (compiled_times.result(case, case.fn, eager=True) for _ in range(2))
        itself = compiled_times.apart(same, eager)
        if not itself.same:
            why = (
                itself.other or f"two calls of eager differ by {itself.max_abs:.3g}: chance or state is in it"
            )
            result.not_measured.append(Missing(f"difference of results ({label})", why))
            continue
        compiled = compiled_times.result(case, fn, eager=False)
        apart = compiled_times.apart(compiled, eager)
        rows.append((label, apart.dtype or None, apart.max_abs, apart.max_rel, apart.same))
        if not apart.same:
            exact = None if apart.other else compiled_times.against_float64(case, compiled, eager)
            result.problems.append(_apart(label, apart, exact))
        if compiled_times.needs_grad(eager) and case is given[0]:
            what = "results carry gradients, and graphs for the backward pass are made too"
            change = "for inference call it under torch.no_grad() or torch.inference_mode()"
            result.problems.append(Problem("gradients", what, change=change, level="note"))
    columns = ("inputs", "dtype", "max_abs_difference", "max_rel_difference", "within_tolerance")
    if rows:
        result.tables.append(Table("results, compiled against eager", columns, tuple(rows)))


def _apart(label: str, apart: Difference, exact: tuple[float, float] | None) -> Problem:
    """Results that are not within tolerance: worse than eager, or only rounded otherwise."""
    if apart.other:
        return Problem(
            "result_difference", f"compiled and eager give different results for {label}: {apart.other}"
        )
    what = f"compiled and eager differ for {label} by more than {apart.dtype} rounds"
    facts: dict[str, Value] = {"max_abs": apart.max_abs, "max_rel": apart.max_rel}
    if exact is None:
        return Problem(
            "result_difference", f"{what}; it does not run in float64 to tell which is right", facts=facts
        )
    facts |= {"compiled_error": exact[0], "eager_error": exact[1]}
    if exact[0] <= ROUNDING * exact[1]:
        what = f"compiled and eager differ for {label}, and compiled is as near to float64 as eager"
        return Problem("result_difference", what, level="note", facts=facts)
    return Problem("result_difference", f"{what}, and eager is nearer to float64", facts=facts)


def _times(
    result: Result, given: Sequence[Case], ways: Sequence[tuple[str, Run]], *, gpu: bool, say: Say
) -> Table:
    """Medians of eager and compiled calls."""
    import torch

    from opusmon.checks import compiled_times

    rows = []
    for place, case in enumerate(given):
        label = case.name
        say(f"timing: {label}")
        eager = compiled_times.eager_times(case, gpu=gpu)
        row: list[Value] = [label, eager.median_ms, eager.high_ms - eager.low_ms]
        for way, run in ways:
            step = torch.compiler.cudagraph_mark_step_begin
            own = compiled_times.times(case, run.functions[place], gpu=gpu, step=step)
            row += [own.median_ms, own.high_ms - own.low_ms, eager.median_ms / own.median_ms]
            if own.low_ms > eager.high_ms:
                what = f"{way} is slower than eager for {label}"
                facts: dict[str, Value] = {"eager_ms": eager.median_ms, "ms": own.median_ms}
                result.problems.append(Problem("slower", what, level="note", facts=facts))
        rows.append(tuple(row))
    columns = ["inputs", "eager_ms", "eager_spread_ms"]
    for way, _ in ways:
        name = way.replace(" ", "_")
        columns += [f"{name}_ms", f"{name}_spread_ms", f"{name}_times_faster"]
    clock = "CUDA events" if gpu else "wall clock"
    return Table(
        f"time of a call ({clock}, medians; the spread is between quartiles)", tuple(columns), tuple(rows)
    )


def _failed(run: Run, what: str) -> Problem:
    """The compiler raised."""
    from opusmon.checks.compiled_words import error_place

    label = run.calls[-1].label
    where = error_place(str(run.error))
    return Problem("compile_failed", f"{what} for {label}" if label else what, *where, code=run.failed)


def _seconds(name: str, value_s: float, text: str) -> Fact:
    return Fact(name, value_s, f"{text}: {value_s:.2f} s")


def _no_inductor(error: Exception, device: Any) -> str:
    """Why a trivial function does not compile, and what it takes."""
    takes = (
        "a C++ compiler (g++, or another that CXX names)"
        if device is None
        else "Triton and a C compiler (gcc)"
    )
    return f"inductor does not work here, it takes {takes}: {type(error).__name__}: {one_line(error)}"
