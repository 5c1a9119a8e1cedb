"""`opusmon check graph`, the part that needs no GPU: the user's code runs as it is, recorded, and goes through dynamo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

import torch

from opusmon.checks.differences import Difference, difference
from opusmon.checks.graph_inputs import (
    changes,
    input_tensors,
    keep,
    key,
    moved,
    own_tensors,
    restore,
    tensors,
)
from opusmon.checks.graph_lines import StateWatch, following
from opusmon.checks.graph_record import Recorder, Seen, standing_in
from opusmon.checks.graph_words import problem, said
from opusmon.checks.quiet import quiet
from opusmon.checks.result import Fact, Level, Missing, Problem, Result, Table
from opusmon.checks.target import Case, cases, load
from opusmon.checks.where import NOWHERE, innermost
from opusmon.checks.worker import Say
from opusmon.text import counted

MAX_CHANGES = 40
"""Most rows of changing inputs."""

_NOTHING = "no operation of torch runs"
_NOTHING_CHANGE = "the target returns the function that does the work; a coroutine or a generator does none when it is called"
_EXPLAINS = frozenset({"python_state", "host_random", "generator"})


def check(options: Mapping[str, Any], say: Say) -> Result:
    """Say what a CUDA Graph would not take of the target, without capturing one."""
    say("loading the target")
    found = cases(load(options["target"]), options.get("buckets") or {})
    result = Result("graph", options["target"])
    problems: list[Problem] = []
    state = StateWatch()
    devices: set[str] = set()
    counts: list[tuple[str, int, int]] = []
    opaque: set[str] = set()
    threads = 0
    with quiet(options), standing_in():
        for case in found:
            say(f"calling it {case.label}".rstrip())
            first = Recorder(on_gpu=False)
            with first.recording():
                case.call()
            given = [*own_tensors(case.fn), *(tensor for _, tensor in input_tensors(case))]
            devices |= first.devices | {str(tensor.device) for tensor in given}
            on_gpu = any(device.startswith("cuda") for device in devices)
            recorder = Recorder(on_gpu=on_gpu)
            state.watch(case.fn)
            with recorder.recording(), following(state.done):
                case.call()
            problems += _grouped(recorder.seen)
            if not (on_gpu or recorder.last):
                problems.append(replace(problem("empty_graph", _NOTHING, NOWHERE), change=_NOTHING_CHANGE))
            opaque |= recorder.opaque
            threads = max(threads, recorder.threads)
            counts.append((case.label, recorder.new_tensors, recorder.new_bytes))
        _allocations(counts, result)
        problems = _each_once(problems) + _state(found[0], state, result)
        if not on_gpu:
            problems += _unexplained(problems, result)
        _dynamo(found[0], problems, result, say)
        _export(found[0], result, say)
    result.problems = problems
    result.basis = _basis(on_gpu=on_gpu)
    result.facts.insert(
        0,
        Fact("devices", " ".join(sorted(devices)), f"tensors on {', '.join(sorted(devices)) or 'no device'}"),
    )
    _inputs(found, result)
    if opaque and not on_gpu:
        why = "operators of one's own are seen from the outside only"
        result.not_measured.append(Missing(f"what happens inside {', '.join(sorted(opaque))}", why))
    if threads and not on_gpu:
        what = f"what {counted(threads, 'thread')} of the code do{'' if threads != 1 else 'es'}"
        result.not_measured.append(Missing(what, "operations of the calling thread are seen"))
    if not on_gpu:
        result.not_measured.append(Missing("capture, replay, their results and times", _no_gpu()))
    return result


def _no_gpu() -> str:
    return "the target's tensors are on the CPU" if torch.cuda.is_available() else "no GPU is visible"


def _basis(*, on_gpu: bool) -> str:
    if on_gpu:
        return f"static: one call on the GPU, recorded, torch {torch.__version__}"
    how = "one call on the CPU, recorded, each tensor taken for one of the GPU"
    return f"static: {how}; {_no_gpu()}, torch {torch.__version__}"


def _grouped(seen: Sequence[Seen]) -> list[Problem]:
    """One problem for each kind and line; how often a call does it."""
    times: dict[Seen, int] = {}
    for one in seen:
        times[one] = times.get(one, 0) + 1
    return [
        problem(
            one.kind,
            one.op,
            one.place,
            level=one.level,
            way=one.way,
            facts={"times": count} if count > 1 else {},
        )
        for one, count in times.items()
    ]


def _each_once(problems: Sequence[Problem]) -> list[Problem]:
    kept: dict[tuple[str, str], Problem] = {}
    for one in problems:
        kept.setdefault((one.kind, one.where), one)
    return list(kept.values())


def _allocations(counts: Sequence[tuple[str, int, int]], result: Result) -> None:
    """What a call allocates: of no harm to a graph, but it says how large the graph's pool will be."""
    if len(counts) > 1:
        columns = ("inputs", "new_tensors", "bytes")
        result.tables.append(Table("allocated by torch's allocator in a call", columns, tuple(counts)))
        return
    _, tensors_made, size_b = counts[0]
    text = f"{counted(tensors_made, 'new tensor')} in a call, {size_b:,} bytes, from torch's allocator: fine inside a graph, "
    result.facts.append(Fact("new_tensors", tensors_made, f"{text}whose own pool they come from"))


def _repeated(case: Case) -> Difference:
    """How far a second call with the same inputs, buffers and seed is off the first."""
    kept = keep(case)
    results = []
    for _ in range(2):
        restore(kept)
        torch.manual_seed(0)
        found = [*tensors(case.call()), *input_tensors(case)]
        results.append([(name, tensor.detach().clone()) for name, tensor in found])
    restore(kept)
    return difference(results[1], results[0], by_largest=True)


def _state(case: Case, state: StateWatch, result: Result) -> list[Problem]:
    """State of Python that a call changes; a problem where the result changes with it."""
    try:
        apart = _repeated(case)
    except torch.OutOfMemoryError as error:
        result.not_measured.append(Missing("whether the result is the same again", said(str(error))))
        return _changed(state, "note")
    result.facts.append(
        Fact(
            "repeatable",
            apart.same,
            "the same inputs and seed give the same result again"
            if apart.same
            else f"the same inputs and seed give another result: {apart.words}",
        )
    )
    return _changed(state, "note" if apart.same else "problem")


def _changed(state: StateWatch, level: Level) -> list[Problem]:
    return [
        problem("host_random" if name in state.drawn else "python_state", name, place, level=level)
        for name, place in state.changed.items()
    ]


def _unexplained(problems: Sequence[Problem], result: Result) -> list[Problem]:
    """A note where results differ from call to call and no line was seen that makes them differ."""
    apart = next((fact for fact in result.facts if fact.name == "repeatable" and not fact.value), None)
    if apart is None or any(one.kind in _EXPLAINS for one in problems):
        return []
    return [problem("hidden_state", "", NOWHERE, level="note")]


def _dynamo(case: Case, problems: list[Problem], result: Result, say: Say) -> None:
    """Graph breaks; those on a line that is known already say so there."""
    say("tracing it with dynamo")
    import torch._dynamo as dynamo

    try:
        dynamo.reset()
        explained = dynamo.explain(case.fn)(*case.args, **case.kwargs)
        graphs = int(explained.graph_count)
        breaks = [(str(one.reason), innermost(one.user_stack)) for one in explained.break_reasons]
    except Exception as error:
        result.not_measured.append(Missing("graph breaks", f"dynamo: {said(str(error))}"))
        return
    result.facts.append(Fact("graph_breaks", len(breaks), _graphs(graphs, len(breaks))))
    known = {one.where: place for place, one in enumerate(problems) if one.where}
    for reason, place in breaks:
        why = f"dynamo: {_reason(reason)}"
        at = known.get(place.where)
        if at is None:
            problems.append(problem("graph_break", "", place, code=why, level="note"))
        elif not problems[at].code:
            problems[at] = replace(problems[at], code=why)


def _graphs(graphs: int, breaks: int) -> str:
    if not graphs:
        return "torch.compile makes no graph of it and leaves it to Python"
    if not breaks:
        return "torch.compile takes it as one graph"
    return f"torch.compile breaks its graph {counted(breaks, 'time')}"


def _reason(reason: str) -> str:
    first = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
    return "data-dependent jump" if first.startswith("generic_jump") else first


def _export(case: Case, result: Result, say: Say) -> None:
    """Whether all of it is one graph, for torch.export without tracing Python's bytecode."""
    say("exporting it")

    class Whole(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.fn = case.fn

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.fn(*args, **kwargs)

    try:
        # It prints the graph that it gave up on.
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            exported = torch.export.export(Whole(), case.args, dict(case.kwargs), strict=False)
        nodes = sum(node.op == "call_function" for node in exported.graph.nodes)
        fact = Fact(
            "exports",
            True,
            f"torch.export takes it as one graph of {counted(nodes, 'operator')}",
        )
    except Exception as error:
        fact = Fact(
            "exports", False, f"torch.export does not take it: {type(error).__name__}: {said(str(error))}"
        )
    result.facts.append(fact)


def _inputs(found: Sequence[Case], result: Result) -> None:
    """What changes between the buckets, and how many graphs that takes."""
    if len(found) < 2:
        return
    rows = changes(found)
    graphs = len({key(case) for case in found})
    result.facts.append(
        Fact(
            "graphs",
            graphs,
            f"{counted(graphs, 'graph')} for {counted(len(found), 'input')}: one for each set of shapes and values",
        )
    )
    if rows:
        labels = " | ".join(case.label for case in found)
        result.tables.append(
            Table(f"inputs that change ({labels})", ("input", "what", "values"), tuple(rows[:MAX_CHANGES]))
        )
    if len(rows) > MAX_CHANGES:
        result.not_measured.append(
            Missing("inputs that change", f"{len(rows) - MAX_CHANGES} more are not shown")
        )
    if names := moved(found):
        shown = ", ".join(names[:8]) + (" and more" if len(names) > 8 else "")
        result.facts.append(
            Fact(
                "moving_inputs",
                len(names),
                f"at another address in another call: {shown}; a graph reads the captured tensors, so copy into them",
            )
        )
