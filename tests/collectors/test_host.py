"""The host collector on the machine that runs the tests, whom it watches, and what it does when /proc hangs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from needs import needs

from opusmon.channels import CGROUP, GPU_PROCESS, HOST, PROCESS, STREAM
from opusmon.clock import NS, SystemClock
from opusmon.collectors.host import HostCollector, collector
from opusmon.collectors.host.cgroup_tree import hierarchies
from opusmon.collectors.host.cgroups import _COLUMNS as GROUP_COLUMNS
from opusmon.collectors.host.cgroups import Groups
from opusmon.collectors.host.processes import _COLUMNS, Processes
from opusmon.collectors.host.watchlist import FORGET_NS, MAX_PROCESSES, Seen, Watchlist
from opusmon.collectors.process_names import Users
from opusmon.schema import Batch, Channel, StringTable

BURN = """
import sys, time
for line in sys.stdin:
    before, end = time.process_time(), time.monotonic() + float(line)
    while time.monotonic() < end:
        pass
    print(time.process_time() - before, flush=True)
"""


class Child:
    """A process that burns CPU when told to, and says how much it has used."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.burn(0)  # it is up

    @property
    def pid(self) -> int:
        return self.process.pid

    def burn(self, seconds: float) -> float:
        """CPU seconds used within so many seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def end(self) -> None:
        self.process.communicate("")


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child()
    yield made
    made.end()


# -- against the machine


def test_cpu_of_a_process_is_what_the_process_says_itself(child: Child) -> None:
    processes = Processes("/proc", SystemClock(), Users())

    def read() -> list[Any]:
        return processes.read({child.pid: ""}, time.clock_gettime_ns(time.CLOCK_BOOTTIME))

    assert read() == []
    used_s = child.burn(1.0)
    (row,) = read()
    got = dict(zip(_COLUMNS, row.values, strict=True))
    # Two readings of clock ticks of 10 ms, and what the child does besides burning.
    assert got["cpu_pct"] / 100 * row.dt_ns / NS == pytest.approx(used_s, abs=0.05)
    assert 0 < got["age_ns"] < 60 * NS
    assert got["threads"] == 1
    assert got["fds"] >= 3
    assert got["rss_b"] > 1e6
    delay = got["run_delay_pct"]
    assert math.isnan(delay) or 0 <= delay <= 100
    assert used_s + delay / 100 * row.dt_ns / NS < 1.2  # it ran or waited for a CPU


def v1_or_v2(controller: str) -> Path:
    """A folder in which a group can be made that has a CPU limit; skips the test where there is none."""
    trees = hierarchies("/proc", "/sys")
    tree = trees.get(controller, trees.get(""))  # type: ignore[call-overload]
    if tree is None or not os.access(tree.point, os.W_OK):
        pytest.skip("no control groups that may be written to")
    return Path(tree.point)


@pytest.fixture
def limited() -> Iterator[tuple[str, list[Path]]]:
    """A group limited to a fifth of a core: its path, and its folders in the trees that count CPU."""
    needs("root")
    name = f"opusmon-test-{os.getpid()}"
    folders = list({v1_or_v2(controller) / name: None for controller in ("cpu", "cpuacct")})
    try:
        for folder in folders:
            folder.mkdir()
        _limit(folders[0])
        yield f"/{name}", folders
    except OSError as error:
        pytest.skip(f"no group with a CPU limit can be made: {error}")
    finally:
        for folder in folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _limit(folder: Path) -> None:
    if (folder / "cpu.max").exists():
        (folder / "cpu.max").write_text("20000 100000")
    else:
        (folder / "cpu.cfs_period_us").write_text("100000")
        (folder / "cpu.cfs_quota_us").write_text("20000")


def test_a_process_under_a_cpu_limit(limited: tuple[str, list[Path]], child: Child) -> None:
    path, folders = limited
    for folder in folders:
        (folder / "cgroup.procs").write_text(str(child.pid))
    clock = SystemClock()
    processes, groups = Processes("/proc", clock, Users()), Groups(hierarchies("/proc", "/sys"), clock)

    def read() -> dict[str, dict[str, float]]:
        processes.read({child.pid: ""}, 0)
        rows = groups.read({life.cgroup: life.paths for life in processes.lives.values()})
        return {row.cgroup: dict(zip(GROUP_COLUMNS, row.values, strict=True)) for row in rows}

    read()
    child.burn(1.5)
    row = read()[path]
    assert row["cpu_quota_cores"] == 0.2
    assert row["cpu_cores"] == pytest.approx(0.2, abs=0.05)
    # It ran a fifth of the time; on a busy machine part of the rest it was not held back but waited for a CPU.
    assert 10 < row["throttled_pct"] < 86
    assert row["throttled_periods_pct"] > 50
    child.end()


def own_comm() -> str:
    """What the kernel calls this process."""
    return Path("/proc/self/comm").read_text().strip()


async def rows_of(
    batches: AsyncIterator[Batch], channel: Channel, turns: int = 1
) -> tuple[list[np.void], list[Batch]]:
    """Rows of a channel until it came so often, and every batch until then."""
    rows: list[np.void] = []
    seen: list[Batch] = []
    async for batch in batches:
        seen.append(batch)
        if batch.channel == channel:
            rows += list(batch.rows)
            turns -= 1
            if not turns:
                break
    return rows, seen


async def test_rows_of_this_machine() -> None:
    strings, clock = StringTable(), SystemClock()
    began = clock.now()
    host = HostCollector(strings, clock, NS // 4, frozenset({os.getpid()}))
    assert HostCollector.probe() is None
    async with contextlib.aclosing(host.batches()) as batches:
        rows, seen = await rows_of(batches, HOST, 3)
        rest, _ = await rows_of(batches, CGROUP)
    assert {batch.channel.name for batch in seen} == {"host", "process", "cgroup", "status"}
    assert {batch.channel for batch in seen} <= set(host.channels)
    for before, row in zip([None, *rows], rows, strict=False):
        assert began < row["t"] <= clock.now()
        assert 0 < row["dt_ns"] < 20 * NS
        assert before is None or row["t"] - row["dt_ns"] == before["t"]
        shares = [
            name for name in HOST.dtype.names or () if name.endswith("_pct") and not np.isnan(row[name])
        ]
        assert len(shares) >= 4
        assert all(0 <= row[name] <= 100.01 for name in shares)
        assert row["cpus"] == os.sysconf("SC_NPROCESSORS_ONLN")
        assert 0 < row["mem_available_b"] <= row["mem_total_b"]
        assert row["mem_total_b"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        rates = [name for name in HOST.dtype.names or () if name.endswith(("_bps", "_per_s"))]
        assert all(np.isnan(row[name]) or row[name] >= 0 for name in rates)
    mine = [row for batch in seen if batch.channel == PROCESS for row in batch.rows]
    assert {row["pid"] for row in mine} == {os.getpid()}
    assert strings.text(mine[0]["name"]).startswith(own_comm())
    assert strings.text(mine[0]["cgroup"]) in {strings.text(row["cgroup"]) for row in rest}


async def test_what_is_missing_has_a_reason() -> None:
    strings = StringTable()
    host = HostCollector(strings, SystemClock(), NS // 4, frozenset({os.getpid(), 1}))
    async with contextlib.aclosing(host.batches()) as batches:
        _, seen = await rows_of(batches, HOST, 2)  # the first turn and its status rows are whole
    said = {
        tuple(strings.text(row[name]) for name in ("channel", "field", "scope"))
        for batch in seen
        if batch.channel.name == "status"
        for row in batch.rows
    }
    no_limit = {"cpu_quota_cores", "mem_limit_b"}
    for batch in seen[: next(n for n, batch in enumerate(seen) if batch.channel.name == "status")]:
        for row in batch.rows:
            scope = {"host": "", "process": f"pid {row['pid']}" if batch.channel == PROCESS else ""}
            where = scope.get(batch.channel.name) if batch.channel != CGROUP else strings.text(row["cgroup"])
            for field in batch.channel.fields:
                if field.dtype[1] == "f" and np.isnan(row[field.name]) and field.name not in no_limit:
                    assert (batch.channel.name, field.name, where) in said
    assert ("host", "psi_cpu_full_pct", "") in said


# -- whom it watches


def gpu_rows(strings: StringTable, t: int, pids: list[int], kind: str = "compute", origin: str = "") -> Batch:
    word = strings.intern(kind)
    return Batch(GPU_PROCESS, GPU_PROCESS.rows((t, 0, -1, pid, 0, 0, word, 1.0, 1.0) for pid in pids), origin)


def stream_rows(t: int, pid: int) -> Batch:
    rows = np.zeros(1, STREAM.dtype)
    rows["t"], rows["pid"] = t, pid
    return Batch(STREAM, rows)


def test_pids_come_from_rows_of_this_host() -> None:
    strings = StringTable()
    watched = Watchlist(strings)
    watched.push(gpu_rows(strings, 10, [30, 20, 30]))
    watched.push(stream_rows(10, 25))
    watched.push(gpu_rows(strings, 10, [40], kind="graphics"))
    watched.push(gpu_rows(strings, 10, [50], origin="other-host"))
    watched.push(Batch(HOST, np.zeros(1, HOST.dtype)))
    assert watched.pids(20) == [20, 25, 30]
    watched.engines = {20: 1, 60: 2}
    assert watched.pids(20) == [20, 25, 30, 60]
    assert watched.pids(10 + FORGET_NS) == [20, 60]


def test_pids_asked_for_are_the_only_ones() -> None:
    strings = StringTable()
    watched = Watchlist(strings, frozenset({9, 8}))
    watched.push(gpu_rows(strings, 10, [30]))
    watched.engines = {60: 2}
    assert watched.pids(20) == [8, 9]


def test_pids_of_another_namespace_mean_nothing() -> None:
    strings = StringTable()
    watched = Watchlist(strings)
    watched.foreign = True
    watched.push(gpu_rows(strings, 10, [30]))
    watched.engines = {60: 2}
    assert watched.pids(20) == [60]


def test_the_ended_are_forgotten_and_so_are_pids_that_others_took() -> None:
    strings = StringTable()
    watched = Watchlist(strings)
    heard = 50 * NS
    watched.push(gpu_rows(strings, heard, [1, 2, 3, 4]))
    watched.engines = {5: 77, 6: 77, 7: 77}
    seen = {2: Seen(heard - NS, 5), 3: Seen(heard + NS, 5), 5: Seen(0, 77), 6: Seen(0, 78)}
    watched.confirm([1, 2, 3, 5, 6, 7], seen)
    assert watched.pids(heard) == [2, 4, 5]  # 4 came after the question


def test_more_than_can_be_followed_are_counted() -> None:
    watched = Watchlist(StringTable())
    watched.engines = dict.fromkeys(range(1, MAX_PROCESSES + 4), 1)
    assert watched.pids(0) == list(range(1, MAX_PROCESSES + 1))
    assert watched.left_out(0) == 3


async def until(batches: AsyncIterator[Batch], wanted: Any) -> Batch:
    """The first batch for which `wanted` is true."""
    async for batch in batches:
        if wanted(batch):
            return batch
    raise AssertionError("it ended")


async def test_a_process_on_a_gpu_is_watched_until_it_ends(child: Child) -> None:
    strings, clock = StringTable(), SystemClock()
    host = HostCollector(strings, clock, NS // 4)
    host.push(gpu_rows(strings, clock.now(), [child.pid]))
    async with asyncio.timeout(20), contextlib.aclosing(host.batches()) as batches:
        there = await until(batches, lambda b: b.channel == PROCESS and child.pid in b.rows["pid"])
        row = there.rows[there.rows["pid"] == child.pid][0]
        assert strings.text(row["name"]).startswith("python")
        assert row["dt_ns"] > 0
        child.end()
        await until(batches, lambda _: child.pid not in host._watched.pids(clock.now()))


SECRET = "sk-not-for-the-record"
RENAMED = "open('/proc/self/comm', 'w').write('llama-server'); print('up', flush=True); input()"


@pytest.fixture
def engine() -> Iterator[subprocess.Popen[str]]:
    """A process called llama-server."""
    command = [sys.executable, "-S", "-c", RENAMED, SECRET]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield process
    process.communicate("\n")


async def test_an_engine_is_found_by_its_name(engine: subprocess.Popen[str]) -> None:
    strings = StringTable()
    host = HostCollector(strings, SystemClock(), NS // 4)
    async with asyncio.timeout(20), contextlib.aclosing(host.batches()) as batches:
        batch = await until(batches, lambda b: b.channel == PROCESS and engine.pid in b.rows["pid"])
    names = {strings.text(row["name"]) for row in batch.rows if row["pid"] == engine.pid}
    assert names == {"llama-server"}
    assert not any(SECRET in text for _, text in strings.since(0))


async def test_a_pid_asked_for_that_is_not_there_is_said() -> None:
    strings = StringTable()
    host = HostCollector(strings, SystemClock(), NS // 4, frozenset({2**22 + 1}))  # over the largest pid
    async with asyncio.timeout(20), contextlib.aclosing(host.batches()) as batches:
        batch = await until(batches, lambda b: b.channel.name == "status")
    said = {strings.text(r["scope"]): strings.text(r["state"]) for r in batch.rows}
    assert said[f"pid {2**22 + 1}"] == "unavailable"


# -- when /proc hangs


async def test_a_read_that_hangs_is_said_and_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    calls = []
    read = collector.Reader.read

    def hang(self: collector.Reader, pids: dict[int, str]) -> collector.Reading:
        calls.append(pids)
        if len(calls) > 2:
            free.wait(30)
        return read(self, pids)

    monkeypatch.setattr(collector.Reader, "read", hang)
    monkeypatch.setattr(collector, "STALE_NS", NS // 2)
    strings = StringTable()
    host = HostCollector(strings, SystemClock(), NS // 4)

    def stale(batch: Batch) -> bool:
        return batch.channel.name == "status" and any(strings.text(r["state"]) == "stale" for r in batch.rows)

    def mended(batch: Batch) -> bool:
        return batch.channel.name == "status" and any(
            strings.text(r["scope"]) == "reading" for r in batch.rows
        )

    async with asyncio.timeout(20), contextlib.aclosing(host.batches()) as batches:
        await until(batches, stale)
        assert len(calls) == 3  # nothing was piled up behind it
        free.set()
        batch = await until(batches, mended)
        assert {strings.text(r["state"]) for r in batch.rows if strings.text(r["scope"]) == "reading"} == {
            "ok"
        }
        await until(batches, lambda b: b.channel == HOST)


async def test_closing_does_not_wait_for_a_read_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    monkeypatch.setattr(collector, "process_name", lambda *_: free.wait(30) and "late")
    monkeypatch.setattr(collector, "STALE_NS", NS // 2)
    strings = StringTable()
    host = HostCollector(strings, SystemClock(), NS // 4, frozenset({os.getpid()}))
    async with asyncio.timeout(20), contextlib.aclosing(host.batches()) as batches:
        batch = await until(batches, lambda b: b.channel == PROCESS)
        assert strings.text(batch.rows[0]["name"]) == own_comm()
        await until(
            batches,
            lambda b: b.channel.name == "status" and "name" in {strings.text(r["field"]) for r in b.rows},
        )
        closing = time.monotonic()
    assert time.monotonic() - closing < 5
    free.set()


async def test_it_can_be_started_again() -> None:
    host = HostCollector(StringTable(), SystemClock(), NS // 4)
    for _ in range(2):
        async with asyncio.timeout(20), contextlib.aclosing(host.batches()) as batches:
            rows, _ = await rows_of(batches, HOST)
            assert rows[0]["dt_ns"] < 20 * NS


def test_without_proc_it_says_so(tmp_path: Path) -> None:
    gone = collector.probe(tmp_path)
    assert gone is not None
    assert gone.remedy


def test_the_pid_namespace_is_read(tmp_path: Path) -> None:
    assert collector.pid_namespace(tmp_path) == ""
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[4026532000]")
    assert collector.pid_namespace(tmp_path) == "pid:[4026532000]"
