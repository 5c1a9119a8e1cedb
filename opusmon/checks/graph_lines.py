"""Follows the user's lines while they run, to name the one after which something was different."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CellType, FrameType, FunctionType
from typing import Any

from opusmon.checks.where import NOWHERE, Place, is_users, place

Spot = tuple[str, int]
"""File and line number."""

_users = cache(is_users)


@contextmanager
def following(done: Callable[[Spot, FrameType], None], *, threads: bool = False) -> Iterator[None]:
    """While it lasts, call `done(spot, frame)` each time a line of the user's code, `spot`, has run.

    A line that calls another function of the user's is done when that has begun, and again when it has ended: what a
    call changed is so blamed on the innermost line. `frame` is the one that has just begun a line, or ends.

    Args:
        done: what to call.
        threads: follow those that are started meanwhile too; `done` is then called from them.
    """
    before: dict[int, Spot | None] = {}

    def step(frame: FrameType, event: str, _: Any) -> Any:
        thread = threading.get_ident()
        if (spot := before.get(thread)) is not None:
            done(spot, frame)
        if event == "return":
            outer = frame.f_back
            own = outer is not None and _users(outer.f_code.co_filename)
            before[thread] = (outer.f_code.co_filename, outer.f_lineno) if outer is not None and own else None
        else:
            before[thread] = (frame.f_code.co_filename, frame.f_lineno)
        return step

    def called(frame: FrameType, event: str, arg: Any) -> Any:
        return step(frame, event, arg) if _users(frame.f_code.co_filename) else None

    earlier, earlier_of_threads = sys.gettrace(), threading.gettrace()
    if threads:
        threading.settrace(called)
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(earlier)
        if threads:
            threading.settrace(earlier_of_threads)


def _cells(fn: Any, seen: set[int]) -> Iterator[tuple[str, CellType]]:
    """Variables of the user's that a function, and those it encloses, hold from around them."""
    function = getattr(fn, "__func__", fn)
    if id(function) in seen or not isinstance(function, FunctionType):
        return
    seen.add(id(function))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if _users(function.__code__.co_filename):
            yield name, cell
        yield from _cells(_content(cell), seen)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


class StateWatch:
    """What of Python the user's code changes: numbers, tensors, sizes of containers, generators of random numbers.

    Looked at are attributes of `self`, globals, and variables of enclosing functions (`watch`).

    Attributes:
        changed: name as `self.step`, to the line that changed it first.
        drawn: of these, generators of random numbers.
    """

    def __init__(self) -> None:
        self.changed: dict[str, Place] = {}
        self.drawn: set[str] = set()
        self._known: dict[tuple[str, int, str], object] = {}
        self._held: dict[int, object] = {}
        self._cells: dict[int, tuple[str, CellType]] = {}

    def watch(self, fn: Any) -> None:
        """Look at the variables that a function holds from around it."""
        self._cells |= {id(cell): (name, cell) for name, cell in _cells(fn, set())}

    def done(self, spot: Spot, frame: FrameType) -> None:
        """A line has run; see what it changed."""
        for owner, values, name in _watched(frame):
            # Kept alive, so that its id stays its own.
            self._held.setdefault(id(values), values)
            self._look(owner, id(values), name, values.get(name), spot)
        for number, (name, cell) in self._cells.items():
            self._look("", number, name, _content(cell), spot)

    def _look(self, owner: str, number: int, name: str, content: object, spot: Spot) -> None:
        key = (owner, number, name)
        value = _mark(content)
        if self._known.get(key, value) != value:
            self.changed.setdefault(f"{owner}{name}", place(*spot) if spot[1] else NOWHERE)
            if _state_of(content) is not None:
                self.drawn.add(f"{owner}{name}")
        self._known[key] = value


def _watched(frame: FrameType) -> Iterator[tuple[str, dict[str, Any], str]]:
    code = frame.f_code
    if code.co_argcount and code.co_varnames[0] == "self":
        own = getattr(frame.f_locals.get("self"), "__dict__", None)
        if isinstance(own, dict):
            yield from (("self.", own, name) for name in own)
            buffers = own.get("_buffers")
            if isinstance(buffers, dict):
                yield from (("self.", buffers, name) for name in buffers)
    yield from (("", frame.f_globals, name) for name in code.co_names)


def _mark(value: Any) -> object:
    """What of a value tells that it was changed; None for what is not watched."""
    if isinstance(value, bool | int | float):
        # NaN is not equal to itself, and no change.
        return value if value == value else "nan"
    if isinstance(value, list | dict | set):
        return ("size", len(value))
    if type(value).__module__ == "torch" and hasattr(value, "untyped_storage"):
        return ("tensor", id(value))
    state = _state_of(value)
    return None if state is None else ("generator", state)


def _state_of(value: Any) -> str | None:
    """How far a generator of random numbers is, of Python or numpy; None for anything else."""
    if isinstance(value, random.Random):
        return str(hash(value.getstate()))
    if not type(value).__module__.startswith("numpy.random"):
        return None
    bits = getattr(value, "bit_generator", getattr(value, "_bit_generator", None))
    # An array in it is cut short there; the position in it is not.
    return None if bits is None else repr(bits.state)
