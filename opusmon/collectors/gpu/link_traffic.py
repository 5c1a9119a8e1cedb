"""NVLink traffic from the cumulative counters of each link, a few links per tick: for devices without GPM."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from opusmon.clock import Clock
from opusmon.collectors.gpu import fields as f
from opusmon.collectors.gpu.counters import KIB, CounterRate
from opusmon.collectors.gpu.fields import FieldGroup, FieldReader, Floats, entry_missing
from opusmon.collectors.gpu.limits import NO_NUMBER
from opusmon.collectors.gpu.nvml import Nvml
from opusmon.collectors.missing import Missing

LINKS_PER_CALL = f.MOST_EXPENSIVE // 2


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Traffic of some links.

    Attributes:
        links: which ones.
        dt_ns: the interval the rates cover.
        tx: bytes per second from the GPU, one per link of `links`, NaN where missing.
        rx: bytes per second to the GPU, likewise.
        missing: why `tx_bps` or `rx_bps` are missing on some link of the device.
    """

    links: slice
    dt_ns: int
    tx: Floats
    rx: Floats
    missing: dict[str, Missing]


def no_rates(links: slice, dt_ns: int, why: Missing) -> LinkRates:
    """Rates that are missing for one reason."""
    empty = np.full(links.stop - links.start, math.nan)
    return LinkRates(links, dt_ns, empty, empty, {"tx_bps": why, "rx_bps": why})


class LinkSlice:
    """Up to `LINKS_PER_CALL` links that are read together.

    Args:
        nvml: the edge of the calling thread.
        handle: device handle.
        links: which ones.
        clock: time of the readings.
    """

    def __init__(self, nvml: Nvml, handle: Any, links: slice, clock: Clock) -> None:
        self._links, self._clock = links, clock
        numbers = range(links.start, links.stop)
        self._reader = FieldReader(
            nvml,
            handle,
            {"tx": [(f.LINK_DATA_TX, n) for n in numbers], "rx": [(f.LINK_DATA_RX, n) for n in numbers]},
        )
        self._rate = CounterRate()
        self._read_at = clock.now()

    def read(self) -> LinkRates:
        """Rates since this slice was read before."""
        before = self._clock.now()
        answers = self._reader.read()
        at = (before + self._clock.now()) // 2
        dt_ns, self._read_at = at - self._read_at, at
        if isinstance(answers, Missing):
            return no_rates(self._links, dt_ns, answers)
        tx, rx = answers["tx"], answers["rx"]
        rates, gap = self._rate.update(np.array(tx.values + rx.values), at, KIB)
        half = len(tx.values)
        why = {"tx_bps": gap_of(tx, rates[:half], gap), "rx_bps": gap_of(rx, rates[half:], gap)}
        known = {name: reason for name, reason in why.items() if reason is not None}
        return LinkRates(self._links, self._rate.dt_ns, rates[:half], rates[half:], known)


def gap_of(group: FieldGroup, rates: Floats, gap: Missing | None) -> Missing | None:
    """Why the first missing rate of a group is; None when none is."""
    code = next(filter(None, group.codes), 0)
    if code:
        return entry_missing(code, "NVLink traffic")
    return (gap or NO_NUMBER) if np.isnan(rates).any() else None


class LinkTraffic:
    """All links of a device, one slice per turn.

    Args:
        nvml: the edge of the calling thread.
        handle: device handle.
        count: links; at least one.
        clock: time of the readings.
    """

    def __init__(self, nvml: Nvml, handle: Any, count: int, clock: Clock) -> None:
        starts = range(0, count, LINKS_PER_CALL)
        self._slices = [
            LinkSlice(nvml, handle, slice(at, min(at + LINKS_PER_CALL, count)), clock) for at in starts
        ]
        self._missing: list[dict[str, Missing]] = [{} for _ in self._slices]
        self._turn = 0

    def seed(self) -> None:
        """Begin the first interval of every slice, one call each."""
        for part in self._slices:
            part.read()

    def read(self) -> LinkRates:
        """Rates of the slice whose turn it is, and what is missing on any."""
        turn, self._turn = self._turn, (self._turn + 1) % len(self._slices)
        rates = self._slices[turn].read()
        self._missing[turn] = dict(rates.missing)
        rates.missing.clear()
        for reasons in reversed(self._missing):
            rates.missing.update(reasons)
        return rates
