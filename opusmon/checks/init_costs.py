"""What first use costs, step by step: one fresh process, one clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from ctypes import c_void_p
from dataclasses import dataclass, field
from typing import Any

from opusmon.checks.init_driver import Driver, Runtime, ptx
from opusmon.checks.init_fork import Stages, Work
from opusmon.checks.init_scenarios import Lab, capture

FIRST_RUNTIME_CALLS = ("cudaFree(0)", "cudaSetDevice(0)", "cudaMalloc")
"""First calls of the runtime library whose costs are compared."""


@dataclass(slots=True)
class Clock:
    """Milliseconds of each step, in order."""

    steps: dict[str, float] = field(default_factory=dict)

    def time(self, step: str, action: Callable[[], Any]) -> Any:
        """Do it and note how long it took; returns what it returned."""
        start = time.perf_counter_ns()
        made = action()
        self.steps[step] = (time.perf_counter_ns() - start) / 1e6
        return made


def driver_work(lab: Lab, loading: str) -> Work:
    """First and second use through the driver, as what a fork does."""

    def once(stages: Stages) -> dict[str, Any]:
        os.environ.update(lab.env, CUDA_MODULE_LOADING=loading.upper())
        clock = Clock()
        _driver_steps(clock, lab, stages)
        return dict(clock.steps)

    return once


def runtime_work(lab: Lab, first: str) -> Work:
    """One of FIRST_RUNTIME_CALLS as the first call of a process, as what a fork does."""

    def once(stages: Stages) -> dict[str, Any]:
        os.environ.update(lab.env)
        runtime = Runtime(stages, lab.runtime)
        calls: dict[str, Callable[[], Any]] = {
            "cudaFree(0)": lambda: runtime.call("cudaFree", None),
            "cudaSetDevice(0)": lambda: runtime.call("cudaSetDevice", 0),
            "cudaMalloc": lambda: runtime.made("cudaMalloc", 64),
        }
        clock = Clock()
        clock.time(f"{first} as the first call", calls[first])
        clock.time(f"cudaMalloc after {first}", calls["cudaMalloc"])
        return dict(clock.steps)

    return once


def _driver_steps(clock: Clock, lab: Lab, stages: Stages) -> None:
    driver: Driver = clock.time("libcuda loaded", lambda: Driver(stages))
    clock.time("cuInit", lambda: driver.call("cuInit", 0))
    clock.time("context", driver.context)
    stream: c_void_p = clock.time("stream", driver.stream)
    place: int = clock.time("allocation, first", driver.memory)
    clock.time("allocation, second", driver.memory)
    module: c_void_p = clock.time("module of 64 kernels", lambda: driver.load(lab.image))
    kernels = [driver.kernel(module, number) for number in range(2)]

    def launch(kernel: c_void_p) -> None:
        driver.launch(kernel, stream, place, 1)
        driver.sync(stream)

    clock.time("launch, first", lambda: launch(kernels[0]))
    clock.time("launch, same kernel again", lambda: launch(kernels[0]))
    clock.time("launch, first of another kernel", lambda: launch(kernels[1]))
    for word in ("first", "second"):
        _graph_steps(clock, driver, word, stream, lambda: driver.launch(kernels[0], stream, place, 2))
    text = ptx(1)
    clock.time("module of one PTX kernel, compiled", lambda: driver.made("cuModuleLoadData", text))


def _graph_steps(
    clock: Clock, driver: Driver, word: str, stream: c_void_p, fill: Callable[[], object]
) -> None:
    graph: c_void_p = clock.time(f"graph capture, {word}", lambda: capture(driver, stream, "global", fill))
    ready: c_void_p = clock.time(f"graph instantiate, {word}", lambda: driver.instantiate(graph))

    def replay() -> None:
        driver.replay(ready, stream)
        driver.sync(stream)

    clock.time(f"graph launch, {word} graph, first", replay)
    clock.time(f"graph launch, {word} graph, again", replay)
