"""What the time line costs with and without the event lane: medians, printed. Run: python tests/bench/bench_lane.py.

Of the time line alone: with few marks and as many as a session can have. Of a whole frame of the dashboard: a replay of
the bundled session, a second on at each frame, in which everything may change.
"""

from __future__ import annotations

import asyncio
import statistics
import time

import numpy as np
from drawing import median_ms

from opusmon.clock import NS, ManualClock
from opusmon.paths import demo_file
from opusmon.recording import Recording
from opusmon.session import ReplaySession
from opusmon.ui.app import OpusmonApp
from opusmon.ui.glyphs import BRAILLE
from opusmon.ui.lane import time_lines
from opusmon.ui.marks import Place
from opusmon.ui.panes import PANES
from opusmon.ui.screens.dashboard import Dashboard, playhead_of
from opusmon.ui.widgets.timeline import MARKS, TimeBar

RUNS = 300
ROUNDS = 6
HOUR = 3600 * NS
ROWS = [(pane.number, pane.name) for pane in PANES]


def places(count: int) -> list[Place]:
    """Marks over an hour, a third of them lasting up to ten minutes, spread over the panes and no pane."""
    random = np.random.default_rng(1)
    kinds, panes = list(MARKS), ["", *(name for _, name in ROWS)]
    begins = np.sort(random.integers(0, HOUR, count)).tolist()
    return [
        Place(
            t,
            kinds[n % len(kinds)],
            "text",
            panes[n % len(panes)],
            int(random.integers(600 * NS)) * (n % 3 == 0),
        )
        for n, t in enumerate(begins)
    ]


def line_ms(count: int, width: int, rows: list[tuple[int, str]]) -> float:
    """Median CPU time of the time line with so many marks, and with rows for these panes, ms."""
    own, bar = places(count), TimeBar(0, HOUR, HOUR // 2, 300 * NS)
    return median_ms(lambda: time_lines(bar, own, rows, 2, "now", width, BRAILLE), RUNS)


async def frame_ms(size: tuple[int, int], *, lane: bool, clock: ManualClock) -> float:
    """Median CPU time of `Dashboard.frame` over the bundled session, ms."""
    session = ReplaySession(Recording.open(demo_file()), clock)
    playhead = playhead_of(session, clock.now)
    playhead.pause()
    app = OpusmonApp(session, glyphs=BRAILLE, playhead=playhead)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        board = next(screen for screen in app.screen_stack if isinstance(screen, Dashboard))
        if board.has_class("-lane") != lane:
            board.action_lane()
        await pilot.pause()
        times = []
        for second in range(20, 110):
            playhead.seek(session.window.t0 + second * NS)
            begin = time.thread_time()
            board.frame()
            times.append((time.thread_time() - begin) * 1e3)
    session.close()
    return statistics.median(times)


async def frames() -> None:
    """Whole frames with and without, in turn."""
    clock = ManualClock()
    for size in ((160, 50), (200, 60)):
        pairs = [
            [await frame_ms(size, lane=lane, clock=clock) for lane in (False, True)] for _ in range(ROUNDS)
        ]
        without, within = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"frame {size[0]}x{size[1]}: {without:.2f} ms without, {within:.2f} with, ratio {ratio:.2f}")


def main() -> None:
    """Print both tables."""
    print("time line                  ms per frame: one line, with the lane")
    for width in (160, 240):
        for count in (20, 500, 3000):
            one, every = (line_ms(count, width, rows) for rows in ([], ROWS))
            print(f"{width} wide, {count:>4} marks {one:24.3f} {every:10.3f}", flush=True)
    asyncio.run(frames())


if __name__ == "__main__":
    main()
