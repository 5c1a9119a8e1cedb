"""Addresses of a user stack as function names, while the process lives.

Frames come from a walk by frame pointers in the kernel: in libraries built without them it ends after one or two
frames. Of Python only the interpreter's own C functions are seen.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from opusmon.collectors.ebpf import elf
from opusmon.collectors.ebpf.elf import NotALibrary
from opusmon.collectors.ebpf.libcuda import Mapping as Mapped
from opusmon.collectors.ebpf.maps import Table

MAX_FRAMES = 48
"""The innermost ones are kept."""
MAX_FILES, MAX_SYMBOLS = 48, 4_000_000
"""Bounds of the cache: a symbol takes 16 bytes."""
MAX_NAME_CHARS, MAX_SYMBOL_B = 120, 2048
MAPS_NS = 1_000_000_000
"""The map of a process serves so long."""
MAX_TEXTS = 128
"""Stacks of a process whose text is kept while its map stays the same; a process waits in a few places."""

_SYMTAB, _DYNSYM, _FUNC, _IFUNC = 2, 11, 2, 10
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_LINE = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) ([0-9a-f]+:[0-9a-f]+) (\d+)[ \t]*([^\n]*)$", re.MULTILINE
)
_MANGLED = re.compile(r"_ZNK?(?:\d|S[ast])")
_UNFIT = re.compile(r"[\x00-\x20;\x7f-\x9f]+")

Open = Callable[[int, Mapped], int]


@dataclass(frozen=True, slots=True)
class Region:
    """A line of /proc/PID/maps.

    Attributes:
        start: first address.
        end: first address behind it.
        offset: place in the file where it begins.
        mapped: the file; its path is "" for anonymous memory.
        deleted: the file has no name any more.
    """

    start: int
    end: int
    offset: int
    mapped: Mapped
    deleted: bool

    @property
    def label(self) -> str:
        """What a frame says of where it lies."""
        path = self.mapped.path
        if not path:
            return "[anonymous memory]"
        name = _UNFIT.sub("_", path.rpartition("/")[2])
        return f"{name}, deleted" if self.deleted else name


def regions(maps: bytes) -> list[Region]:
    """The text of a /proc/PID/maps, in order of address."""
    found = []
    for start, end, offset, device, inode, path in _LINE.findall(maps):
        name, deleted = path.removesuffix(b" (deleted)"), path.endswith(b" (deleted)")
        span = f"{start.decode()}-{end.decode()}"
        mapped = Mapped(device.decode(), int(inode), span, os.fsdecode(name))
        found.append(Region(int(start, 16), int(end, 16), int(offset, 16), mapped, deleted))
    return found


class Symbols:
    """The functions of an ELF file: those it exports, and the others where it is not stripped.

    Its tables are copied. The file is not kept mapped: to others this process would look like one that uses the
    library.

    Args:
        file: descriptor; a copy of it is kept.

    Raises:
        NotALibrary: it cannot be read as ELF64.
    """

    def __init__(self, file: int) -> None:
        try:
            with mmap.mmap(file, 0, prot=mmap.PROT_READ) as image:
                elf.check(image)
                self._segments = elf.segments(image)
                self._starts, self._sizes, self._names = _functions(image)
        except (ValueError, OSError, struct.error, IndexError) as error:
            raise NotALibrary(str(error)) from error
        self._file = os.dup(file)

    def __len__(self) -> int:
        return len(self._starts)

    def at(self, offset: int) -> tuple[str, int] | None:
        """Function at a place in the file, and how far behind its begin; None where none is known."""
        address = self._address(offset)
        if address is None or not len(self._starts):
            return None
        index = int(np.searchsorted(self._starts, address, side="right")) - 1
        if index < 0:
            return None
        begin, size = int(self._starts[index]), int(self._sizes[index])
        if address - begin >= max(size, 1):
            return None
        name = os.pread(self._file, MAX_SYMBOL_B, int(self._names[index])).partition(b"\0")[0]
        return plain(name.decode("utf-8", "replace")), address - begin

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _address(self, offset: int) -> int | None:
        for start, size, place in self._segments:
            if place <= offset < place + size:
                return offset - place + start
        return None


def _functions(image: mmap.mmap) -> tuple[Table, Table, Table]:
    """Begin, size and place of the name of each function of a file, by begin and size."""
    (shoff,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    heads = [struct.unpack_from("<IIQQQQIIQQ", image, shoff + size * n) for n in range(count)]
    parts = [_table(image, head, heads) for head in heads if head[1] in (_SYMTAB, _DYNSYM)]
    starts, sizes, names = (
        np.concatenate([np.empty(0, "<u8"), *(part[column] for part in parts)]) for column in range(3)
    )
    # Of several names of one place, the largest comes last and is the one that searchsorted finds.
    order = np.lexsort((sizes, starts))[:MAX_SYMBOLS]
    short = "<u4" if len(image) < 2**32 else "<u8"
    return (
        starts[order].astype("<u8"),
        np.minimum(sizes[order], 2**32 - 1).astype("<u4"),
        names[order].astype(short),
    )


def _table(
    image: mmap.mmap, head: Sequence[int], heads: Sequence[Sequence[int]]
) -> tuple[Table, Table, Table]:
    """Begin, size and place of the name of each function in a symbol table."""
    offset, length = head[4], head[5]
    if offset + length > len(image):
        raise NotALibrary("a symbol table lies outside the file")
    symbols = np.frombuffer(image[offset : offset + length // 24 * 24], _SYMBOL)
    kinds = symbols["info"] & 15
    symbols = symbols[((kinds == _FUNC) | (kinds == _IFUNC)) & (symbols["section"] != 0)]
    return symbols["value"], symbols["size"], symbols["name"].astype("<u8") + np.uint64(heads[head[6]][4])


def plain(name: str) -> str:
    """A symbol as people read it: C++ names without arguments and templates, nothing that breaks a line."""
    readable = _nested(name) if _MANGLED.match(name) else _single(name)
    return _UNFIT.sub("_", readable or name)[:MAX_NAME_CHARS]


def _single(name: str) -> str:
    found = re.match(r"_Z(\d{1,3})", name)
    if found is None:
        return ""
    return name[found.end() : found.end() + int(found[1])]


def _nested(name: str) -> str:
    """The words of `_ZN3foo3barIiE...E`: as far as they are plain names."""
    at, words = 4 if name.startswith("_ZNK") else 3, []
    if name.startswith(("St", "Sa", "Ss"), at):
        words, at = ["std"], at + 2
    while found := re.compile(r"(\d{1,3})").match(name, at):
        words.append(name[found.end() : found.end() + int(found[1])])
        at = _behind_template(name, found.end() + int(found[1]))
        if name.startswith(("C1", "C2", "D0", "D1", "D2"), at):
            words.append(("~" if name[at] == "D" else "") + words[-1])
            break
    return "::".join("(anonymous)" if word.startswith("_GLOBAL__N") else word for word in words)


def _behind_template(name: str, at: int) -> int:
    """Place behind template arguments that begin at `at`; `at` itself when none do, or they cannot be followed."""
    if not name.startswith("I", at):
        return at
    depth, here = 0, at
    while here < len(name):
        digits = re.compile(r"\d{1,3}").match(name, here)
        if digits and not name.startswith("L", here - 2):
            here = digits.end() + int(digits[0])
            continue
        depth += {"I": 1, "N": 1, "L": 1, "X": 1, "J": 1, "E": -1}.get(name[here], 0)
        here += 1
        if depth == 0:
            return here
    return at


@dataclass(slots=True)
class _Map:
    """The map of a process.

    Attributes:
        read_at: monotonic ns.
        text: as the kernel wrote it.
        regions: what it says.
        starts: first address of each.
        frames: text of each stack that was asked for, by its addresses.
    """

    read_at: int
    text: bytes
    regions: list[Region]
    starts: list[int]
    frames: dict[tuple[int, ...], str]

    @classmethod
    def of(cls, text: bytes, now: int) -> _Map:
        found = regions(text)
        return cls(now, text, found, [region.start for region in found], {})


class Symboliser:
    """Turns stacks into text. Reads files: keep it on a thread of its own.

    Args:
        open_mapped: gives a descriptor of the file behind a mapping.
        proc: the /proc folder.
    """

    def __init__(self, open_mapped: Open, proc: Path = Path("/proc")) -> None:
        self._open = open_mapped
        self._proc = proc
        self._files: OrderedDict[tuple[str, int], Symbols | None] = OrderedDict()
        self._maps: dict[int, _Map] = {}

    def text(self, pid: int, addresses: Sequence[int], now: int) -> str:
        """Frames joined by ";", the outermost first; "" where the process has ended or there are none.

        Args:
            pid: of the process.
            addresses: the innermost first.
            now: monotonic ns.
        """
        held = self._map(pid, now)
        innermost = tuple(addresses[:MAX_FRAMES])
        if not innermost or held is None or not held.regions:
            return ""
        if innermost not in held.frames:
            if len(held.frames) >= MAX_TEXTS:
                held.frames.clear()
            frames = [self._frame(pid, address, held) for address in innermost]
            held.frames[innermost] = ";".join(reversed(frames))
        return held.frames[innermost]

    def close(self) -> None:
        """Let go of the files."""
        for symbols in self._files.values():
            if symbols is not None:
                symbols.close()
        self._files.clear()

    def _map(self, pid: int, now: int) -> _Map | None:
        """The map of a process, at most a second old; None where there is none to read."""
        held = self._maps.get(pid)
        if held is not None and now - held.read_at <= MAPS_NS:
            return held
        self._maps = {one: kept for one, kept in self._maps.items() if now - kept.read_at <= MAPS_NS}
        try:
            text = (self._proc / str(pid) / "maps").read_bytes()
        except OSError:
            return None
        if held is not None and held.text == text:
            held.read_at = now
        else:
            held = _Map.of(text, now)
        self._maps[pid] = held
        return held

    def _frame(self, pid: int, address: int, held: _Map) -> str:
        # A frame holds the address behind the call.
        index = bisect_right(held.starts, address - 1) - 1
        if index < 0 or address - 1 >= held.regions[index].end:
            return "[unknown]"
        region = held.regions[index]
        if not region.mapped.path.startswith("/"):
            return region.mapped.path or region.label
        place = address - 1 - region.start + region.offset
        symbols = self._symbols(pid, region.mapped)
        found = symbols.at(place) if symbols is not None else None
        if found is None:
            return f"{region.label}+{place + 1:#x}"
        return f"{found[0]}+{found[1] + 1:#x} ({region.label})"

    def _symbols(self, pid: int, mapped: Mapped) -> Symbols | None:
        if mapped.key not in self._files:
            self._files[mapped.key] = self._load(pid, mapped)
            self._bound()
        self._files.move_to_end(mapped.key)
        return self._files[mapped.key]

    def _load(self, pid: int, mapped: Mapped) -> Symbols | None:
        """The symbols of a file; None where it has none that can be read."""
        try:
            file = self._open(pid, mapped)
        except OSError:
            return None
        try:
            return Symbols(file)
        except NotALibrary:
            return None
        finally:
            os.close(file)

    def _bound(self) -> None:
        def size() -> int:
            return sum(len(symbols) for symbols in self._files.values() if symbols is not None)

        while len(self._files) > 1 and (len(self._files) > MAX_FILES or size() > MAX_SYMBOLS):
            _, oldest = self._files.popitem(last=False)
            if oldest is not None:
                oldest.close()
