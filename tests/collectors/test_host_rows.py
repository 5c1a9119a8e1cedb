"""Rows of `host` and `process` from a /proc made by hand: exact arithmetic, and NaN with a reason where it ends."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from opusmon.channels import HOST
from opusmon.clock import NS, ManualClock
from opusmon.collectors import facilities_local
from opusmon.collectors.facility import Host
from opusmon.collectors.host import processes as processes_module
from opusmon.collectors.host.engines import Engines
from opusmon.collectors.host.machine import Machine
from opusmon.collectors.host.pressure import CPU_FULL, NO_PSI
from opusmon.collectors.host.processes import _COLUMNS, NO_SCHEDSTAT, Processes, ProcessRow
from opusmon.collectors.missing import WENT_BACK
from opusmon.collectors.process_names import Users

PAGE_B = os.sysconf("SC_PAGE_SIZE")
HZ = os.sysconf("SC_CLK_TCK")


class Proc:
    """A /proc and a /sys under construction; counters say how far they have come since the start."""

    def __init__(self, root: Path) -> None:
        self.root, self.sys, self.clock = root / "proc", root / "sys", ManualClock(100 * NS)

    def put(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def device(self, name: str, *, real: bool) -> None:
        (self.sys / name / "device" if real else self.sys / name).mkdir(parents=True)

    def machine(self, **grown: int) -> None:
        """Everything of the host: `grown` is added to the counters of that name."""
        g = dict.fromkeys(
            [
                "user",
                "idle",
                "iowait",
                "steal",
                "irq",
                "ctxt",
                "intr",
                "swap",
                "fault",
                "direct",
                "some",
                "full",
                "rd",
                "wr",
                "rx",
                "tx",
            ],
            0,
        )
        g |= grown
        self.put(
            "stat",
            f"cpu  {1000 + g['user']} 0 0 {1000 + g['idle']} {10 + g['iowait']} {10 + g['irq']} 0 {10 + g['steal']} 0 0\n"
            f"cpu0 1 1 1 1 1 1 1 1 1 1\ncpu1 1 1 1 1 1 1 1 1 1 1\nintr {500 + g['intr']} 1 2 3\n"
            f"ctxt {700 + g['ctxt']}\nbtime 1\nprocesses 9\nprocs_running 4\nprocs_blocked 2\nsoftirq 1 2\n",
        )
        self.put("loadavg", "3.25 2.00 1.00 4/99 123\n")
        self.put(
            "meminfo",
            "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\nBuffers: 20 kB\nCached: 300 kB\nSwapCached: 1 kB\n"
            "SwapTotal: 50 kB\nSwapFree: 40 kB\nDirty: 5 kB\nWriteback: 6 kB\nShmem: 100 kB\n",
        )
        self.put(
            "vmstat",
            f"nr_free_pages 1\npgpgin 1\npswpin {100 + g['swap']}\npswpout 100\npgmajfault {50 + g['fault']}\n"
            f"pgsteal_direct_dma 1\npgsteal_direct_normal {7 + g['direct']}\npgscan_direct_throttle 9\noom_kill 3\n",
        )
        for what in ("cpu", "memory", "io"):
            words = "avg10=0.00 avg60=0.00 avg300=0.00 total="
            self.put(
                f"pressure/{what}",
                f"some {words}{g['some']}\nfull {words}{0 if what == 'cpu' else g['full']}\n",
            )
        disks = {"nvme0n1": 1, "nvme0n1p1": 5, "dm-0": 7, "loop0": 9}
        lines = (
            f" 1 {n} {name} 1 1 {factor * (100 + g['rd'])} 1 1 1 {factor * (100 + g['wr'])} 1 0 1 1\n"
            for n, (name, factor) in enumerate(disks.items())
        )
        self.put("diskstats", "".join(lines))
        rest = " 0" * 7
        nets = {"lo": 3, "eth0": 1, "bond0": 1, "veth1": 2}
        rows = (
            f"{name:>6}: {f * (9 + g['rx'])}{rest} {f * (9 + g['tx'])}{rest}\n" for name, f in nets.items()
        )
        self.put("net/dev", "Inter-| Receive | Transmit\n face |bytes |bytes\n" + "".join(rows))

    def process(
        self,
        pid: int,
        name: str = "vllm",
        *,
        started: int = 5000,
        n: int = 0,
        state: str = "S",
        parent: int = 1,
    ) -> None:
        """A process whose counters have all grown by `n` or what the code below makes of it."""
        ticks = f"{1000 + n} {500 + n}"
        self.put(
            f"{pid}/stat",
            f"{pid} ({name}) {state} {parent} 1 1 0 -1 0 {200 + n} 0 {20 + n} 0 {ticks} 0 0 20 0 3 0 {started} 9 9 9\n",
        )
        self.put(
            f"{pid}/status",
            f"Name:\t{name}\nUid:\t{os.getuid()}\t0\t0\t0\nVmHWM:\t9 kB\nVmRSS:\t   2048 kB\nVmSwap:\t  16 kB\nThreads:\t3\n"
            f"voluntary_ctxt_switches:\t{40 + n}\nnonvoluntary_ctxt_switches:\t{30 + 2 * n}\n",
        )
        self.put(f"{pid}/schedstat", f"123456 {1_000_000 * n} 77\n")
        self.put(f"{pid}/io", f"rchar: 1\nwchar: 1\nread_bytes: {4096 * n}\nwrite_bytes: {512 * n}\n")
        self.put(f"{pid}/cgroup", "0::/system.slice/vllm.service\n")
        self.put(f"{pid}/comm", f"{name[:15]}\n")
        for fd in range(4):
            self.put(f"{pid}/fd/{fd}", "")


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    made = Proc(tmp_path)
    made.machine()
    for name, real in (("nvme0n1", True), ("dm-0", False), ("loop0", False)):
        made.device(f"block/{name}", real=real)
    for name, real in (("lo", False), ("eth0", True), ("bond0", False), ("veth1", False)):
        made.device(f"class/net/{name}", real=real)
    return made


def host_row(machine: Machine) -> dict[str, Any]:
    return dict(zip(HOST.dtype.names or (), machine.read(), strict=True))


def second_row(proc: Proc, seconds: int = 2, **grown: int) -> tuple[dict[str, Any], Machine]:
    """A row over some seconds in which the counters have grown."""
    machine = Machine(str(proc.root), str(proc.sys), proc.clock)
    machine.read()
    proc.clock.advance(seconds * NS)
    proc.machine(**grown)
    return host_row(machine), machine


# -- host


def test_every_field_of_host(proc: Proc) -> None:
    row, machine = second_row(
        proc,
        user=60,
        idle=100,
        iowait=20,
        steal=10,
        irq=10,
        ctxt=400,
        intr=200,
        swap=8,
        fault=6,
        direct=10,
        some=500_000,
        full=200_000,
        rd=80,
        wr=40,
        rx=2000,
        tx=1000,
    )
    expected = {
        "t": 102 * NS,
        "dt_ns": 2 * NS,
        "cpus": 2,
        "cpu_busy_pct": 40.0,  # 60 + 10 + 10 of 200 ticks
        "cpu_iowait_pct": 10.0,
        "cpu_steal_pct": 5.0,
        "cpu_irq_pct": 5.0,
        "load1": 3.25,
        "runnable": 3,  # the reader runs too
        "blocked": 2,
        "switches_per_s": 200.0,
        "interrupts_per_s": 100.0,
        **{f"psi_{what}_some_pct": 25.0 for what in ("cpu", "memory", "io")},
        **{f"psi_{what}_full_pct": 10.0 for what in ("memory", "io")},
        "mem_total_b": 1000 * 1024,
        "mem_available_b": 600 * 1024,
        "page_cache_b": 220 * 1024,
        "dirty_b": 11 * 1024,
        "swap_used_b": 10 * 1024,
        "swap_in_bps": 4.0 * PAGE_B,
        "swap_out_bps": 0.0,
        "disk_read_bps": 40.0 * 512,
        "disk_write_bps": 20.0 * 512,
        "major_faults_per_s": 3.0,
        "direct_reclaim_pages_per_s": 5.0,
        "oom_kills": 3,
        "net_rx_bps": 1000.0,
        "net_tx_bps": 500.0,
    }
    assert math.isnan(row.pop("psi_cpu_full_pct"))
    assert row == pytest.approx(expected)
    assert machine.missing == {("host", "psi_cpu_full_pct", ""): CPU_FULL}


def test_a_kernel_without_pressure_says_how_to_get_it(proc: Proc) -> None:
    for what in ("cpu", "memory", "io"):
        (proc.root / "pressure" / what).unlink()
    machine = Machine(str(proc.root), str(proc.sys), proc.clock)
    row = host_row(machine)
    assert math.isnan(row["psi_io_some_pct"])
    assert machine.missing["host", "psi_io_some_pct", ""] is NO_PSI
    assert "psi=1" in NO_PSI.remedy


def test_a_pressure_file_without_the_full_line(proc: Proc) -> None:
    machine = Machine(str(proc.root), str(proc.sys), proc.clock)
    proc.put("pressure/io", "some avg10=0.00 avg60=0.00 avg300=0.00 total=5\n")
    machine.read()
    proc.clock.advance(NS)
    row = host_row(machine)
    assert row["psi_io_some_pct"] == 0.0
    assert math.isnan(row["psi_io_full_pct"])
    assert "lacks the line" in machine.missing["host", "psi_io_full_pct", ""].reason


def test_counters_that_go_back_give_no_rate(proc: Proc) -> None:
    row, machine = second_row(proc, user=-100, idle=50, ctxt=-5, rd=-10, rx=-3, fault=-1)
    for name in (
        *(
            "cpu_busy_pct",
            "cpu_iowait_pct",
            "switches_per_s",
            "disk_read_bps",
            "net_rx_bps",
            "major_faults_per_s",
        ),
    ):
        assert math.isnan(row[name]), name
        assert machine.missing["host", name, ""] is WENT_BACK
    assert row["disk_write_bps"] == 0.0
    assert row["interrupts_per_s"] == 0.0


def test_a_disk_that_is_plugged_in_adds_nothing_of_its_past(proc: Proc) -> None:
    machine = Machine(str(proc.root), str(proc.sys), proc.clock)
    machine.read()
    proc.clock.advance(NS)
    proc.device("block/sda", real=True)
    proc.machine(rd=10)
    text = (proc.root / "diskstats").read_text()
    proc.put("diskstats", text + " 8 0 sda 1 1 999999 1 1 1 999999 1 0 1 1\n")
    assert host_row(machine)["disk_read_bps"] == 10 * 512
    proc.clock.advance(NS)
    proc.put("diskstats", text + " 8 0 sda 1 1 1000000 1 1 1 999999 1 0 1 1\n")
    assert host_row(machine)["disk_read_bps"] == 512


def test_without_hardware_all_but_loopback_and_stacked_devices_count(proc: Proc) -> None:
    (proc.sys / "block/nvme0n1/device").rmdir()
    (proc.sys / "class/net/eth0/device").rmdir()
    row, _ = second_row(proc, seconds=1, rd=10, rx=100)
    assert row["disk_read_bps"] == 10 * 512  # not the partition, dm or loop
    assert row["net_rx_bps"] == (1 + 1 + 2) * 100  # eth0, bond0, veth1


def test_without_sys_partitions_are_left_out_by_name(proc: Proc) -> None:
    proc.sys.rename(proc.sys.with_name("hidden"))
    row, _ = second_row(proc, seconds=1, rd=10)
    assert row["disk_read_bps"] == 10 * 512


def test_a_hidden_path_of_a_disk_does_not_count(proc: Proc) -> None:
    (proc.sys / "block/nvme0n1/hidden").write_text("1\n")
    proc.device("block/sdb", real=True)
    row, _ = second_row(proc, seconds=1, rd=10)
    assert row["disk_read_bps"] == 0.0


@pytest.mark.parametrize("text", ["", "garbage", "cpu  1 2 3\n", "\0\xff\n" * 50, "9" * 5000])
def test_nonsense_in_any_file_is_missing_never_zero(proc: Proc, text: str) -> None:
    names = ("stat", "loadavg", "meminfo", "vmstat", "pressure/cpu", "pressure/memory", "pressure/io")
    for name in (*names, *(("diskstats", "net/dev") if text else ())):
        proc.put(name, text)
    machine = Machine(str(proc.root), str(proc.sys), proc.clock)
    for _ in range(2):
        row = host_row(machine)
        proc.clock.advance(NS)
    gone = {field.name for field in HOST.fields} - {"dt_ns"}
    gone -= set() if text else {"disk_read_bps", "disk_write_bps", "net_rx_bps", "net_tx_bps"}
    assert {name for name in gone if not math.isnan(row[name])} == set()
    assert {name for _, name, _ in machine.missing} == gone


def test_no_proc_at_all(tmp_path: Path) -> None:
    machine = Machine(str(tmp_path / "no"), str(tmp_path / "no"), ManualClock())
    row = host_row(machine)
    assert all(math.isnan(row[field.name]) for field in HOST.fields if field.name != "dt_ns")
    assert {name for _, name, _ in machine.missing} == {f.name for f in HOST.fields} - {"dt_ns"}


def test_doctor_names_a_kernel_without_pressure(proc: Proc) -> None:
    host = Host(proc.root.parent, env={})
    assert facilities_local.pressure(host).state == "ok"
    (proc.root / "pressure/cpu").unlink()
    gone = facilities_local.pressure(host)
    assert (gone.state, "psi=1" in gone.remedy) == ("limited", True)


# -- process


class Reader:
    """Processes of a made /proc, and their rows by pid and field."""

    def __init__(self, proc: Proc) -> None:
        self.proc, self.all = proc, Processes(str(proc.root), proc.clock, Users())

    def rows(self, *pids: int, names: str = "", up_s: int = 1000) -> dict[int, ProcessRow]:
        return {row.pid: row for row in self.all.read(dict.fromkeys(pids, names), up_s * NS)}


def fields(row: ProcessRow) -> dict[str, float]:
    return dict(zip(_COLUMNS, row.values, strict=True))


def test_every_field_of_process(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes_module, "TICKS_PER_S", 100)
    monkeypatch.setattr(processes_module, "_folder_size", lambda path: len(list(Path(path).iterdir())))
    reader = Reader(proc)
    proc.process(7)
    assert reader.rows(7) == {}
    proc.process(7, n=100)
    proc.clock.advance(2 * NS)
    row = reader.rows(7)[7]
    assert (row.t, row.dt_ns, row.name, row.cgroup) == (
        102 * NS,
        2 * NS,
        "vllm",
        "/system.slice/vllm.service",
    )
    assert row.user == Users().name(os.getuid())
    got = fields(row)
    assert got == pytest.approx(
        {
            "cpu_pct": 2 * 50 * 100 / HZ,
            "cpu_system_pct": 50 * 100 / HZ,
            "run_delay_pct": 5.0,  # 0.1 s of 2 s
            "rss_b": 2048 * 1024,
            "swap_b": 16 * 1024,
            "threads": 3,
            "fds": 4,
            "major_faults_per_s": 50.0,
            "minor_faults_per_s": 50.0,
            "voluntary_switches_per_s": 50.0,
            "forced_switches_per_s": 100.0,
            "read_bps": 50 * 4096,
            "write_bps": 50 * 512,
            "age_ns": 950 * NS,  # up 1000 s, started after 5000 ticks
        }
    )
    assert reader.all.missing == {}


def test_a_pid_taken_by_another_process_is_a_new_series(proc: Proc) -> None:
    reader = Reader(proc)
    proc.process(7, n=10)
    reader.rows(7)
    proc.clock.advance(NS)
    proc.process(7, n=1_000_000, started=6000)
    assert reader.rows(7) == {}
    proc.clock.advance(NS)
    proc.process(7, n=1_000_001, started=6000)
    assert fields(reader.rows(7)[7])["major_faults_per_s"] == 1.0
    proc.clock.advance(NS)
    proc.process(7, started=6000)
    row = fields(reader.rows(7)[7])
    assert math.isnan(row["cpu_pct"])
    assert math.isnan(row["read_bps"])
    assert reader.all.missing["process", "cpu_pct", "pid 7"] is WENT_BACK


def test_the_ended_and_zombies_have_no_row(proc: Proc) -> None:
    reader = Reader(proc)
    proc.process(7, state="Z")
    for _ in range(2):
        proc.clock.advance(NS)
        assert reader.rows(7, 8) == {}
    assert reader.all.lives == {}


def test_files_that_a_kernel_or_a_user_lacks(proc: Proc) -> None:
    reader = Reader(proc)
    for n in range(2):
        proc.process(7, n=n)
        (proc.root / "7/schedstat").unlink()
        (proc.root / "7/io").unlink()
        (proc.root / "7/cgroup").unlink()
        proc.put("7/status", "Name:\tx\nThreads:\t3\n")
        rows = reader.rows(7)
        proc.clock.advance(NS)
    got = fields(rows[7])
    assert (rows[7].cgroup, rows[7].user) == ("", "")
    for name in ("run_delay_pct", "read_bps", "write_bps", "rss_b", "swap_b", "voluntary_switches_per_s"):
        assert math.isnan(got[name])
        assert ("process", name, "pid 7") in reader.all.missing
    assert reader.all.missing["process", "run_delay_pct", "pid 7"] is NO_SCHEDSTAT
    assert ("process", "cgroup", "pid 7") in reader.all.missing
    assert got["threads"] == 3


def test_a_kernel_that_writes_zeros_is_not_counting(proc: Proc) -> None:
    reader = Reader(proc)
    for _ in range(2):
        proc.process(7)
        proc.put("7/schedstat", "0 0 0\n")
        rows = reader.rows(7)
        proc.clock.advance(NS)
    assert math.isnan(fields(rows[7])["run_delay_pct"])


def test_the_long_name_counts_while_it_fits_the_short_one(proc: Proc) -> None:
    reader = Reader(proc)
    proc.process(7, "VLLM::EngineCor")
    reader.rows(7)
    proc.clock.advance(NS)
    assert reader.rows(7, names="VLLM::EngineCore")[7].name == "VLLM::EngineCore"
    proc.process(7, "python3")
    assert reader.rows(7, names="VLLM::EngineCore")[7].name == "python3"


def test_open_files_are_listed_now_and_then_where_the_kernel_does_not_count_them(
    proc: Proc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes_module, "_folder_size", lambda _: 0)
    reader = Reader(proc)
    got = []
    for n in range(7):
        proc.process(7, n=n)
        proc.put("7/fd/9", "")
        got += [fields(row)["fds"] for row in reader.rows(7).values()]
        (proc.root / "7/fd/9").rename(proc.root / f"7/fd/1{n}")
        proc.clock.advance(NS)
    assert got == [5, 5, 5, 5, 10, 10]  # one more each second, listed at 0 and 5 s


def test_a_wait_that_began_long_ago_is_not_over_the_whole_time(proc: Proc) -> None:
    reader = Reader(proc)
    for n in (0, 3000):
        proc.process(7, n=n)
        rows = reader.rows(7)
        proc.clock.advance(NS)
    assert fields(rows[7])["run_delay_pct"] == 100.0


# -- engines


def test_engines_are_found_by_name_or_by_what_python_runs(proc: Proc) -> None:
    proc.process(1, "init")
    proc.process(20, "vllm", started=77)
    proc.process(21, "python3")
    proc.put("21/cmdline", "python3\0-m\0sglang.launch_server\0--api-key\0sglang\0")
    proc.process(22, "python3")
    proc.put("22/cmdline", "python3\0train.py\0--name\0vllm\0")
    proc.process(23, "vllm", parent=2)  # a kernel thread
    proc.process(24, "bash")
    proc.put("24/cmdline", "bash\0vllm\0")
    engines = Engines(str(proc.root))
    assert engines.look() == {20: 77, 21: 5000}
    assert not engines.hidden
    (proc.root / "20").rename(proc.root / "gone")
    proc.process(22, "VLLM::Worker_TP")
    assert engines.look() == {21: 5000, 22: 5000}


def test_hidden_processes_are_noticed(proc: Proc) -> None:
    proc.process(20)
    engines = Engines(str(proc.root))
    engines.look()
    assert engines.hidden


def test_many_processes_are_looked_at_in_turns(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opusmon.collectors.host.engines.MAX_LOOKS", 10)
    for pid in range(1, 31):
        proc.process(pid, "sh")
    engines = Engines(str(proc.root))
    for _ in range(3):
        assert engines.look() == {}
    proc.process(13, "vllm")  # renamed: found when its turn comes
    proc.process(99, "ollama")  # new: found at once
    found = [set(engines.look()) for _ in range(4)]
    assert found[0] >= {99}
    assert found[3] == {13, 99}
