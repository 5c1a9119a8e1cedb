"""Opening what is not a whole recording of this version: one line, never a traceback; nothing in it acts."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from recording.samples import POWER, fault, power, ticks, write

from opusmon.clock import NS
from opusmon.recording import Recording, RecordingError


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    write(tmp_path / "a.opusmon", [*ticks(200), [fault(3)]])
    return tmp_path / "a.opusmon"


def use(path: Path) -> int:
    """Open and read all there is; rows found."""
    with Recording.open(path) as recording:
        count = 0
        for name, channel in recording.channels.items():
            count += len(recording.query(name, -(2**62), 2**62))
            recording.binned(name, channel.values, 0, 2**40, 10 * NS)
            recording.latest(name, 2**62, 2**61)
            recording.step(name, 50 * NS, 1)
            recording.step(name, 50 * NS, -1)
        recording.marks()
        assert sum(len(batch.rows) for batch in recording.batches(-(2**62), 2**62)) == count
        recording.refresh()
        return count


def edit(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as raw:
        for statement in statements:
            raw.execute(statement)
    raw.close()


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, whole: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello" * 100)
    (tmp_path / "short").write_bytes(whole.read_bytes()[:50])
    edit(tmp_path / "other", "CREATE TABLE chunk(id)")
    cases = {
        "missing": "does not exist",
        ".": "is a folder",
        "empty": "is empty",
        "text": "is not an opusmon recording",
        "short": "is cut off after 50 bytes",
        "other": "is not an opusmon recording",
    }
    for name, expected in cases.items():
        with pytest.raises(RecordingError) as caught:
            Recording.open(tmp_path / name)
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)


def as_nobody(call: Callable[[], None]) -> int:
    """Run in a child process without privileges; its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            call()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def open_up(tmp_path: Path) -> None:
    """Let everybody through to the files of a test."""
    shared = {Path("/"), Path(tempfile.gettempdir())}
    for folder in {tmp_path, *list(tmp_path.parents)[:3]} - shared:
        folder.chmod(folder.stat().st_mode | 0o055)


def test_no_permission_is_said(tmp_path: Path, whole: Path) -> None:
    from needs import needs

    needs("root")
    open_up(tmp_path)

    def check() -> None:
        with pytest.raises(RecordingError, match=r"^cannot read .*: permission denied$"):
            Recording.open(whole)

    assert as_nobody(check) == 0


def test_a_live_file_in_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    from needs import needs

    needs("root")
    path = tmp_path / "live"
    write(path, ticks(30), finish=False)
    edit(path, "PRAGMA user_version=1")  # folds the WAL in; a killed writer's file has mode 0600
    path.chmod(0o644)
    open_up(tmp_path)

    def check() -> None:
        with Recording.open(path) as recording:
            assert len(recording.query("power", 0, 30 * NS)) == 60

    assert as_nobody(check) == 0


def test_a_wal_that_cannot_be_used_is_a_warning(tmp_path: Path) -> None:
    from needs import needs

    from opusmon.recording import store
    from opusmon.recording.stage import Stage
    from opusmon.schema import StringTable

    needs("root")
    connection, _ = store.create(tmp_path / "live")
    Stage(StringTable()).build([power((1, 0, 1.0))]).apply(connection)
    (tmp_path / "copy").mkdir()
    for suffix in ("", "-wal"):
        shutil.copy(tmp_path / f"live{suffix}", tmp_path / "copy" / f"live{suffix}")
        (tmp_path / "copy" / f"live{suffix}").chmod(0o644)
    connection.close()
    open_up(tmp_path)
    open_up(tmp_path / "copy")

    def check() -> None:
        with Recording.open(tmp_path / "copy" / "live") as recording:
            assert ["live-wal cannot be used" in warning for warning in recording.warnings] == [True]
            assert recording.channels == {}

    assert as_nobody(check) == 0


def test_a_newer_version_is_read_as_far_as_it_goes(whole: Path) -> None:
    edit(
        whole,
        "PRAGMA user_version=9",
        "ALTER TABLE chunk ADD COLUMN checksum INTEGER DEFAULT 7",
        "CREATE TABLE novelty(a, b)",
        """UPDATE channel SET schema_json=replace(schema_json, '"kind"', '"colour": "red", "kind"')""",
    )
    with Recording.open(whole) as recording:
        assert recording.warnings == [
            "a.opusmon was written by a newer opusmon (format 9): some of it may not be shown"
        ]
        assert len(recording.query("power", 0, 200 * NS)) == 400


def test_a_view_in_place_of_a_table_is_refused(whole: Path) -> None:
    edit(whole, "ALTER TABLE session RENAME TO s", "CREATE VIEW session AS SELECT key, value FROM s")
    with pytest.raises(RecordingError, match="no table session"):
        Recording.open(whole)


def test_triggers_do_not_run_and_nothing_is_written(whole: Path) -> None:
    edit(whole, "CREATE TRIGGER boom AFTER INSERT ON mark BEGIN DELETE FROM chunk; END")
    before = whole.read_bytes()
    assert use(whole) == 401
    with Recording.open(whole) as recording, pytest.raises(sqlite3.OperationalError, match="readonly"):
        recording._connection.execute("INSERT INTO mark VALUES(1,1,1,'','')")
    assert whole.read_bytes() == before


def test_a_huge_generated_value_is_refused_not_built(whole: Path) -> None:
    edit(
        whole,
        "ALTER TABLE session RENAME TO s",
        "CREATE TABLE session(key TEXT, value TEXT AS (hex(zeroblob(400000000))))",
        "INSERT INTO session(key) VALUES('x')",
    )
    with pytest.raises(RecordingError):
        Recording.open(whole)


@pytest.mark.parametrize(
    ("statement", "rows"),
    [
        ("UPDATE chunk SET n=n+1 WHERE id<=10", 381),
        ("UPDATE chunk SET n=-1 WHERE id<=10", 381),
        ("UPDATE chunk SET n=4000000000000 WHERE id<=10", 381),
        ("UPDATE chunk SET n='many', codec='gzip' WHERE id<=10", 381),
        ("UPDATE chunk SET codec=9 WHERE id<=10", 381),
        ("UPDATE chunk SET data=x'00ff' WHERE id<=10", 381),
        ("UPDATE chunk SET data='text' WHERE id<=10", 381),
        ("UPDATE chunk SET data=substr(data, 1, length(data)-2) WHERE id<=10", 381),
        ("UPDATE chunk SET data=data || x'00', codec=0 WHERE id<=10", 381),
    ],
)
def test_a_damaged_chunk_is_skipped_and_counted(whole: Path, statement: str, rows: int) -> None:
    edit(whole, statement)
    assert use(whole) == rows
    with Recording.open(whole) as recording:
        recording.query("power", 0, 400 * NS)
        recording.query("power", 0, 400 * NS)
        assert recording.damaged_chunks == 10


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE channel SET schema_json='{' WHERE name='fault'",
        "UPDATE channel SET schema_json=x'ff00fe' WHERE name='fault'",
        """UPDATE channel SET schema_json='{"name": "power", "kind": "gauge", "key": [], "fields": []}' WHERE name='fault'""",
        """UPDATE channel SET schema_json='{"name": "f", "kind": "gauge", "key": ["n"], "fields": [{"name": "n", "dtype": "<i2"}]}' WHERE name='fault'""",
        f"UPDATE channel SET schema_json='{'[' * 100_000}' WHERE name='fault'",
        "UPDATE span SET max_ns='x'",
        "UPDATE span SET max_ns=9223372036854775807",
        "UPDATE chunk SET t0='x', t1=x'00' WHERE channel=2",
        "UPDATE chunk SET origin=x'ff' WHERE channel=2",
        "INSERT INTO string(id, text) VALUES(-1, 'a'), ('x', 'b'), (99, x'ff'), (9999999999, 'c')",
        "INSERT INTO clock VALUES(1, 'x', 'y')",
        "INSERT INTO session VALUES(x'00', x'ff')",
        "INSERT INTO mark VALUES(1, 'x', 2, 3, 4)",
        "INSERT INTO mark VALUES(1, 1, 2, x'ff', x'ff')",
    ],
)
def test_hostile_values_leave_the_rest_readable(whole: Path, statement: str) -> None:
    edit(whole, statement)
    assert use(whole) in (400, 401)


def test_a_damaged_rollup_falls_back_to_rows(whole: Path) -> None:
    with Recording.open(whole) as recording:
        expected = recording.binned("power", ["power_mw"], 0, 200 * NS, 60 * NS).tolist()
    edit(whole, "UPDATE rollup SET data=x'00' WHERE level=10000000000 AND id=1")
    with Recording.open(whole) as recording:
        assert recording.binned("power", ["power_mw"], 0, 200 * NS, 60 * NS).tolist() == expected


def test_a_range_of_too_many_rows_is_refused(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(whole, f"UPDATE chunk SET n={60 * 2**20 // POWER.dtype.itemsize} WHERE channel=1")
    with Recording.open(whole) as recording, pytest.raises(RecordingError, match="ask for a shorter one"):
        recording.query("power", 0, 200 * NS)


def test_every_cut_is_an_error_of_one_line_or_works(tmp_path: Path, whole: Path) -> None:
    data = whole.read_bytes()
    target = tmp_path / "cut"
    cuts = [random.Random(5).randrange(len(data)) for _ in range(150)]
    for size in [*cuts, *range(len(data) - 40, len(data)), *range(len(data) - 4096, len(data), 101)]:
        target.write_bytes(data[:size])
        with pytest.raises(
            RecordingError, match=r"truncated; run: opusmon salvage .*cut -o|cut off after|is empty"
        ):
            use(target)


def test_flipped_bytes_are_an_error_of_one_line_or_work(tmp_path: Path, whole: Path) -> None:
    data = whole.read_bytes()
    target = tmp_path / "flipped"
    randoms = random.Random(11)
    worked = 0
    for _ in range(150):
        changed = bytearray(data)
        for _ in range(randoms.choice([1, 1, 3, 30])):
            place = randoms.choice([randoms.randrange(len(data)), randoms.randrange(4096)])
            changed[place] = randoms.randrange(256)
        target.write_bytes(changed)
        said = ""
        try:
            use(target)
            worked += 1
        except RecordingError as error:
            said = str(error)
        assert "\n" not in said
    assert worked > 30


def test_a_closed_recording_says_so(whole: Path) -> None:
    recording = Recording.open(whole)
    recording.close()
    recording.close()
    with pytest.raises(RecordingError, match="is closed"):
        recording.query("power", 0, NS)
