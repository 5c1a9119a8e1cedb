"""What measurements rest on: the device, its driver, and the versions above it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opusmon.nvrm import PROC_VERSION, module_version


def driver() -> str:
    """`driver 580.159.04`, or that it is not known."""
    try:
        version = module_version(Path(PROC_VERSION).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        version = ""
    return f"driver {version or 'of unknown version'}"


def of_torch(device: Any = None) -> str:
    """`NVIDIA H200, driver 580.159.04, CUDA 13.0, torch 2.11.0+cu130`, of the current device by default."""
    import torch

    name = torch.cuda.get_device_name(device)
    return f"{name}, {driver()}, CUDA {torch.version.cuda}, torch {torch.__version__}"
