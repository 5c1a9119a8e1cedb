"""Every channel opusmon knows, declared once, with its unit and its caveat.

bps is bytes per second. A missing number is NaN and a `status` row says why; zero is a measured zero.
"""

from __future__ import annotations

from opusmon.schema import Channel, Field

WHOLE_GPU = -1
"""Value of `gi` (MIG GPU instance) in rows that describe the whole device."""

KEYFRAME_NS = 60_000_000_000
"""Slowly changing channels (`gpu_device`, `status`) repeat themselves this often.

So the state at any instant is found by looking back at most this far, whatever was pruned before."""

_GPU = Field("gpu", "<i2", help="index in NVML order")
_GI = Field("gi", "<i2", help="MIG GPU instance, -1 for the whole device")

GPU = Channel(
    "gpu",
    "gauge",
    (
        _GPU,
        _GI,
        Field("dt_ns", "<i8", "ns", "the rates and percentages cover [t - dt_ns, t]"),
        Field("mem_used_b", "<f8", "B", "memory in use, without what the driver reserves"),
        Field("mem_total_b", "<f8", "B"),
        Field("mem_reserved_b", "<f8", "B", "memory reserved by the driver and firmware"),
        Field("hbm_bw_pct", "<f4", "%", "share of the theoretical memory bandwidth that was used (GPM)"),
        Field("hbm_bw_bps", "<f8", "B/s", "hbm_bw_pct x memory clock x 2 x bus width / 8"),
        Field(
            "mem_busy_pct", "<f4", "%", "share of time in which memory was read or written; not a bandwidth"
        ),
        Field(
            "gpu_busy_pct",
            "<f4",
            "%",
            "share of time in which any kernel ran; says nothing about how many SMs",
        ),
        Field("sm_util_pct", "<f4", "%", "SMs busy, per elapsed SM cycle (GPM)"),
        Field("sm_occupancy_pct", "<f4", "%", "warps resident of the most possible (GPM)"),
        Field("tensor_pct", "<f4", "%", "time in which the tensor pipes were busy (GPM)"),
        Field("pcie_tx_bps", "<f4", "B/s", "from the GPU (GPM)"),
        Field("pcie_rx_bps", "<f4", "B/s", "to the GPU (GPM)"),
        Field("nvlink_tx_bps", "<f4", "B/s", "all links, from the GPU"),
        Field("nvlink_rx_bps", "<f4", "B/s", "all links, to the GPU"),
        Field("power_mw", "<f4", "mW"),
        Field("temp_c", "<f4", "C", "GPU core"),
        Field("mem_temp_c", "<f4", "C"),
        Field("sm_clock_mhz", "<f4", "MHz"),
        Field("mem_clock_mhz", "<f4", "MHz"),
        Field("throttle_mask", "<f8", "", "NVML clocks event reasons, a bit mask, at the instant t"),
        Field("throttle_power_ns", "<f8", "ns", "time held back by the software power cap, cumulative"),
        Field("throttle_sync_ns", "<f8", "ns", "time held back by sync boost, cumulative"),
        Field(
            "throttle_sw_thermal_ns", "<f8", "ns", "time held back by the software thermal limit, cumulative"
        ),
        Field(
            "throttle_hw_thermal_ns",
            "<f8",
            "ns",
            "time held back by the hardware thermal limit, cumulative; read every 5 s, each tick while it is active",
        ),
        Field(
            "throttle_brake_ns",
            "<f8",
            "ns",
            "time held back by the external power brake, cumulative; read every 5 s, each tick while it is active",
        ),
        Field("ecc_corrected", "<f4", "", "since the driver loaded; read every 5 s and repeated between"),
        Field("ecc_uncorrected", "<f4", "", "since the driver loaded; read every 5 s and repeated between"),
        Field("remapped_correctable", "<f4", "rows", "read every 5 s and repeated between"),
        Field("remapped_uncorrectable", "<f4", "rows", "read every 5 s and repeated between"),
        Field("remap_pending", "<f4", "", "1 when a row remap waits for a GPU reset; read every 5 s"),
        Field("remap_failed", "<f4", "", "1 when a row remap has failed; read every 5 s"),
    ),
    key=("gpu", "gi"),
    help="One row per GPU (and per MIG GPU instance) per tick.",
)

GPU_DEVICE = Channel(
    "gpu_device",
    "event",
    (
        _GPU,
        _GI,
        Field("name", "<u4", text=True),
        Field("uuid", "<u4", text=True),
        Field("driver", "<u4", help="driver version", text=True),
        Field("memory_kind", "<u4", help='"device", or "unified" where CPU and GPU share it', text=True),
        Field("bus_width_bits", "<f4", "bit", "memory bus width"),
        Field("power_limit_mw", "<f4", "mW", "limit in force"),
        Field("max_sm_clock_mhz", "<f4", "MHz"),
        Field("max_mem_clock_mhz", "<f4", "MHz"),
        Field("links", "<f4", "", "NVLink links the device has"),
        Field("gpm", "<f4", "", "1 when the driver gives GPM metrics for this device"),
        Field("mig", "<f4", "", "1 when MIG mode is on"),
    ),
    key=("gpu", "gi"),
    help="What a device is; one row per device at start, every 60 s and when it changes.",
)

NVLINK = Channel(
    "nvlink",
    "gauge",
    (
        _GPU,
        Field("link", "<i2"),
        Field("dt_ns", "<i8", "ns", "the rates cover [t - dt_ns, t]"),
        Field("tx_bps", "<f4", "B/s", "from the GPU"),
        Field("rx_bps", "<f4", "B/s", "to the GPU"),
        Field("state", "<f4", "", "1 up, 0 down; read every 5 s and repeated between"),
        Field("speed_bps", "<f4", "B/s", "line rate in one direction; read every 5 s and repeated between"),
        Field(
            "replay_errors",
            "<f4",
            "",
            "data link replays, cumulative; read at start and when the sum over all links has grown",
        ),
        Field(
            "recovery_errors",
            "<f4",
            "",
            "link recoveries, cumulative; read at start and when the sum over all links has grown",
        ),
        Field(
            "crc_errors",
            "<f4",
            "",
            "CRC errors, cumulative; read at start and when the sum over all links has grown",
        ),
    ),
    key=("gpu", "link"),
    help="One row per NVLink link per tick; without GPM four links a tick, in turn.",
)

GPU_PROCESS = Channel(
    "gpu_process",
    "gauge",
    (
        _GPU,
        _GI,
        Field("pid", "<i4", help="as NVML gives it: in the host's pid namespace"),
        Field("name", "<u4", help="process name, without arguments (they may hold secrets)", text=True),
        Field("user", "<u4", text=True),
        Field("kind", "<u4", help="compute or graphics", text=True),
        Field("mem_b", "<f8", "B", "device memory the process holds"),
        Field("sm_pct", "<f4", "%", "mean SM share since the previous row, as NVML estimates it"),
    ),
    key=("gpu", "gi", "pid"),
    help="One row per process on a GPU every 5 s.",
)

GPU_EVENT = Channel(
    "gpu_event",
    "event",
    (
        _GPU,
        _GI,
        Field(
            "kind",
            "<u4",
            help="xid, lost, back, throttle_on, throttle_off, ecc, remap, link_down, link_up, link_errors, ...",
            text=True,
        ),
        Field("code", "<f8", "", "the XID, the throttle bits, the link, or the count, by kind"),
        Field("detail", "<u4", help="plain-language meaning", text=True),
    ),
    key=("gpu", "gi", "kind"),
    help="Aperiodic GPU events; the same XID twice is two rows.",
)

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
        Field("launch_call_ns", "<f8", "ns", "host time in launch calls; NaN where it is not measured"),
        Field("not_ready", "<f4", "", "polls answered NOT_READY; NaN while they were not counted throughout"),
    ),
    key=("pid", "stream"),
    help="Host evidence of CUDA stream use by uprobes, aggregated in the kernel; not GPU time.",
)

ALL: tuple[Channel, ...] = (GPU, GPU_DEVICE, NVLINK, GPU_PROCESS, GPU_EVENT, STATUS, COST, STREAM)
BY_NAME = {channel.name: channel for channel in ALL}
