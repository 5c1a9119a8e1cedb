"""The plain readings of a device: clocks, power, temperature, throttling, errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from opusmon.collectors.gpu import fields as f
from opusmon.collectors.gpu.fields import FieldGroup
from opusmon.collectors.gpu.limits import (
    MAX_CLOCK_MHZ,
    MAX_POWER_MW,
    MAX_TEMP_C,
    bounded,
    percent,
)
from opusmon.collectors.gpu.nvml import NOT_SUPPORTED, Missing, Nvml
from opusmon.collectors.gpu.reading import GpuRow

CLOCK_SM, CLOCK_MEM = 1, 2
TEMPERATURE_GPU = 0
REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
MAX_COUNT = 2.0**53
MAX_MASK = 2.0**32 - 2

MIG_UTILIZATION = Missing("not_supported", "not available while MIG is on: see the rows of its GPU instances")

THROTTLE_FIELDS = {
    "throttle_power_ns": f.THROTTLE_POWER,
    "throttle_sync_ns": f.THROTTLE_SYNC,
    "throttle_sw_thermal_ns": f.THROTTLE_SW_THERMAL,
    "throttle_hw_thermal_ns": f.THROTTLE_HW_THERMAL,
    "throttle_brake_ns": f.THROTTLE_BRAKE,
}
FIELD_GROUPS = {
    "throttle": [(number, f.WHOLE) for number in THROTTLE_FIELDS.values()],
    "mem_temp": [(f.MEM_TEMP, f.WHOLE)],
}
ERROR_COLUMNS = (
    "ecc_corrected",
    "ecc_uncorrected",
    "remapped_correctable",
    "remapped_uncorrectable",
    "remap_pending",
    "remap_failed",
)


def read_sensors(nvml: Nvml, handle: Any, row: GpuRow, mig: bool) -> None:
    """Fill what single calls answer."""
    row.put("sm_clock_mhz", bounded(nvml.call("nvmlDeviceGetClockInfo", handle, CLOCK_SM), MAX_CLOCK_MHZ))
    row.put("mem_clock_mhz", bounded(nvml.call("nvmlDeviceGetClockInfo", handle, CLOCK_MEM), MAX_CLOCK_MHZ))
    row.put("power_mw", bounded(nvml.call("nvmlDeviceGetPowerUsage", handle), MAX_POWER_MW))
    row.put("temp_c", bounded(nvml.call("nvmlDeviceGetTemperature", handle, TEMPERATURE_GPU), MAX_TEMP_C))
    row.put("throttle_mask", bounded(nvml.first(REASONS, handle), MAX_MASK))
    _read_utilization(nvml, handle, row, mig)


def _read_utilization(nvml: Nvml, handle: Any, row: GpuRow, mig: bool) -> None:
    rates = nvml.call("nvmlDeviceGetUtilizationRates", handle)
    if isinstance(rates, Missing):
        why = MIG_UTILIZATION if mig and rates.code == NOT_SUPPORTED else rates
        row.put("gpu_busy_pct", why)
        row.put("mem_busy_pct", why)
        return
    row.put("gpu_busy_pct", percent(rates.gpu))
    row.put("mem_busy_pct", percent(rates.memory))


def put_fields(groups: Mapping[str, FieldGroup] | Missing, row: GpuRow) -> None:
    """Fill what field values answer."""
    if isinstance(groups, Missing):
        for name in (*THROTTLE_FIELDS, "mem_temp_c"):
            row.put(name, groups)
        return
    for place, name in enumerate(THROTTLE_FIELDS):
        row.put(name, bounded(groups["throttle"].one(place, name), math.inf))
    row.put("mem_temp_c", bounded(groups["mem_temp"].one(0, "mem_temp_c"), MAX_TEMP_C))


def read_errors(nvml: Nvml, handle: Any) -> dict[str, float | Missing]:
    """ECC counts since the driver loaded and remapped rows, by field name."""
    out: dict[str, float | Missing] = {}
    for kind, name in enumerate(ERROR_COLUMNS[:2]):
        out[name] = bounded(nvml.call("nvmlDeviceGetTotalEccErrors", handle, kind, 0), MAX_COUNT)
    rows = nvml.call("nvmlDeviceGetRemappedRows", handle)
    answers = [rows] * 4 if isinstance(rows, Missing) else rows
    out.update(
        {name: bounded(value, MAX_COUNT) for name, value in zip(ERROR_COLUMNS[2:], answers, strict=True)}
    )
    return out


def bandwidth_bps(row: GpuRow, bus_width_bits: float | Missing) -> float | Missing:
    """HBM bandwidth in use: share x memory clock x 2 (double data rate) x bus width in bytes.

    An H200 (6016 bit, 3201 MHz) gives 4.814e12 B/s at 100 %, its published 4.8 TB/s.
    """
    if isinstance(bus_width_bits, Missing):
        return bus_width_bits
    for name in ("hbm_bw_pct", "mem_clock_mhz"):
        if name in row.missing:
            return row.missing[name]
    share, clock_mhz = row.values["hbm_bw_pct"] / 100, row.values["mem_clock_mhz"]
    return share * clock_mhz * 1e6 * 2 * bus_width_bits / 8
