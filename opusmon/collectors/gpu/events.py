"""What the driver reports on its own: XIDs, memory faults, MIG changes. One thread waits for all devices."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from typing import Any

from opusmon.channels import WHOLE_GPU
from opusmon.clock import Clock
from opusmon.collectors.gpu.nvml import FACILITY_LOST, TIMEOUT, Nvml
from opusmon.collectors.gpu.reading import Event
from opusmon.collectors.gpu.xid import meaning
from opusmon.collectors.missing import Missing

WAIT_MS = 500
XID = 0x8
KINDS: dict[int, tuple[str, str]] = {
    0x2: ("ecc", "uncorrectable memory error"),
    XID: ("xid", ""),
    0x100: ("mig", "the MIG configuration changed"),
    0x200: ("ecc", "many corrected memory errors in a short time"),
    0x400: ("remap", "a memory row was retired"),
    0x800: ("remap", "retiring a memory row failed"),
    0x1000: ("ecc", "poisoned data was consumed; contained"),
    0x2000: ("ecc", "poisoned data was consumed; the GPU needs a reset"),
    0x4000: ("unavailable", "the driver says the GPU is unavailable: reset it or reboot"),
    0x8000: ("recovery", ""),
}
"""Event type bit -> kind and detail. Clock, power source and performance state changes are not registered:
they are frequent and the 1 s gauges show them."""

WANTED = sum(KINDS)

RECOVERY = {
    0: "no recovery needed any more",
    1: "reset the GPU",
    2: "reboot the host",
    3: "drain peer-to-peer traffic, then reset",
    4: "drain the GPU, then reset it",
    5: "recover the IMEX domain",
    6: "reset the bus",
    7: "reboot the system",
}
"""Values of the driver's recovery action, from the constants of nvml.h."""


def address(handle: Any) -> int:
    """A device handle as a number that can be compared."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def describe(kind_bit: int, value: int) -> tuple[str, str]:
    """Kind and detail of a `gpu_event` row."""
    kind, detail = KINDS.get(kind_bit, ("other", f"event type {kind_bit:#x}"))
    if kind == "xid":
        detail = meaning(value)
    elif kind == "recovery":
        detail = RECOVERY.get(value, f"recovery action {value}")
    return kind, detail


class Waiter:
    """Waits for events on its own daemon thread.

    Args:
        nvml: an edge of its own.
        clock: time of the events.

    Attributes:
        nvml: for a watcher: the call in progress.
        failure: why waiting does not work at the moment, None when it does.
        refused: why the events of a device cannot be had, by device index; never changed in place.
    """

    def __init__(self, nvml: Nvml, clock: Clock) -> None:
        self.nvml = nvml
        self.failure: Missing | None = None
        self._clock = clock
        self.refused: Mapping[int, Missing] = {}
        self._gpus: dict[int, int] = {}
        self._wanted: SimpleQueue[tuple[Any, int]] = SimpleQueue()
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-events", daemon=True)
        self._out = nvml.module.c_nvmlEventData_t()
        self._out_at = ctypes.byref(self._out)
        self._set: Any = nvml.call("nvmlEventSetCreate")
        if isinstance(self._set, Missing):
            self.failure = self._set
        else:
            self._thread.start()

    def register(self, handle: Any, gpu: int) -> None:
        """Ask for the events of a device; the waiting thread does it, for it takes the driver up to a second."""
        self._wanted.put((handle, gpu))

    def drain(self) -> list[Event]:
        """Events since the last call."""
        out = []
        while True:
            try:
                out.append(self._events.get_nowait())
            except Empty:
                return out

    def close(self, timeout_s: float) -> bool:
        """End the thread; whether it ended in time (it looks every 500 ms)."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if not isinstance(self._set, Missing):
            self.nvml.call("nvmlEventSetFree", self._set)
        return True

    def _run(self) -> None:
        while not self._stop.is_set():
            wait_ms = 0 if self._register_next() else WAIT_MS
            answer = self.nvml.call_c("nvmlEventSetWait_v2", self._set, self._out_at, wait_ms)
            if answer is None:
                self.failure = None
                self._events.put(self._event(self._out))
            elif answer.code == TIMEOUT:
                self.failure = None
            else:
                self.failure = answer
                if answer.code in FACILITY_LOST:
                    return
                self._stop.wait(WAIT_MS / 1000)

    def _register_next(self) -> bool:
        """Register one of the devices asked for; whether there was one."""
        try:
            handle, gpu = self._wanted.get_nowait()
        except Empty:
            return False
        failed = self._register(handle, gpu)
        others = {index: why for index, why in self.refused.items() if index != gpu}
        self.refused = others if failed is None else {**others, gpu: failed}
        return True

    def _register(self, handle: Any, gpu: int) -> Missing | None:
        supported = self.nvml.call("nvmlDeviceGetSupportedEventTypes", handle)
        if isinstance(supported, Missing):
            return supported
        if not supported & XID:
            return Missing("not_supported", "this GPU or driver reports no XID events")
        self._gpus[address(handle)] = gpu
        failed = self.nvml.call("nvmlDeviceRegisterEvents", handle, supported & WANTED, self._set)
        return failed if isinstance(failed, Missing) else None

    def _event(self, answer: Any) -> Event:
        t = self._clock.now()
        gpu = self._gpus.get(address(answer.device), -1)
        gi = WHOLE_GPU if answer.gpuInstanceId == 0xFFFFFFFF else int(answer.gpuInstanceId)
        kind, detail = describe(int(answer.eventType), int(answer.eventData))
        return Event(t, gpu, gi, kind, float(answer.eventData), detail)
