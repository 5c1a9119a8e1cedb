import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusmon.ui.glyphs import ASCII, BLOCK, BRAILLE
from opusmon.ui.text import STYLES, line_cells, plain
from opusmon.ui.widgets.heatmap import heatmap, levels

NAN = float("nan")


def drawn(grid, width, top, glyphs=ASCII):
    return [plain(line) for line in heatmap(np.array(grid, dtype=float), width, glyphs, top=top)]


def test_the_first_row_is_at_the_bottom():
    assert drawn([[7, 0, 0], [0, 0, 7]], 3, 7) == ["  #", "#  "]


def test_ink_grows_with_the_count():
    steps = levels(np.array([0.0, 1, 3, 7, 15, 31, 63]), 63)
    assert steps.tolist() == [0, 2, 3, 4, 5, 6, 7]  # log2 of 64 has six doublings
    assert drawn([[0, 1, 3, 7, 15, 31, 63]], 7, 63) == [" :-=+*#"]


def test_only_nothing_is_empty_and_only_the_top_is_full():
    assert levels(np.array([0.0, 1e-6, 999.0, 1000.0, 5000.0]), 1000).tolist() == [0, 1, 6, 7, 7]


def test_colour_goes_with_ink():
    (line,) = heatmap(np.array([[0.0, 1.0, 1.0, 1000.0]]), 4, BRAILLE, top=1000)
    assert line == ((" ", ""), (BRAILLE.shades[1] * 2, "heat1"), (BRAILLE.shades[7], "heat7"))


def test_time_without_a_measurement_is_marked_in_the_lowest_line():
    assert drawn([[NAN, 0, 5], [NAN, 5, 0]], 3, 5) == [" # ", "? #"]


def test_more_columns_than_cells_show_the_most():
    assert drawn([[0, 9, 0, 0]], 2, 9) == ["# "]
    assert drawn([[9, 0]], 4, 9) == ["##  "]


def test_no_room():
    assert heatmap(np.zeros((2, 3)), 0, ASCII, top=1) == [(), ()]
    assert heatmap(np.zeros((0, 3)), 5, ASCII, top=1) == []


@pytest.mark.parametrize("glyphs", [ASCII, BLOCK, BRAILLE])
@given(
    lines=st.integers(1, 5),
    columns=st.integers(1, 30),
    width=st.integers(1, 30),
    top=st.floats(0, 1e9),
    seed=st.integers(0, 99),
)
def test_exactly_the_size(glyphs, lines, columns, width, top, seed):
    random = np.random.default_rng(seed)
    grid = random.choice([0.0, 1.0, 1e6, NAN], (lines, columns))
    found = heatmap(grid, width, glyphs, top=top)
    assert [line_cells(line) for line in found] == [width] * lines
    assert {style for line in found for _, style in line} <= set(STYLES)
