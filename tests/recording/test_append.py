"""Marks added to a finished recording."""

import shutil
import sqlite3

import pytest
from sessions import DATA

from opusmon.clock import ManualClock
from opusmon.recording import Recorder, Recording, RecordingError
from opusmon.recording.append import add_marks
from opusmon.recording.store import Mark
from opusmon.schema import StringTable


@pytest.fixture
def finished(tmp_path):
    path = tmp_path / "night.opusmon"
    shutil.copy(DATA / "h200-streams.opusmon", path)
    path.chmod(0o600)
    return path


def marks_of(path):
    with Recording.open(path) as recording:
        return recording.marks()


def test_they_are_there_with_those_of_before_and_nothing_else_changed(finished):
    add_marks(finished, [Mark(5, 7, "check", "first")])
    before = marks_of(finished)
    add_marks(finished, [Mark(9, 9, "check", "second"), Mark(9, 9, "check", "third")])
    assert sorted(marks_of(finished)) == sorted(
        [*before, Mark(9, 9, "check", "second"), Mark(9, 9, "check", "third")]
    )
    with Recording.open(finished) as now, Recording.open(DATA / "h200-streams.opusmon") as then:
        assert (now.t0, now.t1, now.finished) == (then.t0, then.t1, True)
    assert [one.name for one in finished.parent.iterdir()] == [finished.name]
    assert finished.stat().st_mode & 0o777 == 0o600


def test_a_recording_that_is_still_written_is_left_alone(tmp_path):
    path = tmp_path / "live.opusmon"
    recorder = Recorder(path, strings=StringTable(), clock=ManualClock())
    try:
        with pytest.raises(RecordingError, match="is still being recorded"):
            add_marks(path, [Mark(1, 1, "check", "x")])
    finally:
        recorder.close()
    add_marks(path, [Mark(1, 1, "check", "x")])
    assert marks_of(path) == [Mark(1, 1, "check", "x")]


def test_a_file_that_cannot_be_written_says_so_and_has_none_of_them(finished):
    holder = sqlite3.connect(finished, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(RecordingError, match=r"night\.opusmon"):
            add_marks(finished, [Mark(1, 1, "check", "x")])
    finally:
        holder.close()
    assert Mark(1, 1, "check", "x") not in marks_of(finished)


def test_what_is_no_recording(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello " * 100, encoding="utf-8")
    with pytest.raises(RecordingError):
        add_marks(path, [Mark(1, 1, "check", "x")])
