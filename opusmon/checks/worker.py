"""The child process of a check: runs the user's code and sends what was found through a pipe.

One JSON object a line: `{"stage": TEXT}` says what begins now, so that a code that hangs or crashes is known by its
stage; `{"result": {...}}` comes last.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from opusmon.checks.result import Result, one_line, to_json
from opusmon.checks.target import TargetError
from opusmon.checks.where import of_error
from opusmon.processes import die_with_parent

Options = Mapping[str, Any]
Say = Callable[[str], None]

CHECKS = {
    "graph": "opusmon.checks.graph",
    "graph-static": "opusmon.checks.graph_static",
    "graph-capture": "opusmon.checks.graph_capture",
    "compile": "opusmon.checks.compiled",
    "kv-layout": "opusmon.checks.kv_layout",
    "triton": "opusmon.checks.triton_jit",
    "triton-pass": "opusmon.checks.triton_pass",
    "init": "opusmon.checks.init",
    "init-torch": "opusmon.checks.init_torch",
}
"""Module of each check; its `check(options, say) -> Result` is called here. `say` names the stage that begins."""

SCRATCH = "OPUSMON_CHECK_SCRATCH"
"""Names the child's own empty folder in its environment; it goes when the child has ended."""

INSTALL_TORCH = "pip install 'opusmon[torch]', or --python PATH of an environment that has torch"
INSTALL_TRITON = (
    "--python PATH of an environment that has triton: torch for CUDA brings it, torch for the CPU does not"
)
INSTALL = {"torch": INSTALL_TORCH, "triton": INSTALL_TRITON}
"""What to do where a module is not there."""

NEEDS_GPU = "run it on a host with a GPU, or let the target make its tensors on the CPU where there is none"
"""What to do where torch sees no GPU and the target wants one."""

_NO_GPU = (
    "not compiled with CUDA",
    "not linked with support for cuda",
    "no NVIDIA driver",
    "No CUDA GPUs",
    # Streams and events when they are made: of a torch without CUDA, and of one with CUDA and no GPU.
    "requires CUDA support",
    "dummy base class",
    "no CUDA-capable device",
)


def main(name: str, options_json: str, pipe: int) -> None:
    """Run one check and write to the pipe. The user's prints go to stderr, so that stdout is the report's."""
    die_with_parent()
    os.dup2(2, 1)
    out = os.fdopen(pipe, "w", encoding="utf-8")

    def send(document: dict[str, Any]) -> None:
        try:
            out.write(json.dumps(document) + "\n")
            out.flush()
        except BrokenPipeError:
            # Nobody waits for it any more: the time was up.
            os._exit(1)

    options = json.loads(options_json)
    result = run(name, options, lambda stage: send({"stage": stage}))
    send({"result": to_json(result)})
    sys.stderr.flush()
    # Threads and CUDA of the user's code must not keep the process, or crash it, once all is said.
    os._exit(0)


def run(name: str, options: Options, say: Say) -> Result:
    """Run one check here; what the user's code raises becomes the result's error."""
    target = str(options.get("target") or "")
    say("starting")
    try:
        result: Result = importlib.import_module(CHECKS[name]).check(options, say)
    except TargetError as error:
        return Result(name, target, error=str(error))
    except ModuleNotFoundError as error:
        if error.name in INSTALL:
            return Result(
                name, target, error=f"{error.name} is not installed here", remedy=INSTALL[error.name]
            )
        return _failed(name, target, error)
    except SystemExit as error:
        # Ending here would take as long as torch takes to end, and say less.
        return _failed(name, target, error, "the code ends the process, sys.exit")
    except (Exception, KeyboardInterrupt) as error:
        if options.get("debug"):
            traceback.print_exception(error)
        return _failed(name, target, error)
    return result


def use_own_caches() -> None:
    """What is compiled from here on neither reads nor fills the caches of the user's programs."""
    scratch = os.environ[SCRATCH]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{scratch}/inductor"
    os.environ["TRITON_CACHE_DIR"] = f"{scratch}/triton"


def needs_gpu(error: BaseException) -> bool:
    """Whether torch says that it has no GPU."""
    return isinstance(error, AssertionError | RuntimeError) and any(words in str(error) for words in _NO_GPU)


def _failed(name: str, target: str, error: BaseException, lead: str = "") -> Result:
    where, line = of_error(error)
    place = f" at {where}: {line}" if where else ""
    remedy = NEEDS_GPU if needs_gpu(error) else ""
    what = f"{lead or type(error).__name__}: {one_line(error)}{place}"
    return Result(name, target, error=what, remedy=remedy)
