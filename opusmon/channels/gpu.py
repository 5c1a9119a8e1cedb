"""GPUs: what NVML and the hardware counters say."""

from __future__ import annotations

from opusmon.schema import Channel, Field

WHOLE_GPU = -1
"""Value of `gi` (MIG GPU instance) in rows that describe the whole device."""


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
        Field(
            "pcie_replays",
            "<f8",
            "",
            "packets sent again over PCIe, since the driver loaded; read every 5 s and repeated between",
        ),
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

L2 = Channel(
    "l2",
    "gauge",
    (
        _GPU,
        Field("dt_ns", "<i8", "ns", "the rates and percentages cover [t - dt_ns, t]"),
        Field("source", "<u4", help="what measured it, with its version", text=True),
        Field("l2_hit_pct", "<f4", "%", "bytes the SMs asked the L2 for and that were not read from HBM"),
        Field(
            "l2_lookup_hit_pct",
            "<f4",
            "%",
            "hits per lookup by the L2's own counters; a sector in its other half is looked up twice",
        ),
        Field(
            "l2_to_hbm_ratio",
            "<f4",
            "",
            "HBM read sectors per L2 sector: an upper-level miss ratio, not 1 - hit rate",
        ),
        Field("l2_bps", "<f8", "B/s", "L2 sectors x 32 B"),
        Field("hbm_read_bps", "<f8", "B/s", "bytes read from HBM"),
        Field("hbm_write_bps", "<f8", "B/s", "bytes written to HBM"),
        Field("sm_active_pct", "<f4", "%", "SM cycles with a warp resident"),
        Field("warps_active_pct", "<f4", "%", "warps resident of the most possible, while SMs are active"),
        Field("tensor_pct", "<f4", "%", "cycles in which the tensor pipes were active"),
        Field("pcie_read_bps", "<f4", "B/s", "read by the GPU"),
        Field("pcie_write_bps", "<f4", "B/s", "written by the GPU"),
        Field("nvlink_rx_bps", "<f8", "B/s", "payload in, without the protocol around it"),
        Field("nvlink_tx_bps", "<f8", "B/s", "payload out, without the protocol around it"),
        Field("bank_conflicts_per_s", "<f8", "1/s", "shared-memory bank conflicts; NaN unless asked for"),
    ),
    key=("gpu",),
    help="Hardware counters of the device by PM sampling, all processes included; opt-in.",
)

DCGM = Channel(
    "dcgm",
    "gauge",
    (
        Field("engine", "<u4", help="where it was scraped: host:port/path", text=True),
        Field("gpu", "<i4", help="as DCGM counts, which is NVML's order; -1 where the page does not say"),
        Field("uuid", "<u4", text=True),
        Field("instance", "<u4", help='MIG instance id, "" for a whole GPU', text=True),
        Field(
            "hbm_bw_pct",
            "<f4",
            "%",
            "cycles in which the memory moved data; as old as the exporter's own interval, 30 s by default",
        ),
    ),
    key=("engine", "gpu", "instance"),
    help="HBM bandwidth as a dcgm-exporter tells it: the only source before Hopper.",
)
