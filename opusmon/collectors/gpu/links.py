"""NVLink links of one device: state, speed, error counts and the rows they make."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np

from opusmon.channels import NVLINK
from opusmon.collectors.gpu import fields as f
from opusmon.collectors.gpu.fields import FieldGroup, FieldReader, Floats, entry_missing
from opusmon.collectors.gpu.link_errors import NAMES, LinkErrors
from opusmon.collectors.gpu.link_traffic import LinkRates
from opusmon.collectors.gpu.nvml import Nvml
from opusmon.collectors.gpu.reading import Event, scope
from opusmon.collectors.missing import Missing
from opusmon.collectors.notes import Key
from opusmon.schema import Rows

MB = 1_000_000
UP_STATES = (1, 2)
"""NVML link states: 0 inactive, 1 active, 2 sleeping (low power, still up), 3 active with traffic disabled."""

NO_LINKS = Missing("not_supported", "this GPU has no NVLink, or none that is enabled")


class Links:
    """The links of one device.

    Args:
        nvml: the edge of the calling thread.
        handle: device handle.
        gpu: device index.
        count: how many links it has; at least one.
    """

    def __init__(self, nvml: Nvml, handle: Any, gpu: int, count: int) -> None:
        self._gpu = gpu
        self._reader = FieldReader(
            nvml,
            handle,
            {
                "state": [(f.LINK_STATE, link) for link in range(count)],
                "speed_bps": [(f.LINK_SPEED, link) for link in range(count)],
            },
        )
        self._errors = LinkErrors(nvml, handle, gpu, count)
        self._state: Floats | None = None
        self._missing: dict[Key, Missing] = {}
        self._rows = np.zeros(count, NVLINK.dtype)
        self._rows["gpu"], self._rows["link"] = gpu, np.arange(count)
        for name in ("tx_bps", "rx_bps", "state", "speed_bps", *NAMES):
            self._rows[name] = math.nan

    @property
    def missing(self) -> dict[Key, Missing]:
        """Why values other than rates are missing, by status key."""
        return self._missing | self._errors.missing

    def turn(self, t: int, *, slow: bool) -> list[Event]:
        """Read what is due at `t` (monotonic ns): state and speed when `slow`, error counts as they come.

        Returns:
            Links that went down or came up, and error counts that have grown.
        """
        events = self._read_state(t) if slow else []
        events += self._errors.turn(t, slow=slow)
        if self._errors.fresh:
            self._errors.fresh = False
            for place, name in enumerate(NAMES):
                self._rows[name] = self._errors.values[:, place]
        return events

    def rows(self, t: int, rates: LinkRates) -> Rows:
        """Rows of `nvlink` at `t` for the links that have been read; what is not a rate is as read last."""
        rows = cast("Rows", self._rows[rates.links].copy())
        rows["t"], rows["dt_ns"] = t, rates.dt_ns
        rows["tx_bps"], rows["rx_bps"] = rates.tx, rates.rx
        return rows

    def _read_state(self, t: int) -> list[Event]:
        answers = self._reader.read()
        if isinstance(answers, Missing):
            return []
        self._missing = {}
        state = self._column(answers["state"], "state")
        before = self._state
        after = self._state = np.where(np.isnan(state), state, np.isin(state, UP_STATES).astype(float))
        self._rows["state"] = after
        self._rows["speed_bps"] = self._column(answers["speed_bps"], "speed_bps") * MB
        return [] if before is None else self._changes(before, after, t)

    def _column(self, group: FieldGroup, name: str) -> Floats:
        codes = group.codes
        if any(codes):
            if len(set(codes)) == 1:
                self._missing["nvlink", name, scope(self._gpu)] = entry_missing(codes[0], name)
            else:
                for link, code in enumerate(codes):
                    if code:
                        self._missing["nvlink", name, scope(self._gpu, link=link)] = entry_missing(code, name)
        return np.array(group.values)

    def _changes(self, before: Floats, after: Floats, t: int) -> list[Event]:
        known = ~np.isnan(before) & ~np.isnan(after)
        out = []
        for link in np.flatnonzero(known & (before != after)).tolist():
            kind, word = ("link_up", "up") if after[link] else ("link_down", "down")
            out.append(Event(t, self._gpu, -1, kind, link, f"NVLink link {link} is {word}"))
        return out


def link_count(value: Any) -> int:
    """Number of links from the answer to field 91; 0 when the device does not know NVLink."""
    return 0 if isinstance(value, Missing) else min(int(value), 72)
