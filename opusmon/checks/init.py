"""`opusmon check init`: what first use of CUDA costs on this host, which captures fail, and the safe order.

Every measurement is a fresh process. This process makes no CUDA call and imports no torch: it forks for each
repetition, and starts interpreters for what needs torch.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from opusmon.checks import basis
from opusmon.checks.init_costs import FIRST_RUNTIME_CALLS, driver_work, runtime_work
from opusmon.checks.init_driver import Driver, ptx, runtime_path
from opusmon.checks.init_fork import Stages, Work, run_forks, run_one
from opusmon.checks.init_parts import PARTS
from opusmon.checks.init_repeat import repeated
from opusmon.checks.init_scenarios import Lab, all_scenarios
from opusmon.checks.init_tally import Costs, Count, legend, outcome_table, without_answer
from opusmon.checks.init_words import problems, safe_order
from opusmon.checks.result import Fact, Missing, Result
from opusmon.checks.run import deadline_s, run
from opusmon.checks.worker import INSTALL_TORCH, Options, Say

HANG_S = 30.0
"""A repetition that runs longer has hung."""

_COSTS_MOST = 10
_TORCH_COSTS = 3
_MARGIN_S = 3.0
_TORCH_SHARE = 0.5
_EXCLUSIVE = 3
_REMEDY = "run it where NVIDIA's driver and a GPU are; a container needs --gpus, or its like"


def check(options: Options, say: Say) -> Result:
    """Measure, with `repeats`, `threads`, `device`, `at_once`, `part`, `limit_s` and `hang_s` of the options."""
    result = Result("init")
    until_s = deadline_s(options)
    hang_s = float(options.get("hang_s", HANG_S))
    parts = tuple(options.get("part") or PARTS)
    say("look at the driver and the GPU")
    device = int(options.get("device") or 0)
    try:
        env = {"CUDA_VISIBLE_DEVICES": _visible(device), "CUDA_CACHE_DISABLE": "1"}
    except IndexError:
        result.error = f"CUDA_VISIBLE_DEVICES names no device {device}"
        return result
    host = run_one(lambda stages: _host(stages, env), hang_s=hang_s)
    said = host.said or {}
    if "image" not in said:
        result.error = without_answer(host)
        result.remedy = _REMEDY
        return result
    result.basis = _basis(said)
    lab = Lab(base64.b64decode(said["image"]), int(options.get("threads") or 8), runtime_path(), env)
    at_once = 1 if said["compute_mode"] == _EXCLUSIVE else int(options.get("at_once") or _at_once())
    plan = _Plan(int(options.get("repeats") or 20), at_once, hang_s, until_s, parts)
    costs = _costs(plan, lab, result, say) if "costs" in parts else Costs()
    counts = _scenarios(plan, lab, result, say)
    if "torch" in parts:
        counts += _torch(plan, lab, costs, result, say)
    _report(result, plan, lab, said, costs, counts)
    return result


class _Plan:
    """How often, how many at a time, how long."""

    def __init__(
        self, repeats: int, at_once: int, hang_s: float, deadline_s: float, parts: tuple[str, ...]
    ) -> None:
        self.repeats = repeats
        self.at_once = at_once
        self.hang_s = hang_s
        self.deadline_s = deadline_s
        self.parts = parts

    def until_s(self) -> float:
        """Deadline of what comes before torch."""
        now_s = time.monotonic()
        share = 1.0 - _TORCH_SHARE if "torch" in self.parts and find_spec("torch") is not None else 1.0
        return now_s + (self.deadline_s - now_s) * share


def _at_once() -> int:
    """Processes at a time: a few threads of each should run at the same moment."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4))


def _visible(device: int) -> str:
    """CUDA_VISIBLE_DEVICES under which this device is the only one.

    Raises:
        IndexError: that variable is set and names fewer devices.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(device) if given is None else given.split(",")[device].strip()


def _host(stages: Stages, env: Mapping[str, str]) -> dict[str, Any]:
    """In a fork: what the driver says of itself, and the module for this GPU."""
    os.environ.update(env)
    driver = Driver(stages)
    driver.call("cuInit", 0)
    said: dict[str, Any] = {
        "cuda": driver.number("cuDriverGetVersion"),
        "name": driver.device_name(),
        "compute_mode": driver.compute_mode(),
        "loading": driver.number("cuModuleGetLoadingMode") if driver.has("cuModuleGetLoadingMode") else None,
    }
    driver.context()
    return {**said, "image": base64.b64encode(driver.compiled(ptx())).decode()}


def _basis(said: Mapping[str, Any]) -> str:
    cuda = f"CUDA {said['cuda'] // 1000}.{said['cuda'] % 1000 // 10}"
    return f"measured on {said['name']}, {basis.driver()}, {cuda}"


def _costs(plan: _Plan, lab: Lab, result: Result, say: Say) -> Costs:
    """First use, one process at a time so that none waits for another."""
    say("costs of first use")
    costs = Costs()
    repeats = min(plan.repeats, _COSTS_MOST)

    def jobs() -> Iterator[tuple[str, Work]]:
        for _ in range(repeats):
            for loading in ("lazy", "eager"):
                yield loading, driver_work(lab, loading)
            for first in FIRST_RUNTIME_CALLS if lab.runtime else ():
                yield "", runtime_work(lab, first)

    done = run_forks(jobs(), costs.add, at_once=1, deadline_s=plan.until_s(), hang_s=plan.hang_s)
    if not done:
        result.not_measured.append(Missing("some repetitions of the costs", "the time limit"))
    if not lab.runtime:
        result.not_measured.append(
            Missing("the runtime library", "no libcudart is beside torch or in /usr/local/cuda")
        )
    result.not_measured += [Missing("a repetition of the costs", why) for why in costs.failed]
    return costs


def _scenarios(plan: _Plan, lab: Lab, result: Result, say: Say) -> list[Count]:
    scenarios = [
        scenario
        for scenario in all_scenarios()
        if scenario.part in plan.parts and (lab.runtime or not scenario.needs_runtime)
    ]
    if not scenarios:
        return []
    say("captures and races")
    counts, all_done = repeated(
        scenarios,
        lab,
        repeats=plan.repeats,
        at_once=plan.at_once,
        deadline_s=plan.until_s(),
        hang_s=plan.hang_s,
    )
    _incomplete(result, counts, plan.repeats, all_done=all_done)
    return counts


def _incomplete(result: Result, counts: list[Count], repeats: int, *, all_done: bool) -> None:
    """Say what was not repeated as often as asked for, and why."""
    for count in counts:
        if count.absent:
            result.not_measured.append(Missing(count.label(), count.absent))
        elif count.over:
            result.not_measured.append(
                Missing(f"{repeats - count.done} repetitions of {count.label()}", f"{count.hangs} have hung")
            )
        elif count.done == 0:
            result.not_measured.append(Missing(count.label(), "the time limit"))
    done = [count.done for count in counts if count.done and not count.over]
    if not all_done and done:
        result.not_measured.append(
            Missing(
                f"the rest of {repeats} repetitions: {min(done)} to {max(done)} of each scenario were done",
                "the time limit; --time-limit gives it longer",
            )
        )


def _torch(plan: _Plan, lab: Lab, costs: Costs, result: Result, say: Say) -> list[Count]:
    if find_spec("torch") is None:
        result.not_measured.append(
            Missing("everything that needs torch", f"it is not installed: {INSTALL_TORCH}")
        )
        return []
    if "costs" in plan.parts:
        say("torch: first use")
        for loading in ("lazy", "eager"):
            if why := _torch_costs(plan, lab, costs, loading):
                result.not_measured.append(Missing(f"costs of first use in torch ({loading})", why))
                if loading == "lazy":
                    return []
    say("torch: captures and races")
    left_s = plan.deadline_s - time.monotonic()
    options = {
        "what": "races",
        "repeats": plan.repeats,
        "threads": lab.threads,
        "at_once": plan.at_once,
        "hang_s": plan.hang_s,
        # Of the monotonic clock, which all processes share.
        "until_s": time.monotonic() + left_s - min(left_s / 4, _MARGIN_S),
    }
    # Threads of the processor's libraries would be there when the process forks.
    env = {**lab.env, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    answer = run("init-torch", options, limit_s=max(left_s, 1.0), env=env, own_group=False)
    facts = {fact.name: fact.value for fact in answer.facts}
    if answer.error or "counts" not in facts:
        result.not_measured.append(Missing("captures and races in torch", answer.error or "no answer"))
        return []
    counts = [Count.unpacked(values) for values in json.loads(str(facts["counts"]))]
    _incomplete(result, counts, plan.repeats, all_done=bool(facts["all_done"]))
    result.basis += f", {answer.basis}"
    return counts


def _torch_costs(plan: _Plan, lab: Lab, costs: Costs, loading: str) -> str:
    """Fresh interpreters, one after another; returns why one gave nothing, "" when all did."""
    for _ in range(min(plan.repeats, _TORCH_COSTS)):
        left_s = plan.deadline_s - time.monotonic()
        if left_s <= 1.0:
            return "the time limit"
        answer = run(
            "init-torch",
            {"what": "costs"},
            limit_s=left_s,
            env={**lab.env, "CUDA_MODULE_LOADING": loading.upper()},
            own_group=False,
        )
        costs.take(loading, {str(step): float(str(ms)) for table in answer.tables for step, ms in table.rows})
        if answer.error:
            return answer.error
    return ""


def _report(
    result: Result, plan: _Plan, lab: Lab, said: Mapping[str, Any], costs: Costs, counts: list[Count]
) -> None:
    raced, overlapped = sum(count.raced for count in counts), sum(count.overlapped for count in counts)
    result.problems += problems(counts)
    result.facts += [
        Fact(
            "repeats",
            plan.repeats,
            f"{plan.repeats} repetitions asked for, each in a fresh process: a fork of one that "
            "has made no CUDA call",
        ),
        Fact(
            "at_once",
            plan.at_once,
            f"{plan.at_once} processes at a time for captures and races, one for costs",
        ),
        Fact("threads", lab.threads, f"{lab.threads} threads race in each process"),
    ]
    if raced:
        result.facts.append(
            Fact(
                "overlapped",
                overlapped,
                f"all threads were inside at one moment in {overlapped:,} of {raced:,} races",
            )
        )
    if said["loading"] is not None:
        word = {1: "eager", 2: "lazy"}.get(said["loading"], "unknown")
        result.facts.append(Fact("loading", word, f"module loading of this environment: {word}"))
    result.facts += safe_order(costs, counts)
    if costs.ms:
        result.tables.append(costs.table("first use, one process at a time, ms"))
    if counts:
        result.tables.append(legend("captures and races", counts))
        result.tables.append(outcome_table("outcomes, each repetition in a fresh process", counts))
