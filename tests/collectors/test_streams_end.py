"""However the streams collector ends, its probes go with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cuda_stub import Load, built, copy_of_library
from cuda_stub.watch import Watch
from needs import lacking, needs

from opusmon.clock import SystemClock
from opusmon.collectors.ebpf import probes
from opusmon.collectors.facilities_ebpf import multi_uprobes
from opusmon.collectors.streams import StreamsCollector
from opusmon.schema import StringTable
from opusmon.worker import WorkerSource

needs("root", "gcc")
if why := StreamsCollector.probe():
    lacking("root", f"probes cannot be set here: {why.reason}")


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "opusmon", "stream", "--only", "streams"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(child.pid, flush=True)
while data := child.stdout.read1(65536):
    print(len(data), flush=True)
"""


def ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie that nobody has buried yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def close_stdin(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.close()


@pytest.mark.parametrize("kind", ["libbpf", "bcc"])
@pytest.mark.parametrize(
    ("end", "code"),
    [
        (close_stdin, 0),
        (subprocess.Popen.terminate, -signal.SIGTERM),
        (subprocess.Popen.kill, -signal.SIGKILL),
    ],
)
def test_no_probe_is_left_when_it_ends(
    tmp_path: Path,
    end: Callable[[subprocess.Popen[bytes]], None],
    code: int,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs(kind)
    monkeypatch.setenv(probes.VARIABLE, kind)
    with Load(copy_of_library(tmp_path)) as load:
        watch = Watch(stderr=subprocess.PIPE)
        watch.until(lambda: watch.files == 1)
        assert load.is_probed()
        end(watch.process)
        assert watch.process.wait(10) == code
        assert watch.process.stderr is not None
        assert watch.process.stderr.read() == b""  # nobody has anything to complain about at exit
        assert not load.is_probed()
        watch.close()


async def test_when_opusmon_ends_the_probes_of_a_whole_library_go_at_once(tmp_path: Path) -> None:
    """Killed, their process would take 0.05 s for each of the 39."""
    needs("libbpf")
    if not multi_uprobes(os.uname().release):
        pytest.skip("uprobe_multi needs kernel 6.6")
    library = Path(shutil.copy(built() / "libcuda.so.1", tmp_path / "libcuda.so.1"))
    with Load(library) as load:
        source = WorkerSource("streams", StringTable(), SystemClock(), end_s=10)
        async with asyncio.timeout(20), contextlib.aclosing(source.batches()) as batches:
            async for _ in batches:
                if load.is_probed("wait"):
                    break
        assert not load.is_probed()
        assert not load.is_probed("wait")


def test_no_probe_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    with Load(copy_of_library(tmp_path)) as load:
        parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        deadline = time.monotonic() + 60
        while not load.is_probed():  # until the probes are on
            assert time.monotonic() < deadline
        os.kill(parent.pid, signal.SIGKILL)
        parent.communicate()
        while load.is_probed() or not ended(child):
            assert time.monotonic() < deadline + 20, "the probes are still on"
    events = Path("/sys/kernel/tracing/uprobe_events")
    assert not events.exists() or str(child) not in events.read_text()
