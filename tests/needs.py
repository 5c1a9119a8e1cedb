"""Facilities that some tests need and some machines lack.

`needs("tmux")` skips the test with a reason where tmux is not there. `OPUSMON_TEST_REQUIRE="gcc,tmux"` names
those that must be there: then their absence fails the test, so that a broken machine does not look green.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

VARIABLE = "OPUSMON_TEST_REQUIRE"


def _program(name: str) -> Callable[[], str]:
    return lambda: "" if shutil.which(name) else f"{name} is not installed"


def _root() -> str:
    return "" if os.geteuid() == 0 else "not run as root"


def _bcc() -> str:
    """As the distribution ships it; the package of that name on PyPI is something else."""
    patterns = ("lib/python3/dist-packages/bcc/table.py", "lib*/python3*/site-packages/bcc/table.py")
    found = any(any(Path("/usr").glob(pattern)) for pattern in patterns)
    return "" if found else "the distribution's bcc for Python is not installed"


def _libbpf() -> str:
    try:
        ctypes.CDLL("libbpf.so.1")
    except OSError as error:
        return f"libbpf does not load: {error}"
    return ""


def _clang() -> str:
    """With all that compiling BPF programs takes: packages clang, llvm, linux-libc-dev and libbpf-dev."""
    programs = [name for name in ("clang", "llvm-strip") if shutil.which(name) is None]
    headers = [
        name for name in ("linux/bpf.h", "bpf/bpf_helpers.h") if not Path("/usr/include", name).exists()
    ]
    return f"not installed: {', '.join(programs + headers)}" if programs or headers else ""


def _tmpfs() -> str:
    """A filesystem of its own, to fill up: root may mount one, if the kernel has it."""
    try:
        known = "\ttmpfs\n" in Path("/proc/filesystems").read_text(encoding="ascii")
    except OSError:
        known = False
    return _root() or ("" if known and shutil.which("mount") else "no tmpfs can be mounted")


def _sudo() -> str:
    """With what it takes to be somebody else in a mount namespace of one's own."""
    missing = [name for name in ("sudo", "unshare", "setpriv") if shutil.which(name) is None]
    return _root() or (f"not installed: {', '.join(missing)}" if missing else "")


def _readable() -> str:
    """For tests that become an ordinary user."""
    found = find_spec("opusmon")
    folders = Path(found.origin).parents if found is not None and found.origin else ()
    return (
        "" if all(folder.stat().st_mode & 1 for folder in folders) else "only root may enter opusmon's folder"
    )


def _cupti() -> str:
    """The vendor's headers, which the wheel of that library brings."""
    return "" if find_spec("nvidia") is not None else "nvidia-cuda-cupti is not installed"


def _torch() -> str:
    return "" if find_spec("torch") is not None else "torch is not installed"


def _triton() -> str:
    """With torch, whose tensors kernels take; compiling needs no GPU."""
    return _torch() or ("" if find_spec("triton") is not None else "triton is not installed")


def _gpu() -> str:
    """One that torch can use."""
    if why := _torch():
        return why
    import torch

    return "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no GPU"


CHECKS: dict[str, Callable[[], str]] = {
    "root": _root,
    "gcc": _program("gcc"),
    "tmux": _program("tmux"),
    "bcc": _bcc,
    "libbpf": _libbpf,
    "clang": _clang,
    "prometheus": _program("prometheus"),
    "tmpfs": _tmpfs,
    "sudo": _sudo,
    "readable": _readable,
    "cupti": _cupti,
    "torch": _torch,
    "triton": _triton,
    "gpu": _gpu,
}
"""Kind to a function that says why it is not there, "" when it is."""


def required() -> frozenset[str]:
    """The kinds that must be there.

    Raises:
        ValueError: the variable names a kind that does not exist.
    """
    kinds = frozenset(kind.strip() for kind in os.environ.get(VARIABLE, "").split(",")) - {""}
    if unknown := kinds - CHECKS.keys():
        raise ValueError(f"{VARIABLE} names {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    return kinds


def lacking(kind: str, why: str) -> None:
    """Skip the calling test or module, with the reason; fail it where the kind is required."""
    if kind in required():
        pytest.fail(f"{kind} is required by {VARIABLE}: {why}", pytrace=False)
    pytest.skip(f"{why} ({kind})", allow_module_level=True)


def needs(*kinds: str) -> None:
    """Skip the calling test where one of the kinds is not there; fail it where that kind is required.

    Call it in a test or a fixture, or at the head of a module to skip all of it.
    """
    for kind in kinds:
        if why := CHECKS[kind]():
            lacking(kind, why)
