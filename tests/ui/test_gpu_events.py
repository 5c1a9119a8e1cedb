"""The newest events, near and far, over a day in which a GPU throttled every second."""

import numpy as np

from opusmon.channels import GPU_EVENT
from opusmon.clock import NS, Anchors
from opusmon.schema import Batch, StringTable
from opusmon.ui.panes.gpu_events import newest_events
from opusmon.window import Window

DAY = 86_400 * NS


def view_of(events, *, flaps):
    strings = StringTable()
    rows = [(t, gpu, -1, strings.intern(kind), code, 0) for t, gpu, kind, code in events]
    window = Window(strings, Anchors(), keep_ns=2 * DAY, cap_b=1 << 30)
    if flaps:
        noise = np.zeros(86_400, GPU_EVENT.dtype)
        noise["t"], noise["gi"] = np.arange(86_400) * NS, -1
        noise["kind"] = strings.intern("throttle_on")
        window.push(Batch(GPU_EVENT, noise))
    window.push(Batch(GPU_EVENT, GPU_EVENT.rows(rows)))
    return window


def found(view, t, lookback):
    text = view.strings.text
    return {
        (int(r["gpu"]), text(r["kind"]), int(r["code"]))
        for r in newest_events(view, t, lookback)
        if r["code"]
    }


EVENTS = [
    (3600 * NS, 1, "lost", 1),
    (40_000 * NS, 0, "xid", 13),
    (40_001 * NS, 0, "xid", 79),
    (86_300 * NS, 0, "xid", 31),
]


def test_the_newest_of_each_series_from_the_whole_day():
    for flaps in (False, True):
        view = view_of(EVENTS, flaps=flaps)
        assert found(view, DAY, DAY) == {(1, "lost", 1), (0, "xid", 31)}
        assert found(view, 86_000 * NS, DAY) == {(1, "lost", 1), (0, "xid", 79)}


def test_nothing_from_before_the_range_or_after_the_playhead():
    view = view_of(EVENTS, flaps=True)
    assert found(view, 40_000 * NS, 3600 * NS) == {(0, "xid", 13)}
    assert found(view, DAY, 60 * NS) == set()
    assert found(view, DAY, 3600 * NS) == {(0, "xid", 31)}


def test_a_session_without_events():
    assert len(newest_events(Window(StringTable(), Anchors()), DAY, DAY)) == 0
