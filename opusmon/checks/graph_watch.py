"""Watches a capture while it is made: after which line it was invalid, and what ran outside of it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from opusmon.checks.graph_lines import Spot, following
from opusmon.checks.graph_record import Recorder, Seen
from opusmon.checks.where import NOWHERE, Place, here, place

NONE, ACTIVE, INVALIDATED = 0, 1, 2
"""CUstreamCaptureStatus in cuda.h."""

LEGACY_STREAMS = (0, 1)
"""Handles of the default stream: none given, and CU_STREAM_LEGACY."""


class Driver:
    """The one call of CUDA's driver that torch does not have: it tells an invalid capture from one under way.

    Raises:
        OSError: libcuda.so.1 does not load.
    """

    def __init__(self) -> None:
        self._call = ctypes.CDLL("libcuda.so.1").cuStreamIsCapturing
        self._call.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]

    def status(self, stream: int) -> int | None:
        """NONE, ACTIVE or INVALIDATED; None when CUDA does not say."""
        answer = ctypes.c_int(NONE)
        return answer.value if self._call(stream, ctypes.byref(answer)) == 0 else None


class Watch:
    """What happens to a capture, for one call.

    Args:
        driver: says how the capture is.
        stream: the stream that is captured.

    Attributes:
        recorder: the operations of the call.
        broke: line after which the capture was found invalid first, NOWHERE while it is not.
        broke_op: operation of torch that had just run, "" when it was none.
        is_elsewhere: that line is one of another thread, started during the call.
        outside: what ran on a stream that is no part of the capture.
        forked: last operation on each side stream that is part of the capture, and not joined since, by handle.
    """

    def __init__(self, driver: Driver, stream: int) -> None:
        self.recorder = Recorder(on_gpu=True, before=self._before, after=self._after)
        self.broke: Place = NOWHERE
        self.broke_op = ""
        self.is_elsewhere = False
        self.outside: list[Seen] = []
        self.forked: dict[int, tuple[str, Place]] = {}
        self._driver = driver
        self._stream = stream
        self._is_broken = False
        self._thread = threading.get_ident()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While it lasts, look after each operation and each line."""
        original = torch.cuda.Stream.wait_stream

        def wait_stream(stream: Any, other: Any) -> None:
            original(stream, other)
            if stream.cuda_stream == self._stream:
                self.forked.pop(other.cuda_stream, None)

        torch.cuda.Stream.wait_stream = wait_stream
        try:
            with self.recorder.recording(), following(self._line, threads=True):
                yield
        finally:
            torch.cuda.Stream.wait_stream = original

    def kind_at(self, at: Place) -> tuple[str | None, str]:
        """Kind and operation of what was seen last on a line; (None, "") when nothing was."""
        for seen in reversed([*self.recorder.seen, *self.outside]):
            if seen.place == at and seen.level == "problem":
                return seen.kind, seen.op
        return None, ""

    def _before(self, op: str) -> None:
        current = torch.cuda.current_stream().cuda_stream
        if current == self._stream or self._is_broken:
            return
        if current in LEGACY_STREAMS:
            self.outside.append(Seen("legacy_stream", op, here()))
        elif self._driver.status(current) == NONE:
            self.outside.append(Seen("uncaptured_stream", op, here()))
        else:
            self.forked[current] = (op, here())

    def _after(self, op: str, _: BaseException | None) -> None:
        if self._broken():
            self.broke, self.broke_op = here(), op

    def _line(self, spot: Spot, _: FrameType) -> None:
        if self._broken():
            self.broke = place(*spot)
            self.is_elsewhere = threading.get_ident() != self._thread

    def _broken(self) -> bool:
        """Whether it is found broken now, for the first time."""
        if self._is_broken or self._driver.status(self._stream) != INVALIDATED:
            return False
        self._is_broken = True
        return True
