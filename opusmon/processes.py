"""How processes end."""

from __future__ import annotations

import contextlib
import ctypes
import signal

KILLED_S = 5.0
"""How long a killed process gets to be gone: a driver may hold it in an uninterruptible wait."""

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent dies, SIGKILL included (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def signal_name(number: int) -> str:
    """`SIGSEGV`; `signal 35` for one that has no name, as those of real time."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
