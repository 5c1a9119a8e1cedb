"""The streams collector on a stub libcuda: real probes, a load whose counts are known.

It loads them as it does on any host, by libbpf where that is; `OPUSMON_BPF=bcc pytest ...` runs all of this with bcc.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_stub import Load, copy_of_library
from cuda_stub.watch import Watch
from needs import lacking, needs

from opusmon.channels import WHOLE_CONTEXT
from opusmon.collectors.streams import StreamsCollector

needs("root", "gcc")
if why := StreamsCollector.probe():
    lacking("root", f"probes cannot be set here: {why.reason}")

MS = 1_000_000


@pytest.fixture(scope="module")
def watch() -> Iterator[Watch]:
    """The collector at work, with one library probed."""
    with Load():
        it = Watch()
        it.until(lambda: it.said("probes are on 1 libcuda file, 1 process maps one"))
        yield it
        it.close()


def counted(
    watch: Watch, load: Load, stream: int, *commands: str, field: str, count: float
) -> dict[str, float]:
    """Run commands, and read until `field` of a stream has reached `count`, and one row more."""
    watch.batches.clear()
    for command in commands:
        load.do(command)
    watch.until(lambda: watch.sums(load.pid, stream).get(field, 0) >= count)
    rows = len(watch.rows("stream"))
    watch.until(lambda: len(watch.rows("stream")) > rows)
    return watch.sums(load.pid, stream)


def test_a_process_started_later_is_counted_from_its_first_call(watch: Watch) -> None:
    with Load() as load:
        sums = counted(
            watch, load, 0x11, "kernel 127 17", "ex 61 17", "coop 23 17", field="launches", count=211
        )
        assert sums == {"launches": 127 + 61 + 23}
        row = watch.last(load.pid, 0x11)
        assert row is not None
        assert watch.strings.text(row["process"]) == "cuda_load"
        assert row["tid"] == load.pid


def test_each_stream_has_its_own_counts(watch: Watch) -> None:
    with Load() as load:
        commands = (
            "kernel 53 17",
            "kernel 79 18",
            "ex 97 18",
            "graph 7 19",
            "kernel 13 0",
            "ex 5 1",
            "kernel 3 2",
        )
        counted(watch, load, 2, *commands, field="launches", count=3)
        assert watch.sums(load.pid, 17) == {"launches": 53}
        assert watch.sums(load.pid, 18) == {"launches": 79 + 97}
        assert watch.sums(load.pid, 19) == {"graph_launches": 7}
        assert watch.sums(load.pid, 0) == {"launches": 13 + 5}  # handle 1 is CU_STREAM_LEGACY
        assert watch.sums(load.pid, 2) == {"launches": 3}


def test_threads_that_share_a_stream_lose_no_count(watch: Watch) -> None:
    with Load() as load:
        assert counted(watch, load, 18, "threads 31 18 7", field="launches", count=7 * 31) == {
            "launches": 7 * 31
        }


def test_null_in_the_per_thread_variants_is_the_per_thread_stream(watch: Watch) -> None:
    with Load() as load:
        commands = (
            "ex_ptsz 11 0",
            "graph_ptsz 5 0",
            "h2d_ptsz 3 1000 0",
            "d2h_sync_ptds 2 10",
            "kernel_ptsz 7 1",
        )
        commands += ("kernel_ptsz 23 33", "wait_ptsz 2 0 1000000", "kernel_ptsz 1 0")
        sums = counted(watch, load, 2, *commands, field="launches", count=12)
        assert (sums["launches"], sums["graph_launches"], sums["copies"]) == (12, 5, 5)
        assert (sums["h2d_b"], sums["d2h_b"], sums["waits"]) == (3000, 20, 4)
        assert watch.sums(load.pid, 33) == {"launches": 23}
        assert watch.sums(load.pid, 0) == {"launches": 7}


def test_bytes_by_direction(watch: Watch) -> None:
    big = 3 * 2**32 + 1
    with Load() as load:
        commands = (f"h2d 2 {big} 9", "d2h 3 1009 9", "d2d 5 100003 9", "peer 7 11 9", "any 11 13 9")
        boxes = ("box2d 2 1 2 100 7 9", "box2d 3 2 1 10 10 9", "box2d 1 2 2 5 5 9", "box2d 1 4 4 3 3 9")
        sums = counted(watch, load, 9, *commands, *boxes, field="copies", count=35)
        assert sums == {
            "copies": 2 + 3 + 5 + 7 + 11 + 7,
            "h2d_b": 2 * big + 2 * 700,
            "d2h_b": 3 * 1009 + 3 * 100,
            "d2d_b": 5 * 100_003 + 7 * 11 + 25,
            "other_b": 11 * 13 + 9,
        }


def test_waits_have_their_durations(watch: Watch) -> None:
    with Load() as load:
        watch.batches.clear()
        asked = [0] * 3 + [300_000] * 5 + [2 * MS] * 3 + [20 * MS] * 2 + [200 * MS]
        took = [load.do(f"wait 1 21 {ns}") for ns in asked]
        watch.until(lambda: watch.sums(load.pid, 21).get("waits", 0) == len(asked))
        sums = watch.sums(load.pid, 21)
        assert sum(asked) <= sums["wait_ns"] <= sum(took)  # what the caller saw bounds it from above
        ends = {
            "10us": 10_000,
            "100us": 100_000,
            "1ms": MS,
            "10ms": 10 * MS,
            "100ms": 100 * MS,
            "1s": 1000 * MS,
        }
        so_far = 0.0
        for (
            words,
            end,
        ) in ends.items():  # on a busy machine a wait can be longer than asked, and the caller sees it
            so_far += sums.get(f"wait_lt_{words}", 0)
            assert sum(ns < end for ns in took) <= so_far <= sum(ns < end for ns in asked), words
        assert so_far + sums.get("wait_ge_1s", 0) == len(asked)
        longest = max(row["wait_max_ns"] for row in watch.rows("stream") if row["stream"] == 21)
        assert 200 * MS <= longest <= max(took)


def test_an_event_stands_for_its_stream_and_a_context_for_all(watch: Watch) -> None:
    with Load() as load:
        commands = (
            "record 77 31",
            "wait_event 3 77 1000000",
            "wait_event 2 78 1000000",
            "wait_context 5 1000000",
        )
        counted(watch, load, 31, *commands, field="waits", count=3)
        assert watch.sums(load.pid, 31)["waits"] == 3
        assert watch.sums(load.pid, WHOLE_CONTEXT)["waits"] == 2 + 5


def test_synchronous_copies_are_copies_and_waits(watch: Watch) -> None:
    with Load() as load:
        sums = counted(
            watch, load, 0, "h2d_sync 3 1000", "d2h_sync 2 100", "kernel 1 0", field="launches", count=1
        )
        assert (sums["copies"], sums["waits"], sums["h2d_b"], sums["d2h_b"]) == (5, 5, 3000, 200)


def test_a_bubble_reaches_from_the_end_of_a_wait_to_the_next_launch(watch: Watch) -> None:
    with Load() as load:
        for asked, commands, launches in (
            (
                30 * MS,
                ("kernel 1 41", "wait 1 41 1000000", f"sleep {30 * MS}", "graph 1 41", "kernel 5 41"),
                6,
            ),
            (20 * MS, ("wait_context 1 1000000", f"sleep {20 * MS}", "kernel 2 41"), 2),
        ):
            watch.batches.clear()
            began = time.monotonic_ns()
            for command in commands:
                load.do(command)
            took = time.monotonic_ns() - began
            sums = counted(watch, load, 41, field="launches", count=launches)
            assert sums["bubbles"] == 1
            assert asked <= sums["bubble_ns"] <= took


def test_polls_that_are_not_ready(watch: Watch) -> None:
    with Load() as load:
        sums = counted(watch, load, 51, "poll 29 51 17", "kernel 1 51", field="launches", count=1)
        assert sums == {"launches": 1, "not_ready": 17}


def test_time_since_the_last_launch(watch: Watch) -> None:
    with Load() as load:
        before = time.monotonic_ns()
        load.do("kernel 1 61")
        after = time.monotonic_ns()
        row = watch.after(
            lambda: (last := watch.last(load.pid, 61)) is not None and last["launches"] == 0 and last
        )
        assert before <= row["t"] - row["since_launch_ns"] <= after
        assert np.isnan(row["launch_call_ns"])  # none in that interval


def test_names_losses_and_the_end_of_a_process(watch: Watch) -> None:
    with Load() as load:
        load.do("name planner")
        counted(watch, load, 71, "kernel 2 71", field="launches", count=2)
        row = watch.last(load.pid, 71)
        assert row is not None
        assert watch.strings.text(row["thread"]) == "planner"
        watch.batches.clear()
        load.do("bad_config")  # its stream cannot be read
        load.do("kernel 19 71")
        pid = load.pid
    watch.until(lambda: watch.sums(pid, 71).get("launches") == 19)
    watch.after(lambda: watch.rows("cost"))
    (cost,) = watch.rows("cost")
    assert cost["dropped"] == 1
    assert cost["call_ns"] / cost["calls"] / 1e3 == pytest.approx(watch.price_us, abs=0.006)
    assert cost["calls"] >= 22
    assert watch.last(pid, 71) is None


def test_copies_of_the_library_are_probed_once_each(watch: Watch, tmp_path: Path) -> None:
    other = copy_of_library(tmp_path)
    watch.batches.clear()
    with Load(other) as one, Load(other) as two:
        watch.until(lambda: watch.said("probes are on 2 libcuda files, 3 processes map one"))
        one.do("kernel 101 81")
        sums = counted(watch, two, 81, "kernel 103 81", field="launches", count=103)
        assert sums == {"launches": 103}
        one.exec(Path(shutil.copy(other, tmp_path / "libcuda.so.535")))
        watch.until(lambda: watch.said("probes are on 3 libcuda files, 3 processes map one"))
        assert counted(watch, one, 82, "kernel 107 82", field="launches", count=107) == {"launches": 107}


def test_a_library_in_another_mount_namespace(watch: Watch, tmp_path: Path) -> None:
    needs("tmpfs")
    hidden = copy_of_library(tmp_path).parent
    (inner := tmp_path / "inner").mkdir()
    files = watch.files
    script = f'mount --bind "{hidden}" "{inner}" && exec "$0" "$@"'
    with Load(inner / "libcuda.so.1", wrap=("unshare", "--mount", "sh", "-c", script)) as load:
        assert not (inner / "libcuda.so.1").exists()
        watch.after(lambda: watch.files == files + 1)
        assert counted(watch, load, 91, "kernel 109 91", field="launches", count=109) == {"launches": 109}


def test_a_library_that_was_deleted(watch: Watch, tmp_path: Path) -> None:
    with Load(copy_of_library(tmp_path)) as load:
        (tmp_path / "libcuda.so.1").unlink()
        files = watch.files
        watch.after(lambda: watch.files == files + 1)
        assert counted(watch, load, 92, "kernel 113 92", field="launches", count=113) == {"launches": 113}


def test_launches_over_the_budget_are_counted_in_bursts(watch: Watch) -> None:
    with Load() as load:
        watch.batches.clear()
        load.do("kernel 9001 101")
        watch.until(lambda: watch.said("kernel launches are counted for 0.25 s of every"))
        assert watch.sums(load.pid, 101)["launches"] == 9_001
        watch.after(lambda: (row := watch.last(load.pid, 101)) is not None and np.isnan(row["launches"]))
        row = watch.last(load.pid, 101)
        assert row is not None
        assert all(np.isnan(row[name]) for name in ("bubbles", "bubble_ns", "since_launch_ns"))
        watch.until(lambda: not load.is_probed(stream=101), 60)
        sums = counted(watch, load, 101, "graph 11 101", "d2d 3 5 101", field="copies", count=3)
        assert sums == {"graph_launches": 11, "copies": 3, "d2d_b": 15}
        watch.after(lambda: (row := watch.last(load.pid, 101)) is not None and row["launches"] == 0, 40)
        watch.until(lambda: watch.states.get("launches") == "ok", 60)
        assert counted(watch, load, 101, "kernel 127 101", field="launches", count=127) == {"launches": 127}
