"""Parts of the stalls collector that need no kernel: warmth, page faults, budget, tracepoints, type information."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusmon.collectors.ebpf import stall_maps as kernel
from opusmon.collectors.ebpf.errors import ProbesUnavailable
from opusmon.collectors.ebpf.libcuda import LIBSSL, Scan, Scanner
from opusmon.collectors.ebpf.libcuda import parse as libraries
from opusmon.collectors.ebpf.stall_btf import exit_code_offset, member_offset
from opusmon.collectors.ebpf.stall_faults import Faults
from opusmon.collectors.ebpf.stall_notes import Sight, statements
from opusmon.collectors.ebpf.stall_probes import StallProbes
from opusmon.collectors.ebpf.stall_ration import HOLD_NS, LINGER_NS, REST_NS, CaptureHold, Ration
from opusmon.collectors.ebpf.stall_tracepoints import POINTS, layout, misfit
from opusmon.collectors.ebpf.stall_warm import Life, Lives, is_warm, started_ns

NS, MS = 1_000_000_000, 1_000_000

# -- warmth


def test_a_process_is_warm_when_it_has_launched_quietly_or_is_old() -> None:
    life = Life(started=0)
    assert not is_warm(life, 299 * NS)
    assert is_warm(life, 300 * NS)
    life = Life(started=0, active_since=10 * NS, active_at=29 * NS)
    assert not is_warm(life, 31 * NS)
    life.active_at = 30 * NS
    assert is_warm(life, 31 * NS)
    life.slow_at = 15 * NS
    assert not is_warm(life, 31 * NS)
    life.active_at = 35 * NS
    assert is_warm(life, 36 * NS)
    life = Life(started=0, active_since=None, active_at=None, slow_at=1)
    assert not is_warm(life, 299 * NS)
    assert is_warm(Life(started=290 * NS, warm=True), 291 * NS)


def test_lives_remember_what_was_before_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opusmon.collectors.ebpf.stall_warm.started_ns", lambda pid: 100 * NS)
    lives = Lives(quiet_ns=10 * NS, after_ns=1000 * NS)
    assert not lives.slow(7, 101 * NS, 101 * NS)
    lives.active(7, 102 * NS, 102 * NS)
    lives.active(7, 111 * NS, 111 * NS)
    assert not lives.slow(7, 111 * NS, 112 * NS)  # 9 s of launching
    lives.active(7, 120 * NS, 120 * NS)
    assert not lives.slow(7, 120 * NS, 120 * NS)
    lives.active(7, 131 * NS, 131 * NS)
    assert lives.slow(7, 132 * NS, 132 * NS)
    assert lives.slow(7, 133 * NS, 133 * NS)  # once warm, warm
    lives.keep([])
    assert not lives.slow(7, 134 * NS, 134 * NS)
    assert lives.slow(7, 1100 * NS, 1100 * NS)


def test_when_a_process_started() -> None:
    started = started_ns(os.getpid())
    assert started is not None
    assert 0 < time.monotonic_ns() - started < 3600 * NS
    assert started_ns(2**22 + 1) is None


# -- page faults


def test_storms_are_rates_over_the_interval() -> None:
    faults = Faults(1000)
    assert faults.storms({5: 10**9}, 0) == []  # how long that took is not known
    assert faults.storms({5: 10**9 + 500}, NS // 2) == []
    (storm,) = faults.storms({5: 10**9 + 1001, 6: 499}, NS)
    assert (storm.pid, storm.count, storm.dur_ns, storm.t) == (5, 501, NS / 2, NS)
    assert storm.kind == "page_faults"
    assert storm.reason == "over 1,000 a second"
    assert [one.pid for one in faults.storms({6: 499, 7: 5000}, 2 * NS)] == [7]


# -- the budget


def test_captures_hold_the_probes_for_a_bounded_time() -> None:
    hold = CaptureHold()
    assert not hold.holds(0)
    t = 0
    while t <= HOLD_NS:
        hold.saw(t)
        assert hold.holds(t)
        t += NS
    hold.saw(t)
    assert not hold.holds(t)
    rested = t + REST_NS
    hold.saw(rested - 1)
    assert not hold.holds(rested - 1)
    assert hold.holds(rested)
    assert not hold.holds(rested + LINGER_NS + 1)


def test_a_group_over_its_budget_is_off_but_for_bursts() -> None:
    ration = Ration(1.0)
    ration.since["launch"] = 0
    assert ration.wanted("launch", 6000, 0, NS, 1500)  # 6000 x 1.5 us = 0.9 %
    assert not ration.wanted("launch", 20_000, NS, 2 * NS, 1500)  # 3 %: one interval of three
    ration.since["launch"] = None
    assert not ration.wanted("launch", 0, 2 * NS, 3 * NS, 1500)
    assert ration.wanted("launch", 0, 3 * NS, 4 * NS, 1500)
    assert ration.bursts["launch"].every == 3
    assert not Ration(1.0).hold.holds(0)


def test_a_capture_keeps_a_group_on() -> None:
    ration = Ration(1.0)
    ration.since["launch"] = 0
    ration.hold.saw(NS)
    assert ration.wanted("launch", 10**6, 0, NS, 1500)


# -- tracepoints

FORMAT = """name: sched_switch
ID: 372
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;

\tfield:char prev_comm[16];\toffset:8;\tsize:16;\tsigned:0;
\tfield:pid_t prev_pid;\toffset:24;\tsize:4;\tsigned:1;
\tfield:int prev_prio;\toffset:28;\tsize:4;\tsigned:1;
\tfield:long prev_state;\toffset:32;\tsize:8;\tsigned:1;
\tfield:char next_comm[16];\toffset:40;\tsize:16;\tsigned:0;
\tfield:pid_t next_pid;\toffset:56;\tsize:4;\tsigned:1;
\tfield:int next_prio;\toffset:60;\tsize:4;\tsigned:1;
\tfield:__data_loc char[] filename;\toffset:64;\tsize:4;\tsigned:0;

print fmt: "prev_comm=%s"
"""


def test_fields_of_a_tracepoint() -> None:
    found = layout(FORMAT)
    assert found["prev_state"] == (32, 8)
    assert found["next_comm"] == (40, 16)
    assert found["filename"] == (64, 4)
    assert found["common_pid"] == (4, 4)


def test_a_tracepoint_laid_out_in_another_way_is_refused(tmp_path: Path) -> None:
    point = next(point for point in POINTS if point.event == "sched_switch")
    assert "no such tracepoint" in misfit(point, (tmp_path,))
    place = tmp_path / "events/sched/sched_switch"
    place.mkdir(parents=True)
    (place / "format").write_text(FORMAT)
    assert misfit(point, (tmp_path / "elsewhere", tmp_path)) == ""
    (place / "format").write_text(FORMAT.replace("prev_state;\toffset:32", "prev_state;\toffset:40"))
    assert misfit(point, (tmp_path,)) == "this kernel lays prev_state out in another way"
    (place / "format").write_text(FORMAT.replace("field:pid_t next_pid", "field:pid_t other"))
    assert "next_pid" in misfit(point, (tmp_path,))


class FakeBackend:
    """Refuses some programs."""

    origin = "fake"
    at_once = 1

    def __init__(self, refused: Collection[str]) -> None:
        self.refused = refused
        self.attached: list[str] = []

    def map_fd(self, name: str) -> int:
        return -1

    def attach(self, path: str, address: int, program: str, *, on_return: bool = False) -> object:
        return program

    def attach_tracepoint(self, category: str, event: str, program: str) -> object:
        if program in self.refused:
            raise ProbesUnavailable(f"{program}: the kernel refuses")
        self.attached.append(program)
        return program

    def detach(self, *links: object) -> None:
        pass

    def close(self) -> None:
        pass


class FakeMaps:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *words: self.told.__setitem__(name, words)


def set_up(
    refused: Collection[str], monkeypatch: pytest.MonkeyPatch, misfits: Mapping[str, str] | None = None
) -> tuple[StallProbes, FakeBackend, FakeMaps]:
    why = misfits or {}
    monkeypatch.setattr("opusmon.collectors.ebpf.stall_probes.misfit", lambda point: why.get(point.event, ""))
    backend, told = FakeBackend(refused), FakeMaps()
    return StallProbes(backend, told, lambda pid, mapped: -1, 5 * MS, NS), backend, told  # type: ignore[arg-type]


def notes_of(probes: StallProbes, **more: Any) -> Mapping[tuple[str, str, str], tuple[str, str, str]]:
    return statements(Sight(Scan(), Scan(), probes, Ration(1.0), 0.42, 7, False, NS, **more))


def test_a_program_that_the_kernel_refuses_is_replaced_or_told(monkeypatch: pytest.MonkeyPatch) -> None:
    probes, backend, told = set_up(
        {"on_switch", "on_exec"}, monkeypatch, {"sched_wakeup": "tracefs is not mounted"}
    )
    assert backend.attached == ["on_switch_plain", "on_exit", "on_newtask", "on_fault"]
    assert not probes.has_syscalls
    said = notes_of(probes)
    assert said["stall", "kind", "sched_process_exec"] == (
        "not_supported",
        "no jit: sched_process_exec: on_exec: the kernel refuses",
        "",
    )
    assert said["stall", "kind", "sched_wakeup"][2].startswith("sudo mount -t tracefs")
    assert said["stall", "call", "off_cpu"][0] == "not_supported"
    assert (
        said["stall", "", "ring"][1]
        == "at most 50 % of the ring buffer (8 MiB) was in use; 7 events lost so far"
    )
    assert told.told["name_compilers"][0][0] == "ptxas"
    assert told.told["configure"][:2] == (5 * MS, NS)
    assert len(told.told["name_compilers"][0]) <= kernel.MAX_COMPILERS


def test_where_all_is_well_little_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    probes, backend, _ = set_up((), monkeypatch)
    assert backend.attached == [point.programs[0] for point in POINTS]
    said = notes_of(probes)
    assert {key for key, (state, _, _) in said.items() if state != "ok"} <= {
        ("stall", "count", "page_faults"),
        ("stall", "kind", "tls"),
        ("stall", "code", "jit"),
    }
    assert said["", "", ""][1] == "no process maps libcuda"


def test_whose_page_faults_descendants_and_tls_count(monkeypatch: pytest.MonkeyPatch) -> None:
    probes, _, told = set_up((), monkeypatch)
    monkeypatch.setattr("opusmon.collectors.ebpf.stall_probes.parents", lambda: {5: 1, 6: 5, 7: 6})
    mapping = ()
    probes.follow(Scan({5: mapping}), Scan({5: mapping, 9: mapping}))
    assert told.told["watch"] == ({5: kernel.OF_CUDA | kernel.OF_TLS, 9: kernel.OF_TLS},)
    assert told.told["adopt"] == ({6: 5, 7: 5},)
    probes.follow(Scan({5: mapping}), Scan())
    assert told.told["adopt"] == ({},)  # each once


# -- type information


def btf(structure: list[tuple[str, int]], *, bitfields: bool = False) -> bytes:
    """A BTF of an int, an array, an enum and two structures, the second one `task_struct`."""
    strings, places = bytearray(b"\0"), {}

    def name(text: str) -> int:
        if text not in places:
            places[text] = len(strings)
            strings.extend(text.encode() + b"\0")
        return places[text]

    types = struct.pack("<IIII", name("int"), 1 << 24, 4, 32)
    types += struct.pack("<III", 0, 3 << 24, 0) + struct.pack("<III", 1, 1, 5)
    types += struct.pack("<III", name("colour"), 6 << 24 | 2, 4) + struct.pack(
        "<IIII", name("red"), 0, name("blue"), 1
    )
    types += struct.pack("<III", name("task_structure"), 4 << 24 | 1, 8) + struct.pack(
        "<III", name("exit_code"), 1, 8
    )
    flag = 1 << 31 if bitfields else 0
    types += struct.pack("<III", name("task_struct"), flag | 4 << 24 | len(structure), 64)
    for member, bits in structure:
        types += struct.pack("<III", name(member), 1, bits)
    head = struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(strings))
    return head + types + bytes(strings)


def test_where_a_member_lies() -> None:
    data = btf([("pid", 0), ("exit_state", 32), ("exit_code", 8 * 1234)])
    assert member_offset(data, "task_struct", "exit_code") == 1234
    assert member_offset(data, "task_struct", "exit") is None
    assert member_offset(data, "task", "exit_code") is None
    assert member_offset(btf([("exit_code", 3 << 24 | 16)], bitfields=True), "task_struct", "exit_code") == 2


@given(st.binary(max_size=200), st.booleans())
def test_no_type_information_breaks_the_reader(data: bytes, headed: bool) -> None:
    whole = struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, 100, 100, 50) + data if headed else data
    assert member_offset(whole, "task_struct", "exit_code") is None


def test_this_kernel_says_where_exit_codes_are() -> None:
    if not Path("/sys/kernel/btf/vmlinux").exists():
        pytest.skip("this kernel has no BTF")
    assert 0 < exit_code_offset() < 16_384
    assert exit_code_offset(Path("/nowhere")) == 0


# -- processes


def test_descendants_belong_to_the_outermost_watched_ancestor() -> None:
    parents = {1: 0, 10: 1, 20: 10, 30: 20, 40: 30, 50: 1, 60: 999}
    assert kernel.descendants([20, 30], parents) == {30: 20, 40: 20}
    assert kernel.descendants([], parents) == {}
    assert kernel.descendants([7], {7: 8, 8: 7}) == {8: 7, 7: 7}  # a table read while it changed


def test_parents_of_all_processes() -> None:
    assert kernel.parents()[os.getpid()] == os.getppid()
    assert kernel.parents("/proc/self") == {}


MAPS = b"""\
7f1000000000-7f1000100000 r-xp 00000000 fe:00 42                         /usr/lib/x86_64-linux-gnu/libssl.so.3
7f2000000000-7f2000100000 r-xp 00000000 fe:00 43                         /opt/conda/lib/libssl.so.1.1 (deleted)
7f3000000000-7f3000100000 r-xp 00000000 fe:00 44                         /usr/lib/libcuda.so.1
7f4000000000-7f4000100000 r-xp 00000000 fe:00 45                         /usr/lib/libssl.software.so
"""


def test_tls_libraries_in_the_maps_of_a_process() -> None:
    assert {mapping.inode for mapping in libraries(MAPS, LIBSSL)} == {42, 43}
    assert {mapping.inode for mapping in libraries(MAPS)} == {44}


def test_a_scan_of_the_processes_that_are_asked_for(tmp_path: Path) -> None:
    for pid in (3, 4):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "statm").write_text("10 1 1\n")
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (x) S " + "0 " * 40)
        (tmp_path / str(pid) / "maps").write_bytes(MAPS)
    scanner = Scanner(tmp_path, library=LIBSSL)
    assert scanner.scan(0, [4]).processes.keys() == {4}
    assert scanner.scan(1, [3, 5]).processes.keys() == {3}
    assert scanner.scan(2, []).processes == {}
