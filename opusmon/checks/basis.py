"""What measurements rest on: the device, its driver, and the versions above it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opusmon.checks.target import Case
from opusmon.nvrm import PROC_VERSION, module_version


def driver() -> str:
    """`driver 580.159.04`, or that it is not known."""
    try:
        version = module_version(Path(PROC_VERSION).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        version = ""
    return f"driver {version or 'of unknown version'}"


def use_gpu(cases: Sequence[Case]) -> Any:
    """Make the GPU that inputs or parameters are on the current one, to which streams, events and waits belong.

    Returns:
        The torch.device; None when all are on the CPU, and then nothing is changed.
    """
    import torch
    from torch.utils._pytree import tree_flatten

    for case in cases:
        own = case.fn.state_dict() if isinstance(case.fn, torch.nn.Module) else {}
        for value in tree_flatten((case.args, dict(case.kwargs), dict(own)))[0]:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                torch.cuda.set_device(value.device)
                return value.device
    return None


def of_torch(device: Any = None) -> str:
    """`NVIDIA H200, driver 580.159.04, CUDA 13.0, torch 2.11.0+cu130`, of the current device by default."""
    import torch

    name = torch.cuda.get_device_name(device)
    return f"{name}, {driver()}, CUDA {torch.version.cuda}, torch {torch.__version__}"
