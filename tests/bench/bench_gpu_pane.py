"""What drawing costs: medians over many frames, printed. Run: python tests/bench/bench_gpu_pane.py."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from ui.fakeview import T0, add_processes, end_of, session

from opusmon.channels import ALL
from opusmon.clock import NS, Anchors
from opusmon.schema import Batch
from opusmon.ui.glyphs import ASCII, BLOCK, BRAILLE
from opusmon.ui.panes.base import Frame, PaneState, Size
from opusmon.ui.panes.gpu import GpuPane
from opusmon.ui.text import box
from opusmon.ui.widgets.chart import chart
from opusmon.ui.widgets.timeline import TimeBar, TimeMark, timeline
from opusmon.window import Window

SECONDS = 300


def median_ms(call, runs: int = 60) -> float:
    """Median wall time of a call, ms."""
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def window(gpus: int) -> Window:
    """Five minutes of GPUs at one row a second, in a real window."""
    fake = session(gpus, seconds=SECONDS)
    add_processes(fake, T0 + (SECONDS - 2) * NS, gpus, each=2)
    view = Window(fake.strings, Anchors(), channels=ALL)
    for name, channel in fake.channels.items():
        view.push(Batch(channel, fake.rows(name)))
    return view


def main() -> None:
    """Print the table."""
    pane = GpuPane()
    print("pane frame                                ms (median)")
    for gpus, width, height in ((1, 78, 21), (2, 78, 21), (8, 80, 23), (8, 236, 60), (16, 80, 17)):
        view = window(gpus)
        for words, state in (("", PaneState()), ("maximized", PaneState(maximized=True))):
            frame = Frame(view, end_of(SECONDS), SECONDS * NS, Size(width, height), BRAILLE, state)
            print(
                f"{gpus:>2} gpus {width:>3}x{height:<3} {words:<10} render  {median_ms(lambda f=frame: pane.render(f)):6.2f}"
            )
        print(f"{gpus:>2} gpus {'':<18} title   {median_ms(lambda f=frame: pane.title(f)):6.2f}")
        print(f"{gpus:>2} gpus {'':<18} summary {median_ms(lambda f=frame: pane.summary(f)):6.2f}")
    lines = pane.render(frame)
    print(
        f"box 82x19                          {median_ms(lambda: box(lines, 'gpu', 82, 19, focused=True, glyphs=BRAILLE)):6.2f}"
    )
    values = np.sin(np.arange(160) / 9) * 50 + 50
    for glyphs in (BRAILLE, BLOCK, ASCII):
        print(
            f"chart 80x10 {glyphs.name:<8} {median_ms(lambda g=glyphs: chart(values, 80, 10, 0, 100, g), 300):6.3f}"
        )
    bar = TimeBar(0, 10**13, 10**13, 10**11, [TimeMark(n * 10**10, "xid") for n in range(500)])
    print(f"time bar 160 wide, 500 marks {median_ms(lambda: timeline(bar, 160, BRAILLE), 300):6.3f}")


if __name__ == "__main__":
    main()
