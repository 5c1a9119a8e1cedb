"""Parts of the streams collector that need no kernel: finding, deciding, subtracting."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from cuda_stub import built
from hypothesis import given
from hypothesis import strategies as st
from needs import needs

from opusmon.channels import STREAM
from opusmon.collectors.ebpf import bcc_import, elf, headers, stream_table
from opusmon.collectors.ebpf.attach import KEEP_UNUSED, MAX_LIBRARIES, Libraries
from opusmon.collectors.ebpf.errors import ProbesUnavailable
from opusmon.collectors.ebpf.libcuda import Mapping, Scan, Scanner, parse
from opusmon.collectors.ebpf.maps import possible_cpus
from opusmon.collectors.ebpf.source_text import whole
from opusmon.collectors.ebpf.stream_rows import KEY, VALUE, Coverage, Differ, bin_edges_ns
from opusmon.collectors.ebpf.stream_timing import TimedLaunches
from opusmon.collectors.ebpf.symbols import ENTRIES
from opusmon.collectors.notes import Notes

NS = 1_000_000_000

# -- symbols

SYMBOLS = """
cuLaunchKernel cuLaunchKernel_ptsz cuLaunchKernelEx cuLaunchKernelEx_ptsz cuLaunchCooperativeKernel_ptsz
cuGraphLaunch_ptsz cuStreamSynchronize_ptsz cuCtxSynchronize cuCtxSynchronize_v2 cuEventSynchronize cuEventQuery
cuStreamQuery_ptsz cuMemcpyHtoDAsync_v2_ptsz cuMemcpyDtoH_v2_ptds cuMemcpy_ptds cuMemcpyAsync_ptsz
cuMemcpyPeerAsync_ptsz cuMemcpy2DAsync_v2_ptsz cuMemcpy3D_v2_ptds cuEventRecordWithFlags_ptsz
"""


def test_names_of_the_driver_are_in_the_table() -> None:
    assert set(SYMBOLS.split()) <= ENTRIES.keys()
    assert not {"cuCtxSynchronize_ptsz", "cuEventQuery_ptsz", "cuMemcpyHtoD_v2_ptsz"} & ENTRIES.keys()


def test_variants_of_the_per_thread_stream_have_their_own_programs() -> None:
    for symbol, entry in ENTRIES.items():
        assert symbol.endswith(("_ptsz", "_ptds")) == entry.program.endswith("_pt")


def test_every_program_is_in_the_source() -> None:
    text = whole("streams")
    for entry in ENTRIES.values():
        for program in filter(None, (entry.program, entry.on_return)):
            assert f"int {program}(struct pt_regs *ctx)" in text


def test_the_ninth_argument_lies_elsewhere_on_arm() -> None:
    assert "-DSTREAM_ON_STACK=24" in stream_table.cflags("x86_64")
    assert "-DSTREAM_ON_STACK=0" in stream_table.cflags("aarch64")


# -- functions of a library


@pytest.mark.parametrize(
    ("head", "machine", "expected"),
    [
        ("554889e5", "x86_64", (0x1000, True)),
        ("4157415641554154", "x86_64", (0x1000, True)),
        ("f30f1efa55", "x86_64", (0x1004, True)),
        ("f30f1efa4156", "x86_64", (0x1004, True)),
        ("f30f1efa0f1f440000", "x86_64", (0x1004, True)),
        ("f30f1efa4883ec08", "x86_64", (0x1000, False)),  # endbr64; sub $8,%rsp
        ("4883ec08", "x86_64", (0x1000, False)),
        ("4154", "x86_64", (0x1000, True)),
        ("41c7", "x86_64", (0x1000, False)),
        ("", "x86_64", (0x1000, False)),
        ("fd7bbfa9", "aarch64", (0x1000, True)),
    ],
)
def test_where_a_probe_goes(head: str, machine: str, expected: tuple[int, bool]) -> None:
    assert elf.entry(elf.Function("f", 0x1000, bytes.fromhex(head)), machine) == expected


def test_exported_functions_of_a_library() -> None:
    needs("gcc")
    with (built() / "libcuda.so.1").open("rb") as file:
        found = elf.functions(file, [*ENTRIES, "stub_wait_ns"])
    assert "stub_wait_ns" not in found  # data
    assert {"cuLaunchKernel", "cuGraphLaunch_ptsz", "cuMemcpyDtoH_v2_ptds"} <= found.keys()
    assert "cuCtxSynchronize_v2" not in found
    assert all(function.head.startswith(bytes.fromhex("554889e5")) for function in found.values())


def test_a_second_name_of_the_same_code_counts_once() -> None:
    found = {name: elf.Function(name, address, b"U") for name, address in (("a", 16), ("b", 16), ("c", 32))}
    assert {one.name for one in elf.by_address(found).values()} == {"a", "c"}


@given(st.binary(max_size=200))
def test_no_file_breaks_the_reader(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("elf") / "lib"
    for head in (b"", b"\x7fELF\x02\x01"):
        path.write_bytes(head + content)
        with path.open("rb") as file, contextlib.suppress(elf.NotALibrary):
            assert elf.functions(file, ["cuLaunchKernel"]) == {}


def test_a_damaged_library_is_refused_not_believed(tmp_path: Path) -> None:
    needs("gcc")
    whole = (built() / "libcuda.so.1").read_bytes()
    for length in (64, 1000, len(whole) // 2, len(whole) - 200):
        (tmp_path / "lib").write_bytes(whole[:length])
        with (tmp_path / "lib").open("rb") as file, pytest.raises(elf.NotALibrary):
            elf.functions(file, ENTRIES)


# -- processes

MAPS = b"""\
55d0c0000000-55d0c0001000 r--p 00000000 fe:00 77 /usr/bin/python3
7f1000000000-7f1000100000 r--p 00000000 fe:00 4242                       /usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05
7f1000100000-7f1000900000 r-xp 00100000 fe:00 4242                       /usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05
7f2000000000-7f2000100000 r-xp 00000000 00:2f 9                          /usr/local/cuda/compat/libcuda.so.1 (deleted)
7f3000000000-7f3000100000 r-xp 00000000 fe:00 11                         /usr/lib/libcudart.so.12
7f4000000000-7f4000100000 r-xp 00000000 fe:00 12                         /usr/lib/libcudadebugger.so.1
7f5000000000-7f5000100000 r-xp 00000000 fe:00 13                         /opt/with space/libcuda.so
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
"""


def test_libraries_in_the_maps_of_a_process() -> None:
    found = {mapping.key: mapping for mapping in parse(MAPS)}
    assert found.keys() == {("fe:00", 4242), ("00:2f", 9), ("fe:00", 13)}
    assert found["fe:00", 4242].span == "7f1000000000-7f1000100000"
    assert found["00:2f", 9].path == "/usr/local/cuda/compat/libcuda.so.1"
    assert found["fe:00", 13].path == "/opt/with space/libcuda.so"


class Proc:
    """A /proc under construction."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, pid: int, maps: bytes, size: int = 100, stack: int = 7) -> None:
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "statm").write_text(f"{size} 5 1 1 0 1 0\n")
        (folder / "stat").write_text(f"{pid} (a) b) S {' '.join('0' * 24)} {stack} 0 0\n")
        (folder / "maps").write_bytes(maps)


def test_maps_are_read_again_only_when_something_was_mapped(tmp_path: Path) -> None:
    proc, scanner = Proc(tmp_path), Scanner(tmp_path)
    proc.put(5, b"")
    proc.put(6, MAPS)
    assert scanner.scan(0).processes.keys() == {6}
    proc.put(5, MAPS)
    assert scanner.scan(2 * NS).processes.keys() == {6}  # the size says that nothing changed
    proc.put(5, MAPS, size=101)
    assert scanner.scan(4 * NS).processes.keys() == {5, 6}
    proc.put(5, b"", size=102)
    assert scanner.scan(100 * NS).processes.keys() == {6}
    proc.put(5, MAPS, size=103)
    assert scanner.scan(119 * NS).processes.keys() == {6}  # an old process is looked at every 20 s
    assert scanner.scan(120 * NS).processes.keys() == {5, 6}


def test_another_program_in_the_same_process_is_noticed(tmp_path: Path) -> None:
    proc, scanner = Proc(tmp_path), Scanner(tmp_path)
    proc.put(6, MAPS)
    scanner.scan(0)
    proc.put(6, b"")
    assert scanner.scan(100 * NS).processes
    proc.put(6, b"", stack=8)
    assert not scanner.scan(101 * NS).processes


def test_kernel_threads_and_the_dead_map_nothing(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    proc.put(5, MAPS, size=0)
    (tmp_path / "6").mkdir()
    (tmp_path / "self").mkdir()
    assert Scanner(tmp_path).scan(0) == Scan()
    proc.put(7, MAPS)
    assert Scanner(tmp_path, frozenset({5, 8})).scan(0) == Scan()


# -- which libraries are probed


class FakeBackend:
    """Remembers what is set."""

    origin = "fake"
    at_once = 1

    def __init__(self, fails: str = "") -> None:
        self.set: dict[int, tuple[str, str, bool]] = {}
        self.fails = fails
        self._next = 0

    def map_fd(self, name: str) -> int:
        raise AssertionError(name)

    def attach(self, path: str, address: int, program: str, *, on_return: bool = False) -> object:
        if program == self.fails:
            raise ProbesUnavailable("the kernel refuses")
        self._next += 1
        self.set[self._next] = (str(Path(path).readlink()), program, on_return)
        return self._next

    def detach(self, *links: object) -> None:
        for link in links:
            assert isinstance(link, int)
            del self.set[link]

    def close(self) -> None:
        self.set.clear()


def mapped(path: Path) -> Mapping:
    return Mapping("fe:00", path.stat().st_ino, "0-1", str(path))


def scan(*paths: Path) -> Scan:
    return Scan({100 + at: (mapped(path),) for at, path in enumerate(paths)})


def copies(folder: Path, count: int) -> list[Path]:
    needs("gcc")
    content = (built() / "small.so").read_bytes()
    paths = [folder / f"libcuda.so.{number}" for number in range(count)]
    for path in paths:
        path.write_bytes(content)
    return paths


def libraries(backend: FakeBackend) -> Libraries:
    return Libraries(backend, ENTRIES, lambda _, mapping: os.open(mapping.path, os.O_RDONLY), "x86_64")


def programs(backend: FakeBackend) -> Sequence[str]:
    return sorted(program for _, program, _ in backend.set.values())


def test_groups_are_set_and_removed(tmp_path: Path) -> None:
    one, two = copies(tmp_path, 2)
    backend = FakeBackend()
    them = libraries(backend)
    them.follow(scan(one, one))
    assert programs(backend) == ["wait_end", "wait_stream"]
    them.switch("launch", True)
    them.follow(scan(one, two))  # what is new gets the groups that are on
    assert programs(backend) == ["launch_stack"] * 2 + ["wait_end"] * 2 + ["wait_stream"] * 2
    assert {path for path, _, _ in backend.set.values()} == {str(one), str(two)}
    them.switch("launch", False)
    assert "launch_stack" not in programs(backend)
    them.close()


def test_probes_that_time_calls_go_one_by_one_the_return_first(tmp_path: Path) -> None:
    one, two = copies(tmp_path, 2)
    backend = FakeBackend()
    them = TimedLaunches(backend, lambda _, mapping: os.open(mapping.path, os.O_RDONLY))
    them.follow(scan(one))
    assert programs(backend) == ["time_end", "time_stack"]
    assert them.remove_some()
    assert programs(backend) == ["time_stack"]
    them.follow(scan(one, two))  # what is new gets none while they are being removed
    assert programs(backend) == ["time_stack"]
    assert them.remove_some()
    assert not them.remove_some()
    assert programs(backend) == []
    them.set_all()
    assert programs(backend) == ["time_end", "time_end", "time_stack", "time_stack"]
    them.close()


def test_where_the_kernel_removes_many_probes_at_once_those_of_a_library_go_together(tmp_path: Path) -> None:
    one, two = copies(tmp_path, 2)
    backend = FakeBackend()
    backend.at_once = 64
    them = TimedLaunches(backend, lambda _, mapping: os.open(mapping.path, os.O_RDONLY))
    them.follow(scan(one, two))
    assert them.remove_some()
    assert programs(backend) == ["time_end", "time_stack"]
    assert them.remove_some()
    assert not them.remove_some()
    assert programs(backend) == []
    them.close()


def test_a_hard_link_is_the_same_file(tmp_path: Path) -> None:
    (one,) = copies(tmp_path, 1)
    os.link(one, tmp_path / "libcuda.so.99")
    them = libraries(FakeBackend())
    other = Mapping("00:99", 1, "0-1", str(tmp_path / "libcuda.so.99"))  # an overlay shows other numbers
    them.follow(Scan({1: (mapped(one),), 2: (other,)}))
    assert them.probed == 1
    them.close()


def test_files_that_nobody_maps_are_let_go_oldest_first(tmp_path: Path) -> None:
    paths = copies(tmp_path, KEEP_UNUSED + 3)
    backend = FakeBackend()
    them = libraries(backend)
    for path in paths:
        them.follow(scan(path))
    them.follow(Scan())
    kept = {path for path, _, _ in backend.set.values()}
    assert kept == {str(path) for path in paths[-KEEP_UNUSED:]}
    them.follow(scan(paths[0]))  # and it comes back
    assert str(paths[0]) in {path for path, _, _ in backend.set.values()}
    them.close()


def test_no_more_libraries_than_the_bound(tmp_path: Path) -> None:
    paths = copies(tmp_path, MAX_LIBRARIES + 1)
    them = libraries(FakeBackend())
    them.follow(scan(*paths))
    assert them.probed == MAX_LIBRARIES
    assert list(them.refused.values()) == [f"{MAX_LIBRARIES} other libraries are probed already"]
    them.close()


def test_what_cannot_be_probed_is_said_and_the_rest_goes_on(tmp_path: Path) -> None:
    (one,) = copies(tmp_path, 1)
    bad = tmp_path / "libcuda.so"
    bad.write_bytes(b"text")
    backend = FakeBackend(fails="wait_stream")
    them = libraries(backend)
    them.on |= {"launch"}
    them.follow(scan(bad, one))
    assert them.refused[str(bad)].startswith("is not a library that can be read")
    assert them.refused[str(one)] == "cuStreamSynchronize: the kernel refuses"
    assert them.probed == 1
    assert "launch_stack" in programs(backend)
    them.close()


# -- differences


def reading(*entries: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    keys, values = np.zeros(len(entries), KEY), np.zeros(len(entries), VALUE)
    for at, entry in enumerate(entries):
        for name, value in entry.items():
            (keys if name in ("pid", "stream") else values)[name][at] = value
    return keys, values


ALL = Coverage(launches_since=1, polls=True)


def test_rows_are_differences_by_key_in_whatever_order_the_kernel_lists_them() -> None:
    differ = Differ()
    a, b = {"pid": 1, "stream": 2**64 - 1}, {"pid": 1, "stream": 7}
    differ.rows(*reading({**a, "launches": 10, "waits": 3}, {**b, "launches": 5}), 10, 10, 1, ALL)
    rows, changed = differ.rows(
        *reading({**b, "launches": 5}, {**a, "launches": 17, "waits": 3}), 20, 10, 2, ALL
    )
    assert rows["stream"].tolist() == [7, 2**64 - 1]
    assert rows["launches"].tolist() == [0, 7]
    assert rows["waits"].tolist() == [0, 0]
    assert changed.tolist() == [False, True]


def test_counts_beyond_the_precision_of_a_float_differ_exactly() -> None:
    differ = Differ()
    key = {"pid": 1, "stream": 7}
    differ.rows(*reading({**key, "launches": 2**40, "wait_ns": 2**60}), 10, 10, 1, ALL)
    rows, _ = differ.rows(*reading({**key, "launches": 2**40 + 13, "wait_ns": 2**60 + 1}), 20, 10, 2, ALL)
    assert (rows["launches"][0], rows["wait_ns"][0]) == (13, 1)


def test_an_entry_that_was_deleted_begins_anew() -> None:
    differ = Differ()
    keys, values = reading({"pid": 1, "stream": 7, "launches": 100})
    differ.rows(keys, values, 10, 10, 1, ALL)
    differ.forget(keys[0])
    rows, _ = differ.rows(*reading({"pid": 1, "stream": 7, "launches": 3}), 20, 10, 2, ALL)
    assert rows["launches"][0] == 3


def test_the_longest_is_of_the_epoch_that_ended() -> None:
    keys, values = reading({"pid": 1, "stream": 7}, {"pid": 1, "stream": 8})
    values["longest"]["epoch"] = [[4, 5], [2, 5]]
    values["longest"]["wait_ns"] = [[40, 50], [20, 50]]
    values["longest"]["bubble_ns"] = [[41, 51], [21, 51]]
    rows, _ = Differ().rows(keys, values, 10, 10, 4, ALL)
    assert rows["wait_max_ns"].tolist() == [40, 0]
    assert rows["bubble_max_ns"].tolist() == [41, 0]


def test_what_was_not_watched_is_unknown() -> None:
    keys, values = reading({"pid": 1, "stream": 7, "launches": 3, "waits": 2, "last_launch": 50})
    rows, _ = Differ().rows(keys, values, 100, 10, 1, Coverage(None, polls=False))
    unknown = {name for name in STREAM.values if np.isnan(rows[name].astype(float))[0]}
    expected = {
        "launches",
        "bubbles",
        "bubble_ns",
        "bubble_max_ns",
        "since_launch_ns",
        "launch_call_ns",
        "launch_call_max_ns",
        "not_ready",
    }
    assert unknown == expected
    assert (rows["waits"][0], rows["timed_launches"][0]) == (2, 0)


def test_call_times_are_of_the_calls_that_were_timed() -> None:
    differ = Differ()
    key = {"pid": 1, "stream": 7}
    differ.rows(*reading({**key, "timed": 3, "timed_ns": 900}), 10, 10, 1, ALL)
    keys, values = reading({**key, "timed": 7, "timed_ns": 900 + 5000})
    values["longest"]["epoch"], values["longest"]["call_ns"] = [[2, 1]], [[3500, 700]]
    rows, changed = differ.rows(keys, values, 20, 10, 2, Coverage(None, polls=False))
    names = ("timed_launches", "launch_call_ns", "launch_call_max_ns")
    assert [rows[name][0] for name in names] == [4, 1250, 3500]
    assert changed.tolist() == [True]
    rows, _ = differ.rows(keys, values, 30, 10, 3, ALL)  # none since: unknown, not 0
    assert rows["timed_launches"][0] == 0
    assert np.isnan([rows["launch_call_ns"][0], rows["launch_call_max_ns"][0]]).all()


def test_bins_of_call_times_have_sixteenths_of_an_octave() -> None:
    edges = bin_edges_ns()
    assert edges[:4].tolist() == [0, 256, 272, 288]
    assert edges[16:19].tolist() == [496, 512, 544]  # 32 wide from here on
    assert edges[-3:].tolist() == [2**35 * 31 / 16, 2**36, np.inf]
    assert (np.diff(edges[1:-1]) / edges[1:-2]).max() == 1 / 16


def test_the_last_launch_counts_only_if_all_since_were_seen() -> None:
    keys, values = reading(*({"pid": 1, "stream": 7, "last_launch": last} for last in (0, 49, 50, 90, 101)))
    rows, _ = Differ().rows(keys, values, 100, 10, 1, Coverage(50, polls=True))
    assert [None if math.isnan(age) else age for age in rows["since_launch_ns"]] == [None, None, 50, 10, 0]


# -- headers, bcc, notes


def kernel_tree(usr: Path, name: str, part: str, *, complete: bool = True) -> None:
    for path in ("include/linux/kconfig.h", "arch/x86/include/asm/page.h", "arch/x86/include/uapi/x.h"):
        place = usr / f"linux-headers-{name}-common" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    for path in ("include/generated/autoconf.h", "arch/x86/include/generated/asm/x.h"):
        place = usr / f"linux-headers-{name}-{part}" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()


@pytest.fixture
def x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BCC_KERNEL_SOURCE", raising=False)
    if os.uname().machine != "x86_64":
        pytest.skip("the trees here are of x86")


@pytest.mark.usefixtures("x86")
def test_split_headers_are_merged_once(tmp_path: Path) -> None:
    kernel_tree(tmp_path / "usr/src", "6.1.0-9", "amd64")
    kernel_tree(tmp_path / "usr/src", "6.1.0-57", "amd64")
    found = headers.find(tmp_path, tmp_path / "cache")
    assert found.origin == "linux-headers-6.1.0-57-common and linux-headers-6.1.0-57-amd64"
    assert found.source is not None
    for path in (
        "include/linux/kconfig.h",
        "include/generated/autoconf.h",
        "arch/x86/include/generated/asm/x.h",
    ):
        assert (found.source / path).exists()
    made = found.source.stat().st_ino
    again = headers.find(tmp_path, tmp_path / "cache")
    assert again.source is not None
    assert again.source.stat().st_ino == made


@pytest.mark.usefixtures("x86")
def test_a_tree_that_others_could_change_is_made_anew(tmp_path: Path) -> None:
    kernel_tree(tmp_path / "usr/src", "6.1.0-57", "amd64")
    cache = tmp_path / "cache"
    tree = headers.find(tmp_path, cache).source
    assert tree is not None
    (tree / "planted").touch()
    tree.chmod(0o777)
    assert headers.find(tmp_path, cache).source == tree
    assert not (tree / "planted").exists()
    tree.rename(tmp_path / "elsewhere")
    tree.symlink_to(tmp_path / "elsewhere")
    assert headers.find(tmp_path, cache).source == tree
    assert not tree.is_symlink()


@pytest.mark.usefixtures("x86")
def test_headers_of_the_running_kernel_come_first(tmp_path: Path) -> None:
    kernel_tree(tmp_path / "usr/src", "6.1.0-57", "amd64")
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/kheaders.tar.xz").touch()
    assert headers.find(tmp_path, tmp_path).origin == "/sys/kernel/kheaders.tar.xz"
    (tmp_path / "lib/modules" / os.uname().release / "build/include").mkdir(parents=True)
    assert headers.find(tmp_path, tmp_path).origin.startswith("/lib/modules/")


def test_no_headers_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BCC_KERNEL_SOURCE", raising=False)
    with pytest.raises(ProbesUnavailable) as caught:
        headers.find(tmp_path, tmp_path)
    assert caught.value.why.remedy.startswith("sudo apt install linux-headers-")


def test_bcc_is_the_distributions_not_the_one_of_pypi(tmp_path: Path) -> None:
    real = tmp_path / "lib/python3/dist-packages/bcc"
    other = tmp_path / "venv/bcc"
    for folder, names in ((real, ("__init__.py", "table.py", "libbcc.py")), (other, ("__init__.py",))):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).touch()
    assert bcc_import.folders(tmp_path, [str(other.parent)]) == [real]
    assert bcc_import.folders(tmp_path / "none", [str(other.parent), str(real.parent)]) == [real]


def test_possible_cpus(tmp_path: Path) -> None:
    for text, count in (("0\n", 1), ("0-3\n", 4), ("0-127\n", 128), ("0,2-5\n", 6)):
        path = tmp_path / text.strip()
        path.write_text(text)
        assert possible_cpus(path) == count


def test_notes_are_said_when_they_change_and_every_minute() -> None:
    notes = Notes("streams")
    notes.put(("", "", ""), "ok", "one")
    notes.put(("stream", "launches", ""), "sampled", "in bursts")
    assert [status.reason for status in notes.due(0)] == ["one", "in bursts"]
    assert notes.due(NS) == []
    notes.put(("", "", ""), "ok", "two")
    notes.drop(("stream", "launches", ""))
    assert [(one.field, one.state, one.reason) for one in notes.due(2 * NS)] == [
        ("launches", "ok", ""),
        ("", "ok", "two"),
    ]
    assert [status.reason for status in notes.due(60 * NS)] == ["two"]
