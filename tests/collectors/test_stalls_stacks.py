"""User stacks as text: maps, symbols, names."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cuda_stub import built
from hypothesis import given
from hypothesis import strategies as st
from needs import needs

from opusmon.collectors.ebpf import stacks
from opusmon.collectors.ebpf.elf import NotALibrary
from opusmon.collectors.ebpf.libcuda import Scanner
from opusmon.collectors.ebpf.stacks import MAX_FRAMES, Symboliser, Symbols, plain, regions

NS = 1_000_000_000

MAPS = b"""\
55d0c0000000-55d0c0001000 r-xp 00002000 fe:00 77 /usr/bin/python3
7f1000000000-7f1000100000 r-xp 00100000 fe:00 4242                       /usr/lib/lib torch;x.so
7f2000000000-7f2000100000 r-xp 00000000 00:2f 9                          /tmp/gone.so (deleted)
7f3000000000-7f3000100000 rwxp 00000000 00:00 0
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
"""


def test_regions_of_a_process() -> None:
    found = regions(MAPS)
    assert [region.label for region in found] == [
        "python3",
        "lib_torch_x.so",
        "gone.so, deleted",
        "[anonymous memory]",
        "[stack]",
        "[vsyscall]",
    ]
    assert (found[0].start, found[0].end, found[0].offset) == (0x55D0C0000000, 0x55D0C0001000, 0x2000)
    assert found[0].mapped.key == ("fe:00", 77)
    assert found[2].mapped.path == "/tmp/gone.so"


@given(st.binary(max_size=300))
def test_no_text_breaks_the_reader_of_maps(text: bytes) -> None:
    for region in regions(text):
        assert region.label


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        ("cuLaunchKernel", "cuLaunchKernel"),
        ("_ZN3c104cuda10CUDAStream9cudaEventEv", "c10::cuda::CUDAStream::cudaEvent"),
        ("_ZNK2at6Tensor4itemEv", "at::Tensor::item"),
        ("_ZN2at6native13launch_kernelILi4EZNS0_3fooEvEUlvE_EEvRKT0_", "at::native::launch_kernel"),
        ("_ZNSt6vectorIiSaIiEE9push_backERKi", "std::vector::push_back"),
        ("_ZN3fooC2Ev", "foo::foo"),
        ("_ZN3fooD0Ev", "foo::~foo"),
        ("_ZN12_GLOBAL__N_13runEv", "(anonymous)::run"),
        ("_Z3runi", "run"),
        ("_ZN", "_ZN"),
        ("_Z", "_Z"),
        ("a;b c\x1b[31m", "a_b_c_[31m"),
        ("x" * 500, "x" * 120),
    ],
)
def test_names_as_people_read_them(symbol: str, expected: str) -> None:
    assert plain(symbol) == expected


@given(st.text(alphabet="_ZNIELSt0123456789abCD;\n\x00 ", max_size=60))
def test_no_symbol_breaks_the_reader_of_names(tail: str) -> None:
    for name in (tail, "_ZN" + tail, "_ZN3fooI" + tail):
        said = plain(name)
        assert not set(said) & set(";\n\x00 ")
        assert len(said) <= 120


@pytest.fixture(scope="module")
def program() -> Path:
    needs("gcc")
    return built() / "cuda_load"


def test_functions_of_a_file_by_place(program: Path) -> None:
    """As nm gives them; the program is not stripped, and is linked to address 0."""
    listed = subprocess.run(["nm", "-S", str(program)], capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in listed.splitlines() if line.split()[-2:] == ["t", "many1"]]
    (address, size) = (int(lines[0][0], 16), int(lines[0][1], 16))
    with program.open("rb") as file:
        symbols = Symbols(file.fileno())
    # Code lies in the file at its address: the segments of a position-independent program begin so.
    assert symbols.at(address) == ("many1", 0)
    assert symbols.at(address + size - 1) == ("many1", size - 1)
    following = symbols.at(address + size)
    assert following is None or following[0] != "many1"
    assert symbols.at(10**9) is None
    assert len(symbols) > 10
    symbols.close()


def test_a_library_gives_what_it_exports_and_a_stripped_one_too(program: Path, tmp_path: Path) -> None:
    library = Path(shutil.copy(program.with_name("libcuda.so.1"), tmp_path))
    subprocess.run(["strip", str(library)], check=True)
    with library.open("rb") as file:
        symbols = Symbols(file.fileno())
    assert 20 < len(symbols) < 200
    symbols.close()


def test_a_damaged_file_is_refused_not_believed(program: Path, tmp_path: Path) -> None:
    whole = program.read_bytes()
    for length in (0, 10, 64, 1000, len(whole) // 2, len(whole) - 200):
        (tmp_path / "lib").write_bytes(whole[:length])
        with (tmp_path / "lib").open("rb") as file, pytest.raises(NotALibrary):
            Symbols(file.fileno())


@given(st.binary(max_size=300), st.integers(0, 2**40))
def test_no_file_breaks_the_reader(content: bytes, place: int) -> None:
    fd = os.memfd_create("lib")
    for head in (b"", b"\x7fELF\x02\x01"):
        os.ftruncate(fd, 0)
        os.pwrite(fd, head + content, 0)
        with contextlib.suppress(NotALibrary):
            symbols = Symbols(fd)
            symbols.at(place)
            symbols.close()
    os.close(fd)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def address_of(name: str) -> int:
    address = ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value
    assert address is not None
    return address


def test_frames_of_a_living_process() -> None:
    """The innermost is at the end; a frame holds the address behind a call."""
    symboliser = Symboliser(Scanner().open)
    memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    anonymous = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    text = symboliser.text(
        os.getpid(), [address_of("getpid") + 5, address_of("printf") + 0x10, anonymous + 8, 0x10], 0
    )
    outer = text.split(";")
    assert len(outer) == 4
    assert outer[0] == "[unknown]"
    assert outer[1].startswith("[an")
    assert outer[2].startswith("printf+0x10 (libc.so")
    assert outer[3].split("+")[0].endswith("getpid")
    assert outer[3].split(" ")[0].endswith("+0x5")
    symboliser.close()


def test_where_no_function_is_known_the_place_is_given(tmp_path: Path, program: Path) -> None:
    library = Path(shutil.copy(program.with_name("libcuda.so.1"), tmp_path / "libstub.so.9"))
    loaded = ctypes.CDLL(str(library))  # stays mapped: by a name that no collector looks for
    address = ctypes.cast(loaded.cuLaunchKernel, ctypes.c_void_p).value
    assert address is not None
    library.unlink()
    symboliser = Symboliser(Scanner().open)
    base = next(
        one for one in regions(Path("/proc/self/maps").read_bytes()) if "libstub.so.9" in one.mapped.path
    )
    text = symboliser.text(os.getpid(), [address + 4, base.start + 2], 0)
    assert text == "libstub.so.9, deleted+0x2;cuLaunchKernel+0x4 (libstub.so.9, deleted)" or (
        os.geteuid() != 0 and "libstub.so.9, deleted+" in text
    )
    symboliser.close()


def test_a_process_that_has_ended_and_a_stack_of_nothing() -> None:
    symboliser = Symboliser(Scanner().open)
    assert symboliser.text(2**22 + 1, [1, 2], 0) == ""
    assert symboliser.text(os.getpid(), [], 0) == ""
    assert len(symboliser.text(os.getpid(), [1] * 100, 0).split(";")) == MAX_FRAMES


def test_maps_serve_for_a_second(tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "maps").write_bytes(MAPS)
    symboliser = Symboliser(Scanner(tmp_path).open, tmp_path)
    assert symboliser.text(5, [0x7FFC00000010], 0) == "[stack]"
    (tmp_path / "5" / "maps").unlink()
    assert symboliser.text(5, [0x7FFC00000010], NS) == "[stack]"
    assert symboliser.text(5, [0x7FFC00000010], NS + 1) == ""
    assert symboliser.text(6, [0x7FFC00000010], 0) == ""


def test_a_map_that_is_the_same_is_not_read_out_again_and_another_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr(stacks, "regions", lambda text: parsed.append(text) or regions(text))
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "maps").write_bytes(MAPS)
    symboliser = Symboliser(Scanner(tmp_path).open, tmp_path)
    place = 0x7F2000000010
    for t in range(4):
        assert symboliser.text(5, [place], t * 2 * NS) == "gone.so, deleted+0x10"
    assert len(parsed) == 1
    # The library is unloaded, and another one takes its place.
    (tmp_path / "5" / "maps").write_bytes(MAPS.replace(b"/tmp/gone.so", b"/tmp/new.so"))
    assert symboliser.text(5, [place], 8 * NS) == "new.so, deleted+0x10"
    assert len(parsed) == 2


def test_the_texts_that_are_kept_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "MAX_TEXTS", 3)
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "maps").write_bytes(MAPS)
    symboliser = Symboliser(Scanner(tmp_path).open, tmp_path)
    for n in range(20):
        assert symboliser.text(5, [0x7F2000000010 + n], 0) == f"gone.so, deleted+{0x10 + n:#x}"
        assert len(symboliser._maps[5].frames) <= 3


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: Path) -> None:
    monkeypatch.setattr(stacks, "MAX_FILES", 3)
    opened: list[str] = []
    (tmp_path / "5").mkdir()
    lines = [f"{n:x}000-{n:x}fff r-xp 00000000 fe:00 {n} /lib/{n}.so" for n in range(1, 9)]
    (tmp_path / "5" / "maps").write_text("\n".join(lines) + "\n")

    def opens(pid: int, mapped: object) -> int:
        opened.append(mapped.path)  # type: ignore[attr-defined]
        return os.open(program, os.O_RDONLY)

    symboliser = Symboliser(opens, tmp_path)
    before = open_files()
    for n in (*range(1, 9), 8, 7, 6):
        symboliser.text(5, [n * 0x1000 + 0x10], 0)
    assert opened == [f"/lib/{n}.so" for n in range(1, 9)]
    assert open_files() == before + 3
    symboliser.close()
    assert open_files() == before
    assert "/lib/8.so" not in Path("/proc/self/maps").read_text()


def test_no_file_stays_mapped(program: Path) -> None:
    with program.open("rb") as file:
        symbols = Symbols(file.fileno())
    assert str(program) not in Path("/proc/self/maps").read_text()
    symbols.close()
