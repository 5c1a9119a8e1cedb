"""Both backends, and both kinds of uprobe, count the same: a load whose calls are known, on the stub libcuda."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from cuda_stub import Load, built, copy_of_library
from cuda_stub.watch import Watch
from needs import needs

from opusmon.collectors.ebpf import elf, probes
from opusmon.collectors.ebpf.attach import Libraries
from opusmon.collectors.ebpf.bcc_text import source
from opusmon.collectors.ebpf.libbpf import LibbpfBackend
from opusmon.collectors.ebpf.libcuda import Mapping, Scan
from opusmon.collectors.ebpf.maps import read_percpu
from opusmon.collectors.ebpf.names import Names
from opusmon.collectors.ebpf.probes import BccBackend
from opusmon.collectors.ebpf.stream_rows import Coverage
from opusmon.collectors.ebpf.stream_table import Hits, StreamTable, cflags
from opusmon.collectors.ebpf.symbols import ENTRIES
from opusmon.collectors.facilities_ebpf import multi_uprobes
from opusmon.schema import StringTable

needs("root", "gcc")

MS = 1_000_000

BACKENDS: dict[str, tuple[str, Callable[[], probes.Backend]]] = {
    "libbpf": ("libbpf", lambda: LibbpfBackend("streams", cflags())),
    "multi": ("libbpf", partial(LibbpfBackend, "streams", cflags(), by_multi=True)),
    "bcc": ("bcc", lambda: BccBackend(source("streams"), cflags())),
}


USED = """
cuLaunchKernel cuLaunchKernel_ptsz cuLaunchKernelEx cuGraphLaunch cuMemcpyHtoDAsync_v2 cuMemcpyPeerAsync
cuMemcpy2DAsync_v2 cuStreamSynchronize cuEventSynchronize cuEventRecord cuStreamQuery
"""
"""To be probed, and unprobed, sooner than all would be."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[probes.Backend]:
    """Each of them in turn."""
    kind, make = BACKENDS[request.param]
    needs(kind)
    if request.param == "multi" and not multi_uprobes(os.uname().release):
        pytest.skip("uprobe_multi needs kernel 6.6")
    made = make()
    yield made
    made.close()


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """The stub under a name that no other collector on this machine looks for."""
    return Path(shutil.copy(built() / "libcuda.so.1", tmp_path / "stub.so"))


@pytest.mark.filterwarnings("ignore:not a bytes object:DeprecationWarning")  # bcc, of its own caller
def test_every_kind_of_call_is_counted_exactly_and_probes_end_with_the_backend(
    backend: probes.Backend, private: Path
) -> None:
    with Load(private) as load:
        entries = {symbol: ENTRIES[symbol] for symbol in USED.split()}
        libraries = Libraries(backend, entries, lambda _, mapping: os.open(mapping.path, os.O_RDONLY))
        libraries.on |= {"launch", "poll"}
        libraries.follow(Scan({load.pid: (Mapping("00:00", 1, "0-1", str(private)),)}))
        assert libraries.refused == {}
        strings = StringTable()
        table = StreamTable(backend, Names(strings), frozenset({load.pid}))
        table.count_launches(0)
        table.hits()
        commands = (
            "kernel 10007 17",
            "ex 307 17",
            "graph 7 17",
            "kernel_ptsz 23 0",
            "h2d 3 1009 17",
            "peer 5 11 17",
            "box2d 1 2 1 100 7 17",
            "wait 2 17 3000000",
            "poll 29 17 13",
            "record 77 17",
            "wait_event 3 77 0",
            "threads 113 18 7",
            "bad_config",
        )
        each = {command: load.do(command) for command in commands}
        took = sum(each.values())
        batch = table.read(time.monotonic_ns(), took, Coverage(0, polls=True))
        assert batch is not None
        rows = {int(row["stream"]): row for row in batch.rows}
        assert rows.keys() == {2, 17, 18}
        launches = {stream: row["launches"] for stream, row in rows.items()}
        assert launches == {2: 23, 17: 10_007 + 307, 18: 7 * 113}
        row = rows[17]
        counts = ("graph_launches", "copies", "h2d_b", "d2d_b", "waits", "not_ready")
        assert [row[name] for name in counts] == [7, 3 + 5 + 1, 3 * 1009, 5 * 11, 2 + 3, 13]
        assert 6 * MS <= row["wait_ns"] <= took
        assert (
            2 * (each["wait 2 17 3000000"] < 10 * MS) <= row["wait_lt_10ms"] <= 2
        )  # a busy machine wakes late
        assert strings.text(row["thread"]) == "cuda_load"
        # Launches: one hit each. Waits and polls: entry and return. Copies, graphs, records: one.
        hits = table.hits()
        assert hits == Hits(
            launch=10_007 + 307 + 23 + 7 * 113 + 1, poll=2 * 29, always=7 + 9 + 2 * 5 + 1, lost_read=1
        )
        libraries.switch("launch", False)
        assert not load.is_probed()
        load.do("wait 1 17 0")
        assert table.hits() == Hits(always=2)
        table_fd = backend.map_fd("streams")
        os.fstat(table_fd)
        backend.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(table_fd)
        assert not load.is_probed("wait")
        libraries.close()


@pytest.mark.parametrize("by_multi", [False, True])
def test_a_link_that_is_gone_is_not_taken_for_a_later_one(by_multi: bool, private: Path) -> None:
    """Descriptors and addresses are used again; whoever detaches twice must not remove another probe."""
    needs("libbpf")
    with private.open("rb") as file:
        address = elf.functions(file, ["cuStreamSynchronize"])["cuStreamSynchronize"].address
    backend = LibbpfBackend("streams", cflags(), by_multi=by_multi)
    with Load(private) as load:
        first = backend.attach(str(private), address, "wait_stream")
        backend.detach(first)
        backend.attach(str(private), address, "wait_stream")
        backend.detach(first)
        load.do("wait 17 5 0")
        assert read_percpu(backend.map_fd("counts"), 2) == 17
    backend.close()


@pytest.mark.parametrize("kind", ["libbpf", "bcc"])
def test_the_collector_says_which_backend_it_has(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs(kind)
    monkeypatch.setenv(probes.VARIABLE, kind)
    with Load(copy_of_library(tmp_path)) as load, contextlib.closing(Watch()) as watch:
        watch.until(lambda: watch.said(f" one; loaded by {kind} "))
        measured = kind == "libbpf" and os.uname().machine == "x86_64"
        watch.until(lambda: watch.said("measured here" if measured else "assumed"))
        load.do("kernel 1009 17")
        watch.until(lambda: watch.sums(load.pid, 17).get("launches", 0) >= 1009)
        assert watch.sums(load.pid, 17) == {"launches": 1009}
