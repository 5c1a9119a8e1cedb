"""The CPU time of one frame, for the benchmarks of what is drawn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from opusmon.ui.panes.base import Frame, Pane
from opusmon.ui.text import box


def drawn_ms(pane: Pane, frame: Frame) -> float:
    """CPU time of a frame as the dashboard's widget draws it, ms."""
    size = frame.size
    begin = time.thread_time()
    pane.items(frame)
    title = pane.title(frame)
    lines = pane.render(frame)
    box(lines, title, size.width + 2, size.height + 2, focused=True, glyphs=frame.glyphs)
    return (time.thread_time() - begin) * 1e3


def median_ms(call: Callable[[], object], runs: int = 60) -> float:
    """Median CPU time of a call, ms."""
    times = []
    for _ in range(runs):
        begin = time.thread_time()
        call()
        times.append((time.thread_time() - begin) * 1e3)
    return statistics.median(times)
