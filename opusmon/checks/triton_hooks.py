"""What Triton and inductor do, seen from inside the process. The only place that touches their hooks and insides.

Triton 3.4 and later call a listener for each compilation; before, and for autotuning in all versions, the function
itself is wrapped. `jit_cache_hook` is not used: on Triton 3.6 setting it makes a kernel that takes a function as
constexpr fail (`Object of type JITFunction is not JSON serializable`).
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from opusmon.checks.triton_trace import At, Compilation, Launcher, Load, Maker, Trace, Tune
from opusmon.checks.triton_why import Specialisation, specialisation
from opusmon.checks.where import NOWHERE, Place, innermost, place

_CACHES = ("TRITON_CACHE_MANAGER", "TRITON_REMOTE_CACHE_BACKEND")
"""Environment variables that name a cache other than the directory; it would be the user's."""
_NOTABLE_S = 0.1
_INDUCTOR = "torch._inductor.runtime.triton_heuristics"


class Recorder:
    """Fills a trace from now on.

    Args:
        trace: what is filled.
        private: directory of the caches; a kernel that lies in it was written by inductor.

    Attributes:
        case: the place of the case that runs, -1 before the first.
        call: the number of its call.
        called: the line of the function that it calls, for what torch.compile does before that function runs.
    """

    def __init__(self, trace: Trace, private: Path) -> None:
        self.trace = trace
        self.case, self.call = -1, 0
        self.called = NOWHERE
        self._private = str(private.resolve())
        self._functions: dict[int, tuple[int, Any]] = {}
        self._load_began_s = 0.0
        self._has_inductor = False

    def install(self) -> None:
        """Set the hooks.

        Raises:
            ModuleNotFoundError: triton is not there.
        """
        import triton

        knobs = getattr(triton, "knobs", None)
        version = str(triton.__version__)
        if hasattr(getattr(knobs, "compilation", None), "listener"):
            assert knobs is not None  # noqa: S101  (it has the attribute)
            knobs.compilation.listener = _both(knobs.compilation.listener, self._compiled)
        else:
            self._wrap_compile(triton)
            self._lacks("stages of a compilation", f"triton {version} has no listener for compilations")
        runtime = getattr(knobs, "runtime", None)
        if hasattr(runtime, "kernel_load_start_hook") and hasattr(runtime, "kernel_load_end_hook"):
            _add(runtime, "kernel_load_start_hook", self._load_begins)
            _add(runtime, "kernel_load_end_hook", self._load_ends)
        else:
            self._wrap_load(triton)
        self._wrap_autotuner()
        self._wrap_build()
        self.trace.tuning_cache = hasattr(getattr(knobs, "autotuning", None), "cache")

    def inductor(self) -> None:
        """See what inductor tunes and loads, once the user's code has asked for torch.compile."""
        if self._has_inductor or "torch._dynamo" not in sys.modules:
            return
        self._has_inductor = True
        began_s = time.perf_counter()
        try:
            module = importlib.import_module(_INDUCTOR)
        except ImportError as error:
            self._lacks("autotuning by inductor", f"{_INDUCTOR} does not load: {error}")
            return
        import_s = time.perf_counter() - began_s
        if import_s > _NOTABLE_S:
            self.trace.facts.append(
                f"importing inductor took {import_s:.1f} s, once, before the first call and not counted there"
            )
        tuner = getattr(module, "CachingAutotuner", None)
        if not hasattr(tuner, "autotune_to_one_config"):
            self._lacks("autotuning by inductor", "this torch has no CachingAutotuner.autotune_to_one_config")
        else:
            self._wrap_inductor_tuner(tuner)
        self._wrap_static_launcher()

    # Compilations

    def _compiled(self, *, src: Any, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
        stages = {"frontend": times.ir_initialization / 1e3}
        stages.update({name: us / 1e3 for name, us in times.lowering_stages})
        stages["store"] = times.store_results / 1e3
        self._add_compilation(src, metadata, sum(stages.values()), {} if cache_hit else stages, cache_hit)

    def _wrap_compile(self, triton: Any) -> None:
        compiler = triton.compiler.compiler
        plain = compiler.compile

        @functools.wraps(plain)
        def compile_kernel(src: Any, *args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            with _lowered(src) as lowered:
                kernel = plain(src, *args, **kwargs)
            ms = (time.perf_counter() - began_s) * 1e3
            metadata = kernel.metadata._asdict() if hasattr(kernel.metadata, "_asdict") else {}
            self._add_compilation(src, metadata, ms, {}, not lowered)
            return kernel

        for module in (triton, triton.compiler, compiler):
            module.compile = compile_kernel

    def _add_compilation(
        self, src: Any, metadata: dict[str, Any], ms: float, stages: dict[str, float], cached: bool
    ) -> None:
        function = getattr(src, "fn", None)
        name, defined, maker = self._function(function, str(getattr(src, "name", "?")))
        self.trace.compilations.append(
            Compilation(
                at=At(self.case, self.call),
                kernel=name,
                maker=maker,
                function=self._number(function),
                defined=defined,
                launched=self._here(),
                what=_specialisation(src, function, metadata),
                ms=ms,
                stages=stages,
                cached=cached,
            )
        )

    def _number(self, function: Any) -> int:
        """The function is kept, so that its number stays its own."""
        return self._functions.setdefault(id(function), (len(self._functions), function))[0]

    def _function(self, function: Any, name: str) -> tuple[str, Place, Maker]:
        """Name, line of the definition, and who wrote it."""
        while function is not None and not hasattr(function, "__code__"):
            function = getattr(function, "fn", None)
        if function is None:
            return name, NOWHERE, "triton"
        file = str(function.__code__.co_filename)
        if self._is_private(file):
            return name, NOWHERE, "inductor"
        return str(function.__name__), place(file, _line(function)), "triton"

    def _is_private(self, file: str) -> bool:
        return os.path.realpath(file).startswith(self._private)

    def _here(self) -> Place:
        frames = (frame for frame in traceback.extract_stack() if not self._is_private(frame.filename))
        found = innermost(frames)
        return found if found.where else self.called

    # Loads, launchers

    def _load_begins(self, *_: Any, **__: Any) -> None:
        self._load_began_s = time.perf_counter()

    def _load_ends(self, _module: Any, _function: Any, name: str, *_: Any, **__: Any) -> None:
        self._add_load(name, (time.perf_counter() - self._load_began_s) * 1e3)

    def _add_load(self, name: str, ms: float) -> None:
        self.trace.loads.append(Load(At(self.case, self.call), name, ms))

    def _wrap_load(self, triton: Any) -> None:
        kernel = triton.compiler.CompiledKernel
        plain = kernel._init_handles  # noqa: SLF001  (no hooks there)

        @functools.wraps(plain)
        def init_handles(compiled: Any) -> Any:
            if compiled.module is not None:
                return plain(compiled)
            begin, began_s = len(self.trace.launchers), time.perf_counter()
            try:
                return plain(compiled)
            finally:
                built_ms = sum(one.ms for one in self.trace.launchers[begin:])
                self._add_load(str(compiled.name), (time.perf_counter() - began_s) * 1e3 - built_ms)

        kernel._init_handles = init_handles  # noqa: SLF001

    def _wrap_static_launcher(self) -> None:
        """Inductor loads some kernels by itself; without that class it leaves all of them to Triton."""
        for name in ("static_triton_launcher", "static_cuda_launcher"):
            module = sys.modules.get(f"torch._inductor.runtime.{name}")
            for kind in ("StaticallyLaunchedTritonKernel", "StaticallyLaunchedCudaKernel"):
                launcher = getattr(module, kind, None)
                if launcher is not None and "load_kernel" in vars(launcher):
                    self._wrap_static_load(launcher)

    def _wrap_static_load(self, launcher: Any) -> None:
        plain = launcher.load_kernel

        @functools.wraps(plain)
        def load_kernel(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            before, began_s = getattr(kernel, "function", None), time.perf_counter()
            result = plain(kernel, *args, **kwargs)
            if before is None:
                self._add_load(str(getattr(kernel, "name", "?")), (time.perf_counter() - began_s) * 1e3)
            return result

        launcher.load_kernel = load_kernel

    def _wrap_build(self) -> None:
        build = importlib.import_module("triton.runtime.build")
        plain = getattr(build, "_build", None)
        if plain is None:
            self._lacks(
                "building of launchers by the C compiler", "this triton has no triton.runtime.build._build"
            )
            return

        @functools.wraps(plain)
        def build_so(name: str, *args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            result = plain(name, *args, **kwargs)
            ms = (time.perf_counter() - began_s) * 1e3
            self.trace.launchers.append(Launcher(At(self.case, self.call), str(name), ms))
            return result

        for name, module in list(sys.modules.items()):
            if name.startswith("triton.") and getattr(module, "_build", None) is plain:
                setattr(module, "_build", build_so)  # noqa: B010  (a name that no module declares)

    # Autotuning

    def _wrap_autotuner(self) -> None:
        tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
        plain = tuner.run

        @functools.wraps(plain)
        def run(autotuner: Any, *args: Any, **kwargs: Any) -> Any:
            known = len(autotuner.cache)
            bench_s = autotuner.__dict__.pop("bench_time", None)
            began_s, marks = time.perf_counter(), self._marks()
            try:
                return plain(autotuner, *args, **kwargs)
            finally:
                ms = (time.perf_counter() - began_s) * 1e3
                has_run = "bench_time" in autotuner.__dict__
                if bench_s is not None and not has_run:
                    autotuner.bench_time = bench_s
                # With one configuration left after pruning nothing is looked for.
                cached = getattr(autotuner, "cache_results", False)
                if len(autotuner.cache) > known and (has_run or cached):
                    self._add_tune(autotuner, ms, marks, cached=not has_run)

        tuner.run = run

    def _add_tune(self, autotuner: Any, ms: float, marks: tuple[int, int, int], *, cached: bool) -> None:
        key, best = next(reversed(autotuner.cache.items()))
        name, defined, _ = self._function(getattr(autotuner, "base_fn", None), "?")
        tried = getattr(autotuner, "configs_timings", None)
        self._tuned(
            Tune(
                at=At(self.case, self.call),
                kernel=name,
                maker="triton",
                defined=defined,
                launched=self._here(),
                key=str(key),
                configs=len(tried) if tried else len(autotuner.configs),
                ms=ms,
                best=_config(best),
                cached=cached,
            ),
            marks,
        )

    def _wrap_inductor_tuner(self, tuner: Any) -> None:
        plain = tuner.autotune_to_one_config

        @functools.wraps(plain)
        def autotune(autotuner: Any, *args: Any, **kwargs: Any) -> Any:
            configs = len(autotuner.launchers)
            began_s, marks = time.perf_counter(), self._marks()
            result = plain(autotuner, *args, **kwargs)
            ms = (time.perf_counter() - began_s) * 1e3
            name, defined, _ = self._function(autotuner.fn, "?")
            name = str(autotuner.fn.__name__) if defined == NOWHERE else name
            best = _config(getattr(autotuner.launchers[0], "config", ""))
            at, here = At(self.case, self.call), self._here()
            self._tuned(Tune(at, name, "inductor", defined, here, "", configs, ms, best, cached=False), marks)
            return result

        tuner.autotune_to_one_config = autotune

    def _marks(self) -> tuple[int, int, int]:
        trace = self.trace
        return len(trace.compilations), len(trace.loads), len(trace.launchers)

    def _tuned(self, tune: Tune, marks: tuple[int, int, int]) -> None:
        """Add it; what was compiled and loaded since belongs to it."""
        trace, number = self.trace, len(self.trace.tunes)
        trace.tunes.append(tune)
        for events, begin in zip((trace.compilations, trace.loads, trace.launchers), marks, strict=True):
            held: list[Any] = events  # type: ignore[assignment]
            for place_of in range(begin, len(held)):
                held[place_of] = replace(held[place_of], at=replace(held[place_of].at, tune=number))
                if isinstance(held[place_of], Compilation):
                    # Between the user's line and this one may be the user's own benchmark.
                    held[place_of] = replace(held[place_of], launched=tune.launched)

    def _lacks(self, what: str, why: str) -> None:
        self.trace.missing.append((what, why))


# Parts of Triton


def _both(first: Callable[..., None] | None, second: Callable[..., None]) -> Callable[..., None]:
    if first is None:
        return second

    def call(*args: Any, **kwargs: Any) -> None:
        first(*args, **kwargs)
        second(*args, **kwargs)

    return call


def _add(runtime: Any, name: str, hook: Callable[..., None]) -> None:
    """A chain of hooks since 3.5."""
    held = getattr(runtime, name)
    if hasattr(held, "add"):
        held.add(hook)
    else:
        setattr(runtime, name, _both(held, hook))


@contextmanager
def _lowered(src: Any) -> Iterator[list[None]]:
    """One entry once a source is turned into IR: what the cache directory holds is not. A file of IR always counts."""
    found: list[None] = []
    plain = getattr(src, "make_ir", None)
    if plain is None:
        yield [None]
        return

    def make_ir(*args: Any, **kwargs: Any) -> Any:
        found.append(None)
        return plain(*args, **kwargs)

    src.make_ir = make_ir
    try:
        yield found
    finally:
        del src.make_ir


def _specialisation(src: Any, function: Any, metadata: dict[str, Any]) -> Specialisation:
    parameters = getattr(function, "params", None)
    if not parameters:
        return Specialisation()
    return specialisation(
        [parameter.name for parameter in parameters],
        [number for number, parameter in enumerate(parameters) if parameter.is_constexpr],
        src.signature,
        src.constants or {},
        src.attrs,
        metadata,
    )


def _line(function: Any) -> int:
    """Of `def`; the code begins at the first decorator."""
    import inspect

    first: int = function.__code__.co_firstlineno
    try:
        lines = inspect.getsourcelines(function)[0]
    except OSError:
        return first
    return first + next((n for n, line in enumerate(lines) if line.lstrip().startswith("def ")), 0)


def _config(config: Any) -> str:
    """As `BLOCK: 64, num_warps: 4, num_stages: 3`: what is not set is left out."""
    return ", ".join(part for part in str(config).split(", ") if not part.endswith(": None"))


def target() -> str:
    """What Triton compiles for, as `cuda 90`.

    Raises:
        RuntimeError: no driver: Triton sees no GPU.
    """
    import triton

    found = triton.runtime.driver.active.get_current_target()
    return f"{found.backend} {found.arch}"


def version() -> str:
    """Of triton."""
    import triton

    return str(triton.__version__)


def is_interpreted() -> bool:
    """Kernels run as Python, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def foreign_caches() -> list[str]:
    """Take from the environment what names another cache than the directory; what was taken."""
    return [name for name in _CACHES if os.environ.pop(name, None)]


def hold_caches(environment: Mapping[str, str]) -> bool:
    """Point the caches at directories, whatever the user's code has set: nothing is written to the user's own.

    Args:
        environment: `TRITON_CACHE_DIR` and the other variables of a pass.

    Returns:
        Whether a variable or Triton's knob said something else.
    """
    import triton

    elsewhere = any(os.environ.get(name) != value for name, value in environment.items())
    os.environ.update(environment)
    cache = getattr(getattr(triton, "knobs", None), "cache", None)
    directory = environment["TRITON_CACHE_DIR"]
    if cache is not None and str(cache.dir) != directory:
        cache.dir, elsewhere = directory, True
    return elsewhere
