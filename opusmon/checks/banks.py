"""Shared-memory bank conflicts of one warp's access to a tile, worked out from its addresses.

Shared memory has 32 banks of 4 bytes. A warp's load is served in wavefronts: a bank gives one word to all lanes that
want it, and lanes that want different words of a bank wait for each other. Loads of 8 and 16 bytes a lane are served
for half and quarter warps at a time, so they take 2 and 4 wavefronts when nothing conflicts.

Sources: NVIDIA CUDA C++ Programming Guide, Compute Capabilities 5.x (banks, broadcast); NVIDIA CUTLASS,
include/cute/swizzle.hpp and include/cute/atom/mma_traits_sm90_gmma.hpp (Swizzle<B,4,3> and the atoms of 8 rows);
NVIDIA PTX ISA, ldmatrix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BANKS = 32
WORD_B = 4
LANES = 32
MATRIX_ROWS = 8
"""Rows of an 8x8 matrix of ldmatrix, 16 bytes each."""

ELEMENTS = {"bf16": 2, "fp8": 1, "fp32": 4}
"""Name to bytes."""
SWIZZLES = {"none": 0, "32B": 32, "64B": 64, "128B": 128}
"""Name to the width of the pattern in bytes, 0 for row-major."""
ACCESSES = ("row", "column", "ldmatrix")
WIDTHS_B = (1, 2, 4, 8, 16)


class TileError(ValueError):
    """A tile or an access that cannot be; one line for the user."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile in shared memory.

    Attributes:
        rows: number of rows.
        cols: elements of a row.
        element: key of `ELEMENTS`.
        swizzle: key of `SWIZZLES`. With one, the tile lies in slabs as wide as the pattern, each with all rows.
        pad_b: bytes after each row, without a swizzle.

    Raises:
        TileError: it cannot be laid out so.
    """

    rows: int
    cols: int
    element: str
    swizzle: str = "none"
    pad_b: int = 0

    def __post_init__(self) -> None:
        width_b = SWIZZLES[self.swizzle]
        if self.rows < 1 or self.cols < 1 or self.pad_b < 0:
            raise TileError(f"a tile of {self.rows}x{self.cols} with {self.pad_b} bytes of padding is none")
        if width_b and self.pad_b:
            raise TileError("a swizzled tile has no padding")
        if width_b and self.row_b % width_b:
            raise TileError(f"rows of {self.row_b} bytes do not fit the {self.swizzle} swizzle")
        if width_b and self.rows % MATRIX_ROWS:
            raise TileError(f"{self.rows} rows do not fit the {self.swizzle} swizzle: it repeats every 8")

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ELEMENTS[self.element]

    @property
    def row_b(self) -> int:
        """Bytes of a row without padding."""
        return self.cols * self.itemsize

    @property
    def size_b(self) -> int:
        """Bytes of the whole tile."""
        return self.rows * (self.row_b + self.pad_b)

    def address(self, row: int, byte: int) -> int:
        """Where a byte of a row lies, from the start of the tile."""
        width_b = SWIZZLES[self.swizzle]
        if not width_b:
            return row * (self.row_b + self.pad_b) + byte
        slab, within = divmod(byte, width_b)
        return swizzled(slab * self.rows * width_b + row * width_b + within, width_b)


@dataclass(frozen=True, slots=True)
class Access:
    """One load of a warp.

    Attributes:
        kind: one of `ACCESSES`.
        width_b: bytes per lane and, for ldmatrix, per row address.
        addresses: (32,) bytes; of ldmatrix.x4 the rows of its four matrices, in order.
    """

    kind: str
    width_b: int
    addresses: tuple[int, ...]

    @property
    def wavefronts(self) -> int:
        """How many it takes."""
        return wavefronts(self.addresses, self.width_b)

    @property
    def ideal(self) -> int:
        """How many it takes when nothing conflicts."""
        return max(1, self.width_b * LANES // (BANKS * WORD_B))

    @property
    def conflicts(self) -> int:
        """Wavefronts beyond those."""
        return self.wavefronts - self.ideal


def swizzled(address: int, width_b: int) -> int:
    """The pattern that is `width_b` bytes wide: the 16-byte chunk's number, xor bits 7 and up of the address.

    32, 64 and 128 bytes are CUTLASS's Swizzle<1,4,3>, <2,4,3> and <3,4,3>, and TMA's modes of that name.
    """
    chunks = width_b // 16
    return address ^ (((address >> 7) & (chunks - 1)) << 4)


def wavefronts(addresses: Sequence[int], width_b: int) -> int:
    """Passes that a warp's load takes.

    Args:
        addresses: (32,) bytes, each a multiple of `width_b`.
        width_b: what each lane loads; up to 4 bytes the whole warp is served at once, of 8 half, of 16 a quarter.
    """
    together = LANES * WORD_B // max(width_b, WORD_B)
    return sum(
        _passes(addresses[first : first + together], width_b) for first in range(0, len(addresses), together)
    )


def _passes(addresses: Iterable[int], width_b: int) -> int:
    """Most distinct words that one bank is asked for."""
    words: dict[int, set[int]] = defaultdict(set)
    for address in addresses:
        for word in range(address // WORD_B, (address + width_b - 1) // WORD_B + 1):
            words[word % BANKS].add(word)
    return max(len(asked) for asked in words.values())


def access(tile: Tile, kind: str, width_b: int = 0) -> Access:
    """The first load of a warp that reads the tile; by the symmetry of the layouts the others are like it.

    `row`: the lanes follow each other along the tile's rows, as a plain copy does, over the edges of slabs too. `column`: each lane has a row of its own and
    all want the same column, as transposing by single elements does. `ldmatrix`: four 8x8 matrices of 16-bit units
    one below the other, as the tensor cores' operands are read; its .trans form wants the same rows.

    Args:
        tile: what is read.
        kind: one of `ACCESSES`.
        width_b: bytes per lane; 0 for the usual one: 16 along rows, one element down a column.

    Raises:
        TileError: the tile is too small for it, or its rows are not aligned for it.
    """
    if kind == "ldmatrix":
        width_b = 16
    elif not width_b:
        width_b = 16 if kind == "row" else tile.itemsize
    if width_b not in WIDTHS_B or width_b < tile.itemsize:
        raise TileError(f"a lane loads no {width_b} bytes of {tile.element}")
    if tile.row_b % width_b or (tile.row_b + tile.pad_b) % width_b:
        raise TileError(
            f"rows of {tile.row_b}+{tile.pad_b} bytes are not aligned for loads of {width_b} ({kind})"
        )
    if kind == "row":
        run_b = width_b * LANES
        if tile.rows * tile.row_b < run_b:
            raise TileError(f"the tile is smaller than one load of a warp ({run_b} bytes)")
        places = (divmod(lane * width_b, tile.row_b) for lane in range(LANES))
        return Access(kind, width_b, tuple(tile.address(row, byte) for row, byte in places))
    if tile.rows < LANES:
        raise TileError(f"{tile.rows} rows are fewer than the {LANES} lanes of a warp")
    return Access(kind, width_b, tuple(tile.address(lane, 0) for lane in range(LANES)))


def parse_tile(text: str) -> tuple[int, int]:
    """`128x64` as rows and columns.

    Raises:
        TileError: it is not written so.
    """
    rows, times, cols = text.partition("x")
    if not (times and rows.isascii() and rows.isdigit() and cols.isascii() and cols.isdigit()):
        raise TileError(f"{text!r} is no tile: write ROWSxCOLUMNS, for example 128x64")
    if len(rows) > 4 or len(cols) > 4 or not (int(rows) and int(cols)):
        raise TileError(f"{text} is no tile of shared memory")
    return int(rows), int(cols)
