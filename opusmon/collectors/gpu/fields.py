"""NVML field values: one call for many ids, structures built once, answers read as arrays."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opusmon.collectors.gpu.limits import NO_NUMBER, NOT_AVAILABLE, UNAVAILABLE
from opusmon.collectors.gpu.nvml import Nvml, missing
from opusmon.collectors.missing import Missing

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

# Field ids are our own numbers: in some releases of nvidia-ml-py constants are one-element tuples.
THROTTLE_POWER, THROTTLE_SYNC, THROTTLE_SW_THERMAL, THROTTLE_HW_THERMAL, THROTTLE_BRAKE = (
    74,
    76,
    269,
    270,
    271,
)
MEM_TEMP = 82
LINK_COUNT = 91
LINK_DATA_TX, LINK_DATA_RX = 138, 139
LINK_REPLAY, LINK_RECOVERY, LINK_CRC = 161, 162, 163
LINK_SPEED, LINK_STATE = 164, 165
PCIE_TX_BYTES, PCIE_RX_BYTES = 197, 198
LINK5_RCV_ERRORS, LINK5_RECOVERY, LINK5_RETRY_BLOCKS = 208, 215, 295

NA_CODE, NO_NUMBER_CODE = -1, -2
"""Codes for an entry that "succeeded" with a sentinel or with something that is not a number."""

NARROW_TYPES = (1, 5, 6)
"""Value types of 32 bits and less: a byte counter of that width wraps within one tick."""

WHOLE = 0
"""Scope of fields that have none."""

ALL_LINKS = 0xFFFFFFFF
"""Scope of NVLink counters that answers their sum over the links, at the price of one or two entries."""

EXPENSIVE = frozenset(
    {THROTTLE_HW_THERMAL, THROTTLE_BRAKE, LINK_DATA_TX, LINK_DATA_RX, 140, 141}
    | {LINK_REPLAY, LINK_RECOVERY, LINK_CRC, LINK5_RCV_ERRORS, LINK5_RECOVERY, LINK5_RETRY_BLOCKS}
)
"""Fields that cost 1 ms each, 2 ms while the memory is busy (H200, driver 580.159); others cost 1 to 10 us."""

MOST_EXPENSIVE = 8
"""Expensive entries that one call may have, so that none blocks for 20 ms."""


@dataclass(frozen=True, slots=True)
class FieldGroup:
    """Answers to a group of ids.

    Attributes:
        values: one per id, NaN where the code is not 0.
        codes: nvmlReturn of each entry, or `NA_CODE`, `NO_NUMBER_CODE`.
        types: nvmlValueType of each entry.
    """

    values: list[float]
    codes: list[int]
    types: list[int]

    def one(self, place: int, field: str) -> float | Missing:
        """A single entry; `field` names it in the reason."""
        code = self.codes[place]
        return entry_missing(code, field) if code else self.values[place]


def entry_missing(code: int, field: str) -> Missing:
    """Why an entry has no value."""
    if code == NA_CODE:
        return UNAVAILABLE
    if code == NO_NUMBER_CODE:
        return NO_NUMBER
    return missing(code, f"NVML field {field}")


class FieldReader:
    """Asks one device for groups of field ids in one call.

    Args:
        nvml: the edge of the calling thread.
        handle: device handle.
        groups: name -> sequence of (field id, scope id); the scope is the link for NVLink fields.

    Raises:
        ValueError: more than `MOST_EXPENSIVE` of the ids are expensive.
    """

    def __init__(self, nvml: Nvml, handle: Any, groups: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        wanted = [pair for pairs in groups.values() for pair in pairs]
        if sum(field in EXPENSIVE for field, _ in wanted) > MOST_EXPENSIVE:
            raise ValueError(f"one call would ask for more than {MOST_EXPENSIVE} expensive fields")
        kind = nvml.module.c_nvmlFieldValue_t
        # One entry more than asked for: some drivers write past the end on NVLink fields.
        self._array = (kind * (len(wanted) + 1))()
        for entry, (field, scope) in zip(self._array, wanted, strict=False):
            entry.fieldId, entry.scopeId = field, scope
        layout = np.dtype(
            {
                "names": ["scope", "type", "code", "value"],
                "formats": ["<u4", "<u4", "<i4", "<u8"],
                "offsets": [
                    kind.scopeId.offset,
                    kind.valueType.offset,
                    kind.nvmlReturn.offset,
                    kind.value.offset,
                ],
                "itemsize": ctypes.sizeof(kind),
            }
        )
        self._view = np.frombuffer(self._array, dtype=layout, count=len(wanted))
        self._places: list[tuple[str, slice]] = []
        begin = 0
        for name, pairs in groups.items():
            self._places.append((name, slice(begin, begin + len(pairs))))
            begin += len(pairs)
        self._args = (handle, ctypes.c_int32(len(wanted)), ctypes.byref(self._array))
        self._nvml = nvml

    def aim(self, scope: int) -> None:
        """Ask for the same ids in another scope from now on."""
        self._view["scope"] = scope

    def read(self) -> dict[str, FieldGroup] | Missing:
        """Answers by group, or why the call as a whole failed."""
        failed = self._nvml.call_c("nvmlDeviceGetFieldValues", *self._args)
        if failed is not None:
            return failed
        entries = self._view.tolist()
        types = [kind for _, kind, _, _ in entries]
        pairs = [decode(kind, code, raw) for _, kind, code, raw in entries]
        values, codes = [value for value, _ in pairs], [code for _, code in pairs]
        return {name: FieldGroup(values[at], codes[at], types[at]) for name, at in self._places}


_DOUBLE, _U32, _U64, _U64_TOO, _I64, _I32, _U16 = range(7)
"""nvmlValueType."""

_CONVERSIONS: dict[int, Callable[[int], float]] = {
    _DOUBLE: lambda raw: float(struct.unpack("<d", raw.to_bytes(8, "little"))[0]),
    _U32: lambda raw: float(raw & 0xFFFFFFFF),
    _U64: float,
    _U64_TOO: float,
    _I64: lambda raw: float(raw - (raw >> 63 << 64)),
    _I32: lambda raw: float((raw & 0xFFFFFFFF) - ((raw >> 31 & 1) << 32)),
    _U16: lambda raw: float(raw & 0xFFFF),
}


def decode(kind: int, code: int, raw: int) -> tuple[float, int]:
    """Value and code of one entry. Plain Python: a tick reads four entries, for which arrays cost more.

    Args:
        kind: nvmlValueType.
        code: nvmlReturn.
        raw: the 8 bytes of the union.

    Returns:
        The value, NaN when there is none, and the code as `FieldGroup` has it.
    """
    if code:
        return math.nan, code
    if (kind == _U32 and raw & 0xFFFFFFFF == 0xFFFFFFFF) or (
        kind in (_U64, _U64_TOO) and raw in NOT_AVAILABLE
    ):
        return math.nan, NA_CODE
    convert = _CONVERSIONS.get(kind)
    value = math.nan if convert is None else convert(raw)
    return (value, 0) if 0 <= value < math.inf else (math.nan, NO_NUMBER_CODE)
