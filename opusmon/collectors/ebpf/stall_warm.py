"""When a process has warmed up: from then on, taking memory or loading code stalls requests."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

NS = 1_000_000_000
QUIET_NS = 20 * NS
"""Launching for so long without such calls makes a process warm."""
AFTER_NS = 300 * NS
"""So does having started so long ago."""


@dataclass(slots=True)
class Life:
    """What is known of a process, in monotonic ns; None for never.

    Attributes:
        started: when it started.
        active_since: when it was first seen to launch or wait.
        active_at: when it did so last.
        slow_at: the last call that took or freed memory or loaded code.
        warm: it has warmed up.
    """

    started: int
    active_since: int | None = None
    active_at: int | None = None
    slow_at: int | None = None
    warm: bool = False


def is_warm(life: Life, now: int, quiet_ns: int = QUIET_NS, after_ns: int = AFTER_NS) -> bool:
    """Whether a process is warm at `now` (monotonic ns); once it is, it stays so.

    It is when it started `after_ns` ago, or when it has launched work for `quiet_ns` in which it neither took nor
    freed memory nor loaded code.
    """
    if life.warm or now - life.started >= after_ns:
        return True
    if life.active_since is None or life.active_at is None:
        return False
    return life.active_at - max(life.active_since, life.slow_at or 0) >= quiet_ns


class Lives:
    """The processes that are watched.

    Args:
        quiet_ns: see `is_warm`.
        after_ns: see `is_warm`.
    """

    def __init__(self, quiet_ns: int = QUIET_NS, after_ns: int = AFTER_NS) -> None:
        self._quiet_ns = quiet_ns
        self._after_ns = after_ns
        self._lives: dict[int, Life] = {}

    def active(self, pid: int, at: int, now: int) -> None:
        """It launched or waited last at `at` (monotonic ns; 0 for never)."""
        life = self._life(pid, now)
        if at > (life.active_at or 0):
            life.active_since = life.active_since or at
            life.active_at = at

    def slow(self, pid: int, at: int, now: int) -> bool:
        """It took or freed memory or loaded code at `at`; returns whether it was warm by then."""
        life = self._life(pid, now)
        life.warm = is_warm(life, at, self._quiet_ns, self._after_ns)
        life.slow_at = at
        return life.warm

    def keep(self, pids: Iterable[int]) -> None:
        """Forget all others."""
        kept = set(pids)
        self._lives = {pid: life for pid, life in self._lives.items() if pid in kept}

    def _life(self, pid: int, now: int) -> Life:
        if pid not in self._lives:
            self._lives[pid] = Life(started_ns(pid) or now)
        return self._lives[pid]


def started_ns(pid: int) -> int | None:
    """When a process started, monotonic ns; None where it cannot be asked. Good to 10 ms."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123  (as its neighbours do)
            ticks = int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
    # The kernel counts it on the clock that goes on in suspend.
    suspended = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    return ticks * NS // os.sysconf("SC_CLK_TCK") - suspended
