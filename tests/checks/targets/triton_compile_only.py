"""A Triton driver for machines without a GPU: kernels are compiled for an H200 in earnest, and never launched."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget


class _Device:
    def load_binary(self, name, kernel, shared, device):
        """Module, function, registers, spills and, since 3.3, most threads."""
        found = (1, 1, 32, 0, 1024)
        return found if hasattr(triton, "knobs") else found[:4]

    def unload_module(self, module):
        pass

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}


class _Launcher:
    def __init__(self, src, metadata):
        pass

    def __call__(self, *args, **kwargs):
        pass


class CompileOnly:
    utils = _Device()
    launcher_cls = _Launcher

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_benchmarker(self):
        return _bench


def _bench(call, quantiles=None, **_):
    """The launch compiles; each configuration is as good as the last one."""
    call()
    return [1.0, 1.0, 1.0]


def use_where_there_is_no_gpu():
    """Returns the device on which tensors belong."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    triton.runtime.driver.set_active(CompileOnly())
    return "cpu"
