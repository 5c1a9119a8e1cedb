"""Table rows straight out of the pages of an SQLite file, for when the file is cut off or damaged.

It follows the published file format (sqlite.org/fileformat2.html), and trusts no number in it. Every leaf page
of every table is found by looking at all pages, so that a lost inner page costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opusmon.recording import store
from opusmon.recording.access import MAX_VALUE_B, Header, read_header

LEAF = 0x0D
WAL_MAGIC = (0x377F0682, 0x377F0683)
WAL_HEADER_B = 32
FRAME_HEADER_B = 24
_INT_BYTES = (0, 1, 2, 3, 4, 6, 8)


class Pages:
    """The pages of a file, with the committed ones of its WAL over them.

    Args:
        path: the file; it is only read.

    Attributes:
        count: pages, whole or not, in the file, and those beyond its end that the WAL has.

    Raises:
        RecordingError: it is missing, empty or no SQLite file.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.header, size_b = read_header(path)
        self.page_b = self.header.page_b or store.PAGE_B
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._wal, self._frames = self._read_wal(store.wal_path(path))
        self._in_file = -(-size_b // self.page_b)
        self._beyond = sorted(number for number in self._frames if number > self._in_file)
        self.count = self._in_file + len(self._beyond)
        self.usable_b = self.page_b - (self._read(0, 21)[20:] or b"\0")[0]

    def close(self) -> None:
        """Close the files."""
        os.close(self._file)
        if self._wal >= 0:
            os.close(self._wal)

    def numbers(self) -> Iterator[int]:
        """The numbers of the pages there are: a WAL may name a page far beyond the end of the file."""
        yield from range(1, self._in_file + 1)
        yield from self._beyond

    def get(self, number: int) -> bytes:
        """A page by number, from 1; shorter than `page_b` where the file is cut off."""
        frame = self._frames.get(number)
        if frame is not None:
            return os.pread(self._wal, self.page_b, frame)
        return self._read((number - 1) * self.page_b, self.page_b) if 0 < number <= self._in_file else b""

    def free(self) -> set[int]:
        """Pages on the free list, as far as it can be followed: what they hold was deleted."""
        header = Header.parse(self.get(1)[:100])
        trunk = header.freelist if header else 0
        found: set[int] = set()
        while trunk and trunk not in found:
            page = self.get(trunk)
            found.add(trunk)
            used = min(_number(page, 4), self.usable_b // 4 - 2)
            found.update(_number(page, 8 + 4 * place) for place in range(used))
            trunk = _number(page, 0)
        return found

    def _read(self, offset: int, size: int) -> bytes:
        return os.pread(self._file, size, offset)

    def _read_wal(self, path: Path) -> tuple[int, dict[int, int]]:
        """The WAL's file and the place of the newest committed copy of each page in it; -1 without one."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return -1, {}
        head = os.pread(file, WAL_HEADER_B, 0)
        if len(head) < WAL_HEADER_B or _number(head, 0) not in WAL_MAGIC or _number(head, 8) != self.page_b:
            return file, {}
        committed: dict[int, int] = {}
        pending: dict[int, int] = {}
        offset = WAL_HEADER_B
        while (
            len(frame := os.pread(file, FRAME_HEADER_B, offset)) == FRAME_HEADER_B
            and frame[8:16] == head[16:24]
        ):
            pending[_number(frame, 0)] = offset + FRAME_HEADER_B
            if _number(frame, 4):  # the database size in pages: set in the last frame of a transaction
                committed |= pending
                pending = {}
            offset += FRAME_HEADER_B + self.page_b
        return file, committed


@dataclass(frozen=True, slots=True)
class Cell:
    """A table row on a leaf page, not yet read.

    Attributes:
        rowid: its key.
        page: number of the page.
        start: where it begins in the page.
        offset: where its payload begins in the page.
        size_b: length of the whole payload.
        types: serial types of its columns.
    """

    rowid: int
    page: int
    start: int
    offset: int
    size_b: int
    types: tuple[int, ...]


def cells(pages: Pages, number: int) -> Iterator[Cell]:
    """The table rows on a page; none when it is not a table's leaf page."""
    page = pages.get(number)
    start = 100 if number == 1 else 0
    if len(page) < start + 8 or page[start] != LEAF:
        return
    count = int.from_bytes(page[start + 3 : start + 5], "big")
    pointers = page[start + 8 : start + 8 + 2 * count]
    for place in range(0, len(pointers) - 1, 2):
        cell = cell_at(page, number, int.from_bytes(pointers[place : place + 2], "big"))
        if cell is not None:
            yield cell


def cell_at(page: bytes, number: int, start: int) -> Cell | None:
    """The table row that begins at `start` in a leaf page; None when it cannot be one."""
    try:
        size_b, at = _varint(page, start)
        rowid, at = _varint(page, at)
        if size_b > MAX_VALUE_B:
            return None
        types = _types(page, at)
    except IndexError:
        return None
    return Cell(rowid - 2**64 if rowid >= 2**63 else rowid, number, start, at, size_b, types)


def values(pages: Pages, cell: Cell) -> list[Any] | None:
    """The columns of a row; None when a part of it is lost."""
    payload = _payload(pages, cell)
    if not payload:
        return None
    try:
        at, _ = _varint(payload, 0)
    except IndexError:
        return None
    out: list[Any] = []
    for kind in cell.types:
        width = _width(kind)
        part = payload[at : at + width]
        if len(part) < width:
            return None
        out.append(_value(kind, part))
        at += width
    return out


def _payload(pages: Pages, cell: Cell) -> bytes | None:
    """A row's bytes, gathered from its page and the overflow pages behind it."""
    usable_b = pages.usable_b
    local = _local_b(cell.size_b, usable_b)
    page = pages.get(cell.page)
    parts = [page[cell.offset : cell.offset + local]]
    missing = cell.size_b - local
    if len(parts[0]) < local:
        return None
    following = _number(page, cell.offset + local) if missing else 0
    seen: set[int] = set()
    while missing > 0:
        # Pages that lead back to themselves would be as long as the row claims to be.
        if following in seen:
            return None
        seen.add(following)
        page = pages.get(following)
        part = page[4 : min(4 + missing, usable_b)]
        if len(part) < min(missing, usable_b - 4):
            return None
        parts.append(part)
        missing -= len(part)
        following = _number(page, 0)
    return b"".join(parts)


def _local_b(size_b: int, usable_b: int) -> int:
    """How much of a payload lies on the leaf page itself."""
    most = usable_b - 35
    if size_b <= most:
        return size_b
    least = (usable_b - 12) * 32 // 255 - 23
    surplus = least + (size_b - least) % (usable_b - 4)
    return surplus if surplus <= most else least


def _types(page: bytes, at: int) -> tuple[int, ...]:
    """Serial types of a record that begins at `at`; at most 64 columns.

    Raises:
        IndexError: the page ends before them.
    """
    header_b, place = _varint(page, at)
    end = at + header_b
    types: list[int] = []
    while place < end and len(types) < 64:
        kind, place = _varint(page, place)
        types.append(kind)
    return tuple(types)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of 1 to 9 bytes, and where it ends.

    Raises:
        IndexError: the data ends inside it.
    """
    value = 0
    for place in range(at, at + 8):
        byte = data[place]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, place + 1
    return value << 8 | data[at + 8], at + 9


def _width(kind: int) -> int:
    """Bytes of a value by serial type."""
    if kind >= 12:
        return (kind - 12) // 2
    return _INT_BYTES[kind] if kind <= 6 else 8 if kind == 7 else 0


def _value(kind: int, part: bytes) -> Any:
    if kind >= 12:
        return part.decode("utf-8", "replace") if kind % 2 else part
    if 1 <= kind <= 6:
        return int.from_bytes(part, "big", signed=True)
    return {8: 0, 9: 1}.get(kind)


def _number(data: bytes, at: int) -> int:
    """Four bytes, big-endian; 0 beyond the end."""
    return int.from_bytes(data[at : at + 4], "big") if len(data) >= at + 4 else 0
