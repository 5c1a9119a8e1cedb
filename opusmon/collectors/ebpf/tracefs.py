"""tracefs for this process alone, where the host has not mounted it: tracepoints are listed there."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

ROOTS = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))
"""Where it may be mounted."""

_CLONE_NEWNS = 0x00020000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000


def mounted(roots: tuple[Path, ...] = ROOTS) -> bool:
    """Whether this process sees a tracefs."""
    return any((root / "events").is_dir() for root in roots)


def ensure(root: Path = ROOTS[0]) -> str:
    """Mount tracefs in a mount namespace of our own, so that nobody else on the host sees it.

    For the calling thread and those it starts; call it before there are others. Does nothing where there is one.

    Returns:
        "" when there is a tracefs now, else why not.
    """
    if mounted():
        return ""
    if os.geteuid() != 0:
        return "tracefs is not mounted, and mounting it takes root"
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    steps: tuple[tuple[str, Callable[[], int]], ...] = (
        ("unshare", lambda: int(libc.unshare(_CLONE_NEWNS))),
        ("make mounts private", lambda: _mount(libc, None, b"/", None, _MS_REC | _MS_PRIVATE)),
        ("mount", lambda: _mount(libc, b"tracefs", os.fsencode(root), b"tracefs", flags)),
    )
    for what, step in steps:
        if step() != 0:
            code = ctypes.get_errno()
            return f"tracefs is not mounted, and cannot be: {what}: {os.strerror(code)}"
    return ""


def _mount(libc: ctypes.CDLL, source: bytes | None, target: bytes, kind: bytes | None, flags: int) -> int:
    return int(libc.mount(source, target, kind, ctypes.c_ulong(flags), None))
