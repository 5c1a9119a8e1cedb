"""What is repeated in fresh processes: captures at the wrong moment, races, and the safe order."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any, Literal

from opusmon.checks.init_driver import (
    MODES,
    PER_THREAD_STREAM,
    AbsentError,
    Calls,
    CudaError,
    Driver,
    Runtime,
    memset_in_order,
)
from opusmon.checks.init_fork import Stages, Work
from opusmon.checks.init_race import WORKS, together

EMPTY = "silently empty graph"
WRONG = "replay did not write"

Kind = Literal["safe", "init", "unsafe"]


@dataclass(frozen=True, slots=True)
class Lab:
    """What every scenario needs.

    Attributes:
        image: the module of kernels for this GPU.
        threads: how many race.
        runtime: path of the CUDA runtime library, "" when there is none.
        env: of the fork.
    """

    image: bytes
    threads: int
    runtime: str
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Seen:
    """What one repetition showed.

    Attributes:
        outcomes: who to how it went; who is "" when there is one actor.
        overlapped: all racing threads were inside at one moment; None where none race.
    """

    outcomes: dict[str, str]
    overlapped: bool | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """One thing that is repeated.

    Attributes:
        name: stable name for programs.
        part: of the check, as `race`.
        text: for people.
        kind: `safe` and `init` must always work; `unsafe` is what it is.
        body: does it once, in a fresh process.
        loading: CUDA_MODULE_LOADING, "" where it is left as it is.
        mode: of the capture, "" where there is none.
        needs_runtime: it calls the runtime library.
    """

    name: str
    part: str
    text: str
    kind: Kind
    body: Callable[[Lab, Stages], Seen]
    loading: str = ""
    mode: str = ""
    needs_runtime: bool = False


def work(scenario: Scenario, lab: Lab) -> Work:
    """A scenario as what a fork does."""

    def once(stages: Stages) -> dict[str, Any]:
        os.environ.update(lab.env)
        if scenario.loading:
            os.environ["CUDA_MODULE_LOADING"] = scenario.loading.upper()
        start = time.perf_counter_ns()
        try:
            seen = scenario.body(lab, stages)
        except CudaError as error:
            seen = Seen({"": str(error)})
        except AbsentError as error:
            return {"absent": str(error)}
        return {
            "outcomes": seen.outcomes,
            "overlapped": seen.overlapped,
            "ms": (time.perf_counter_ns() - start) / 1e6,
        }

    return once


def all_scenarios() -> list[Scenario]:
    """Those of the driver and of the runtime library."""
    return [*_first(), *_open(), *_races(), *_safe()]


def _first() -> list[Scenario]:
    scenarios = [
        Scenario(
            "capture-before-init",
            "first",
            "capture begun before cuInit",
            "unsafe",
            lambda _, stages: Seen({"": _early(stages, initialised=False)}),
            mode="global",
        ),
        Scenario(
            "capture-before-context",
            "first",
            "capture begun after cuInit, before a context",
            "unsafe",
            lambda _, stages: Seen({"": _early(stages, initialised=True)}),
            mode="global",
        ),
    ]
    for loading in ("lazy", "eager"):
        for mode in MODES:
            scenarios += [
                Scenario(
                    "first-launch-in-capture",
                    "first",
                    "context, module loaded, first launch inside the capture",
                    "unsafe",
                    lambda lab, stages, mode=mode: Seen({"": _first_launch(lab, stages, mode, late=False)}),
                    loading,
                    mode,
                ),
                Scenario(
                    "load-in-capture",
                    "first",
                    "context, module loaded and launched inside the capture",
                    "unsafe",
                    lambda lab, stages, mode=mode: Seen({"": _first_launch(lab, stages, mode, late=True)}),
                    loading,
                    mode,
                ),
            ]
    scenarios += [
        Scenario(
            "runtime-capture-first",
            "first",
            "runtime: cudaStreamBeginCapture as the first call",
            "unsafe",
            lambda lab, stages, mode=mode: Seen({"": _runtime(lab, stages, mode, warm=False)}),
            mode=mode,
            needs_runtime=True,
        )
        for mode in MODES
    ]
    return scenarios


def _open() -> list[Scenario]:
    return [
        Scenario(
            f"open-{name}",
            "open",
            f"one thread's capture is open, another {text}",
            "unsafe",
            lambda lab, stages, mode=mode, errand=errand: _errands(lab, stages, mode, errand),
            "lazy",
            mode,
        )
        for name, (text, errand) in _ERRANDS.items()
        for mode in MODES
    ]


def _races() -> list[Scenario]:
    return [
        *(
            Scenario(
                "init-race",
                "race",
                "threads: each cuInit, context, module, launch",
                "init",
                _init_race,
                loading,
            )
            for loading in ("lazy", "eager")
        ),
        *(
            Scenario(
                name,
                "race",
                text,
                "init",
                lambda lab, stages, free=free: _runtime_race(lab, stages, free=free),
                needs_runtime=True,
            )
            for name, text, free in (
                ("free0-race", "runtime, threads: each cudaFree(0), then allocates", True),
                ("malloc-race", "runtime, threads: each allocates as its first call", False),
            )
        ),
        *(
            Scenario(
                "capture-race",
                "race",
                "threads: each initialises and captures, no warm-up",
                "unsafe",
                lambda lab, stages, mode=mode: _capture_race(lab, stages, mode),
                "lazy",
                mode,
            )
            for mode in MODES
        ),
    ]


def _safe() -> list[Scenario]:
    scenarios = []
    for mode in MODES:
        scenarios += [
            Scenario(
                "safe-order",
                "safe",
                "context, module, warm-up launch, then capture",
                "safe",
                lambda lab, stages, mode=mode: Seen({"": _warmed(lab, stages, mode)}),
                "lazy",
                mode,
            ),
            Scenario(
                "safe-order-threads",
                "safe",
                "the same, then every thread captures at once",
                "safe",
                lambda lab, stages, mode=mode: _warmed_threads(lab, stages, mode),
                "lazy",
                mode,
            ),
            Scenario(
                "safe-order-runtime",
                "safe",
                "runtime: cudaFree(0), warm-up, then capture",
                "safe",
                lambda lab, stages, mode=mode: Seen({"": _runtime(lab, stages, mode, warm=True)}),
                mode=mode,
                needs_runtime=True,
            ),
        ]
    return scenarios


def _value() -> int:
    """What the kernels of this process write: not what a process before it may have left in the same memory."""
    return (os.getpid() * 2654435761 + 7) & 0xFFFFFFFF


def capture(calls: Calls, stream: c_void_p, mode: str, fill: Callable[[], object]) -> c_void_p:
    """Capture what `fill` does; returns the graph.

    Raises:
        CudaError: it failed; when `fill` did, with what the end of the capture said too.
    """
    calls.begin(stream, mode)
    try:
        fill()
    except CudaError as error:
        try:
            calls.end(stream)
        except CudaError as ending:
            raise CudaError(f"{error}, then {ending}") from error
        raise
    return calls.end(stream)


def _replayed(driver: Driver, stream: c_void_p, graph: c_void_p, place: int) -> str:
    """How it goes when the graph is launched, which should write _value()."""
    if driver.nodes(graph) == 0:
        return EMPTY
    driver.replay(driver.instantiate(graph), stream)
    driver.sync(stream)
    return WORKS if driver.read(place) == _value() else WRONG


def _ready(stages: Stages) -> Driver:
    driver = Driver(stages)
    driver.call("cuInit", 0)
    driver.context()
    return driver


def _early(stages: Stages, *, initialised: bool) -> str:
    driver = Driver(stages)
    if initialised:
        driver.call("cuInit", 0)
    driver.begin(PER_THREAD_STREAM, "global")
    return EMPTY if driver.nodes(driver.end(PER_THREAD_STREAM)) == 0 else WORKS


def _first_launch(lab: Lab, stages: Stages, mode: str, *, late: bool) -> str:
    driver = _ready(stages)
    stream = driver.stream()
    place = driver.memory()
    kernel = c_void_p() if late else driver.kernel(driver.load(lab.image))

    def fill() -> None:
        chosen = driver.kernel(driver.load(lab.image)) if late else kernel
        driver.launch(chosen, stream, place, _value())

    return _replayed(driver, stream, capture(driver, stream, mode, fill), place)


def _warm(driver: Driver, kernel: c_void_p) -> tuple[c_void_p, int]:
    """A stream on which the kernel has run, and memory."""
    stream = driver.stream()
    place = driver.memory()
    driver.launch(kernel, stream, place, 1)
    driver.sync(stream)
    return stream, place


def _warmed(lab: Lab, stages: Stages, mode: str) -> str:
    driver = _ready(stages)
    kernel = driver.kernel(driver.load(lab.image))
    stream, place = _warm(driver, kernel)
    graph = capture(driver, stream, mode, lambda: driver.launch(kernel, stream, place, _value()))
    return _replayed(driver, stream, graph, place)


def _warmed_threads(lab: Lab, stages: Stages, mode: str) -> Seen:
    driver = Driver(stages)
    driver.call("cuInit", 0)
    context = driver.context()
    module = driver.load(lab.image)

    def setup(number: int) -> tuple[c_void_p, c_void_p, int]:
        driver.call("cuCtxSetCurrent", context)
        kernel = driver.kernel(module, number)
        return (kernel, *_warm(driver, kernel))

    def raced(_: int, ready: tuple[c_void_p, c_void_p, int]) -> tuple[c_void_p, c_void_p, int]:
        kernel, stream, place = ready
        graph = capture(driver, stream, mode, lambda: driver.launch(kernel, stream, place, _value()))
        return stream, graph, place

    outcome, overlapped = together(
        stages, lab.threads, raced, setup=setup, after=lambda made: _replayed(driver, *made)
    )
    return Seen({"": outcome}, overlapped)


def _init_race(lab: Lab, stages: Stages) -> Seen:
    driver = Driver(stages)

    def raced(number: int, _: None) -> tuple[int, int]:
        driver.call("cuInit", 0)
        driver.context()
        stream = driver.stream()
        place = driver.memory()
        driver.launch(driver.kernel(driver.load(lab.image), number), stream, place, _value())
        driver.sync(stream)
        return driver.read(place), _value()

    outcome, overlapped = together(
        stages, lab.threads, raced, after=lambda made: WORKS if made[0] == made[1] else WRONG
    )
    return Seen({"": outcome}, overlapped)


def _capture_race(lab: Lab, stages: Stages, mode: str) -> Seen:
    driver = Driver(stages)

    def raced(number: int, _: None) -> tuple[c_void_p, c_void_p, int]:
        driver.call("cuInit", 0)
        driver.context()
        stream = driver.stream()
        place = driver.memory()
        kernel = driver.kernel(driver.load(lab.image), number)
        graph = capture(driver, stream, mode, lambda: driver.launch(kernel, stream, place, _value()))
        return stream, graph, place

    outcome, overlapped = together(stages, lab.threads, raced, after=lambda made: _replayed(driver, *made))
    return Seen({"": outcome}, overlapped)


@dataclass(frozen=True, slots=True)
class _Tools:
    """What a thread has for its errand while another one captures."""

    kernel: c_void_p
    stream: c_void_p
    place: int


_Errand = Callable[[Lab, Driver, _Tools], object]
_ERRANDS: dict[str, tuple[str, _Errand]] = {
    "allocate": ("allocates", lambda _, driver, __: driver.memory()),
    "load": (
        "loads a module and launches",
        lambda lab, driver, tools: driver.launch(
            driver.kernel(driver.load(lab.image)), tools.stream, tools.place, 1
        ),
    ),
    "first-launch": (
        "launches a kernel for the first time",
        lambda _, driver, tools: driver.launch(tools.kernel, tools.stream, tools.place, 1),
    ),
    "synchronise": ("synchronises its own stream", lambda _, driver, tools: driver.sync(tools.stream)),
    "stream": ("creates a stream", lambda _, driver, __: driver.stream()),
}


def _errands(lab: Lab, stages: Stages, mode: str, errand: _Errand) -> Seen:
    driver = Driver(stages)
    driver.call("cuInit", 0)
    context = driver.context()
    module = driver.load(lab.image)
    kernel = driver.kernel(module)
    stream, place = _warm(driver, kernel)
    others = lab.threads - 1
    tools = [
        _Tools(driver.kernel(module, 1 + number), driver.stream(), driver.memory())
        for number in range(others)
    ]
    said: dict[str, str] = {}

    def fill() -> None:
        driver.launch(kernel, stream, place, 1)
        said["other threads"], _ = together(
            stages,
            others,
            lambda number, _: errand(lab, driver, tools[number]),
            setup=lambda _: driver.call("cuCtxSetCurrent", context),
        )
        driver.launch(kernel, stream, place, _value())

    try:
        capturing = _replayed(driver, stream, capture(driver, stream, mode, fill), place)
    except CudaError as error:
        capturing = str(error)
    return Seen({"capturing thread": capturing, **said})


def _runtime(lab: Lab, stages: Stages, mode: str, *, warm: bool) -> str:
    runtime = Runtime(stages, lab.runtime)
    if warm:
        runtime.call("cudaFree", None)
        memset_in_order(runtime)
        runtime.sync(PER_THREAD_STREAM)
    graph = capture(runtime, PER_THREAD_STREAM, mode, lambda: memset_in_order(runtime))
    if runtime.nodes(graph) == 0:
        return EMPTY
    runtime.replay(runtime.instantiate(graph), PER_THREAD_STREAM)
    runtime.sync(PER_THREAD_STREAM)
    return WORKS


def _runtime_race(lab: Lab, stages: Stages, *, free: bool) -> Seen:
    runtime = Runtime(stages, lab.runtime)

    def raced(_: int, __: None) -> None:
        if free:
            runtime.call("cudaFree", None)
        place = runtime.made("cudaMalloc", 64)
        runtime.call("cudaMemset", place, 7, 64)
        runtime.call("cudaDeviceSynchronize")

    outcome, overlapped = together(stages, lab.threads, raced)
    return Seen({"": outcome}, overlapped)
