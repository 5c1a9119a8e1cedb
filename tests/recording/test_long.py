"""Long ranges as one reads them who goes through the file, and the summaries that tell what a range cannot hold."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opusmon.clock import NS
from opusmon.recording import Recording, RecordingError, query

from .samples import POWER, edit, fault, in_range, power, ticks, write

SECONDS = 1500


def told(rows) -> dict[tuple[int, int], tuple[float, float]]:
    """Least and greatest power by bucket and GPU."""
    return {(row["t"] // NS, row["gpu"]): (row["power_mw_min"], row["power_mw_max"]) for row in rows}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=3, max_size=40),
    late=st.lists(st.integers(0, 39), max_size=4),
    bounds=st.tuples(st.integers(-100, 3000), st.integers(-100, 3000)),
)
def test_a_long_range_is_the_pushed_rows_in_the_order_of_time_and_arrival(
    tmp_path_factory, sizes, late, bounds
):
    """Chunks of any number of rows, some of which come late."""
    path = tmp_path_factory.mktemp("long") / "a.opusmon"
    seconds = [40 * place for place in range(len(sizes))]
    for place in late:
        seconds[place % len(seconds)] -= 90
    batches = [
        fault(max(s, 1), code=place, n=n) for place, (s, n) in enumerate(zip(seconds, sizes, strict=True))
    ]
    write(path, [[batch] for batch in batches])
    t0, t1 = min(bounds) * NS, (min(bounds) + 600 + abs(bounds[0] - bounds[1])) * NS
    with Recording.open(path, through=True) as recording:
        assert (
            recording.query("fault", t0, t1).tobytes()
            == in_range(batches, batches[0].channel, t0, t1).tobytes()
        )


def test_a_long_range_is_what_short_ones_give_and_fills_no_cache(tmp_path: Path) -> None:
    path = tmp_path / "a.opusmon"
    write(path, ticks(SECONDS))
    with Recording.open(path, through=True) as recording:
        long = recording.query("power", 0, SECONDS * NS)
        assert len(recording._reader.cache) == 0
    with Recording.open(path) as recording:
        short = [recording.query("power", s * NS, (s + 100) * NS) for s in range(0, SECONDS, 100)]
        assert len(recording._reader.cache) == SECONDS
    assert long.tobytes() == np.concatenate(short).tobytes()
    assert len(long) == 2 * SECONDS


def test_a_damaged_chunk_in_a_long_range_is_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.opusmon"
    write(path, ticks(SECONDS))
    edit(path, "UPDATE chunk SET data=x'00' WHERE id=7")
    with Recording.open(path, through=True) as recording:
        assert len(recording.query("power", 0, SECONDS * NS)) == 2 * SECONDS - 2
        assert recording.damaged_chunks == 1


def test_a_long_range_of_too_many_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.opusmon"
    write(path, ticks(SECONDS))
    monkeypatch.setattr(query, "MAX_QUERY_B", 2 * SECONDS * POWER.dtype.itemsize - 1)
    with (
        Recording.open(path, through=True) as recording,
        pytest.raises(RecordingError, match="ask for a shorter one"),
    ):
        recording.query("power", 0, SECONDS * NS)


# -- summaries ---------------------------------------------------------------------------------------------------


def test_summaries_are_those_of_the_ten_minutes_that_a_range_touches(tmp_path: Path) -> None:
    """The power is 100 x second + gpu; seconds 600 to 1199 are one bucket."""
    path = tmp_path / "a.opusmon"
    write(path, ticks(SECONDS))
    with Recording.open(path) as recording:
        inside = recording.extremes("power", ["power_mw"], 650 * NS, 700 * NS)
        across = recording.extremes("power", ["power_mw"], 1198 * NS, 1200 * NS)
        assert told(inside) == {(600, gpu): (60_000 + gpu, 119_900 + gpu) for gpu in (0, 1)}
        assert set(told(across)) == {(600, 0), (600, 1), (1200, 0), (1200, 1)}
        # A row at the end of a range counts, one at its begin does not.
        assert set(told(recording.extremes("power", ["power_mw"], 1200 * NS - 1, 1300 * NS))) == {
            (1200, 0),
            (1200, 1),
        }
        assert {t for t, _ in told(recording.extremes("power", ["power_mw"], 600 * NS - 1, 600 * NS))} == {
            600
        }


def test_a_late_row_is_in_the_summaries(tmp_path: Path) -> None:
    path = tmp_path / "a.opusmon"
    write(path, [*ticks(SECONDS), [power((30, 0, 9e9))], *ticks(100, start=SECONDS)])
    with Recording.open(path) as recording:
        rows = recording.extremes("power", ["power_mw"], 0, 100 * NS)
        assert rows["power_mw_max"].max() == np.float32(9e9)


def test_values_that_are_missing_are_in_no_summary(tmp_path: Path) -> None:
    path = tmp_path / "a.opusmon"
    write(path, [[power((s, 0, math.nan if s % 2 else 5.0), (s, 1, math.nan))] for s in range(1, 700)])
    with Recording.open(path) as recording:
        rows = recording.extremes("power", ["power_mw"], 0, 500 * NS)
    assert rows["power_mw_max"].tolist()[0] == 5
    assert math.isnan(rows["power_mw_max"].tolist()[1])


def test_without_summaries_of_the_whole_range_there_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.opusmon"
    write(path, ticks(SECONDS), finish=False)
    with Recording.open(path) as recording:
        assert recording.extremes("power", ["power_mw"], 0, SECONDS * NS) is None
        assert recording.extremes("power", ["power_mw"], 0, 500 * NS) is not None
        assert recording.extremes("power", ["not_a_field"], 0, 500 * NS) is None


def test_a_damaged_summary_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.opusmon"
    write(path, ticks(SECONDS))
    edit(path, "UPDATE rollup SET data=x'00' WHERE level=600000000000")
    with Recording.open(path) as recording:
        assert recording.extremes("power", ["power_mw"], 0, 500 * NS) is None
