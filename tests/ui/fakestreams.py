"""Sessions with CUDA streams for the streams pane to draw: known calls per second, so that figures are arithmetic."""

from __future__ import annotations

from opusmon import stats
from opusmon.channels import BY_NAME
from opusmon.clock import NS
from opusmon.ui.panes.streams import StreamsPane
from opusmon.ui.text import plain

from .fakeview import END, T0, FakeView, frame, gpu_fields

PANE = StreamsPane()
MS = 1_000_000
US = 1_000
WORKER = 12_345
HANDLE = 0x55D0C84B2E00
"""A stream handle as the driver gives them: an address in the heap."""


class FakeStreams(FakeView):
    """A `FakeView` that can bin by a 64-bit key as well."""

    def binned(self, channel, fields, t0, t1, step_ns):
        if channel not in self.channels:
            return self.query(channel, t0, t1)
        return stats.rollup(self.query(channel, t0, t1), BY_NAME[channel], fields, step_ns)


def stream_fields(**changes):
    """A decode loop over one second: 48 steps of one graph and 25 kernels, 610 ms of waits, 120 ms of bubbles."""
    fields = {
        "pid": WORKER,
        "stream": HANDLE,
        "tid": WORKER + 54,
        "process": "vllm",
        "thread": "worker-0",
        "dt_ns": NS,
        "launches": 1200,
        "graph_launches": 48,
        "copies": 96,
        "h2d_b": 2e6,
        "d2h_b": 1e6,
        "d2d_b": 0.0,
        "other_b": 0.0,
        "waits": 48,
        "wait_ns": 610 * MS,
        "wait_max_ns": 84.2 * MS,
        "wait_lt_10us": 3,
        "wait_lt_100us": 2,
        "wait_lt_1ms": 0,
        "wait_lt_10ms": 11,
        "wait_lt_100ms": 32,
        "wait_lt_1s": 0,
        "wait_ge_1s": 0,
        "bubbles": 48,
        "bubble_ns": 120 * MS,
        "bubble_max_ns": 4.1 * MS,
        "since_launch_ns": 2.1 * MS,
        "timed_launches": 1248,
        "launch_call_ns": 9.8 * US,
        "launch_call_max_ns": 84.2 * US,
        "not_ready": 12,
    }
    assert set(changes) <= {"t", *(field.name for field in BY_NAME["stream"].fields)}
    return {**fields, **changes}


IDLE = dict.fromkeys(
    (
        *("launches", "graph_launches", "copies", "h2d_b", "d2h_b", "d2d_b", "other_b", "waits", "wait_ns"),
        *("wait_lt_10us", "wait_lt_100us", "wait_lt_1ms", "wait_lt_10ms", "wait_lt_100ms", "wait_lt_1s"),
        *("wait_ge_1s", "wait_max_ns", "bubbles", "bubble_ns", "bubble_max_ns", "not_ready"),
    ),
    0,
)
COPY = {
    **IDLE,
    "stream": HANDLE + 0x1000,
    "thread": "copy",
    "copies": 310,
    "d2d_b": 55.3e9,
    "waits": 10,
    "wait_ns": 22 * MS,
    "wait_max_ns": 9 * MS,
    "wait_lt_10ms": 10,
    "bubbles": 10,
    "bubble_ns": 30 * MS,
}


def add_gpus(view, seconds=60, gpus=1, **changes):
    """GPUs whose SMs are 84 % busy."""
    for second in range(1, seconds + 1):
        for gpu in range(gpus):
            view.add("gpu", T0 + second * NS, gpu=gpu, **gpu_fields(**changes))
    return view


def add_status(view, t=END, *, channel="", field="", scope="", state="ok", reason="", remedy=""):
    words = {"channel": channel, "field": field, "scope": scope, "state": state}
    view.add("status", t, collector="streams", **words, reason=reason, remedy=remedy)


def serving(seconds=60, *, gpus=1, others=0, view=None):
    """A decode stream and a copy stream, and `others` idle ones, one row a second up to `END`; GPUs beside them."""
    view = view or FakeStreams(wall_ns=1_795_956_000 * NS)
    add_gpus(view, seconds, gpus)
    for second in range(1, seconds + 1):
        t = T0 + second * NS
        view.add("stream", t, **stream_fields())
        view.add("stream", t, **stream_fields(**COPY))
        for number in range(others):
            idle = {"stream": HANDLE + 0x2000 + 0x100 * number, "thread": f"pool-{number}"}
            view.add("stream", t, **stream_fields(**IDLE, **idle, since_launch_ns=(60 + number) * NS))
    return view


def phases(view=None):
    """One stream whose minute has a part of each kind, ten seconds each: see the test that reads its lane."""
    view = view or FakeStreams()
    add_gpus(view)
    parts = (
        {},
        {"launches": 1000},
        {"launches": 100, "graph_launches": 48},
        {"launches": 100, "wait_ns": 700 * MS},
        {"launches": 100, "wait_ns": 700 * MS, "bubble_ns": 120 * MS},
        {"launches": 3, "bubble_ns": 640 * MS},
    )
    for second in range(1, 61):
        part = parts[(second - 1) // 10]
        view.add("stream", T0 + second * NS, **stream_fields(**{**IDLE, **part}))
    return view


def draw(view, width=78, height=21, **options):
    return [plain(line).rstrip() for line in PANE.render(frame(view, width, height, **options))]


def picture(view, width=78, height=21, **options):
    return "\n".join(draw(view, width, height, **options))


def one(**changes):
    """One stream with one row, at the end of the session, and one GPU."""
    view = add_gpus(FakeStreams())
    view.add("stream", END, **stream_fields(**changes))
    return view
