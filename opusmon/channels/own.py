"""What opusmon says about itself: health, reasons and price."""

from __future__ import annotations

from opusmon.schema import Channel, Field

KEYFRAME_NS = 60_000_000_000
"""Slowly changing channels (`gpu_device`, `status`) repeat themselves this often.

So the state at any instant is found by looking back at most this far, whatever was pruned before."""

STATUS = Channel(
    "status",
    "event",
    (
        Field("collector", "<u4", text=True),
        Field("channel", "<u4", help='channel concerned, "" for the whole collector', text=True),
        Field("field", "<u4", help='field concerned, "" for all of them', text=True),
        Field("scope", "<u4", help='which series, for example "gpu 1"; "" for all', text=True),
        Field(
            "state",
            "<u4",
            help="ok, unavailable, not_supported, no_permission, stale, error, restarting, sampled (at times only)",
            text=True,
        ),
        Field("reason", "<u4", help="why, in one sentence", text=True),
        Field("remedy", "<u4", help='the command or step that mends it, "" if there is none', text=True),
    ),
    key=("collector", "channel", "field", "scope"),
    help="Collector health and the reasons of missing values; repeated every 60 s while they hold.",
)

COST = Channel(
    "cost",
    "gauge",
    (
        Field("collector", "<u4", help='the collector, or "screen" for the main process', text=True),
        Field("dt_ns", "<i8", "ns", "the figures cover [t - dt_ns, t]"),
        Field("cpu_ns", "<f8", "ns", "CPU time of the process that runs it"),
        Field("rss_b", "<f8", "B", "resident memory of that process"),
        Field("calls", "<f4", "", "calls into the driver or facility"),
        Field("call_ns", "<f8", "ns", "wall time inside those calls"),
        Field("slowest_ns", "<f8", "ns", "the longest single call"),
        Field("slowest", "<u4", help="its name", text=True),
        Field("late", "<f4", "", "ticks that began over half an interval late"),
        Field("dropped", "<f4", "", "event rows lost because a queue was full"),
    ),
    key=("collector",),
    help="What watching costs.",
)
