"""Where control groups lie: the mounted hierarchies (v1, v2 or both) and the groups of a process in them.

A container sees its own part of the tree only. Its group reads "/" there, and what holds above cannot be seen:
`Hierarchy.whole` is False then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from opusmon.collectors.host.files import exists, plain, read
from opusmon.collectors.missing import Missing

Controller = Literal["cpu", "cpuacct", "memory", ""]
"""A v1 controller that is read here; "" is the v2 tree."""
V2: Controller = ""
_V1: tuple[Controller, ...] = ("cpu", "cpuacct", "memory")

Paths = Mapping[Controller, str]
"""Path of a group below the root of each hierarchy."""

_ESCAPE = re.compile(rb"\\([0-7]{3})")


class Step(NamedTuple):
    """A group on the way to the root: its folder, and its path as /proc/PID/cgroup writes it."""

    folder: str
    path: str


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A mounted tree of groups.

    Attributes:
        point: folder of its topmost visible group.
        root: path of that group, as /proc/PID/cgroup writes paths.
        whole: the topmost visible group is the root of the machine, above which nothing is.
    """

    point: str
    root: str
    whole: bool

    def steps(self, path: str) -> list[Step] | None:
        """From a group up to the topmost visible one; None when the group lies outside of the view."""
        inside = path if self.root == "/" else _below(path, self.root)
        if inside is None or ".." in inside.split("/"):
            return None
        parts = [part for part in inside.split("/") if part]
        heads = [parts[:n] for n in range(len(parts), -1, -1)]
        top = self.root.rstrip("/")
        return [Step("/".join([self.point, *head]), "/".join([top, *head]) or "/") for head in heads]


def _below(path: str, root: str) -> str | None:
    """What of the path lies below the root, None when it is elsewhere."""
    return path[len(root) :] if within(path, root) else None


def within(path: str, root: str) -> bool:
    """Whether a group is the root or lies below it."""
    return root == "/" or path == root or path.startswith(f"{root}/")


def hierarchies(proc: str, sys: str) -> dict[Controller, Hierarchy]:
    """The mounted hierarchies by controller; the first mount of each counts, the usual place before others.

    Args:
        proc: the /proc folder.
        sys: the /sys folder; mount points below /sys are looked for there.
    """
    text = read(f"{proc}/self/mountinfo")
    found: dict[Controller, Hierarchy] = {}
    mounts = [] if isinstance(text, Missing) else _mounts(text)
    for point, root, controllers in sorted(mounts, key=lambda it: not it[0].startswith("/sys/fs/cgroup")):
        folder = sys + point[len("/sys") :] if point.startswith("/sys/") else point
        for controller in controllers:
            # The files that tell the root of the machine: v1 has one there only, v2 lacks one there only.
            mark = (
                exists(f"{folder}/cgroup.events")
                if controller == V2
                else not exists(f"{folder}/release_agent")
            )
            found.setdefault(controller, Hierarchy(folder, root, not mark))
    return found


def _mounts(text: bytes) -> list[tuple[str, str, tuple[Controller, ...]]]:
    """(mount point, root, controllers) of the cgroup mounts in /proc/self/mountinfo."""
    out = []
    for line in text.splitlines():
        left, _, right = line.partition(b" - ")
        fields, kind = left.split(b" "), right.split(b" ")
        if len(fields) < 6 or len(kind) < 3:
            continue
        controllers = _controllers(kind[0], kind[2])
        point, root = _path(fields[4]), _path(fields[3])
        if controllers and "\0" not in point + root:
            out.append((point, root, controllers))
    return out


def _controllers(kind: bytes, options: bytes) -> tuple[Controller, ...]:
    if kind == b"cgroup2":
        return (V2,)
    given = options.decode("ascii", "replace").split(",") if kind == b"cgroup" else []
    return tuple(controller for controller in _V1 if controller in given)


def _path(raw: bytes) -> str:
    """A path as mountinfo writes it, with blanks in octal."""
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), raw).decode("utf-8", "surrogateescape")


def membership(text: bytes) -> dict[Controller, str]:
    """Paths of a process by controller, from /proc/PID/cgroup."""
    out: dict[Controller, str] = {}
    for line in text.decode("utf-8", "surrogateescape").split("\n"):
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if not path.startswith("/") or "\0" in path:
            continue
        if number == "0" and not names:
            out[V2] = path
        for controller in _V1:
            if controller in names.split(","):
                out[controller] = path
    return out


def label(paths: Paths) -> str:
    """What a group is called: its deepest path, that of the v2 tree first. Cleaned."""
    deepest = max((paths[c] for c in (V2, "memory", "cpu", "cpuacct") if c in paths), key=_depth, default="/")
    return plain(deepest.encode("utf-8", "surrogateescape"))


def _depth(path: str) -> int:
    return len([part for part in path.split("/") if part])


def cut(paths: Paths, top: str) -> dict[Controller, str]:
    """The group at path `top`, above a process: the trees in which the process is below it."""
    return {controller: top for controller, path in paths.items() if within(path, top)}
