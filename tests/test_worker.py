"""A collector in a child process: what it sends arrives, and nothing it does takes the parent down.

The children here are real processes that speak the real wire format, or refuse to.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from opusmon.channels import STATUS
from opusmon.clock import NS, ManualClock, SystemClock
from opusmon.collectors.base import Unavailable
from opusmon.schema import StringTable
from opusmon.source import LiveSource
from opusmon.wire import Decoder, Encoder
from opusmon.worker import SourceLost, WorkerSource

SENDER = """
import sys, time
from opusmon.channels import GPU_EVENT
from opusmon.schema import Batch, StringTable
from opusmon.wire import Encoder
strings = StringTable()
encoder = Encoder(strings)
out = sys.stdout.buffer
def send(*codes):
    rows = [(n, 0, -1, strings.intern("xid"), code, 0) for n, code in enumerate(codes, 1)]
    out.write(encoder.batch(Batch(GPU_EVENT, GPU_EVENT.rows(rows)))); out.flush()
out.write(encoder.hello("child")); out.flush()
"""


def child(script):
    return [sys.executable, "-c", SENDER + textwrap.dedent(script)]


def worker(script, strings=None, **kwargs):
    return WorkerSource("gpu", strings or StringTable(), SystemClock(), argv=child(script), **kwargs)


async def collect(source, n, limit_s=60):
    """The first n batches."""
    got = []
    async with asyncio.timeout(limit_s), contextlib.aclosing(source.batches()) as batches:
        async for batch in batches:
            got.append(batch)
            if len(got) == n:
                break
    return got


async def gather(source, into):
    async for batch in source.batches():
        into.append(batch)


def words(batch, strings):
    return {f.name: strings.text(batch.rows[0][f.name]) for f in STATUS.fields}


async def test_batches_arrive_with_their_texts_translated():
    strings = StringTable()
    strings.intern("taken")
    (batch,) = await collect(worker("send(79, 13)\nsys.stdin.read()", strings), 1)
    assert batch.rows["code"].tolist() == [79, 13]
    assert strings.text(batch.rows["kind"][0]) == "xid"


async def test_a_child_that_ends_says_its_last_words():
    source = worker("send(1)\nprint('driver fell over', file=sys.stderr)\nsys.exit(3)")
    with pytest.raises(SourceLost, match="ended: driver fell over"):
        await collect(source, 9)


async def test_a_child_that_refuses_is_not_asked_again_soon():
    source = worker("out.write(encoder.unavailable('no driver', 'install it')); out.flush()")
    with pytest.raises(SourceLost) as lost:
        await collect(source, 1)
    assert (lost.value.why, lost.value.final) == (Unavailable("no driver", "install it"), True)


async def test_garbage_ends_the_child():
    with pytest.raises(SourceLost, match="garbage"):
        await collect(worker("out.write(b'x' * 100); out.flush(); sys.stdin.read()"), 1)


async def test_a_program_that_is_not_there():
    source = WorkerSource("gpu", StringTable(), SystemClock(), argv=["/no/such/program"])
    with pytest.raises(SourceLost, match="cannot start /no/such/program"):
        await collect(source, 1)


async def test_silence_is_said_and_then_the_child_is_replaced():
    strings = StringTable()
    source = worker("send(1)\ntime.sleep(600)", strings, silent_s=0.2, give_up_s=2)
    got = []
    began = time.monotonic()
    with pytest.raises(SourceLost, match="silent"):
        await gather(source, got)
    rows = [batch for batch in got if batch.channel.name == "gpu_event"]
    assert [batch.rows["code"].tolist() for batch in rows] == [[1]]
    assert words(got[-1], strings)["state"] == "stale"
    assert time.monotonic() - began < 20


async def test_a_child_that_ignores_every_signal_it_can_does_not_delay_the_parent():
    script = "import signal\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\nsend(1)\nwhile True: time.sleep(1)"
    began = time.monotonic()
    await collect(worker(script), 1)
    assert time.monotonic() - began < 5


async def test_a_source_that_dies_is_a_status_row_and_comes_back():
    strings = StringTable()
    source = LiveSource([worker("send(7)", strings)], strings, SystemClock(), backoff_s=(0.01,))
    got = await collect(source, 4)
    assert [batch.channel.name for batch in got] == ["gpu_event", "status", "gpu_event", "status"]
    said = words(got[1], strings)
    assert (said["collector"], said["state"]) == ("gpu", "restarting")
    assert "the gpu worker ended" in said["reason"]


async def test_a_failing_source_leaves_the_others_alone():
    strings = StringTable()

    class Broken:
        name = "broken"
        channels = ()

        async def batches(self):
            raise ZeroDivisionError("planted")
            yield

    good = worker("for n in range(5): send(n)\nsys.stdin.read()", strings)
    source = LiveSource([Broken(), good], strings, SystemClock(), backoff_s=(60,))
    got = await collect(source, 6)
    assert sum(batch.channel.name == "gpu_event" for batch in got) == 5
    (status,) = [batch for batch in got if batch.channel.name == "status"]
    assert "ZeroDivisionError: planted" in words(status, strings)["reason"]


async def test_what_cannot_run_is_said_from_the_start():
    strings = StringTable()
    absent = {"streams": Unavailable("needs root", "sudo opusmon")}
    source = LiveSource([], strings, ManualClock(5 * NS), absent=absent)
    (batch,) = await collect(source, 1)
    said = words(batch, strings)
    assert (said["collector"], said["state"], said["remedy"]) == ("streams", "unavailable", "sudo opusmon")
    assert batch.t0 == 5 * NS


TWO_LAST = """
send(1)
sys.stdin.read()
send(2)
time.sleep(0.05)
send(3)
"""


async def after_first(source, close):
    """The codes a LiveSource gives after its first batch, when it is closed or cancelled then."""
    first = asyncio.Event()

    async def run():
        async with contextlib.aclosing(source.batches()) as batches:
            async for _ in batches:
                first.set()
                if close:
                    return

    task = asyncio.create_task(run())
    async with asyncio.timeout(20):
        await first.wait()
        if not close:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return [batch.rows["code"].tolist() for batch in source.rest() if batch.channel.name == "gpu_event"]


@pytest.mark.parametrize("close", [False, True])
async def test_last_rows_of_a_child_that_ends_in_order_are_kept(close, caplog):
    strings = StringTable()
    source = LiveSource([worker(TWO_LAST, strings, end_s=10)], strings, SystemClock())
    assert await after_first(source, close) == [[2], [3]]
    assert list(source.rest()) == []
    assert caplog.records == []  # asyncio was left to bury the child


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancellation_that_comes_together_with_data_is_not_lost(turns):
    """Or the session would wait for this source for ever, and only SIGKILL would end `opusmon record`."""
    strings, pipe = StringTable(), asyncio.StreamReader()
    source = worker("", strings)
    read = source._read(SimpleNamespace(stdout=pipe), Decoder(strings, ""))

    async def run():
        async for _ in read:
            pass

    task = asyncio.create_task(run())
    for _ in range(5):
        await asyncio.sleep(0)
    pipe.feed_data(Encoder(StringTable()).hello("child"))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=5)
    task.cancel()
    assert done


async def test_a_child_that_has_no_last_rows_is_not_waited_for():
    strings = StringTable()
    source = LiveSource([worker(TWO_LAST, strings)], strings, SystemClock())
    assert await after_first(source, close=False) == []


async def test_a_child_that_does_not_end_in_order_is_killed_when_its_time_is_over():
    strings = StringTable()
    script = "send(os.getpid())\nsys.stdin.read()\nsend(2)\ntime.sleep(600)"
    source = worker("import os\n" + script, strings, end_s=0.5)
    began = time.monotonic()
    (batch,) = await collect(source, 1)
    assert time.monotonic() - began < 10
    assert [batch.rows["code"].tolist() for batch in source.last] == [[2]]
    assert gone(int(batch.rows["code"][0]))


PARENT = """
import asyncio, sys
from opusmon.clock import SystemClock
from opusmon.schema import StringTable
from opusmon.worker import WorkerSource
CHILD = '''
import os, sys
from opusmon.processes import die_with_parent
die_with_parent()
print("pid", os.getpid(), file=sys.stderr, flush=True)
import time
{what}
'''
async def main():
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        start_new_session=True)
    print((await child.stderr.readline()).decode(), end="", flush=True)
    await child.wait()
asyncio.run(main())
"""


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_child_dies_with_a_parent_that_is_killed():
    script = PARENT.replace("{what}", "time.sleep(600)")
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline().split()[1])
    assert not gone(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while not gone(pid):
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.01)
