"""A GpuCollector in a child process, and waiting for what it says."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RUNNER = Path(__file__).with_name("run_gpu.py")
Row = dict[str, Any]


class Child:
    """Runs the collector and keeps every row it prints.

    Args:
        env: environment of the child, from `Stub.env`.
        options: keyword arguments of the runner: interval_ms, slow_ms, reprobe_ms, only_pids.
    """

    def __init__(self, env: Mapping[str, str], **options: Any) -> None:
        self.rows: list[Row] = []
        self._changed = threading.Condition()
        self._open = True
        self.process = subprocess.Popen(
            [sys.executable, str(RUNNER), json.dumps(options)],
            env={"NVML_STUB_WAIT_MS": "50", **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._changed:
                self.rows.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def _read_errors(self) -> None:
        self._errors.extend(self.process.stderr)

    def wait(
        self,
        channel: str,
        where: Callable[[Row], bool] = lambda row: True,
        *,
        after: int = 0,
        timeout_s: float = 60,
        **equal: Any,
    ) -> Row:
        """First row of a channel, printed after the `after`-th, that fits; fails with what was seen instead."""
        deadline = time.monotonic() + timeout_s
        place = after
        with self._changed:
            while True:
                for row in self.rows[place:]:
                    if (
                        row["channel"] == channel
                        and all(row.get(k) == v for k, v in equal.items())
                        and where(row)
                    ):
                        return row
                place = len(self.rows)
                left = deadline - time.monotonic()
                if left <= 0 or not self._open:
                    break
                self._changed.wait(left)
        seen = [row for row in self.rows if row["channel"] in (channel, "error", "status")][-12:]
        raise AssertionError(
            f"no {channel} row {equal} in time; last: {seen}; stderr: {''.join(self._errors)}"
        )

    def mark(self) -> int:
        """Place to give as `after`: only rows printed from now on."""
        with self._changed:
            return len(self.rows)

    def of(self, channel: str, **equal: Any) -> list[Row]:
        """Rows seen so far."""
        with self._changed:
            return [
                r
                for r in self.rows
                if r["channel"] == channel and all(r.get(k) == v for k, v in equal.items())
            ]

    def stop(self) -> float:
        """Ask the child to end; returns the seconds that took and fails when it ends badly."""
        begin = time.monotonic()
        self.process.stdin.close()
        code = self.process.wait(timeout=15)
        took = time.monotonic() - begin
        for thread in self._threads:
            thread.join(5)
        self.process.stdout.close()
        self.process.stderr.close()
        assert code == 0, "".join(self._errors)
        assert self._errors == [], "".join(self._errors)
        return took

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.process.poll() is None:
            if kind is None:
                self.stop()
                return
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()
