"""Which line of the user's own code something came from."""

from __future__ import annotations

import inspect
import linecache
import os
import sysconfig
import traceback
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple


class Place(NamedTuple):
    """A line of code.

    Attributes:
        where: `file.py:12`, relative to the working directory where it lies below it.
        line: the line, stripped.
    """

    where: str
    line: str


NOWHERE = Place("", "")

_OTHERS = tuple(
    {
        f"{Path(folder).resolve()}{os.sep}"
        for folder in (
            str(Path(__file__).parent),
            *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        )
    }
)
"""Folders of opusmon, the standard library and installed packages."""


def is_users(filename: str) -> bool:
    """Whether a file is the user's: no installed package, no standard library, nothing made up, not opusmon."""
    if filename.startswith("<") or not filename.endswith(".py"):
        return False
    path = os.path.realpath(filename)
    parts = Path(path).parts
    return not (path.startswith(_OTHERS) or "site-packages" in parts or "dist-packages" in parts)


def place(filename: str, lineno: int) -> Place:
    """A line as it is shown."""
    name = os.path.relpath(filename)
    shown = filename if name.startswith("..") else name
    return Place(f"{shown}:{lineno}", linecache.getline(filename, lineno).strip())


def innermost(frames: Iterable[traceback.FrameSummary]) -> Place:
    """The user's line that is nearest to what happened; frames run from the outermost on."""
    own = [frame for frame in frames if is_users(frame.filename)]
    return place(own[-1].filename, own[-1].lineno or 0) if own else NOWHERE


def of_error(error: BaseException) -> Place:
    """The user's line that raised, or that is no Python."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno and is_users(error.filename):
        return place(error.filename, error.lineno)
    return of_traceback(error.__traceback__)


def of_traceback(trace: TracebackType | None) -> Place:
    """The user's line of a traceback."""
    return innermost(traceback.extract_tb(trace))


def here() -> Place:
    """The user's line that is being executed."""
    return innermost(traceback.extract_stack())


def expression() -> str:
    """The user's expression that is being executed, over all of its lines; "" when there is none."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    # Two bytes an instruction.
    first, last, begin, end = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    if first is None:
        return ""
    name = frame.f_code.co_filename
    lines = [linecache.getline(name, number).encode() for number in range(first, (last or first) + 1)]
    # Columns count bytes. The end first: on a line of both it is counted from the line's begin.
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin or 0 :]
    return b"".join(lines).decode(errors="replace")
