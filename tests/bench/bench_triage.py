"""What `opusmon triage` and `opusmon explain` cost on a day of 8 GPUs, and where the time goes.

    python tests/bench/bench_triage.py [FILE] [--hours 24] [--rounds 3]

FILE is made when it is not there (about 4 minutes and 1 GB for 24 h; see `day_session`); without a name it lies in a
temporary folder and is made each time. The goals: triage under 10 s and 500 MB on two cores. Memory is the sum of the
highest resident sizes (VmHWM) of the command and its children.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import day_session
from bench_live import tree

from opusmon.clock import NS
from opusmon.recording import Recording
from opusmon.triage import run
from opusmon.triage.finding import Finding
from opusmon.triage.scene import Rule, Scene
from opusmon.triage.watch import Watch
from opusmon.window import Window


def peak_kb(pid: int) -> int:
    """Highest resident size of a process so far; 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM")), 0)


def command(*words: str) -> tuple[float, float, float]:
    """Wall s, CPU s and peak MB of an `opusmon` command, its children included."""
    peaks: dict[int, int] = {}
    before, start = os.times(), time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "opusmon", *words], stdout=subprocess.DEVNULL)
    while child.poll() is None:
        for pid in tree(child.pid):
            peaks[pid] = max(peaks.get(pid, 0), peak_kb(pid))
        time.sleep(0.02)
    wall_s, after = time.perf_counter() - start, os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return wall_s, cpu_s, sum(peaks.values()) / 1024


def timed(name: str, rounds: int, *words: str) -> None:
    """Medians of a command, printed."""
    wall_s, cpu_s, peak_mb = (
        statistics.median(one) for one in zip(*(command(*words) for _ in range(rounds)), strict=True)
    )
    print(f"{name:<16} {wall_s:6.2f} s wall  {cpu_s:6.2f} s CPU  {peak_mb:6.1f} MB at most")


def by_rule(path: Path) -> None:
    """CPU time of each rule in one process, with the reading of the rows that it is the first to ask for."""
    spent: defaultdict[str, float] = defaultdict(float)
    worst_s = 0.0
    plain = run.run_rule

    def watched(one: Rule, scene: Scene) -> Iterator[Finding]:
        nonlocal worst_s
        start = time.process_time()
        found = list(plain(one, scene))
        spent[one.name] += time.process_time() - start
        return iter(found)

    def piece(done: int, _total: int) -> None:
        nonlocal worst_s, last
        now = time.process_time()
        worst_s, last = max(worst_s, now - last), now

    run.run_rule = watched
    with Recording.open(path, through=True) as recording:
        last = start = time.process_time()
        found = run.look_over(Window.over(recording), recording.t0 - 1, recording.t1, progress=piece)
        whole_s = time.process_time() - start
    run.run_rule = plain
    print(
        f"one process: {whole_s:.2f} s CPU, {len(found)} findings; the slowest ten minutes {1e3 * worst_s:.0f} ms"
    )
    for name, s in sorted(spent.items(), key=lambda item: -item[1])[:16]:
        print(f"  {name:<26} {s:6.2f} s")


def replayed(path: Path) -> None:
    """What the screen does with it in replay: how long each look keeps it from answering a key."""
    with Recording.open(path, through=True) as recording:
        watch, looks_ms, done, start = Watch(Window.over(recording)), [], False, time.process_time()
        while not done:
            began = time.perf_counter()
            done = watch.advance(recording.t0, recording.t1)
            looks_ms.append(1e3 * (time.perf_counter() - began))
        whole_s = time.process_time() - start
    p95 = statistics.quantiles(looks_ms, n=20)[-1]
    print(
        f"in replay: {len(looks_ms)} looks, {whole_s:.1f} s CPU in all; a look takes {statistics.median(looks_ms):.0f} ms, "
        f"p95 {p95:.0f}, at most {max(looks_ms):.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--hours", type=float, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or Path(folder) / "day.opusmon"
        if not path.exists():
            day_session.write(path, args.hours)
        with Recording.open(path) as recording:
            hours = (recording.t1 - recording.t0) / 3600 / NS
            rows = sum(recording.counts().values())
        print(
            f"{hours:.1f} h, {rows / 1e6:.1f} million rows, {path.stat().st_size / 1e6:.0f} MB, {os.cpu_count()} cores"
        )
        timed("triage", args.rounds, "triage", str(path))
        middle_s = hours * 1800
        timed(
            "explain 10 min",
            args.rounds,
            "explain",
            str(path),
            "--from",
            f"{middle_s:.0f}s",
            "--to",
            f"{middle_s + 600:.0f}s",
        )
        by_rule(path)
        replayed(path)


if __name__ == "__main__":
    main()
