"""Rates of a whole device and its links: from GPM, or from cumulative counters where there is no GPM."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from opusmon.channels import WHOLE_GPU
from opusmon.clock import Clock
from opusmon.collectors.gpu import fields as f
from opusmon.collectors.gpu.counters import KIB, CounterRate
from opusmon.collectors.gpu.fields import NARROW_TYPES, WHOLE, FieldGroup, FieldReader
from opusmon.collectors.gpu.gpm import PERCENTS, Gpm
from opusmon.collectors.gpu.limits import MAX_BPS, NO_NUMBER
from opusmon.collectors.gpu.link_traffic import LinkRates, LinkTraffic, no_rates
from opusmon.collectors.gpu.links import NO_LINKS
from opusmon.collectors.gpu.mig import put_window
from opusmon.collectors.gpu.nvml import Nvml
from opusmon.collectors.gpu.reading import GpuRow
from opusmon.collectors.missing import Missing

NARROW = Missing("not_supported", "the driver's byte counter has 32 bits and wraps within a second")

PCIE_FIELDS = ("pcie_tx_bps", "pcie_rx_bps")
LINK_FIELDS = ("nvlink_tx_bps", "nvlink_rx_bps")


class Totals:
    """PCIe and NVLink traffic of a whole device from two counters each.

    Args:
        nvml: the edge of the calling thread.
        handle: device handle.
        links: whether the device has NVLink.
        clock: time of the readings.
    """

    def __init__(self, nvml: Nvml, handle: Any, *, links: bool, clock: Clock) -> None:
        groups = {"pcie": [(f.PCIE_TX_BYTES, WHOLE), (f.PCIE_RX_BYTES, WHOLE)]}
        if links:
            groups["links"] = [(f.LINK_DATA_TX, f.ALL_LINKS), (f.LINK_DATA_RX, f.ALL_LINKS)]
        self._reader = FieldReader(nvml, handle, groups)
        self._rates = {"pcie": CounterRate(MAX_BPS), "links": CounterRate(MAX_BPS)}
        self._clock = clock
        self._read_at = clock.now()

    def read(self, row: GpuRow) -> int:
        """Fill the traffic fields of a row; the interval they cover in ns."""
        before = self._clock.now()
        answers = self._reader.read()
        at = (before + self._clock.now()) // 2
        dt_ns, self._read_at = at - self._read_at, at
        if isinstance(answers, Missing):
            for name in (*PCIE_FIELDS, *LINK_FIELDS):
                row.put(name, answers)
            return dt_ns
        self._put(row, "pcie", PCIE_FIELDS, answers["pcie"], at)
        if "links" in answers:
            self._put(row, "links", LINK_FIELDS, answers["links"], at)
        return dt_ns

    def _put(self, row: GpuRow, kind: str, names: tuple[str, ...], group: FieldGroup, at: int) -> None:
        bytes_per_count = KIB if kind == "links" else 1
        rates, gap = self._rates[kind].update(np.array(group.values), at, bytes_per_count)
        for place, name in enumerate(names):
            row.put(name, counter_rate(group, place, float(rates[place]), gap, narrow=kind == "pcie"))


class RateSource:
    """Where a device's rates come from.

    Args:
        nvml: the edge of the calling thread.
        handle: device handle.
        links: how many NVLink links the device has.
        gpm_missing: why there is no GPM, None when there is.
        clock: time of the readings.
    """

    def __init__(
        self, nvml: Nvml, handle: Any, links: int, gpm_missing: Missing | None, clock: Clock
    ) -> None:
        self._count, self._clock = links, clock
        self._gpm = gpm_missing or Gpm(nvml, handle, WHOLE_GPU, links, clock)
        self._at = clock.now()
        if isinstance(self._gpm, Missing):
            self._totals = Totals(nvml, handle, links=links > 0, clock=clock)
            self._traffic = LinkTraffic(nvml, handle, links, clock) if links else None

    def seed(self) -> None:
        """Begin the first interval."""
        self._at = self._clock.now()
        if isinstance(self._gpm, Gpm):
            self._gpm.seed()
            return
        if self._traffic is not None:
            self._traffic.seed()
        self._totals.read(GpuRow(0))

    def read(self, row: GpuRow) -> tuple[int, LinkRates]:
        """Fill the rate fields of a row.

        Returns:
            The interval those fields cover in ns, and the rates of the links that were read.
        """
        if isinstance(self._gpm, Gpm):
            out = self._from_gpm(self._gpm, row)
        else:
            out = self._from_counters(self._gpm, row)
        if not self._count:
            for name in LINK_FIELDS:
                row.put(name, NO_LINKS)
        return out

    def close(self) -> None:
        """Give samples back to the driver."""
        if isinstance(self._gpm, Gpm):
            self._gpm.close()

    def _from_gpm(self, gpm: Gpm, row: GpuRow) -> tuple[int, LinkRates]:
        window = gpm.read()
        put_window(row, window)
        at = self._clock.now()
        dt_ns, self._at = at - self._at, at
        links = slice(0, self._count)
        if isinstance(window, Missing):
            return dt_ns, no_rates(links, dt_ns, window)
        gap = window.link_missing
        why = {"tx_bps": gap, "rx_bps": gap} if gap else {}
        return window.dt_ns, LinkRates(links, window.dt_ns, window.tx, window.rx, why)

    def _from_counters(self, no_gpm: Missing, row: GpuRow) -> tuple[int, LinkRates]:
        for name in PERCENTS:
            row.put(name, no_gpm)
        dt_ns = self._totals.read(row)
        rates = no_rates(slice(0, 0), 0, NO_LINKS) if self._traffic is None else self._traffic.read()
        return dt_ns, rates


def counter_rate(
    group: FieldGroup, place: int, rate: float, gap: Missing | None, *, narrow: bool
) -> float | Missing:
    """A rate, or why there is none: the counter is missing, went back, or (if `narrow` matters) has 32 bits."""
    counted = group.one(place, "byte counter")
    if isinstance(counted, Missing):
        return counted
    if narrow and group.types[place] in NARROW_TYPES:
        return NARROW
    return (gap or NO_NUMBER) if math.isnan(rate) else rate
