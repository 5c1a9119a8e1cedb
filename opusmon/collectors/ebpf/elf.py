"""The exported functions of a shared library: where they are and how they begin. ELF64, little-endian."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

_SHT_DYNSYM, _PT_LOAD, _STT_FUNC = 11, 1, 2
_SYM_B = 24
_HEAD_B = 8

ENDBR64 = bytes.fromhex("f30f1efa")
_NOP5 = bytes.fromhex("0f1f440000")
_PUSH = re.compile(rb"[\x50-\x57]|\x41[\x50-\x57]", re.DOTALL)


class NotALibrary(ValueError):  # noqa: N818
    """The file is not an ELF64 library that can be read."""


@dataclass(frozen=True, slots=True)
class Function:
    """An exported function.

    Attributes:
        name: the symbol, without version.
        address: virtual address relative to the load address, which is where a probe goes.
        head: its first 8 bytes; shorter at the end of the file.
    """

    name: str
    address: int
    head: bytes


def functions(file: BinaryIO, wanted: Collection[str]) -> dict[str, Function]:
    """Those of `wanted` that the library exports, by name.

    Raises:
        NotALibrary: it cannot be read as an ELF64 library.
    """
    try:
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as image:
            return dict(_functions(image, wanted))
    except (ValueError, OSError, struct.error, IndexError) as error:
        raise NotALibrary(str(error)) from error


def file_offset(file: BinaryIO, address: int) -> int:
    """Place in the file of a virtual address, relative to the load address, of a library.

    Raises:
        NotALibrary: it cannot be read as an ELF64 library, or the address lies in no loaded segment of it.
    """
    try:
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as image:
            check(image)
            return _offset(segments(image), address)
    except (ValueError, OSError, struct.error, IndexError) as error:
        raise NotALibrary(str(error)) from error


def entry(function: Function, machine: str) -> tuple[int, bool]:
    """Where to put a probe on a function, and whether a hit there is cheap.

    A kernel single-steps the instruction that a probe replaces, at 7 us on a virtual machine, unless it can emulate
    it (push, nop): 0.6 us. Of a function that begins with endbr64 the instruction behind it is taken; arguments
    and return address are still in place there.

    Returns:
        Address for the probe; whether the kernel emulates the instruction (unknown counts as cheap off x86-64).
    """
    if machine != "x86_64":
        return function.address, True
    head, address = function.head, function.address
    if head.startswith(ENDBR64) and _emulated(head[4:]):
        return address + 4, True
    return address, _emulated(head)


def _emulated(code: bytes) -> bool:
    return _PUSH.match(code) is not None or code.startswith(_NOP5)


def check(image: mmap.mmap) -> None:
    """Go on only with an ELF64 file, little-endian.

    Raises:
        NotALibrary: it is none.
    """
    if image[:6] != b"\x7fELF\x02\x01":
        raise NotALibrary("not an ELF64 library")


def _functions(image: mmap.mmap, wanted: Collection[str]) -> Iterator[tuple[str, Function]]:
    check(image)
    (shoff,) = struct.unpack_from("<Q", image, 40)
    shentsize, shnum = struct.unpack_from("<HH", image, 58)
    loaded = segments(image)
    names = {name.encode() for name in wanted}
    for index in range(shnum):
        head = struct.unpack_from("<IIQQQQIIQQ", image, shoff + index * shentsize)
        if head[1] != _SHT_DYNSYM:
            continue
        strings = struct.unpack_from("<IIQQQQIIQQ", image, shoff + head[6] * shentsize)[4]
        table = image[head[4] : head[4] + head[5]]
        for name_at, info, _, section, value, _ in struct.iter_unpack("<IBBHQQ", table):
            if section == 0 or info & 15 != _STT_FUNC:
                continue
            end = image.find(b"\0", strings + name_at)
            name = image[strings + name_at : end]
            if name in names:
                at = _offset(loaded, value)
                yield name.decode(), Function(name.decode(), value, image[at : at + _HEAD_B])


def segments(image: mmap.mmap) -> list[tuple[int, int, int]]:
    """Loaded segments as (virtual address, size in the file, offset in the file).

    Args:
        image: of a file that passed `check`.

    Raises:
        struct.error: the file ends before its tables do.
    """
    (phoff,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    heads = (struct.unpack_from("<IIQQQQ", image, phoff + index * size) for index in range(count))
    return [(head[3], head[5], head[2]) for head in heads if head[0] == _PT_LOAD]


def _offset(loaded: list[tuple[int, int, int]], address: int) -> int:
    """Place in the file of a virtual address."""
    for start, size, offset in loaded:
        if start <= address < start + size:
            return address - start + offset
    raise NotALibrary("a symbol lies outside the file")


def by_address(found: Mapping[str, Function]) -> dict[int, Function]:
    """One function per address: a second name of the same code must not count its calls twice."""
    kept: dict[int, Function] = {}
    for function in found.values():
        kept.setdefault(function.address, function)
    return kept
