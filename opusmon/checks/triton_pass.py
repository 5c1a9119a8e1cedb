"""One pass over the cases in a fresh process, with a cache directory of its own. Its trace goes to a file."""

from __future__ import annotations

import inspect
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from opusmon.checks import triton_hooks
from opusmon.checks.basis import of_torch, use_gpu
from opusmon.checks.result import Result, one_line
from opusmon.checks.target import Case, cases, load
from opusmon.checks.triton_trace import Times, Trace, write
from opusmon.checks.where import NOWHERE, Place, is_users, place
from opusmon.checks.worker import Options, Say

NAME = "triton-pass"
STEADY_CALLS = 5
"""Calls after the first one, of which the median is the steady time; at least `MIN_CALLS` however long they take."""
MIN_CALLS = 2
STEADY_S = 2.0
"""No further call begins after this long."""


def environment(private: Path) -> dict[str, str]:
    """What a pass runs under: its own caches, and compilation where it can be seen."""
    return {
        "TRITON_CACHE_DIR": str(private / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(private / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "0",
        "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE": "0",
    }


def check(options: Options, say: Say) -> Result:
    """Run the cases.

    Args:
        options: `target`, `buckets`; `private`, the directory of the caches; `trace`, the file for what was seen.
        say: names the stage that begins.
    """
    private, trace = Path(options["private"]), Trace()
    try:
        _run(options, say, private, trace)
    finally:
        write(trace, Path(options["trace"]))
    return Result(NAME, str(options["target"]), basis=trace.basis)


def _run(options: Options, say: Say, private: Path, trace: Trace) -> None:
    how = str(options["how"])
    say(f"{how}: importing triton")
    if names := triton_hooks.foreign_caches():
        trace.missing.append(
            ("the cache behind " + " and ".join(names), "kernels were kept in a directory here")
        )
    recorder = triton_hooks.Recorder(trace, private)
    recorder.install()
    say(f"{how}: making the inputs")
    make = load(str(options["target"]))
    elsewhere = triton_hooks.hold_caches(environment(private))
    found = cases(make, options.get("buckets", {}))
    if "torch" in sys.modules:
        use_gpu(found)
    trace.basis = _basis()
    if triton_hooks.hold_caches(environment(private)) or elsewhere:
        trace.facts.append(
            "the target sets a cache directory or compile threads of its own; here others were used"
        )
    for number, case in enumerate(found):
        recorder.case, recorder.called = number, defined(case.fn)
        recorder.inductor()
        label = case.name
        say(f"{how}: first call, {label}")
        trace.times.append(
            _measure(case, recorder, lambda label=label: say(f"{how}: further calls, {label}"))
        )


def defined(called: Any) -> Place:
    """The first line of a function of the user's, also behind torch.compile and in a module; NOWHERE of another's."""
    found = getattr(called, "_orig_mod", called)
    found = getattr(found, "_torchdynamo_orig_callable", found)
    found = getattr(found, "forward", found)
    code = getattr(inspect.unwrap(found), "__code__", None)
    return place(code.co_filename, code.co_firstlineno) if code and is_users(code.co_filename) else NOWHERE


def _measure(case: Case, recorder: triton_hooks.Recorder, further: Any) -> Times:
    recorder.call = 0
    _settle()
    first_ms = _timed_ms(case)
    further()
    began_s = time.perf_counter()
    steady: list[float] = []
    while len(steady) < MIN_CALLS or (
        len(steady) < STEADY_CALLS and time.perf_counter() - began_s < STEADY_S
    ):
        recorder.call += 1
        steady.append(_timed_ms(case))
    return Times(case.name, first_ms, statistics.median(steady), len(steady))


def _timed_ms(case: Case) -> float:
    began_s = time.perf_counter()
    case.call()
    _settle()
    return (time.perf_counter() - began_s) * 1e3


def _settle() -> None:
    """Wait until the GPU has done what it was given."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _basis() -> str:
    """GPU, driver and versions; without a GPU that torch can use, what is compiled for."""
    versions = f"triton {triton_hooks.version()}"
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        if torch.cuda.is_available():
            return f"measured on {of_torch()}, {versions}"
        versions = f"torch {torch.__version__}, {versions}"
    try:
        return f"compiled for {triton_hooks.target()}, no GPU is visible here, {versions}"
    except Exception as error:
        return f"no GPU is visible to Triton ({one_line(error)}), {versions}"
