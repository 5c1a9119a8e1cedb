"""Targets without torch: for loading them, and for code that ends in a bad way."""

import os
import signal
import subprocess
import time
from pathlib import Path


def add(a, b=1):
    return a + b


def pair(size=2):
    return add, (size, 1)


def single():
    return add, 5


def named():
    return add, {"a": 1, "b": 2}


def several():
    return add, [(1, 2), {"a": 3}, 4]


def nothing():
    return add, []


def no_pair():
    return add


def broken():
    return {}["missing"]  # raises


def crashes():
    os.kill(os.getpid(), signal.SIGSEGV)


def exits():
    os._exit(7)


def hangs():
    print("said on stdout")
    helpers = [subprocess.Popen(["sleep", "600"], start_new_session=own) for own in (False, True)]
    pids = [os.getpid(), *(helper.pid for helper in helpers)]
    Path(os.environ["PLAIN_PIDS"]).write_text(f"{' '.join(map(str, pids))}\n", encoding="ascii")
    time.sleep(600)


class Holder:
    make = staticmethod(pair)


VALUE = 3


def leaves():
    raise SystemExit("no licence")  # leaves


def closes():
    os.closerange(3, 100)
    time.sleep(600)


def single_in_three():
    return abs, 1, 2


def caches():
    raise ValueError(f"{os.environ['TRITON_CACHE_DIR']} {os.environ['TORCHINDUCTOR_CACHE_DIR']}")
