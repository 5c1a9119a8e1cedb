"""The hardware's own count of shared-memory bank conflicts, from opusmon's collector beside the kernel.

The collector (`opusmon stream --only l2`) is a process of its own: CUPTI's PM sampling needs privileges and may crash
its caller. It counts l1tex__data_bank_conflicts_pipe_lsu_mem_shared of a whole GPU, whoever causes them.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from opusmon.checks.banks_gpu import Busy
from opusmon.checks.nvrtc import CannotMeasure

READY_S = 30.0
"""Longest wait for its first row."""
_OPTIONS = ("deep=True", "bank_conflicts=True", "budget_pct=100")


@dataclass(frozen=True, slots=True)
class Row:
    """What was counted in a window.

    Attributes:
        begin_ns, end_ns: CLOCK_MONOTONIC.
        gpu: number in PCI order.
        per_s: conflicts a second.
    """

    begin_ns: int
    end_ns: int
    gpu: int
    per_s: float


class Counter:
    """Rows of the collector as they come; made by `counting`."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        from opusmon.schema import StringTable
        from opusmon.wire import Decoder

        self._child = child
        self._decoder = Decoder(StringTable())
        self._rows: list[Row] = []
        self._news = threading.Condition()
        self._ended = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for_rows(self, seconds: float = READY_S) -> None:
        """Until the first window has been counted.

        Raises:
            CannotMeasure: none came.
        """
        with self._news:
            come = self._news.wait_for(lambda: self._ended or self._rows, seconds)
            if self._ended:
                raise CannotMeasure(self._ended)
        if not come:
            raise CannotMeasure(f"the collector of hardware counters said nothing for {seconds:.0f} s")

    def windows(self, begin_ns: int, gpu: int) -> int:
        """How many windows that began after a time have been counted.

        Raises:
            CannotMeasure: no more will come.
        """
        with self._news:
            if self._ended:
                raise CannotMeasure(self._ended)
            return sum(row.gpu == gpu and row.begin_ns >= begin_ns for row in self._rows)

    def per_load(self, busy: Busy, gpu: int) -> float | None:
        """Conflicts per load of a warp, median of the windows within; None when there was none."""
        with self._news:
            rates = [
                row.per_s
                for row in self._rows
                if row.gpu == gpu and row.begin_ns >= busy.begin_ns and row.end_ns <= busy.end_ns
            ]
        return statistics.median(rates) / busy.loads_per_s if rates else None

    def _read(self) -> None:
        from opusmon.wire import WireError

        assert self._child.stdout is not None  # noqa: S101  (a pipe was asked for)
        why = ""
        try:
            while data := self._child.stdout.read1(65536):  # type: ignore[attr-defined]  # a buffered pipe
                self._take(data)
        except (WireError, OSError, ValueError) as error:
            why = str(error)
        if self._decoder.unavailable is not None:
            why = self._decoder.unavailable[0]
        with self._news:
            self._ended = why or "the collector of hardware counters ended"
            self._news.notify_all()

    def _take(self, data: bytes) -> None:
        rows = [
            Row(
                int(row["t"]) - int(row["dt_ns"]),
                int(row["t"]),
                int(row["gpu"]),
                float(row["bank_conflicts_per_s"]),
            )
            for batch in self._decoder.feed(data)
            if batch.channel.name == "l2"
            for row in batch.rows
        ]
        with self._news:
            self._rows += [row for row in rows if not math.isnan(row.per_s)]
            self._news.notify_all()


@contextlib.contextmanager
def counting(recorder: Sequence[str]) -> Iterator[Counter]:
    """A counter that has begun.

    Args:
        recorder: the command that runs opusmon.

    Raises:
        CannotMeasure: it does not start, or the counters are not to be had.
    """
    try:
        import opusmon.wire  # noqa: F401  (only asked whether it can be imported)
    except ImportError as error:
        # numpy, as a rule: opusmon needs it, the interpreter of --python may not have it.
        raise CannotMeasure(f"the collector's rows cannot be read by this interpreter: {error}") from error
    words = [word for option in _OPTIONS for word in ("--option", option)]
    try:
        child = subprocess.Popen(
            [*recorder, "stream", "--only", "l2", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        raise CannotMeasure(f"{recorder[0]} does not start: {error.strerror}") from error
    try:
        counter = Counter(child)
        counter.wait_for_rows()
        yield counter
    finally:
        # Its end of file tells it to go; the counters are free again when it has.
        if child.stdin is not None:
            child.stdin.close()
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdout is not None:
            child.stdout.close()
