"""The thin edge over pynvml: a call returns its value or a `Missing` that says why there is none."""

from __future__ import annotations

import ctypes
import importlib
import time
from typing import Any

from opusmon.collectors.base import UnavailableError
from opusmon.collectors.cost import CallCost
from opusmon.collectors.gpu.probe import kernel_module_version
from opusmon.collectors.missing import Missing

NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
VERSION_MISMATCH = 18
GPU_NOT_FOUND = 28

LOST = frozenset({GPU_IS_LOST, GPU_NOT_FOUND})
FACILITY_LOST = frozenset({1, DRIVER_NOT_LOADED, VERSION_MISMATCH})
"""Return codes after which no call on any GPU works: not initialised, driver gone, driver replaced."""

_WORDS = {
    1: "not initialised",
    2: "invalid argument",
    6: "not found",
    9: "driver not loaded",
    10: "timeout",
    14: "corrupted infoROM",
    16: "the GPU needs a reset",
    17: "blocked by the operating system",
    18: "driver and library versions differ",
    20: "out of memory",
    21: "no data",
    23: "out of resources",
    25: "argument version mismatch",
    27: "not ready",
    29: "invalid state",
    999: "unknown error",
}


class CollectorUnavailable(UnavailableError):  # noqa: N818  (a state of the host, not a fault of the program)
    """NVML cannot be used at all."""


def missing(code: int, call: str) -> Missing:
    """The reason behind an NVML return code.

    Args:
        code: nvmlReturn_t.
        call: the function that answered it.
    """
    if code == NOT_SUPPORTED:
        return Missing("not_supported", f"not supported by this GPU or driver ({call})", code=code)
    if code == NO_PERMISSION:
        return Missing(
            "no_permission", f"no permission for {call}", "run as root, or as a user the driver allows", code
        )
    if code == FUNCTION_NOT_FOUND:
        return Missing(
            "not_supported", f"the driver is too old for {call}", "install a newer NVIDIA driver", code
        )
    if code in LOST:
        remedy = "look for 'NVRM: Xid' in dmesg, then reset the GPU (nvidia-smi -r) or reboot"
        return Missing("unavailable", "the GPU is lost: it no longer answers on the bus", remedy, code)
    words = _WORDS.get(code, "undocumented")
    return Missing("error", f"{call} failed: {words} (NVML error {code})", code=code)


class Nvml:
    """NVML as one thread uses it.

    Attributes:
        module: pynvml.
        cost: what the calls cost since `take_cost`.
        current: name of the call in progress and when it began (monotonic ns), for a watcher on another thread.
        codes: failures by return code since `clear`.
        good: calls that succeeded since `clear`.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.cost = CallCost()
        self.current: tuple[str, int] | None = None
        self.codes: set[int] = set()
        self.good = 0
        self._u32, self._u64 = ctypes.c_uint32(), ctypes.c_uint64()
        self._u32_out, self._u64_out = ctypes.byref(self._u32), ctypes.byref(self._u64)
        self._error: type[Exception] = module.NVMLError
        self._mismatch: type[Exception] = getattr(module, "NVMLLibraryMismatchError", module.NVMLError)

    def clear(self) -> None:
        """Begin a new account of successes and failures."""
        self.codes = set()
        self.good = 0

    def take_cost(self) -> CallCost:
        """The account of costs so far; a new one begins."""
        taken, self.cost = self.cost, CallCost()
        return taken

    def call(self, name: str, *args: Any) -> Any:
        """Call a pynvml function; its value, or `Missing`."""
        function = getattr(self.module, name, None)
        if function is None:
            return Missing(
                "not_supported", f"the installed nvidia-ml-py has no {name}", "pip install -U nvidia-ml-py"
            )
        began = time.monotonic_ns()
        self.current = (name, began)
        try:
            value = function(*args)
        except self._error as error:
            return self._failed(int(getattr(error, "value", 999)), name)
        except self._mismatch:
            return self._failed(FUNCTION_NOT_FOUND, name)
        except (ValueError, TypeError, ctypes.ArgumentError) as error:
            return Missing("error", f"{name} gave something unreadable ({type(error).__name__})")
        finally:
            self._count(name, began)
        self.good += 1
        return value

    def call_c(self, name: str, *args: Any) -> Missing | None:
        """Call a C function of the loaded library with ready-made structures; None when it succeeded."""
        began = time.monotonic_ns()
        self.current = (name, began)
        try:
            code = int(getattr(self.module.nvmlLib, name)(*args))
        except AttributeError:
            code = FUNCTION_NOT_FOUND
        finally:
            self._count(name, began)
        if code:
            return self._failed(code, name)
        self.good += 1
        return None

    def u32(self, name: str, *args: Any) -> int | Missing:
        """Call a C function that ends with a pointer to an unsigned int; what it wrote there."""
        failed = self.call_c(name, *args, self._u32_out)
        return int(self._u32.value) if failed is None else failed

    def u64(self, name: str, *args: Any) -> int | Missing:
        """Call a C function that ends with a pointer to 64 bits; what it wrote there."""
        failed = self.call_c(name, *args, self._u64_out)
        return int(self._u64.value) if failed is None else failed

    def first(self, names: tuple[str, ...], *args: Any) -> Any:
        """The first of several functions that this driver has; the answer of the last one otherwise."""
        answer: Any = None
        for name in names:
            answer = self.call(name, *args)
            if not (isinstance(answer, Missing) and answer.code in (0, FUNCTION_NOT_FOUND)):
                return answer
        return answer

    def _failed(self, code: int, name: str) -> Missing:
        self.codes.add(code)
        return missing(code, name)

    def _count(self, name: str, began: int) -> None:
        took = time.monotonic_ns() - began
        self.current = None
        self.cost.add(name, took)


def load() -> Any:
    """Import pynvml.

    Raises:
        CollectorUnavailable: it is missing, broken, or an old package of the same name shadows it.
    """
    install = "pip install -U nvidia-ml-py"
    try:
        module = importlib.import_module("pynvml")
    except ImportError as error:
        raise CollectorUnavailable(f"the Python module pynvml is missing ({error})", install) from error
    except SyntaxError as error:
        raise CollectorUnavailable("the installed pynvml does not run on this Python", install) from error
    if hasattr(module, "nvmlGpmMetricsGet") and hasattr(module, "nvmlInitWithFlags"):
        return module
    reason = f"package pynvml {_shadow_version(module)} shadows nvidia-ml-py"
    raise CollectorUnavailable(reason, f"pip uninstall pynvml; {install}")


def _shadow_version(module: Any) -> str:
    """Version of the package that hides nvidia-ml-py, "?" when it does not say."""
    own = getattr(module, "__version__", None)
    if own:
        return str(own)
    from importlib import metadata  # a megabyte that only this message needs

    try:
        return metadata.version("pynvml")
    except metadata.PackageNotFoundError:
        return "?"


def start(nvml: Nvml) -> None:
    """Initialise NVML.

    Raises:
        CollectorUnavailable: with the reason and what to do.
    """
    failed = nvml.call("nvmlInitWithFlags", 0)
    if isinstance(failed, Missing):
        raise why_not(failed, nvml)


def why_not(failed: Missing, nvml: Nvml) -> CollectorUnavailable:
    """What a failure of the whole of NVML means to the user."""
    kernel = kernel_module_version()
    if failed.code == VERSION_MISMATCH:
        library = nvml.call("nvmlSystemGetNVMLVersion")
        library = "of unknown version" if isinstance(library, Missing) else library
        reason = f"NVIDIA kernel module {kernel or 'of unknown version'}, library {library}: they differ"
        return CollectorUnavailable(
            reason, "reboot, or reload the module (rmmod nvidia_uvm nvidia; modprobe nvidia)"
        )
    if failed.code == DRIVER_NOT_LOADED:
        return CollectorUnavailable(
            "the NVIDIA driver is not loaded", "modprobe nvidia, then check with nvidia-smi"
        )
    if failed.code == LIBRARY_NOT_FOUND:
        return CollectorUnavailable(
            "libnvidia-ml.so.1 cannot be loaded",
            "install the NVIDIA driver; in a container run it with --gpus all",
        )
    if failed.code == NO_PERMISSION:
        return CollectorUnavailable(
            "no permission to use the NVIDIA driver", "run as root, or open /dev/nvidia* to this user"
        )
    if failed.code in LOST:
        return CollectorUnavailable(failed.reason, failed.remedy)
    return CollectorUnavailable(failed.reason, failed.remedy or "check with nvidia-smi and dmesg")
