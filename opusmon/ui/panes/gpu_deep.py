"""What the hardware counters say of a GPU (channel `l2`): L2 hit rate, HBM reads and writes apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from opusmon.clock import NS
from opusmon.collectors.base import UNASKED
from opusmon.ui import units
from opusmon.ui.panes.base import Frame
from opusmon.ui.text import Line, join

LOOKBACK_NS = 65 * NS
"""Rows come every 1 to 30 s."""
NOTE = "L2: not reported by NVML; run with --deep (costs about 1 %)"
SHORT_NOTE = "L2: --deep"
_FIELDS = (
    "l2_hit_pct",
    "l2_to_hbm_ratio",
    "l2_bps",
    "hbm_read_bps",
    "hbm_write_bps",
    "bank_conflicts_per_s",
)


@dataclass(frozen=True, slots=True)
class Deep:
    """The newest measured value of each field of one GPU.

    Attributes:
        values: by field; a field that is never measured is not there.
        age_ns: of the newest row.
        every_ns: time between its last two rows, 0 when there is one.
    """

    values: Mapping[str, float]
    age_ns: int
    every_ns: int

    def __getitem__(self, name: str) -> float:
        """A field, NaN where it was not measured."""
        return self.values.get(name, math.nan)


def read_deep(frame: Frame) -> dict[int, Deep]:
    """By GPU. Fields that are sampled in turn come from the newest row that has them."""
    rows = frame.view.query("l2", frame.t - LOOKBACK_NS, frame.t)
    names = [name for name in _FIELDS if name in (rows.dtype.names or ())]
    values: dict[int, dict[str, float]] = {}
    newest: dict[int, tuple[int, int]] = {}  # times of the last row and the one before
    for row in rows:
        gpu = int(row["gpu"])
        found = values.setdefault(gpu, {})
        found.update({name: float(row[name]) for name in names if math.isfinite(row[name])})
        t = int(row["t"])
        newest[gpu] = t, newest.get(gpu, (t, t))[0]
    return {gpu: Deep(values[gpu], frame.t - t, t - before) for gpu, (t, before) in newest.items()}


def read_dcgm(frame: Frame) -> dict[int, float]:
    """HBM bandwidth in percent of the peak by GPU, where a dcgm-exporter tells it."""
    rows = frame.view.latest("dcgm", frame.t, LOOKBACK_NS)
    text = frame.view.strings.text
    return {int(row["gpu"]): float(row["hbm_bw_pct"]) for row in rows if not text(row["instance"])}


def deep_line(deep: Deep) -> Line:
    """`L2 hit  97 %  4.00 TB/s   HBM rd 3.00 wr 0.50 TB/s   1 s ago`."""
    parts: list[Line] = [_hit(deep)]
    read, write = (units.number(deep[f"hbm_{way}_bps"] / 1e12, 5, 2) for way in ("read", "write"))
    parts.append((("HBM ", "label"), (f"rd {read} wr {write} TB/s", "value")))
    if not math.isnan(deep["bank_conflicts_per_s"]):
        conflicts = units.number(deep["bank_conflicts_per_s"] / 1e6, 6, 1)
        parts.append((("bank conflicts ", "label"), (f"{conflicts} M/s", "value")))
    if deep.age_ns > 5 * NS:
        parts.append(((f"{units.duration(deep.age_ns)} ago", "dim"),))
    return join(parts)


def _hit(deep: Deep) -> Line:
    """The hit rate; the ratio under its own name where there is no hit rate; else that nothing was asked of it."""
    traffic = units.number(deep["l2_bps"] / 1e12, 5, 2)
    if not math.isnan(deep["l2_hit_pct"]):
        return (("L2 hit ", "label"), (f"{units.percent(deep['l2_hit_pct'])} {traffic} TB/s", "value"))
    if not math.isnan(deep["l2_to_hbm_ratio"]):
        ratio = units.percent(100 * deep["l2_to_hbm_ratio"])
        return (("L2 to HBM ", "label"), (f"{ratio} {traffic} TB/s", "value"))
    return (("L2 ", "label"), (f"idle {traffic} TB/s", "dim"))


def deep_note(statuses: Iterable[Sequence[str]], *, short: bool) -> Line:
    """Why there is no L2: what its collector said, or how to ask for it.

    Args:
        statuses: in force, each as the words of its fields in order.
        short: there is little room.
    """
    for collector, channel, _, _, state, reason, remedy in statuses:
        if collector != "l2" or channel or state == "ok" or reason.startswith(UNASKED):
            continue
        wrong = "! " if state in ("error", "restarting", "stale") else ""
        hint = f" ({remedy})" if remedy and not short else ""
        return ((f"{wrong}L2: {reason}{hint}", "warn"),)
    return ((SHORT_NOTE if short else NOTE, "dim"),)
