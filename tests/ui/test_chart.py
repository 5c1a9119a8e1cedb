import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusmon.ui.glyphs import ASCII, BLOCK, BRAILLE, BY_NAME
from opusmon.ui.text import line_cells, plain
from opusmon.ui.widgets.chart import bar, chart, fractions, resample, spark, sparks, strip

NAN = math.nan


def shown(lines):
    return [plain(line) for line in lines]


def test_braille_area():
    # four columns of dots over one cell row: 0, 25, 75 and 100 % of four dots; zero keeps its lowest dot
    assert shown(chart([0, 25, 75, 100], 2, 1, 0, 100, BRAILLE)) == ["⣀⣾"]


def test_braille_area_two_rows():
    # eight dots high: 100 % fills both cells, 50 % the lower one
    assert shown(chart([100, 50], 1, 2, 0, 100, BRAILLE)) == ["⡇", "⣿"]


def test_braille_line_joins_neighbours():
    assert shown(chart([0, 100], 1, 1, 0, 100, BRAILLE, mode="line")) == ["⡸"]
    assert shown(chart([100, 0], 1, 1, 0, 100, BRAILLE, mode="line")) == ["⢱"]
    assert shown(chart([50, 50, 50, 50], 2, 1, 0, 100, BRAILLE, mode="line")) == ["⠤⠤"]


def test_block_and_ascii_levels():
    assert shown(chart([0, 12.5, 50, 100], 4, 1, 0, 100, BLOCK)) == ["▁▁▄█"]
    assert shown(chart([100, 50, 0, NAN], 4, 2, 0, 100, ASCII)) == ["@   ", "@@. "]


def test_a_gap_is_a_hole_and_zero_is_not():
    assert shown(chart([0, NAN, 0, NAN], 4, 1, 0, 100, BLOCK)) == ["▁ ▁ "]
    assert spark([0, 0, NAN, NAN], 2, 0, 100, BRAILLE) == "⣀ "


def test_the_scale_is_fixed():
    # a flat 3 % stays at the bottom whatever the other values are
    assert shown(chart([3.0] * 4, 4, 2, 0, 100, ASCII)) == ["    ", "...."]
    assert shown(chart([300.0, -5.0], 2, 1, 0, 100, ASCII)) == ["@."]


def test_alarm_columns_take_their_own_style():
    (line,) = chart([10, 96, 97, 20], 4, 1, 0, 100, BLOCK, alarm=95, alarm_style="bad")
    assert [(len(text), style) for text, style in line] == [(1, "series0"), (2, "bad"), (1, "series0")]


def test_resample_keeps_peaks_and_gaps():
    assert resample([1, 9, 2, NAN, NAN, NAN], 3).tolist()[:2] == [9, 2]
    assert math.isnan(resample([1, 9, 2, NAN, NAN, NAN], 3)[2])
    assert resample([1, 2], 4).tolist() == [1, 1, 2, 2]
    assert np.isnan(resample([], 3)).all()


def test_fractions():
    assert fractions([0, 50, 200], 0, 100).tolist() == [0, 0.5, 1]
    assert fractions([5], 5, 5).tolist() == [0]


def test_bar():
    assert plain(bar(0.5, 8, ASCII)) == "####----"
    assert plain(bar(0.0, 4, ASCII)) == "----"
    assert plain(bar(0.001, 4, ASCII)) == "#---"
    assert plain(bar(0.999, 4, ASCII)) == "###-"
    assert plain(bar(1.0, 4, ASCII)) == "####"
    assert plain(bar(7.0, 4, ASCII)) == "####"
    assert plain(bar(NAN, 4, ASCII)) == "????"
    assert plain(bar(0.5625, 4, BRAILLE)) == "██▎░"  # 18 of 32 eighths: two cells and two eighths
    assert bar(0.5, 0, ASCII) == ()


def test_strip_tells_idle_unknown_and_little_apart():
    assert strip([0.0, 0.001, 0.5, 1.0, 3.0, NAN], ASCII) == "_.+@@?"


values = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60)


@given(
    values,
    st.integers(-1, 40),
    st.integers(-1, 12),
    st.sampled_from(list(BY_NAME)),
    st.sampled_from(["area", "line"]),
)
def test_any_values_give_exactly_the_size(data, width, height, name, mode):
    lines = chart(data, width, height, 0, 100, BY_NAME[name], alarm=95, mode=mode)
    assert len(lines) == max(height, 0)
    assert {line_cells(line) for line in lines} <= {max(width, 0)}


@given(st.floats(), st.integers(0, 30), st.sampled_from(list(BY_NAME)))
def test_any_bar_has_its_width(fraction, width, name):
    assert line_cells(bar(fraction, width, BY_NAME[name])) == width


@pytest.mark.parametrize("name", list(BY_NAME))
def test_a_higher_value_never_shows_less(name):
    chosen = BY_NAME[name]
    heights = []
    for value in range(0, 101, 5):
        lines = shown(chart([value] * chosen.columns_per_cell, 1, 4, 0, 100, chosen))
        ink = sum(
            ord(text) - 0x2800 if chosen.dots else (" " + chosen.levels).index(text)
            for text in lines
            if text != " "
        )
        heights.append(ink)
    assert heights == sorted(heights)
    assert heights[0] > 0


@given(
    st.lists(st.lists(st.floats(-10, 110) | st.just(NAN), min_size=7, max_size=7), min_size=1, max_size=5),
    st.integers(1, 12),
    st.sampled_from(list(BY_NAME)),
)
def test_many_sparks_are_each_the_first_row_of_its_chart(series, width, name):
    drawn = sparks(np.array(series), width, 0, 100, BY_NAME[name])
    assert drawn == [plain(chart(values, width, 1, 0, 100, BY_NAME[name])[0]) for values in series]


def test_braille_area_cells_have_the_dots_of_their_columns():
    # left 1 to 4 dots with an empty right column, then the other way round; dot bits from the Unicode chart
    left = [chr(0x2800 + bits) for bits in (0x40, 0x44, 0x46, 0x47)]
    right = [chr(0x2800 + bits) for bits in (0x80, 0xA0, 0xB0, 0xB8)]
    values = [share for level in (25, 50, 75, 100) for share in (level, NAN)]
    assert list(plain(chart(values, 4, 1, 0, 100, BRAILLE)[0])) == left
    values = [share for level in (25, 50, 75, 100) for share in (NAN, level)]
    assert list(plain(chart(values, 4, 1, 0, 100, BRAILLE)[0])) == right
