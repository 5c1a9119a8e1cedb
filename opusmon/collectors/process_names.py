"""Names and owners of processes. Names never include arguments: those may hold secrets."""

from __future__ import annotations

import pwd
import threading
from pathlib import Path

from opusmon.text import printable

OUTSIDE = "outside my namespace"
MAX_COMM = 15
"""The kernel cuts /proc/PID/comm after 15 bytes."""


class Users:
    """User names by uid. A directory service that hangs delays a name, never a reading."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()
        self._asked: set[int] = set()

    def name(self, uid: int) -> str:
        """The user's name; "uid N" until it is known."""
        known = self._names.get(uid)
        if known is not None:
            return known
        with self._lock:
            fresh = uid not in self._asked
            self._asked.add(uid)
        if fresh:
            thread = threading.Thread(target=self._ask, args=(uid,), daemon=True)
            thread.start()
            thread.join(0.05)
        return self._names.get(uid, f"uid {uid}")

    def _ask(self, uid: int) -> None:
        try:
            self._names[uid] = pwd.getpwuid(uid).pw_name
        except KeyError:
            self._names[uid] = f"uid {uid}"


def process_name(pid: int, proc: Path = Path("/proc")) -> str:
    """Name of a process without its arguments, `OUTSIDE` when this pid namespace does not hold it."""
    try:
        comm = _plain((proc / str(pid) / "comm").read_bytes())
    except OSError:
        return OUTSIDE
    if len(comm) < MAX_COMM:
        return comm
    full = _program(proc / str(pid) / "cmdline")
    return full if full.startswith(comm) else comm


def _program(path: Path) -> str:
    """Base name of argv[0], up to a space: a process may write its arguments into its title."""
    try:
        with path.open("rb") as file:
            first = file.read(4096).split(b"\0", 1)[0]
    except OSError:
        return ""
    words = _plain(first).split()
    return words[0].rsplit("/", 1)[-1] if words else ""


def _plain(raw: bytes) -> str:
    return printable(raw.decode("utf-8", errors="replace").strip())


def process_user(pid: int, users: Users, proc: Path = Path("/proc")) -> str:
    """Owner of a process, "" when it cannot be seen."""
    try:
        return users.name((proc / str(pid)).stat().st_uid)
    except OSError:
        return ""
