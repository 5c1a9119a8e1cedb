"""Evidence stays as it is: reading a recording changes no file and leaves none beside it."""

import shutil
import sqlite3
from pathlib import Path

import pytest
from recording.samples import ticks, write

from opusmon.recording import Recording, RecordingError, store
from opusmon.recording.stage import Stage
from opusmon.schema import StringTable

EVER = (-(2**62), 2**62)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def recorder(path: Path, seconds: int) -> tuple[sqlite3.Connection, Stage]:
    """A recorder at work that has written two rows a second."""
    connection, _ = store.create(path)
    stage = Stage(StringTable())
    for batches in ticks(seconds):
        stage.build(batches).apply(connection)
    return connection, stage


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """A folder with copies of a recording of 50 s, taken while it was written: the first 30 s are in the file itself."""
    (folder := tmp_path / "copies").mkdir()
    connection, stage = recorder(tmp_path / "live", 30)
    connection.execute("PRAGMA wal_checkpoint(FULL)").fetchall()
    for batches in ticks(20, start=30):
        stage.build(batches).apply(connection)
    for name in ("alone", "with", "emptied"):
        shutil.copy(tmp_path / "live", folder / name)
    shutil.copy(tmp_path / "live-wal", folder / "with-wal")
    (folder / "emptied-wal").touch()
    connection.close()
    return folder


@pytest.mark.parametrize(("name", "rows"), [("alone", 60), ("with", 100), ("emptied", 60)])
def test_reading_a_copy_leaves_nothing_beside_it(copies: Path, name: str, rows: int) -> None:
    before = files(copies)
    assert before["alone"][18:20] == b"\2\2"  # in WAL mode: https://www.sqlite.org/fileformat.html, 1.3.3
    with Recording.open(copies / name) as recording:
        assert len(recording.query("power", *EVER)) == rows
        assert recording.warnings == []
    assert files(copies) == before


def test_what_another_reader_of_the_copy_uses_is_left_to_it(copies: Path) -> None:
    before = files(copies)
    with Recording.open(copies / "with") as other:
        assert len(other.query("power", *EVER)) == 100
        with Recording.open(copies / "with") as recording:
            assert len(recording.query("power", *EVER)) == 100
        assert (copies / "with-shm").exists()
        assert len(other.query("power", *EVER)) == 100
    assert files(copies) == before


def test_a_copy_that_is_refused_has_nothing_beside_it_either(copies: Path) -> None:
    with sqlite3.connect(copies / "with") as raw:
        raw.execute("DROP TABLE mark")
    raw.close()
    shutil.copy(copies / "alone", copies / "foreign")
    data = bytearray((copies / "foreign").read_bytes())
    data[68:72] = b"none"  # the application id
    (copies / "foreign").write_bytes(data)
    before = files(copies)
    for name in ("with", "foreign"):
        with pytest.raises(RecordingError):
            Recording.open(copies / name)
    assert files(copies) == before


def test_a_finished_recording_has_nothing_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "a", ticks(5))
    before = files(tmp_path)
    with Recording.open(tmp_path / "a") as recording:
        assert len(recording.query("power", *EVER)) == 10
    assert files(tmp_path) == before


def test_the_last_of_those_who_saw_it_closed_clears_up_after_the_recorder(tmp_path: Path) -> None:
    """SQLite keeps a file in WAL mode, with an empty log beside it, while anybody else has it open.

    The files are not opened here to look: closing them would drop this process's locks.
    """
    connection, stage = recorder(tmp_path / "live", 3)
    first, last = Recording.open(tmp_path / "live"), Recording.open(tmp_path / "live")
    stage.finish([("closed", "1")]).apply(connection)
    store.finish(connection)
    assert names(tmp_path) == {"live", "live-wal", "live-shm"}
    for recording in (first, last):
        assert recording.refresh()
        assert recording.finished
    first.close()
    assert names(tmp_path) == {"live", "live-wal", "live-shm"}
    assert len(last.query("power", *EVER)) == 6
    last.close()
    assert names(tmp_path) == {"live"}
    with Recording.open(tmp_path / "live") as recording:
        assert len(recording.query("power", *EVER)) == 6
    assert names(tmp_path) == {"live"}


@pytest.mark.parametrize("seconds", [0, 3])
def test_a_recorder_at_work_is_never_taken_for_a_copy(tmp_path: Path, seconds: int) -> None:
    """Nor when a link to its file is read: SQLite keeps the log beside the file itself."""
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link"
    link.symlink_to(tmp_path / "live")
    connection, stage = recorder(tmp_path / "live", seconds)
    for path in (tmp_path / "live", link):
        with Recording.open(path) as recording:
            for batches in ticks(1, start=seconds):
                stage.build(batches).apply(connection)
            seconds += 1
            assert recording.refresh()
            assert len(recording.query("power", *EVER)) == 2 * seconds
        assert set(files(tmp_path / "elsewhere")) == {"link"}
        assert (tmp_path / "live-shm").exists()
    connection.close()
