"""Runs compiled code over the given inputs and writes down what torch does. Imported in the child only."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch._dynamo as dynamo
from torch._dynamo.utils import counters
from torch._logging import set_logs
from torch.fx import GraphModule

from opusmon.checks.compiled_inputs import fresh
from opusmon.checks.compiled_words import (
    GraphBreak,
    Limit,
    Recompile,
    Skip,
    cudagraph_skips,
    graph_breaks,
    limits,
    of_torch,
    recompiles,
    torch_says,
)
from opusmon.checks.target import Case

ROUNDS = 2
"""Inputs are given in order, and once more: what recompiles then would do so for ever."""


@dataclass(slots=True)
class Call:
    """A call of compiled code.

    Attributes:
        label: of the inputs.
        again: these inputs had been given before.
        seconds: of the call, compiling included.
        kernels: generated during it.
        external_calls: calls of library kernels and custom operators in the code generated during it.
        skips: why CUDA Graphs were not used.
    """

    label: str
    again: bool
    seconds: float = 0.0
    breaks: list[GraphBreak] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    kernels: int | None = None
    external_calls: int = 0
    skips: list[Skip] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """All calls of one way to compile.

    Attributes:
        functions: compiled, one for each case.
        calls: in order.
        error: what the compiler raised, after which there were no more calls.
    """

    functions: list[Callable[..., Any]]
    calls: list[Call] = field(default_factory=list)
    error: Exception | None = None

    @property
    def failed(self) -> str:
        """What the compiler raised, on one line."""
        return f"{type(self.error).__name__}: {torch_says(str(self.error))}" if self.error else ""


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph that dynamo made.

    Attributes:
        call: index of the call, in order, during which it was made.
        operations: calls of functions, methods and modules in it.
        dynamic: an input has a size that is a symbol.
    """

    call: int
    operations: int
    dynamic: bool


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """What torch logs about compiling, instead of on stderr."""
    handler = _Messages()
    set_logs(graph_breaks=True, recompiles=True, perf_hints=True, cudagraphs=True)
    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.split(".")[0] == "torch" and logger.handlers
    ]
    before = [list(logger.handlers) for logger in loggers]
    for logger in loggers:
        logger.handlers = [handler]
    try:
        with warnings.catch_warnings():
            # Dynamo says the same through the log.
            warnings.simplefilter("ignore")
            yield handler.said
    finally:
        for logger, handlers in zip(loggers, before, strict=True):
            logger.handlers = handlers
        set_logs()


class Graphs:
    """A backend that compiles nothing and notes the graphs that it is given."""

    def __init__(self) -> None:
        self.found: list[Graph] = []
        self.call = 0

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Note a graph and run it as it is."""
        kinds = [node.op for node in module.graph.nodes]
        operations = sum(kind in ("call_function", "call_method", "call_module") for kind in kinds)
        self.found.append(Graph(self.call, operations, any(map(_is_dynamic, inputs))))
        forward: Callable[..., Any] = module.forward
        return forward


def _is_dynamic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, torch.SymInt | torch.SymFloat)


def trace(cases: Sequence[Case], say: Callable[[str], None]) -> tuple[Run, list[Graph]]:
    """What dynamo makes of the cases, without a compiler behind it."""
    graphs = Graphs()

    def note(_call: Call) -> None:
        graphs.call += 1

    return run(cases, "tracing with dynamo", say, note, backend=graphs), graphs.found


def run(
    cases: Sequence[Case],
    stage: str,
    say: Callable[[str], None],
    after: Callable[[Call], None] | None = None,
    **how: Any,
) -> Run:
    """Call the compiled functions with all inputs, `ROUNDS` times over.

    Args:
        cases: in the order in which they are called.
        stage: what is being done, for `say`.
        say: told of each call.
        after: told of each call that went well.
        how: for `torch.compile`.
    """
    dynamo.reset()
    counters.clear()
    by_id = {id(case.fn): torch.compile(case.fn, **how) for case in cases}
    made = Run([by_id[id(case.fn)] for case in cases])
    for round_ in range(ROUNDS):
        for case, fn in zip(cases, made.functions, strict=True):
            say(": ".join(filter(None, (stage, case.label))))
            call = Call(case.label, round_ > 0)
            args, kwargs = fresh(case)
            torch.compiler.cudagraph_mark_step_begin()
            with listening() as said:
                try:
                    call.seconds = _seconds(partial(fn, *args, **kwargs))
                except Exception as error:
                    made.error = error
            call.breaks = graph_breaks(said)
            call.limits = limits(said)
            # Of a function that is given up torch names the guard too, and then does not compile it.
            given_up = {one.function for one in call.limits}
            call.recompiles = [
                _of_module(one, case.fn) for one in recompiles(said) if one.function not in given_up
            ]
            call.skips = cudagraph_skips(said)
            made.calls.append(call)
            if made.error is not None:
                return made
            if after is not None:
                after(call)
    return made


@contextlib.contextmanager
def graphs_made() -> Iterator[list[int]]:
    """How many graphs dynamo makes meanwhile; the list has the number at the end."""
    before = counters["stats"]["unique_graphs"]
    made: list[int] = []
    yield made
    made.append(counters["stats"]["unique_graphs"] - before)


def recompile_limit() -> int:
    """How many graphs dynamo makes of one function."""
    config = torch._dynamo.config  # noqa: SLF001
    return int(getattr(config, "recompile_limit", 8))


def _of_module(one: Recompile, fn: Callable[..., Any]) -> Recompile:
    """Torch's own function around a module without code of the user is called after the module."""
    if of_torch(one) and isinstance(fn, torch.nn.Module):
        return replace(one, function=f"the module ({type(fn).__name__})")
    return one


def _seconds(call: Callable[[], Any]) -> float:
    """Seconds until it has returned and the GPU is idle."""
    start = time.perf_counter()
    call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start
