"""What drawing the latency pane costs: median CPU time of a live frame, printed.

Run: python tests/bench/bench_latency_pane.py. A live frame is what the dashboard does once a second: a scrape and ten
requests have come since, so nothing of the last frame may be reused. The span is five minutes: 3,000 requests and 300
scrapes of 100 buckets.
"""

from __future__ import annotations

import statistics
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.drawing import drawn_ms
from ui.fakelatency import PANE, TTFT_EDGES_S, FakeLatency
from ui.fakeview import T0

from opusmon.channels import BY_NAME
from opusmon.clock import NS, Anchors
from opusmon.schema import Batch
from opusmon.ui.glyphs import BRAILLE
from opusmon.ui.panes.base import Frame, PaneState, Size
from opusmon.window import Window

SECONDS = 300
FRAMES = 60
REQUESTS_PER_S = 10
SIZES = ((78, 21), (80, 17), (118, 32), (198, 55))


class Feed:
    """A window with five minutes of requests and scrapes; each step adds a second with other figures."""

    def __init__(self, slos: tuple[str, ...]) -> None:
        first = FakeLatency()
        for number in range(REQUESTS_PER_S):
            first.request(T0 + NS, label=f"label-{number % 4}", input_tokens=500 * 4 ** (number % 5))
        first.scrape(T0 + NS)
        edges = (0.0, *TTFT_EDGES_S, 20.0, 40.0, 80.0, float("inf"))
        for metric in ("ttft", "itl", "tpot", "e2e", "queue"):
            for lo, hi in pairwise(edges):
                first.bucket(T0 + NS, metric, lo, hi, 3)
        for text in slos:
            first.slo(text, T0 + NS)
        self.window = Window(first.strings, Anchors())
        self._last = {name: first.rows(name) for name in ("request", "engine", "engine_bucket", "status")}
        assert len(self._last["engine_bucket"]) == 100
        self._random = np.random.default_rng(1)
        self.t = T0
        self._number = 0
        for _ in range(SECONDS):
            self.step()

    def step(self) -> None:
        """One more second."""
        self.t += NS
        for name, rows in self._last.items():
            if not len(rows) or (name == "status" and (self.t // NS) % 60):
                continue
            new = rows.copy()
            new["t"] = self.t - NS // 3
            if name == "request":
                self._number += len(new)
                new["number"] = np.arange(self._number - len(new), self._number)
                new["ttft_ns"] *= self._random.lognormal(0, 1, len(new))
                new["e2e_ns"] = new["ttft_ns"] + 4e9
            elif name == "engine_bucket":
                new["count"] = self._random.integers(1, 9, len(new))
            self.window.push(Batch(BY_NAME[name], new))


def live_ms(slos: tuple[str, ...], size: Size, state: PaneState) -> float:
    """Median CPU time of a frame, ms."""
    feed = Feed(slos)
    times = []
    for _ in range(FRAMES):
        feed.step()
        frame = Frame(feed.window, feed.t, SECONDS * NS, size, BRAILLE, state)
        times.append(drawn_ms(PANE, frame))
    return statistics.median(times)


def main() -> None:
    """Print the table."""
    print("pane                                  ms per live frame")
    for slos in ((), ("ttft_p95<800ms", "errors<1%")):
        for width, height in SIZES:
            for words, state in (("", PaneState()), ("maximized", PaneState(maximized=True))):
                ms = live_ms(slos, Size(width, height), state)
                print(f"{len(slos)} objectives {width:>3}x{height:<3} {words:<12} {ms:10.2f}", flush=True)


if __name__ == "__main__":
    main()
