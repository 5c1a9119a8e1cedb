"""A recording that is being written, and one whose writer was killed."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from recording.samples import fault, power

from opusmon.clock import NS, ManualClock
from opusmon.recording import Recorder, Recording, store
from opusmon.schema import StringTable

FLUSH_NS = NS // 10
MARGIN_NS = 2 * NS
"""For a machine that is busy with something else."""


@contextmanager
def child(path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(Path(__file__).with_name("crash_child.py")), str(path), str(FLUSH_NS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], count: int) -> tuple[int, int]:
    """Number and time of the count-th row pushed."""
    assert process.stdout is not None
    for line in process.stdout:
        number, t = map(int, line.split())
        if number >= count:
            return number, t
    raise AssertionError("the child ended")


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_recording_lacks_at_most_the_last_flush(tmp_path: Path, seed: int) -> None:
    with child(tmp_path / "a") as process:
        _, first_t = read_until(process, 0)
        read_until(process, random.Random(seed).randrange(20, 300))
        process.kill()
        assert process.stdout is not None
        lines = [line for line in process.stdout.read().splitlines() if line.count(" ") == 1]
    last_t = int(lines[-2].split()[1]) if len(lines) > 1 else 0
    with Recording.open(tmp_path / "a") as recording:
        assert not recording.finished
        if "count" not in recording.channels:  # killed before the first flush
            assert last_t - first_t <= FLUSH_NS + MARGIN_NS
            return
        rows = recording.query("count", 0, 2**62)
        assert rows["i"].tolist() == list(range(len(rows)))
        assert [recording.strings.text(w) for w in rows["word"]] == [f"word {i}" for i in range(len(rows))]
        assert last_t == 0 or last_t - recording.t1 <= FLUSH_NS + MARGIN_NS


def test_another_process_is_followed(tmp_path: Path) -> None:
    with child(tmp_path / "a") as process:
        first, _ = read_until(process, 1)
        recording = Recording.open(tmp_path / "a")
        number, t = read_until(process, 100)
        deadline = time.monotonic() + 60
        while recording.t1 < t and time.monotonic() < deadline:
            if not recording.refresh():
                time.sleep(0.01)
        assert recording.t1 >= t
        late_s = (time.monotonic_ns() - t) / NS
        rows = recording.query("count", 0, t)
        assert rows["i"].tolist() == list(range(number + 1))
        assert recording.strings.text(int(rows["word"][-1])) == f"word {number}"
        assert late_s < (FLUSH_NS + MARGIN_NS) / NS
        recording.close()
    assert first >= 1


def settle(recorder: Recorder, recording: Recording, t: int) -> None:
    """Refresh until the row at `t` can be seen."""
    deadline = time.monotonic() + 60
    while recording.t1 < t and time.monotonic() < deadline:
        recording.refresh()
    assert recording.t1 >= t, recorder.state


def test_a_reader_in_a_thread_never_sees_half_a_second(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a", strings=StringTable(), clock=ManualClock(), flush_ns=NS // 200)
    failures: list[str] = []
    stop = threading.Event()

    def read() -> None:
        with Recording.open(tmp_path / "a") as recording:
            while not stop.is_set():
                recording.refresh()
                if "power" in recording.channels:
                    rows = recording.query("power", 0, 2**62)
                    binned = recording.binned("power", ["power_mw"], 0, 600 * NS, 60 * NS)
                    if rows["t"].tolist() != [s * NS for s in range(1, len(rows) // 2 + 1) for _ in (0, 1)]:
                        failures.append(f"{len(rows)} rows")
                    if len(rows) < 2 * 599 and int(binned["n"].sum()) < len(rows):
                        failures.append(f"{binned['n'].sum()} binned of {len(rows)}")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    with Recording.open(tmp_path / "a") as recording:
        for second in range(1, 400):
            recorder.push(power((second, 0, 1.0), (second, 1, 2.0)))
            if second % 40 == 0:
                settle(recorder, recording, second * NS)
    stop.set()
    for reader in readers:
        reader.join()
    recorder.close()
    assert failures == []
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_refresh_says_whether_anything_is_new(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a", strings=StringTable(), clock=ManualClock(), flush_ns=NS // 200)
    recording = Recording.open(tmp_path / "a")
    assert (recording.t0, recording.t1, recording.channels, recording.finished) == (0, 0, {}, False)
    assert recording.refresh() is False
    recorder.push(power((7, 0, 1.0)))
    settle(recorder, recording, 7 * NS)
    assert (recording.t0, recording.t1, list(recording.channels)) == (7 * NS, 7 * NS, ["power"])
    assert recording.refresh() is False
    recorder.push(fault(9))
    settle(recorder, recording, 9 * NS)
    assert list(recording.channels) == ["power", "fault"]
    # The reader keeps the file in WAL mode, but it is complete.
    recorder.close()
    assert recorder.state.error == ""
    assert recording.refresh() is True
    assert recording.finished
    assert store.wal_path(tmp_path / "a").stat().st_size == 0
    recording.close()
    with Recording.open(tmp_path / "a") as again:
        assert np.array_equal(again.query("power", 0, 8 * NS)["t"], [7 * NS])


def test_the_wal_stays_small(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a", strings=StringTable(), clock=ManualClock(), flush_ns=NS // 1000)
    with Recording.open(tmp_path / "a") as recording:
        for second in range(1, 40):
            batch = fault(second, n=20_000)
            batch.rows["code"] = np.random.default_rng(second).random(20_000)
            recorder.push(batch)
            settle(recorder, recording, second * NS)
        assert recording.size_b > 4_000_000
        assert store.wal_path(tmp_path / "a").stat().st_size < 8_000_000
    recorder.close()


def test_reading_in_the_same_process_leaves_the_recorder_its_locks(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a", strings=StringTable(), clock=ManualClock(), flush_ns=NS // 200)
    recorder.push(power((1, 0, 1.0)))
    with Recording.open(tmp_path / "a") as recording:
        settle(recorder, recording, NS)
    inode = (tmp_path / "a").stat().st_ino
    locks = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    # SQLite's lasting SHARED lock on the main file: without it another process could remove the WAL.
    held = [line for line in locks if f":{inode} " in line and "POSIX" in line and "READ" in line]
    recorder.close()
    assert held != []
