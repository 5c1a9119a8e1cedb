"""Full queues, full disks, and what retention lets go."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from needs import lacking, needs
from recording.samples import FAULT, POWER, fault, power, ticks, write

from opusmon.clock import NS, ManualClock
from opusmon.recording import Recorder, Recording, RecordingError, store, writer
from opusmon.recording.pending import BATCH_B, PendingBatches
from opusmon.recording.retention import Retention
from opusmon.recording.stage import Stage, Transaction
from opusmon.recording.writer import RecorderState
from opusmon.schema import Batch, StringTable


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return condition()


EVENT_B = FAULT.dtype.itemsize + BATCH_B
GAUGE_B = POWER.dtype.itemsize + BATCH_B


def test_batches_leave_the_queue_in_the_order_they_came() -> None:
    queue = PendingBatches()
    sent = [fault(1), power((1, 0, 1.0)), power((2, 0, 1.0)), fault(2), fault(3)]
    for batch in sent:
        queue.put(batch)
    assert queue.take(3) == sent[:3]
    assert queue.take(100) == sent[3:]
    assert (queue.rows, queue.bytes, queue.take(100)) == (0, 0, [])


def test_events_that_do_not_fit_are_dropped_and_counted() -> None:
    queue = PendingBatches(soft_b=2 * EVENT_B, hard_b=10 * EVENT_B)
    for second in (1, 2, 3, 4):
        queue.put(fault(second))
    assert [batch.t0 for batch in queue.take(10)] == [NS, 2 * NS]
    loss = queue.take_losses()["fault"]
    assert (loss.rows, loss.t0, loss.t1, queue.dropped_rows, queue.take_losses()) == (
        2,
        3 * NS,
        4 * NS,
        2,
        {},
    )


def test_gauges_push_the_oldest_events_out_and_go_last() -> None:
    queue = PendingBatches(soft_b=2 * EVENT_B, hard_b=3 * GAUGE_B)
    queue.put(fault(1))
    queue.put(fault(2))
    queue.put(power((3, 0, 1.0)))
    assert queue.take_losses()["fault"].t1 == NS
    for second in (4, 5, 6):
        queue.put(power((second, 0, 1.0)))
    assert [batch.t0 for batch in queue.take(10)] == [3 * NS, 4 * NS, 5 * NS]
    losses = queue.take_losses()
    assert (losses["fault"].rows, losses["power"].rows, losses["power"].t0) == (1, 1, 6 * NS)


def test_while_the_disk_hangs_push_returns_and_the_loss_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path / "a", strings=StringTable(), clock=ManualClock(), flush_ns=NS // 1000)
    entered, release = threading.Event(), threading.Event()
    real = Transaction.apply

    def hang(self: Transaction, connection: object) -> None:
        entered.set()
        release.wait(30)
        real(self, connection)  # type: ignore[arg-type]

    monkeypatch.setattr(Transaction, "apply", hang)
    recorder._queue = PendingBatches(soft_b=3 * EVENT_B, hard_b=6 * EVENT_B)
    recorder.push(power((1, 0, 1.0)))
    assert entered.wait(20)
    for second in range(2, 8):
        recorder.push(fault(second))
    recorder.push(power((8, 0, 1.0)))
    assert recorder.state.dropped_rows == 4
    release.set()
    recorder.close()
    with Recording.open(tmp_path / "a") as recording:
        assert recording.query("fault", 0, 9 * NS)["t"].tolist() == [3 * NS, 4 * NS]
        assert recording.query("power", 0, 9 * NS)["t"].tolist() == [NS, 8 * NS]
        assert recording.marks() == [(2 * NS, 7 * NS, "drop", "4 fault rows lost: queue full")]


def test_close_gives_up_on_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path / "a", strings=StringTable(), clock=ManualClock(), flush_ns=NS // 1000)
    release = threading.Event()
    real = Transaction.apply

    def hang(self: Transaction, connection: object) -> None:
        release.wait(30)
        real(self, connection)  # type: ignore[arg-type]

    monkeypatch.setattr(Transaction, "apply", hang)
    recorder.push(power((1, 0, 1.0)))
    recorder.close(timeout_s=0.1)
    assert recorder.state.error == "a is unfinished: the disk did not answer within 0.1 s"
    assert recorder.state.recording is False
    recorder.push(power((2, 0, 1.0)))
    release.set()
    recorder.close()


def noise(second: int, n: int = 4000) -> Batch:
    """32 kB that do not compress, in a second."""
    batch = fault(second, n=n)
    batch.rows["code"] = np.random.default_rng(second).random(n)
    return batch


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 6 MB."""
    needs("tmpfs")
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)], check=False)
    if made.returncode:
        lacking("tmpfs", "no tmpfs can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(recorder: Recorder, first: int, until: Callable[[RecorderState], bool]) -> int:
    """Push noise second by second until the state is as wanted; the next second."""
    second = first
    deadline = time.monotonic() + 30
    while not until(recorder.state):
        assert time.monotonic() < deadline, recorder.state
        recorder.push(noise(second))
        second += 1
        time.sleep(0.002)
    return second


def test_a_full_disk_stops_the_recording_and_room_resumes_it(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(writer, "LAST_RETRY_S", 0.05)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(4_500_000))
    clock = ManualClock(0, 3600 * NS)
    path = small_disk / "a"
    recorder = Recorder(path, strings=StringTable(), clock=clock, flush_ns=NS // 200)
    recorder._queue = PendingBatches(soft_b=300_000, hard_b=400_000)
    second = fill(recorder, 1, lambda state: not state.recording)
    stopped = time.strftime("%H:%M:%S", time.localtime(3600))
    assert recorder.state.error.startswith(f"disk full: recording stopped at {stopped}, ")
    assert recorder.state.error.endswith(" MB kept")
    with Recording.open(path) as recording:
        rows = recording.query("fault", 0, 2**62)
        kept = [int(t) // NS for t in np.unique(rows["t"])]
        assert rows.tobytes() == b"".join(noise(s).rows.tobytes() for s in kept)
        assert len(kept) > 5
    dropped = recorder.state.dropped_rows
    second = fill(recorder, second, lambda state: state.dropped_rows > dropped)
    clock.advance(90 * NS)
    ballast.unlink()
    assert wait_for(lambda: recorder.state.recording), recorder.state
    assert recorder.state.error == ""
    recorder.push(power((10_000, 0, 1.0)))
    recorder.close()
    assert recorder.state.error == ""
    with Recording.open(path) as recording:
        marks = recording.marks()
        (gap,) = [mark for mark in marks if mark.kind == "gap"]
        assert (gap.t0, gap.t1) == (0, 90 * NS)
        assert gap.text.startswith("recording stopped for 90 s: ")
        lost = [mark.text.split(" ", 1) for mark in marks if mark.kind == "drop"]
        assert {text for _, text in lost} == {"fault rows lost: queue full"}
        assert sum(int(rows) for rows, _ in lost) == recorder.state.dropped_rows
        rows = len(recording.query("fault", 0, 2**62))
        assert rows + recorder.state.dropped_rows == 4000 * (second - 1)
        assert len(recording.query("power", 0, 2**62)) == 1
    assert sorted(p.name for p in small_disk.iterdir()) == ["a"]


def test_closing_on_a_full_disk_keeps_what_was_committed(small_disk: Path) -> None:
    recorder = Recorder(small_disk / "a", strings=StringTable(), clock=ManualClock(), flush_ns=NS // 200)
    fill(recorder, 1, lambda state: not state.recording)
    recorder.close()
    assert recorder.state.error.startswith("disk full")
    with Recording.open(small_disk / "a") as recording:
        kept = recording.t1 // NS
        assert len(recording.query("fault", 0, 2**62)) == 4000 * kept > 0


def test_no_room_to_begin_with_is_one_line(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(6 * 2**20 - 8192))
    with pytest.raises(RecordingError, match=r"^cannot write .*/a: disk full$"):
        Recorder(small_disk / "a", strings=StringTable(), clock=ManualClock())
    assert [p.name for p in small_disk.iterdir()] == ["ballast"]


def test_a_file_size_limit_stops_the_recording_too(tmp_path: Path) -> None:
    code = f"""
import resource, sys
sys.path[:0] = {sys.path!r}
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
from pathlib import Path
from recording.test_limits import *
recorder = Recorder(Path({str(tmp_path / "a")!r}), strings=StringTable(), clock=ManualClock(), flush_ns=NS // 200)
fill(recorder, 1, lambda state: not state.recording)
print(recorder.state.error)
recorder.close()
"""
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (child.returncode, child.stderr) == (0, "")
    assert ": recording stopped at" in child.stdout
    with Recording.open(tmp_path / "a") as recording:
        assert len(recording.query("fault", 0, 2**62)) == 4000 * (recording.t1 // NS) > 0
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1_000_000


def test_a_removed_file_stops_the_recording(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a", strings=StringTable(), clock=ManualClock(), flush_ns=NS // 200)
    (tmp_path / "a").rename(tmp_path / "b")
    assert wait_for(lambda: not recorder.state.recording)
    assert recorder.state.error.startswith("a was moved or removed: put it back, or start a new recording")
    (tmp_path / "b").rename(tmp_path / "a")
    recorder.push(power((1, 0, 1.0)))
    recorder.close()
    with Recording.open(tmp_path / "a") as recording:
        assert len(recording.query("power", 0, NS)) == 1


def test_age_lets_old_chunks_and_their_rollups_go(tmp_path: Path) -> None:
    clock = ManualClock()
    recorder = Recorder(
        tmp_path / "a", strings=StringTable(), clock=clock, retain_ns=400 * NS, flush_ns=NS // 200
    )
    recorder.mark(5 * NS, 5 * NS, "bookmark", "old")
    recorder.mark(1500 * NS, 1500 * NS, "bookmark", "new")
    with Recording.open(tmp_path / "a") as recording:
        for second in range(10, 1600, 10):
            recorder.push(power(*((second - s / 2, 0, 1.0) for s in range(20, 0, -1))))
            clock.t = second * NS
            assert wait_for(lambda second=second: recording.refresh() and recording.t1 >= (second - 1) * NS)
    recorder.close()
    with Recording.open(tmp_path / "a") as recording:
        assert 1175 * NS <= recording.t0 <= 1191 * NS
        assert (
            len(recording.query("power", recording.t0 - 1, 2**62))
            == (recording.t1 - recording.t0) * 2 // NS + 1
        )
        for step_s, first_s in ((10, 1140), (60, 600), (600, 600)):
            assert recording.binned("power", [], 0, 2**62, step_s * NS)["t"][0] == first_s * NS
        since = recording.t0 // (60 * NS) * 60 * NS + 60 * NS - 1
        binned = recording.binned("power", ["power_mw"], since, 2**62, 60 * NS)
        assert binned["n"].sum() == len(recording.query("power", since, 2**62))
        assert [mark.text for mark in recording.marks()] == ["new"]


def test_size_is_kept_near_the_limit(tmp_path: Path) -> None:
    limit_b = 2_000_000
    recorder = Recorder(
        tmp_path / "a", strings=StringTable(), clock=ManualClock(), retain_b=limit_b, flush_ns=NS // 1000
    )
    sizes = []
    with Recording.open(tmp_path / "a") as recording:
        for second in range(1, 301):
            recorder.push(noise(second))
            assert wait_for(lambda second=second: recording.refresh() and recording.t1 >= second * NS)
            sizes.append(store.size_b(tmp_path / "a"))
    recorder.close()
    assert max(sizes) < 1.25 * limit_b
    assert min(sizes[100:]) > 0.5 * limit_b
    with Recording.open(tmp_path / "a") as recording:
        kept = [int(t) // NS for t in np.unique(recording.query("fault", 0, 2**62)["t"])]
        assert kept == list(range(kept[0], 301))
        assert 30 < len(kept) < 80


def test_freed_space_is_given_back_in_steps(tmp_path: Path) -> None:
    connection, _ = store.create(tmp_path / "a")
    stage = Stage(StringTable())
    for second in range(1, 400):
        stage.build([noise(second)]).apply(connection)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    before = store.size_b(tmp_path / "a")
    assert before > 12_000_000
    retention = Retention(age_ns=10 * NS)
    assert wait_for(lambda: retention.apply(connection, 400 * NS) or _free_pages(connection) <= 1024)
    store.finish(connection)
    assert store.size_b(tmp_path / "a") < 5_000_000
    with Recording.open(tmp_path / "a") as recording:
        assert recording.t0 == 390 * NS


def _free_pages(connection: object) -> int:
    return int(connection.execute("PRAGMA freelist_count").fetchone()[0])  # type: ignore[attr-defined]


def test_the_last_chunk_is_never_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MIN_RETAIN_B", 1)
    recorder = Recorder(
        tmp_path / "a", strings=StringTable(), clock=ManualClock(), retain_b=1, flush_ns=NS // 1000
    )
    recorder.push(noise(1, n=60_000))
    recorder.close()
    with Recording.open(tmp_path / "a") as recording:
        assert len(recording.query("fault", 0, NS)) == 60_000


@pytest.mark.parametrize(
    ("kind", "network"),
    [("nfs4", True), ("lustre", True), ("gpfs", True), ("cifs", True), ("fuse.sshfs", True), ("ext4", False),
     ("fuse.fuse-overlayfs", False), ("tmpfs", False), ("", False)],
)  # fmt: skip
def test_network_filesystems(kind: str, network: bool) -> None:
    assert store.is_network(kind) is network


def test_the_filesystem_is_that_of_the_nearest_mount() -> None:
    mounts = (
        "22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw\n"
        "30 22 0:40 / /home rw shared:9 - nfs4 server:/home rw\n"
        "31 30 0:41 / /home/a\\040b rw - xfs /dev/vdb rw\n"
        "broken line\n"
    )
    assert store.filesystem_type(Path("/var/lib"), mounts) == "ext4"
    assert store.filesystem_type(Path("/home/x/y"), mounts) == "nfs4"
    assert store.filesystem_type(Path("/homework"), mounts) == "ext4"
    assert store.filesystem_type(Path("/home/a b/c"), mounts) == "xfs"


def test_on_a_network_filesystem_there_is_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "filesystem_type", lambda *_: "lustre")
    recorder = Recorder(tmp_path / "a", strings=StringTable(), clock=ManualClock(), flush_ns=NS // 200)
    assert "network filesystem (lustre)" in recorder.warning
    assert {p.name for p in tmp_path.iterdir()} == {"a", "a-wal"}
    with pytest.raises(RecordingError, match="is locked: another opusmon records it"):
        Recording.open(tmp_path / "a")
    recorder.push(power((1, 0, 1.0)))
    recorder.close()
    with Recording.open(tmp_path / "a") as recording:
        assert len(recording.query("power", 0, NS)) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_pruned_files_still_bin_as_their_rows(tmp_path: Path) -> None:
    write(tmp_path / "a", ticks(50))
    with Recording.open(tmp_path / "a") as recording:
        assert recording.binned("power", [], 0, 50 * NS, 10 * NS)["n"].sum() == 100
