"""The four panes, in the order of their keys."""

from __future__ import annotations

from opusmon.collectors import latency, stalls, streams
from opusmon.ui.panes.awaited import AwaitedPane
from opusmon.ui.panes.base import Pane
from opusmon.ui.panes.gpu import GpuPane

PANES: tuple[Pane, ...] = (
    AwaitedPane("latency", 1, latency.SHOWS),
    GpuPane(),
    AwaitedPane("streams", 3, streams.SHOWS),
    AwaitedPane("stalls", 4, stalls.SHOWS),
)
