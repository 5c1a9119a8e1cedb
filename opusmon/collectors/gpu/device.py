"""One GPU: opened, polled, lost and found again. Calls are made by one thread of the crew at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from opusmon.channels import WHOLE_GPU
from opusmon.clock import Clock
from opusmon.collectors.gpu import throttle
from opusmon.collectors.gpu.events import Waiter
from opusmon.collectors.gpu.fields import LINK_COUNT, WHOLE, FieldReader
from opusmon.collectors.gpu.gpm import gpm_support
from opusmon.collectors.gpu.limits import MAX_CLOCK_MHZ, MAX_POWER_MW, bounded
from opusmon.collectors.gpu.link_traffic import LinkRates
from opusmon.collectors.gpu.links import NO_LINKS, Links, link_count
from opusmon.collectors.gpu.memory import Memory, is_unified, read_memory, unified_memory
from opusmon.collectors.gpu.mig import (
    Instance,
    instance_row,
    list_instances,
    mig_on,
    open_instance,
    put_memory,
)
from opusmon.collectors.gpu.nvml import LOST, Nvml
from opusmon.collectors.gpu.processes import Processes
from opusmon.collectors.gpu.rates import RateSource
from opusmon.collectors.gpu.reading import DeviceFacts, Event, GpuRow, Reading, scope
from opusmon.collectors.gpu.sensors import (
    CLOCK_MEM,
    CLOCK_SM,
    MEMORY_ERRORS,
    SensorFields,
    bandwidth_bps,
    read_errors,
    read_sensors,
)
from opusmon.collectors.missing import Missing
from opusmon.collectors.notes import Key
from opusmon.collectors.process_names import Users

UNLISTED = Missing("unavailable", "the driver no longer lists this GPU", "look for 'NVRM: Xid' in dmesg", 15)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all devices share.

    Attributes:
        clock: time of the rows.
        driver: driver version.
        waiter: where events are registered.
        users: user names.
        only_pids: processes to report, empty for all.
        slow_ns: how often slow values are read.
        reprobe_ns: how often a lost device is tried again.
    """

    clock: Clock
    driver: str
    waiter: Waiter
    users: Users
    only_pids: frozenset[int]
    slow_ns: int
    reprobe_ns: int


class Device:
    """One GPU.

    Args:
        nvml: the edge of this device's thread.
        index: in NVML order.
        around: what devices share.

    Attributes:
        index: in NVML order.
        nvml: for a watcher: the call in progress.
        lost: why the device does not answer; None while it does and before `turn` was called.
        failed_probes: attempts to find it again.
        listed: False once the driver counts fewer devices; set from outside.
        refresh_mig: the next turn looks at the MIG instances anew; set from outside.
    """

    def __init__(self, nvml: Nvml, index: int, around: Surroundings) -> None:
        self.nvml, self.index = nvml, index
        self.lost: Missing | None = None
        self.failed_probes = 0
        self.listed = True
        self.refresh_mig = False
        self._around = around
        self._open = False
        self._tried_at = 0
        self._slow_seen = False
        self._registered = False
        self._mask: int | None = None
        self._errors: dict[str, float | Missing] = {}
        self._instances: list[Instance] = []
        self._static_missing: dict[Key, Missing] = {}
        self._sources: list[RateSource] = []
        self._processes = Processes(nvml, index, around.users, around.only_pids)

    def turn(self, slow: bool) -> Reading:
        """Everything to be read now; `slow` adds what is read every few seconds."""
        self.nvml.clear()
        if self.listed and self._open:
            reading = self._poll(slow or not self._slow_seen)
        elif self.lost and not (self.listed and self._probe_due()):
            reading = Reading(missing=self._lost_reasons())
        else:
            reading = self._find()
        reading.codes = frozenset(self.nvml.codes)
        return reading

    def close(self) -> None:
        """Give samples back to the driver."""
        for source in self._sources:
            source.close()
        for instance in self._instances:
            instance.close()

    # Lost and found

    def _probe_due(self) -> bool:
        return self._around.clock.now() - self._tried_at >= self._around.reprobe_ns

    def _find(self) -> Reading:
        """Open the device for the first time or again."""
        self._tried_at = self._around.clock.now()
        failed = UNLISTED if not self.listed else self._try_open()
        if failed is not None:
            self.failed_probes += 1 if self.lost else 0
            return self._lose(failed)
        was_lost, self.lost, self.failed_probes = self.lost, None, 0
        reading = Reading(facts=self._facts(), missing=dict(self._static_missing))
        if was_lost is not None:
            t = self._around.clock.now()
            reading.events = [Event(t, self.index, WHOLE_GPU, "back", math.nan, "the GPU answers again")]
        return reading

    def _try_open(self) -> Missing | None:
        handle = self.nvml.call("nvmlDeviceGetHandleByIndex", self.index)
        if isinstance(handle, Missing):
            return handle
        self._handle = handle
        self.close()
        self._open_device()
        if self.nvml.codes & LOST:
            return UNLISTED if not self.listed else self._lost_missing()
        self._open = True
        return None

    def _lost_missing(self) -> Missing:
        from_code = self.nvml.call("nvmlDeviceGetUUID", self._handle)
        return from_code if isinstance(from_code, Missing) else UNLISTED

    def _lose(self, why: Missing) -> Reading:
        """Note that the device is gone; an event when that is new and not a matter of permission."""
        t, first = self._around.clock.now(), self.lost is None
        self.lost, self._open, self._slow_seen, self._mask = why, False, False, None
        self._registered = False
        reading = Reading(missing=self._lost_reasons())
        if first and why.state != "no_permission":
            reading.events = [Event(t, self.index, WHOLE_GPU, "lost", float(why.code), why.reason)]
        return reading

    def _lost_reasons(self) -> dict[Key, Missing]:
        where = scope(self.index)
        return {(channel, "", where): self.lost for channel in ("gpu", "nvlink", "gpu_process") if self.lost}

    # Opening

    def _open_device(self) -> None:
        nvml, handle = self.nvml, self._handle
        self._static_missing = {}
        self._name = self._text("name", nvml.call("nvmlDeviceGetName", handle))
        self._uuid = self._text("uuid", nvml.call("nvmlDeviceGetUUID", handle))
        self._bus_width = bounded(nvml.call("nvmlDeviceGetMemoryBusWidth", handle), 1e6, 1)
        self._max_sm_clock = bounded(nvml.call("nvmlDeviceGetMaxClockInfo", handle, CLOCK_SM), MAX_CLOCK_MHZ)
        self._max_mem_clock = bounded(
            nvml.call("nvmlDeviceGetMaxClockInfo", handle, CLOCK_MEM), MAX_CLOCK_MHZ
        )
        self._mig = mig_on(nvml, handle)
        self._unified = not self._mig and is_unified(read_memory(nvml, handle))
        self._gpm_missing = gpm_support(nvml, handle)
        self._open_readers()
        self._instances = []
        self._look_at_mig(first=True)

    def _text(self, field: str, value: str | Missing) -> str:
        if isinstance(value, Missing):
            self._static_missing["gpu_device", field, scope(self.index)] = value
            return ""
        return value

    def _open_readers(self) -> None:
        nvml, handle = self.nvml, self._handle
        count = FieldReader(nvml, handle, {"links": [(LINK_COUNT, WHOLE)]}).read()
        links = 0 if isinstance(count, Missing) else link_count(count["links"].one(0, "link count"))
        self._link_count = links
        self._links = Links(nvml, handle, self.index, links) if links else None
        if not links:
            self._static_missing["nvlink", "", scope(self.index)] = NO_LINKS
        self._fields = SensorFields(nvml, handle)
        self._rates = RateSource(nvml, handle, links, self._gpm_missing, self._around.clock)
        self._sources = [self._rates]
        self._rates.seed()

    # Polling

    def _poll(self, slow: bool) -> Reading:
        nvml, clock = self.nvml, self._around.clock
        row = GpuRow(self.index)
        put_memory(row, self._memory())
        read_sensors(nvml, self._handle, row, self._mig)
        self._fields.read(row, slow=slow)
        dt_ns, rates = self._rates.read(row)
        row.put("hbm_bw_bps", bandwidth_bps(row, self._bus_width))
        reading = Reading()
        if slow:
            self._read_slow(reading)
        for name, value in self._errors.items():
            row.put(name, value)
        if self._links is not None:
            reading.events += self._links.turn(clock.now(), slow=slow)
        t = clock.now()
        if nvml.codes & LOST or nvml.good == 0:
            return self._lose(self._whole_failure(row))
        reading.gpu = [row.record(t, dt_ns), *self._instance_records(reading)]
        reading.events += self._throttle_events(row, t)
        reading.missing |= self._static_missing | row.reasons() | self._processes.missing
        if self._links is not None:
            self._add_links(reading, self._links, rates, t)
        self._want_events()
        return reading

    def _want_events(self) -> None:
        """Ask for events once there are rows: the driver takes up to a second over it."""
        if not self._registered:
            self._around.waiter.register(self._handle, self.index)
            self._registered = True

    def _add_links(self, reading: Reading, links: Links, rates: LinkRates, t: int) -> None:
        where = scope(self.index)
        reading.nvlink = links.rows(t, rates)
        reading.missing |= links.missing
        reading.missing |= {("nvlink", name, where): why for name, why in rates.missing.items()}

    def _memory(self) -> Memory | Missing:
        return unified_memory() if self._unified else read_memory(self.nvml, self._handle)

    def _whole_failure(self, row: GpuRow) -> Missing:
        """The reason among the row's that names a lost device, else any."""
        reasons = list(row.missing.values())
        return next((why for why in reasons if why.code in LOST), reasons[0] if reasons else UNLISTED)

    # Every few seconds

    def _read_slow(self, reading: Reading) -> None:
        around, t = self._around, self._around.clock.now()
        before, self._errors = self._errors, read_errors(self.nvml, self._handle)
        if self._slow_seen:
            reading.events += error_events(self.index, t, before, self._errors)
        reading.events += self._look_at_mig(first=False)
        mig = [(instance.gi, instance.handle) for instance in self._instances]
        reading.processes = self._processes.read(self._handle, mig, t, around.slow_ns)
        reading.facts = self._facts()
        self._slow_seen = True

    def _look_at_mig(self, *, first: bool) -> list[Event]:
        """Take over the GPU instances; windows of changed ones begin anew."""
        was_on, self._mig = self._mig, mig_on(self.nvml, self._handle)
        found = list_instances(self.nvml, self._handle) if self._mig else {}
        kept = {(i.gi, i.uuid): i for i in self._instances}
        forced, self.refresh_mig = self.refresh_mig, False
        if kept.keys() == found.keys() and was_on == self._mig and not forced:
            return []
        for instance in self._instances:
            instance.close()
        around = self._around
        self._instances = [
            open_instance(self.nvml, self._handle, key, handle, self._gpm_missing, around.clock)
            for key, handle in sorted(found.items(), key=lambda item: item[0])
        ]
        if first or forced:
            return []
        detail = f"MIG on, {len(found)} GPU instances" if self._mig else "MIG off"
        return [Event(around.clock.now(), self.index, WHOLE_GPU, "mig", len(found), detail)]

    def _instance_records(self, reading: Reading) -> list[tuple[Any, ...]]:
        records = []
        for instance in self._instances:
            row, dt_ns = instance_row(self.nvml, self.index, instance)
            records.append(row.record(self._around.clock.now(), dt_ns))
            reading.missing |= row.reasons()
        return records

    def _throttle_events(self, row: GpuRow, t: int) -> list[Event]:
        mask = row.values.get("throttle_mask")
        if mask is None:
            return []
        before, self._mask = self._mask, int(mask)
        if before is None:
            return []
        bits = throttle.changes(before, self._mask)
        kinds = ("throttle_on", "throttle_off")
        return [
            Event(t, self.index, WHOLE_GPU, kind, float(bit), throttle.names(bit))
            for kind, bit in zip(kinds, bits, strict=True)
            if bit
        ]

    def _facts(self) -> list[DeviceFacts]:
        """The device and its instances; numbers without an answer are NaN with a reason."""
        limit = bounded(self.nvml.call("nvmlDeviceGetPowerManagementLimit", self._handle), MAX_POWER_MW)
        around, gpm = self._around, float(self._gpm_missing is None)
        kind = "unified" if self._unified else "device"
        whole = DeviceFacts(
            gpu=self.index,
            gi=WHOLE_GPU,
            name=self._name,
            uuid=self._uuid,
            driver=around.driver,
            memory_kind=kind,
            bus_width_bits=self._number("bus_width_bits", self._bus_width),
            power_limit_mw=self._number("power_limit_mw", limit),
            max_sm_clock_mhz=self._number("max_sm_clock_mhz", self._max_sm_clock),
            max_mem_clock_mhz=self._number("max_mem_clock_mhz", self._max_mem_clock),
            links=float(self._link_count),
            gpm=gpm,
            mig=float(self._mig),
        )
        nan = math.nan
        instances = [
            DeviceFacts(
                self.index, i.gi, i.name, i.uuid, around.driver, kind, nan, nan, nan, nan, nan, gpm, 1.0
            )
            for i in self._instances
        ]
        return [whole, *instances]

    def _number(self, field: str, value: float | Missing) -> float:
        key = ("gpu_device", field, scope(self.index))
        self._static_missing.pop(key, None)
        if isinstance(value, Missing):
            self._static_missing[key] = value
            return math.nan
        return value


def error_events(
    gpu: int, t: int, before: dict[str, float | Missing], after: dict[str, float | Missing]
) -> list[Event]:
    """Counts that grew and flags that rose between two slow readings."""
    out = []
    for name in MEMORY_ERRORS:
        old, new = before.get(name), after.get(name)
        if not (isinstance(old, float) and isinstance(new, float) and new > old):
            continue
        kind = "ecc" if name.startswith("ecc") else "remap"
        # Without the numbers, which are in `code`: texts are kept for ever, and there must be few of them.
        out.append(Event(t, gpu, WHOLE_GPU, kind, new, f"{name.replace('_', ' ')} has grown"))
    return out
