"""Sessions with stalls for the stalls pane to draw: planted rows with known times, so that figures are arithmetic."""

from __future__ import annotations

from opusmon import stats
from opusmon.channels import BY_NAME, WHOLE_CONTEXT
from opusmon.clock import NS
from opusmon.ui.panes.stalls import StallsPane
from opusmon.ui.text import plain

from .fakestreams import FakeStreams, add_gpus, stream_fields
from .fakeview import END, NAN, T0, frame

PANE = StallsPane()
MS = 1_000_000
WORKER = 12_345
STREAM = 0x55D0C84B2E00
WALL_NS = 1_795_956_000 * NS - END
"""So that the session ends at 2026-11-29 12:40:00 UTC."""


class FakeStalls(FakeStreams):
    """A `FakeStreams` that knows the newest row of channels without a key."""

    def latest(self, channel, t, lookback_ns):
        rows = self.query(channel, t - lookback_ns, t)
        return stats.latest(rows, BY_NAME[channel].key) if len(rows) else rows


def stall_fields(kind="wait", **changes):
    """A wait of 84.2 ms of vllm's worker-0 for one stream."""
    fields = {
        "kind": kind,
        "pid": WORKER,
        "tid": WORKER + 54,
        "process": "vllm",
        "thread": "worker-0",
        "call": "cuStreamSynchronize",
        "reason": "",
        "dur_ns": 84.2 * MS,
        "stream": STREAM,
        "code": NAN,
        "count": 1,
        "size_b": NAN,
        "by_tid": 0,
        "by_thread": "",
        "by_call": "",
        "by_code": NAN,
        "before": "",
        "stack": "",
    }
    assert set(changes) <= {field.name for field in BY_NAME["stall"].fields}
    return {**fields, **changes}


OFF_CPU = {"kind": "off_cpu", "call": "futex", "reason": "lock", "dur_ns": 11 * MS, "stream": WHOLE_CONTEXT}
CAPTURE = {
    "kind": "capture",
    "call": "cuStreamEndCapture",
    "reason": "aborted: invalidated",
    "dur_ns": 31 * MS,
    "code": 901,
    "by_tid": WORKER + 99,
    "by_thread": "pt_nccl_watchdg",
    "by_call": "cuEventQuery",
    "by_code": 900,
    "before": "cuLaunchKernel x3 on 0x7; cuMemcpyDtoDAsync_v2; cuMemAlloc_v2",
    "stack": "main+0x1 (python3.12);at::cuda::CUDAGraph::capture_end()+0x8c (libtorch_cuda.so);cuStreamEndCapture (libcuda.so.1)",
}
JIT = {
    "kind": "jit",
    "call": "ptxas",
    "dur_ns": 412 * MS,
    "stream": WHOLE_CONTEXT,
    "code": 0,
    "thread": "vllm",
}


def add_stall(view, t, kind="wait", **changes):
    view.add("stall", t, **stall_fields(kind, **changes))


def add_status(
    view, t=END, *, collector="stalls", channel="", field="", scope="", state="ok", reason="", remedy=""
):
    words = {"channel": channel, "field": field, "scope": scope, "state": state}
    view.add("status", t, collector=collector, **words, reason=reason, remedy=remedy)


def add_cost(view, t=END, collector="stalls"):
    view.add("cost", t, collector=collector, dt_ns=5 * NS)


HOST = {
    "dt_ns": NS,
    "cpus": 16,
    "runnable": 3,
    "cpu_iowait_pct": 0.4,
    "cpu_steal_pct": 0,
    "psi_cpu_some_pct": 1.2,
    "psi_memory_some_pct": 0,
    "psi_io_some_pct": 0.3,
    "swap_in_bps": 0,
    "swap_out_bps": 0,
}


def add_host(view, t=END, **changes):
    view.add("host", t, **{**HOST, **changes})


def quiet(view=None):
    """The collector runs and has seen nothing."""
    view = view or FakeStalls(wall_ns=WALL_NS)
    add_status(view, reason="watching 2 processes")
    add_cost(view)
    return view


def four(view=None):
    """The events of the sketch: a wait, off-CPU, a broken capture, a compilation; a stream and a GPU beside them."""
    view = quiet(view)
    add_gpus(view)
    for second in range(1, 61):
        view.add("stream", T0 + second * NS, **stream_fields(pid=WORKER, stream=STREAM, tid=WORKER + 54))
    add_stall(view, END - 10 * NS, **JIT)
    add_stall(view, END - 2 * NS, **CAPTURE)
    add_stall(view, END - NS // 4, **OFF_CPU)
    add_stall(view, END, stack="main (python3.12);run (libtorch.so);cuStreamSynchronize (libcuda.so.1)")
    add_host(view)
    return view


def many(count=183, view=None):
    """A stall each third of a second, kinds and threads in turn, 5 to 104 ms."""
    view = four(view)
    kinds = ("wait", "off_cpu", "run_queue", "futex", "alloc", "module")
    for number in range(count):
        t = T0 + (number * 59 * NS) // count + 1
        kind = kinds[number % len(kinds)]
        changes = {
            "thread": f"worker-{number % 4}",
            "tid": WORKER + number % 4,
            "dur_ns": (5 + number % 100) * MS,
        }
        add_stall(view, t, kind, **changes)
    return view


def draw(view, width=78, height=21, **options):
    options.setdefault("t", END)
    return [plain(line).rstrip() for line in PANE.render(frame(view, width, height, **options))]


def picture(view, width=78, height=21, **options):
    return "\n".join(draw(view, width, height, **options))
