"""GPM: the GPU performance metrics of Hopper and newer, read without a profiler lock."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from opusmon.clock import Clock
from opusmon.collectors.gpu.fields import Floats
from opusmon.collectors.gpu.limits import MAX_BPS, MAX_LINK_BPS, NO_NUMBER, bounded, percent, scaled
from opusmon.collectors.gpu.nvml import Nvml, missing
from opusmon.collectors.missing import Missing

MIB = 1_048_576
MIN_WINDOW_NS = 200_000_000
"""20 ms windows gave NaN and false zeros on an H200; 100 ms and more were sane."""

NEEDS_GPM = Missing("not_supported", "needs GPM (Hopper or newer)")
SHORT_WINDOW = Missing("unavailable", "the sampling window was shorter than 200 ms")
FIRST_WINDOW = Missing("unavailable", "the first sampling window has not ended yet")

DRAM_BW, SM_UTIL, SM_OCCUPANCY, TENSOR, PCIE_TX, PCIE_RX, LINKS_RX, LINKS_TX = 10, 2, 3, 5, 20, 21, 60, 61
PERCENTS = {
    "hbm_bw_pct": DRAM_BW,
    "sm_util_pct": SM_UTIL,
    "sm_occupancy_pct": SM_OCCUPANCY,
    "tensor_pct": TENSOR,
}
RATES = {"pcie_tx_bps": PCIE_TX, "pcie_rx_bps": PCIE_RX, "nvlink_tx_bps": LINKS_TX, "nvlink_rx_bps": LINKS_RX}
FIELDS = (*PERCENTS, *RATES)
_N = len(FIELDS)


def link_metric(link: int) -> int:
    """GPM id of a link's RX rate; TX is the next one. Links 18 and up, 36 and up have ids of their own."""
    if link < 18:
        return 62 + 2 * link
    return 212 + 2 * (link - 18) if link < 36 else 405 + 2 * (link - 36)


@dataclass(frozen=True, slots=True)
class Window:
    """Metrics over one window.

    Attributes:
        dt_ns: length of the window.
        values: by field name of the `gpu` channel.
        tx: bytes per second from the GPU, per link, NaN where missing.
        rx: bytes per second to the GPU, per link, NaN where missing.
        link_missing: why the first link without a rate has none; None when all have one.
    """

    dt_ns: int
    values: dict[str, float | Missing]
    tx: Floats
    rx: Floats
    link_missing: Missing | None


def gpm_support(nvml: Nvml, handle: Any) -> Missing | None:
    """None when the driver gives GPM metrics for the device, otherwise why not."""
    answer = nvml.call("nvmlGpmQueryDeviceSupport", handle)
    if isinstance(answer, Missing):
        return NEEDS_GPM if answer.code == 3 else answer
    return None if answer.isSupportedDevice else NEEDS_GPM


class Gpm:
    """Windows of one device or one MIG GPU instance.

    Args:
        nvml: the edge of the calling thread.
        handle: device handle (the parent's for a MIG instance).
        gi: GPU instance id, -1 for the whole device.
        links: NVLink links to ask for.
        clock: time of the samples.
    """

    def __init__(self, nvml: Nvml, handle: Any, gi: int, links: int, clock: Clock) -> None:
        module = nvml.module
        self._nvml, self._handle, self._gi, self._clock = nvml, handle, gi, clock
        self._links = links
        struct = module.c_nvmlGpmMetricsGet_t
        metric = module.c_nvmlGpmMetric_t
        get = struct()
        # The array's length is the package's: 98 metrics in old releases, 477 in new ones.
        asked = min(links, (len(get.metrics) - len(FIELDS)) // 2)
        ids = [*PERCENTS.values(), *RATES.values()]
        ids += [link_metric(link) + way for link in range(asked) for way in (0, 1)]
        get.version, get.numMetrics = 1, len(ids)
        for entry, number in zip(get.metrics, ids, strict=False):
            entry.metricId = number
        layout = np.dtype(
            {
                "names": ["code", "value"],
                "formats": ["<i4", "<f8"],
                "offsets": [metric.nvmlReturn.offset, metric.value.offset],
                "itemsize": ctypes.sizeof(metric),
            }
        )
        self._view = np.frombuffer(get, dtype=layout, count=len(ids), offset=struct.metrics.offset)
        self._get, self._get_in = get, ctypes.byref(get)
        self._samples: list[Any] = []
        self._last: int | None = None

    def seed(self) -> Missing | None:
        """Take the sample at which the first window begins; None when that worked."""
        while len(self._samples) < 2:
            sample = self._nvml.call("nvmlGpmSampleAlloc")
            if isinstance(sample, Missing):
                return sample
            self._samples.append(sample)
        taken = self._take(self._samples[0])
        self._last = None if isinstance(taken, Missing) else taken
        return taken if isinstance(taken, Missing) else None

    def read(self) -> Window | Missing:
        """Metrics since the previous sample. After a failure the next call only begins a new window."""
        if self._last is None:
            return self.seed() or FIRST_WINDOW
        now = self._take(self._samples[1])
        if isinstance(now, Missing):
            self._last = None
            return now
        dt_ns, self._last = now - self._last, now
        self._get.sample1, self._get.sample2 = self._samples
        self._samples.reverse()
        if dt_ns < MIN_WINDOW_NS:
            return SHORT_WINDOW
        failed = self._nvml.call_c("nvmlGpmMetricsGet", self._get_in)
        return failed or self._window(dt_ns)

    def close(self) -> None:
        """Give the samples back to the driver."""
        for sample in self._samples:
            self._nvml.call("nvmlGpmSampleFree", sample)
        self._samples = []
        self._last = None

    def _take(self, sample: Any) -> int | Missing:
        """Fill a sample; the middle of the call, monotonic ns."""
        before = self._clock.now()
        if self._gi >= 0:
            failed = self._nvml.call_c("nvmlGpmMigSampleGet", self._handle, self._gi, sample)
        else:
            failed = self._nvml.call_c("nvmlGpmSampleGet", self._handle, sample)
        return failed or (before + self._clock.now()) // 2

    def _window(self, dt_ns: int) -> Window:
        codes, values = self._view["code"].tolist(), self._view["value"].tolist()
        named = dict(zip(FIELDS, screen(codes[:_N], values[:_N]), strict=True))
        out = {name: percent(named[name]) for name in PERCENTS}
        out |= {name: bounded(scaled(named[name], MIB), MAX_BPS) for name in RATES}
        rates, gap = self._link_rates(codes, values)
        return Window(dt_ns, out, rates[1::2], rates[0::2], gap)

    def _link_rates(self, codes: list[int], values: list[float]) -> tuple[Floats, Missing | None]:
        """RX and TX in bytes per second in turn, and why the first missing one is."""
        asked = values[_N:]
        if len(asked) == 2 * self._links and not any(codes) and math.isfinite(values[0]) and sane(asked):
            return np.array(asked) * MIB, None
        checked = screen(codes, values)[_N:]
        links = [bounded(scaled(value, MIB), MAX_LINK_BPS) for value in checked]
        gap = next((value for value in links if isinstance(value, Missing)), None)
        rates = np.full(2 * self._links, math.nan)
        rates[: len(links)] = [math.nan if isinstance(value, Missing) else value for value in links]
        return rates, gap


def sane(values: list[float]) -> bool:
    """Whether all link rates, in MiB/s, can be taken as they are: the common case, checked in one go."""
    if not values or not math.isfinite(sum(values)):
        return False
    return min(values) >= 0 and max(values) * MIB <= MAX_LINK_BPS


def screen(codes: list[int], values: list[float]) -> list[float | Missing]:
    """Replace what is not a measurement by the reason.

    A window in which the driver filled nothing shows NaN for the memory bandwidth (the first entry) and zeros
    elsewhere: those zeros were not measured either.
    """
    unfilled = not codes[0] and not math.isfinite(values[0])
    out: list[float | Missing] = []
    for code, value in zip(codes, values, strict=True):
        if code:
            out.append(missing(code, "nvmlGpmMetricsGet"))
        elif not math.isfinite(value) or (unfilled and value == 0):
            out.append(NO_NUMBER)
        else:
            out.append(value)
    return out
