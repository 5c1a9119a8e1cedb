"""What the collector reports, on the real pynvml over the stub library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from nvml_stub import Stub
from nvml_stub.child import Child

MIB = 1_048_576
FAST = {"interval_ms": 250, "slow_ms": 500}


@pytest.fixture
def stub(tmp_path: Path) -> Stub:
    return Stub(tmp_path).build()


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-6)


def test_h200_values(stub: Stub) -> None:
    stub.configure(devices=2)
    stub.add("field 1 74 0 123456789", "set 1 mask 4")
    with Child(stub.env(), **FAST) as child:
        row = child.wait("gpu", gpu=1)
        links = [child.wait("nvlink", gpu=1, link=link) for link in range(18)]
        device = child.wait("gpu_device", gpu=1)
        child.wait("status", of="", state="ok")
        reasons = [s for s in child.of("status") if s["state"] != "ok"]
    assert row["gi"] == -1
    assert (row["mem_total_b"], row["mem_reserved_b"], row["mem_used_b"]) == (
        150754820096,
        644939776,
        2970419200,
    )
    assert row["hbm_bw_pct"] == 41.5
    # 3201 MHz x 2 x 6016 bit / 8 = 4.8143e12 B/s, the published 4.8 TB/s; 41.5 % of it
    assert row["hbm_bw_bps"] == near(0.415 * 4.814304e12)
    assert (row["sm_util_pct"], row["sm_occupancy_pct"], row["tensor_pct"]) == (84, 38, 25)
    assert (row["gpu_busy_pct"], row["mem_busy_pct"]) == (97, 55)
    assert (row["pcie_tx_bps"], row["pcie_rx_bps"]) == (200 * MIB, 2700 * MIB)
    assert row["nvlink_tx_bps"] == near((18 * 5280 + 153) * MIB)
    assert row["nvlink_rx_bps"] == near((18 * 10 + 153) * MIB)
    assert row["power_mw"] == 612345
    assert (row["temp_c"], row["mem_temp_c"]) == (63, 71)
    assert (row["sm_clock_mhz"], row["mem_clock_mhz"]) == (1980, 3201)
    assert (row["throttle_mask"], row["throttle_power_ns"]) == (4, 123456789)
    assert row["ecc_uncorrected"] == 0
    assert 200e6 <= row["dt_ns"] < 1e9
    assert [link["tx_bps"] for link in links] == [near((5280 + n) * MIB) for n in range(18)]
    assert [link["rx_bps"] for link in links] == [near((10 + n) * MIB) for n in range(18)]
    assert {link["state"] for link in links} == {1}
    assert links[0]["speed_bps"] == near(26562e6)
    assert links[0]["crc_errors"] == 0
    assert (device["name"], device["driver"], device["memory_kind"]) == (
        "NVIDIA H200",
        "580.159.04",
        "device",
    )
    assert (device["bus_width_bits"], device["max_sm_clock_mhz"], device["links"]) == (6016, 1980, 18)
    assert (device["gpm"], device["mig"], device["power_limit_mw"]) == (1, 0, 700000)
    assert reasons == []


def test_a100_link_rates_come_from_counters(stub: Stub) -> None:
    stub.configure(profile="a100")
    with Child(stub.env(), **FAST) as child:
        first = child.wait("nvlink", link=3)
        stub.add("field 0 138 3 1000", "field 0 139 5 64", "field 0 197 0 5000000")
        moved = child.wait("nvlink", lambda r: r["tx_bps"], link=3)
        other = child.wait("nvlink", link=5, t=moved["t"])
        whole = child.wait("gpu", t=moved["t"])
        place = child.mark()
        stub.add("field 0 138 3 10")
        back = child.wait("nvlink", lambda r: r["tx_bps"] is None, after=place, link=3)
        reason = child.wait("status", after=place, of="nvlink", field="tx_bps", state="error")
        mended = child.wait("status", lambda r: r["t"] > reason["t"], of="nvlink", field="tx_bps", state="ok")
        none = child.wait("status", of="gpu", field="hbm_bw_pct")
    assert first["tx_bps"] == 0
    # the field counts KiB: rate x interval gives back what was added
    dt_s = whole["dt_ns"] / 1e9
    assert moved["tx_bps"] * dt_s == near(1000 * 1024)
    assert (moved["rx_bps"], other["tx_bps"]) == (0, 0)
    assert other["rx_bps"] * dt_s == near(64 * 1024)
    assert whole["nvlink_tx_bps"] * dt_s == near(1000 * 1024)
    assert whole["pcie_tx_bps"] * dt_s == near(5_000_000)
    assert back["rx_bps"] == 0
    assert "went back" in reason["reason"]
    assert mended["reason"] == ""
    assert (none["state"], none["reason"]) == ("not_supported", "needs GPM (Hopper or newer)")
    assert whole["hbm_bw_pct"] is None
    assert whole["mem_busy_pct"] == 55


def test_ada_without_links_and_with_a_narrow_pcie_counter(stub: Stub) -> None:
    stub.configure(profile="ada", lines=["field * 197 0 5 0 1"])
    with Child(stub.env(), **FAST) as child:
        row = child.wait("gpu")
        links = child.wait("status", of="gpu", field="nvlink_tx_bps")
        pcie = child.wait("status", of="gpu", field="pcie_tx_bps")
        assert child.of("nvlink") == []
    assert (row["nvlink_tx_bps"], row["pcie_tx_bps"], row["pcie_rx_bps"]) == (None, None, 0)
    assert "no NVLink" in links["reason"]
    assert "32 bits" in pcie["reason"]


def test_gpm_without_links_gives_no_link_rates(stub: Stub) -> None:
    # a single H200 in a virtual machine: link count 0, GPM totals 0.0
    stub.add("field * 91 0 0", "gpm * 60 0", "gpm * 61 0")
    with Child(stub.env(), **FAST) as child:
        row = child.wait("gpu")
        child.wait("status", of="gpu", field="nvlink_tx_bps", state="not_supported")
    assert (row["nvlink_tx_bps"], row["nvlink_rx_bps"]) == (None, None)
    assert row["hbm_bw_pct"] == 41.5


def test_nvlink5_error_counters(stub: Stub) -> None:
    stub.configure(profile="b200", lines=["field * 215 2 7", "field * 208 2 3", "field * 295 2 9"])
    with Child(stub.env(), **FAST) as child:
        row = child.wait("nvlink", link=2)
    assert (row["recovery_errors"], row["crc_errors"], row["replay_errors"]) == (7, 3, 9)


def test_unified_memory_comes_from_the_host(stub: Stub) -> None:
    stub.configure(profile="gb10")
    with Child(stub.env(), **FAST) as child:
        row, device = child.wait("gpu"), child.wait("gpu_device")
        reserved = child.wait("status", of="gpu", field="mem_reserved_b")
        stub.add("set 0 zero_total 1")  # the other answer seen in the field: success, total 0
        place = child.mark()
        again = child.wait("gpu", after=place)
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total = int(meminfo["MemTotal"].split()[0]) * 1024
    assert row["mem_total_b"] == total
    assert again["mem_total_b"] == total
    assert 0 < row["mem_used_b"] < total
    assert device["memory_kind"] == "unified"
    assert reserved["state"] == "not_supported"


def test_old_driver_without_memory_v2(stub: Stub) -> None:
    stub.fault("nvmlDeviceGetMemoryInfo_v2", "return 13")
    with Child(stub.env(), **FAST) as child:
        row = child.wait("gpu")
        status = child.wait("status", of="gpu", field="mem_reserved_b")
    assert row["mem_used_b"] == 2970419200 + 644939776
    assert row["mem_reserved_b"] is None
    assert "too old" in status["reason"]


def test_mig_instances_have_rows_of_their_own(stub: Stub) -> None:
    stub.configure(
        profile="mig",
        lines=[
            "mig 0 1 0 74000000000 1000000000",
            "mig 0 2 0 74000000000 2000000000",
            "gpm 0 2 55 0 2",
            f"proc 0 {os.getpid()} 4096 50 c 2",
        ],
    )
    with Child(stub.env(), **FAST) as child:
        whole = child.wait("gpu", gi=-1)
        first, second = child.wait("gpu", gi=1), child.wait("gpu", gi=2)
        reason = child.wait("status", of="gpu", field="gpu_busy_pct", scope="gpu 0")
        power = child.wait("status", of="gpu", field="power_mw", scope="gpu 0 gi 2")
        process = child.wait("gpu_process")
        share = child.wait("status", of="gpu_process", field="sm_pct")
        place = child.mark()
        stub.remove("mig 0 2")
        event = child.wait("gpu_event", after=place, kind="mig")
        child.wait("status", lambda r: r["t"] > event["t"], scope="gpu 0 gi 2", field="power_mw", state="ok")
        place = child.mark()
        child.wait("gpu", after=place, gi=1)
        assert [r for r in child.rows[place:] if r.get("gi") == 2] == []
    assert (whole["mem_total_b"], whole["gpu_busy_pct"], whole["power_mw"]) == (150754820096, None, 612345)
    assert (first["mem_used_b"], second["mem_used_b"]) == (1e9, 2e9)
    assert (first["sm_util_pct"], second["sm_util_pct"]) == (84, 55)
    assert second["power_mw"] is None
    assert "MIG" in reason["reason"]
    assert "whole GPU" in power["reason"]
    assert (process["gi"], process["sm_pct"]) == (2, None)
    assert share["state"] == "not_supported"
    assert event["code"] == 1


def test_processes_without_their_arguments(stub: Stub) -> None:
    secret = "sk-very-secret-api-key"
    victim = subprocess.Popen([sys.executable, "-c", "input()", secret], stdin=subprocess.PIPE)
    try:
        stub.add(
            f"proc 0 {victim.pid} 1000000 55 c",
            f"proc 0 {victim.pid} 1000000 55 g",
            "proc 0 4194300 2000000 200 g",
            "sample 0 4194299 90",
        )
        with Child(stub.env(), **FAST) as child:
            mine = child.wait("gpu_process", pid=victim.pid)
            other = child.wait("gpu_process", pid=4194300)
            child.wait("gpu_process", lambda r: r["t"] > other["t"])
            pids = {row["pid"] for row in child.of("gpu_process")}
            kinds = {row["kind"] for row in child.of("gpu_process", pid=victim.pid)}
            printed = str(child.rows)
    finally:
        victim.communicate(b"\n")
    assert secret not in printed
    assert mine["name"].startswith("python")
    assert (mine["mem_b"], mine["sm_pct"], mine["kind"]) == (1e6, 55, "compute")
    assert mine["user"] == subprocess.check_output(["id", "-un"], text=True).strip()
    assert (other["name"], other["sm_pct"], other["kind"]) == ("outside my namespace", 100, "graphics")
    assert (pids, kinds) == ({victim.pid, 4194300}, {"compute"})


def test_only_the_pids_asked_for(stub: Stub) -> None:
    stub.add(f"proc 0 {os.getpid()} 1 10 c", "proc 0 1 1 10 c")
    with Child(stub.env(), **FAST, only_pids=[os.getpid()]) as child:
        child.wait("cost")
        assert {row["pid"] for row in child.of("gpu_process")} == {os.getpid()}


def test_cost_counts_calls_and_pcie_throughput_is_never_asked(stub: Stub) -> None:
    stub.fault("nvmlDeviceGetPowerUsage", "delay 15000")
    with Child(stub.env(), **FAST) as child:
        row = child.wait("cost", slowest="nvmlDeviceGetPowerUsage")
        names = {row["slowest"] for row in child.of("cost")}
    assert row["collector"] == "gpu"
    assert row["call_ns"] >= row["slowest_ns"] >= 15e6
    assert row["calls"] > 10
    assert 0 < row["cpu_ns"] < row["dt_ns"] * 2
    assert row["rss_b"] > 5e6
    # it spends 20 ms in the driver: it would be the slowest one
    assert "nvmlDeviceGetPcieThroughput" not in names
