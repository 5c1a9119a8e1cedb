"""BPF C sources are written in the words of portable.bpf.h; this turns them into bcc's dialect."""

from __future__ import annotations

import re
from pathlib import Path

from opusmon.collectors.ebpf.source_text import SOURCES, inlined, read_from

HEADER = "portable.bpf.h"

_METHODS = {
    "MAP_LOOKUP": "lookup",
    "MAP_UPDATE": "update",
    "MAP_INSERT": "insert",
    "MAP_DELETE": "delete",
    "RING_SUBMIT": "ringbuf_submit",
    "RING_DISCARD": "ringbuf_discard",
    "STACK_ID": "get_stackid",
}
_CALL = re.compile(rf"\b({'|'.join(_METHODS)})\((\w+), *")
_RESERVE = re.compile(r"\bRING_RESERVE\((\w+), *([^()]+)\)")


def for_bcc(text: str, folder: Path = SOURCES) -> str:
    """A source as bcc takes it: bcc compiles a text, not a file, and refuses map functions inside macros.

    Args:
        text: of a .bpf.c file.
        folder: where the headers that it includes lie; they are put in.
    """
    read = read_from(folder)

    def part(file: str) -> str:
        """portable.bpf.h stays as it is: it says the words, others use them."""
        return read(file) if file == HEADER else _in_words_of_bcc(read(file))

    return inlined(_in_words_of_bcc(text), part)


def _in_words_of_bcc(text: str) -> str:
    text = _RESERVE.sub(r"\1.ringbuf_reserve(sizeof(\2))", text)
    return _CALL.sub(lambda call: f"{call[2]}.{_METHODS[call[1]]}(", text)


def source(name: str, folder: Path = SOURCES) -> str:
    """Text of NAME.bpf.c of a folder, for bcc."""
    return for_bcc(read_from(folder)(f"{name}.bpf.c"), folder)
