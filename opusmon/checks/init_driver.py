"""CUDA's driver and runtime libraries through ctypes: the calls that first use consists of, and their codes.

Signatures: cuda.h and cuda_runtime_api.h of CUDA 13.0.
"""

from __future__ import annotations

import ctypes
import glob
import os
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from opusmon.checks.init_fork import Stages
from opusmon.cuda_codes import RESULTS

LIBCUDA = os.environ.get("OPUSMON_LIBCUDA", "libcuda.so.1")
"""The driver library; the variable is for tests, which have none."""

MODES = {"global": 0, "thread-local": 1, "relaxed": 2}
"""Capture modes, CUstreamCaptureMode."""

PER_THREAD_STREAM = c_void_p(2)
"""The calling thread's default stream (CU_STREAM_PER_THREAD): the one stream that need not be created."""

KERNELS = 64
"""Kernels in the module: every thread can have one that was never launched."""

_COMPUTE_MODE = 20
_NON_BLOCKING = 1
_PTX_INPUT = 1
_OUT = POINTER(c_void_p)

_DRIVER: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (_OUT, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuModuleGetLoadingMode": (POINTER(c_int),),
    "cuModuleLoadData": (_OUT, c_char_p),
    "cuModuleGetFunction": (_OUT, c_void_p, c_char_p),
    "cuLibraryLoadData": (_OUT, c_char_p, c_void_p, c_void_p, c_uint, c_void_p, c_void_p, c_uint),
    "cuLibraryGetKernel": (_OUT, c_void_p, c_char_p),
    "cuLinkCreate_v2": (c_uint, c_void_p, c_void_p, _OUT),
    "cuLinkAddData_v2": (c_void_p, c_int, c_char_p, c_size_t, c_char_p, c_uint, c_void_p, c_void_p),
    "cuLinkComplete": (c_void_p, _OUT, POINTER(c_size_t)),
    "cuStreamCreate": (_OUT, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, _OUT),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, POINTER(c_void_p), c_void_p),
    "cuGraphGetNodes": (c_void_p, c_void_p, POINTER(c_size_t)),
    "cuGraphInstantiateWithFlags": (_OUT, c_void_p, c_uint64),
    "cuGraphInstantiate_v2": (_OUT, c_void_p, c_void_p, c_void_p, c_size_t),
    "cuGraphLaunch": (c_void_p, c_void_p),
}

_RUNTIME: dict[str, tuple[Any, ...]] = {
    "cudaFree": (c_void_p,),
    "cudaMalloc": (_OUT, c_size_t),
    "cudaSetDevice": (c_int,),
    "cudaMemset": (c_void_p, c_int, c_size_t),
    "cudaDeviceSynchronize": (),
    "cudaStreamSynchronize": (c_void_p,),
    "cudaStreamBeginCapture": (c_void_p, c_int),
    "cudaStreamEndCapture": (c_void_p, _OUT),
    "cudaMallocAsync": (_OUT, c_size_t, c_void_p),
    "cudaMemsetAsync": (c_void_p, c_int, c_size_t, c_void_p),
    "cudaFreeAsync": (c_void_p, c_void_p),
    "cudaGraphGetNodes": (c_void_p, c_void_p, POINTER(c_size_t)),
    "cudaGraphInstantiateWithFlags": (_OUT, c_void_p, c_uint64),
    "cudaGraphLaunch": (c_void_p, c_void_p),
}


class CudaError(Exception):
    """A call that did not succeed: `901 invalidated at cuStreamEndCapture`."""


class AbsentError(Exception):
    """The library has no such function: it is older than what is to be measured."""


class Calls:
    """Functions of one library; each call is a stage, and raises its code."""

    _prefix = ""
    _begin = ""

    def __init__(self, path: str, signatures: dict[str, tuple[Any, ...]], stages: Stages) -> None:
        library = ctypes.CDLL(path)
        self._path = path
        self._stages = stages
        self._functions: dict[str, Any] = {}
        for name, arguments in signatures.items():
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes = arguments
                function.restype = c_int
                self._functions[name] = function

    def has(self, name: str) -> bool:
        """Whether the library has this function."""
        return name in self._functions

    def call(self, name: str, *arguments: Any) -> None:
        """Call it.

        Raises:
            CudaError: it did not succeed.
            AbsentError: the library has no such function.
        """
        function = self._functions.get(name)
        if function is None:
            raise AbsentError(f"{Path(self._path).name} has no {name}")
        self._stages.enter(name)
        code = function(*arguments)
        self._stages.leave()
        if code:
            raise CudaError(f"{code} {RESULTS.get(code, 'error')} at {name}")

    def made(self, name: str, *arguments: Any) -> c_void_p:
        """Call a function whose first argument takes what it makes; returns that."""
        out = c_void_p()
        self.call(name, ctypes.byref(out), *arguments)
        return out

    def sync(self, stream: c_void_p) -> None:
        """Wait for a stream."""
        self.call(f"{self._prefix}StreamSynchronize", stream)

    def begin(self, stream: c_void_p, mode: str) -> None:
        """Begin a capture, in one of MODES."""
        self.call(self._begin, stream, MODES[mode])

    def end(self, stream: c_void_p) -> c_void_p:
        """End the capture; returns its graph."""
        out = c_void_p()
        self.call(f"{self._prefix}StreamEndCapture", stream, ctypes.byref(out))
        return out

    def nodes(self, graph: c_void_p) -> int:
        """How many nodes a graph has."""
        count = c_size_t()
        self.call(f"{self._prefix}GraphGetNodes", graph, None, ctypes.byref(count))
        return count.value

    def instantiate(self, graph: c_void_p) -> c_void_p:
        """A graph made ready to be launched."""
        return self.made(f"{self._prefix}GraphInstantiateWithFlags", graph, 0)

    def replay(self, graph: c_void_p, stream: c_void_p) -> None:
        """Launch what instantiate() returned."""
        self.call(f"{self._prefix}GraphLaunch", graph, stream)


class Driver(Calls):
    """libcuda, loaded when this is made. All methods raise CudaError or AbsentError.

    Raises:
        OSError: the library does not load.
    """

    _prefix = "cu"
    _begin = "cuStreamBeginCapture_v2"

    def __init__(self, stages: Stages, path: str = LIBCUDA) -> None:
        super().__init__(path, _DRIVER, stages)

    def number(self, name: str, *arguments: Any) -> int:
        """Call a function whose first argument takes an int; returns that."""
        out = c_int()
        self.call(name, ctypes.byref(out), *arguments)
        return out.value

    def device_name(self) -> str:
        """Name of device 0."""
        name = ctypes.create_string_buffer(100)
        self.call("cuDeviceGetName", name, len(name), self.number("cuDeviceGet", 0))
        return name.value.decode(errors="replace")

    def compute_mode(self) -> int:
        """CUcomputemode of device 0: 0 shared, 2 prohibited, 3 one process at a time."""
        return self.number("cuDeviceGetAttribute", _COMPUTE_MODE, self.number("cuDeviceGet", 0))

    def context(self) -> c_void_p:
        """Retain the primary context of device 0 and make it the calling thread's."""
        context = self.made("cuDevicePrimaryCtxRetain", self.number("cuDeviceGet", 0))
        self.call("cuCtxSetCurrent", context)
        return context

    def compiled(self, ptx: bytes) -> bytes:
        """PTX as machine code for the context's device."""
        state = c_void_p()
        self.call("cuLinkCreate_v2", 0, None, None, ctypes.byref(state))
        self.call("cuLinkAddData_v2", state, _PTX_INPUT, ptx, len(ptx) + 1, b"kernels", 0, None, None)
        place, size = c_void_p(), c_size_t()
        self.call("cuLinkComplete", state, ctypes.byref(place), ctypes.byref(size))
        return ctypes.string_at(place.value or 0, size.value)

    def load(self, image: bytes) -> c_void_p:
        """Load a module as the runtime library does (drivers since 12.0), or as older ones do. Keep the image."""
        if self.has("cuLibraryLoadData"):
            return self.made("cuLibraryLoadData", image, None, None, 0, None, None, 0)
        return self.made("cuModuleLoadData", image)

    def kernel(self, module: c_void_p, number: int = 0) -> c_void_p:
        """A kernel of what load() returned."""
        name = "cuLibraryGetKernel" if self.has("cuLibraryLoadData") else "cuModuleGetFunction"
        return self.made(name, module, f"k{number}".encode())

    def stream(self) -> c_void_p:
        """A new stream that does not wait for the legacy stream."""
        return self.made("cuStreamCreate", _NON_BLOCKING)

    def memory(self) -> int:
        """Address of four new bytes of device memory."""
        out = c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(out), 4)
        return out.value

    def read(self, place: int) -> int:
        """The number that lies there."""
        out = c_uint()
        self.call("cuMemcpyDtoH_v2", ctypes.byref(out), place, 4)
        return out.value

    def instantiate(self, graph: c_void_p) -> c_void_p:
        """A graph made ready to be launched; drivers before 11.4 have the older call only."""
        if self.has("cuGraphInstantiateWithFlags"):
            return super().instantiate(graph)
        return self.made("cuGraphInstantiate_v2", graph, None, None, 0)

    def launch(self, kernel: c_void_p, stream: c_void_p, place: int, value: int) -> None:
        """Launch a kernel of one thread that writes a value."""
        arguments = (c_uint64(place), c_uint(value))
        pointers = (c_void_p * 2)(*(ctypes.cast(ctypes.byref(item), c_void_p) for item in arguments))
        self.call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, pointers, None)


class Runtime(Calls):
    """The CUDA runtime library. All methods raise CudaError or AbsentError.

    Raises:
        OSError: the library does not load.
    """

    _prefix = "cuda"
    _begin = "cudaStreamBeginCapture"

    def __init__(self, stages: Stages, path: str) -> None:
        super().__init__(path, _RUNTIME, stages)


def runtime_path() -> str:
    """The runtime library that torch brings, or the one beside a CUDA toolkit; "" when there is none."""
    if given := os.environ.get("OPUSMON_LIBCUDART"):
        return given
    patterns = ["/usr/local/cuda/lib64/libcudart.so.[0-9]*"]
    torch = find_spec("torch")
    if torch is not None and torch.origin:
        folder = Path(torch.origin).parent
        patterns = [f"{folder.parent}/nvidia/*/lib/libcudart.so.*", f"{folder}/lib/libcudart*.so*", *patterns]
    return next((found for pattern in patterns for found in sorted(glob.glob(pattern))), "")  # noqa: PTH207


def ptx(kernels: int = KERNELS) -> bytes:
    """A module of kernels k0, k1, ...: each writes its second argument to the address in its first."""
    text = ".version 6.5\n.target sm_70\n.address_size 64\n"
    for number in range(kernels):
        text += (
            f".visible .entry k{number}(.param .u64 place, .param .u32 value) {{\n"
            " .reg .b32 %v;\n .reg .b64 %p;\n"
            " ld.param.u64 %p, [place];\n ld.param.u32 %v, [value];\n"
            " cvta.to.global.u64 %p, %p;\n st.global.u32 [%p], %v;\n ret;\n}\n"
        )
    return text.encode()


def memset_in_order(runtime: Runtime) -> None:
    """Take memory, write to it and give it back, in order of the calling thread's default stream."""
    place = runtime.made("cudaMallocAsync", 64, PER_THREAD_STREAM)
    runtime.call("cudaMemsetAsync", place, 7, 64, PER_THREAD_STREAM)
    runtime.call("cudaFreeAsync", place, PER_THREAD_STREAM)
