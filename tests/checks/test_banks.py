"""Bank conflicts against tables worked out by hand: 32 banks of 4 bytes, bank = address / 4 mod 32."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusmon.checks.banks import (
    ACCESSES,
    ELEMENTS,
    SWIZZLES,
    Tile,
    TileError,
    access,
    parse_tile,
    swizzled,
    wavefronts,
)


def passes(kind, rows, cols, element, swizzle="none", pad_b=0, width_b=0):
    found = access(Tile(rows, cols, element, swizzle, pad_b), kind, width_b)
    return found.wavefronts, found.conflicts


def test_a_column_of_32_fp32_columns_lies_in_one_bank():
    # Row r of 32 fp32 begins at 128 r bytes = word 32 r: bank 0 for every r, 32 distinct words.
    assert passes("column", 32, 32, "fp32") == (32, 31)


def test_one_word_of_padding_gives_every_row_its_own_bank():
    # 33 words a row: word 33 r, bank r.
    assert passes("column", 32, 32, "fp32", pad_b=4) == (1, 0)


def test_two_words_of_padding_leave_pairs():
    # 34 words a row: bank 2 r mod 32; rows r and r + 16 meet.
    assert passes("column", 32, 32, "fp32", pad_b=8) == (2, 1)


@pytest.mark.parametrize(
    ("cols", "element", "swizzle", "expected"),
    [
        # Rows of 128 bytes: one bank for all 32 rows.
        (64, "bf16", "none", 32),
        # Rows of 64 bytes = 16 words: banks 0 and 16, 16 rows each.
        (64, "fp8", "none", 16),
        # Rows of 128 bytes again.
        (128, "fp8", "none", 32),
        # Rows of 32 bytes = 8 words: banks 0, 8, 16, 24, 8 rows each.
        (32, "fp8", "none", 8),
        # 128B: the chunk of row r is r mod 8, so banks 0, 4, ... 28 with 4 rows each.
        (64, "bf16", "128B", 4),
        (128, "fp8", "128B", 4),
        # 64B on rows of 64 bytes: two rows in 128 bytes, chunk (r / 2) mod 4: banks 16 (r mod 2) + 4 ((r / 2) mod 4),
        # 8 of them, 4 rows each.
        (64, "fp8", "64B", 4),
        (32, "bf16", "64B", 4),
        # 32B on rows of 32 bytes: four rows in 128 bytes, chunk (r / 4) mod 2: 8 banks, 4 rows each.
        (32, "fp8", "32B", 4),
        # Two slabs of 64 bf16; the column is in the first.
        (128, "bf16", "128B", 4),
    ],
)
def test_single_elements_down_a_column(cols, element, swizzle, expected):
    assert passes("column", 128, cols, element, swizzle) == (expected, expected - 1)


@pytest.mark.parametrize(
    ("cols", "element", "swizzle", "expected"),
    [
        # A quarter warp reads 8 rows of 16 bytes. Rows 128 bytes apart: all in banks 0-3, 8 passes, times 4.
        (64, "bf16", "none", 32),
        # Rows 64 bytes apart: banks 0-3 and 16-19, 4 rows each, times 4.
        (64, "fp8", "none", 16),
        # Rows 256 bytes apart: as 128.
        (128, "bf16", "none", 32),
        # Swizzled, 8 rows cover 8 different chunks: all 32 banks once, 4 passes for the warp.
        (64, "bf16", "128B", 4),
        (64, "fp8", "64B", 4),
        (32, "fp8", "32B", 4),
        # 64B on rows of 128 bytes lies in two slabs of 64 bytes.
        (64, "bf16", "64B", 4),
    ],
)
def test_ldmatrix(cols, element, swizzle, expected):
    assert passes("ldmatrix", 64, cols, element, swizzle) == (expected, expected - 4)


def test_padding_of_16_bytes_frees_ldmatrix():
    # Rows of 144 bytes = 36 words: bank 4 r mod 32, 8 rows in 8 groups of 4 banks.
    assert passes("ldmatrix", 64, 64, "bf16", pad_b=16) == (4, 0)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(
    ("swizzle", "expected"),
    [
        # 8 lanes of 16 bytes are 128 bytes of one row: every bank once, in any order.
        ("none", 4),
        ("128B", 4),
        # A row goes on in the next slab, a multiple of 128 bytes away: half of the 8 chunks meet the other half.
        ("64B", 8),
        # Four slabs with two chunks each: four words to a bank.
        ("32B", 16),
    ],
)
def test_along_rows_that_are_wider_than_the_pattern(element, swizzle, expected):
    assert passes("row", 128, 128, element, swizzle) == (expected, expected - 4)


@pytest.mark.parametrize(("cols", "swizzle"), [(64, "64B"), (32, "32B")])
def test_along_rows_as_wide_as_the_pattern_nothing_conflicts(cols, swizzle):
    # 128 bytes in a row of memory hold 2 or 4 rows of the tile whole.
    assert passes("row", 128, cols, "fp8", swizzle) == (4, 0)


def test_lanes_that_want_the_same_word_share_it():
    assert wavefronts([64] * 32, 4) == 1
    # 32 bytes are 8 words of 8 banks.
    assert wavefronts(list(range(32)), 1) == 1


def test_wide_loads_are_served_in_parts():
    assert wavefronts([8 * lane for lane in range(32)], 8) == 2
    assert wavefronts([16 * lane for lane in range(32)], 16) == 4
    # 32 bytes apart: a half warp of 8-byte loads covers every other pair of banks twice round: 4 passes for 2.
    assert wavefronts([32 * lane for lane in range(32)], 8) == 8


def test_the_swizzle_of_128_bytes_moves_row_1s_chunk_0_to_chunk_1():
    assert [swizzled(128 * row, 128) for row in range(9)] == [128 * row + 16 * (row % 8) for row in range(9)]


@given(st.sampled_from([32, 64, 128]), st.integers(0, 2**16))
def test_a_swizzle_is_its_own_inverse_and_keeps_chunks_whole(width_b, address):
    there = swizzled(address, width_b)
    assert swizzled(there, width_b) == address
    assert there % 16 == address % 16
    assert there // width_b == address // width_b


@given(
    st.sampled_from([32, 64, 128]),
    st.sampled_from([32, 64, 128, 256]),
    st.sampled_from(list(ELEMENTS)),
    st.sampled_from(list(SWIZZLES)),
)
def test_a_layout_puts_every_element_at_a_place_of_its_own(rows, cols, element, swizzle):
    try:
        tile = Tile(rows, cols, element, swizzle)
    except TileError:
        return
    places = {tile.address(row, byte) for row in range(rows) for byte in range(tile.row_b)}
    assert places == set(range(tile.size_b))


@given(
    st.sampled_from(ACCESSES),
    st.integers(32, 256),
    st.sampled_from([32, 64, 128, 256]),
    st.sampled_from(list(ELEMENTS)),
    st.sampled_from(list(SWIZZLES)),
)
def test_conflicts_are_between_none_and_one_for_each_lane(kind, rows, cols, element, swizzle):
    try:
        found = access(Tile(rows, cols, element, swizzle), kind)
    except TileError:
        return
    assert 0 <= found.conflicts < 32
    assert found.wavefronts <= 32


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((0, 64, "bf16"), "is none"),
        ((64, 8, "fp8", "32B"), "do not fit the 32B swizzle"),
        ((36, 64, "bf16", "128B"), "36 rows do not fit"),
        ((64, 64, "bf16", "128B", 16), "has no padding"),
    ],
)
def test_a_tile_that_cannot_be_is_refused(words, why):
    with pytest.raises(TileError, match=why):
        Tile(*words)


@pytest.mark.parametrize(
    ("tile", "kind", "width_b", "why"),
    [
        (Tile(16, 64, "bf16"), "column", 0, "16 rows are fewer"),
        (Tile(2, 64, "bf16"), "row", 0, "smaller than one load"),
        (Tile(64, 64, "bf16", pad_b=4), "ldmatrix", 0, "not aligned for loads of 16"),
        (Tile(64, 64, "fp32"), "column", 2, "a lane loads no 2 bytes of fp32"),
        (Tile(64, 64, "bf16"), "row", 3, "a lane loads no 3 bytes"),
    ],
)
def test_an_access_that_cannot_be_is_refused(tile, kind, width_b, why):
    with pytest.raises(TileError, match=why):
        access(tile, kind, width_b)


@pytest.mark.parametrize("text", ["128", "x64", "128x", "0x64", "-1x4", "99999x1", "12 x 4", "²x4"])
def test_a_tile_is_written_as_rows_x_columns(text):
    with pytest.raises(TileError):
        parse_tile(text)
    assert parse_tile("128x64") == (128, 64)
