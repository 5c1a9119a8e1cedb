"""The price of a probe hit: measured on code of our own, and assumed where that cannot be."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import pytest
from cuda_stub import Load, built
from needs import needs

from opusmon.collectors.ebpf import elf, hit_price, maps
from opusmon.collectors.ebpf.hit_price import ASSUMED, Price, price_of
from opusmon.collectors.ebpf.libbpf import LibbpfBackend
from opusmon.collectors.ebpf.probes import Backend
from opusmon.collectors.ebpf.stream_table import cflags
from opusmon.collectors.facilities_ebpf import multi_uprobes

N = 10_000


@pytest.fixture(params=[False, True], ids=["perf events", "uprobe_multi"])
def backend(request: pytest.FixtureRequest):
    """A backend of each kind."""
    needs("root", "libbpf")
    if request.param and not multi_uprobes(os.uname().release):
        pytest.skip("uprobe_multi needs kernel 6.6")
    made = LibbpfBackend("streams", cflags(), by_multi=request.param)
    yield made
    made.close()


def test_a_pair_has_the_dear_step_once() -> None:
    price = Price(1_000, 9_000, 600)
    assert (price.hit_ns(cheap=True), price.hit_ns(cheap=False)) == (1_000, 10_000)
    assert (price.pair_ns(cheap=True), price.pair_ns(cheap=False)) == (800, 5_300)


def test_it_says_whether_it_was_measured() -> None:
    words = "a probe hit is taken to cost 1.23 us at entry, 0.60 us at return"
    assert Price(1_234, 0, 600, measured=True).words() == f"{words} (measured here)"
    assert Price(1_234, 0, 600).words() == f"{words} (assumed, as measured on H200 hosts)"


@pytest.mark.parametrize(("place", "cheap"), [(hit_price._EMULATED, True), (hit_price._STEPPED, False)])
def test_the_code_of_our_own_is_of_both_kinds_and_lies_where_it_is_said_to(
    tmp_path: Path, place: int, cheap: bool
) -> None:
    path = tmp_path / "own.so"
    path.write_bytes(hit_price._file())
    with path.open("rb") as file:
        assert elf.file_offset(file, place) == place
    head = path.read_bytes()[place : place + 16]
    assert elf.entry(elf.Function("own", place, head), "x86_64") == (place, cheap)


def test_what_is_measured_is_near_what_another_program_pays(backend: LibbpfBackend, tmp_path: Path) -> None:
    """The stub calls in a tight loop, where a hit is cheaper: by a quarter here, never by two thirds."""
    needs("gcc")
    if platform.machine() != "x86_64":
        pytest.skip("measured on x86-64 only")
    fds = sorted(Path("/proc/self/fd").iterdir())
    price = price_of(backend)
    assert sorted(Path("/proc/self/fd").iterdir()) == fds
    assert "memfd:opusmon" not in Path("/proc/self/maps").read_text()
    library = Path(shutil.copy(built() / "libcuda.so.1", tmp_path / "stub.so"))
    with library.open("rb") as file:
        address = elf.functions(file, ["cuStreamQuery"])["cuStreamQuery"].address
    with Load(library) as load:
        bare = poll_ns(load)
        backend.attach(str(library), address, "poll_stream")
        entry = poll_ns(load) - bare
        backend.attach(str(library), address, "poll_end", on_return=True)
        both = poll_ns(load) - bare
    assert price.measured
    assert entry / 2 < price.entry_ns < 3 * entry
    assert both / 2 < 2 * price.pair_ns(cheap=True) < 3 * both
    assert price.step_ns > price.entry_ns  # single-stepping is two exceptions more


def poll_ns(load: Load) -> float:
    """Of one call: of the fastest of five runs, as this machine may be busy."""
    return min(load.do(f"poll {N} 17 0") for _ in range(5)) / N


def test_what_can_be_no_price_is_measured_again(
    backend: LibbpfBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    price = Price(1_234, 0, 600, measured=True)
    said = iter([None, None, price, price])
    monkeypatch.setattr(hit_price, "_measured", lambda _: next(said))
    assert price_of(backend) is price
    assert list(said) == [price]


def test_where_nothing_can_be_measured_it_is_assumed(
    backend: LibbpfBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "aarch64")
        assert price_of(backend) is ASSUMED

    def refuse(_: str) -> int:
        raise PermissionError("vm.memfd_noexec")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", refuse)
        assert price_of(backend) is ASSUMED
    with monkeypatch.context() as patch:  # the kernel has not run the program at each call
        patch.setattr(maps, "read_percpu", lambda *_: 4 * hit_price.CALLS - 1)
        assert price_of(backend) is ASSUMED
    with monkeypatch.context() as patch:  # so far off that it can be no price
        patch.setattr(hit_price, "MOST_NS", 200)
        assert price_of(backend) is ASSUMED


def test_bcc_is_not_asked_to_compile_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bcc:
        origin = "bcc"
        at_once = 1

    other: Backend = Bcc()  # type: ignore[assignment]
    assert price_of(other) is ASSUMED
