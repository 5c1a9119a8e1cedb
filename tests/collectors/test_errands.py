"""What a collector of probes does beside its turns."""

from __future__ import annotations

import asyncio
import threading

import pytest

from opusmon.collectors.ebpf.errands import Errands


async def test_calls_are_made_in_order_on_one_other_thread() -> None:
    errands, made = Errands("probes"), []

    def call(number: int) -> int:
        made.append((number, threading.current_thread().name))
        return number * 2

    assert await asyncio.gather(*(errands.run(call, number) for number in range(5))) == [0, 2, 4, 6, 8]
    errands.close()
    assert made == [(number, "probes_0") for number in range(5)]


async def test_what_a_call_raises_comes_back() -> None:
    errands = Errands("probes")
    with pytest.raises(ZeroDivisionError):
        await errands.run(lambda: 1 / 0)
    errands.close()


async def test_the_failure_of_a_task_is_raised_at_the_next_turn() -> None:
    errands, ended = Errands("probes"), asyncio.Event()

    async def fails() -> None:
        ended.set()
        raise OSError("the kernel refused")

    errands.start(fails())
    errands.reap()  # not done yet
    await ended.wait()
    await asyncio.sleep(0)
    with pytest.raises(OSError, match="the kernel refused"):
        errands.reap()
    errands.reap()  # said once
    errands.close()


async def test_closing_cancels_tasks_and_makes_the_last_call_behind_those_before() -> None:
    errands, made, cancelled = Errands("probes"), [], asyncio.Event()
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go_on.wait(10)
        made.append("slow")

    async def works() -> None:
        try:
            await errands.run(slow)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    errands.start(works())
    assert await asyncio.get_running_loop().run_in_executor(None, begun.wait, 10)
    go_on.set()
    errands.close(lambda: made.append("last"))
    assert made == ["slow", "last"]
    async with asyncio.timeout(10):
        await cancelled.wait()
