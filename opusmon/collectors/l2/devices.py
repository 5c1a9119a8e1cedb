"""The sampled devices: opening, one round of decoding, closing. Blocking: for one thread."""

from __future__ import annotations

import ctypes as c
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from opusmon.collectors.base import Unavailable, UnavailableError
from opusmon.collectors.cost import CallCost
from opusmon.collectors.l2 import cupti, library, metrics
from opusmon.collectors.l2.cupti import Cupti, CuptiError, Host, Sampler

T = TypeVar("T")

SAMPLE_NS = 1_000_000
"""Length of a hardware sample. Longer ones do not start, or stay unreadable, while the memory is busy (seen on an H200
with intervals of 5 to 100 ms); at 1 ms every sample comes back."""
ROOM = 256
"""Samples that fit into one decode."""

_REASONS: dict[int, tuple[str, str]] = {
    cupti.INSUFFICIENT_PRIVILEGES: (
        "the driver gives the hardware counters to administrators only",
        'sudo "$(command -v opusmon)" --deep   (or load the driver with NVreg_RestrictProfilingToAdminUsers=0)',
    ),
    cupti.HARDWARE_BUSY: (
        "another profiler holds the hardware counters",
        "Stop it (nsys, ncu, dcgm profiling: dcgmi profile --pause)",
    ),
    27: ("this GPU or driver has no PM sampling", ""),
    33: ("the hardware counters are not available to this virtual GPU", ""),
    40: ("the hypervisor does not give this guest the hardware counters", ""),
    41: ("the hardware counters are closed in confidential computing mode", ""),
    43: ("the hardware counters of a GPU in MIG mode are not read", ""),
}


class L2Unavailable(UnavailableError):  # noqa: N818  (it reads as what happened)
    """The hardware counters cannot be read."""


@dataclass(slots=True)
class Config:
    """A set of metrics that one pass collects, for one chip."""

    host: Host
    names: Sequence[str]
    image: c.Array[c.c_char]


@dataclass(frozen=True, slots=True)
class Reading:
    """One device, one round.

    Attributes:
        device: index in PCI order.
        end_wall_ns: end of the newest sample, CLOCK_REALTIME ns.
        dt_ns: time the values cover.
        values: metric to value, as `metrics.means` gives them.
        overflow: samples were lost.
    """

    device: int
    end_wall_ns: int
    dt_ns: int
    values: dict[str, float]
    overflow: bool


class Device:
    """One GPU whose counters are sampled for a window at a time.

    Args:
        lib: the library.
        index: in PCI order.
        cost: account of the calls, asked for anew at each.
        banks: sample shared-memory bank conflicts instead; they do not fit into a pass with the rest.

    Raises:
        CuptiError: it cannot be sampled.
    """

    def __init__(self, lib: Cupti, index: int, cost: Callable[[], CallCost], *, banks: bool) -> None:
        self.index = index
        self._lib, self._cost = lib, cost
        self._config = _config(lib, index, metrics.BANKS) if banks else _main(lib, index)
        self._sampler: Sampler | None = None

    def open(self) -> None:
        """Take the counters.

        Raises:
            CuptiError: the device refuses.
        """
        self._sampler = self._timed("enable", lambda: Sampler(self._lib, self.index))
        self._configure()

    def start(self) -> None:
        """Begin a window. The configuration is set anew each time: without that, a second start gives nothing."""
        self._configure()
        self._timed("start", self._open_sampler.start)

    def finish(self) -> Reading | None:
        """End the window; None when it held no complete sample.

        What is decoded before the stop is a fraction of it while the GPU is busy: the rest is still on its way.
        """
        sampler = self._open_sampler
        self._timed("stop", sampler.stop)
        samples = self._timed("decode", self._decode)
        good = metrics.usable(samples, self._config.names, started=True)
        values, dt_ns = metrics.means(samples, self._config.names, good)
        if not dt_ns:
            return None
        return Reading(self.index, int(samples.end_ns[good][-1]), dt_ns, values, samples.overflow)

    def _decode(self) -> cupti.Samples:
        """The library answers UNKNOWN now and then, and is right the next time."""
        try:
            return self._open_sampler.decode()
        except CuptiError as error:
            if error.code != cupti.UNKNOWN:
                raise
            return self._open_sampler.decode()

    def _configure(self) -> None:
        config = self._config
        self._open_sampler.configure(
            config.host, config.image, config.names, interval_ns=SAMPLE_NS, max_samples=ROOM
        )

    @property
    def _open_sampler(self) -> Sampler:
        if self._sampler is None:
            raise CuptiError("sampler", cupti.UNKNOWN, "it is not open")
        return self._sampler

    def _timed(self, name: str, call: Callable[[], T]) -> T:
        began = time.monotonic_ns()
        try:
            return call()
        finally:
            self._cost().add(name, time.monotonic_ns() - began)

    def close(self) -> None:
        """Give the counters back."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None
        self._config.host.close()


def _main(lib: Cupti, index: int) -> Config:
    """The main set, with the links and the lookups of the L2 where the chip has them."""
    config = _config(lib, index, metrics.MAIN)
    for more in (metrics.LINKS, metrics.LOOKUPS):
        try:
            larger = _config(lib, index, (*config.names, *more))
        except CuptiError:
            continue
        config.host.close()
        config = larger
    return config


def _config(lib: Cupti, index: int, names: Sequence[str]) -> Config:
    host = Host(lib, index)
    try:
        image = host.config(names)
        passes = host.passes(image)
        if passes != 1:
            raise CuptiError("passes", 27, f"the metrics need {passes} passes on this chip")
    except CuptiError:
        host.close()
        raise
    return Config(host, names, image)


def driver_version(path: str = "libcuda.so.1") -> tuple[int, int]:
    """The newest CUDA version the driver works with; (0, 0) where there is none."""
    number = c.c_int()
    try:
        if c.CDLL(path).cuDriverGetVersion(c.byref(number)) != 0:
            return 0, 0
    except (OSError, AttributeError):
        return 0, 0
    return number.value // 1000, number.value % 1000 // 10


def load(environ: dict[str, str] | None = None) -> tuple[Cupti, library.Found]:
    """The library that fits, initialised; devices are numbered in PCI order, as NVML does.

    Raises:
        L2Unavailable: there is none, or it does not work here.
    """
    env = os.environ if environ is None else environ
    env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    env.pop("CUDA_VISIBLE_DEVICES", None)
    driver = driver_version()
    if driver == (0, 0):
        raise L2Unavailable("there is no CUDA driver (libcuda.so.1) here", "opusmon doctor")
    found = library.find(driver)
    if isinstance(found, Unavailable):
        raise L2Unavailable(found.reason, found.remedy)
    try:
        return Cupti(found.path), found
    except CuptiError as error:
        why = explain(error)
        raise L2Unavailable(why.reason, why.remedy) from error
    except (OSError, AttributeError) as error:
        raise L2Unavailable(f"{found.path} cannot be used: {error}"[:200]) from error


def open_devices(
    lib: Cupti, cost: Callable[[], CallCost], *, banks: bool
) -> tuple[list[Device], dict[int, Unavailable]]:
    """Every device that can be sampled, and why the others cannot."""
    prepared: list[Device] = []
    refused: dict[int, Unavailable] = {}
    # All are prepared before the first is started: a device that samples keeps the library from preparing others.
    for index in range(lib.device_count()):
        try:
            prepared.append(Device(lib, index, cost, banks=banks))
        except CuptiError as error:
            refused[index] = explain(error)
    for device in prepared:
        try:
            device.open()
        except CuptiError as error:
            refused[device.index] = explain(error)
            device.close()
    return [device for device in prepared if device.index not in refused], refused


def explain(error: CuptiError) -> Unavailable:
    """Reason and remedy of a refusal."""
    reason, remedy = _REASONS.get(error.code, (f"CUPTI refuses: {error}", ""))
    return Unavailable(reason, remedy)
