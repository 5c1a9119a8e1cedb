"""Small kernel files: reading them cheaply, and numbers out of them whatever they hold."""

from __future__ import annotations

import errno
import os
import re

from opusmon.collectors.missing import Missing
from opusmon.text import printable

_BLOCK_B = 64 * 1024
_MAX_B = 4 * 1024 * 1024

_NO_PERMISSION = frozenset({errno.EACCES, errno.EPERM})
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR})
_GONE = frozenset({errno.ESRCH, errno.ENODEV})

MALFORMED = Missing("error", "the kernel's file does not hold the number expected")
GONE = Missing("unavailable", "it has ended")


def read(path: str) -> bytes | Missing:
    """Content of a file, at most 4 MiB; or why it cannot be had.

    Plain descriptors: 6 us a file where `Path.read_bytes` takes 20, and there are a hundred of them a tick.
    """
    return _read(path, _BLOCK_B, _MAX_B)


def read_short(path: str, most_b: int = _BLOCK_B) -> bytes | Missing:
    """As `read`, for a file that the kernel hands out in one piece: those of one process or of one control group.

    Longer ones (/proc/vmstat, mountinfo) come in pieces of a page or less, of which this would be the first.
    """
    return _read(path, most_b, 1)


def _read(path: str, block_b: int, enough_b: int) -> bytes | Missing:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return why(error, path)
    try:
        text = part = os.read(descriptor, block_b)
        while part and len(text) < enough_b:
            part = os.read(descriptor, block_b)
            text += part
    except OSError as error:
        return why(error, path)
    finally:
        os.close(descriptor)
    return text


def why(error: OSError, path: str) -> Missing:
    """What a failed read of a kernel file means."""
    name = path.rsplit("/", 1)[-1]
    if error.errno in _NO_PERMISSION:
        remedy = "give opusmon CAP_SYS_PTRACE" if os.geteuid() == 0 else "run opusmon as root"
        return Missing("no_permission", f"the kernel does not let this user read {name}", remedy)
    if error.errno in _NOT_THERE:
        return Missing("not_supported", f"the kernel has no {name} here", code=errno.ENOENT)
    if error.errno in _GONE:
        return GONE
    if error.errno == errno.EOPNOTSUPP:
        return Missing("not_supported", f"{name} is switched off in this kernel", code=errno.EOPNOTSUPP)
    return Missing("error", f"{name}: {error.strerror}")


def exists(path: str) -> bool:
    """Whether a path can be seen."""
    return os.access(path, os.F_OK)


Words = tuple[tuple[str, re.Pattern[bytes]], ...]


def names(*words: str) -> Words:
    """What `pick` looks for: the lines that begin with these words.

    A pattern for each, because one that begins with fixed text is found twice as fast as alternatives are.
    """
    return tuple(
        (word, re.compile(rb"\n%s:?[ \t]+(\d{1,20})\s" % re.escape(word.encode()))) for word in words
    )


def pick(words: Words, text: bytes) -> dict[str, int]:
    """Numbers of "name 12" and "name: 12 kB" lines by name; what is not there, or is no number, is left out.

    The last number of a text that was cut is not believed: a space or line end must follow it.
    """
    text = b"\n" + text
    return {name: int(match[1]) for name, pattern in words if (match := pattern.search(text))}


def number(text: bytes) -> int | None:
    """The one unsigned number that a file holds; None for anything else."""
    word = text.strip()
    return int(word) if word.isdigit() and len(word) <= 20 else None


def plain(raw: bytes) -> str:
    """Text from the kernel without control characters."""
    return printable(raw.decode("utf-8", "replace"))
