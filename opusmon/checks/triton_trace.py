"""What happened while the cases ran once in a fresh process: compilations, module loads, autotuning, times."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from opusmon.checks.triton_why import Argument, Specialisation
from opusmon.checks.where import NOWHERE, Place

Maker = Literal["triton", "inductor"]


@dataclass(frozen=True, slots=True)
class At:
    """During which call something happened.

    Attributes:
        case: its place among the cases, -1 while the target made its inputs.
        call: 0 is the first call of the case.
        tune: place of the autotune run it was part of, -1 outside of one.
    """

    case: int
    call: int
    tune: int = -1

    @property
    def is_first(self) -> bool:
        """The first call of all, or before it: what no warm-up can spare."""
        return self.case < 0 or (self.case == 0 and self.call == 0)


@dataclass(frozen=True, slots=True)
class Compilation:
    """A kernel that was compiled, or taken from the cache directory.

    Attributes:
        kernel: name of the function.
        maker: `inductor` where torch.compile wrote the kernel.
        function: a number for each function object.
        defined: the line of its definition.
        launched: the user's line that needed it.
        what: for which it was compiled.
        ms: all of it.
        stages: ms by stage: `frontend`, `ttir`, `ttgir`, `llir`, `ptx`, `cubin` (ptxas), `store`; empty where unknown.
        cached: it was in the cache directory.
    """

    at: At
    kernel: str
    maker: Maker
    function: int
    defined: Place
    launched: Place
    what: Specialisation
    ms: float
    stages: dict[str, float]
    cached: bool


@dataclass(frozen=True, slots=True)
class Load:
    """A kernel's code was loaded into the GPU."""

    at: At
    kernel: str
    ms: float


@dataclass(frozen=True, slots=True)
class Launcher:
    """A C compiler built what calls a kernel, or talks to the driver."""

    at: At
    name: str
    ms: float


@dataclass(frozen=True, slots=True)
class Tune:
    """An autotune run.

    Attributes:
        key: the values for which the best configuration was looked for.
        configs: how many were tried.
        ms: from its begin to its end, with what it compiled and the launch that needed it.
        best: the configuration chosen.
        cached: read from the cache directory; nothing was tried.
    """

    at: At
    kernel: str
    maker: Maker
    defined: Place
    launched: Place
    key: str
    configs: int
    ms: float
    best: str
    cached: bool


@dataclass(frozen=True, slots=True)
class Times:
    """How long the calls of a case took: the first one, and the median of `calls` further ones."""

    label: str
    first_ms: float
    steady_ms: float
    calls: int


@dataclass(slots=True)
class Trace:
    """All of one process.

    Attributes:
        basis: GPU, driver and versions.
        tuning_cache: this Triton can keep the results of autotuning in its cache directory.
        missing: what could not be seen: what, why.
        facts: further sentences.
    """

    basis: str = ""
    tuning_cache: bool = False
    compilations: list[Compilation] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    launchers: list[Launcher] = field(default_factory=list)
    tunes: list[Tune] = field(default_factory=list)
    times: list[Times] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)


def write(trace: Trace, path: Path) -> None:
    """As JSON, readable by its owner alone."""
    with os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
    ) as file:
        json.dump(asdict(trace), file)


def read(path: Path) -> Trace:
    """What `write` wrote; an empty trace where it did not get that far."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Trace()
    return Trace(
        basis=document["basis"],
        tuning_cache=document["tuning_cache"],
        compilations=[
            Compilation(**_placed(one), what=_what(one["what"])) for one in document["compilations"]
        ],
        loads=[Load(**_placed(one)) for one in document["loads"]],
        launchers=[Launcher(**_placed(one)) for one in document["launchers"]],
        tunes=[Tune(**_placed(one)) for one in document["tunes"]],
        times=[Times(**one) for one in document["times"]],
        missing=[(what, why) for what, why in document["missing"]],
        facts=document["facts"],
    )


def _placed(one: dict[str, Any]) -> dict[str, Any]:
    found = {**one, "at": At(**one["at"])}
    found.pop("what", None)
    for name in ("defined", "launched"):
        if name in found:
            found[name] = Place(*found[name]) if found[name] else NOWHERE
    return found


def _what(one: dict[str, Any]) -> Specialisation:
    return Specialisation({name: Argument(**held) for name, held in one["arguments"].items()}, one["options"])
