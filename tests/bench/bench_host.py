"""What a tick of the host collector costs, by part, and what psutil would take for the same numbers.

Run with nothing else on the machine: `python tests/bench/bench_host.py [PROCESSES]`. Medians over the rounds; the
processes are sleeping children.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from opusmon.clock import SystemClock
from opusmon.collectors.host import HostCollector
from opusmon.collectors.host.cgroup_tree import hierarchies
from opusmon.collectors.host.cgroups import Groups
from opusmon.collectors.host.devices import Devices
from opusmon.collectors.host.engines import Engines
from opusmon.collectors.host.machine import Machine
from opusmon.collectors.host.pressure import SystemPressure
from opusmon.collectors.host.processes import Processes
from opusmon.collectors.host.reading import Row
from opusmon.collectors.host.system import System
from opusmon.collectors.process_names import Users
from opusmon.schema import StringTable

ROUNDS = 300


def median_us(action: Callable[[], object]) -> float:
    """Median microseconds of an action."""
    took = []
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        action()
        took.append(time.perf_counter_ns() - start)
    return statistics.median(took) / 1e3


def parts(pids: list[int]) -> None:
    """Print the parts of a tick."""
    clock = SystemClock()
    system, pressure, devices = System("/proc"), SystemPressure("/proc"), Devices("/proc", "/sys")
    processes, groups = Processes("/proc", clock, Users()), Groups(hierarchies("/proc", "/sys"), clock)
    machine, engines = Machine("/proc", "/sys", clock), Engines("/proc")
    watched = dict.fromkeys(pids, "")

    def read_processes() -> None:
        processes.read(watched, time.clock_gettime_ns(time.CLOCK_BOOTTIME))

    read_processes()
    members = {life.cgroup: life.paths for life in processes.lives.values()}
    actions: dict[str, Callable[[], object]] = {
        "stat, loadavg, meminfo, vmstat": lambda: system.read(Row(), clock.now()),
        "pressure": lambda: pressure.read(Row(), clock.now()),
        "disks and network": lambda: devices.read(Row(), clock.now()),
        "a row of host, all of these": machine.read,
        f"{len(pids)} processes": read_processes,
        f"their groups ({len(members)})": lambda: groups.read(members),
        f"look for engines ({len(list(Path('/proc').glob('[0-9]*')))} processes), every 5 s": engines.look,
    }
    for name, action in actions.items():
        print(f"{name:<56}{median_us(action):8.0f} us")


def with_psutil(pids: list[int]) -> None:
    """Print what psutil takes for the processes and the machine."""
    try:
        import psutil
    except ImportError:
        print("psutil is not installed: not compared")
        return
    known = [psutil.Process(pid) for pid in pids]

    def read_processes() -> None:
        for process in known:
            with process.oneshot():
                process.cpu_times(), process.memory_info(), process.num_threads(), process.num_ctx_switches()
                (
                    process.num_fds(),
                    process.io_counters(),
                    process.name(),
                    process.uids(),
                    process.create_time(),
                )

    def read_machine() -> None:
        psutil.cpu_times(), psutil.cpu_stats(), psutil.virtual_memory(), psutil.swap_memory()
        psutil.disk_io_counters(), psutil.net_io_counters(), psutil.getloadavg()

    print(f"{f'psutil, {len(pids)} processes, fewer fields':<56}{median_us(read_processes):8.0f} us")
    print(f"{'psutil, the machine, no pressure, no paging':<56}{median_us(read_machine):8.0f} us")


async def at_work(pids: list[int], seconds: int) -> None:
    """Print CPU time of whole ticks at an interval of 1 s: of the process, and of the event loop's thread in it."""
    host = HostCollector(StringTable(), SystemClock(), only_pids=frozenset(pids))
    began: tuple[int, int] | None = None
    ticks = 0
    async for batch in host.batches():
        if batch.channel.name != "host":
            continue
        if began is None:
            began = time.process_time_ns(), time.thread_time_ns()
        elif ticks < seconds:
            ticks += 1
        if ticks == seconds:
            break
    assert began is not None
    whole, loop = (time.process_time_ns() - began[0], time.thread_time_ns() - began[1])
    print(f"{'whole ticks, 1 s apart: CPU time of the process':<56}{whole / ticks / 1e3:8.0f} us a tick")
    print(f"{'of that on the event loop':<56}{loop / ticks / 1e3:8.0f} us a tick")


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    children = [subprocess.Popen(["sleep", "600"]) for _ in range(count)]
    try:
        everyone = [os.getpid(), *(child.pid for child in children)]
        parts(everyone)
        with_psutil(everyone)
        asyncio.run(at_work(everyone, 10))
    finally:
        for child in children:
            child.kill()
            child.wait()
