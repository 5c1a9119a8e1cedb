"""The pure parts of the GPU collector."""

from __future__ import annotations

import asyncio
import ctypes
import math
import struct
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusmon.channels import KEYFRAME_NS
from opusmon.collectors.crew import Crew
from opusmon.collectors.gpu import probe, throttle, xid
from opusmon.collectors.gpu.board import Board
from opusmon.collectors.gpu.counters import KIB, CounterRate
from opusmon.collectors.gpu.fields import NA_CODE, NO_NUMBER_CODE, FieldReader, decode
from opusmon.collectors.gpu.gpm import link_metric, screen
from opusmon.collectors.gpu.limits import NO_NUMBER, REFUSED, UNAVAILABLE, bounded, percent
from opusmon.collectors.gpu.memory import unified_memory
from opusmon.collectors.gpu.nvml import Nvml, missing
from opusmon.collectors.gpu.processes import mean_shares
from opusmon.collectors.missing import WENT_BACK, Missing
from opusmon.collectors.process_names import OUTSIDE, Users, process_name


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (0, 0.0),
        (100, 100.0),
        (100.9, 100.0),
        (101.1, REFUSED),
        (-0.1, REFUSED),
        (math.nan, NO_NUMBER),
        (math.inf, NO_NUMBER),
        (0xFFFFFFFF, UNAVAILABLE),
        (2**64 - 1, UNAVAILABLE),
    ],
)
def test_percent(value: float, kept: object) -> None:
    assert percent(value) == kept


def test_bounded_passes_a_reason_on() -> None:
    why = missing(3, "f")
    assert bounded(why, 1) is why


def test_link_metric_ids() -> None:
    # NVML_GPM_METRIC_NVLINK_L0_RX 62, L17_RX 96, L18_RX 212, L35_RX 246, L36_RX 405, L71_RX 475
    assert [link_metric(n) for n in (0, 17, 18, 35, 36, 71)] == [62, 96, 212, 246, 405, 475]


def test_screen_keeps_zeros_of_a_filled_window() -> None:
    assert screen([0, 0], [0.0, 0.0]) == [0.0, 0.0]
    assert screen([0, 0, 0], [math.nan, 0.0, 7.0]) == [NO_NUMBER, NO_NUMBER, 7.0]
    assert screen([3, 0], [0.0, 0.0])[1] == 0.0


@pytest.mark.parametrize(
    ("kind", "layout", "value"),
    [
        (0, "<d", 1.5),
        (1, "<I", 7),
        (2, "<Q", 2**40),
        (3, "<Q", 2**40),
        (4, "<q", 5),
        (5, "<i", 6),
        (6, "<H", 9),
    ],
)
def test_decode_by_value_type(kind: int, layout: str, value: float) -> None:
    raw = int.from_bytes(struct.pack(layout, value), "little")
    assert decode(kind, 0, raw) == (value, 0)


@pytest.mark.parametrize(
    ("kind", "raw", "code"),
    [
        (1, 0xFFFFFFFF, NA_CODE),
        (3, 0xFFFFFFFFFFFFFFFF, NA_CODE),
        (3, 0xFFFFFFFF, NA_CODE),
        (4, 0xFFFFFFFFFFFFFFFF, NO_NUMBER_CODE),
        (0, 0x7FF8000000000000, NO_NUMBER_CODE),
        (5, 0xFFFFFFFF, NO_NUMBER_CODE),
        (99, 7, NO_NUMBER_CODE),
    ],
)
def test_decode_refuses_sentinels(kind: int, raw: int, code: int) -> None:
    value, found = decode(kind, 0, raw)
    assert math.isnan(value)
    assert found == code


def test_decode_passes_the_drivers_code_on() -> None:
    value, code = decode(3, 3, 17)
    assert math.isnan(value)
    assert code == 3


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=40), st.integers(1, 10**10))
def test_counter_rate_gives_back_the_increment(steps: list[int], dt_ns: int) -> None:
    rate = CounterRate()
    counts = np.zeros(len(steps))
    first, gap = rate.update(counts, 5, KIB)
    assert gap is not None
    assert np.isnan(first).all()
    rates, _ = rate.update(counts + steps, 5 + dt_ns, KIB)
    known = ~np.isnan(rates)
    assert rates[known] * dt_ns / 1e9 == pytest.approx(np.array(steps)[known] * 1024.0)
    # only what no link can carry is refused
    assert (np.array(steps)[~known] * 1024.0 / (dt_ns / 1e9) > 1e12 * 0.999).all()


def test_counter_that_goes_back_is_missing_once() -> None:
    rate = CounterRate()
    rate.update(np.array([100.0]), 0, 1)
    rates, why = rate.update(np.array([10.0]), 10**9, 1)
    assert math.isnan(rates[0])
    assert why == WENT_BACK
    rates, why = rate.update(np.array([30.0]), 2 * 10**9, 1)
    assert (rates[0], why) == (20.0, None)


def test_mean_shares_clamps_and_drops_sentinels() -> None:
    assert mean_shares([(1, 40), (1, 60), (2, 250), (3, 0xFFFFFFFF)]) == {1: 50.0, 2: 100.0}


def fake_process(proc: Path, comm: str, cmdline: bytes) -> None:
    (proc / "7").mkdir()
    (proc / "7" / "comm").write_text(comm + "\n")
    (proc / "7" / "cmdline").write_bytes(cmdline)


@pytest.mark.parametrize(
    ("comm", "cmdline", "name"),
    [
        ("vllm", b"/usr/bin/vllm\0serve\0--api-key\0s3cret\0", "vllm"),
        ("tritonserver-lo", b"/opt/bin/tritonserver-long\0--token=s3cret\0", "tritonserver-long"),
        ("tritonserver-lo", b"tritonserver-long --token=s3cret\0", "tritonserver-long"),
        ("VLLM::EngineCor", b"python3\0-m\0s3cret\0", "VLLM::EngineCor"),
        ("bad\x1b[31m", b"x\0", "bad?[31m"),
    ],
)
def test_process_name(tmp_path: Path, comm: str, cmdline: bytes, name: str) -> None:
    fake_process(tmp_path, comm, cmdline)
    assert process_name(7, tmp_path) == name


def test_process_outside_the_namespace(tmp_path: Path) -> None:
    assert process_name(8, tmp_path) == OUTSIDE


def test_a_directory_service_that_hangs_delays_only_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr("pwd.getpwuid", lambda uid: answer.wait(5) and SimpleNamespace(pw_name="ana"))
    users = Users()
    assert users.name(12) == "uid 12"
    answer.set()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.daemon:
            thread.join(1)
    assert users.name(12) == "ana"


def test_unified_memory(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    400 kB\n")
    memory = unified_memory(tmp_path / "m")
    assert (memory["mem_total_b"], memory["mem_used_b"]) == (1_024_000, 614_400)
    assert isinstance(unified_memory(tmp_path / "none")["mem_total_b"], Missing)


def test_throttle_changes_ignore_idle_and_application_clocks() -> None:
    assert throttle.changes(0b0001, 0b0110) == (0x4, 0)
    assert throttle.changes(0x60, 0x20) == (0, 0x40)
    assert throttle.names(0x44) == "software power cap, hardware thermal limit"
    assert throttle.names(0x1000) == "reason 0x1000"


def test_every_xid_says_what_to_do() -> None:
    assert "fallen off the bus" in xid.meaning(79)
    assert "reboot" in xid.meaning(79)
    assert "catalogue" in xid.meaning(5000)
    for code, (what, todo) in xid.MEANINGS.items():
        assert len(f"{what}: {todo}") < 160, code


def test_board_says_changes_once_mends_and_repeats() -> None:
    board = Board("gpu")
    key = ("gpu", "temp_c", "gpu 0")
    board.update("0", {key: NO_NUMBER})
    first = board.due(0)
    assert [(s.state, s.field) for s in first] == [("ok", ""), ("unavailable", "temp_c")]
    board.update("0", {key: NO_NUMBER})
    assert board.due(1) == []
    assert len(board.due(KEYFRAME_NS)) == 2
    board.update("0", {})
    assert [(s.state, s.field) for s in board.due(KEYFRAME_NS + 1)] == [("ok", "temp_c")]


class FakeError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value


def fail(code: int) -> None:
    raise FakeError(code)


def test_edge_classifies_and_counts() -> None:
    module = SimpleNamespace(
        NVMLError=FakeError, answer=lambda: 5, fail=fail, garbled=lambda: b"\xff".decode()
    )
    nvml = Nvml(module)
    assert nvml.call("answer") == 5
    states = [nvml.call("fail", code).state for code in (3, 4, 13, 15, 28, 999, 4242)]
    assert states == ["not_supported", "no_permission", "not_supported", *["unavailable"] * 2, *["error"] * 2]
    assert "4242" in nvml.call("fail", 4242).reason
    assert nvml.call("garbled").state == "error"
    assert "nvidia-ml-py" in nvml.call("absent").reason
    assert nvml.first(("absent", "answer")) == 5
    assert nvml.good == 2
    assert {3, 4, 15} <= nvml.codes
    assert nvml.take_cost().calls == 11
    assert nvml.take_cost().calls == 0
    assert nvml.current is None


def test_kernel_module_version(tmp_path: Path) -> None:
    path = tmp_path / "version"
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version:\n"
    )
    assert probe.kernel_module_version(path) == "580.159.04"
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54  Tue Jun\n")
    assert probe.kernel_module_version(path) == "535.54"
    assert probe.kernel_module_version(tmp_path / "none") is None


def test_library_is_found_where_the_loader_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    cache = tmp_path / "ld.so.cache"
    assert not probe.library_found(cache, ())
    cache.write_bytes(b"..libc.so.6\0libnvidia-ml.so.1\0/usr/lib/libnvidia-ml.so.1\0")
    assert probe.library_found(cache, ())
    (tmp_path / "libnvidia-ml.so.1").touch()
    assert probe.library_found(tmp_path / "none", (str(tmp_path),))
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path}")
    assert probe.library_found(tmp_path / "none", ())


def test_probe_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "library_found", lambda: False)
    monkeypatch.setattr(probe, "kernel_module_version", lambda: None)
    assert "no NVIDIA driver" in probe.probe().reason
    monkeypatch.setattr(probe, "kernel_module_version", lambda: "580.1")
    assert "--gpus all" in probe.probe().remedy
    monkeypatch.setattr(probe, "library_found", lambda: True)
    assert probe.probe() is None
    monkeypatch.setattr(probe, "_binding_found", lambda: False)
    assert probe.probe().remedy == "pip install nvidia-ml-py"


def test_importing_and_probing_does_not_import_pynvml() -> None:
    code = (
        "import sys; from opusmon.collectors.gpu import GpuCollector; GpuCollector.probe(); "
        "sys.exit('pynvml' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_job_that_hangs_holds_up_no_other_and_one_thread_does_the_rest() -> None:
    crew, release = Crew("test", asyncio.get_running_loop(), patience_s=0.01), threading.Event()
    seen: list[str] = []

    def note(word: str) -> str:
        seen.append(threading.current_thread().name)
        return word

    calm = crew.post([partial(note, "a"), partial(note, "b"), partial(note, "c")])
    assert await calm.wait(5)
    assert [job.result() for job in calm.jobs] == ["a", "b", "c"]
    assert set(seen) == {"test-1"}
    mixed = crew.post([partial(note, "d"), partial(release.wait, 5), partial(note, "e"), partial(note, "f")])
    try:
        assert not await mixed.wait(0.2)
        assert [job.done for job in mixed.jobs] == [True, False, True, True]
        assert crew.size == 2
    finally:
        release.set()
    assert await mixed.wait(5)
    crew.close()


async def test_a_job_that_fails_says_so_where_its_result_is_asked_for() -> None:
    crew = Crew("test", asyncio.get_running_loop())
    both = crew.post([lambda: 1 // 0, lambda: 7])
    assert await both.wait(5)
    with pytest.raises(ZeroDivisionError):
        both.jobs[0].result()
    assert both.jobs[1].result() == 7
    assert crew.run_last(lambda: None, 5)
    crew.close()


async def test_the_loop_wakes_once_per_round() -> None:
    crew = Crew("test", asyncio.get_running_loop())
    woken = 0
    loop = asyncio.get_running_loop()
    plain = loop.call_soon_threadsafe

    def count(*args):
        nonlocal woken
        woken += 1
        return plain(*args)

    loop.call_soon_threadsafe = count
    assert await crew.post([lambda: None] * 8).wait(5)
    crew.close()
    assert woken == 1


def test_one_call_never_asks_for_more_than_eight_expensive_fields() -> None:
    entry = type(
        "Entry",
        (ctypes.Structure,),
        {
            "_fields_": [
                ("fieldId", ctypes.c_uint32),
                ("scopeId", ctypes.c_uint32),
                ("timestamp", ctypes.c_int64),
                ("latencyUsec", ctypes.c_int64),
                ("valueType", ctypes.c_uint32),
                ("nvmlReturn", ctypes.c_uint32),
                ("value", ctypes.c_uint64),
            ]
        },
    )
    nvml = SimpleNamespace(module=SimpleNamespace(c_nvmlFieldValue_t=entry))
    FieldReader(nvml, None, {"a": [(138, n) for n in range(8)], "b": [(164, n) for n in range(36)]})
    with pytest.raises(ValueError, match="more than 8"):
        FieldReader(nvml, None, {"a": [(161, n) for n in range(9)]})
