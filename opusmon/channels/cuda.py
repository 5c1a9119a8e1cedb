"""CUDA as the host sees it, by eBPF."""

from __future__ import annotations

from opusmon.schema import Channel, Field

_WAIT_BINS = {
    "wait_lt_10us": "under 10 us",
    "wait_lt_100us": "of 10 to 100 us",
    "wait_lt_1ms": "of 100 us to 1 ms",
    "wait_lt_10ms": "of 1 to 10 ms",
    "wait_lt_100ms": "of 10 to 100 ms",
    "wait_lt_1s": "of 100 ms to 1 s",
    "wait_ge_1s": "of 1 s and more",
}

WHOLE_CONTEXT = 2**64 - 1
"""Value of `stream` in rows for waits on all streams of a context, or on an event whose stream was not seen."""

STREAM = Channel(
    "stream",
    "gauge",
    (
        Field("pid", "<i4"),
        Field(
            "stream",
            "<u8",
            help="handle; 0 is the legacy default stream, 2 the per-thread default, 2^64 - 1 the whole context",
        ),
        Field("tid", "<i4", help="thread that launched or waited last"),
        Field("process", "<u4", help="process name", text=True),
        Field("thread", "<u4", help="name of that thread", text=True),
        Field("dt_ns", "<i8", "ns", "counts cover [t - dt_ns, t]"),
        Field("launches", "<f4", "", "kernel launches; NaN while they were not counted throughout"),
        Field("graph_launches", "<f4"),
        Field("copies", "<f4", "", "asynchronous and synchronous copies"),
        Field("h2d_b", "<f8", "B", "host to device"),
        Field("d2h_b", "<f8", "B", "device to host"),
        Field("d2d_b", "<f8", "B", "device to device, peers included"),
        Field("other_b", "<f8", "B", "direction not told by the call"),
        Field(
            "waits",
            "<f4",
            "",
            "blocking waits for this stream that ended (stream, event, context synchronise, synchronous copies)",
        ),
        Field("wait_ns", "<f8", "ns", "host time in them; several threads add up"),
        Field("wait_max_ns", "<f8", "ns"),
        *(Field(name, "<f4", "", f"waits {words}") for name, words in _WAIT_BINS.items()),
        Field("bubbles", "<f4", "", "gaps from the end of a wait to the next launch"),
        Field("bubble_ns", "<f8", "ns", "their sum"),
        Field("bubble_max_ns", "<f8", "ns"),
        Field("since_launch_ns", "<f8", "ns", "time since the last launch at t; NaN when none was seen"),
        Field(
            "timed_launches",
            "<f4",
            "",
            "launch calls (plain and graph) whose time was taken, in bursts; 0 while none was",
        ),
        Field("launch_call_ns", "<f8", "ns", "mean host time in a launch call, of those timed"),
        Field("launch_call_max_ns", "<f8", "ns", "the longest of them"),
        Field("not_ready", "<f4", "", "polls answered NOT_READY; NaN while they were not counted throughout"),
    ),
    key=("pid", "stream"),
    help="Host evidence of CUDA stream use by uprobes, aggregated in the kernel; not GPU time.",
)

STALL = Channel(
    "stall",
    "event",
    (
        Field(
            "kind",
            "<u4",
            help="wait, off_cpu, run_queue, futex, page_faults, alloc, free, module, jit, capture, init_in_capture, tls",
            text=True,
        ),
        Field("pid", "<i4"),
        Field("tid", "<i4"),
        Field("process", "<u4", text=True),
        Field("thread", "<u4", text=True),
        Field("call", "<u4", help="function, system call or program concerned", text=True),
        Field(
            "reason",
            "<u4",
            help="why, in the field's words: preempted, lock, I/O, sleep, aborted, ...",
            text=True,
        ),
        Field(
            "dur_ns",
            "<f8",
            "ns",
            "the stall covers [t - dur_ns, t]; the sum where several are folded into one row",
        ),
        Field("stream", "<u8", help="as in channel stream; 2^64 - 1 where no single stream is concerned"),
        Field("code", "<f4", "", "result: CUresult, exit status or SSL result; NaN where there is none"),
        Field("count", "<f4", "", "calls, faults or launches folded into the row"),
        Field("size_b", "<f8", "B", "bytes asked for or copied; NaN where that says nothing"),
        Field("by_tid", "<i4", help="thread that broke a capture; 0 where that was not seen"),
        Field("by_thread", "<u4", text=True),
        Field("by_call", "<u4", help="call that broke a capture", text=True),
        Field("by_code", "<f4", "", "its result"),
        Field("before", "<u4", help="calls of that thread before it, the oldest first", text=True),
        Field("stack", "<u4", help="user stack, outermost frame first, frames joined by ;", text=True),
    ),
    key=("pid", "tid", "kind"),
    help="Things that kept a thread which feeds a GPU from doing so; t is when it ended.",
)
