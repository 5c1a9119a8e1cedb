"""The four panes, in the order of their keys."""

from __future__ import annotations

from opusmon.ui.panes.base import Pane
from opusmon.ui.panes.gpu import GpuPane
from opusmon.ui.panes.latency import LatencyPane
from opusmon.ui.panes.stalls import StallsPane
from opusmon.ui.panes.streams import StreamsPane

PANES: tuple[Pane, ...] = (
    LatencyPane(),
    GpuPane(),
    StreamsPane(),
    StallsPane(),
)
