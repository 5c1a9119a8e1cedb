"""The stalls collector on a stub libcuda: real probes, stalls planted with known lengths and codes."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda_stub import Load, built, copy_of_library
from cuda_stub.stall_watch import StallWatch
from needs import lacking, needs

from opusmon.channels import WHOLE_CONTEXT
from opusmon.collectors.ebpf import stall_maps
from opusmon.collectors.stalls import StallsCollector
from opusmon.cuda_codes import CAPTURE_CODES

needs("root", "gcc")
if why := StallsCollector.probe():
    lacking("libbpf", f"probes cannot be set here: {why.reason}")

MS = 1_000_000


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stub of its own: probes that go slowly disturb no other test."""
    return Path(shutil.copy(built() / "libcuda.so.1", tmp_path_factory.mktemp("cuda") / "libcuda.so.1"))


@pytest.fixture(scope="module")
def watch(library: Path) -> Iterator[StallWatch]:
    """The collector at work. Processes are warm once they have launched for 0.3 s without taking memory."""
    with Load(library):
        it = StallWatch(warm_quiet_ns=300 * MS, warm_after_ns=10**15, faults_per_s=10_000, budget_pct=50.0)
        it.until(lambda: it.files)
        yield it
        it.leave()


@pytest.fixture
def load(watch: StallWatch, library: Path) -> Iterator[Load]:
    with Load(library) as it:
        yield it


def marked(watch: StallWatch, load: Load) -> None:
    """Wait until all that this process did so far has come as rows: a wait on a stream of its own ends it."""
    load.do(f"wait 1 999 {6 * MS}")
    watch.until(lambda: any(row["stream"] == 999 for row in watch.rows("wait", load.pid)))


def one(watch: StallWatch, load: Load, kind: str) -> dict[str, Any]:
    """The only row of a kind of a process."""
    watch.until(lambda: watch.rows(kind, load.pid))
    (row,) = watch.rows(kind, load.pid)
    return row


def warmed(watch: StallWatch, load: Load) -> None:
    """Launch for longer than it takes to be warm."""
    load.do("kernel 1 5")
    load.do(f"sleep {400 * MS}")
    load.do("kernel 1 5")
    marked(watch, load)
    load.do("kernel 1 5")
    marked(watch, load)


# -- waits


@pytest.mark.parametrize(
    ("command", "call", "stream", "size"),
    [
        (f"wait 1 17 {20 * MS}", "cuStreamSynchronize", 17, math.nan),
        (f"wait_ptsz 1 0 {20 * MS}", "cuStreamSynchronize", 2, math.nan),
        (f"wait_context 1 {20 * MS}", "cuCtxSynchronize", WHOLE_CONTEXT, math.nan),
        (f"wait_event 1 78 {20 * MS}", "cuEventSynchronize", WHOLE_CONTEXT, math.nan),
        (f"call cuMemcpyDtoH_v2 1 2 4099 0 {20 * MS}", "cuMemcpyDtoH_v2", 0, 4099),
        (f"call cuMemcpyDtoH_v2_ptds 1 2 11 0 {20 * MS}", "cuMemcpyDtoH_v2", 2, 11),
        (f"call cuMemcpyHtoD_v2 1 2 7 0 {20 * MS}", "cuMemcpyHtoD_v2", 0, 7),
    ],
)
def test_a_long_wait_is_an_event(
    watch: StallWatch, load: Load, command: str, call: str, stream: int, size: float
) -> None:
    begin = time.monotonic_ns()
    took = load.do(command)
    end = time.monotonic_ns()
    row = one(watch, load, "wait")
    assert 20 * MS <= row["dur_ns"] <= took
    assert begin + 20 * MS <= row["t"] <= end
    assert (row["call"], row["stream"], row["tid"], row["code"]) == (call, stream, load.pid, 0)
    assert row["size_b"] == size or (math.isnan(size) and math.isnan(row["size_b"]))
    assert (row["process"], row["thread"], row["count"]) == ("cuda_load", "cuda_load", 1)
    assert row["reason"] == "waiting for the GPU"
    assert "main+" in row["stack"].split(";")[-3]
    assert row["stack"].endswith("(cuda_load)")


def test_short_waits_are_none_and_time_asleep_inside_a_wait_is_told_once(
    watch: StallWatch, load: Load
) -> None:
    load.do("wait 1000 17 10000")
    load.do(f"wait 1 18 {30 * MS}")  # the stub sleeps in it
    marked(watch, load)
    rows = watch.rows("wait", load.pid)
    assert [row["stream"] for row in rows][-2:] == [18, 999]
    assert len(rows) < 100  # this machine may be busy
    assert all(row["dur_ns"] >= 5 * MS for row in rows)
    assert [row for row in watch.rows("off_cpu", load.pid) if row["call"] == "clock_nanosleep"] == []


def test_an_event_stands_for_its_stream_and_a_failed_wait_says_so(watch: StallWatch, load: Load) -> None:
    load.do("record 77 31")
    load.do(f"wait_event 1 77 {10 * MS}")
    assert one(watch, load, "wait")["stream"] == 31
    load.do(f"call cuStreamSynchronize 5 0 0 700 {10 * MS}")
    watch.until(lambda: len(watch.rows("wait", load.pid)) == 2)
    row = watch.rows("wait", load.pid)[1]
    assert (row["code"], row["reason"]) == (700, "waiting for the GPU, failed with CUDA error 700")


def test_a_flood_is_folded(watch: StallWatch, load: Load) -> None:
    """Of 100 equal stalls in a few intervals no more than 20 each stay single; none is lost."""
    load.do(f"wait 100 17 {6 * MS}")
    watch.until(lambda: sum(row["count"] for row in watch.rows("wait", load.pid)) == 100)
    rows = watch.rows("wait", load.pid)
    folded = [row for row in rows if row["reason"] == "shorter ones, folded"]
    assert folded
    assert len(rows) == 100 - sum(row["count"] - 1 for row in folded)
    assert sum(row["dur_ns"] for row in rows) >= 100 * 6 * MS


def test_a_wait_that_has_not_ended_is_told(
    watch: StallWatch, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall_maps, "OPEN_NS", 100 * MS)
    waiting = threading.Thread(target=load.do, args=(f"wait 1 17 {900 * MS}",))
    waiting.start()
    scope = f"pid {load.pid} thread {load.pid}"
    watch.until(lambda: any(row[1:3] == (scope, "stale") for row in watch.reasons()))
    assert watch.rows("wait", load.pid) == []
    assert any("cuStreamSynchronize has not returned" in row[3] for row in watch.reasons() if row[1] == scope)
    watch.until(lambda: any(row[1:3] == (scope, "ok") for row in watch.reasons()))
    assert one(watch, load, "wait")["dur_ns"] >= 900 * MS
    waiting.join()


# -- the scheduler


def test_time_in_a_lock(watch: StallWatch, load: Load) -> None:
    load.do("kernel 1 5")  # a thread is watched from its first call
    took = load.do(f"futex {30 * MS}")
    row = one(watch, load, "futex")
    assert row["dur_ns"] + 2 * MS >= 30 * MS
    assert row["dur_ns"] <= took
    assert (row["call"], row["reason"], row["stream"]) == ("futex", "lock", WHOLE_CONTEXT)
    assert math.isnan(row["code"])
    assert "syscall+" in row["stack"].split(";")[-1]


def test_time_asleep_and_threads_that_do_not_feed_a_gpu(watch: StallWatch, load: Load) -> None:
    load.do(f"sleep {20 * MS}")  # not watched yet
    load.do("graph 1 5")
    took = load.do(f"sleep {25 * MS}")
    marked(watch, load)
    rows = [row for row in watch.rows("off_cpu", load.pid) if row["call"] == "clock_nanosleep"]
    (row,) = rows
    assert 25 * MS <= row["dur_ns"] <= took
    assert row["reason"] == "sleep"


def test_time_in_the_run_queue(watch: StallWatch, load: Load) -> None:
    """Four threads that never rest share a CPU with it."""
    cpu = min(os.sched_getaffinity(0))
    load.do("kernel 1 5")
    os.sched_setaffinity(load.pid, {cpu})
    spin = ["taskset", "-c", str(cpu), "sh", "-c", "while :; do :; done"]
    hogs = [subprocess.Popen(spin) for _ in range(4)]
    try:
        load.do(f"spin {300 * MS}")
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    watch.until(lambda: watch.rows("run_queue", load.pid))
    rows = watch.rows("run_queue", load.pid)
    assert {row["reason"] for row in rows} <= {"preempted", "woken, no CPU was free"}
    assert "preempted" in {row["reason"] for row in rows}
    assert all(row["dur_ns"] >= 5 * MS for row in rows)
    assert sum(row["dur_ns"] for row in rows) < 3e9


def test_a_storm_of_page_faults(watch: StallWatch, load: Load) -> None:
    load.do("kernel 1 5")
    marked(watch, load)
    load.do("faults 20011")
    watch.until(lambda: sum(row["count"] for row in watch.rows("page_faults", load.pid)) >= 10_000)
    marked(watch, load)
    rows = watch.rows("page_faults", load.pid)
    assert 10_000 <= sum(row["count"] for row in rows) <= 20_011 + 500
    assert all(row["dur_ns"] >= 0.2e9 for row in rows)
    assert rows[0]["process"] == "cuda_load"


# -- memory and code


def test_memory_and_code_after_warm_up_only(watch: StallWatch, load: Load) -> None:
    load.do(f"call cuModuleLoadData 0 0 0 0 {3 * MS}")
    load.do("call cuMemAlloc_v2 0 1000 0 0 0")
    warmed(watch, load)
    assert watch.rows("module", load.pid) == watch.rows("alloc", load.pid) == []
    took = load.do(f"call cuLibraryLoadData 0 0 0 0 {7 * MS}")
    for size in (4096, 8192, 65_536):
        load.do(f"call cuMemAlloc_v2 0 {size} 0 0 {2 * MS}")
    load.do("call cuMemAlloc_v2 0 1 0 2 0")  # CUDA_ERROR_OUT_OF_MEMORY
    load.do(f"call cuMemFree_v2 7 0 0 0 {4 * MS}")
    load.do("call cuMemAllocAsync 0 512 5 0 0")  # cheap by design
    marked(watch, load)
    module = one(watch, load, "module")
    assert (module["call"], module["count"]) == ("cuLibraryLoadData", 1)
    assert 7 * MS <= module["dur_ns"] <= took
    allocs = watch.rows("alloc", load.pid)
    assert {row["call"] for row in allocs} == {"cuMemAlloc_v2"}
    assert sum(row["count"] for row in allocs) == 4
    assert sum(row["size_b"] for row in allocs) == 4096 + 8192 + 65_536 + 1
    assert sum(row["dur_ns"] for row in allocs) >= 6 * MS
    assert max(row["code"] for row in allocs) == 2
    free = one(watch, load, "free")
    assert free["dur_ns"] >= 4 * MS
    assert math.isnan(free["size_b"])
    assert "do_job+" in free["stack"]


def test_a_storm_of_allocations_is_a_row_an_interval(watch: StallWatch, load: Load) -> None:
    warmed(watch, load)
    for _ in range(500):
        load.do("call cuMemAlloc_v2 0 256 0 0 0")
    watch.until(lambda: sum(row["count"] for row in watch.rows("alloc", load.pid)) == 500)
    assert len(watch.rows("alloc", load.pid)) <= 8


# -- captures


def test_a_capture_that_ends_well(watch: StallWatch, load: Load) -> None:
    begin = time.monotonic_ns()
    load.do("call cuStreamBeginCapture_v2 7 0 0 0 0")
    load.do(f"sleep {12 * MS}")
    load.do("kernel 5 7")
    load.do("call cuStreamEndCapture 7 0 0 0 0")
    took = time.monotonic_ns() - begin
    row = one(watch, load, "capture")
    assert (row["reason"], row["code"], row["stream"], row["before"]) == ("ended", 0, 7, "")
    assert 12 * MS <= row["dur_ns"] <= took
    assert (row["by_tid"], row["by_call"]) == (0, "")
    assert math.isnan(row["by_code"])


@pytest.mark.parametrize("code", sorted(CAPTURE_CODES))
def test_a_capture_that_another_thread_breaks(watch: StallWatch, load: Load, code: int) -> None:
    load.do("call cuStreamBeginCapture_v2 7 0 0 0 0")
    load.do("kernel 3 7")
    load.do("ex 2 7")
    breaker = load.do(f"from watchdog cuEventQuery 5 0 0 {code} 0")
    load.do("from late cuMemAlloc_v2 0 1 0 900 0")  # the first one counts
    load.do("kernel 100 7")  # and the sequence ends with it
    load.do("call cuStreamEndCapture 7 0 0 901 0")
    row = one(watch, load, "capture")
    assert (row["code"], row["tid"], row["stream"]) == (901, load.pid, 7)
    assert row["reason"] == f"aborted: {CAPTURE_CODES[901]}"
    assert (row["by_tid"], row["by_thread"], row["by_call"], row["by_code"]) == (
        breaker,
        "watchdog",
        "cuEventQuery",
        code,
    )
    assert row["before"] == "cuLaunchKernel x3 on 0x7; cuLaunchKernelEx x2 on 0x7"
    assert "do_job+" in row["stack"]


@pytest.mark.parametrize("code", sorted(CAPTURE_CODES))
def test_a_capture_that_its_own_thread_breaks(watch: StallWatch, load: Load, code: int) -> None:
    load.do("call cuStreamBeginCapture_v2_ptsz 0 0 0 0 0")
    load.do("kernel_ptsz 2 0")
    load.do(f"call cuMemAlloc_v2 0 64 0 {code} 0")
    load.do(f"call cuStreamEndCapture_ptsz 0 0 0 {code} 0")
    row = one(watch, load, "capture")
    assert (row["code"], row["stream"], row["reason"]) == (code, 2, f"aborted: {CAPTURE_CODES[code]}")
    assert (row["by_tid"], row["by_call"], row["by_code"]) == (load.pid, "cuMemAlloc_v2", code)
    assert row["before"] == "cuLaunchKernel x2 on 0x2; cuMemAlloc_v2"


def test_an_end_that_fails_by_itself_or_in_another_thread(watch: StallWatch, load: Load) -> None:
    load.do("call cuStreamBeginCaptureToGraph 8 0 0 0 0")
    load.do("kernel 1 8")
    load.do("call cuStreamEndCapture 8 0 0 904 0")
    row = one(watch, load, "capture")
    assert (row["reason"], row["by_tid"], row["by_call"]) == (f"aborted: {CAPTURE_CODES[904]}", 0, "")
    load.do("call cuStreamBeginCapture_v2 8 0 0 0 0")
    other = load.do("from stranger cuStreamEndCapture 8 0 0 908 0")
    watch.until(lambda: len(watch.rows("capture", load.pid)) == 2)
    row = watch.rows("capture", load.pid)[1]
    assert (row["tid"], row["by_tid"], row["by_thread"]) == (load.pid, other, "stranger")
    assert (row["by_call"], row["by_code"]) == ("cuStreamEndCapture", 908)


def test_a_capture_that_does_not_begin_and_an_end_without_begin(watch: StallWatch, load: Load) -> None:
    load.do("call cuStreamBeginCapture_v2 0 0 0 900 0")
    row = one(watch, load, "capture")
    assert (row["call"], row["reason"]) == (
        "cuStreamBeginCapture_v2",
        f"did not begin: {CAPTURE_CODES[900]}",
    )
    load.do("call cuStreamEndCapture 9 0 0 0 0")
    watch.until(lambda: len(watch.rows("capture", load.pid)) == 2)
    row = watch.rows("capture", load.pid)[1]
    assert row["reason"] == "ended; its begin was not seen"
    assert math.isnan(row["dur_ns"])


def test_errors_of_captures_outside_of_one_break_none(watch: StallWatch, load: Load) -> None:
    load.do("call cuMemAlloc_v2 0 1 0 900 0")
    load.do("call cuStreamBeginCapture_v2 7 0 0 0 0")
    load.do("call cuMemAlloc_v2 0 1 0 2 0")  # fails, for another reason
    load.do("call cuStreamEndCapture 7 0 0 904 0")
    assert one(watch, load, "capture")["by_tid"] == 0


def test_the_sequence_keeps_the_last_sixteen(watch: StallWatch, load: Load) -> None:
    load.do("call cuStreamBeginCapture_v2 7 0 0 0 0")
    for stream in range(20):
        load.do(f"kernel {stream + 1} {100 + stream}")
    load.do("call cuStreamEndCapture 7 0 0 905 0")
    runs = one(watch, load, "capture")["before"].split("; ")
    assert len(runs) == 16
    assert (runs[0], runs[-1]) == ("cuLaunchKernel x5 on 0x68", "cuLaunchKernel x20 on 0x77")


def test_setting_up_while_a_capture_is_open(watch: StallWatch, load: Load) -> None:
    setting_up = ("cuCtxCreate_v4", "cuModuleLoadData", "cuLibraryLoadData")
    for call in setting_up:
        load.do(f"call {call} 0 0 0 0 0")  # not in a capture
    load.do("call cuStreamBeginCapture_v2 7 0 0 0 0")
    for call in setting_up:
        load.do(f"call {call} 0 0 0 0 0")
    load.do(f"call cuInit 0 0 0 0 {3 * MS}")
    load.do("call cuDevicePrimaryCtxRetain 0 0 0 0 0")  # it was there already: nothing was set up
    load.do(f"from second cuDevicePrimaryCtxRetain 0 1 0 0 {3 * MS}")
    load.do("call cuStreamEndCapture 7 0 0 0 0")
    watch.until(lambda: watch.rows("capture", load.pid))
    rows = watch.rows("init_in_capture", load.pid)
    assert [row["call"] for row in rows] == [
        "cuCtxCreate",
        "cuModuleLoadData",
        "cuLibraryLoadData",
        "cuInit",
        "cuDevicePrimaryCtxRetain",
    ]
    assert rows[-1]["thread"] == "second"
    assert rows[-1]["dur_ns"] >= 3 * MS
    assert rows[1]["reason"] == "loading of code while a capture is open"


# -- compilers


def test_a_compiler_under_a_serving_process(watch: StallWatch, load: Load, tmp_path: Path) -> None:
    ptxas = Path(shutil.copy("/bin/sleep", tmp_path / "ptxas"))
    load.do("kernel 1 5")
    took = load.do(f"run {ptxas} 0.06")
    load.do(f"run {shutil.copy('/bin/sleep', tmp_path / 'other')} 0.01")
    row = one(watch, load, "jit")
    assert (row["call"], row["process"], row["thread"]) == ("ptxas", "cuda_load", "ptxas")
    assert (row["code"], row["reason"]) == (0, "compiled")
    assert 60 * MS <= row["dur_ns"] <= took


def test_a_compiler_that_fails_below_a_child(watch: StallWatch, load: Load, tmp_path: Path) -> None:
    script = tmp_path / "cicc"
    script.write_text("#!/bin/sh\nsleep 0.03\nexit 3\n")
    script.chmod(0o700)
    killed = tmp_path / "ptxas-blackwell"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o700)
    driver = tmp_path / "driver"
    driver.write_text(f"#!/bin/sh\n{script}\n{killed}\ntrue\n")
    driver.chmod(0o700)
    load.do("kernel 1 5")
    load.do(f"run {driver} x")
    watch.until(lambda: len(watch.rows("jit", load.pid)) == 2)
    first, second = watch.rows("jit", load.pid)
    assert (first["call"], first["code"], first["reason"]) == ("cicc", 3, "failed with exit status 3")
    assert (second["call"], second["code"], second["reason"]) == ("ptxas-blackwell", -9, "killed by signal 9")
    assert first["dur_ns"] >= 30 * MS


def test_compilers_of_nobody_that_is_watched_are_none(watch: StallWatch, load: Load, tmp_path: Path) -> None:
    ptxas = Path(shutil.copy("/bin/sleep", tmp_path / "ptxas"))
    before = len(watch.rows("jit"))
    subprocess.run([ptxas, "0.01"], check=True)
    marked(watch, load)
    assert len(watch.rows("jit")) == before


# -- other libraries


def test_a_library_in_another_mount_namespace(watch: StallWatch, tmp_path: Path) -> None:
    needs("tmpfs")
    hidden = copy_of_library(tmp_path).parent
    (inner := tmp_path / "inner").mkdir()
    script = f'mount --bind "{hidden}" "{inner}" && exec "$0" "$@"'
    files = watch.files
    with Load(inner / "libcuda.so.1", wrap=("unshare", "--mount", "sh", "-c", script)) as load:
        assert not (inner / "libcuda.so.1").exists()
        watch.until(lambda: watch.files == files + 1)
        load.do(f"wait 1 91 {15 * MS}")
        row = one(watch, load, "wait")
        assert row["dur_ns"] >= 15 * MS
        assert row["stream"] == 91
