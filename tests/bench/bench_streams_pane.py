"""What drawing the streams pane costs: median CPU time of a live frame, printed.

Run: python tests/bench/bench_streams_pane.py. A live frame is what the dashboard does once a second: new rows
have come for every stream, so nothing of the last frame may be reused.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.drawing import drawn_ms
from ui.fakestreams import HANDLE, PANE, FakeStreams, add_gpus, stream_fields
from ui.fakeview import T0

from opusmon.channels import BY_NAME
from opusmon.clock import NS, Anchors
from opusmon.schema import Batch
from opusmon.ui.glyphs import BRAILLE
from opusmon.ui.panes.base import Frame, PaneState, Size
from opusmon.window import Window

SECONDS = 300
FRAMES = 60
SIZES = ((78, 21), (80, 17), (118, 32), (158, 45))


class Feed:
    """A window with five minutes of streams in two processes; each step adds a second with other figures."""

    def __init__(self, streams: int) -> None:
        first = FakeStreams()
        add_gpus(first, 1, 2)
        for number in range(streams):
            first.add(
                "stream",
                T0 + NS,
                **stream_fields(
                    pid=12_000 + 70_000 * (number % 2),
                    stream=HANDLE + 0x100 * number,
                    thread=f"worker-{number % 8}",
                ),
            )
        self.window = Window(first.strings, Anchors())
        self._last = {name: first.rows(name) for name in ("gpu", "stream")}
        self._random = np.random.default_rng(1)
        self.t = T0
        for _ in range(SECONDS):
            self.step()

    def step(self) -> None:
        """One more second."""
        self.t += NS
        for name, rows in self._last.items():
            new = rows.copy()
            new["t"] = self.t - NS // 3
            if name == "stream":
                for field in ("launches", "graph_launches", "wait_ns", "bubble_ns", "d2d_b"):
                    new[field] = rows[field] * self._random.uniform(0, 2, len(rows))
            else:
                new["sm_util_pct"] = self._random.uniform(0, 100, len(rows))
            self.window.push(Batch(BY_NAME[name], new))


def live_ms(streams: int, size: Size, state: PaneState) -> float:
    """Median CPU time of a frame, ms."""
    feed = Feed(streams)
    times = []
    for _ in range(FRAMES):
        feed.step()
        frame = Frame(feed.window, feed.t, SECONDS * NS, size, BRAILLE, state)
        times.append(drawn_ms(PANE, frame))
    return statistics.median(times)


def main() -> None:
    """Print the table."""
    print("pane                              ms per live frame")
    for streams in (4, 60, 200):
        for width, height in SIZES:
            for words, state in (("", PaneState()), ("maximized", PaneState(maximized=True))):
                ms = live_ms(streams, Size(width, height), state)
                print(f"{streams:>3} streams {width:>3}x{height:<3} {words:<12} {ms:12.2f}", flush=True)


if __name__ == "__main__":
    main()
