"""However the stalls collector ends, its probes go with it; and what it says about its price."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from pathlib import Path

import pytest
from cuda_stub import Load, built
from cuda_stub.stall_watch import StallWatch
from needs import lacking, needs

from opusmon.collectors.ebpf.errors import ProbesUnavailable
from opusmon.collectors.ebpf.stall_cost import FILTER_NS
from opusmon.collectors.stalls import StallsCollector

needs("root", "gcc")
if why := StallsCollector.probe():
    lacking("libbpf", f"probes cannot be set here: {why.reason}")

MS = 1_000_000


def small(folder: Path) -> Path:
    """A library with two functions: its probes are removed quickly."""
    return Path(shutil.copy(built() / "small.so", folder / "libcuda.so.1"))


def in_kernel() -> set[tuple[str, str]]:
    """Programs, maps and probes that this process holds, by descriptor."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add((fd.name, str(fd.readlink())))
    return {one for one in found if re.fullmatch(r"anon_inode:(\[perf_event\]|bpf.*|\[bpf.*)", one[1])}


@pytest.mark.filterwarnings("ignore:not a bytes object:DeprecationWarning")  # bcc takes text, and says so
@pytest.mark.parametrize("backend", ["libbpf", "bcc"])
def test_no_probe_is_left_when_it_ends(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(backend)
    monkeypatch.setenv("OPUSMON_BPF", backend)
    held = in_kernel()  # of another test's collector, on its way out
    with Load(small(tmp_path)) as load:
        watch = StallWatch(only_pids=frozenset({load.pid}))
        watch.until(lambda: watch.files == 1)
        assert load.is_probed()
        load.do(f"wait 1 7 {20 * MS}")
        watch.until(lambda: watch.rows("wait", load.pid))
        load.do(f"futex {20 * MS}")
        watch.until(lambda: watch.rows("futex", load.pid))
        assert in_kernel() - held
        watch.close()
        assert in_kernel() <= held
        deadline = (
            time.monotonic() + 60
        )  # another collector, of a test that has just ended, may be on its way out
        while load.is_probed():
            assert time.monotonic() < deadline
    events = Path("/sys/kernel/tracing/uprobe_events")
    assert not events.exists() or str(tmp_path) not in events.read_text()


def test_its_price_and_what_it_lacks_here(tmp_path: Path) -> None:
    with Load(small(tmp_path)) as load:
        watch = StallWatch(only_pids=frozenset({load.pid}))
        watch.until(lambda: watch.files == 1)
        load.do("kernel 1000 7")
        watch.until(lambda: watch.of("cost"))
        (cost,) = watch.of("cost")
        assert cost["collector"] == "stalls"
        assert cost["calls"] > 2000  # entry and return of each launch, and switches of all threads
        assert cost["dropped"] == 0
        match = re.search(
            r"cost ([\d.]+) us at entry", [r for _, _, _, r in watch.reasons() if "probe hit" in r][-1]
        )
        assert match is not None
        price_ns = 1e3 * float(match[1])
        assert 2000 * price_ns * 0.99 <= cost["call_ns"] < cost["calls"] * price_ns
        assert cost["call_ns"] >= cost["calls"] * FILTER_NS
        said = {(field, scope): (state, reason) for field, scope, state, reason in watch.reasons()}
        assert said["kind", "capture"][0] == "not_supported"  # the library has no such functions
        assert said["kind", "alloc, free, module"][0] == "not_supported"
        assert ("kind", "wait") not in said
        assert said["kind", "tls"] == ("unavailable", "no watched process maps OpenSSL's libssl")
        assert "nothing lost" in said["", "ring"][1]
        assert watch.said("watching 1 process, probes are on 1 libcuda file")
        watch.close()


def test_launches_over_the_budget_are_watched_in_bursts_and_in_captures(tmp_path: Path) -> None:
    library = Path(shutil.copy(built() / "libcuda.so.1", tmp_path / "libcuda.so.1"))
    with Load(library) as load:
        watch = StallWatch(only_pids=frozenset({load.pid}), budget_pct=0.5)
        watch.until(lambda: watch.files == 1)
        load.do("kernel 20000 5")
        watch.until(lambda: watch.said("are watched in one interval of"))
        (said,) = {field for field, _, state, _ in watch.reasons() if state == "sampled"}
        assert said == "before"
        watch.until(lambda: not load.is_probed(), 30)

        def captured() -> bool:
            load.do("call cuStreamBeginCapture_v2 7 0 0 0 0")
            load.do("kernel 100 7")
            load.do("call cuStreamEndCapture 7 0 0 904 0")
            return any("cuLaunchKernel x100 on 0x7" in row["before"] for row in watch.rows("capture"))

        watch.until(captured, 30)  # and on again, for the series of captures
        watch.leave()


def test_a_backend_that_refuses_ends_it_with_its_reason(tmp_path: Path) -> None:
    def refuses(name: str, cflags: object) -> object:
        raise ProbesUnavailable("the kernel is locked down", "boot without lockdown")

    with Load(small(tmp_path)) as load:
        watch = StallWatch(only_pids=frozenset({load.pid}), make_backend=refuses)
        with pytest.raises(ProbesUnavailable, match="locked down"):
            watch.until(lambda: False)
