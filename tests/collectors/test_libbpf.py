"""BPF programs compiled before, and libbpf, which loads them."""

from __future__ import annotations

import contextlib
import json
import platform
import re
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

import bpf_objects
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from needs import needs

from opusmon.collectors.ebpf import bcc_text, libbpf, multi, prebuilt, probes
from opusmon.collectors.ebpf.errors import ProbesUnavailable
from opusmon.collectors.ebpf.source_text import SOURCES, inlined
from opusmon.collectors.ebpf.stream_table import cflags
from opusmon.collectors.ebpf.symbols import ENTRIES, TIMED_ENTRIES
from opusmon.collectors.facilities_ebpf import multi_uprobes
from opusmon.collectors.facility import Host

EVERY = [(name, machine) for name in bpf_objects.SOURCES for machine in bpf_objects.MACHINES]
LDX_DW, EM_BPF = 0x79, 247

# -- the objects that are shipped


def sections(content: bytes) -> dict[str, bytes]:
    """Content of each section of an ELF64 file, by name."""
    (shoff,) = struct.unpack_from("<Q", content, 40)
    size, count, names = struct.unpack_from("<HHH", content, 58)
    heads = [struct.unpack_from("<IIQQQQIIQQ", content, shoff + at * size) for at in range(count)]
    strings = heads[names][4]
    return {
        content[strings + head[0] :].split(b"\0", 1)[0].decode(): content[head[4] : head[4] + head[5]]
        for head in heads
    }


def programs(content: bytes) -> dict[str, bytes]:
    """Instructions of each uprobe program, by name."""
    found = sections(content)
    rows = struct.iter_unpack("<IBBHQQ", found[".symtab"])
    symbols = [(row[0], row[4], row[5]) for row in rows if row[1] == 0x12]  # global functions
    names = found[".strtab"]
    return {
        names[at:].split(b"\0", 1)[0].decode(): found["uprobe"][value : value + size]
        for at, value, size in symbols
    }


def registers_read(code: bytes) -> set[int]:
    """Offsets in `ctx` that a program reads before it calls anything: ctx is r1, or a copy of it."""
    copies, offsets = {1}, set()
    for at in range(0, len(code), 8):
        opcode, registers, offset = struct.unpack_from("<BBh", code, at)
        target, source = registers & 15, registers >> 4
        if opcode == LDX_DW and source in copies:
            offsets.add(offset)
        copies = copies | {target} if opcode == 0xBF and source in copies else copies - {target}
    return offsets


@pytest.mark.parametrize(("name", "machine"), EVERY)
def test_objects_are_of_their_sources_as_they_are_now(name: str, machine: str) -> None:
    """When this fails, run `python tests/bpf_objects.py`."""
    compiled = prebuilt.find(name, bpf_objects.SOURCES[name](machine), machine)
    (kind,) = struct.unpack_from("<H", compiled.content, 18)
    assert (compiled.content[:6], kind) == (b"\x7fELF\x02\x01", EM_BPF)
    assert sections(compiled.content)["license"] == b"Dual BSD/GPL\0"


@pytest.mark.parametrize(("name", "machine"), EVERY)
def test_objects_are_what_clang_makes_of_the_sources(name: str, machine: str) -> None:
    needs("clang")
    shipped = prebuilt.find(name, bpf_objects.SOURCES[name](machine), machine)
    entry = json.loads((prebuilt.FOLDER / prebuilt.MANIFEST).read_text())[shipped.file]
    if entry["clang"].split(".")[0] != bpf_objects.clang_version().split(".")[0]:
        pytest.skip(f"made by clang {entry['clang']}, here is {bpf_objects.clang_version()}")
    ours, theirs = sections(bpf_objects.compiled(name, machine)), sections(shipped.content)
    for part in ("uprobe", "tracepoint", ".maps", "license"):
        assert ours.get(part) == theirs.get(part), f"{part} differs: run `python tests/bpf_objects.py`"


def test_no_path_of_the_machine_that_made_them_is_in_the_objects() -> None:
    for path in prebuilt.FOLDER.glob("*.o"):
        found = re.findall(rb"/[\w./-]{3,}", path.read_bytes())
        assert [text for text in found if text != b"/GPL"] == []


def test_the_manifest_names_every_object_and_no_other() -> None:
    entries = json.loads((prebuilt.FOLDER / prebuilt.MANIFEST).read_text())
    assert set(entries) == {path.name for path in prebuilt.FOLDER.glob("*.o")}


@pytest.mark.parametrize(
    ("machine", "first", "second", "fourth", "sixth", "stack"),
    [
        ("x86_64", 112, 104, 88, 64, 152),  # RDI, RSI, RCX, R9, RSP of <asm/ptrace-abi.h>
        ("aarch64", 0, 8, 24, 40, 248),  # x0, x1, x3, x5, sp of struct user_pt_regs
    ],
)
def test_arguments_are_read_where_the_kernel_puts_them(
    machine: str, first: int, second: int, fourth: int, sixth: int, stack: int
) -> None:
    code = programs(prebuilt.find("streams", cflags(machine), machine).content)
    assert {
        program
        for entry in (*ENTRIES.values(), *TIMED_ENTRIES.values())
        for program in (entry.program, entry.on_return)
        if program
    } == set(code)
    assert registers_read(code["wait_stream"]) == {first}
    assert registers_read(code["launch_graph"]) == {second}
    assert fourth in registers_read(code["copy_h2d_async"])
    assert sixth in registers_read(code["copy_peer_async"])
    assert registers_read(code["launch_stack"]) == {stack}


@pytest.mark.parametrize("machine", bpf_objects.MACHINES)
def test_libbpf_finds_the_programs_and_maps_of_both_machines(machine: str) -> None:
    needs("libbpf")
    image = prebuilt.find("streams", cflags(machine), machine).content
    lib = libbpf.library()
    opened = lib.bpf_object__open_mem(image, len(image), None)
    assert opened
    assert all(
        lib.bpf_object__find_program_by_name(opened, entry.program.encode()) for entry in ENTRIES.values()
    )
    lib.bpf_object__close(opened)


# -- which object serves


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """A copy of sources and objects."""
    for path in [*SOURCES.glob("*.bpf.[ch]"), *prebuilt.FOLDER.iterdir()]:
        shutil.copy(path, tmp_path / path.name)
    return tmp_path


def refusal(
    folder: Path, name: str = "streams", flags: Sequence[str] | None = None, machine: str = "x86_64"
) -> str:
    with pytest.raises(ProbesUnavailable) as caught:
        prebuilt.find(name, cflags(machine) if flags is None else flags, machine, folder, folder)
    return caught.value.why.reason


def test_an_object_that_does_not_fit_is_refused(shipped: Path) -> None:
    assert (
        prebuilt.find("streams", cflags("x86_64"), "x86_64", shipped, shipped).file == "streams.x86_64.bpf.o"
    )
    assert (
        refusal(shipped, flags=["-DMAX_STREAMS=1"]) == "streams.x86_64.bpf.o was compiled with other bounds"
    )
    assert refusal(shipped, machine="riscv64", flags=[]) == "streams was not compiled for riscv64"


@pytest.mark.parametrize("part", ["streams.bpf.c", "portable.bpf.h", "cuda.bpf.h", "stream_copies.bpf.h"])
def test_an_object_is_refused_when_any_part_of_its_source_has_changed(shipped: Path, part: str) -> None:
    with (shipped / part).open("a") as file:
        file.write("\n")
    assert refusal(shipped) == "streams.bpf.c has changed since streams.x86_64.bpf.o was compiled"
    (shipped / part).unlink()
    assert refusal(shipped) == "streams.x86_64.bpf.o cannot be read: No such file or directory"


def test_parts_of_another_source_are_none_of_an_objects_business(shipped: Path) -> None:
    (shipped / "stall_calls.bpf.h").unlink()
    assert prebuilt.find("streams", cflags("x86_64"), "x86_64", shipped, shipped).content


def test_a_damaged_object_is_refused(shipped: Path) -> None:
    place = shipped / "streams.x86_64.bpf.o"
    content = bytearray(place.read_bytes())
    content[1000] ^= 1
    place.write_bytes(content)
    assert refusal(shipped) == "streams.x86_64.bpf.o is not the file that was shipped"
    place.unlink()
    assert refusal(shipped) == "streams.x86_64.bpf.o cannot be read: No such file or directory"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.text(),
        st.recursive(
            st.none() | st.text(), lambda inner: st.dictionaries(st.just("streams.x86_64.bpf.o"), inner)
        ).map(json.dumps),
    )
)
def test_no_manifest_is_believed_but_the_right_one(shipped: Path, text: str) -> None:
    (shipped / prebuilt.MANIFEST).write_bytes(text.encode("utf-8", "surrogatepass"))
    assert refusal(shipped)


# -- one source in two dialects


def test_a_header_is_put_in_once_where_it_is_included_first() -> None:
    parts = {
        "a.h": '#pragma once\n#include "b.h"\nint a;\n',
        "b.h": "#pragma once\n#include <linux/bpf.h>\nint b;\n",
    }
    text = '// "a.h"\n#include "a.h"\n#include "b.h"\nint c;\n'
    assert inlined(text, parts.__getitem__) == '// "a.h"\n#include <linux/bpf.h>\nint b;\nint a;\nint c;\n'


def test_headers_that_include_each_other_end() -> None:
    parts = {"a.h": '#include "b.h"\nint a;\n', "b.h": '#include "a.h"\nint b;\n'}
    assert inlined('#include "a.h"\n', parts.__getitem__) == "int b;\nint a;\n"


def test_words_of_the_header_become_bccs(tmp_path: Path) -> None:
    (tmp_path / "portable.bpf.h").write_text("#pragma once\n#define MAP_LOOKUP(map, key) header\n")
    (tmp_path / "part.bpf.h").write_text("MAP_DELETE(part, &id);\n")
    text = """#include "portable.bpf.h"
#include "part.bpf.h"
u64 *n = MAP_LOOKUP(counts, &slot);
if (MAP_UPDATE(calls, &id, &call) || MAP_INSERT(a_b, &k, v)) MAP_DELETE(calls, &id);
struct e_t *e = RING_RESERVE(ring, struct e_t);
e->stack = STACK_ID(stacks, ctx, BPF_F_USER_STACK | BPF_F_REUSE_STACKID);
RING_SUBMIT(ring, e, BPF_RB_NO_WAKEUP); RING_DISCARD(ring, e, 0);
"""
    assert (
        bcc_text.for_bcc(text, tmp_path)
        == """#define MAP_LOOKUP(map, key) header
part.delete(&id);
u64 *n = counts.lookup(&slot);
if (calls.update(&id, &call) || a_b.insert(&k, v)) calls.delete(&id);
struct e_t *e = ring.ringbuf_reserve(sizeof(struct e_t));
e->stack = stacks.get_stackid(ctx, BPF_F_USER_STACK | BPF_F_REUSE_STACKID);
ring.ringbuf_submit(e, BPF_RB_NO_WAKEUP); ring.ringbuf_discard(e, 0);
"""
    )


def test_no_word_that_bcc_does_not_know_is_left_in_a_source() -> None:
    header = (SOURCES / bcc_text.HEADER).read_text().replace("#pragma once\n", "")
    for path in SOURCES.glob("*.bpf.c"):
        text = bcc_text.source(path.name.removesuffix(".bpf.c"))
        assert text.count(header) == 1
        text = text.replace(header, "")
        assert not re.search(r"\b(MAP_(?!S\b)[A-Z]+|RING_(RESERVE|SUBMIT|DISCARD)|STACK_ID)\(", text)


# -- which backend


def test_the_variable_forces_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def failing(kind: str) -> object:
        def make(*_: object, by_multi: bool = False) -> None:
            asked.append(f"{kind} multi" if by_multi else kind)
            raise ProbesUnavailable(f"no {kind}", f"get {kind}")

        return make

    monkeypatch.setattr(probes, "LibbpfBackend", failing("libbpf"))
    monkeypatch.setattr(probes, "BccBackend", failing("bcc"))
    for value, kinds in (("", ["libbpf", "bcc"]), ("libbpf", ["libbpf"]), ("bcc", ["bcc"]), ("other", [])):
        asked.clear()
        with pytest.raises(ProbesUnavailable) as caught:
            probes.load("streams", (), Root("6.5", {probes.VARIABLE: value}))
        assert asked == kinds
        assert (
            value != ""
            or caught.value.why.reason == "neither libbpf nor bcc can set probes: no libbpf; no bcc"
        )
        assert value != "" or caught.value.why.remedy == "get libbpf"
    for release, kinds in (("6.6.1", ["libbpf multi", "bcc"]), ("6.5", ["bcc"])):
        asked.clear()
        with pytest.raises(ProbesUnavailable):
            probes.load("streams", (), Nobody(release))
        assert asked == kinds


def test_root_gets_links_that_are_soon_removed_and_the_others_where_the_kernel_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []

    def make(_: str, flags: Sequence[str], *, by_multi: bool = False) -> str:
        asked.append(by_multi)
        if by_multi and "refuse" in flags:
            raise ProbesUnavailable("the kernel has no uprobe_multi links")
        return "multi" if by_multi else "perf events"

    monkeypatch.setattr(probes, "LibbpfBackend", make)
    for release, flags, kind in (
        ("6.6.0", (), "multi"),
        ("6.6.0", ("refuse",), "perf events"),
        ("6.5.13", (), "perf events"),
    ):
        assert probes.load("streams", flags, Root(release)) == kind
    assert asked == [True, True, False, False]


class _Of(Host):
    """A host with that kernel."""

    def __init__(self, release: str, env: dict[str, str] | None = None) -> None:
        super().__init__(env=env or {})
        self.__dict__["release"] = release


class Root(_Of):
    """A host that grants everything."""

    def has_cap(self, cap: int) -> bool:
        return True


class Nobody(_Of):
    """A host that grants no capability."""

    def has_cap(self, cap: int) -> bool:
        return False


def test_bcc_says_why_it_was_not_libbpf(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bcc:
        def __init__(self, text: str, flags: Sequence[str]) -> None:
            assert "streams.lookup(&key)" in text
            assert flags == ("-DX=1",)
            self.origin = "bcc 1"

    monkeypatch.setattr(probes, "BccBackend", Bcc)
    monkeypatch.setattr(libbpf, "library", lambda: None)
    backend = probes.load("streams", ("-DX=1",), Root("6.5"))
    assert backend.origin.startswith("bcc 1 (not libbpf: streams.")


@pytest.mark.parametrize(
    ("soname", "words"),
    [("libnone.so.7", "libnone.so.7 does not load: "), ("libc.so.6", "libc.so.6 has no libbpf_set_print")],
)
def test_a_library_that_does_not_do(monkeypatch: pytest.MonkeyPatch, soname: str, words: str) -> None:
    monkeypatch.setattr(libbpf, "SONAME", soname)
    with pytest.raises(ProbesUnavailable, match=words) as caught:
        libbpf.library.__wrapped__()
    assert caught.value.why.remedy


# -- in the kernel


@pytest.mark.parametrize("by_multi", [False, True])
def test_refusals_are_told_in_libbpfs_words_and_not_printed(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, by_multi: bool
) -> None:
    needs("root", "libbpf")
    backend = libbpf.LibbpfBackend("streams", cflags(), by_multi=by_multi)
    (tmp_path / "text").write_text("text")
    told = {
        "there is no map nothing": lambda: backend.map_fd("nothing"),
        "there is no program nothing": lambda: backend.attach("/bin/true", 0, "nothing"),
        "launch_stack cannot be attached: No such file": lambda: backend.attach(
            f"{tmp_path}/x", 0, "launch_stack"
        ),
        "launch_stack cannot be attached: not an ELF64": lambda: backend.attach(
            f"{tmp_path}/text", 0, "launch_stack"
        ),
        "launch_stack cannot be attached: a symbol lies": lambda: backend.attach(
            "/bin/true", 1 << 40, "launch_stack"
        ),
        "poll_end cannot be attached to sched:nothing: .*'sched/nothing'.*": lambda: (
            backend.attach_tracepoint("sched", "nothing", "poll_end")
        ),
    }
    for words, action in told.items():
        with pytest.raises(ProbesUnavailable, match=words):
            action()
    backend.close()
    backend.close()
    backend.detach(object())
    with pytest.raises(ProbesUnavailable, match="have been removed"):
        backend.map_fd("streams")
    with contextlib.suppress(OSError):
        multi.attach(-1, "/bin/true", 0, on_return=False)
    assert capfd.readouterr() == ("", "")


def test_a_kernel_without_such_links_is_known_by_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """EINVAL is what kernels before 6.6 answer, which know no such attach type; EBADF what the others do."""
    needs("root", "libbpf")
    if not multi_uprobes(platform.release()):
        with pytest.raises(ProbesUnavailable, match="the kernel has no uprobe_multi links"):
            libbpf.LibbpfBackend("streams", cflags(), by_multi=True)
        return
    libbpf.LibbpfBackend("streams", cflags(), by_multi=True).close()
    monkeypatch.setattr(multi, "ATTACH_TYPE", 40)  # BPF_LSM_CGROUP, for none of our programs
    with pytest.raises(ProbesUnavailable, match="the kernel has no uprobe_multi links"):
        libbpf.LibbpfBackend("streams", cflags(), by_multi=True)


def test_programs_that_the_verifier_refuses_say_which_and_why(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On x86-64 the registers of aarch64 reach beyond those there are; the other way round nothing does."""
    needs("root", "libbpf")
    if platform.machine() != "x86_64":
        pytest.skip("only x86-64 has fewer registers")
    real = prebuilt.find
    monkeypatch.setattr(prebuilt, "find", lambda name, flags: real(name, cflags("aarch64"), "aarch64"))
    with pytest.raises(ProbesUnavailable) as caught:
        libbpf.LibbpfBackend("streams", cflags())
    assert re.match(
        r"streams.aarch64.bpf.o cannot be loaded: prog 'launch_stack\w*': BPF program load failed",
        caught.value.why.reason,
    )
    assert "\n" not in caught.value.why.reason
    assert capfd.readouterr() == ("", "")
