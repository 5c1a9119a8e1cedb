"""The four panes, in the order of their keys."""

from __future__ import annotations

from opusmon.collectors import shows
from opusmon.ui.panes.awaited import AwaitedPane
from opusmon.ui.panes.base import Pane
from opusmon.ui.panes.gpu import GpuPane
from opusmon.ui.panes.streams import StreamsPane

PANES: tuple[Pane, ...] = (
    AwaitedPane("latency", 1, shows.LATENCY),
    GpuPane(),
    StreamsPane(),
    AwaitedPane("stalls", 4, shows.STALLS),
)
