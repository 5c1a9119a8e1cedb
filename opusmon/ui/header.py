"""The first line of the screen: where, what, when, and whether it can be trusted. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from opusmon.channels import KEYFRAME_NS, WHOLE_GPU
from opusmon.clock import NS
from opusmon.recording import RecorderState
from opusmon.schema import Rows
from opusmon.text import counted
from opusmon.times import format_duration, format_wall
from opusmon.ui import units
from opusmon.ui.findings import FINDING_MARKS
from opusmon.ui.panes.base import View
from opusmon.ui.text import Line, clean, fill, fit, join, line_cells

LATE_NS = 2 * NS
"""A newest sample older than this is said in red, as `below` does."""
_TENTH_NS = NS // 10
COST_LOOKBACK_NS = 12 * NS


@dataclass(frozen=True, slots=True)
class Facts:
    """What the header says beside what is in the channels.

    Attributes:
        host: where the session was or is recorded.
        word: LIVE, FOLLOW, PAUSED, REPLAY x4.
        tracking: the playhead is at the edge of a growing session.
        behind_ns: how far the playhead is behind the newest instant.
        recording: "rec 3h12m 84 MB", "" when nothing is recorded.
        trouble: why recording has stopped or loses rows, "" when it does not.
        sample: begin and end of the sample shown, None when there is none.
        late_ns: age of that sample, without one of the newest row of any kind, while tracking; else 0.
        findings: how many rules find something wrong at the instant shown, and the worst severity of it.
    """

    host: str
    word: str
    tracking: bool
    behind_ns: int
    recording: str
    trouble: str
    sample: tuple[int, int] | None
    late_ns: int
    findings: tuple[int, int] = (0, 0)


def header(view: View, t: int, facts: Facts, width: int) -> Line:
    """One line of `width` cells: host, GPUs, driver, state, sample interval, recording, cost."""
    left: list[Line] = [(("opusmon", "title"),), ((clean(facts.host, 32), "value"),)]
    devices = view.latest("gpu_device", t, KEYFRAME_NS + 5 * NS)
    state = _state(facts)
    moment = (
        _interval(view, t, facts.sample)
        if facts.tracking or width >= 100
        else ((format_wall(view.anchors, t, 0), "value"),)
    )
    right: list[Line] = [state, moment]
    if facts.trouble:
        right.insert(0, ((f"!! {clean(facts.trouble)}", "bad"),))
    if facts.late_ns > _late_from_ns(facts.sample):
        late = format_duration(facts.late_ns // _TENTH_NS * _TENTH_NS)
        right.insert(0, ((f"!! LATE {late}", "bad"),))
    if facts.findings[0]:
        right.append(_findings(*facts.findings))
    extra: list[Line] = [((facts.recording, "label"),)] if facts.recording else []
    cost_pct = cpu_pct(view, t)
    if cost_pct is not None:
        extra.append(((f"cost {cost_pct:.1f} % cpu", "dim"),))
    extra.append((("?", "key"), (" help", "dim")))
    room = width - 1 - line_cells(join([*left, *right], "  "))
    inventory = fill(
        [((_gpus(view, devices), "label"),), ((_driver(view, devices), "dim"),)], max(room - 2, 0)
    )
    room -= line_cells(inventory) + 2 if inventory else 0
    tail = fill(extra, max(room - 2, 0))
    return fit(((" ", ""), *join([*left, inventory, *right, tail], "  ")), width)


def _findings(count: int, worst: int) -> Line:
    """`2 findings !!`: what `f` lists and `n` goes to."""
    sign, style = FINDING_MARKS[worst]
    return ((f"{counted(count, 'finding')} {sign}", style),)


def cpu_pct(view: View, t: int) -> float | None:
    """CPU that opusmon itself uses, per cent of one core over all its processes; None when not measured."""
    rows = view.latest("cost", t, COST_LOOKBACK_NS)
    if not len(rows):
        return None
    share = rows["cpu_ns"] / np.maximum(rows["dt_ns"], 1)
    return float(np.nansum(share)) * 100


def _state(facts: Facts) -> Line:
    """The state word, and how far from now while paused."""
    if facts.tracking:
        return ((facts.word, "ok"),)
    behind = f" (-{format_duration(facts.behind_ns)})" if facts.behind_ns >= NS else ""
    return ((facts.word, "accent"), (behind, "accent"))


def _interval(view: View, t: int, sample: tuple[int, int] | None) -> Line:
    """The interval that the shown sample covers, else the instant."""
    if sample is None:
        return ((format_wall(view.anchors, t, 1), "value"),)
    begin, end = sample
    return ((f"{format_wall(view.anchors, begin, 1)} - {format_wall(view.anchors, end, 1)}", "value"),)


def _gpus(view: View, devices: Rows) -> str:
    """As in "2 x H200"; "" before any device is known."""
    whole = [row for row in devices if row["gi"] == WHOLE_GPU]
    names = Counter(clean(view.strings.text(row["name"])).removeprefix("NVIDIA ") for row in whole)
    return ", ".join(f"{count} x {name}" for name, count in names.items())


def _driver(view: View, devices: Rows) -> str:
    return f"driver {clean(view.strings.text(devices[0]['driver']))}" if len(devices) else ""


def _late_from_ns(sample: tuple[int, int] | None) -> int:
    """Age that is late: two intervals; without a GPU all that must come are the rows of what watching costs."""
    return COST_LOOKBACK_NS if sample is None else max(LATE_NS, 2 * (sample[1] - sample[0]))


def recording_words(state: RecorderState | None, now: int) -> str:
    """As in "rec 3h12m 84 MB"; "" when nothing is recorded."""
    if state is None:
        return ""
    lasted = format_duration(max(0, now - state.started_t) // NS * NS)
    dropped = f" {state.dropped_rows} rows dropped" if state.dropped_rows else ""
    return f"rec {lasted} {units.size(state.size_b)}{dropped}"
