"""NVLink: per-link rates from GPM or from the field counters, state, speed and error counts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opusmon.channels import NVLINK
from opusmon.collectors.gpu import fields as f
from opusmon.collectors.gpu.fields import FieldGroup, Floats, entry_missing
from opusmon.collectors.gpu.limits import MAX_LINK_BPS, NO_NUMBER
from opusmon.collectors.gpu.nvml import NOT_SUPPORTED, Missing
from opusmon.collectors.gpu.reading import Event, Key, scope
from opusmon.schema import Rows

KIB = 1024
MB = 1_000_000
UP_STATES = (1, 2)
"""NVML link states: 0 inactive, 1 active, 2 sleeping (low power, still up), 3 active with traffic disabled."""

ERROR_FIELDS = {
    "replay_errors": (f.LINK_REPLAY, f.LINK5_RETRY_BLOCKS),
    "recovery_errors": (f.LINK_RECOVERY, f.LINK5_RECOVERY),
    "crc_errors": (f.LINK_CRC, f.LINK5_RCV_ERRORS),
}
"""Field ids up to Hopper, and their nearest kin on NVLink 5 (Blackwell and newer)."""

NO_LINKS = Missing("not_supported", "this GPU has no NVLink, or none that is enabled")
WENT_BACK = Missing("error", "the counter went back (reset or wrapped); the rate starts anew")
FIRST = Missing("unavailable", "a rate needs two readings of the counter")

Groups = dict[str, list[tuple[int, int]]]


def rate_groups(links: int) -> Groups:
    """Fields of the traffic counters (KiB, cumulative), for devices without GPM."""
    return {
        "link_tx": [(f.LINK_DATA_TX, link) for link in range(links)],
        "link_rx": [(f.LINK_DATA_RX, link) for link in range(links)],
    }


def slow_groups(links: int) -> Groups:
    """Fields read every few seconds."""
    groups: Groups = {
        "state": [(f.LINK_STATE, link) for link in range(links)],
        "speed_bps": [(f.LINK_SPEED, link) for link in range(links)],
    }
    for name, (old, new) in ERROR_FIELDS.items():
        groups[name] = [(old, link) for link in range(links)]
        groups[name + "5"] = [(new, link) for link in range(links)]
    return groups


class CounterRate:
    """Rates of cumulative counters between two readings."""

    def __init__(self) -> None:
        self._values: Floats | None = None
        self._at = 0

    def update(self, values: Floats, at: int, factor: float) -> tuple[Floats, Missing | None]:
        """Rates since the last reading and why the first missing one is.

        Args:
            values: counters, NaN where missing.
            at: monotonic ns of this reading.
            factor: units per count.
        """
        before, self._values = self._values, values
        dt_s, self._at = (at - self._at) / 1e9, at
        if before is None or len(before) != len(values) or dt_s <= 0:
            return np.full(len(values), math.nan), FIRST
        rates = (values - before) * (factor / dt_s)
        back = rates < 0
        rates[back] = math.nan
        wide = rates > MAX_LINK_BPS
        rates[wide] = math.nan
        if back.any():
            return rates, WENT_BACK
        return rates, (NO_NUMBER if np.isnan(rates).any() else None)


@dataclass(slots=True)
class Links:
    """The links of one device.

    Attributes:
        gpu: device index.
        count: how many links it has.
        missing: why slow fields are missing, by status key.
    """

    gpu: int
    count: int
    missing: dict[Key, Missing] = field(default_factory=dict)
    _columns: dict[str, Floats] = field(default_factory=dict)
    _rates: dict[str, CounterRate] = field(default_factory=dict)

    def rates(self, groups: Mapping[str, FieldGroup], at: int) -> tuple[Floats, Floats, dict[str, Missing]]:
        """TX and RX in bytes per second per link from the field counters read at `at`, and what is missing."""
        out: list[Floats] = []
        why: dict[str, Missing] = {}
        for name, group in (("tx_bps", groups["link_tx"]), ("rx_bps", groups["link_rx"])):
            rates, gap = self._rates.setdefault(name, CounterRate()).update(group.values, at, KIB)
            out.append(rates)
            failed = first_missing(group, name)
            if failed or gap:
                why[name] = failed or gap or NO_NUMBER
        return out[0], out[1], why

    def rows(self, t: int, tx: Floats, rx: Floats) -> Rows:
        """Rows of `nvlink` at `t`: rates of this tick, the rest as read last."""
        rows = np.empty(self.count, NVLINK.dtype)
        rows["t"], rows["gpu"], rows["link"] = t, self.gpu, np.arange(self.count)
        rows["tx_bps"], rows["rx_bps"] = tx, rx
        for name in ("state", "speed_bps", *ERROR_FIELDS):
            rows[name] = self._columns.get(name, math.nan)
        return rows

    def update(self, groups: Mapping[str, FieldGroup], t: int) -> list[Event]:
        """Take over the slow fields; links that went down or came up."""
        before = self._columns.get("state")
        self.missing = {}
        state = self._column(groups["state"], "state")
        self._columns["state"] = np.where(np.isnan(state), state, np.isin(state, UP_STATES).astype(float))
        self._columns["speed_bps"] = self._column(groups["speed_bps"], "speed_bps") * MB
        for name in ERROR_FIELDS:
            self._columns[name] = self._column(_supported(groups[name], groups[name + "5"]), name)
        return [] if before is None else self._changes(before, self._columns["state"], t)

    def _column(self, group: FieldGroup, name: str) -> Floats:
        codes = group.codes
        if codes.any():
            if (codes == codes[0]).all():
                self.missing["nvlink", name, scope(self.gpu)] = entry_missing(int(codes[0]), name)
            else:
                for link in np.flatnonzero(codes).tolist():
                    why = entry_missing(int(codes[link]), name)
                    self.missing["nvlink", name, scope(self.gpu, link=link)] = why
        return group.values

    def _changes(self, before: Floats, after: Floats, t: int) -> list[Event]:
        known = ~np.isnan(before) & ~np.isnan(after)
        out = []
        for link in np.flatnonzero(known & (before != after)).tolist():
            kind, word = ("link_up", "up") if after[link] else ("link_down", "down")
            out.append(Event(t, self.gpu, -1, kind, link, f"NVLink link {link} is {word}"))
        return out


def _supported(old: FieldGroup, new: FieldGroup) -> FieldGroup:
    """The NVLink 5 counters where the older ones are not supported on any link."""
    return new if len(old.codes) and (old.codes == NOT_SUPPORTED).all() and not new.codes.all() else old


def first_missing(group: FieldGroup, name: str) -> Missing | None:
    """Why the first failed entry failed; None when none did."""
    bad = np.flatnonzero(group.codes)
    return entry_missing(int(group.codes[bad[0]]), name) if len(bad) else None


def total(rates: Floats) -> float | Missing:
    """Sum over the links that have a rate."""
    known = rates[~np.isnan(rates)]
    return float(known.sum()) if len(known) else NO_NUMBER


def link_count(value: Any) -> int:
    """Number of links from the answer to field 91; 0 when the device does not know NVLink."""
    return 0 if isinstance(value, Missing) else min(int(value), 72)
