"""What keeps code out of a CUDA Graph, by kind: the sentence, what to change, and the kind that an error means."""

from __future__ import annotations

import re
from typing import NamedTuple

from opusmon.checks.result import Level, Problem, Value
from opusmon.checks.where import Place
from opusmon.cuda_codes import CAPTURE_CODES


class Words(NamedTuple):
    """Of one kind.

    Attributes:
        what: one sentence, with `{op}` for the operation.
        change: what to do about it.
    """

    what: str
    change: str


WORDS: dict[str, Words] = {
    "item": Words(
        "{op} reads a value of the GPU on the host, which has to wait for the stream",
        "keep the value on the GPU (arithmetic, torch.where, index_select), or read it after the replay",
    ),
    "branch": Words(
        "Python branches on a value of the GPU ({op}): the host has to wait for it, and a graph holds one way only",
        "compute both ways and choose with torch.where, or decide outside the graph",
    ),
    "host_copy": Words(
        "{op} copies from the GPU to the host and waits for it",
        "copy after the replay, or into pinned memory that stays, with non_blocking=True",
    ),
    "pageable_copy": Words(
        "{op} copies from the host's pageable memory to the GPU, which waits for the stream",
        "copy before the capture into a tensor that stays, and fill that before each replay",
    ),
    "host_tensor": Words(
        "{op} makes a tensor of Python values on the host and copies it to the GPU",
        "make it once outside, or on the GPU itself (torch.full, torch.arange, torch.zeros)",
    ),
    "frozen_tensor": Words(
        "{op} makes a tensor of Python values on the host: what it holds at capture is what every replay uses",
        "pass what changes from call to call as a tensor on the GPU",
    ),
    "cpu_input": Words(
        "{op} uses a tensor that lies in the host's memory: its value is read at capture, and replays do not see another",
        "pass it as a tensor on the GPU",
    ),
    "dynamic_shape": Words(
        "{op} makes a tensor whose size depends on values: the host has to wait for them",
        "keep a fixed size: torch.where or a mask instead of selecting, topk, nonzero_static, output_size=",
    ),
    "synchronize": Words(
        "{op} waits for the GPU on the host",
        "take it out: a graph keeps its own order; wait after the replay",
    ),
    "event_query": Words(
        "{op} asks how far the GPU is, which a capture cannot answer",
        "ask outside the graph",
    ),
    "allocation": Words(
        "memory of the GPU is allocated past torch's caching allocator ({op})",
        "allocate before the capture, or with torch.empty, which takes it from the graph's own pool",
    ),
    "legacy_stream": Words(
        "{op} runs on the default stream, not on the one that is captured: the graph does not hold it",
        "stay on the current stream, torch.cuda.current_stream()",
    ),
    "uncaptured_stream": Words(
        "{op} runs on a stream that does not wait for the captured one: the graph does not hold it",
        "let it wait first, side.wait_stream(torch.cuda.current_stream()), and join it again at the end",
    ),
    "unjoined_stream": Words(
        "work on a side stream is not joined to the captured stream again (last: {op})",
        "before the end: torch.cuda.current_stream().wait_stream(side)",
    ),
    "captured_event": Words(
        "{op} uses an event that belongs to the capture from outside of it",
        "wait for it on a stream of the capture, or record another one outside",
    ),
    "lazy_load": Words(
        "the first use inside a capture fails ({op}): what is loaded or set up at first use must be there before",
        "call it three times or more on a side stream before the capture",
    ),
    "generator": Words(
        "{op} draws from a torch.Generator of its own, which the graph does not know",
        "graph.register_generator_state(generator) before the capture, or use the default generator",
    ),
    "host_random": Words(
        "{op} draws a number on the host: the one drawn at capture is used in every replay",
        "draw on the GPU (torch.rand), or pass the number as a tensor",
    ),
    "python_state": Words(
        "{op} changes on each call; a replay runs no Python",
        "keep it as a tensor on the GPU and change it in place, or pass it as an input",
    ),
    "hidden_state": Words(
        "each call gives another result, and no line was seen to change what it depends on: state in tensors is "
        "replayed, state in Python is not",
        "keep what changes from call to call in tensors that are changed in place",
    ),
    "optimizer": Words(
        "the optimizer keeps its step count on the host, and torch refuses to capture its step",
        "make the optimizer with capturable=True",
    ),
    "graph_break": Words(
        "torch.compile breaks its graph here; a capture by hand is not hurt by that as such",
        "",
    ),
    "merged_captures": Words(
        "{op} would make two captures one",
        "capture one after the other",
    ),
    "empty_graph": Words(
        "the capture holds nothing: {op}",
        "do the work on the current stream, torch.cuda.current_stream()",
    ),
    "stale_result": Words(
        "a replay gives another result than the function itself ({op})",
        "what changes from call to call has to be on the GPU and in the tensors that were captured",
    ),
    "other_thread": Words(
        "another thread does what a capture in global mode, torch's default, forbids to all threads ({op})",
        'capture with capture_error_mode="thread_local", which minds its own thread only, or let other threads neither '
        "allocate nor wait meanwhile",
    ),
    "capture_failed": Words(
        "the capture fails here ({op})",
        "take it out of the captured part",
    ),
}

WAYS: dict[str, Words] = {
    # Of host_copy: torch pins the memory that a copy to the host makes when it is not to wait (ATen's _to_copy).
    "new_pinned": Words(
        "{op} makes a new pinned buffer on the host in each call: a replay writes to that of the capture, and nothing "
        "says when it is filled",
        "copy into a pinned tensor made once before, pinned.copy_(x, non_blocking=True), and synchronize after the "
        "replay",
    ),
}
"""Where the same kind comes about in another way, which asks for other words."""

BREAKING = frozenset(
    {
        "item",
        "branch",
        "host_copy",
        "pageable_copy",
        "host_tensor",
        "dynamic_shape",
        "synchronize",
        "event_query",
        "allocation",
        "generator",
        "optimizer",
    }
)
"""Kinds that a capture itself refuses; the others go through it and make replays wrong."""

_TEXTS = {
    "operation not permitted when stream is capturing": 900,
    "operation failed due to a previous error during capture": 901,
    "operation would result in a merge of separate capture sequences": 902,
    "capture was not initiated in this stream": 903,
    "capturing stream has unjoined work": 904,
    "dependency created on uncaptured work in another stream": 905,
    "operation would make the legacy stream depend on a capturing": 906,
    "operation not permitted on an event last recorded in a capturing stream": 907,
    "attempt to terminate a thread-local capture sequence from another thread": 908,
}
"""What `cudaGetErrorString` says of the results 900 to 908."""

_OF_CODE = {902: "merged_captures", 904: "unjoined_stream", 905: "uncaptured_stream"}
"""Results that mean one thing only, whatever the line does."""

_ELSE_OF_CODE = {906: "legacy_stream", 907: "captured_event"}
"""Results that an operation on that line explains better."""

_OF_LINE = (
    (re.compile(r"(?i)malloc|memalloc|mem_alloc|_alloc\b|hostalloc|pin_memory"), "allocation"),
    (re.compile(r"(?i)synchroni[sz]e"), "synchronize"),
    (re.compile(r"(?i)query"), "event_query"),
    (re.compile(r"\.item\("), "item"),
    (re.compile(r"\.(cpu|numpy|tolist)\("), "host_copy"),
    (re.compile(r"(?i)memcpy.*(dtoh|devicetohost)"), "host_copy"),
    (re.compile(r"(?i)memcpy.*(htod|hosttodevice)"), "pageable_copy"),
)
"""Calls past torch, and those inside operators of the user's own, are known by their names on the line."""


def problem(
    kind: str,
    op: str,
    place: Place,
    *,
    code: str = "",
    level: Level = "problem",
    lead: str = "",
    way: str = "",
    facts: dict[str, Value] | None = None,
) -> Problem:
    """A problem in the words of its kind, or of its way in WAYS; `lead` comes before the sentence."""
    words = WAYS[way] if way else WORDS[kind]
    what = words.what.format(op=op or "an operation")
    return Problem(kind, lead + what, place.where, place.line, code, words.change, level, facts or {})


def code_of(message: str) -> int | None:
    """The CUDA result that an error's text tells of, None when it is none of a capture."""
    return next((code for text, code in _TEXTS.items() if text in message), None)


def said(message: str) -> str:
    """What CUDA or torch said, as `900 not permitted while a stream is capturing`; else the first line."""
    if code := code_of(message):
        return f"{code} {CAPTURE_CODES[code]}"
    lines = message.strip().splitlines()
    return lines[0] if lines else ""


def kind_of(code: int | None, line: str, seen: str | None) -> str:
    """The kind of a failed capture.

    Args:
        code: CUDA's result, None when torch refused by itself.
        line: the user's line.
        seen: kind that the operation on that line was seen to be.
    """
    if code in _OF_CODE:
        return _OF_CODE[code]
    if seen:
        return seen
    if code in _ELSE_OF_CODE:
        return _ELSE_OF_CODE[code]
    return next((kind for words, kind in _OF_LINE if words.search(line)), "capture_failed")
