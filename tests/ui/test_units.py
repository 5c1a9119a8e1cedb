import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusmon.ui import units

NAN = math.nan


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (units.number(71.4, 4), "  71"),
        (units.number(0.0, 4), "   0"),
        (units.number(-0.2, 4), "   0"),
        (units.number(-3.0, 4), "  -3"),
        (units.number(NAN, 4), "  --"),
        (units.number(math.inf, 4), "  --"),
        (units.number(NAN, 4, missing="n/a"), " n/a"),
        (units.number(123456, 4), "####"),
        (units.number(3.14159, 0, 2), "3.14"),
        (units.percent(71.0), " 71 %"),
        (units.percent(100.0), "100 %"),
        (units.percent(NAN), " -- %"),
        (units.gib(98 * 1024**3), " 98.0"),
        (units.gib_pair(98 * 1024**3, 150_754_820_096), " 98/140 GiB"),
        (units.gib_pair(NAN, 150_754_820_096), " --/140 GiB"),
        (units.size(95.1 * 1024**3), "95.1 GiB"),
        (units.size(512), "512 B"),
        (units.size(1536), "1.5 KiB"),
        (units.size(NAN), "--"),
        (units.rate(3.41e12), "3.41 TB/s"),
        (units.rate(99.8e9), "99.8 GB/s"),
        (units.rate(999), "999 B/s"),
        (units.rate(0), "0 B/s"),
        (units.rate(NAN), "--"),
        (units.gb_rate(99.8e9), " 99.8"),
        (units.watts(612_400), " 612 W"),
        (units.celsius(63), " 63 C"),
        (units.megahertz(1830), "1830 MHz"),
        (units.duration(84_200_000), "84.2 ms"),
        (units.duration(1_000_000_000), "1 s"),
        (units.duration(90_000_000_000), "1.5 m"),
        (units.duration(9_000_000_000_000), "2.5 h"),
        (units.duration(172_800_000_000_000), "2 d"),
        (units.duration(450), "450 ns"),
        (units.duration(0), "0 s"),
        (units.duration(NAN), "--"),
        (units.span(300_000_000_000), "5m"),
        (units.span(5_400_000_000_000), "1h30m"),
        (units.span(500_000_000), "500ms"),
        (units.list_some([7, 3, 12]), "7 3 12"),
        (units.list_some(list(range(18)), 3), "0 1 2 +15"),
    ],
)
def test_shown(shown, expected):
    assert shown == expected


@given(st.floats(), st.integers(1, 12), st.integers(0, 3))
def test_a_column_of_numbers_lines_up(value, width, decimals):
    assert len(units.number(value, width, decimals, missing="-")) == width
