"""What one poll of one device found, before text is interned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from opusmon.channels import GPU, WHOLE_GPU
from opusmon.collectors.missing import Missing
from opusmon.collectors.notes import Key
from opusmon.schema import Rows

_COLUMNS = tuple(f.name for f in GPU.fields if f.name not in ("gpu", "gi", "dt_ns"))


def scope(gpu: int, gi: int = WHOLE_GPU, link: int | None = None) -> str:
    """How a status row names a series: "gpu 1", "gpu 1 gi 2", "gpu 1 link 3"."""
    words = [f"gpu {gpu}"]
    if gi != WHOLE_GPU:
        words.append(f"gi {gi}")
    if link is not None:
        words.append(f"link {link}")
    return " ".join(words)


@dataclass(slots=True)
class GpuRow:
    """One row of the `gpu` channel being filled.

    Attributes:
        gpu: device index.
        gi: MIG GPU instance, -1 for the whole device.
        values: by field name.
        missing: why a field has no value.
    """

    gpu: int
    gi: int = WHOLE_GPU
    values: dict[str, float] = field(default_factory=dict)
    missing: dict[str, Missing] = field(default_factory=dict)

    def put(self, name: str, value: float | Missing) -> None:
        """Set a field, or say why it has no value; the last call counts."""
        if isinstance(value, Missing):
            self.missing[name] = value
            self.values.pop(name, None)
        else:
            self.values[name] = value
            if self.missing:
                self.missing.pop(name, None)

    def record(self, t: int, dt_ns: int) -> tuple[Any, ...]:
        """The row in column order."""
        values = self.values
        return (t, self.gpu, self.gi, dt_ns, *[values.get(name, math.nan) for name in _COLUMNS])

    def reasons(self) -> dict[Key, Missing]:
        """`missing` with status keys."""
        if not self.missing:
            return {}
        where = scope(self.gpu, self.gi)
        return {("gpu", name, where): why for name, why in self.missing.items()}


@dataclass(frozen=True, slots=True)
class Event:
    """A row of `gpu_event` in words; `t` is monotonic ns."""

    t: int
    gpu: int
    gi: int
    kind: str
    code: float
    detail: str


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A row of `gpu_device` without its time; fields as in the channel."""

    gpu: int
    gi: int
    name: str
    uuid: str
    driver: str
    memory_kind: str
    bus_width_bits: float
    power_limit_mw: float
    max_sm_clock_mhz: float
    max_mem_clock_mhz: float
    links: float
    gpm: float
    mig: float


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """A row of `gpu_process` in words; fields as in the channel, `t` monotonic ns."""

    t: int
    gpu: int
    gi: int
    pid: int
    name: str
    user: str
    kind: str
    mem_b: float
    sm_pct: float


@dataclass(slots=True)
class Reading:
    """Everything one poll of one device found.

    Attributes:
        gpu: rows of `gpu` in column order.
        nvlink: rows of `nvlink`, None without links.
        processes: rows of `gpu_process`.
        facts: the device and its MIG instances as they are now.
        events: in time order.
        missing: every value that is missing at this moment, with its reason.
        codes: NVML return codes of the calls that failed.
    """

    gpu: list[tuple[Any, ...]] = field(default_factory=list)
    nvlink: Rows | None = None
    processes: list[ProcessRow] = field(default_factory=list)
    facts: list[DeviceFacts] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    missing: dict[Key, Missing] = field(default_factory=dict)
    codes: frozenset[int] = frozenset()
