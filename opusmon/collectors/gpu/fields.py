"""NVML field values: one call for many ids, structures built once, answers read as arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opusmon.collectors.gpu.limits import NO_NUMBER, UNAVAILABLE
from opusmon.collectors.gpu.nvml import Missing, Nvml, missing

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Codes = np.ndarray[tuple[int], np.dtype[np.int64]]

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


@dataclass(frozen=True, slots=True)
class FieldGroup:
    """Answers to a group of ids.

    Attributes:
        values: float64, shape (n,), NaN where the code is not 0.
        codes: int64, shape (n,): nvmlReturn of each entry, or `NA_CODE`, `NO_NUMBER_CODE`.
        types: int64, shape (n,): nvmlValueType of each entry.
    """

    values: Floats
    codes: Codes
    types: Codes

    def one(self, place: int, field: str) -> float | Missing:
        """A single entry; `field` names it in the reason."""
        code = int(self.codes[place])
        return entry_missing(code, field) if code else float(self.values[place])


def entry_missing(code: int, field: str) -> Missing:
    """Why an entry has no value."""
    if code == NA_CODE:
        return UNAVAILABLE
    if code == NO_NUMBER_CODE:
        return NO_NUMBER
    return missing(code, f"NVML field {field}")


class FieldReader:
    """Asks one device for groups of field ids.

    Args:
        nvml: the edge of the calling thread.
        handle: device handle.
        groups: name -> sequence of (field id, scope id); the scope is the link for NVLink fields.
    """

    def __init__(self, nvml: Nvml, handle: Any, groups: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        wanted = [pair for pairs in groups.values() for pair in pairs]
        struct = nvml.module.c_nvmlFieldValue_t
        # One entry more than asked for: some drivers write past the end on NVLink fields.
        self._array = (struct * (len(wanted) + 1))()
        for entry, (field, scope) in zip(self._array, wanted, strict=False):
            entry.fieldId, entry.scopeId = field, scope
        layout = np.dtype(
            {
                "names": ["type", "code", "value"],
                "formats": ["<u4", "<i4", "<u8"],
                "offsets": [struct.valueType.offset, struct.nvmlReturn.offset, struct.value.offset],
                "itemsize": ctypes.sizeof(struct),
            }
        )
        self._view = np.frombuffer(self._array, dtype=layout, count=len(wanted))
        self._slices: dict[str, slice] = {}
        begin = 0
        for name, pairs in groups.items():
            self._slices[name] = slice(begin, begin + len(pairs))
            begin += len(pairs)
        self._args = (handle, ctypes.c_int32(len(wanted)), ctypes.byref(self._array))
        self._nvml = nvml

    def read(self) -> dict[str, FieldGroup] | Missing:
        """Answers by group, or why the call as a whole failed."""
        failed = self._nvml.call_c("nvmlDeviceGetFieldValues", *self._args)
        if failed is not None:
            return failed
        values, codes, types = decode(self._view["value"], self._view["type"], self._view["code"])
        return {name: FieldGroup(values[at], codes[at], types[at]) for name, at in self._slices.items()}


def decode(
    raw: np.ndarray[Any, np.dtype[np.uint64]], types: np.ndarray[Any, Any], codes: np.ndarray[Any, Any]
) -> tuple[Floats, Codes, Codes]:
    """Turn the union of each entry into a float64 according to its nvmlValueType.

    Args:
        raw: the 8 bytes of the unions, shape (n,).
        types: nvmlValueType, shape (n,); 0 double, 1 u32, 2 and 3 u64, 4 i64, 5 i32, 6 u16.
        codes: nvmlReturn, shape (n,).

    Returns:
        values, codes and types as described in `FieldGroup`.
    """
    words = np.ascontiguousarray(raw)
    kinds = np.clip(types.astype(np.int64), 0, 6)
    low = words.astype(np.uint32)
    readings = np.empty((7, len(words)))
    readings[0] = words.view(np.float64)
    readings[1] = low
    readings[2] = readings[3] = words
    readings[4] = words.view(np.int64)
    readings[5] = low.view(np.int32)
    readings[6] = low.astype(np.uint16)
    values = readings[kinds, np.arange(len(words))]
    out = codes.astype(np.int64)
    sentinel = np.where(
        kinds == 1, low == 0xFFFFFFFF, ((kinds == 2) | (kinds == 3)) & (words >= 0xFFFFFFFFFFFFFFFF)
    )
    sentinel |= ((kinds == 2) | (kinds == 3)) & (words == 0xFFFFFFFF)
    out[(out == 0) & sentinel] = NA_CODE
    out[(out == 0) & ~((values >= 0) & (values < np.inf))] = NO_NUMBER_CODE
    values[out != 0] = np.nan
    return values, out, kinds
