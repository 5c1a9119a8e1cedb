"""Files made to hurt, and files that change while they are read: little memory, one line, never anything else."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from recording.samples import FAULT, POWER, damage, edit, fault, measured, refused, ticks, write
from sessions import h200x2

from opusmon.clock import NS, ManualClock
from opusmon.recording import (
    Mark,
    Recorder,
    Recording,
    RecordingError,
    catalog,
    clean_text,
    conform,
    salvage,
    store,
)
from opusmon.recording.stage import Stage
from opusmon.schema import Batch, Channel, Field, StringTable

ALL = (-(2**62), 2**62)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    write(tmp_path / "a.opusmon", [*ticks(60), [fault(3)]])
    return tmp_path / "a.opusmon"


def calls(recording: Recording) -> list[Callable[[], object]]:
    """Every way to read."""
    t0, t1 = recording.t0, recording.t1
    found: list[Callable[[], object]] = [recording.refresh, recording.marks, recording.counts]
    found.append(lambda: list(recording.batches(t0 - 1, t1)))
    for name, channel in recording.channels.items():
        found += [
            lambda name=name: recording.query(name, *ALL),
            lambda name=name: recording.latest(name, t1, 10 * NS),
            lambda name=name: recording.step(name, t1, -1),
            lambda name=name: recording.step(name, t0, 1),
            lambda name=name, channel=channel: recording.binned(name, channel.values, t0 - 1, t1, 10 * NS),
        ]
    return found


SEEDS = range(150)


def test_random_damage_of_the_demo_is_one_line_or_works(tmp_path: Path) -> None:
    data = h200x2().read_bytes()
    path = tmp_path / "damaged.opusmon"
    opened: list[Recording] = []
    for seed in SEEDS:
        path.write_bytes(damage(data, seed))
        if not refused(lambda: opened.append(Recording.open(path))):
            with opened[-1] as recording:
                for call in calls(recording):
                    refused(call)
    assert len(opened) > len(SEEDS) // 4


@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, 8192),
        lambda path: path.write_bytes(h200x2().read_bytes()),
        lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
        lambda path: path.write_bytes(path.read_bytes()[:4096] + os.urandom(path.stat().st_size)),
    ],
    ids=["emptied", "cut", "another", "noise", "noise-behind"],
)
def test_a_file_that_changes_while_it_is_open(whole: Path, change: Callable[[Path], object]) -> None:
    recording = Recording.open(whole)
    every = calls(recording)
    change(whole)
    assert sum(map(refused, every)) > 0 or recording.damaged_chunks > 0
    recording.close()


def test_what_became_of_an_emptied_file_is_said(whole: Path) -> None:
    with Recording.open(whole) as recording:
        os.truncate(whole, 0)
        with pytest.raises(
            RecordingError, match=r"was replaced or cut off while it was open: open it again$"
        ):
            recording.query("power", *ALL)


@pytest.mark.parametrize(
    "error",
    [
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        sqlite3.DatabaseError("malformed"),
        sqlite3.DataError("string or blob too big"),
        sqlite3.InternalError("x"),
    ],
)
def test_whatever_sqlite_raises_is_a_recording_error(whole: Path, error: Exception) -> None:
    class Failing:
        def execute(self, sql: str, *_: object) -> object:
            if sql == "BEGIN":
                return None
            raise error

        def rollback(self) -> None:
            raise error

        close = rollback

    recording = Recording.open(whole)
    every = calls(recording)
    recording._connection.close()
    recording._connection = recording._reader.connection = Failing()  # type: ignore[assignment]
    assert sum(map(refused, every)) == len(every)
    recording.close()


def test_a_read_that_fails_is_tried_again_by_the_next_refresh(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Recording.open(whole) as recording:
        edit(whole, "INSERT INTO session VALUES('later', 'yes')")
        with monkeypatch.context() as patch:
            patch.setattr(
                catalog.Catalog, "load", lambda *_: (_ for _ in ()).throw(sqlite3.DatabaseError("x"))
            )
            assert refused(recording.refresh) == 1
        assert recording.refresh()
        assert recording.session["later"] == "yes"


def remade(table: str, columns: str, select: str) -> tuple[str, ...]:
    """Statements that make a table anew with other columns."""
    return (
        f"ALTER TABLE {table} RENAME TO old",
        f"CREATE TABLE {table}({columns})",
        f"INSERT INTO {table} {select} FROM old",
    )


CHUNK = "channel, origin, t0, t1, n, codec, data"


@pytest.mark.parametrize(
    "statements",
    [
        remade("channel", "id TEXT, name, schema_json", "SELECT 'x' || id, name, schema_json"),
        remade("channel", "id TEXT PRIMARY KEY, name, schema_json", "SELECT 'x' || id, name, schema_json"),
        remade("channel", "id INTEGER, name, schema_json", "SELECT 'x' || id, name, schema_json"),
        remade("string", "rowid TEXT, id, text", "SELECT 'x' || id, id, text"),
        remade("chunk", f"id TEXT, {CHUNK}", f"SELECT 'x' || id, {CHUNK}"),
        remade("chunk", f"id, {CHUNK}, PRIMARY KEY(id, t0)", f"SELECT id, {CHUNK}"),
        remade(
            "mark", "id INTEGER PRIMARY KEY, t0, t1, kind, text AS (kind || t0)", "SELECT id, t0, t1, kind"
        ),
        (
            "DROP TABLE session",
            "CREATE TABLE session(key TEXT, value TEXT AS (printf('%.*c', 20000000, 'x')))",
        ),
        ("ALTER TABLE channel RENAME COLUMN schema_json TO s", "ALTER TABLE channel ADD COLUMN t"),
    ],
)
def test_tables_that_compute_or_number_otherwise_are_refused(
    whole: Path, statements: tuple[str, ...]
) -> None:
    edit(whole, *statements)
    with pytest.raises(RecordingError, match=r"is damaged \(its table \w+ has no plain column \w+\); run: "):
        Recording.open(whole)


def test_values_repeated_by_a_default_do_not_fill_the_memory(tmp_path: Path, whole: Path) -> None:
    """A column added later reads as its default in every older row, however long that is."""
    numbers = "WITH RECURSIVE c(i) AS (SELECT 100 UNION ALL SELECT i + 1 FROM c LIMIT 40000)"
    edit(
        whole,
        "ALTER TABLE string RENAME TO s",
        "CREATE TABLE string(id INTEGER NOT NULL)",
        f"INSERT INTO string {numbers} SELECT i FROM c",
        f"ALTER TABLE string ADD COLUMN text TEXT DEFAULT '{'x' * 8192}'",
        "ALTER TABLE session RENAME TO s2",
        "CREATE TABLE session(key TEXT)",
        f"INSERT INTO session {numbers} SELECT i FROM c LIMIT 1000",
        f"ALTER TABLE session ADD COLUMN value TEXT DEFAULT '{'y' * 900_000}'",
    )
    assert whole.stat().st_size < 3_000_000
    peak_mb = measured(f"r = Recording.open(Path({str(whole)!r})); assert r.warnings, r.warnings")
    assert peak_mb < 250  # 40,000 x 8 kB and 1,000 x 900 kB would be 1.2 GB


def test_texts_stop_at_their_limit(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(whole, *(f"INSERT INTO string VALUES({n}, '{'x' * 1000}{n}')" for n in range(100, 130)))
    edit(whole, *(f"INSERT INTO mark VALUES({n}, {n}, {n}, 'k', '{'x' * 1000}')" for n in range(30)))
    monkeypatch.setattr(catalog.TextBudget.__init__, "__defaults__", (10_000,))
    with Recording.open(whole) as recording:
        assert recording.strings.text(100).endswith("x100")
        assert recording.strings.text(129) == "?"
        assert recording.warnings == ["some texts are not shown: there are too many"]
        assert 5 < len(recording.marks()) < 10
        edit(whole, "INSERT INTO session VALUES('a', 'b')")
        recording.refresh()
        assert len(recording.warnings) == 1


def test_session_values_are_cut(whole: Path) -> None:
    edit(whole, f"INSERT INTO session VALUES('long', '{'x' * 100_000}')")
    with Recording.open(whole) as recording:
        assert len(recording.session["long"]) == 8192


def test_a_chunk_listed_under_two_channels_is_decoded_for_each(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a damaged index lists it. Rows of `fault` have 20 bytes and of `power` 14: the other's cannot fit."""
    from opusmon.recording.query import ChunkReader

    real = ChunkReader.sizes_b
    monkeypatch.setattr(
        ChunkReader,
        "sizes_b",
        lambda self, number, channel, t0, t1: dict(
            sorted((real(self, number, channel, t0, t1) | {61: 20}).items())
        ),
    )
    with Recording.open(whole) as recording:
        assert len(recording.query("fault", *ALL)) == 1
        assert len(recording.query("power", *ALL)) == 120
        assert [len(batch.rows) for batch in recording.batches(*ALL)] == [2] * 60 + [1]
        assert recording.damaged_chunks == 1


def test_a_chunk_that_claims_too_many_rows_is_damaged(whole: Path) -> None:
    edit(whole, "UPDATE chunk SET n=60000000 WHERE id IN (7, 8)")
    with Recording.open(whole) as recording:
        assert len(recording.query("power", *ALL)) == 116
        assert recording.damaged_chunks == 2
        assert sum(len(batch.rows) for batch in recording.batches(*ALL)) == 117


def test_pages_of_batches_are_bounded_in_bytes(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from opusmon.recording import reader

    assert [(s.start, s.stop) for s in reader._pages(np.array([5, 5, 2**27, 1, 1]))] == [
        (0, 2),
        (2, 3),
        (3, 5),
    ]
    assert list(reader._pages(np.array([], np.int64))) == []
    monkeypatch.setattr(reader, "PAGE_CHUNKS", 7)
    with Recording.open(whole) as recording:
        assert sum(len(batch.rows) for batch in recording.batches(*ALL)) == 121


def test_a_chunk_pruned_between_two_pages_does_not_end_a_dump(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opusmon.recording import reader

    monkeypatch.setattr(reader, "PAGE_CHUNKS", 10)
    with Recording.open(whole) as recording:
        recording.query("power", *ALL)  # all of it is in the cache now
        batches = recording.batches(*ALL)
        next(batches)
        edit(whole, "DELETE FROM chunk")
        assert len(list(batches)) >= 9


def test_an_index_that_leads_back_ends(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from opusmon.recording.query import ChunkReader

    edit(whole, "UPDATE chunk SET data=x'00'")
    monkeypatch.setattr(ChunkReader, "_edge", lambda self, sql, number, t: 5 * NS)
    with Recording.open(whole) as recording:
        assert recording.step("power", NS, 1) is None
        assert recording.step("power", 9 * NS, -1) is None


def rename(path: Path, old: str, **changes: object) -> None:
    """Change the description of a channel."""
    with sqlite3.connect(path) as raw:
        (text,) = raw.execute("SELECT schema_json FROM channel WHERE name=?", (old,)).fetchone()
        body = json.dumps({**json.loads(text), **changes})
        raw.execute("UPDATE channel SET schema_json=? WHERE name=?", (body, old))
    raw.close()


UNUSABLE = {
    "escape": {"name": "x\x1b]0;pwned\x07"},
    "newline": {"name": "a\nb"},
    "surrogate": {"name": "x\ud800"},
    "nameless": {"name": ""},
    "key called n": {"key": ["n"], "fields": [{"name": "n", "dtype": "<i2"}]},
    "key beside its value": {
        "key": ["x_min"],
        "fields": [{"name": "x", "dtype": "<f8"}, {"name": "x_min", "dtype": "<u4"}],
    },
    "key named twice": {"key": ["code", "code"]},
    "a name that is taken": {"name": "power"},
}


@pytest.mark.parametrize("changes", UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_channels_are_skipped_when_read_and_salvaged(
    tmp_path: Path, whole: Path, changes: dict[str, object]
) -> None:
    rename(whole, "fault", **changes)
    with Recording.open(whole) as recording:
        assert list(recording.channels) == ["power"]
        assert len(recording.warnings) == 1
        assert recording.warnings[0].isprintable()
        assert recording.counts() == {"power": 120}
        assert len(recording.query("power", *ALL)) == 120
    report = salvage(whole, tmp_path / "out")
    assert (report.rows, report.names, report.lost_chunks) == (120, ("power",), 1)


def test_counts_are_read_from_the_chunks_statements(whole: Path) -> None:
    with Recording.open(whole) as recording:
        assert recording.counts() == {"power": 120, "fault": 1}
    edit(
        whole,
        "UPDATE chunk SET n=9223372036854775807 WHERE id<4",
        "UPDATE chunk SET n='many' WHERE id=4",
        "UPDATE chunk SET n=-5 WHERE id=5",
        "UPDATE chunk SET channel='x' WHERE id=6",
        "UPDATE chunk SET channel=99 WHERE id=7",
    )
    with Recording.open(whole) as recording:
        assert recording.counts() == {"power": 106, "fault": 1}


def test_a_channel_without_rows_counts_none(tmp_path: Path) -> None:
    connection, _ = store.create(tmp_path / "a")
    stage = Stage(StringTable())
    work = stage.build([])
    stage.add_channel(work, FAULT)
    work.apply(connection)
    store.finish(connection)
    with Recording.open(tmp_path / "a") as recording:
        assert recording.counts() == {"fault": 0}


def test_marks_touch_a_range_at_both_ends(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a", strings=StringTable(), clock=ManualClock())
    for t0, t1 in ((5, 10), (10, 20), (3, 3), (2, 30)):
        recorder.mark(t0, t1, "k", "")
    recorder.close()
    with Recording.open(tmp_path / "a") as recording:

        def found(t0: int | None, t1: int | None) -> list[tuple[int, int]]:
            return [(mark.t0, mark.t1) for mark in recording.marks(t0, t1)]

        assert found(None, None) == [(2, 30), (3, 3), (5, 10), (10, 20)]
        assert found(10, 10) == [(2, 30), (5, 10), (10, 20)]
        assert found(3, 5) == [(2, 30), (3, 3), (5, 10)]
        assert found(20, None) == [(2, 30), (10, 20)]
        assert found(21, 40) == [(2, 30)]
        assert found(None, 2) == [(2, 30)]
        assert found(31, None) == found(None, 1) == []


def test_a_mark_is_recorded_as_it_can_be_shown_before(tmp_path: Path) -> None:
    text = "lone \udcff, nul \0, " + "x" * 9000
    recorder = Recorder(tmp_path / "a", strings=StringTable(), clock=ManualClock())
    recorder.mark(1, 1, "k\udcff", text)
    recorder.close()
    assert clean_text(text) == "lone ?, nul ?, " + "x" * (8192 - 15)
    with Recording.open(tmp_path / "a") as recording:
        assert recording.marks() == [Mark(1, 1, "k?", clean_text(text))]
    with sqlite3.connect(tmp_path / "a") as raw:
        assert raw.execute("SELECT length(text) FROM mark").fetchone() == (8192,)


def test_conform_fits_rows_of_another_version() -> None:
    old = Channel("power", "gauge", (Field("gpu", "<f8"), Field("volt_mv", "<f4")), key=("gpu",))
    rows = old.rows([(1, 3.0, 5.0), (2, np.nan, 6.0), (3, 1e300, 7.0)])
    new = Channel(
        "power",
        "gauge",
        (Field("power_mw", "<f4"), Field("gpu", "<i2"), Field("count", "<u8")),
        key=("gpu",),
    )
    fitted = conform(rows, new)
    assert fitted.dtype == new.dtype
    assert fitted["t"].tolist() == [1, 2, 3]
    assert fitted["gpu"][0] == 3
    assert np.isnan(fitted["power_mw"]).all()
    assert fitted["count"].tolist() == [0, 0, 0]
    assert conform(rows, old) is rows


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"retain_ns": 60 * NS - 1}, r"^rows cannot be kept for 60 s only: ask for 60 s or more$"),
        ({"retain_ns": 0}, r"^rows cannot be kept for 0 s only: ask for 60 s or more$"),
        ({"retain_b": 999_999}, r"^a recording cannot be kept to 999999 bytes: ask for 1 MB or more$"),
        ({"retain_b": 1}, "ask for 1 MB or more"),
    ],
)
def test_limits_that_keep_nothing_are_refused(tmp_path: Path, limits: dict[str, int], message: str) -> None:
    with pytest.raises(RecordingError, match=message):
        Recorder(tmp_path / "a", strings=StringTable(), clock=ManualClock(), **limits)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_the_smallest_limits_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "a"
    Recorder(path, strings=StringTable(), clock=ManualClock(), retain_ns=60 * NS, retain_b=10**6).close()
    assert path.exists()


def test_a_signalling_nan_is_binned_without_a_warning(tmp_path: Path) -> None:
    rows = POWER.rows([(second * NS, 0, 1.0) for second in range(1, 40)])
    rows.view(np.uint8).reshape(-1, POWER.dtype.itemsize)[5, 10:] = [1, 0, 0xA0, 0x7F]
    write(tmp_path / "a", [[Batch(POWER, rows)]])
    with Recording.open(tmp_path / "a") as recording:
        (row,) = recording.binned("power", ["power_mw"], 0, 60 * NS, 60 * NS)
        assert (row["n"], row["power_mw_n"]) == (39, 38)
