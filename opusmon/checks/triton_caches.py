"""The state of the user's own cache directories of Triton and inductor. Read only."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from opusmon.paths import filesystem_at, mounts_of

MAX_FILES = 500_000
"""A directory is counted up to here."""


@dataclass(frozen=True, slots=True)
class CacheState:
    """What is in a cache directory.

    Attributes:
        name: `Triton` or `inductor`.
        path: of the directory.
        chosen_by: the environment variable that names it, or `default`.
        exists: it is there.
        entries: directories right below it, one for each kernel or hash.
        files: in all of it.
        size_b: of the files.
        is_whole: all files were counted.
        writable: this user may add entries; where it is not there, may make it.
        filesystem: its type, as `ext4`, and where that is mounted; "" where unknown.
        changed_s: seconds since the newest change, None where nothing is there.
    """

    name: str
    path: str
    chosen_by: str
    exists: bool
    entries: int
    files: int
    size_b: int
    is_whole: bool
    writable: bool
    filesystem: str
    changed_s: float | None


def states() -> list[CacheState]:
    """Both directories as the environment and the defaults of Triton and torch name them."""
    triton = Path(os.environ.get("TRITON_HOME", "") or str(Path.home())) / ".triton" / "cache"
    inductor = Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"
    return [
        _state("Triton", "TRITON_CACHE_DIR", triton),
        _state("inductor", "TORCHINDUCTOR_CACHE_DIR", inductor),
    ]


def _user() -> str:
    """As torch._inductor.runtime.cache_dir_utils makes it."""
    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError, ImportError):
        return f"uid_{os.getuid()}"


def _state(name: str, variable: str, default: Path) -> CacheState:
    named = os.environ.get(variable, "")
    path = Path(named) if named else default
    exists = path.is_dir()
    entries, files, size_b, newest_s = _count(path) if exists else (0, 0, 0, None)
    return CacheState(
        name=name,
        path=str(path),
        chosen_by=variable if named else "default",
        exists=exists,
        entries=entries,
        files=files,
        size_b=size_b,
        is_whole=files < MAX_FILES,
        writable=os.access(_nearest(path), os.W_OK | os.X_OK),
        filesystem=filesystem(path),
        changed_s=None if newest_s is None else max(0.0, time.time() - newest_s),
    )


def _nearest(path: Path) -> Path:
    """The directory itself or the nearest one above it that is there."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def _count(path: Path) -> tuple[int, int, int, float | None]:
    """Directories right below, files, their bytes, time of the newest change; what cannot be read is left out."""
    entries = files = size_b = 0
    newest_s: float | None = None
    for folder, inner, names in os.walk(path):
        if folder == str(path):
            entries = len(inner)
        for name in names:
            try:
                found = os.lstat(os.path.join(folder, name))  # noqa: PTH118  (half a million of them)
            except OSError:
                continue
            files, size_b = files + 1, size_b + found.st_size
            newest_s = max(newest_s or 0.0, found.st_mtime)
            if files >= MAX_FILES:
                return entries, files, size_b, newest_s
    return entries, files, size_b, newest_s


def filesystem(path: Path, mounts: str = "/proc/self/mountinfo") -> str:
    """`ext4 on /`: the type and mount point of the filesystem a path lies on, by proc(5); "" where unknown."""
    try:
        mountinfo = Path(mounts).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    point, kind = filesystem_at(Path(os.path.realpath(path)), mounts_of(mountinfo))
    return f"{kind} on {point}" if kind else ""
