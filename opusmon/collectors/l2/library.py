"""The libcupti that fits the driver: of its CUDA version, or the newest older one. A newer one crashes its caller."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from opusmon.collectors.base import Unavailable
from opusmon.collectors.ebpf.libcuda import Scanner
from opusmon.collectors.facilities_gpu import cupti_paths
from opusmon.collectors.facility import Host

OLDEST = (12, 6)
"""The first CUDA version whose libcupti has PM sampling."""
OVERRIDE = "OPUSMON_CUPTI"
"""Environment variable that names the library to use."""

_BY_NUMBER = {24: (12, 6), 26: (12, 8), 27: (12, 9), 28: (12, 9)}
"""CUPTI_API_VERSION to the CUDA version, up to 12.9; later ones are major x 10000 + minor x 100 (cupti_version.h)."""

_ASK = """\
import ctypes, sys
version = ctypes.c_uint32()
ctypes.CDLL(sys.argv[1]).cuptiGetVersion(ctypes.byref(version))
print(version.value)
"""


@dataclass(frozen=True, slots=True)
class Found:
    """A library.

    Attributes:
        path: where it is.
        cuda: the CUDA version it came with, major and minor; (0, 0) when it is too old to matter.
    """

    path: str
    cuda: tuple[int, int]


def cuda_version(number: int) -> tuple[int, int]:
    """The CUDA version of a CUPTI_API_VERSION; (0, 0) for one before 12.6."""
    if number >= 130_000:
        return number // 10_000, number // 100 % 100
    return _BY_NUMBER.get(number, (0, 0))


def choose(found: Iterable[Found], driver: tuple[int, int]) -> Found | Unavailable:
    """The newest library that is not newer than the driver.

    Args:
        found: what there is.
        driver: the driver's CUDA version.
    """
    ranked = sorted((one for one in found if one.cuda >= OLDEST), key=lambda one: one.cuda, reverse=True)
    fitting = [one for one in ranked if one.cuda <= driver]
    if fitting:
        return fitting[0]
    wanted = f"{driver[0]}.{driver[1]}"
    remedy = f"pip install 'nvidia-cuda-cupti=={wanted}.*'   (or name one in {OVERRIDE})"
    if ranked:
        newest = ".".join(map(str, ranked[-1].cuda))
        return Unavailable(
            f"the libcupti that is here is of CUDA {newest}, newer than the driver's {wanted}, and would crash",
            remedy,
        )
    return Unavailable(f"there is no libcupti of CUDA {wanted} here", remedy)


def find(driver: tuple[int, int], host: Host | None = None) -> Found | Unavailable:
    """Look for the library that fits the driver. Starts one short process per candidate.

    Args:
        driver: the driver's CUDA version.
        host: where to look.
    """
    view = host or Host()
    named = view.env.get(OVERRIDE, "")
    paths = [named] if named else [*cupti_paths(view), *mapped()]
    return choose(_versions(_trusted(paths)), driver)


def mapped(scanner: Scanner | None = None) -> list[str]:
    """Those that processes on this host have loaded, in their own words: a serving torch brings one."""
    scan = (scanner or Scanner(library="libcupti.so")).scan(0)
    ours = _namespace("self")
    return [
        mapping.path
        for pid, mappings in scan.processes.items()
        if _namespace(str(pid)) == ours
        for mapping in mappings
    ]


def _namespace(pid: str) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/mnt").readlink())
    except OSError:
        return pid


def _trusted(paths: Iterable[str]) -> list[str]:
    """Files that nobody but root and this user can change: code from them runs with our rights."""
    real = dict.fromkeys(os.path.realpath(path) for path in paths)
    return [path for path in real if _ours(Path(path))]


def _ours(path: Path) -> bool:
    try:
        info = path.stat()
    except OSError:
        return False
    return info.st_uid in (0, os.geteuid()) and not info.st_mode & 0o022


def _versions(paths: Sequence[str], ask: Callable[[str], int] | None = None) -> list[Found]:
    question = ask or _ask
    return [Found(path, cuda_version(question(path))) for path in paths]


def _ask(path: str) -> int:
    """CUPTI_API_VERSION of a library, asked in a process that may die of it; 0 when it does not say."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _ASK, path], capture_output=True, text=True, timeout=10, check=False
        )
        return int(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0
