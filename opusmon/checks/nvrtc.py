"""Compile and launch a CUDA kernel at run time, on the stream and device that torch uses.

NVRTC lies beside torch: its wheels bring it. torch's own compile function is private in some releases, and wants a
CUDA toolkit for its include folder.

API: NVIDIA, NVRTC documentation (nvrtcCompileProgram, nvrtcGetCUBIN); CUDA Driver API (cuModuleLoadData,
cuLaunchKernel).
"""

from __future__ import annotations

import ctypes as c
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


class CannotMeasure(Exception):  # noqa: N818  (it reads as what happened)
    """Nothing can be measured here; why, in one line."""


class Kernel:
    """A compiled kernel.

    Args:
        source: CUDA C++; the kernel is `extern "C"`.
        name: of the kernel.

    Raises:
        CannotMeasure: it cannot be had.
    """

    def __init__(self, source: str, name: str) -> None:
        import torch

        # The context that is current from here on is torch's.
        torch.zeros(1, device="cuda")
        self._torch = torch
        major, minor = torch.cuda.get_device_capability()
        image = compile_for(library(str(torch.version.cuda)), source, f"sm_{major}{minor}")
        try:
            self._cuda = c.CDLL("libcuda.so.1")
        except OSError as error:
            raise CannotMeasure(f"the driver's library does not load: {error}") from error
        module, self._function = c.c_void_p(), c.c_void_p()
        self._said("cuModuleLoadData", self._cuda.cuModuleLoadData(c.byref(module), image))
        found = self._cuda.cuModuleGetFunction(c.byref(self._function), module, name.encode())
        self._said("cuModuleGetFunction", found)

    def launch(self, grid: int, block: int, args: Sequence[Any]) -> None:
        """Launch it on torch's current stream.

        Args:
            grid: blocks.
            block: threads of each.
            args: tensors, passed as their addresses, and ints of 32 bits.

        Raises:
            CannotMeasure: it was refused.
        """
        values = [c.c_int32(arg) if isinstance(arg, int) else c.c_void_p(arg.data_ptr()) for arg in args]
        places = (c.c_void_p * len(values))(*(c.addressof(value) for value in values))
        stream = c.c_void_p(self._torch.cuda.current_stream().cuda_stream)
        code = self._cuda.cuLaunchKernel(self._function, grid, 1, 1, block, 1, 1, 0, stream, places, None)
        self._said("cuLaunchKernel", code)

    def _said(self, call: str, code: int) -> None:
        if code:
            text = c.c_char_p()
            self._cuda.cuGetErrorString(code, c.byref(text))
            raise CannotMeasure(f"{call}: {code} {(text.value or b'').decode()}".strip())


def library(cuda: str) -> c.CDLL:
    """NVRTC of a CUDA version, as `13.0`.

    Raises:
        CannotMeasure: there is none.
    """
    name = f"libnvrtc.so.{cuda.partition('.')[0]}"
    for place in (name, *_beside_torch(name)):
        try:
            return c.CDLL(place)
        except OSError:
            continue
    raise CannotMeasure(f"{name} is not there: pip install nvidia-cuda-nvrtc")


def _beside_torch(name: str) -> Iterator[str]:
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        yield from sorted(map(str, Path(folder).glob(f"*/lib/{name}")))


def compile_for(nvrtc: c.CDLL, source: str, arch: str) -> bytes:
    """Machine code for one architecture, as `sm_90`.

    Raises:
        CannotMeasure: it does not compile.
    """
    program = c.c_void_p()
    if nvrtc.nvrtcCreateProgram(c.byref(program), source.encode(), b"kernel.cu", 0, None, None):
        raise CannotMeasure("NVRTC makes no program")
    try:
        options = (c.c_char_p * 1)(f"--gpu-architecture={arch}".encode())
        if nvrtc.nvrtcCompileProgram(program, len(options), options):
            said = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            lines = said.rstrip(b"\0").decode(errors="replace").strip().splitlines() or ["no reason given"]
            raise CannotMeasure(f"the kernel does not compile: {lines[0]}")
        return _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(c.byref(program))


def _text(size_of: Any, fill: Any, program: c.c_void_p) -> bytes:
    size = c.c_size_t()
    if size_of(program, c.byref(size)):
        return b""
    data = c.create_string_buffer(size.value)
    fill(program, data)
    return data.raw
