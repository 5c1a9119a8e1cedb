"""Texts of the BPF C sources as one: a program's parts lie in headers beside it.

Compilers get the whole on their standard input: bcc takes no files, and no path of a machine gets into an object.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

SOURCES = Path(__file__).parent
"""Where the sources and their headers lie."""

_INCLUDE = re.compile(r'^#include "(\w[\w.]*)"\n', re.MULTILINE)


def read_from(folder: Path) -> Callable[[str], str]:
    """A reader of that folder's files by name. It raises OSError or, where one is no UTF-8, ValueError."""
    return lambda file: (folder / file).read_text(encoding="utf-8")


def inlined(text: str, read: Callable[[str], str]) -> str:
    """A text with every header that it includes by `"name"` put in, where it is included first.

    Args:
        text: of a source.
        read: the text of a header by its name.
    """
    had: set[str] = set()

    def put(include: re.Match[str]) -> str:
        if include[1] in had:
            return ""
        had.add(include[1])
        return _INCLUDE.sub(put, read(include[1]).replace("#pragma once\n", ""))

    return _INCLUDE.sub(put, text)


def whole(name: str, folder: Path = SOURCES) -> str:
    """NAME.bpf.c of a folder with all its parts.

    Raises:
        OSError: the source or one of its headers cannot be read.
        ValueError: one of them is no UTF-8.
    """
    read = read_from(folder)
    return inlined(read(f"{name}.bpf.c"), read)
