"""What drawing the stalls pane costs: median CPU time of a live frame, printed.

Run: python tests/bench/bench_stalls_pane.py. A live frame is what the dashboard does once a second: new rows have
come, so nothing of the last frame may be reused. The last part reads a day from a recording.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.drawing import drawn_ms
from ui.fakestalls import PANE, FakeStalls, add_host, add_stall, add_status
from ui.fakeview import T0

from opusmon.channels import BY_NAME
from opusmon.clock import NS, Anchors
from opusmon.recording import Recording, store
from opusmon.recording.stage import Stage
from opusmon.schema import Batch
from opusmon.ui.glyphs import BRAILLE
from opusmon.ui.marks import Places
from opusmon.ui.panes.base import Frame, PaneState, Size
from opusmon.window import Window

SPAN_NS = 300 * NS
FRAMES = 40
SIZES = ((78, 21), (118, 32), (158, 45), (198, 57))
STATES = {
    "": PaneState(),
    "longest": PaneState(sort="longest"),
    "filtered": PaneState(filter="worker-1"),
    "maximized": PaneState(maximized=True, selected=3),
}
DAY_ROWS = 1_000_000


def rows_of(count: int, first: FakeStalls, begin: int, span_ns: int) -> np.ndarray:
    """`count` stalls spread over a time, of every kind, with durations from 5 ms to 5 s."""
    random = np.random.default_rng(1)
    one = first.rows("stall")
    rows = one[random.integers(0, len(one), count)].copy()
    rows["t"] = begin + np.sort(random.integers(1, span_ns, count))
    rows["dur_ns"] = 5e6 * 10 ** random.uniform(0, 3, count)
    rows["tid"] = random.integers(1, 40, count)
    return rows


def samples() -> FakeStalls:
    """One row of each kind of several threads, a host row and a status row."""
    first = FakeStalls()
    kinds = ("wait", "off_cpu", "run_queue", "futex", "alloc", "module", "jit", "capture", "tls")
    for thread in range(8):
        for kind in kinds:
            add_stall(
                first, T0 + 1, kind, thread=f"worker-{thread}", stack="main;run;step;cuStreamSynchronize"
            )
    add_status(first, T0 + 1, reason="watching 2 processes")
    add_host(first, T0 + 1)
    return first


class Feed:
    """A window with `count` stalls in the span; each step adds a second with its share."""

    def __init__(self, count: int) -> None:
        self._first = samples()
        self.window = Window(self._first.strings, Anchors(), cap_b=1 << 28)
        self.t = T0 + SPAN_NS
        self._each = max(count * NS // SPAN_NS, 1)
        self.window.push(Batch(BY_NAME["stall"], rows_of(count, self._first, T0, SPAN_NS)))

    def step(self) -> None:
        """One more second."""
        rows = rows_of(self._each, self._first, self.t, NS)
        self.t += NS
        self.window.push(Batch(BY_NAME["stall"], rows))
        for name in ("status", "host"):
            new = self._first.rows(name).copy()
            new["t"] = self.t
            self.window.push(Batch(BY_NAME[name], new))


def live_ms(count: int, size: Size, state: PaneState) -> float:
    """Median over live frames, ms."""
    feed = Feed(count)
    times = []
    for _ in range(FRAMES):
        feed.step()
        times.append(drawn_ms(PANE, Frame(feed.window, feed.t, SPAN_NS, size, BRAILLE, state)))
    return statistics.median(times)


def marks_ms(count: int) -> tuple[float, float]:
    """CPU time of the marks on the time bar, ms: the first time, and median of each second after it."""
    feed = Feed(count)
    places = Places(feed.window)
    times = []
    for _ in range(FRAMES):
        begin = time.thread_time()
        places.update()
        times.append((time.thread_time() - begin) * 1e3)
        feed.step()
    return times[0], statistics.median(times[1:])


def day(folder: Path) -> None:
    """A recorded day: frames of wide spans, the first one and one with the file's pages at hand, and the marks."""
    first = samples()
    path = folder / "day.opusmon"
    write_day(path, first)
    with Recording.open(path) as recording:
        window = Window.over(recording)
        t = window.t1
        for span_ns in (SPAN_NS, 3600 * NS, 86_400 * NS):
            times = []
            for _ in range(5):
                window.version += 1  # as if a row had come
                drawn = Frame(window, t, span_ns, Size(158, 45), BRAILLE, PaneState(maximized=True))
                times.append(drawn_ms(PANE, drawn))
            print(
                f"day of {DAY_ROWS} stalls, span {span_ns // NS:>6} s  first {times[0]:8.1f}  then {statistics.median(times[1:]):8.1f}"
            )
        begin = time.thread_time()
        found = Places(window).update()
        print(
            f"day of {DAY_ROWS} stalls, {len(found)} marks     first {(time.thread_time() - begin) * 1e3:8.1f}"
        )


def write_day(path: Path, first: FakeStalls) -> None:
    """Record `DAY_ROWS` stalls over a day, in transactions of ten seconds."""
    connection, _ = store.create(path)
    stage = Stage(first.strings)
    rows = rows_of(DAY_ROWS, first, T0, 86_400 * NS)
    ends = np.searchsorted(rows["t"], T0 + np.arange(1, 8641) * 10 * NS)
    for part in np.split(rows, ends):
        if len(part):
            stage.build([Batch(BY_NAME["stall"], part)]).apply(connection)
    stage.finish([("closed", "0")]).apply(connection)
    store.finish(connection)


def main() -> None:
    """Print the tables."""
    print("pane                                   ms per live frame")
    for count in (300, 3_000, 100_000):
        for width, height in SIZES:
            for words, state in STATES.items():
                if words == "maximized" or (width, height) in SIZES[:1] or count > 3_000:
                    ms = live_ms(count, Size(width, height), state)
                    print(f"{count:>6} stalls {width:>3}x{height:<3} {words:<12} {ms:12.2f}", flush=True)
        first, then = marks_ms(count)
        print(f"{count:>6} stalls, marks   first {first:8.2f}  then {then:8.2f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        day(Path(folder))


if __name__ == "__main__":
    main()
