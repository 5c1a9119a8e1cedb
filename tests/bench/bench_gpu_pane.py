"""What drawing costs: medians over many frames, printed. Run: python tests/bench/bench_gpu_pane.py.

A live frame is what the dashboard does once a second: new rows have come, so nothing of the last frame may be
reused. Bytes are what the rows that changed since the last frame send to a truecolour terminal.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from drawing import median_ms
from rich.style import Style
from ui.fakeview import T0, add_processes, end_of, session

from opusmon.channels import ALL
from opusmon.clock import NS, Anchors
from opusmon.schema import Batch
from opusmon.ui import themes
from opusmon.ui.glyphs import ASCII, BLOCK, BRAILLE
from opusmon.ui.marks import Place
from opusmon.ui.panes.base import Frame, PaneState, Size
from opusmon.ui.panes.gpu import GpuPane
from opusmon.ui.text import box, merge
from opusmon.ui.widgets.chart import chart
from opusmon.ui.widgets.timeline import TimeBar, timeline
from opusmon.window import Window

SECONDS = 300
FRAMES = 60


class Feed:
    """A window with five minutes of GPUs in it, to which each step adds a second in which every figure changes."""

    def __init__(self, gpus: int) -> None:
        fake = session(gpus, seconds=SECONDS)
        add_processes(fake, T0 + (SECONDS - 2) * NS, gpus, each=2)
        self.window = Window(fake.strings, Anchors(), channels=ALL)
        for name, channel in fake.channels.items():
            self.window.push(Batch(channel, fake.rows(name)))
        channels = fake.channels
        self._last = {
            name: (channels[name], fake.latest(name, end_of(SECONDS), 5 * NS)) for name in ("gpu", "nvlink")
        }
        self._random = np.random.default_rng(1)
        self.t = end_of(SECONDS)
        for _ in range(SECONDS):
            self.step()

    def step(self) -> None:
        """One more second."""
        self.t += NS
        for channel, rows in self._last.values():
            rows = rows.copy()
            rows["t"] = self.t - 400_000_000
            for field in channel.values:
                if field.endswith(("_pct", "_bps")) and field != "speed_bps":
                    top = 100 if field.endswith("pct") else 25e9
                    rows[field] = self._random.uniform(0, top, len(rows))
                elif field in ("power_mw", "temp_c", "sm_clock_mhz"):
                    rows[field] *= self._random.uniform(0.97, 1.03, len(rows))
                    rows[field] = np.clip(rows[field], 10, 690_000)
            self.window.push(Batch(channel, rows))


def sent_b(old, new, palette) -> int:
    """Bytes that the changed rows cost: cursor movement, and the text with its colours."""
    total = 0
    for before, after in zip(old, new, strict=True):
        if before != after:
            total += 8
            for text, name in merge(after):
                style = palette[name] + Style.parse("on #101010")
                total += len(style.render(text).encode())
    return total


def live(gpus: int, size: Size, state: PaneState) -> tuple[float, float]:
    """Median ms and mean bytes of a frame as the dashboard's widget draws it."""
    feed, pane = Feed(gpus), GpuPane()
    palette = themes.palette(themes.load_themes()[0][themes.DEFAULT])
    times, sent, shown = [], 0, None
    for _ in range(FRAMES):
        feed.step()
        frame = Frame(feed.window, feed.t, SECONDS * NS, size, BRAILLE, state)
        begin = time.thread_time()
        pane.items(frame)
        title = pane.title(frame)
        lines = box(
            pane.render(frame), title, size.width + 2, size.height + 2, focused=True, glyphs=frame.glyphs
        )
        times.append((time.thread_time() - begin) * 1e3)
        if shown is not None:
            sent += sent_b(shown, lines, palette)
        shown = lines
    return statistics.median(times), sent / (FRAMES - 1)


def main() -> None:
    """Print the table."""
    print("pane                           ms per live frame   bytes per live frame")
    for gpus, width, height in (
        (1, 78, 21),
        (2, 78, 21),
        (8, 78, 21),
        (8, 80, 23),
        (8, 236, 60),
        (16, 80, 17),
    ):
        for words, state in (("", PaneState()), ("maximized", PaneState(maximized=True))):
            ms, sent = live(gpus, Size(width, height), state)
            print(f"{gpus:>2} gpus {width:>3}x{height:<3} {words:<12} {ms:12.2f} {sent:20.0f}", flush=True)
    values = np.sin(np.arange(160) / 9) * 50 + 50
    for glyphs in (BRAILLE, BLOCK, ASCII):
        print(
            f"chart 80x10 {glyphs.name:<8} {median_ms(lambda g=glyphs: chart(values, 80, 10, 0, 100, g), 300):6.3f} ms"
        )
    bar = TimeBar(0, 10**13, 10**13, 10**11, [Place(n * 10**10, "xid") for n in range(500)])
    print(f"time bar 160 wide, 500 marks {median_ms(lambda: timeline(bar, 160, BRAILLE), 300):6.3f} ms")


if __name__ == "__main__":
    main()
