"""BPF C sources are written in the words of portable.bpf.h; this turns them into bcc's dialect."""

from __future__ import annotations

import re
from pathlib import Path

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


def for_bcc(text: str, header: str) -> str:
    """A source as bcc takes it: bcc compiles a text, not a file, and refuses map functions inside macros.

    Args:
        text: of a .bpf.c file.
        header: text of portable.bpf.h, put in where it is included.
    """
    text = _RESERVE.sub(r"\1.ringbuf_reserve(sizeof(\2))", text)
    text = _CALL.sub(lambda call: f"{call[2]}.{_METHODS[call[1]]}(", text)
    return text.replace(f'#include "{HEADER}"\n', header.replace("#pragma once\n", ""))


def source(name: str, folder: Path = Path(__file__).parent) -> str:
    """Text of a .bpf.c file of this folder, for bcc."""
    header = (folder / HEADER).read_text(encoding="utf-8")
    return for_bcc((folder / name).read_text(encoding="utf-8"), header)
