"""TARGET of the command line: `module:callable` or `file.py:callable`, called for what is to be checked."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any


class TargetError(Exception):
    """TARGET cannot be loaded, or gives something else than it should; one line for the user."""


@dataclass(frozen=True, slots=True)
class Case:
    """One call that is checked.

    Attributes:
        label: of its shape bucket, as `batch=8` or `inputs 2`; "" when there is one.
        fn: a function or module.
        args: positional inputs.
        kwargs: inputs by name.
    """

    label: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The label; `inputs` when there is one call only."""
        return self.label or "inputs"

    def call(self) -> Any:
        """Call it once."""
        return self.fn(*self.args, **self.kwargs)


def load(target: str) -> Callable[..., Any]:
    """The callable that TARGET names. Runs the user's module.

    Raises:
        TargetError: it is not written as it should be, or names nothing that can be called.
        Exception: whatever the user's module raises.
    """
    place, colon, name = target.rpartition(":")
    if not (colon and place and name):
        raise TargetError(f"{target!r} is no target: write module:callable or file.py:callable")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_path(place)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise TargetError(f"{place} has no callable named {name}")
    made: Callable[..., Any] = found
    return made


def cases(make: Callable[..., Any], buckets: Mapping[str, Sequence[Any]]) -> list[Case]:
    """The calls to check.

    `make` gives `(fn, inputs)`. Inputs are a tuple of arguments, a dict of named ones, or a list of these, one for
    each shape bucket; anything else is the single argument. With `buckets`, `make` is called once for every
    combination of their values, with the values as keyword arguments.

    Raises:
        TargetError: `make` takes other arguments, gives something else, or no inputs.
        Exception: whatever `make` raises.
    """
    found: list[Case] = []
    for values in product(*buckets.values()):
        named = dict(zip(buckets, values, strict=True))
        _need_taken(make, named)
        label = " ".join(f"{name}={value}" for name, value in named.items())
        found += _cases_of(make(**named), label)
    return found


def _need_taken(make: Callable[..., Any], named: Mapping[str, Any]) -> None:
    try:
        inspect.signature(make).bind(**named)
    except TypeError as error:
        if named:
            raise TargetError(f"the target is called with those of --bucket: {error}") from error
        why = f"the target is called without arguments: {error} (--bucket NAME=V,V gives some)"
        raise TargetError(why) from error
    except ValueError:
        # What is written in C may have no signature.
        return


def _cases_of(made: Any, label: str) -> list[Case]:
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        kinds = ", ".join(type(one).__name__ for one in made) if isinstance(made, tuple) else ""
        got = f"({kinds})" if isinstance(made, tuple) else type(made).__name__
        raise TargetError(f"the target must return (fn, inputs) or (module, inputs), not {got}"[:300])
    fn, inputs = made
    several = inputs if isinstance(inputs, list) else [inputs]
    if not several:
        raise TargetError("the target returned an empty list of inputs")
    found = []
    for place, one in enumerate(several, 1):
        own = f"inputs {place}" if len(several) > 1 else ""
        args = one if isinstance(one, tuple) else () if isinstance(one, dict) else (one,)
        kwargs = one if isinstance(one, dict) else {}
        found.append(Case(" ".join(filter(None, (label, own))), fn, args, kwargs))
    return found


def parse_buckets(texts: Sequence[str]) -> dict[str, list[Any]]:
    """`["batch=1,8"]` as `{"batch": [1, 8]}`; what is no integer or number stays a text. Of one name all values count.

    Raises:
        TargetError: an entry is not written as `name=value,value`.
    """
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not (equals and name.isidentifier() and values):
            raise TargetError(f"{text!r} is no bucket: write name=value,value")
        found.setdefault(name, []).extend(_value(value) for value in values.split(","))
    return found


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise TargetError(f"there is no file {path}")
    # A file that is named like a module of Python's own must not take that one's place.
    name = f"{path.stem}_target" if path.stem in sys.stdlib_module_names else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is no Python file")
    if (path.parent / "__init__.py").is_file():
        return _from_package(path.resolve())
    module = importlib.util.module_from_spec(spec)
    # Before it runs, as an import would: dataclasses and dynamo look modules up by name.
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _from_package(path: Path) -> Any:
    """A file of a package by its name there, so that its relative imports work."""
    names, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    sys.path.insert(0, str(folder))
    return importlib.import_module(".".join(names))


def _from_path(name: str) -> Any:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # One that the user's module lacks is the user's to see.
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise TargetError(f"there is no module named {name}") from error
        raise
