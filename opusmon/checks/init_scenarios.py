"""What is repeated in fresh processes: captures at the wrong moment, races, and the safe order."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from ctypes import c_void_p
from dataclasses import dataclass
from functools import partial
from itertools import product
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


Body = Callable[[Lab, Stages, str], Seen]
"""Does a scenario once, in a fresh process; the text is the mode of its captures."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One thing that is repeated.

    Attributes:
        name: stable name for programs.
        part: of the check, as `race`.
        text: for people.
        kind: `safe` and `init` must always work; `unsafe` is what it is.
        body: what is done.
        loading: CUDA_MODULE_LOADING, "" where it is left as it is.
        mode: of the capture, "" where there is none.
        needs_runtime: it calls the runtime library.
    """

    name: str
    part: str
    text: str
    kind: Kind
    body: Body
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
            seen = scenario.body(lab, stages, scenario.mode)
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
    early = partial(Scenario, part="first", kind="unsafe")
    found = [
        early(
            "capture-before-init",
            text="capture begun before cuInit",
            body=partial(_early, initialised=False),
            mode="global",
        ),
        early(
            "capture-before-context",
            text="capture begun after cuInit, before a context",
            body=partial(_early, initialised=True),
            mode="global",
        ),
    ]
    for loading, mode in product(("lazy", "eager"), MODES):
        found += [
            early(
                "first-launch-in-capture",
                text="context, module loaded, first launch inside the capture",
                body=partial(_first_launch, late=False),
                loading=loading,
                mode=mode,
            ),
            early(
                "load-in-capture",
                text="context, module loaded and launched inside the capture",
                body=partial(_first_launch, late=True),
                loading=loading,
                mode=mode,
            ),
        ]
    found += [
        early(
            "runtime-capture-first",
            text="runtime: cudaStreamBeginCapture as the first call",
            body=partial(_runtime, warm=False),
            mode=mode,
            needs_runtime=True,
        )
        for mode in MODES
    ]
    return found


def _open() -> list[Scenario]:
    return [
        Scenario(
            f"open-{name}",
            part="open",
            text=f"one thread's capture is open, another {text}",
            kind="unsafe",
            body=partial(_errands, errand=errand),
            loading="lazy",
            mode=mode,
        )
        for (name, (text, errand)), mode in product(_ERRANDS.items(), MODES)
    ]


def _races() -> list[Scenario]:
    race = partial(Scenario, part="race")
    return [
        *(
            race(
                "init-race",
                text="threads: each cuInit, context, module, launch",
                kind="init",
                body=_init_race,
                loading=loading,
            )
            for loading in ("lazy", "eager")
        ),
        race(
            "free0-race",
            text="runtime, threads: each cudaFree(0), then allocates",
            kind="init",
            body=partial(_runtime_race, free=True),
            needs_runtime=True,
        ),
        race(
            "malloc-race",
            text="runtime, threads: each allocates as its first call",
            kind="init",
            body=partial(_runtime_race, free=False),
            needs_runtime=True,
        ),
        *(
            race(
                "capture-race",
                text="threads: each initialises and captures, no warm-up",
                kind="unsafe",
                body=_capture_race,
                loading="lazy",
                mode=mode,
            )
            for mode in MODES
        ),
    ]


def _safe() -> list[Scenario]:
    safe = partial(Scenario, part="safe", kind="safe")
    found = []
    for mode in MODES:
        found += [
            safe(
                "safe-order",
                text="context, module, warm-up launch, then capture",
                body=_warmed,
                loading="lazy",
                mode=mode,
            ),
            safe(
                "safe-order-threads",
                text="the same, then every thread captures at once",
                body=_warmed_threads,
                loading="lazy",
                mode=mode,
            ),
            safe(
                "safe-order-runtime",
                text="runtime: cudaFree(0), warm-up, then capture",
                body=partial(_runtime, warm=True),
                mode=mode,
                needs_runtime=True,
            ),
        ]
    return found


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


def _early(_: Lab, stages: Stages, mode: str, *, initialised: bool) -> Seen:
    driver = Driver(stages)
    if initialised:
        driver.call("cuInit", 0)
    driver.begin(PER_THREAD_STREAM, mode)
    return Seen({"": EMPTY if driver.nodes(driver.end(PER_THREAD_STREAM)) == 0 else WORKS})


def _first_launch(lab: Lab, stages: Stages, mode: str, *, late: bool) -> Seen:
    driver = _ready(stages)
    stream = driver.stream()
    place = driver.memory()
    kernel = c_void_p() if late else driver.kernel(driver.load(lab.image))

    def fill() -> None:
        chosen = driver.kernel(driver.load(lab.image)) if late else kernel
        driver.launch(chosen, stream, place, _value())

    return Seen({"": _replayed(driver, stream, capture(driver, stream, mode, fill), place)})


def _warm(driver: Driver, kernel: c_void_p) -> tuple[c_void_p, int]:
    """A stream on which the kernel has run, and memory."""
    stream = driver.stream()
    place = driver.memory()
    driver.launch(kernel, stream, place, 1)
    driver.sync(stream)
    return stream, place


def _warmed(lab: Lab, stages: Stages, mode: str) -> Seen:
    driver = _ready(stages)
    kernel = driver.kernel(driver.load(lab.image))
    stream, place = _warm(driver, kernel)
    graph = capture(driver, stream, mode, lambda: driver.launch(kernel, stream, place, _value()))
    return Seen({"": _replayed(driver, stream, graph, place)})


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


def _init_race(lab: Lab, stages: Stages, _mode: str) -> Seen:
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


def _errands(lab: Lab, stages: Stages, mode: str, *, errand: _Errand) -> Seen:
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


def _runtime(lab: Lab, stages: Stages, mode: str, *, warm: bool) -> Seen:
    runtime = Runtime(stages, lab.runtime)
    if warm:
        runtime.call("cudaFree", None)
        memset_in_order(runtime)
        runtime.sync(PER_THREAD_STREAM)
    graph = capture(runtime, PER_THREAD_STREAM, mode, lambda: memset_in_order(runtime))
    if runtime.nodes(graph) == 0:
        return Seen({"": EMPTY})
    runtime.replay(runtime.instantiate(graph), PER_THREAD_STREAM)
    runtime.sync(PER_THREAD_STREAM)
    return Seen({"": WORKS})


def _runtime_race(lab: Lab, stages: Stages, _mode: str, *, free: bool) -> Seen:
    runtime = Runtime(stages, lab.runtime)

    def raced(_: int, __: None) -> None:
        if free:
            runtime.call("cudaFree", None)
        place = runtime.made("cudaMalloc", 64)
        runtime.call("cudaMemset", place, 7, 64)
        runtime.call("cudaDeviceSynchronize")

    outcome, overlapped = together(stages, lab.threads, raced)
    return Seen({"": outcome}, overlapped)
