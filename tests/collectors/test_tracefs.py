"""tracefs is mounted for one process only, where the host has none."""

import os
import subprocess
import sys
from pathlib import Path

from needs import needs

from opusmon.collectors.ebpf import tracefs

SCRIPT = """
import os, threading
from pathlib import Path
from opusmon.collectors.ebpf import tracefs
import ctypes
libc = ctypes.CDLL(None)
libc.unshare(0x20000)
libc.mount(None, b"/", None, ctypes.c_ulong(0x44000), None)
for root in tracefs.ROOTS:
    while libc.umount2(os.fsencode(root), 2) == 0:
        pass
print("before", tracefs.mounted())
print("ensure", repr(tracefs.ensure()))
print("after", tracefs.mounted(), (Path("/sys/kernel/tracing/events/sched/sched_switch/format")).exists())
seen = []
thread = threading.Thread(target=lambda: seen.append(tracefs.mounted()))
thread.start(); thread.join()
print("threads", seen)
print("mounts", sum(" tracefs " in line for line in open(f"/proc/{os.getppid()}/mounts")))
"""


def test_it_is_mounted_for_this_process_and_its_threads_and_nobody_else():
    needs("root")
    mine = Path("/proc/self/mounts").read_text().count(" tracefs ")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "before False",
        "ensure ''",
        "after True True",
        "threads [True]",
        f"mounts {mine}",
    ]


def test_where_there_is_one_nothing_is_done(tmp_path, monkeypatch):
    (tmp_path / "events").mkdir()
    assert tracefs.mounted((tmp_path,))
    assert not tracefs.mounted((tmp_path / "none",))
    monkeypatch.setattr(tracefs, "mounted", lambda: True)
    namespace = Path("/proc/self/ns/mnt").readlink()
    assert tracefs.ensure() == ""
    assert Path("/proc/self/ns/mnt").readlink() == namespace


def test_without_root_it_says_so(monkeypatch):
    monkeypatch.setattr(tracefs, "mounted", lambda: False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert tracefs.ensure() == "tracefs is not mounted, and mounting it takes root"
