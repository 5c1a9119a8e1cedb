"""The hardware's counts beside a kernel, from a recorder that is a real process: of this host, or one that is told."""

import sys
import time

import pytest

from opusmon.checks.banks_counter import counting
from opusmon.checks.banks_gpu import Busy
from opusmon.checks.nvrtc import CannotMeasure

TOLD = """
import os, sys, threading, time
from opusmon.channels import L2
from opusmon.schema import Batch, StringTable
from opusmon.wire import Encoder

RATE = {0: 31e9, 1: 7e9}
strings = StringTable()
encoder = Encoder(strings)
out = sys.stdout.buffer
out.write(encoder.hello("here"))
if "refuse" in sys.argv:
    out.write(encoder.unavailable("another profiler holds the hardware counters", ""))
    sys.exit(1)
assert sys.argv[-8:] == ["--only", "l2", *[w for o in ("deep=True", "bank_conflicts=True", "budget_pct=100") for w in ("--option", o)]]
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
nan = float("nan")
while True:
    t = time.monotonic_ns()
    for gpu, rate in RATE.items():
        values = {"gpu": gpu, "dt_ns": 20_000_000, "source": 0, "bank_conflicts_per_s": rate}
        row = (t, *(values.get(field.name, nan) for field in L2.fields))
        out.write(encoder.batch(Batch(L2, L2.rows([row]))))
    out.flush()
    time.sleep(0.02)
"""


def recorder(*words):
    return [sys.executable, "-c", TOLD, *words]


def test_conflicts_per_load_are_the_rate_of_windows_within_over_that_of_loads():
    with counting(recorder()) as counter:
        begin_ns = time.monotonic_ns()
        while counter.windows(begin_ns, 0) < 3:
            time.sleep(0.01)
        end_ns = time.monotonic_ns()
        # A thousand million loads a second.
        busy = Busy(begin_ns, end_ns, end_ns - begin_ns)
        assert counter.per_load(busy, 0) == pytest.approx(31)
        assert counter.per_load(busy, 1) == pytest.approx(7)
        assert counter.per_load(busy, 2) is None
        # Windows are 20 ms long: none lies within 1 ms.
        assert counter.per_load(Busy(end_ns, end_ns + 1_000_000, 10**6), 0) is None


def test_counters_that_are_refused_say_why():
    with pytest.raises(CannotMeasure, match="another profiler holds"), counting(recorder("refuse")):
        pass


def test_a_recorder_that_ends_or_sends_something_else_is_said():
    with pytest.raises(CannotMeasure, match="ended"), counting([sys.executable, "-c", "pass"]):
        pass
    with pytest.raises(CannotMeasure), counting([sys.executable, "-c", "print('x' * 100)"]):
        pass
    with pytest.raises(CannotMeasure, match="does not start"), counting(["/nowhere/opusmon"]):
        pass


def test_opusmons_own_says_what_this_host_lacks():
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(CannotMeasure, match=r"driver|GPU"), counting([sys.executable, "-m", "opusmon"]):
        pass
