"""The cases compiled for real: kernels, CUDA Graphs and how long it takes. Imported in the child only."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._inductor import compile_fx as _registers_what_torch_brings  # noqa: F401
from torch._inductor import metrics

from opusmon.checks.compiled_trace import Call, Run, run
from opusmon.checks.target import Case


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """Everything is generated anew; kernels of graphs out of a cache would not be counted."""
    with (
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


def start(device: Any) -> float:
    """Compile a trivial function: seconds of what is done once in a new cache directory.

    Raises:
        Exception: whatever keeps inductor from working here, as a missing compiler.
    """
    begin = time.perf_counter()
    with _uncached(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.compile(_trivial)(torch.ones(64, device=device))
    return time.perf_counter() - begin


def _trivial(x: Any) -> Any:
    return x + 1


def compiled(cases: Sequence[Case], say: Callable[[str], None]) -> Run:
    """Compile with inductor as torch does by default, and count what it generates."""
    seen = [0, 0]

    def count(call: Call) -> None:
        now = [metrics.generated_kernel_count, counters["inductor"]["extern_calls"]]
        call.kernels, call.external_calls = now[0] - seen[0], now[1] - seen[1]
        seen[:] = now

    metrics.reset()
    with _uncached():
        return run(cases, "compiling with inductor", say, count)


def with_cudagraphs(cases: Sequence[Case], say: Callable[[str], None]) -> Run:
    """Compile in the mode that uses CUDA Graphs."""
    with _uncached():
        return run(cases, "compiling with CUDA Graphs (reduce-overhead)", say, mode="reduce-overhead")
