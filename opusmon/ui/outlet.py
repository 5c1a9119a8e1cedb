"""Output to a terminal that may stop taking it: ssh over a line that hangs, ctrl+s, a laptop that was closed.

Textual waits for such a terminal, and what collects and records waits with it. Here frames are dropped meanwhile, and
all is drawn anew once the terminal takes output again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable

from textual.drivers.linux_driver import LinuxDriver

BEHIND_B = 64 << 10
"""While more waits to be written, what comes is dropped: some frames of a large terminal."""

CLOSE_S = 1.0
"""The terminal has so long to take the last of it."""


class Outlet(threading.Thread):
    """Writes to a descriptor, however long that takes, without letting anybody wait.

    Args:
        fd: of the terminal.
        on_room: called on this thread when all is written and something had been dropped.
    """

    def __init__(self, fd: int, on_room: Callable[[], None]) -> None:
        super().__init__(daemon=True, name="terminal")
        self._fd = fd
        self._on_room = on_room
        self._waiting: deque[bytes] = deque()
        self._held_b = 0
        self._has_dropped = False
        self._is_closed = False
        self._changed = threading.Condition()

    def put(self, data: bytes) -> bool:
        """Take data to be written; returns whether it was taken. Never blocks."""
        with self._changed:
            if self._is_closed or self._held_b > BEHIND_B:
                self._has_dropped = True
                return False
            self._waiting.append(data)
            self._held_b += len(data)
            self._changed.notify_all()
        return True

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Take no more; returns whether all was written within that time."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._held_b, timeout_s)

    def run(self) -> None:
        """Write until closed, or until the terminal is gone."""
        while (data := self._next()) is not None:
            try:
                self._write(data)
            except OSError:
                self._gone()
                return
            self._written(len(data))

    def _next(self) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            return self._waiting.popleft() if self._waiting else None

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._fd, left) :]

    def _written(self, size_b: int) -> None:
        with self._changed:
            self._held_b -= size_b
            has_room = not self._held_b and self._has_dropped and not self._is_closed
            if has_room:
                self._has_dropped = False
            self._changed.notify_all()
        if has_room:
            self._on_room()

    def _gone(self) -> None:
        with self._changed:
            self._is_closed, self._held_b = True, 0
            self._waiting.clear()
            self._changed.notify_all()


class PatientDriver(LinuxDriver):
    """Textual's driver for terminals, which does not wait for one that takes no output."""

    _outlet: Outlet | None = None
    _encoding = "utf-8"

    def start_application_mode(self) -> None:
        """Take the terminal."""
        loop, terminal = asyncio.get_running_loop(), sys.__stderr__
        assert terminal is not None  # noqa: S101  (Textual has the same)

        def redraw() -> None:
            with contextlib.suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(lambda: self._app.refresh(layout=True))

        self._encoding = terminal.encoding
        self._outlet = Outlet(terminal.fileno(), redraw)
        self._outlet.start()
        super().start_application_mode()  # type: ignore[no-untyped-call]

    def write(self, data: str) -> None:
        """Write to the terminal, or drop it where that takes nothing."""
        if self._outlet is not None:
            self._outlet.put(data.encode(self._encoding, "replace"))

    def close(self) -> None:
        """Let go of the terminal."""
        if self._outlet is not None:
            self._outlet.close()
            self._outlet = None
        super().close()
