"""Histories of one GPU under its numbers: as wide as the pane, each scale labelled once at the left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from opusmon.channels import GPU
from opusmon.ui.glyphs import Glyphs
from opusmon.ui.panes.base import Frame
from opusmon.ui.panes.gpu_state import Gpu, Snapshot, bandwidth_field
from opusmon.ui.panes.history import Floats, History, histories
from opusmon.ui.text import Line
from opusmon.ui.widgets.chart import chart, sparks

GUTTER_CELLS = 8
"""Name and scale at the left of every history."""
MAX_CHART_LINES = 6
"""A taller history says nothing more."""
_MANY_LINES = 5
"""With this many lines to spare SM shows under bandwidth."""
_MOST_LINES = 8
"""With this many NVLink shows as well."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """What rows are drawn with.

    Attributes:
        glyphs: the characters.
        histories: by (gpu, gi), then by field; shape (bins,), oldest first, NaN where nothing was measured.
        selected: index of the selected row, -1 for none.
        sparks: the bandwidth history of table rows, drawn, by (gpu, gi).
    """

    glyphs: Glyphs
    histories: History
    selected: int = -1
    sparks: Mapping[tuple[int, int], str] = field(default_factory=dict)

    def history(self, gpu: Gpu, name: str) -> Floats | Sequence[float]:
        """The history of a field; empty where there is none."""
        return self.histories.get((gpu.gpu, gpu.gi), {}).get(name, ())

    def with_sparks(self, gpus: Sequence[Gpu], width: int) -> Drawing:
        """The same with the bandwidth histories of table rows drawn, `width` cells each."""
        known = [(gpu, values) for gpu in gpus if len(values := self.history(gpu, bandwidth_field(gpu)))]
        if not known or width <= 0:
            return self
        texts = sparks(np.stack([values for _, values in known]), width, 0.0, 100.0, self.glyphs)
        drawn = {(gpu.gpu, gpu.gi): text for (gpu, _), text in zip(known, texts, strict=True)}
        return replace(self, sparks=drawn)


def drawing(frame: Frame, known: Snapshot, taken: int, selected: int, fields: Sequence[str] = ()) -> Drawing:
    """What rows are drawn with: histories for as many columns as are left beside `taken` cells.

    Args:
        frame: what, when and how wide.
        known: what is known at the playhead.
        taken: cells of a line that the history does not get.
        selected: index of the selected row.
        fields: more than the bandwidth.
    """
    wanted = sorted({*fields, *(bandwidth_field(gpu) for gpu in known.gpus if gpu.row)})
    columns = max(frame.size.width - taken, 0) * frame.glyphs.columns_per_cell
    return Drawing(
        frame.glyphs, histories(frame, "gpu", wanted, GPU.key, columns, known.interval_ns), selected
    )


@dataclass(frozen=True, slots=True)
class _Chart:
    """One history: its name, its field, the value at its upper edge, and how that reads."""

    name: str
    field: str
    top: float
    top_words: str
    style: str


FIELDS = ("sm_util_pct", "nvlink_tx_bps", "nvlink_rx_bps")
"""What `chart_lines` draws beside the bandwidth."""


def _charts(gpu: Gpu, room: int) -> list[_Chart]:
    name = bandwidth_field(gpu)
    found = [_Chart("bw" if name == "hbm_bw_pct" else "busy", name, 100.0, "100%", "series0")]
    if room >= _MANY_LINES and not math.isnan(gpu["sm_util_pct"]):
        found.append(_Chart("SM", "sm_util_pct", 100.0, "100%", "series4"))
    speed_bps = sum(gpu.links.speed_bps)
    if room >= _MOST_LINES and speed_bps > 0 and not math.isnan(gpu["nvlink_tx_bps"]):
        words = f"{speed_bps / 1e9:.0f}G"
        found.append(_Chart("tx", "nvlink_tx_bps", speed_bps, words, "series2"))
        found.append(_Chart("rx", "nvlink_rx_bps", speed_bps, words, "series2"))
    return found


def chart_lines(gpu: Gpu, width: int, height: int, drawn: Drawing) -> list[Line]:
    """The histories of a GPU in at most `height` lines: bandwidth first, more of them as there is room."""
    if height <= 0 or width <= GUTTER_CELLS:
        return []
    charts = _charts(gpu, height)
    lines: list[Line] = []
    left = height
    for place, item in enumerate(charts):
        tall = min(-(-left // (len(charts) - place)), MAX_CHART_LINES)
        lines.extend(_chart(item, gpu, width, tall, drawn))
        left -= tall
    return lines


def _chart(item: _Chart, gpu: Gpu, width: int, height: int, drawn: Drawing) -> list[Line]:
    """A history with its name and the value of its upper edge; its lower edge is always 0."""
    picture = chart(
        drawn.history(gpu, item.field),
        width - GUTTER_CELLS,
        height,
        0.0,
        item.top,
        drawn.glyphs,
        style=item.style,
    )
    labels = [f"  {item.name:<5} ", *["        "] * (height - 1)]
    if height > 1:
        labels[0] = f"  {item.top_words:>5} "
        labels[1] = f"  {item.name:>5} "
    if height > 2:
        labels[-1] = f"  {0:>5} "
    return [((label, "dim"), *line) for label, line in zip(labels, picture, strict=True)]
