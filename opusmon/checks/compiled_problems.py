"""What torch did while it compiled, as problems and tables. No torch here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from opusmon.checks.compiled_words import GraphBreak, Limit, Recompile, Skip, of_torch
from opusmon.checks.result import Problem, Table, Value
from opusmon.checks.where import Place
from opusmon.text import counted

if TYPE_CHECKING:
    from opusmon.checks.compiled_trace import Call, Graph, Run

_BREAK_CHANGES = (
    (r"\.item\(\)|capture_scalar_outputs", "keep the value on the device, as a tensor of one element"),
    (
        r"[Dd]ata-dependent branching|generic_jump",
        "torch.where for small branches, torch.cond for large ones",
    ),
    (
        r"[Dd]ynamic shape operator|capture_dynamic_output_shape_ops",
        "an operator whose output has a fixed size, as a mask with torch.where",
    ),
    (r"builtin operator `print`|logging", "take it out of the hot path"),
    (r"trace the builtin `", "call it outside of the compiled function"),
)
_NATIVE_CHANGE = "wrap the function in an operator: @torch.library.custom_op, and a fake with .register_fake"
_USELESS_HINT = re.compile(r"[Rr]eport an issue|[Ff]ile an issue|caused by an earlier|is fundamental")

_SIZES = re.compile(r"size mismatch at index (\d+)\. expected (\d+), actual (\d+)")
_NOT_SYMBOLIC = re.compile(r"^2 <= .*\.size\(\)\[\d+\]")
_SPECIAL_SIZES = ("0", "1")
"""Torch makes no symbol of these, marked or not: each has a graph of its own."""

_GUARD_CHANGES = (
    (r"size mismatch at index (\d+)", r"one graph for all sizes: torch._dynamo.mark_dynamic(tensor, \1)"),
    (r"stride mismatch", "give it tensors of one layout, as .contiguous() makes them"),
    (r"dtype mismatch", "give it tensors of one dtype, or warm up with each"),
    (r"device mismatch|dispatch key set", "give it tensors of one device and kind"),
    (r"requires_grad|grad_mode|GradMode", "call it in one gradient mode: torch.no_grad() around inference"),
    (r"rank mismatch|dim\(\)", "give it tensors of one number of dimensions"),
    (r"== -?\d+\.\d+", "pass the number as a tensor"),
    (r"== -?\d+", "pass the number as a tensor, or keep it from changing"),
    (r"<text of|check_obj_id|check_type_id|\bis\b|==|len\(", "keep it from changing between calls"),
)


_Key = tuple[str, Place, str]


def of_breaks(breaks: Iterable[GraphBreak]) -> list[Problem]:
    """One for each line and reason."""
    counted: dict[GraphBreak, int] = {}
    for one in breaks:
        counted[one] = counted.get(one, 0) + 1
    return [_of_break(one, times) for one, times in counted.items()]


def _of_break(one: GraphBreak, times: int) -> Problem:
    what = (
        "the function that this is in runs in eager: the graph breaks where it cannot be resumed"
        if one.skipped
        else "the graph ends here, and the rest is another"
    )
    kind, change = "graph_break", _break_change(one)
    if one.native:
        kind, change = "unregistered_operator", _NATIVE_CHANGE
        name = "a C function through ctypes" if one.native == "ctypes" else f"{one.native}, a C function"
        what = f"{name} that is not registered with torch: {what}"
    return Problem(kind, what, *one.place, code=one.said, change=change, facts={"times": times})


def _break_change(one: GraphBreak) -> str:
    for pattern, change in _BREAK_CHANGES:
        if re.search(pattern, one.said):
            return change
    useful = [hint for hint in one.hints if not _USELESS_HINT.search(hint)]
    return useful[0] if useful else ""


def of_recompiles(runs: Sequence[Run]) -> list[Problem]:
    """One for each line and guard. A later run replaces what an earlier one found of the same."""
    found: dict[_Key, Problem] = {}
    for run in runs:
        groups: dict[_Key, list[tuple[Recompile, Call]]] = {}
        for call in run.calls:
            for one in call.recompiles:
                key = (one.function, one.place, re.sub(r"\d+", "#", one.guard))
                groups.setdefault(key, []).append((one, call))
        for key, group in groups.items():
            found[key] = _of_recompiles(group)
    return list(found.values())


def _of_recompiles(group: Sequence[tuple[Recompile, Call]]) -> Problem:
    one, _ = group[0]
    labels = list(dict.fromkeys(call.label for _, call in group if call.label))
    kind = "recompile"
    what = f"{one.function} is compiled again{_for_inputs(labels, len(group))}"
    if all(call.again for _, call in group):
        kind, what = "recompile_again", f"{what}, although these inputs had been given before"
    facts: dict[str, Value] = {
        "recompiles": len(group),
        "calls_s": sum({id(c): c.seconds for _, c in group}.values()),
    }
    if labels:
        facts["inputs"] = "; ".join(labels)
    return Problem(kind, what, *one.place, code=one.guard, change=_guard_change(one.guard), facts=facts)


def times_mixed(calls: Sequence[Call], most: int, graphs: int) -> str:
    """Why what was timed may be more than compiled code, "" when it is not.

    Args:
        calls: what the compiler did before.
        most: graphs of one function, `torch._dynamo.config.recompile_limit`.
        graphs: made while results and times were taken, of inputs that had all been compiled for.
    """
    if graphs:
        return (
            f"{counted(graphs, 'more graph')} came about meanwhile, though all inputs had been compiled for: timed "
            "calls may hold compiling, or have run in eager once the recompile limit was reached"
        )
    made = Counter(one.function for call in calls for one in call.recompiles)
    given_up = {limit.function for call in calls for limit in call.limits}
    if names := sorted(given_up | {name for name, again in made.items() if again + 1 >= most}):
        return f"the recompile limit is reached for {', '.join(names)}: timed calls may have run in eager"
    return ""


def _for_inputs(labels: Sequence[str], times: int) -> str:
    """Of one kind of inputs the name, of several how many; nothing where the inputs have no names."""
    inputs = f" for {labels[0] if len(labels) == 1 else f'{len(labels)} inputs'}" if labels else ""
    return inputs + (f", {times} times" if times > 1 else "")


def _guard_change(guard: str) -> str:
    if _NOT_SYMBOLIC.match(guard):
        return "sizes 0 and 1 keep graphs of their own: warm up with each that is used, or pad to 2"
    if (sizes := _SIZES.search(guard)) and (special := _special_sizes(*sizes.groups()[1:])):
        return f"{special}; one for the others: torch._dynamo.mark_dynamic(tensor, {sizes.group(1)})"
    for pattern, change in _GUARD_CHANGES:
        if match := re.search(pattern, guard):
            return match.expand(change)
    return ""


def _special_sizes(*sizes: str) -> str:
    """What to do about those among the sizes that `mark_dynamic` does not cover, "" when there are none."""
    special = sorted(set(sizes).intersection(_SPECIAL_SIZES))
    if not special:
        return ""
    names = f"size {special[0]} keeps" if len(special) == 1 else "sizes 0 and 1 each keep"
    return f"{names} a graph of its own, marked or not: warm up with it too, or pad to 2"


def of_limits(limits: Iterable[Limit]) -> list[Problem]:
    """One for each function that is given up."""
    return [
        Problem(
            "recompile_limit",
            f"{'the module' if of_torch(one) else one.function} was compiled {one.value} times, the limit: "
            "for further inputs it runs in eager",
            *one.place,
            code=f"torch._dynamo hit config.{one.name} ({one.value})",
            change="remove what makes it compile again; a higher limit only hides it",
        )
        for one in dict.fromkeys(limits)
    ]


def of_skips(skips: Iterable[Skip]) -> list[Problem]:
    """One for each reason why work is outside of CUDA Graphs."""
    return [_of_skip(one) for one in dict.fromkeys(skips)]


def _of_skip(one: Skip) -> Problem:
    if one.part:
        kind, what = "cudagraph_split", f"the CUDA Graph is split: {one.reason}"
    else:
        kind, what = "cudagraph_skip", f"no CUDA Graph is used: {one.reason}"
    change = ""
    if "mutated inputs" in one.reason:
        change = (
            "return the new value, or keep the tensor as a buffer of the module or by mark_static_address"
        )
    elif re.search(r"\bcpu\b|DeviceCopy|multiple devices", one.reason):
        change = "make all tensors on the GPU before the call, those of one element too"
    return Problem(kind, what, *one.place, code=one.reason, change=change)


def trace_table(run: Run, graphs: Sequence[Graph]) -> Table:
    """What dynamo did at each call."""
    rows = []
    for place, call in enumerate(run.calls):
        own = [graph for graph in graphs if graph.call == place]
        rows.append(
            (
                _label(call),
                len(own),
                sum(graph.operations for graph in own),
                any(graph.dynamic for graph in own) if own else None,
                len(call.breaks),
                len(call.recompiles),
            )
        )
    columns = ("inputs", "new_graphs", "operations", "dynamic_sizes", "breaks", "recompiles")
    return Table("traced with dynamo, in this order", columns, tuple(rows))


def compile_table(run: Run, title: str) -> Table:
    """What the compiler did at each call."""
    rows = tuple(
        (_label(call), call.seconds, call.kernels, call.external_calls, len(call.recompiles))
        for call in run.calls
    )
    return Table(title, ("inputs", "call_s", "kernels", "external_calls", "recompiles"), rows)


def _label(call: Call) -> str:
    return f"{call.label or 'inputs'}{', again' if call.again else ''}"
