"""Whether NVIDIA GPUs can be watched here, found out without loading anything."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from opusmon.collectors.base import Unavailable
from opusmon.nvrm import PROC_VERSION, module_version

LIBRARY = "libnvidia-ml.so.1"
LOADER_CACHE = Path("/etc/ld.so.cache")
USUAL_DIRS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/run/opengl-driver/lib",
)


def probe() -> Unavailable | None:
    """None when driver library and Python binding are both here. Costs well under a millisecond."""
    if not _binding_found():
        return Unavailable("the Python module pynvml is missing", "pip install nvidia-ml-py")
    if library_found():
        return None
    if kernel_module_version() is not None or Path("/dev/nvidiactl").exists():
        return Unavailable(
            f"the NVIDIA driver is loaded but {LIBRARY} is not found",
            "in a container: run it with --gpus all and NVIDIA_DRIVER_CAPABILITIES=utility",
        )
    return Unavailable("no NVIDIA driver on this host", "install the NVIDIA driver if it has an NVIDIA GPU")


def _binding_found() -> bool:
    try:
        return importlib.util.find_spec("pynvml") is not None
    except (ImportError, ValueError):
        return False


def library_found(cache: Path = LOADER_CACHE, dirs: tuple[str, ...] = USUAL_DIRS) -> bool:
    """Whether the loader would find the NVML library: LD_LIBRARY_PATH, its cache, the usual folders."""
    if any(Path(folder, LIBRARY).exists() for folder in _search_path(dirs)):
        return True
    try:
        return LIBRARY.encode() + b"\0" in cache.read_bytes()
    except OSError:
        return False


def _search_path(dirs: tuple[str, ...]) -> Iterator[str]:
    yield from filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    yield from dirs


def kernel_module_version(path: Path = Path(PROC_VERSION)) -> str | None:
    """Version of the loaded NVIDIA kernel module, None when there is none."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return module_version(text) or "?"
