"""Device memory: with what the driver reserves, without it on old drivers, or the host's where both share it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from opusmon.collectors.gpu.limits import NOT_AVAILABLE, UNAVAILABLE
from opusmon.collectors.gpu.nvml import FUNCTION_NOT_FOUND, NOT_SUPPORTED, Nvml
from opusmon.collectors.missing import Missing

MEMORY_V2 = 0x02000028
"""NVML's version word of nvmlMemory_v2_t: version 2, 40 bytes."""

MEMINFO = Path("/proc/meminfo")
SHARED = Missing("not_supported", "CPU and GPU share the memory: nothing is reserved apart")
OLD_RESERVED = Missing("not_supported", "the driver is too old to tell it apart: mem_used_b includes it")

Memory = dict[str, float | Missing]
"""mem_total_b, mem_used_b and mem_reserved_b."""


class _MemoryV2(ctypes.Structure):
    """nvmlMemory_v2_t."""

    _fields_ = (
        ("version", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
        ("free", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
    )


def read_memory(nvml: Nvml, handle: Any) -> Memory | Missing:
    """Memory of a device or MIG device as NVML tells it; `Missing` when it tells nothing usable."""
    info = _MemoryV2(MEMORY_V2)
    failed = nvml.call_c("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(info))
    if failed is not None:
        return _read_v1(nvml, handle) if failed.code in (FUNCTION_NOT_FOUND, 25) else failed
    if info.total == 0:
        return _no_total()
    if {info.total, info.used} & NOT_AVAILABLE or info.used > info.total:
        return UNAVAILABLE
    return {
        "mem_total_b": float(info.total),
        "mem_used_b": float(info.used),
        "mem_reserved_b": float(info.reserved) if info.reserved <= info.total else UNAVAILABLE,
    }


def _read_v1(nvml: Nvml, handle: Any) -> Memory | Missing:
    info = nvml.call("nvmlDeviceGetMemoryInfo", handle)
    if isinstance(info, Missing):
        return info
    if info.total == 0:
        return _no_total()
    if {info.total, info.used} & NOT_AVAILABLE or info.used > info.total:
        return UNAVAILABLE
    return {"mem_total_b": float(info.total), "mem_used_b": float(info.used), "mem_reserved_b": OLD_RESERVED}


def _no_total() -> Missing:
    return Missing("not_supported", "the driver reports a memory of 0 bytes", code=NOT_SUPPORTED)


def is_unified(memory: Memory | Missing) -> bool:
    """Whether the answer is that of a part without memory of its own (GB10, Thor, Orin)."""
    return isinstance(memory, Missing) and memory.code == NOT_SUPPORTED


def unified_memory(path: Path = MEMINFO) -> Memory:
    """The host's memory, from MemTotal and MemAvailable."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        kib = {words[0].rstrip(":"): int(words[1]) for words in map(str.split, lines) if len(words) > 1}
        total, available = kib["MemTotal"] * 1024.0, kib["MemAvailable"] * 1024.0
    except (OSError, ValueError, KeyError):
        why = Missing("error", f"{path} could not be read")
        return {"mem_total_b": why, "mem_used_b": why, "mem_reserved_b": why}
    return {"mem_total_b": total, "mem_used_b": total - available, "mem_reserved_b": SHARED}
