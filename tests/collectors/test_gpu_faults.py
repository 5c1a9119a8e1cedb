"""Faults injected into single calls: each gives its reason, and nothing else stops."""

from __future__ import annotations

from pathlib import Path

import pytest
from nvml_stub import Stub
from nvml_stub.child import Child

from opusmon.collectors.gpu.collector import STALE_NS

FAST = {"interval_ms": 250, "slow_ms": 500, "reprobe_ms": 700}


@pytest.fixture
def stub(tmp_path: Path) -> Stub:
    return Stub(tmp_path).build()


def test_each_fault_has_its_own_reason_and_mends(stub: Stub) -> None:
    cases = {
        "nvmlDeviceGetPowerUsage": ("return 3", "power_mw", "not_supported", "not supported"),
        "nvmlDeviceGetTemperature": ("sentinel", "temp_c", "unavailable", "not available"),
        "nvmlDeviceGetClockInfo": ("return 4", "sm_clock_mhz", "no_permission", "no permission"),
        "nvmlDeviceGetCurrentClocksEventReasons": ("return 999", "throttle_mask", "error", "999"),
        "nvmlDeviceGetUtilizationRates": ("sentinel", "gpu_busy_pct", "unavailable", "not available"),
        "nvmlDeviceGetTotalEccErrors": ("sentinel", "ecc_corrected", "unavailable", "not available"),
        "nvmlDeviceGetPcieReplayCounter": ("return 3", "pcie_replays", "not_supported", "not supported"),
        "nvmlDeviceGetRemappedRows": ("return 13", "remap_pending", "not_supported", "too old"),
        "nvmlGpmMetricsGet": ("nan", "hbm_bw_pct", "unavailable", "no number"),
        "nvmlDeviceGetMemoryInfo_v2": ("sentinel", "mem_used_b", "unavailable", "not available"),
    }
    for call, (kind, *_) in cases.items():
        stub.fault(call, kind)
    with Child(stub.env(), **FAST) as child:
        row = child.wait("gpu")
        for _, field, state, words in cases.values():
            status = child.wait("status", of="gpu", field=field, scope="gpu 0")
            assert status["state"] == state, field
            assert words in status["reason"], field
            assert row[field] is None, field
        # derived from the clock that may not be read
        assert row["hbm_bw_bps"] is None
        assert row["mem_temp_c"] == 71
        stub.mend()
        for _, field, *_ in cases.values():
            child.wait("status", of="gpu", field=field, state="ok")
        place = child.mark()
        assert child.wait("gpu", after=place)["temp_c"] == 63


def test_nonsense_is_refused_and_zero_is_not(stub: Stub) -> None:
    nonsense = {
        "temp_c": "set 0 temp 250",
        "hbm_bw_pct": "gpm 1 10 140",
        "sm_util_pct": "gpm 2 2 -3",
        "power_mw": "set 3 power 30000000",
    }
    stub.configure(devices=6, lines=nonsense.values())
    stub.add("gpm 4 2 100.4", "gpm 4 10 0", "gpm 4 61 0")
    # gpu 5: as measured on an H200 with a short window, DRAM_BW_UTIL is NaN and the rest 0.0
    stub.add("gpm 5 10 nan", "gpm 5 2 0", "gpm 5 60 0", "gpm 5 3 12")
    with Child(stub.env(), **FAST) as child:
        for gpu, field in enumerate(nonsense):
            assert child.wait("gpu", gpu=gpu)[field] is None
            status = child.wait("status", of="gpu", field=field, scope=f"gpu {gpu}")
            assert "out of range" in status["reason"]
        zero, unfilled = child.wait("gpu", gpu=4), child.wait("gpu", gpu=5)
    assert zero["sm_util_pct"] == 100
    assert (zero["hbm_bw_pct"], zero["hbm_bw_bps"], zero["nvlink_tx_bps"]) == (0, 0, 0)
    assert (unfilled["hbm_bw_pct"], unfilled["sm_util_pct"], unfilled["nvlink_rx_bps"]) == (None, None, None)
    assert unfilled["sm_occupancy_pct"] == 12


def test_one_link_without_a_rate_is_named(stub: Stub) -> None:
    stub.add("field 0 165 4 0 3", "gpm 0 71 0 3")
    with Child(stub.env(), **FAST) as child:
        row = child.wait("nvlink", link=4)
        assert child.wait("nvlink", link=5)["state"] == 1
        status = child.wait("status", of="nvlink", field="state")
    assert (row["state"], row["tx_bps"]) == (None, None)
    assert row["rx_bps"] is not None
    assert status["scope"] == "gpu 0 link 4"


def test_lost_gpu_ends_alone_and_comes_back(stub: Stub) -> None:
    stub.configure(devices=4)
    with Child(stub.env(), **FAST) as child:
        child.wait("gpu", gpu=1)
        stub.fault("*", "return 15", gpu=1)
        event = child.wait("gpu_event", gpu=1, kind="lost")
        status = child.wait("status", of="gpu", field="", scope="gpu 1")
        place = child.mark()
        for gpu in (0, 2, 3):
            child.wait("gpu", lambda r: r["t"] > event["t"], after=place, gpu=gpu)
        assert [r for r in child.of("gpu", gpu=1) if r["t"] > event["t"]] == []
        stub.mend()
        back = child.wait("gpu_event", gpu=1, kind="back")
        child.wait("status", of="gpu", field="", scope="gpu 1", state="ok")
        child.wait("gpu", lambda r: r["t"] > back["t"], gpu=1)
        assert len(child.of("gpu_event", kind="lost")) == 1
    assert event["code"] == 15
    assert status["state"] == "unavailable"
    assert "lost" in status["reason"]


def test_unknown_error_from_every_call_is_a_lost_gpu(stub: Stub) -> None:
    stub.configure(devices=2)
    with Child(stub.env(), **FAST) as child:
        child.wait("gpu", gpu=1)
        stub.fault("*", "return 999", gpu=1)
        assert child.wait("gpu_event", kind="lost")["gpu"] == 1


def test_all_gpus_lost_ends_the_collector_for_a_restart(stub: Stub) -> None:
    with Child(stub.env(), **FAST) as child:
        child.wait("gpu")
        stub.fault("*", "return 15", gpu=0)
        child.wait("gpu_event", kind="lost")
        error = child.wait("error")
        assert error["reason"] == "every GPU is lost"


def test_hanging_calls_stop_their_gpus_and_not_the_exit(stub: Stub) -> None:
    stub.configure(devices=4)
    with Child(stub.env(), **FAST) as child:
        child.wait("gpu", gpu=2)
        stub.fault("nvmlDeviceGetPowerUsage", "hang", gpu=1)
        stub.fault("nvmlDeviceGetMemoryInfo_v2", "hang", gpu=2)
        status = child.wait("status", of="gpu", scope="gpu 1", state="stale")
        child.wait("status", of="gpu", scope="gpu 2", state="stale")
        place = child.mark()
        for gpu in (0, 3):
            child.wait("gpu", lambda r: r["t"] > status["t"], after=place, gpu=gpu)
        assert [r for r in child.of("gpu", gpu=1) if r["t"] > status["t"]] == []
        stub.remove("fault nvmlDeviceGetPowerUsage")
        child.wait("status", of="gpu", scope="gpu 1", state="ok")
        child.wait("gpu", lambda r: r["t"] > status["t"], gpu=1)
        stub.fault("nvmlShutdown", "hang")
        assert child.stop() < 3
    assert status["reason"] == "nvmlDeviceGetPowerUsage has not returned for 2 s"


def test_hanging_init_is_named(stub: Stub) -> None:
    stub.fault("nvmlInitWithFlags", "hang", gpu="*")
    with Child(stub.env(), **FAST) as child:
        status = child.wait("status", of="", state="stale")
        assert child.stop() < 3
    assert "nvmlInitWithFlags" in status["reason"]


def test_a_driver_that_is_slow_to_start_is_waited_for(stub: Stub) -> None:
    """As on a host of many GPUs without persistence mode: longer than two looks at whether it has answered."""
    stub.fault("nvmlInitWithFlags", f"delay {5 * STALE_NS // 2000}", gpu="*")
    with Child(stub.env(), **FAST) as child:
        assert child.wait("status", of="", state="stale")["reason"].startswith("nvmlInitWithFlags has not")
        child.wait("gpu", gpu=0)


def test_same_xid_twice_is_two_events(stub: Stub, tmp_path: Path) -> None:
    stub.configure(devices=2)
    log = tmp_path / "calls"
    with Child(stub.log(log), **FAST) as child:
        # the thread that waits for events registers first, after the first rows
        child.wait("gpu", lambda r: log.read_text().count("nvmlDeviceRegisterEvents") == 2)
        stub.event(1, 31)
        first = child.wait("gpu_event", kind="xid")
        stub.event(1, 31)
        second = child.wait("gpu_event", lambda r: r["t"] > first["t"], kind="xid")
        stub.event(0, 12345)
        strange = child.wait("gpu_event", gpu=0, kind="xid")
        stub.event(0, 1, kind=0x8000)
        recovery = child.wait("gpu_event", kind="recovery")
    assert (first["gpu"], first["code"]) == (second["gpu"], second["code"]) == (1, 31)
    assert "MMU" in first["detail"]
    assert strange["code"] == 12345
    assert recovery["detail"] == "reset the GPU"


def test_events_that_are_not_supported_are_said_so(stub: Stub) -> None:
    stub.add("set 0 event_mask 0")
    with Child(stub.env(), **FAST) as child:
        status = child.wait("status", of="gpu_event")
    assert "XID" in status["reason"]


def test_changes_become_events(stub: Stub) -> None:
    with Child(stub.env(), **FAST) as child:
        child.wait("gpu")
        stub.add("set 0 mask 5", "set 0 ecc_uncorrected 2", "set 0 remap_pending 1", "field 0 165 7 0")
        stub.add("set 0 pcie_replays 12")  # a count for the rules, no event: single ones are normal
        on = child.wait("gpu_event", kind="throttle_on")
        ecc, remap = child.wait("gpu_event", kind="ecc"), child.wait("gpu_event", kind="remap")
        down = child.wait("gpu_event", kind="link_down")
        stub.add("set 0 mask 1", "field 0 165 7 1", "set 0 power_limit 500000")
        off = child.wait("gpu_event", kind="throttle_off")
        up = child.wait("gpu_event", kind="link_up")
        child.wait("gpu_device", power_limit_mw=500000)
        child.wait("gpu", gpu=0, pcie_replays=12)
        kinds = [row["kind"] for row in child.of("gpu_event")]
    assert (on["code"], on["detail"], off["code"]) == (4, "software power cap", 4)  # idle is no event
    assert (ecc["code"], remap["code"]) == (2, 1)
    assert (down["code"], up["code"]) == (7, 7)
    assert len(kinds) == len(set(kinds)) == 6


def test_devices_come_and_go(stub: Stub) -> None:
    with Child(stub.env(), **FAST) as child:
        child.wait("gpu", gpu=0)
        stub.configure(devices=2)
        child.wait("gpu_device", gpu=1)
        child.wait("gpu", gpu=1)
        stub.configure(devices=1)
        child.wait("gpu_event", gpu=1, kind="lost")
        place = child.mark()
        child.wait("gpu", after=place, gpu=0)


@pytest.mark.parametrize(
    ("call", "code", "words", "remedy"),
    [
        ("nvmlInitWithFlags", 18, "library 13.580.159.04: they differ", "reboot"),
        ("nvmlInitWithFlags", 9, "driver is not loaded", "modprobe"),
        ("nvmlInitWithFlags", 4, "no permission", "root"),
        ("nvmlDeviceGetHandleByIndex_v2", 4, "no permission", "root"),
        ("nvmlInitWithFlags", 999, "NVML error 999", "nvidia-smi"),
    ],
)
def test_no_start(stub: Stub, call: str, code: int, words: str, remedy: str) -> None:
    stub.fault(call, f"return {code}")
    with Child(stub.env(), **FAST) as child:
        error = child.wait("error")
    assert words in error["reason"]
    assert remedy in error["remedy"]


def test_no_devices(stub: Stub) -> None:
    stub.configure(devices=0)
    with Child(stub.env(), **FAST) as child:
        assert "no GPU" in child.wait("error")["reason"]


def test_driver_replaced_while_running(stub: Stub) -> None:
    with Child(stub.env(), **FAST) as child:
        child.wait("gpu")
        stub.fault("*", "return 18", gpu=0)
        assert "differ" in child.wait("error")["reason"]


def test_no_library(stub: Stub) -> None:
    env = {**stub.env(), "LD_LIBRARY_PATH": ""}
    with Child(env, **FAST) as child:
        assert "libnvidia-ml.so.1" in child.wait("error")["reason"]


def test_old_pynvml_that_shadows_is_named(stub: Stub, tmp_path: Path) -> None:
    old = tmp_path / "old" / "pynvml"
    old.mkdir(parents=True)
    (old / "__init__.py").write_text("__version__ = '8.0.4'\ndef nvmlInit(): pass\n")
    with Child({**stub.env(), "PYTHONPATH": str(old.parent)}, **FAST) as child:
        error = child.wait("error")
    assert error["reason"] == "package pynvml 8.0.4 shadows nvidia-ml-py"
    assert error["remedy"] == "pip uninstall pynvml; pip install -U nvidia-ml-py"
