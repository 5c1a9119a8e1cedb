"""What watching costs, as lines. Pure."""

from __future__ import annotations

import math

from opusmon.channels import KEYFRAME_NS
from opusmon.clock import NS
from opusmon.ui import units
from opusmon.ui.header import COST_LOOKBACK_NS, cpu_pct
from opusmon.ui.panes.base import View
from opusmon.ui.text import Line, clean, columns, fit, shorten, wrapped

_HEADS = (
    ("process", 10),
    ("CPU", 8),
    ("memory", 10),
    ("calls/s", 8),
    ("in calls", 9),
    ("late", 5),
    ("lost", 6),
    ("slowest call", 40),
)
_SAID = ("of the ring buffer", "a probe hit is taken to cost")
"""Parts of what collectors say about their ring buffers, and about the price of what is counted here."""
_HITS = "streams, stalls: calls are probe hits, time in calls is hits x what one costs at entry (250 ns at tracepoints)"


def cost_lines(view: View, t: int, width: int = 112) -> list[Line]:
    """A table of the newest `cost` row of each process at the playhead, and their sum.

    Args:
        view: what was measured.
        t: the playhead, monotonic ns.
        width: cells there are.
    """
    rows = view.latest("cost", t, COST_LOOKBACK_NS)
    if not len(rows):
        return [(("not measured at this time: the first figures come after 5 s", "dim"),)]
    lines: list[Line] = [fit(columns([(((head, "label"),), room, "<") for head, room in _HEADS]), width)]
    rss_b = 0.0
    for row in rows:
        share = 100 * float(row["cpu_ns"]) / max(int(row["dt_ns"]), 1)
        rss_b += float(row["rss_b"]) if math.isfinite(float(row["rss_b"])) else 0.0
        slowest = clean(view.strings.text(row["slowest"]))
        slow = f"{units.duration(float(row['slowest_ns'])):>8}  {slowest}" if slowest else units.MISSING
        per_s = float(row["calls"]) * NS / max(int(row["dt_ns"]), 1)
        busy = 100 * float(row["call_ns"]) / max(int(row["dt_ns"]), 1)
        cells = [
            clean(view.strings.text(row["collector"])),
            f"{units.number(share, 5, 2)} %",
            units.size(float(row["rss_b"])),
            units.number(per_s, 7),
            f"{units.number(busy, 5, 2)} %",
            units.number(float(row["late"]), 4),
            units.number(float(row["dropped"]), 5),
            slow,
        ]
        line = columns(
            [(((cell, "value"),), room, "<") for cell, (_, room) in zip(cells, _HEADS, strict=True)]
        )
        lines.append(shorten(line, width))
    total = f"all: {cpu_pct(view, t) or 0.0:.2f} % of one core, {units.size(rss_b)} resident (pages shared between them count twice)"
    return [
        *lines,
        (),
        *wrapped(total, width, "", "title"),
        *_said(view, t, width),
        *wrapped(_HITS, width, "", "dim"),
    ]


def _said(view: View, t: int, width: int) -> list[Line]:
    """How full the buffers between kernel and user space were, and what a probe hit is taken to cost."""
    text = view.strings.text
    rows = view.latest("status", t, KEYFRAME_NS + 5 * NS)
    said = [(clean(text(row["collector"])), clean(text(row["reason"]))) for row in rows]
    shown = [f"{who}: {words}" for who, words in said if any(part in words for part in _SAID)]
    return [line for words in shown for line in wrapped(words, width, "", "value")]
