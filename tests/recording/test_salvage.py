"""Salvage gives back every whole chunk before a cut, and no more than was there."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from recording.samples import FAULT, POWER, fault, power, ticks, write

from opusmon.clock import NS, Anchor
from opusmon.recording import Mark, Recording, RecordingError, salvage, store
from opusmon.recording.retention import Retention
from opusmon.recording.stage import Stage, Transaction
from opusmon.schema import Batch, Rows, StringTable

ALL = (-(2**62), 2**62)


def noise(second: int, n: int) -> Batch:
    batch = fault(second, n=n)
    batch.rows["code"] = np.random.default_rng(second).random(n)
    return batch


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1500 small chunks, 60 that overflow to several pages, texts, marks, anchors; 1.3 MB."""
    path = tmp_path_factory.mktemp("salvage") / "whole.opusmon"
    connection, _ = store.create(path)
    strings = StringTable()
    strings.intern("first")
    stage = Stage(strings)
    first = stage.build((), [Mark(NS, 2 * NS, "bookmark", "here")], [Anchor(NS, 99 * NS), Anchor(7, 8, 9)])
    first.records["session"].append(("host", "gpu-7"))
    first.apply(connection)
    for second, batches in enumerate(ticks(1500), start=1):
        extra = [noise(second, 1500)] if second % 25 == 0 else []
        stage.build([*batches, *extra]).apply(connection)
    stage.finish([("closed", "5")]).apply(connection)
    store.finish(connection)
    return path


def read(path: Path) -> dict[str, Rows]:
    with Recording.open(path) as recording:
        assert recording.damaged_chunks == 0
        return {name: recording.query(name, *ALL) for name in recording.channels}


def check_subset(found: Rows, whole: Rows) -> None:
    """Whole chunks are in or out: in these files a chunk is all the rows of one time."""
    assert found.tobytes() == whole[np.isin(whole["t"], found["t"])].tobytes()


def test_a_whole_file_is_copied_in_full(tmp_path: Path, source: Path) -> None:
    before = source.read_bytes()
    seen: list[tuple[int, int]] = []
    report = salvage(source, tmp_path / "out", lambda done, total: seen.append((done, total)))
    assert source.read_bytes() == before
    assert (report.chunks, report.rows, report.lost_chunks, report.channels) == (1560, 3000 + 90_000, 0, 2)
    assert (report.t0, report.t1) == (NS, 1500 * NS)
    assert {k: v.tobytes() for k, v in read(source).items()} == {
        k: v.tobytes() for k, v in read(tmp_path / "out").items()
    }
    with Recording.open(source) as old, Recording.open(tmp_path / "out") as new:
        assert new.finished
        assert new.session == {"host": "gpu-7", "closed": "5", "salvaged_from": "whole.opusmon"}
        assert new.marks() == [Mark(NS, 2 * NS, "bookmark", "here")]
        assert list(new.anchors) == list(old.anchors)  # type: ignore[call-overload]
        assert new.strings.text(1) == "first"
        for step in (10, 60, 600):
            want = old.binned("power", ["power_mw"], 0, 1500 * NS, step * NS)
            assert new.binned("power", ["power_mw"], 0, 1500 * NS, step * NS).tobytes() == want.tobytes()
    assert all(0 <= done <= total for done, total in seen)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o600


def test_nearly_all_before_a_cut_is_saved(tmp_path: Path, source: Path) -> None:
    data = source.read_bytes()
    whole = read(source)
    randoms = random.Random(3)
    pages = len(data) // store.PAGE_B
    place = chunk_ends(source)
    for number, size in enumerate(
        [randoms.randrange(12 * 4096, len(data)) for _ in range(8)] + [(pages - 1) * 4096 + 5]
    ):
        cut = tmp_path / f"cut{number}"
        cut.write_bytes(data[:size])
        out = tmp_path / f"out{number}"
        report = salvage(cut, out)
        expected = sum(end <= size for end in place)
        assert report.chunks >= 0.95 * expected
        assert report.chunks <= len(place)
        for name, rows in read(out).items():
            check_subset(rows, whole[name])


def chunk_ends(path: Path) -> list[int]:
    """Where each chunk's last byte lies at most, by looking for its data in the file: an independent way."""
    data = path.read_bytes()
    with sqlite3.connect(path) as raw:
        blobs = [blob for (blob,) in raw.execute("SELECT data FROM chunk ORDER BY id")]
    ends = []
    for blob in blobs:
        # Overflow pages hold 4092 bytes; the end of the blob is found by its last bytes.
        at = data.find(blob[-40:])
        ends.append(-(-(at + 40) // store.PAGE_B) * store.PAGE_B)
    return ends


@pytest.mark.parametrize("size", [0, 1, 50, 99, 100, 4095, 4096, 5000])
def test_a_stump_is_one_line_or_empty(tmp_path: Path, source: Path, size: int) -> None:
    (tmp_path / "cut").write_bytes(source.read_bytes()[:size])
    with pytest.raises(RecordingError) as caught:
        salvage(tmp_path / "cut", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_flipped_bytes_never_raise_anything_else(tmp_path: Path) -> None:
    write(tmp_path / "small", [*ticks(150), [noise(5, 3000)]])
    data = (tmp_path / "small").read_bytes()
    randoms = random.Random(8)
    saved = 0
    for number in range(40):
        changed = bytearray(data)
        for _ in range(randoms.choice([1, 5, 50])):
            changed[randoms.randrange(len(data))] = randoms.randrange(256)
        (tmp_path / "bad").write_bytes(changed)
        out = tmp_path / f"out{number}"
        try:
            report = salvage(tmp_path / "bad", out)
        except RecordingError:
            continue
        found = read(out)
        assert sum(map(len, found.values())) == report.rows
        saved += len(found.get("power", ()))
        out.unlink()
    assert saved > 0.7 * 40 * 300


def test_a_killed_recording_is_salvaged_with_its_wal(tmp_path: Path) -> None:
    connection, _ = store.create(tmp_path / "live")
    stage = Stage(StringTable())
    for batches in ticks(50):
        stage.build(batches).apply(connection)
    assert store.wal_path(tmp_path / "live").stat().st_size > 0
    files = {p.name: p.read_bytes() for p in tmp_path.iterdir() if not p.name.endswith("-shm")}
    report = salvage(tmp_path / "live", tmp_path / "out")
    assert {name: (tmp_path / name).read_bytes() for name in files} == files
    connection.close()
    assert (report.chunks, report.rows) == (50, 100)


def test_an_uncommitted_transaction_is_not_salvaged(tmp_path: Path) -> None:
    connection, _ = store.create(tmp_path / "live")
    stage = Stage(StringTable())
    stage.build([power((1, 0, 1.0))]).apply(connection)
    size = store.wal_path(tmp_path / "live").stat().st_size
    stage.build([power((2, 0, 1.0))]).apply(connection)
    # Without its last frame the second transaction was not committed.
    wal = store.wal_path(tmp_path / "live").read_bytes()
    assert len(wal) > size
    (tmp_path / "torn").write_bytes((tmp_path / "live").read_bytes())
    (tmp_path / "torn-wal").write_bytes(wal[:-1] if len(wal) - size < 2 * 4120 else wal[: -4120 + 10])
    connection.close()
    report = salvage(tmp_path / "torn", tmp_path / "out")
    assert report.rows == 1


@pytest.mark.parametrize("rows", [10, 1000])
def test_what_retention_let_go_does_not_come_back(tmp_path: Path, rows: int) -> None:
    connection, _ = store.create(tmp_path / "a")
    stage = Stage(StringTable())
    for second in range(1, 601):
        stage.build([noise(second, rows)]).apply(connection)
        if second % 7 == 0:
            Retention(age_ns=30 * NS).apply(connection, second * NS)
    Retention(age_ns=30 * NS).apply(connection, 600 * NS)
    store.finish(connection)
    report = salvage(tmp_path / "a", tmp_path / "out")
    assert (report.chunks, report.t0) == (31, 570 * NS)


def test_pages_on_the_free_list_are_left_alone(tmp_path: Path) -> None:
    """A DELETE of everything frees pages without touching what they hold."""
    connection, _ = store.create(tmp_path / "a")
    stage = Stage(StringTable())
    for batches in ticks(300):
        stage.build(batches).apply(connection)
    connection.execute("DELETE FROM chunk")
    stage.build([power((999, 0, 1.0))]).apply(connection)
    store.finish(connection)
    assert salvage(tmp_path / "a", tmp_path / "out").t0 == 999 * NS


def test_raw_and_unsorted_chunks_are_put_right(tmp_path: Path) -> None:
    write(tmp_path / "a", [[power((1, 0, 1.0))]])
    rows = np.zeros(2, POWER.dtype)
    rows["t"] = [9 * NS, 5 * NS]
    data = b"".join(np.ascontiguousarray(rows[name]).tobytes() for name in rows.dtype.names or ())
    work = Transaction()
    work.records["chunk"].append((2, 1, "", 5 * NS, 9 * NS, 2, 0, data))
    with sqlite3.connect(tmp_path / "a", isolation_level=None) as raw:
        work.apply(raw)
    raw.close()
    salvage(tmp_path / "a", tmp_path / "out")
    assert read(tmp_path / "out")["power"]["t"].tolist() == [NS, 5 * NS, 9 * NS]


def test_wrong_names_are_one_line(tmp_path: Path, source: Path) -> None:
    (tmp_path / "text").write_text("x" * 500)
    (tmp_path / "there").write_text("mine")
    for bad, out, message in [
        (tmp_path / "missing", tmp_path / "o", "does not exist"),
        (tmp_path / "text", tmp_path / "o", "not an opusmon recording"),
        (source, tmp_path / "there", "exists already"),
        (source, source, "exists already"),
    ]:
        with pytest.raises(RecordingError, match=message):
            salvage(bad, out)
    assert (tmp_path / "there").read_text() == "mine"


def test_a_foreign_database_has_nothing_to_salvage(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "other") as raw:
        raw.execute("CREATE TABLE t(a, b)")
        raw.execute("INSERT INTO t VALUES('a', 'b')")
    raw.close()
    with pytest.raises(RecordingError, match=r"nothing in .* can be salvaged"):
        salvage(tmp_path / "other", tmp_path / "out")
    assert FAULT.name == "fault"
