"""What the collector reports, on the real pynvml over the stub library."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
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
        second = child.wait("nvlink", lambda r: r["crc_errors"] is not None, gpu=1, link=1)
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
    assert (row["ecc_uncorrected"], row["pcie_replays"]) == (0, 0)
    assert 200e6 <= row["dt_ns"] < 1e9
    assert [link["tx_bps"] for link in links] == [near((5280 + n) * MIB) for n in range(18)]
    assert [link["rx_bps"] for link in links] == [near((10 + n) * MIB) for n in range(18)]
    assert {link["state"] for link in links} == {1}
    assert links[0]["speed_bps"] == near(26562e6)
    assert (second["replay_errors"], second["recovery_errors"], second["crc_errors"]) == (0, 0, 0)
    assert {link["dt_ns"] for link in links if link["t"] == row["t"]} == {row["dt_ns"]}
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
        stub.add("field 0 138 3 1000", "field 0 139 2 64", "field 0 197 0 5000000")
        moved = child.wait("nvlink", lambda r: r["tx_bps"], link=3)
        other = child.wait("nvlink", link=2, t=moved["t"])
        whole = child.wait("gpu", lambda r: r["nvlink_tx_bps"])
        place = child.mark()
        stub.add("field 0 138 3 10")
        back = child.wait("nvlink", lambda r: r["tx_bps"] is None, after=place, link=3)
        reason = child.wait("status", after=place, of="nvlink", field="tx_bps", state="error")
        mended = child.wait("status", lambda r: r["t"] > reason["t"], of="nvlink", field="tx_bps", state="ok")
        none = child.wait("status", of="gpu", field="hbm_bw_pct")
    assert first["tx_bps"] == 0
    # the field counts KiB: rate x interval gives back what was added
    dt_s = moved["dt_ns"] / 1e9
    assert moved["tx_bps"] * dt_s == near(1000 * 1024)
    assert (moved["rx_bps"], other["tx_bps"]) == (0, 0)
    assert other["rx_bps"] * dt_s == near(64 * 1024)
    # the totals are read every tick, over an interval of their own
    whole_s = whole["dt_ns"] / 1e9
    assert whole["nvlink_tx_bps"] * whole_s == near(1000 * 1024)
    assert whole["nvlink_rx_bps"] * whole_s == near(64 * 1024)
    assert whole["pcie_tx_bps"] * whole_s == near(5_000_000)
    assert back["rx_bps"] == 0
    assert "went back" in reason["reason"]
    assert mended["reason"] == ""
    assert (none["state"], none["reason"]) == ("not_supported", "needs GPM (Hopper or newer)")
    assert whole["hbm_bw_pct"] is None
    assert whole["mem_busy_pct"] == 55


def test_a100_links_are_read_four_per_tick_in_turn(stub: Stub) -> None:
    # 12 links: 3 ticks of 250 ms for a round
    stub.configure(profile="a100")
    with Child(stub.env(), **FAST) as child:
        rows = [child.wait("nvlink", link=5)]
        for _ in range(2):
            rows.append(child.wait("nvlink", lambda r: r["t"] > rows[-1]["t"], link=5))
        child.wait("nvlink", lambda r: r["t"] > rows[-1]["t"], link=11)
        by_tick: dict[int, set[int]] = {}
        for row in child.of("nvlink"):
            by_tick.setdefault(row["t"], set()).add(row["link"])
    assert list(by_tick.values())[:4] == [{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {0, 1, 2, 3}]
    for before, after in pairwise(rows):
        # rows are stamped at the end of the poll, intervals at the call: the same to a few ms
        assert after["dt_ns"] == pytest.approx(after["t"] - before["t"], abs=30e6)
        assert after["dt_ns"] > 600e6


def test_totals_that_the_driver_does_not_sum_are_missing_with_a_reason(stub: Stub) -> None:
    stub.configure(profile="a100", lines=[f"field * {n} 4294967295 0 3" for n in (138, 139)])
    with Child(stub.env(), **FAST) as child:
        assert child.wait("gpu")["nvlink_tx_bps"] is None
        status = child.wait("status", of="gpu", field="nvlink_rx_bps")
        assert child.wait("nvlink", link=1)["rx_bps"] == 0
    assert status["state"] == "not_supported"


def test_link_errors_are_read_again_when_their_sum_changes(stub: Stub, tmp_path: Path) -> None:
    stub.add("field 0 91 0 5", "field 0 163 1 2")  # five links: five ticks
    log = tmp_path / "calls"
    with Child(stub.log(log), **FAST) as child:
        unread = child.wait("nvlink", link=4)
        reason = child.wait("status", of="nvlink", field="crc_errors", scope="gpu 0", state="unavailable")
        child.wait("status", of="nvlink", field="crc_errors", scope="gpu 0", state="ok")
        calm = len(link_reads(log))
        place = child.mark()
        once = child.wait("cost", after=place)
        child.wait("cost", lambda r: r["t"] > once["t"])  # two slow ticks have passed
        assert len(link_reads(log)) == calm
        stub.add("field 0 163 1 9", "field 0 161 3 1")
        crc = child.wait("gpu_event", kind="link_errors", code=1)
        replay = child.wait("gpu_event", kind="link_errors", code=3)
        after = child.wait("nvlink", lambda r: r["t"] >= replay["t"], link=3)
        row = child.wait("nvlink", t=after["t"], link=1)
        last = child.wait("nvlink", t=after["t"], link=4)
    assert unread["crc_errors"] is None
    assert "not read yet" in reason["reason"]
    assert (row["crc_errors"], row["replay_errors"], after["replay_errors"], last["crc_errors"]) == (
        9,
        0,
        1,
        0,
    )
    assert "crc errors" in crc["detail"]
    assert "replay errors" in replay["detail"]
    assert sorted(link_reads(log)[:calm]) == list(range(5))
    assert sorted(link_reads(log)[calm : calm + 4]) == list(range(4))


def link_reads(log: Path) -> list[int]:
    """Links whose CRC count was read, in order."""
    return [scope for entries in field_calls(log) for field, scope in entries if field == 163 and scope < 72]


def field_calls(log: Path) -> list[list[tuple[int, int]]]:
    """(field id, scope) of each entry, per call for field values."""
    calls = [
        line.split() for line in log.read_text().splitlines() if line.startswith("nvmlDeviceGetFieldValues")
    ]
    return [[tuple(map(int, entry.split(":"))) for entry in words[2:]] for words in calls]


EXPENSIVE = {138, 139, 140, 141, 161, 162, 163, 270, 271, 208, 215, 295}
"""Fields that take 1 ms per entry on an H200 (2 ms while its memory is busy), and NVLink 5's error counts."""


@pytest.mark.parametrize("profile", ["h200", "a100", "b200"])
def test_no_call_asks_for_more_than_eight_expensive_fields(stub: Stub, tmp_path: Path, profile: str) -> None:
    stub.configure(devices=2, profile=profile, lines=["set 0 mask 8"])
    log = tmp_path / "calls"
    with Child(stub.log(log), **FAST) as child:
        child.wait("gpu", gpu=1)
        once = child.wait("cost")
        child.wait("cost", lambda r: r["t"] > once["t"])
    calls = field_calls(log)
    costs = [sum(field in EXPENSIVE for field, _ in entries) for entries in calls]
    assert len(calls) > 10
    assert 0 < max(costs) <= 8
    # the event registration takes the driver up to a second: rows come first
    names = [line.split()[0] for line in log.read_text().splitlines()]
    assert names.index("nvmlDeviceRegisterEvents") > names.index("nvmlDeviceGetPowerUsage")


def test_the_dear_throttle_times_are_read_slowly_unless_they_run(stub: Stub, tmp_path: Path) -> None:
    stub.add("field 0 271 0 5")
    log = tmp_path / "calls"
    with Child(stub.log(log), interval_ms=250, slow_ms=60_000) as child:
        child.wait("gpu", throttle_brake_ns=5)
        stub.add("field 0 271 0 8", "field 0 74 0 3")
        repeated = child.wait("gpu", throttle_power_ns=3)
        stub.set(0, "mask", 0x80)
        child.wait("gpu", throttle_brake_ns=8)
        stub.add("field 0 271 0 11")
        child.wait("gpu", throttle_brake_ns=11)
    assert repeated["throttle_brake_ns"] == 5
    for entries in field_calls(log):
        fields = {field for field, _ in entries}
        assert not (fields & {270, 271} and fields & {74, 82})


def test_registering_for_events_delays_no_row(stub: Stub, tmp_path: Path) -> None:
    stub.configure(devices=2)
    stub.fault("nvmlDeviceRegisterEvents", "hang")
    log = tmp_path / "calls"
    with Child(stub.log(log), **FAST) as child:
        child.wait("gpu", lambda r: "nvmlDeviceRegisterEvents" in log.read_text())
        place = child.mark()
        child.wait("gpu", after=place, gpu=0)
        child.wait("gpu", after=place, gpu=1)


def test_nvlink5_error_counters_are_read_in_rotation(stub: Stub, tmp_path: Path) -> None:
    # their sums are not answered: one link per tick, round and round
    stub.configure(
        profile="b200", lines=["field * 215 2 7", "field * 208 2 3", "field * 295 2 9", "field * 91 0 5"]
    )
    log = tmp_path / "calls"
    with Child(stub.log(log), **FAST) as child:
        row = child.wait("nvlink", lambda r: r["crc_errors"] is not None, link=2)
        stub.add("field * 208 2 4")
        again = child.wait("nvlink", crc_errors=4, link=2)
        child.wait("gpu_event", kind="link_errors", code=2)
    assert (row["recovery_errors"], row["crc_errors"], row["replay_errors"]) == (7, 3, 9)
    assert again["t"] > row["t"]
    reads = [entries[0][1] for entries in field_calls(log) if entries[0][0] == 295 and entries[0][1] < 72]
    # link 0 once more at the start, to see whether links answer at all
    assert reads[:7] == [0, *range(5), 0]


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
