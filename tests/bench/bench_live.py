"""CPU, memory, terminal bytes and first frame of `opusmon live` beside `nvitop`, paired on one stub NVML.

    python tests/bench/bench_live.py [--gpus 8] [--seconds 20] [--rounds 3]

Both run in a real pty of 160x50 at their default rates; rounds alternate, so that the noise of the machine falls on
both. CPU is user + system time of the whole process tree; memory is its proportional set size (PSS, which counts
shared pages once). Needs gcc, and nvitop from the `bench` extra.
"""

import argparse
import fcntl
import os
import pty
import random
import select
import signal
import statistics
import struct
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from nvml_stub import Stub

HZ = os.sysconf("SC_CLK_TCK")


def tree(pid):
    """The process and its descendants."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, queue = [], [pid]
    while queue:
        found.append(queue.pop())
        queue += children.get(found[-1], [])
    return found


def cpu_s(pids):
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / HZ


def pss_mb(pids):
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1])
    return total / 1024


def read_for(fd, seconds, pid=None):
    """Bytes that came within a time, and the highest PSS seen."""
    end, count, peak, look = time.monotonic() + seconds, 0, 0.0, 0.0
    while (left := end - time.monotonic()) > 0:
        if select.select([fd], [], [], min(left, 0.5))[0]:
            try:
                count += len(os.read(fd, 65536))
            except OSError:
                break
        if pid is not None and time.monotonic() > look:
            peak, look = max(peak, pss_mb(tree(pid))), time.monotonic() + 2
    return count, peak


def measure(argv, env, seconds, needles):
    """Run a program in a pty; returns its figures."""
    began = time.monotonic()
    pid, fd = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        os.execvpe(argv[0], argv, env)
    seen = b""
    when = dict.fromkeys(needles, float("nan"))
    while time.monotonic() - began < 10 and not all(needle in seen for needle in needles):
        if select.select([fd], [], [], 0.2)[0]:
            seen += os.read(fd, 65536)
        for needle in needles:
            if needle in seen and when[needle] != when[needle]:
                when[needle] = time.monotonic() - began
    read_for(fd, 6)
    pids = tree(pid)
    before, at = cpu_s(pids), time.monotonic()
    count, peak = read_for(fd, seconds, pid)
    elapsed = time.monotonic() - at
    used = cpu_s(pids) - before
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(fd)
    return {
        "cpu_pct": 100 * used / elapsed,
        "pss_mb": peak,
        "tty_bps": count / elapsed,
        "frame_s": when[needles[0]],
        "data_s": when[needles[1]],
    }


def vary(stub, gpus, stop):
    """Change every figure of every GPU once a second, so that both programs have something to draw."""
    rng = random.Random(1)
    while not stop.wait(1):
        lines = []
        for gpu in range(gpus):
            values = {
                "power": rng.randint(90_000, 700_000),
                "temp": rng.randint(30, 80),
                "gpu_busy": rng.randint(0, 100),
            }
            values |= {"mem_busy": rng.randint(0, 100), "mem_used": rng.randint(1, 140) * 2**30}
            lines += [f"set {gpu} {key} {value}" for key, value in values.items()]
            lines += [f"gpm {gpu} {metric} {rng.uniform(0, 100):.1f}" for metric in (2, 3, 5, 10)]
            lines += [f"gpm {gpu} {metric} {rng.uniform(0, 25_000):.1f}" for metric in range(60, 98)]
        stub.configure(devices=gpus, lines=lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stub = Stub(Path(folder)).build()
        stub.configure(devices=args.gpus)
        env = {
            **os.environ,
            **stub.env(),
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
            "XDG_STATE_HOME": folder,
        }
        programs = {
            "opusmon": ([sys.executable, "-m", "opusmon"], (b"latency", b"GiB")),
            "nvitop": ([str(Path(sys.executable).parent / "nvitop"), "-m", "full"], (b"NVITOP", b"H200")),
        }
        figures = {name: [] for name in programs}
        stop = threading.Event()
        threading.Thread(target=vary, args=(stub, args.gpus, stop), daemon=True).start()
        for _ in range(args.rounds):
            for name, (argv, needles) in programs.items():
                figures[name].append(measure(argv, env, args.seconds, needles))
        stop.set()
    print(f"{args.gpus} GPUs, 160x50, {args.rounds} rounds of {args.seconds:g} s; medians")
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in figures.items()
    }
    for name, row in medians.items():
        print(f"{name:8}  cpu {row['cpu_pct']:5.2f} % of a core  pss {row['pss_mb']:6.1f} MB  "
              f"tty {row['tty_bps']:7.0f} B/s  first frame {row['frame_s']:.2f} s  first data {row['data_s']:.2f} s")  # fmt: skip
    ours, theirs = medians["opusmon"], medians["nvitop"]
    print("ratio     " + "  ".join(f"{key} {ours[key] / theirs[key]:.2f}" for key in ours))


if __name__ == "__main__":
    main()
