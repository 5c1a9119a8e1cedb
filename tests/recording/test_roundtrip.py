"""What is pushed is what is read: rows, texts, marks, anchors; and how the file lies on disk."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording.samples import FAULT, MIXED, POWER, fault, in_range, mixed_batches, power, ticks, write

from opusmon import stats
from opusmon.clock import NS, Anchor, ManualClock, SystemClock
from opusmon.recording import Mark, Recorder, Recording, RecordingError
from opusmon.recording.query import ChunkReader
from opusmon.schema import Batch, StringTable

ALL = (-(2**62), 2**62)


def recorder(path: Path, **options: object) -> Recorder:
    options = {"strings": StringTable(), "clock": ManualClock(5 * NS, 1_000 * NS), **options}
    return Recorder(path, **options)  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(
    mixed_batches(),
    st.lists(st.tuples(st.integers(-100, 3000), st.integers(0, 3000)), min_size=1, max_size=5),
)
def test_a_query_is_the_pushed_rows_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, batches: list[Batch], ranges: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("r") / "a.opusmon"
    writing = recorder(path)
    for batch in batches:
        writing.push(batch)
    writing.close()
    assert writing.state.error == ""
    with Recording.open(path) as recording:
        for first, span in [*((a * NS, b * NS) for a, b in ranges), (ALL[0], 2 * ALL[1])]:
            found = recording.query("mixed", first, first + span)
            assert found.tobytes() == in_range(batches, MIXED, first, first + span).tobytes()
        times = [int(t) for batch in batches for t in batch.rows["t"]]
        assert (recording.t0, recording.t1) == (min(times), max(times))
        copies = list(recording.batches(*ALL))
        assert in_range(copies, MIXED, *ALL).tobytes() == in_range(batches, MIXED, *ALL).tobytes()
        for origin in ("", "host-b"):
            mine = [b for b in batches if b.origin == origin]
            theirs = [b for b in copies if b.origin == origin]
            assert in_range(theirs, MIXED, *ALL).tobytes() == in_range(mine, MIXED, *ALL).tobytes()


@settings(max_examples=40, deadline=None)
@given(
    mixed_batches(),
    st.integers(-3000 * NS, 4000 * NS),
    st.integers(1, 5000 * NS),
    st.sampled_from([1, 10, 20, 60, 300, 600, 1800, 7]),
    st.booleans(),
)
def test_binned_equals_the_rollup_of_the_query(
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[Batch],
    t0: int,
    span: int,
    step_s: int,
    finish: bool,
) -> None:
    path = tmp_path_factory.mktemp("r") / "a.opusmon"
    write(path, [[batch] for batch in batches], finish=finish)
    fields = ["f4", "i8"]
    with Recording.open(path) as recording:
        for _ in range(2):  # the second time from the cache
            found = recording.binned("mixed", fields, t0, t0 + span, step_s * NS)
            expected = stats.rollup(recording.query("mixed", t0, t0 + span), MIXED, fields, step_s * NS)
            assert found.dtype == expected.dtype
            for name in found.dtype.names or ():
                np.testing.assert_allclose(
                    found[name], expected[name], rtol=1e-9, atol=1e-2 if "i8" in name else 0
                )


def test_wide_bins_do_not_read_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", ticks(3600))
    counted: list[int] = []
    real = ChunkReader.chunks

    def count(self: ChunkReader, number: int, channel: object, ids: list[int]) -> dict[int, bytes]:
        counted.append(len(ids))
        return real(self, number, channel, ids)  # type: ignore[arg-type]

    monkeypatch.setattr(ChunkReader, "chunks", count)
    with Recording.open(tmp_path / "a") as recording:
        found = recording.binned("power", ["power_mw"], 0, 3595 * NS, 600 * NS)
        assert found["n"].sum() == 2 * 3595
        # The last bin ends at 3595 s: 10 s buckets reach 3590, five ticks and one at the end of a bucket are rows.
        assert sum(counted) <= 20


def test_binned_does_not_see_what_comes_after(tmp_path: Path) -> None:
    write(tmp_path / "a", ticks(100, gpus=1))
    with Recording.open(tmp_path / "a") as recording:
        (row,) = recording.binned("power", ["power_mw"], 59 * NS, 75 * NS, 60 * NS)
        assert row.tolist() == (60 * NS, 0, 16, 6000.0, 7500.0, 6750.0, 16)
        with pytest.raises(RecordingError, match="power has no numeric field 'gpu'; it has power_mw"):
            recording.binned("power", ["gpu"], 0, NS, NS)


@pytest.mark.parametrize("finish", [True, False])
def test_late_rows_are_in_the_bins(tmp_path: Path, finish: bool) -> None:
    """Rows that come after their 10 s, 1 min and 10 min buckets were stored."""
    late = [power((30.5, 0, -7.0), (650, 0, 9e6)), power((31, 5, 1.0)), power((1330, 1, 3.0))]
    write(tmp_path / "a", [*ticks(1400), *([batch] for batch in late)], finish=finish)
    with Recording.open(tmp_path / "a") as recording:
        for step_s, lows in ((10, 1), (60, 1), (600, 1)):
            found = recording.binned("power", ["power_mw"], 0, 1400 * NS, step_s * NS)
            expected = stats.rollup(recording.query("power", 0, 1400 * NS), POWER, ["power_mw"], step_s * NS)
            assert found["n"].sum() == 2804
            assert np.count_nonzero(found["power_mw_min"] == -7.0) == lows
            for name in found.dtype.names or ():
                np.testing.assert_allclose(found[name], expected[name], rtol=1e-12)


def test_latest_and_step(tmp_path: Path) -> None:
    batches = [power((1, 0, 1.0), (2, 1, 2.0)), power((4, 0, 3.0)), power((3, 0, 4.0), (40, 1, 5.0))]
    write(tmp_path / "a", [batches[:1], batches[1:]])
    with Recording.open(tmp_path / "a") as recording:
        assert recording.latest("power", 4 * NS, 3 * NS).tolist() == [(4 * NS, 0, 3.0), (2 * NS, 1, 2.0)]
        assert recording.latest("power", 4 * NS, 2 * NS).tolist() == [(4 * NS, 0, 3.0)]
        assert len(recording.latest("power", NS - 1, 10 * NS)) == 0
        forward, t = [], -NS
        while (following := recording.step("power", t, 1)) is not None:
            forward.append(following)
            t = following
        assert forward == [NS, 2 * NS, 3 * NS, 4 * NS, 40 * NS]
        back = [recording.step("power", second * NS, -1) for second in (41, 40, 4, 3, 2, 1)]
        assert back == [40 * NS, 4 * NS, 3 * NS, 2 * NS, NS, None]


def test_a_query_of_an_unknown_channel_names_the_known_ones(tmp_path: Path) -> None:
    write(tmp_path / "a", [[power((1, 0, 1.0)), fault(1)]])
    with (
        Recording.open(tmp_path / "a") as recording,
        pytest.raises(RecordingError, match="'gpu'; it has fault, power"),
    ):
        recording.query("gpu", 0, NS)


def test_texts_marks_anchors_and_session_come_back(tmp_path: Path) -> None:
    strings = StringTable()
    writing = recorder(tmp_path / "a", strings=strings, session={"host": "gpu-\ud8ff7"})
    number = strings.intern("nvidia-smi \udcff [b]x\x1b[0m")
    writing.push(Batch(FAULT, FAULT.rows([(NS, 13.0, number)])))
    writing.mark(2 * NS, 3 * NS, "bookmark", "here")
    writing.mark(NS, NS, "note", "one\ntwo")
    writing.anchor(Anchor(60 * NS, 1_055 * NS))
    writing.anchor(Anchor(70 * NS, 4_665 * NS, 3_600 * NS))
    writing.close()
    with Recording.open(tmp_path / "a") as recording:
        assert (
            recording.strings.text(int(recording.query("fault", 0, NS)["what"][0]))
            == "nvidia-smi ? [b]x\x1b[0m"
        )
        assert recording.session["host"] == "gpu-?7"
        assert recording.finished
        both = [Mark(NS, NS, "note", "one\ntwo"), Mark(2 * NS, 3 * NS, "bookmark", "here")]
        assert recording.marks() == both
        assert recording.marks(NS + 1, 2 * NS) == both[1:]
        assert recording.marks(NS - 1, NS) == both[:1]
        assert recording.marks(3 * NS + 1) == []
        steps = [
            Anchor(5 * NS, 1_000 * NS),
            Anchor(60 * NS, 1_055 * NS),
            Anchor(70 * NS, 4_665 * NS, 3_600 * NS),
        ]
        assert list(recording.anchors) == steps  # type: ignore[call-overload]
        assert recording.anchors.wall(71 * NS) == 4_666 * NS


def test_one_private_file_is_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "a b?#%.opusmon"
    old = os.umask(0)
    try:
        writing = recorder(path)
        writing.push(power((1, 0, 1.0)))
    finally:
        os.umask(old)
    writing.close()
    writing.close()
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (
        stat.S_IMODE(path.parent.stat().st_mode) == stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700
    )
    state = writing.state
    assert (state.path, state.recording, state.error, state.dropped_rows) == (path, False, "", 0)
    assert (state.size_b, state.started_t) == (path.stat().st_size, 5 * NS)
    with Recording.open(path) as recording:
        assert recording.query("power", 0, NS).tolist() == [(NS, 0, 1.0)]


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    write(tmp_path / "a", [])
    head = (tmp_path / "a").read_bytes()[:72]
    assert head[68:72] == b"opus"
    assert int.from_bytes(head[60:64], "big") == 1


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(RecordingError, match="exists already"):
        recorder(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RecordingError, match="exists already"):
        recorder(tmp_path / "link")
    assert (tmp_path / "a").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RecordingError,
        match=r"^cannot write .*/file/a: not a directory$",
    ):
        recorder(tmp_path / "file" / "a")
    with pytest.raises(RecordingError, match=r"^cannot write /proc/nothing/a: no such file or directory$"):
        recorder(Path("/proc/nothing/a"))


def test_under_sudo_the_caller_owns_file_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from needs import needs

    needs("root")
    monkeypatch.setenv("SUDO_UID", "12345")
    monkeypatch.setenv("SUDO_GID", "12346")
    writing = recorder(tmp_path / "new" / "a")
    writing.push(power((1, 0, 1.0)))
    owners = {
        p.name: (p.stat().st_uid, p.stat().st_gid) for p in [tmp_path / "new", *(tmp_path / "new").iterdir()]
    }
    writing.close()
    assert set(owners) == {"new", "a", "a-wal", "a-shm"}
    assert set(owners.values()) == {(12345, 12346)}


def test_a_channel_of_another_version_is_fitted_to_the_recorded_one(tmp_path: Path) -> None:
    from opusmon.schema import Channel, Field

    newer = Channel("power", "gauge", (Field("gpu", "<i4"), Field("volt_mv", "<f4")), key=("gpu",))
    writing = recorder(tmp_path / "a")
    writing.push(power((1, 0, 5.0)))
    writing.push(Batch(newer, newer.rows([(2 * NS, 3, 12.0)])))
    writing.close()
    with Recording.open(tmp_path / "a") as recording:
        rows = recording.query("power", 0, 9 * NS)
        assert rows["gpu"].tolist() == [0, 3]
        assert np.isnan(rows["power_mw"]).tolist() == [False, True]


def test_a_batch_that_cannot_be_stored_does_not_stop_the_others(tmp_path: Path) -> None:
    from opusmon.schema import Channel, Field

    bad = Channel("bad", "gauge", (Field("n", "<i2"),), key=("n",))
    writing = recorder(tmp_path / "a")
    writing.push(Batch(bad, bad.rows([(NS, 1)])))
    writing.push(power((1, 0, 5.0)))
    writing.close()
    with Recording.open(tmp_path / "a") as recording:
        assert len(recording.query("power", 0, NS)) == 1
        assert [(mark.kind, mark.text.split(":")[0]) for mark in recording.marks()] == [
            ("drop", "1 bad rows lost")
        ]


def test_columns_are_little_endian_one_after_another(tmp_path: Path) -> None:
    import zlib

    write(tmp_path / "a", [[power((1, 258, 1.0))]])
    with sqlite3.connect(tmp_path / "a") as raw:
        t0, t1, n, codec, data = raw.execute("SELECT t0, t1, n, codec, data FROM chunk").fetchone()
    assert (t0, t1, n, codec) == (NS, NS, 1, 1)
    assert zlib.decompress(data) == NS.to_bytes(8, "little") + b"\x02\x01" + b"\x00\x00\x80\x3f"


def test_the_first_anchor_is_read_from_the_clock(tmp_path: Path) -> None:
    clock = SystemClock()
    before = clock.anchor()
    recorder(tmp_path / "a", clock=clock).close()
    with Recording.open(tmp_path / "a") as recording:
        last = recording.anchors.last
        assert last is not None
        assert 0 <= last.t - before.t < 60 * NS
        assert (
            recording.query("power", 0, NS).size == 0 if "power" in recording.channels else recording.t1 == 0
        )


def test_rows_given_may_be_changed_by_the_caller(tmp_path: Path) -> None:
    write(tmp_path / "a", ticks(3))
    with Recording.open(tmp_path / "a") as recording:
        rows = recording.query("power", 0, NS)
        rows["power_mw"] = -1
        assert recording.query("power", 0, NS)["power_mw"].tolist() == [100.0, 101.0]
        assert recording.channels["power"] == POWER
