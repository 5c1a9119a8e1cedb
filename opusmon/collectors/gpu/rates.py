"""Rates of a whole device: from GPM, or from cumulative counters where there is no GPM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from opusmon.channels import WHOLE_GPU
from opusmon.clock import Clock
from opusmon.collectors.gpu.fields import (
    NARROW_TYPES,
    PCIE_RX_BYTES,
    PCIE_TX_BYTES,
    WHOLE,
    FieldGroup,
    Floats,
)
from opusmon.collectors.gpu.gpm import PERCENTS, Gpm, Window
from opusmon.collectors.gpu.limits import NO_NUMBER
from opusmon.collectors.gpu.links import NO_LINKS, CounterRate, Groups, Links, rate_groups, total
from opusmon.collectors.gpu.mig import put_window
from opusmon.collectors.gpu.nvml import Missing, Nvml
from opusmon.collectors.gpu.reading import GpuRow

PCIE_GROUPS: Groups = {"pcie": [(PCIE_TX_BYTES, WHOLE), (PCIE_RX_BYTES, WHOLE)]}
NARROW = Missing("not_supported", "the driver's byte counter has 32 bits and wraps within a second")

Answers = Mapping[str, FieldGroup] | Missing


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Traffic per link.

    Attributes:
        dt_ns: the interval the rates cover.
        tx: bytes per second from the GPU, one per link, NaN where missing.
        rx: bytes per second to the GPU, one per link, NaN where missing.
        missing: why `tx_bps` or `rx_bps` are missing on some link.
    """

    dt_ns: int
    tx: Floats
    rx: Floats
    missing: dict[str, Missing]


class RateSource:
    """Where a device's rates come from.

    Args:
        nvml: the edge of the calling thread.
        handle: device handle.
        links: the device's links.
        gpm_missing: why there is no GPM, None when there is.
        clock: time of the readings.

    Attributes:
        groups: field values it needs every tick.
    """

    def __init__(
        self, nvml: Nvml, handle: Any, links: Links, gpm_missing: Missing | None, clock: Clock
    ) -> None:
        self._links, self._clock = links, clock
        self._gpm = gpm_missing or Gpm(nvml, handle, WHOLE_GPU, links.count, clock)
        self._pcie = CounterRate()
        self._at = clock.now()
        self.groups: Groups = {}
        if isinstance(self._gpm, Missing):
            self.groups = PCIE_GROUPS | rate_groups(links.count)

    def seed(self, answers: Answers) -> None:
        """Begin the first interval."""
        self._at = self._clock.now()
        if isinstance(self._gpm, Gpm):
            self._gpm.seed()
        else:
            self._counters(answers, self._at)

    def read(self, row: GpuRow, answers: Answers, at: int) -> LinkRates:
        """Fill the rate fields of a row.

        Args:
            row: of the whole device.
            answers: field values of this tick.
            at: when those were read, monotonic ns.
        """
        if isinstance(self._gpm, Gpm):
            rates = self._from_gpm(self._gpm, row, at)
        else:
            rates = self._from_counters(self._gpm, row, answers, at)
        if not self._links.count:
            row.put("nvlink_tx_bps", NO_LINKS)
            row.put("nvlink_rx_bps", NO_LINKS)
        return rates

    def close(self) -> None:
        """Give samples back to the driver."""
        if isinstance(self._gpm, Gpm):
            self._gpm.close()

    def _from_gpm(self, gpm: Gpm, row: GpuRow, at: int) -> LinkRates:
        window = gpm.read()
        put_window(row, window)
        dt_ns, self._at = at - self._at, at
        if isinstance(window, Window):
            gap = window.link_missing
            why = {"tx_bps": gap, "rx_bps": gap} if gap else {}
            return LinkRates(window.dt_ns, window.tx, window.rx, why)
        return self._nothing(dt_ns, window)

    def _from_counters(self, no_gpm: Missing, row: GpuRow, answers: Answers, at: int) -> LinkRates:
        for name in PERCENTS:
            row.put(name, no_gpm)
        dt_ns, self._at = at - self._at, at
        rates, pcie = self._counters(answers, at, dt_ns)
        row.put("pcie_tx_bps", pcie[0])
        row.put("pcie_rx_bps", pcie[1])
        for name, per_link in (("tx_bps", rates.tx), ("rx_bps", rates.rx)):
            all_links = total(per_link)
            row.put(
                f"nvlink_{name}",
                rates.missing.get(name, all_links) if isinstance(all_links, Missing) else all_links,
            )
        return rates

    def _counters(self, answers: Answers, at: int, dt_ns: int = 0) -> tuple[LinkRates, list[float | Missing]]:
        """Per-link rates and PCIe TX and RX from cumulative counters."""
        if isinstance(answers, Missing):
            return self._nothing(dt_ns, answers), [answers, answers]
        tx, rx, why = self._links.rates(answers, at)
        group = answers["pcie"]
        rates, gap = self._pcie.update(group.values, at, 1.0)
        pcie = [counter_rate(group, place, float(rates[place]), gap) for place in (0, 1)]
        return LinkRates(dt_ns, tx, rx, why), pcie

    def _nothing(self, dt_ns: int, why: Missing) -> LinkRates:
        empty = np.full(self._links.count, math.nan)
        return LinkRates(dt_ns, empty, empty, {"tx_bps": why, "rx_bps": why})


def counter_rate(group: FieldGroup, place: int, rate: float, gap: Missing | None) -> float | Missing:
    """A PCIe rate, or why there is none: the counter is missing, too narrow, or went back."""
    counted = group.one(place, "PCIe byte counter")
    if isinstance(counted, Missing):
        return counted
    if int(group.types[place]) in NARROW_TYPES:
        return NARROW
    return (gap or NO_NUMBER) if math.isnan(rate) else rate
