"""Where opusmon keeps things: recordings, user themes, caches."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

APP = "opusmon"


def _xdg(variable: str, default: str) -> Path:
    """An XDG base folder; a relative value is ignored, as the specification asks."""
    value = os.environ.get(variable, "")
    return (Path(value) if value.startswith("/") else Path.home() / default) / APP


def is_there(path: Path) -> bool:
    """Whether this user has such a file or folder; in a home that may not be looked into (`sudo -u`) there is none."""
    return os.path.exists(path)  # noqa: PTH110  (Path.exists raises there)


def state_dir() -> Path:
    """Where recordings go by default."""
    return _xdg("XDG_STATE_HOME", ".local/state")


def config_dir() -> Path:
    """Where user themes and settings are read from."""
    return _xdg("XDG_CONFIG_HOME", ".config")


def cache_dir() -> Path:
    """What can be made anew."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def theme_dirs() -> list[Path]:
    """Folders with themes, later ones win by name: the packaged ones, then the user's.

    In a wheel `themes/` lies inside the package; in an editable install it is beside it.
    """
    package = Path(__file__).parent
    packaged = package / "themes"
    return [packaged if packaged.is_dir() else package.parent / "themes", config_dir() / "themes"]


def demo_file() -> Path:
    """The bundled session: a server on two H200s that runs out of memory, recorded whole."""
    return Path(__file__).parent / "demo" / "incident.opusmon"


NETWORK_TYPES = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "orangefs",
        "pvfs2",
        "smb3",
        "smbfs",
        "virtiofs",
        "wekafs",
    ]
)
"""Filesystem types on which the WAL's shared memory is not shared between hosts, or not at all."""


def is_network(kind: str) -> bool:
    """Whether a filesystem type, as /proc/self/mountinfo names it, is a network or parallel one.

    FUSE counts, except for container overlays.
    """
    return kind in NETWORK_TYPES or (kind.startswith("fuse.") and kind != "fuse.fuse-overlayfs")


def mounts_of(mountinfo: str) -> Iterator[tuple[str, str]]:
    """Mount point, as it is written there, and filesystem type of each line of /proc/self/mountinfo (proc(5))."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        columns, kinds = left.split(), right.split()
        if len(columns) >= 5 and kinds:
            yield columns[4], kinds[0]


def filesystem_at(path: Path, mounts: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """Mount point and type of the filesystem that an absolute path lies on; "" twice where none holds it.

    Args:
        path: as it is, links in it followed.
        mounts: mount points, blanks and the like in octal as the kernel writes them, and types, in its order.
    """
    best, kind = "", ""
    for written, name in mounts:
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), written)
        # Of two mounts on one point the later one covers the other.
        if len(point) >= len(best) and path.is_relative_to(point):
            best, kind = point, name
    return best, kind
