"""`opusmon check triton`: what Triton compiles and tunes for a target, why again, and what a serving process pays.

The cases run in order in two fresh processes: first with empty caches, as in a first deployment, then with the cache
directory that the first one left, as after the restart of a worker. The user's own cache is only looked at.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from opusmon.checks import triton_caches, triton_hooks, triton_pass, triton_tables
from opusmon.checks.result import Missing, Result
from opusmon.checks.run import LONGER, deadline_s, run
from opusmon.checks.triton_problems import problems
from opusmon.checks.triton_trace import Trace, read
from opusmon.checks.worker import SCRATCH, Options, Say

NO_GPU = "run it where Triton sees a GPU"


def check(options: Options, say: Say) -> Result:
    """Trace a target's Triton kernels.

    Args:
        options: `target`, `buckets`.
        say: names the stage that begins.
    """
    result = Result("triton", str(options["target"]))
    until_s = deadline_s(options)
    say("reading the state of the cache directories")
    states = triton_caches.states()
    scratch = os.environ.get(SCRATCH)
    with (
        nullcontext(scratch) if scratch else tempfile.TemporaryDirectory(prefix="opusmon-check-") as directory
    ):
        private = Path(str(directory))
        cold = _pass("empty caches", options, private, until_s, result, say)
        warm = Trace() if result.error else _pass("filled caches", options, private, until_s, result, say)
    result.basis = cold.basis
    result.problems = problems(cold, warm, states)
    result.facts = triton_tables.facts(cold, warm)
    result.tables = [
        table
        for table in (
            triton_tables.pays(cold, triton_tables.COLD),
            triton_tables.pays(warm, triton_tables.WARM),
            triton_tables.compilations(cold, warm),
            triton_tables.tunes(cold, triton_tables.COLD),
            triton_tables.tunes(warm, triton_tables.WARM),
            triton_tables.caches(states),
        )
        if table.rows
    ]
    result.not_measured = _missing(cold, warm, result.error)
    return result


def _pass(how: str, options: Options, private: Path, until_s: float, result: Result, say: Say) -> Trace:
    """Run the cases in a process of their own; what it fails with goes into the result."""
    trace = private / "trace.json"
    trace.unlink(missing_ok=True)
    own = {
        "target": options["target"],
        "buckets": options.get("buckets", {}),
        "private": str(private),
        "trace": str(trace),
        "how": how,
        "debug": options.get("debug", False),
    }
    passed = run(
        triton_pass.NAME,
        own,
        limit_s=max(until_s - time.monotonic(), 1.0),
        env=triton_pass.environment(private),
        own_group=False,
        say=say,
    )
    result.error, result.remedy = passed.error, passed.remedy
    if passed.remedy == LONGER and (limit_s := options.get("limit_s")):
        result.error += f" (of the {float(limit_s):g} s some are kept to say what was found)"
    if "active drivers" in passed.error:
        result.remedy = NO_GPU
    return read(trace)


def _missing(cold: Trace, warm: Trace, error: str) -> list[Missing]:
    found = list(dict.fromkeys((*cold.missing, *warm.missing)))
    if triton_hooks.is_interpreted():
        found.append(("compilations", "TRITON_INTERPRET is set: kernels run as Python on the CPU"))
    if any(one.maker == "inductor" for one in cold.compilations):
        found.append(
            (
                "compiling by inductor in worker processes",
                "it was made to compile in one process, one kernel after another, to be seen; a server may take less",
            )
        )
    if cold.basis and not cold.basis.startswith("measured"):
        found.append(("times of launches, module loads and autotuning on a GPU", "no GPU is visible here"))
    if error:
        found.append(("all that comes after the failure", error))
    return [Missing(what, why) for what, why in found]
