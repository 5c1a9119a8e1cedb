"""Parsers of the host collector: right numbers from whole files, none from broken ones."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opusmon.collectors.host import (
    cgroup_files,
    cgroup_tree,
    devices,
    engines,
    files,
    pressure,
    processes,
    system,
)
from opusmon.collectors.host.reading import Rates, total
from opusmon.collectors.missing import FIRST, WENT_BACK, Missing

STAT = b"4242 (a (b) c) S 1 4242 4242 0 -1 4194560 500 7 20 1 300 40 5 6 20 0 9 0 123456 1000 88 1844 1 1 0 0 0 0\n"
"""proc_pid_stat(5): (14) utime 300, (15) stime 40, (22) starttime 123456, (10) minflt 500, (12) majflt 20."""

PSI = b"some avg10=1.22 avg60=1.14 avg300=0.78 total=243685163\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=17\n"

DISKSTATS = b"""\
   7       0 loop0 1 0 8 0 0 0 0 0 0 0 0 0 0 0 0 0 0
 254       0 vda 230581 23192 8464322 301477 1325598 238466 76727376 267160 0 134424 613298 320413 58 32226616 30974 373890 13686
 254       1 vda1 200 1 4096 3 100 2 2048 1 0 1 1
 253       0 dm-0 9 0 99 0 9 0 99 0 0 0 0
"""

NET_DEV = b"""\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:    6438      59    0    0    0     0          0         0     6438      59    0    0    0     0       0          0
  eth0:601333474   17238    0    0    0     0          0         0  1444430   11445    0    0    0     0       0          0
"""


def test_a_name_may_hold_brackets_and_blanks() -> None:
    assert processes.parse_stat(STAT) == processes.Stat("a (b) c", False, 1, 500, 20, 300, 40, 123456)


def test_control_characters_in_a_name_do_not_get_through() -> None:
    stat = processes.parse_stat(STAT.replace(b"a (b) c", b"\x1b[2J\x07x\xff"))
    assert stat is not None
    assert stat.comm == "?[2J?x\N{REPLACEMENT CHARACTER}"


def test_a_zombie_has_ended() -> None:
    stat = processes.parse_stat(STAT.replace(b") S ", b") Z "))
    assert stat is not None
    assert stat.ended


@pytest.mark.parametrize(
    "text", [b"", b"12 (x", STAT[:60], STAT.replace(b"123456", b"12x456"), STAT.replace(b"300", b"9" * 30)]
)
def test_a_broken_stat_is_no_stat(text: bytes) -> None:
    assert processes.parse_stat(text) is None


def test_pressure_totals() -> None:
    assert pressure.totals(PSI) == {"some": 243685163, "full": 17}
    assert pressure.totals(PSI.splitlines(keepends=True)[0]) == {"some": 243685163}


def test_a_share_is_microseconds_of_a_second() -> None:
    assert pressure.share(250_000.0) == 25.0
    assert pressure.share(1_000_400.0) == 100.0
    assert pressure.share(FIRST) is FIRST


def test_sectors_and_bytes_by_device() -> None:
    found = devices.disk_sectors(DISKSTATS)
    assert found == {"loop0": (8, 0), "vda": (8464322, 76727376), "vda1": (4096, 2048), "dm-0": (99, 99)}
    assert devices.interface_bytes(NET_DEV) == {"lo": (6438, 6438), "eth0": (601333474, 1444430)}


def test_partitions_are_known_by_name_where_sys_does_not_say() -> None:
    names = ["sda", "sda1", "sda12", "nvme0n1", "nvme0n1p1", "mmcblk0", "mmcblk0p2", "vdb"]
    assert devices.without_partitions(names) == ["sda", "nvme0n1", "mmcblk0", "vdb"]


def test_cpu_columns() -> None:
    ticks = system.cpu_ticks(b"cpu  539401 5 73781 1668365 7908 0 1974 291 7 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    assert ticks == {
        "user": 539401,
        "nice": 5,
        "system": 73781,
        "idle": 1668365,
        "iowait": 7908,
        "irq": 0,
        "softirq": 1974,
        "steal": 291,
    }
    assert system.cpu_ticks(b"cpu  1 2 3\n") is None


def test_shared_memory_is_no_page_cache() -> None:
    kib = {"MemTotal": 1000, "MemAvailable": 900, "Buffers": 10, "Cached": 200, "Shmem": 50, "Dirty": 3}
    kib |= {"Writeback": 4, "SwapTotal": 100, "SwapFree": 70}
    got = system.memory(kib)
    assert got == {
        "mem_total_b": 1000,
        "mem_available_b": 900,
        "page_cache_b": 160,
        "dirty_b": 7,
        "swap_used_b": 30,
    }
    assert isinstance(system.memory({})["page_cache_b"], Missing)


def test_numbers_by_name() -> None:
    words = files.names("total_cache", "file", "Uid", "absent")
    text = b"file 12\nfile_mapped 99\ntotal_cache 7 kB\nUid:\t1000\t1001\nxfile 3\n"
    assert files.pick(words, text) == {"file": 12, "total_cache": 7, "Uid": 1000}
    assert files.pick(words, b"file 12") == {}  # cut: it may have been 123
    assert files.pick(words, b"file -12\ntotal_cache 1" + b"0" * 30 + b"\n") == {}


@pytest.mark.parametrize(
    ("words", "cores"),
    [
        ([b"50000", b"100000"], 0.5),
        ([b"max", b"100000"], None),
        ([b"-1", b"100000"], None),
        ([b"400000", b"50000"], 8),
    ],
)
def test_quotas(words: list[bytes], cores: float | None) -> None:
    assert cgroup_files.quota(words) == cores


@pytest.mark.parametrize("words", [[], [b"x", b"100000"], [b"50000"], [b"50000", b"-5"]])
def test_a_quota_that_makes_no_sense(words: list[bytes]) -> None:
    with pytest.raises(ValueError, match=r"to unpack|not a number"):
        cgroup_files.quota(words)


def test_groups_of_a_process() -> None:
    text = b"9:name=systemd:/s\n4:memory:/m/x:y\n2:cpu,cpuacct:/c\n0::/u\n"
    assert cgroup_tree.membership(text) == {"memory": "/m/x:y", "cpu": "/c", "cpuacct": "/c", "": "/u"}


@pytest.mark.parametrize(
    ("command_line", "program"),
    [
        (
            b"python3\0-m\0vllm.entrypoints.openai.api_server\0--api-key\0secret\0",
            "vllm.entrypoints.openai.api_server",
        ),
        (b"python3\0/usr/local/bin/vllm\0serve\0model\0", "vllm"),
        (b"python\0-u\0-m\0sglang.launch_server\0", "sglang.launch_server"),
        (b"python\0-c\0import vllm\0", ""),
        (b"python\0", ""),
        (b"", ""),
        (b"python\0-a\0-b\0-c2\0-d\0vllm\0", ""),  # only the head is looked at
    ],
)
def test_what_an_interpreter_runs(command_line: bytes, program: str) -> None:
    assert engines.program(command_line) == program


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("vllm", True),
        ("VLLM::EngineCor", True),
        ("sglang::schedul", True),
        ("sglang.launch_server", True),
        ("trtllm-serve", True),
        ("tritonserver", True),
        ("text-generation-launcher", True),
        ("llama-server", True),
        ("ollama", True),
        ("python3", False),
        ("novllm", False),
        ("vllmish", False),
        ("ollamas", False),
        ("sshd", False),
        ("", False),
    ],
)
def test_known_engines(name: str, known: bool) -> None:
    assert engines.is_engine(name) is known


def test_rates_begin_end_and_go_back() -> None:
    rates = Rates()
    assert rates.update({"a": 100}, 0) == {"a": FIRST}
    assert rates.update({"a": 150, "b": 1}, 500_000_000) == {"a": 100.0, "b": FIRST}
    assert rates.update({"a": 149, "b": 1}, 1_500_000_000) == {"a": WENT_BACK, "b": 0.0}
    assert rates.update({"a": 151}, 2_500_000_000) == {"a": 2.0}
    assert rates.update({"a": 151}, 2_500_000_000) == {"a": FIRST}  # no time has passed


def test_a_sum_with_a_new_member_and_one_that_went_back() -> None:
    assert total([1.0, FIRST, 2.5]) == 3.5
    assert total([1.0, WENT_BACK]) is WENT_BACK
    assert total([FIRST, FIRST]) is FIRST
    assert total([]) == 0.0


def test_idle_time_may_slip_but_work_may_not() -> None:
    shares = system.CpuShares()
    base = dict.fromkeys(("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"), 1000)
    assert shares.update(base) is FIRST
    slipped = shares.update(base | {"user": 1050, "idle": 1050, "iowait": 995})
    assert not isinstance(slipped, Missing)
    assert (slipped["user"], slipped["idle"], slipped["iowait"]) == (50.0, 50.0, 0.0)
    assert shares.update(base) is WENT_BACK
    assert shares.update(base | {"iowait": 0}) is WENT_BACK  # a thousand ticks are no slip


WHOLE = [
    STAT,
    PSI,
    DISKSTATS,
    NET_DEV,
    b"cpu  1 2 3 4 5 6 7 8 9 10\n",
    b"file 1\nshmem 2\n",
    b"0::/a\n4:memory:/b\n",
]


@settings(deadline=None)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.sampled_from(WHOLE).flatmap(lambda t: st.integers(0, len(t)).map(lambda n: t[:n])),
    )
)
def test_no_text_breaks_a_parser(text: bytes) -> None:
    stat = processes.parse_stat(text)
    assert stat is None or min(stat[2:]) >= 0
    for numbers in (pressure.totals(text), files.pick(system._MEMINFO, text), system.cpu_ticks(text) or {}):
        assert all(0 <= n < 10**20 for n in numbers.values())
    for traffic in (devices.disk_sectors(text), devices.interface_bytes(text)):
        assert all(0 <= n < 10**20 for pair in traffic.values() for n in pair)
    for path in cgroup_tree.membership(text).values():
        assert path.startswith("/")
        assert cgroup_tree.label({"": path}).isprintable()
    engines.program(text)
    assert files.plain(text).isprintable()


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_no_mount_table_breaks_the_reader(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    proc = tmp_path_factory.mktemp("proc")
    (proc / "self").mkdir()
    for line in (text, b"31 23 0:28 / " + text + b" rw - cgroup2 cgroup2 rw\n"):
        (proc / "self/mountinfo").write_bytes(line)
        for tree in cgroup_tree.hierarchies(str(proc), "/nowhere").values():
            tree.steps("/a/b")


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=6), st.integers(1, 10**10))
def test_a_rate_is_never_negative(counts: list[int], step_ns: int) -> None:
    rates = Rates()
    for turn, count in enumerate(counts):
        answer = rates.update({"x": count}, turn * step_ns)["x"]
        before = counts[turn - 1]
        if turn and count >= before:
            assert not isinstance(answer, Missing)
            assert math.isclose(answer, (count - before) * 1e9 / step_ns)
        else:
            assert isinstance(answer, Missing)


def test_a_file_longer_than_a_block_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a" * 200_000)
    assert files.read(str(tmp_path / "x")) == b"a" * 200_000
    assert files.read_short(str(tmp_path / "x"), 100) == b"a" * 100
    (tmp_path / "x").write_bytes(b"a" * 6_000_000)
    got = files.read(str(tmp_path / "x"))
    assert not isinstance(got, Missing)
    assert len(got) < 5_000_000


def test_why_a_file_cannot_be_read(tmp_path: Path) -> None:
    gone = files.read(str(tmp_path / "memory.max"))
    assert isinstance(gone, Missing)
    assert (gone.state, "memory.max" in gone.reason) == ("not_supported", True)
    folder = files.read(str(tmp_path))
    assert isinstance(folder, Missing)
    assert folder.state == "error"
    denied = files.why(PermissionError(13, "no"), "/proc/1/io")
    assert (denied.state, bool(denied.remedy)) == ("no_permission", True)
    assert files.why(ProcessLookupError(3, "no"), "/proc/1/io").state == "unavailable"
