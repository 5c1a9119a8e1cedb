"""Many short processes, each a fork of this one, some at a time: what each says, and how each ends.

To CUDA a fork of a process that has made no CUDA call is a fresh process. It costs a few milliseconds where an
interpreter costs tens, so that a race can be repeated a thousand times.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from opusmon.processes import KILLED_S, die_with_parent, signal_name

_TICK_S = 0.002
_READ_B = 65536
_SLOTS = 64
_SLOT_B = 48

Key = TypeVar("Key")


class Stages:
    """The call in which each thread of a fork is, in memory shared with its parent: it is known also after a crash."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SLOTS * _SLOT_B)
        self._here = threading.local()

    def thread(self, slot: int) -> None:
        """Give the calling thread a slot of its own."""
        self._here.slot = slot % _SLOTS

    def enter(self, name: str) -> None:
        """The calling thread begins this call."""
        start = getattr(self._here, "slot", 0) * _SLOT_B
        self._memory[start : start + _SLOT_B] = name.encode()[:_SLOT_B].ljust(_SLOT_B, b"\0")

    def leave(self) -> None:
        """The calling thread is back from it."""
        start = getattr(self._here, "slot", 0) * _SLOT_B
        self._memory[start] = 0

    def inside(self) -> list[str]:
        """The calls that have begun and not come back, each once."""
        slots = (self._memory[place : place + _SLOT_B] for place in range(0, _SLOTS * _SLOT_B, _SLOT_B))
        return sorted({slot.rstrip(b"\0").decode() for slot in slots if slot[0]})

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


Work = Callable[[Stages], dict[str, Any]]
"""What a fork does; returns JSON values."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a fork ended.

    Attributes:
        said: what its work returned; None when it did not come to that.
        signal: name of the signal that ended it, "" when none did.
        hung: it was killed because it ran too long.
        inside: the calls in which its threads were at the end, when it hung or crashed.
    """

    said: dict[str, Any] | None
    signal: str = ""
    hung: bool = False
    inside: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Running(Generic[Key]):
    key: Key
    pid: int
    pipe: int
    until_s: float
    stages: Stages
    said: bytearray
    hung: bool = False


def run_forks(
    jobs: Iterator[tuple[Key, Work]],
    seen: Callable[[Key, Ended], None],
    *,
    at_once: int,
    deadline_s: float,
    hang_s: float,
) -> bool:
    """Run jobs in forks of this process, which must have made no CUDA call and have one thread.

    Args:
        jobs: taken one by one as places become free.
        seen: told of every fork that has ended by itself or hung.
        at_once: most forks at a time.
        deadline_s: of time.monotonic; forks that still run then are killed and not told of.
        hang_s: a fork that runs longer is killed, and has hung.

    Returns:
        Whether all jobs were done before the deadline.
    """
    running: list[_Running[Key]] = []
    more = True
    try:
        while more or running:
            if time.monotonic() >= deadline_s:
                return False
            while more and len(running) < at_once:
                job = next(jobs, None)
                if job is None:
                    more = False
                else:
                    running.append(_start(*job, hang_s))
            for one in list(running):
                if (ended := _look(one)) is not None:
                    running.remove(one)
                    seen(one.key, ended)
            time.sleep(_TICK_S)
    finally:
        _kill(running)
    return True


def run_one(work: Work, *, hang_s: float) -> Ended:
    """Run one job in a fork and wait for it."""
    found: list[Ended] = []
    run_forks(
        iter([("", work)]),
        lambda _, ended: found.append(ended),
        at_once=1,
        deadline_s=time.monotonic() + hang_s + KILLED_S,
        hang_s=hang_s,
    )
    return found[0] if found else Ended(None, hung=True)


def _start(key: Key, work: Work, hang_s: float) -> _Running[Key]:
    stages = Stages()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _in_fork(work, stages, writing)
    os.close(writing)
    os.set_blocking(reading, False)
    return _Running(key, pid, reading, time.monotonic() + hang_s, stages, bytearray())


def _in_fork(work: Work, stages: Stages, pipe: int) -> None:
    """Do the work, say what came of it, and end; never returns."""
    try:
        die_with_parent()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # A library's warnings, once for each of a thousand repetitions, are no use to anybody.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        try:
            said = work(stages)
        except Exception as error:
            said = {"raised": f"{type(error).__name__}: {error}"[:500]}
        with os.fdopen(pipe, "w", encoding="utf-8") as out:
            json.dump(said, out)
    finally:
        os._exit(0)


def _look(one: _Running[Any]) -> Ended | None:
    """How it ended; None while it runs."""
    _read(one)
    pid, status = os.waitpid(one.pid, os.WNOHANG)
    if pid:
        _read(one)
        os.close(one.pipe)
        return _ended(one, status)
    now_s = time.monotonic()
    if now_s >= one.until_s and not one.hung:
        one.hung = True
        one.until_s = now_s + KILLED_S
        os.kill(one.pid, signal.SIGKILL)
    elif now_s >= one.until_s:
        os.close(one.pipe)
        return _ended(one, 0)
    return None


def _ended(one: _Running[Any], status: int) -> Ended:
    inside = one.stages.inside()
    one.stages.close()
    if one.hung:
        return Ended(None, hung=True, inside=inside)
    name = signal_name(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else ""
    try:
        said = json.loads(one.said)
    except ValueError:
        said = None
    return Ended(said, name, inside=inside if name or said is None else [])


def _read(one: _Running[Any]) -> None:
    try:
        while data := os.read(one.pipe, _READ_B):
            one.said += data
    except BlockingIOError:
        return


def _kill(running: list[_Running[Any]]) -> None:
    for one in running:
        os.kill(one.pid, signal.SIGKILL)
    until_s = time.monotonic() + KILLED_S
    for one in running:
        while not os.waitpid(one.pid, os.WNOHANG)[0] and time.monotonic() < until_s:
            time.sleep(_TICK_S)
        os.close(one.pipe)
        one.stages.close()
