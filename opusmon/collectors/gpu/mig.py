"""MIG: the GPU instances a device is cut into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opusmon.clock import Clock
from opusmon.collectors.gpu.gpm import FIELDS, Gpm, Window
from opusmon.collectors.gpu.memory import read_memory
from opusmon.collectors.gpu.nvml import Nvml
from opusmon.collectors.gpu.reading import GpuRow
from opusmon.collectors.gpu.sensors import ERROR_COLUMNS, MIG_UTILIZATION, THROTTLE_FIELDS
from opusmon.collectors.missing import Missing

WHOLE_ONLY = Missing("not_supported", "measured for the whole GPU only: see its row without a GPU instance")
OWN_SLICE = Missing(
    "not_supported", "an instance's share refers to its own slice, whose width NVML does not tell"
)
WHOLE_FIELDS = (
    "power_mw",
    "temp_c",
    "mem_temp_c",
    "sm_clock_mhz",
    "mem_clock_mhz",
    "throttle_mask",
    *THROTTLE_FIELDS,
    *ERROR_COLUMNS,
)
BUSY_FIELDS = ("gpu_busy_pct", "mem_busy_pct")


@dataclass(slots=True)
class Instance:
    """One GPU instance.

    Attributes:
        gi: GPU instance id.
        handle: handle of its first MIG device; its memory is that of the GPU instance.
        uuid: of that MIG device.
        name: as NVML gives it.
        gpm: its metrics, or why there are none.
    """

    gi: int
    handle: Any
    uuid: str
    name: str
    gpm: Gpm | Missing

    def close(self) -> None:
        """Give samples back to the driver."""
        if isinstance(self.gpm, Gpm):
            self.gpm.close()


def mig_on(nvml: Nvml, handle: Any) -> bool:
    """Whether MIG mode is in force. Devices that do not know MIG answer an error: that is a no."""
    modes = nvml.call("nvmlDeviceGetMigMode", handle)
    return not isinstance(modes, Missing) and modes[0] == 1


def list_instances(nvml: Nvml, handle: Any) -> dict[tuple[int, str], Any]:
    """Handles of the first MIG device of every GPU instance by (GPU instance id, UUID)."""
    most = nvml.call("nvmlDeviceGetMaxMigDeviceCount", handle)
    found: dict[tuple[int, str], Any] = {}
    seen: set[int] = set()
    for place in range(0 if isinstance(most, Missing) else most):
        mig = nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, place)
        if isinstance(mig, Missing):
            continue
        gi = nvml.call("nvmlDeviceGetGpuInstanceId", mig)
        if isinstance(gi, Missing) or gi in seen:
            continue
        seen.add(gi)
        uuid = nvml.call("nvmlDeviceGetUUID", mig)
        found[gi, "" if isinstance(uuid, Missing) else uuid] = mig
    return found


def open_instance(
    nvml: Nvml, parent: Any, key: tuple[int, str], handle: Any, gpm_missing: Missing | None, clock: Clock
) -> Instance:
    """Begin to watch an instance: its first GPM window starts now."""
    name = nvml.call("nvmlDeviceGetName", handle)
    gpm: Gpm | Missing = gpm_missing or Gpm(nvml, parent, key[0], 0, clock)
    if isinstance(gpm, Gpm):
        gpm.seed()
    return Instance(key[0], handle, key[1], "" if isinstance(name, Missing) else name, gpm)


def instance_row(nvml: Nvml, gpu: int, instance: Instance) -> tuple[GpuRow, int]:
    """A row for an instance and the length of its window in ns, 0 without one."""
    row = GpuRow(gpu, instance.gi)
    put_memory(row, read_memory(nvml, instance.handle))
    window = instance.gpm if isinstance(instance.gpm, Missing) else instance.gpm.read()
    put_window(row, window)
    for name in WHOLE_FIELDS:
        row.put(name, WHOLE_ONLY)
    for name in BUSY_FIELDS:
        row.put(name, MIG_UTILIZATION)
    row.put("hbm_bw_bps", OWN_SLICE)
    return row, window.dt_ns if isinstance(window, Window) else 0


def put_memory(row: GpuRow, memory: dict[str, float | Missing] | Missing) -> None:
    """Fill the memory fields."""
    for name in ("mem_total_b", "mem_used_b", "mem_reserved_b"):
        row.put(name, memory if isinstance(memory, Missing) else memory[name])


def put_window(row: GpuRow, window: Window | Missing) -> None:
    """Fill the GPM fields."""
    for name in FIELDS:
        row.put(name, window if isinstance(window, Missing) else window.values[name])
