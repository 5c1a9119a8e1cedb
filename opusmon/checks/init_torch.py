"""The part that needs torch: first use through it, captures as its first CUDA call, and threads that race in it.

This runs as a process of its own (`init-torch` in worker.CHECKS). Asked for races it imports torch, makes no CUDA
call, and forks for every repetition.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from opusmon.checks.init_costs import Clock
from opusmon.checks.init_driver import MODES
from opusmon.checks.init_fork import Stages
from opusmon.checks.init_race import WORKS, merged, together
from opusmon.checks.init_repeat import repeated
from opusmon.checks.init_scenarios import EMPTY, WRONG, Lab, Scenario, Seen
from opusmon.checks.result import Fact, Result, Table
from opusmon.checks.worker import Options, Say

_SIDE = 256
_RIGHT = float(_SIDE)
_WORDS = 90


def check(options: Options, say: Say) -> Result:
    """Costs of one fresh process, or the races (option `what`), as tables and facts for the check that asks."""
    start = time.perf_counter_ns()
    say("import torch")
    import torch

    import_ms = (time.perf_counter_ns() - start) / 1e6
    result = Result("init-torch", basis=f"torch {torch.__version__}")
    if torch.version.cuda is None:
        result.error = f"torch {torch.__version__} is built without CUDA"
    elif options["what"] == "costs":
        clock = Clock({"import torch": import_ms})
        _first_use(clock, say)
        result.tables.append(Table("steps", ("step", "ms"), tuple(clock.steps.items())))
    else:
        say("races in torch")
        lab = Lab(b"", int(options["threads"]), "", {})
        counts, all_done = repeated(
            scenarios(),
            lab,
            repeats=int(options["repeats"]),
            at_once=int(options["at_once"]),
            deadline_s=float(options["until_s"]),
            hang_s=float(options["hang_s"]),
        )
        result.facts += [
            Fact("counts", json.dumps([count.packed() for count in counts]), ""),
            Fact("all_done", all_done, ""),
        ]
    return result


def scenarios() -> list[Scenario]:
    """Those of torch."""
    made = [
        Scenario(
            "torch-init-race",
            "torch",
            "torch, threads: each makes a tensor and multiplies",
            "init",
            _threads_multiply,
        )
    ]
    for mode in MODES:
        made += [
            Scenario(
                "torch-capture-first",
                "torch",
                "torch.cuda.graph as the first CUDA call, a matmul inside",
                "unsafe",
                partial(_captured, warm=False),
                mode=mode,
            ),
            Scenario(
                "torch-open-matmul",
                "torch",
                "torch: a capture is open, another thread does its first matmul",
                "unsafe",
                _open_capture,
                mode=mode,
            ),
            Scenario(
                "safe-order-torch",
                "torch",
                "torch: warm-up on a side stream, synchronise, then capture",
                "safe",
                partial(_captured, warm=True),
                mode=mode,
            ),
        ]
    return made


def _first_use(clock: Clock, say: Say) -> None:
    import torch

    def waited(action: Callable[[], Any]) -> Callable[[], Any]:
        def both() -> Any:
            made = action()
            torch.cuda.synchronize()
            return made

        return both

    say("first use of CUDA")
    clock.time("torch: tensor, first", waited(lambda: torch.empty(1024, 1024, device="cuda")))
    x = clock.time("torch: kernel, first", waited(lambda: torch.ones(1024, 1024, device="cuda")))
    clock.time("torch: kernel, again", waited(lambda: torch.ones(1024, 1024, device="cuda")))
    say("first cuBLAS call")
    half = x.to(torch.bfloat16)
    torch.cuda.synchronize()
    clock.time("torch: matmul (cuBLAS), first", waited(lambda: half @ half))
    clock.time("torch: matmul (cuBLAS), again", waited(lambda: half @ half))
    clock.time("torch: matmul, first of another type", waited(lambda: x @ x))
    for word in ("first", "second"):
        say(f"{word} graph")
        graph = torch.cuda.CUDAGraph()
        clock.time(f"torch: graph captured, {word}", waited(partial(_fill, graph, half)))
        clock.time(f"torch: replay of the {word} graph, first", waited(graph.replay))
        clock.time(f"torch: replay of the {word} graph, again", waited(graph.replay))


def _fill(graph: Any, x: Any) -> None:
    import torch

    with torch.cuda.graph(graph):
        _ = x @ x


def _captured(_: Lab, __: Stages, mode: str, *, warm: bool) -> Seen:
    """Capture a product of ones, warmed up or as the first thing, and look at what the replay writes."""
    return Seen({"": _said(lambda: _warmed(mode) if warm else _cold(mode))})


def _cold(mode: str) -> str:
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=_torch_word(mode)):
        x = torch.ones(_SIDE, _SIDE, device="cuda")
        y = x @ x
    return _replayed(graph, y)


def _warmed(mode: str) -> str:
    import torch

    x = torch.ones(_SIDE, _SIDE, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            y = x @ x
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=_torch_word(mode)):
        y = x @ x
    x.fill_(2.0)
    return _replayed(graph, y, 4.0 * _RIGHT)


def _torch_word(mode: str) -> str:
    return mode.replace("-", "_")


def _replayed(graph: Any, y: Any, right: float = _RIGHT) -> str:
    import torch

    graph.replay()
    torch.cuda.synchronize()
    return WORKS if float(y.min()) == float(y.max()) == right else WRONG


def _said(action: Callable[[], str]) -> str:
    """How it went, in words: torch's own when it raises."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            outcome = action()
        except RuntimeError as error:
            outcome = error_words(error)
    if any("graph is empty" in str(warning.message).lower() for warning in seen):
        return EMPTY
    return outcome


def error_words(error: BaseException) -> str:
    """The first line of what torch said first, with the code where torch gives one."""
    # The end of a capture says only that something before it failed.
    while error.__context__ is not None:
        error = error.__context__
    code = getattr(error, "error_code", None)
    words = (str(error).strip().splitlines() or [type(error).__name__])[0][:_WORDS]
    return f"{code} {words}" if isinstance(code, int) else words


def _multiply() -> str:
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.ones(_SIDE, _SIDE, device="cuda")
        y = x @ x
        stream.synchronize()
        return WORKS if float(y.max()) == _RIGHT else WRONG


def _threads_multiply(lab: Lab, stages: Stages, _mode: str) -> Seen:
    said: dict[int, str] = {}

    def raced(number: int, _: None) -> None:
        # Warnings are caught for the whole process, so not in each of its threads.
        try:
            said[number] = _multiply()
        except RuntimeError as error:
            said[number] = error_words(error)

    outcome, overlapped = together(stages, lab.threads, raced)
    return Seen({"": merged([outcome, *said.values()])}, overlapped)


def _open_capture(_: Lab, stages: Stages, mode: str) -> Seen:
    import torch

    x = torch.ones(_SIDE, _SIDE, device="cuda")
    _ = x @ x
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    made: dict[str, Any] = {}

    def other(_: int, __: None) -> None:
        try:
            made["other"] = _multiply()
        except RuntimeError as error:
            made["other"] = error_words(error)

    def capturing() -> str:
        with torch.cuda.graph(graph, capture_error_mode=_torch_word(mode)):
            _ = x @ x
            made.setdefault("other", together(stages, 1, other)[0])
            y = x @ x
        return _replayed(graph, y)

    capturing_said = _said(capturing)
    return Seen({"capturing thread": capturing_said, "other thread": str(made.get("other", "not reached"))})
