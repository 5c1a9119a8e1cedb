"""What torch says while it compiles, as data: graph breaks, recompiles, the recompile limit, skipped CUDA Graphs.

The words are those of the logs `graph_breaks`, `recompiles`, `perf_hints` and `cudagraphs` of torch 2.6 to 2.13; what
they do not say stays empty.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from traceback import FrameSummary

from opusmon.checks.where import NOWHERE, Place, innermost

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_BREAK = re.compile(r"Graph break in user code at (.+):(\d+)\n(?:Graph Break Reason|Reason): ")
_NATIVE = re.compile(r"trace the builtin `([\w.]+?)\.?`")
_FOREIGN_CALL = re.compile(r"CFuncPtr|_FuncPtr")
_RECOMPILE = re.compile(r"Recompiling function (\S+) in (.+):(\d+)\n")
_GUARD = re.compile(r"^\s*- \d+/[\d_]+: ", re.MULTILINE)
_LIMIT = re.compile(r"hit config\.(\w+) \((\d+)\)\s+function: '(\S+)' \((.+):(\d+)\)")
_SKIP = re.compile(r"(skipping cudagraphs?|cudagraph partition) due to (.+?)(?:\. Found from\s*:|\n|$)")
_OUTSIDE = re.compile(r"^\s+\S+: reason=(.+?), ir=")
_TEXT = re.compile(r"((?:==|!=|\bis\b|\bin\b) )(['\"])(.*?)\2")


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """The end of a graph.

    Attributes:
        said: what torch calls it, with its explanation, on one line.
        hints: what torch proposes.
        place: the user's line.
        skipped: the whole function runs in eager, because it cannot be resumed there.
        native: name of a function in C that torch does not know, "" when that is not the cause.
    """

    said: str
    hints: tuple[str, ...]
    place: Place
    skipped: bool
    native: str


@dataclass(frozen=True, slots=True)
class Recompile:
    """A guard that did not hold.

    Attributes:
        function: name of what was compiled anew.
        guard: the guard against the newest graph, in torch's words; texts it compares with are left out.
        place: the user's line that needs the guard; the function's first where torch does not say.
    """

    function: str
    guard: str
    place: Place


@dataclass(frozen=True, slots=True)
class Limit:
    """A function that torch no longer compiles: new inputs run in eager."""

    function: str
    name: str
    value: int
    place: Place


@dataclass(frozen=True, slots=True)
class Skip:
    """Work outside of CUDA Graphs.

    Attributes:
        reason: torch's, as `mutated inputs (1 instances)`.
        place: the user's line.
        part: the rest of the function is in graphs.
    """

    reason: str
    place: Place
    part: bool


def graph_breaks(messages: Iterable[str]) -> list[GraphBreak]:
    """Those in messages of the log."""
    found = []
    for message in messages:
        head = _BREAK.search(message)
        if head is None:
            continue
        reason, _, trace = message[head.end() :].partition("User code traceback:")
        said = torch_says(reason)
        native = _NATIVE.search(said)
        name = native.group(1) if native else ""
        if name.split(".")[0] in {*sys.stdlib_module_names, "builtins", "torch"}:
            name = ""
        if _FOREIGN_CALL.search(reason):
            name = "ctypes"
        found.append(
            GraphBreak(
                said=said,
                hints=tuple(re.findall(r"^\s*Hint: (.+)$", reason, re.MULTILINE)),
                place=_place(trace) or _place(f'File "{head.group(1)}", line {head.group(2)}') or NOWHERE,
                skipped="Skipping the function" in reason or "frame skipped" in reason,
                native=name,
            )
        )
    return found


def torch_says(text: str) -> str:
    """The name and the explanation of something that torch does not support, on one line."""
    lines = [line.strip() for line in text.strip().splitlines()]
    for number, line in enumerate(lines):
        if line.startswith("Explanation: ") and number:
            return f"{lines[number - 1].rstrip('.')}: {line.removeprefix('Explanation: ')}"
    return lines[0] if lines else ""


def error_place(text: str) -> Place:
    """The user's line in the message of an exception of the compiler."""
    return _place(text.partition("from user code:")[2]) or NOWHERE


def recompiles(messages: Iterable[str]) -> list[Recompile]:
    """Those in messages of the log."""
    found = []
    for message in messages:
        head = _RECOMPILE.search(message)
        if head is None:
            continue
        function, file, line = head.groups()
        # The newest graph's comes first; what older ones ask for says nothing new.
        newest = [*_GUARD.split(message[head.end() :]), ""][1]
        guard = newest.strip().split("\n")[0].split("  #")[0].strip()
        found.append(
            Recompile(
                function,
                without_texts(guard) or "torch does not say which",
                _place(newest)
                or _of_comment(newest, file)
                or _place(f'File "{file}", line {line}')
                or NOWHERE,
            )
        )
    return found


def limits(messages: Iterable[str]) -> list[Limit]:
    """Functions that reached the recompile limit."""
    found = [_LIMIT.search(message) for message in messages]
    return [
        Limit(
            match.group(3),
            match.group(1),
            int(match.group(2)),
            _place(f'File "{match.group(4)}", line {match.group(5)}') or NOWHERE,
        )
        for match in found
        if match
    ]


def of_torch(one: Recompile | Limit) -> bool:
    """Whether it is torch's own function around a module without code of the user."""
    # In torch._dynamo.external_utils.
    return one.function == "inner" and one.place == NOWHERE


def cudagraph_skips(messages: Sequence[str]) -> list[Skip]:
    """Reasons not to use CUDA Graphs, each once."""
    found: dict[tuple[str, Place], Skip] = {}
    for number, message in enumerate(messages):
        part = False
        if match := _SKIP.search(message):
            part = match.group(1) == "cudagraph partition"
            reason, trace = match.group(2), message[match.end() :]
        elif match := _OUTSIDE.match(message):
            part, reason, trace = True, match.group(1), _indented(messages[number + 1 :])
        else:
            continue
        place = _place(trace) or NOWHERE
        found.setdefault((reason, place), Skip(reason.strip(), place, part))
    return list(found.values())


def without_texts(guard: str) -> str:
    """A guard whose compared texts are replaced by their lengths: they may be a user's."""
    return _TEXT.sub(lambda match: f"{match.group(1)}<text of {len(match.group(3))}>", guard)


def _indented(messages: Iterable[str]) -> str:
    """The stack that the log gives line by line after a reason."""
    lines = []
    for message in messages:
        if not message.startswith(" " * 9):
            break
        lines.append(message)
    return "\n".join(lines)


def _of_comment(guard: str, file: str) -> Place | None:
    """The line that a guard's comment names; it gives only the end of the path."""
    match = re.search(r"# (\S+):(\d+) in ", guard)
    if match is None or not file.endswith(match.group(1).lstrip(".")):
        return None
    return _place(f'File "{file}", line {match.group(2)}')


def _place(text: str) -> Place | None:
    """The user's innermost line in a printed traceback."""
    frames = [FrameSummary(file, int(line), "") for file, line in _FRAME.findall(text)]
    found = innermost(frames)
    return found if found.where else None
