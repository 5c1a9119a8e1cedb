"""The plain readings of a device: clocks, power, temperature, throttling, errors."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping
from typing import Any

from opusmon.collectors.gpu import fields as f
from opusmon.collectors.gpu.fields import FieldGroup, FieldReader
from opusmon.collectors.gpu.limits import (
    MAX_CLOCK_MHZ,
    MAX_POWER_MW,
    MAX_TEMP_C,
    bounded,
    percent,
)
from opusmon.collectors.gpu.nvml import FUNCTION_NOT_FOUND, NOT_SUPPORTED, Nvml
from opusmon.collectors.gpu.reading import GpuRow
from opusmon.collectors.missing import Missing

CLOCK_SM, CLOCK_MEM = 1, 2
TEMPERATURE_GPU = 0
REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
MAX_COUNT = 2.0**53
MAX_MASK = 2.0**32 - 2

MIG_UTILIZATION = Missing("not_supported", "not available while MIG is on: see the rows of its GPU instances")

CHEAP_THROTTLE = {
    "throttle_power_ns": f.THROTTLE_POWER,
    "throttle_sync_ns": f.THROTTLE_SYNC,
    "throttle_sw_thermal_ns": f.THROTTLE_SW_THERMAL,
}
DEAR_THROTTLE = {
    "throttle_hw_thermal_ns": f.THROTTLE_HW_THERMAL,
    "throttle_brake_ns": f.THROTTLE_BRAKE,
}
"""A millisecond each; nearly always 0."""

THROTTLE_FIELDS = CHEAP_THROTTLE | DEAR_THROTTLE
HARDWARE_REASONS = 0x8 | 0x40 | 0x80
"""Clocks event reasons under which the dear counters run: hardware slowdown, thermal limit, power brake."""

MEMORY_ERRORS = (
    "ecc_corrected",
    "ecc_uncorrected",
    "remapped_correctable",
    "remapped_uncorrectable",
    "remap_pending",
    "remap_failed",
)
ERROR_COLUMNS = (*MEMORY_ERRORS, "pcie_replays")


def read_sensors(nvml: Nvml, handle: Any, row: GpuRow, mig: bool) -> None:
    """Fill what single calls answer."""
    row.put("sm_clock_mhz", bounded(nvml.u32("nvmlDeviceGetClockInfo", handle, CLOCK_SM), MAX_CLOCK_MHZ))
    row.put("mem_clock_mhz", bounded(nvml.u32("nvmlDeviceGetClockInfo", handle, CLOCK_MEM), MAX_CLOCK_MHZ))
    row.put("power_mw", bounded(nvml.u32("nvmlDeviceGetPowerUsage", handle), MAX_POWER_MW))
    row.put("temp_c", bounded(nvml.u32("nvmlDeviceGetTemperature", handle, TEMPERATURE_GPU), MAX_TEMP_C))
    row.put("throttle_mask", bounded(_reasons(nvml, handle), MAX_MASK))
    _read_utilization(nvml, handle, row, mig)


def _reasons(nvml: Nvml, handle: Any) -> int | Missing:
    """Clocks event reasons, by the function's name of this driver."""
    answer = nvml.u64(REASONS[0], handle)
    if isinstance(answer, Missing) and answer.code == FUNCTION_NOT_FOUND:
        return nvml.u64(REASONS[1], handle)
    return answer


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t."""

    _fields_ = (("gpu", ctypes.c_uint32), ("memory", ctypes.c_uint32))


def _read_utilization(nvml: Nvml, handle: Any, row: GpuRow, mig: bool) -> None:
    rates = _Utilization()
    failed = nvml.call_c("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(rates))
    if failed is not None:
        why = MIG_UTILIZATION if mig and failed.code == NOT_SUPPORTED else failed
        row.put("gpu_busy_pct", why)
        row.put("mem_busy_pct", why)
        return
    row.put("gpu_busy_pct", percent(rates.gpu))
    row.put("mem_busy_pct", percent(rates.memory))


class SensorFields:
    """What only field values tell: times held back, memory temperature.

    Args:
        nvml: the edge of the calling thread.
        handle: device handle.
    """

    def __init__(self, nvml: Nvml, handle: Any) -> None:
        throttle = [(number, f.WHOLE) for number in CHEAP_THROTTLE.values()]
        self._cheap = FieldReader(nvml, handle, {"throttle": throttle, "mem_temp": [(f.MEM_TEMP, f.WHOLE)]})
        self._dear = FieldReader(
            nvml, handle, {"throttle": [(number, f.WHOLE) for number in DEAR_THROTTLE.values()]}
        )
        self._last: dict[str, float | Missing] = {}

    def read(self, row: GpuRow, *, slow: bool) -> None:
        """Fill the row; the dear counters anew when `slow` or while the hardware holds the clocks back."""
        groups = self._cheap.read()
        _put_times(row, CHEAP_THROTTLE, groups)
        temp = groups if isinstance(groups, Missing) else groups["mem_temp"].one(0, "mem_temp_c")
        row.put("mem_temp_c", bounded(temp, MAX_TEMP_C))
        held_back = int(row.values.get("throttle_mask", 0)) & HARDWARE_REASONS
        if slow or held_back or not self._last:
            _put_times(row, DEAR_THROTTLE, self._dear.read())
            self._last = {
                name: row.missing.get(name, row.values.get(name, math.nan)) for name in DEAR_THROTTLE
            }
        else:
            for name, value in self._last.items():
                row.put(name, value)


def _put_times(row: GpuRow, names: Iterable[str], groups: Mapping[str, FieldGroup] | Missing) -> None:
    for place, name in enumerate(names):
        value = groups if isinstance(groups, Missing) else groups["throttle"].one(place, name)
        row.put(name, bounded(value, math.inf))


def read_errors(nvml: Nvml, handle: Any) -> dict[str, float | Missing]:
    """ECC counts and PCIe replays since the driver loaded, and remapped rows, by field name."""
    out: dict[str, float | Missing] = {}
    for kind, name in enumerate(MEMORY_ERRORS[:2]):
        out[name] = bounded(nvml.call("nvmlDeviceGetTotalEccErrors", handle, kind, 0), MAX_COUNT)
    rows = nvml.call("nvmlDeviceGetRemappedRows", handle)
    answers = [rows] * 4 if isinstance(rows, Missing) else rows
    out.update(
        {name: bounded(value, MAX_COUNT) for name, value in zip(MEMORY_ERRORS[2:], answers, strict=True)}
    )
    out["pcie_replays"] = bounded(nvml.u32("nvmlDeviceGetPcieReplayCounter", handle), MAX_COUNT)
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
