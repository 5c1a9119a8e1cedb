"""A terminal that takes no output: nobody waits for it, and what it missed is drawn anew."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from opusmon.ui.outlet import BEHIND_B, Outlet

PIPE_B = 64 << 10
"""What a pipe holds on Linux, pipe(7)."""


class Hanging:
    """A pipe that nobody reads, as a terminal behind a line that hangs, and its outlet."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.has_room = threading.Event()
        self.outlet = Outlet(self.writer, self.has_room.set)
        self.outlet.start()

    def fill(self) -> list[bool]:
        """Forty pieces of 4 KiB: the pipe and what may wait, and more."""
        return [self.outlet.put(b"%04d" % n * 1024) for n in range(40)]

    def read(self, size_b: int) -> bytes:
        found = b""
        while len(found) < size_b:
            found += os.read(self.reader, size_b - len(found))
        return found


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    made = Hanging()
    yield made
    os.close(made.reader)  # whoever writes now is told that nobody reads
    made.outlet.close()
    made.outlet.join(5)
    assert not made.outlet.is_alive()
    os.close(made.writer)


def test_what_is_taken_is_written_whole_and_in_order(hanging: Hanging) -> None:
    taken = hanging.fill()
    assert taken[:16] == [True] * 16
    assert not taken[-1]
    assert BEHIND_B // 4096 + 1 <= sum(taken) <= (PIPE_B + BEHIND_B) // 4096 + 2
    kept = b"".join(b"%04d" % n * 1024 for n, one in enumerate(taken) if one)
    assert hanging.read(len(kept)) == kept


def test_when_there_is_room_again_it_is_said_once_all_is_written(hanging: Hanging) -> None:
    taken = hanging.fill()
    assert not hanging.has_room.is_set()
    hanging.read(4096 * sum(taken))
    assert hanging.has_room.wait(5)
    assert hanging.outlet.put(b"all of it, anew")
    assert hanging.read(15) == b"all of it, anew"


def test_nothing_dropped_is_nothing_to_draw_anew(hanging: Hanging) -> None:
    assert hanging.outlet.put(b"frame")
    assert hanging.read(5) == b"frame"
    assert hanging.outlet.close(5)
    assert not hanging.has_room.is_set()


def test_a_piece_larger_than_what_may_wait_goes_through(hanging: Hanging) -> None:
    assert hanging.outlet.put(b"x" * (4 * BEHIND_B))
    assert hanging.read(4 * BEHIND_B) == b"x" * (4 * BEHIND_B)


def test_closing_does_not_wait_for_a_terminal_that_hangs(hanging: Hanging) -> None:
    hanging.fill()
    assert not hanging.outlet.close(0.05)
    assert not hanging.outlet.put(b"more")


def test_a_terminal_that_is_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    outlet = Outlet(writer, lambda: None)
    outlet.start()
    outlet.put(b"frame")
    outlet.join(5)
    assert not outlet.is_alive()
    assert outlet.close(5)
    assert not outlet.put(b"frame")
    os.close(writer)
