"""What a facility of the host is, and a view of the host that tests can fake."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Literal

State = Literal["ok", "missing", "limited", "unknown"]

CAP_DAC_OVERRIDE = 1
CAP_SYS_PTRACE = 19
CAP_SYS_ADMIN = 21
CAP_PERFMON = 38
CAP_BPF = 39

_MAX_FILE_B = 4 * 1024 * 1024
_BLOCK_B = 64 * 1024
"""Files under /proc/sys answer ENOMEM to a read of megabytes."""


@dataclass(frozen=True, slots=True)
class Facility:
    """One thing a pane needs from the host.

    Attributes:
        name: a few words, the same in every state.
        state: ok; missing; limited (there, but not for everything); unknown (cannot be told from here).
        found: what was seen, a version or a path.
        reason: what the state costs, one sentence; "" when ok.
        remedy: the exact command, or a step that begins with a capital; "" when there is none.
        needed_by: the parts of opusmon that use it.
    """

    name: str
    state: State
    found: str = ""
    reason: str = ""
    remedy: str = ""
    needed_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Host:
    """A host as seen through its files.

    Args:
        root: folder that holds the host's tree.
        env: environment variables.
        module_paths: where Python modules are looked for.
        python: interpreter named in commands.
    """

    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    module_paths: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    python: str = sys.executable or "python3"

    def path(self, name: str) -> Path:
        """Where an absolute path of the host lies."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """Content of a text file, None when it cannot be read."""
        content = self.content(name)
        return None if content is None else content.decode("utf-8", "replace").strip()

    def content(self, name: str) -> bytes | None:
        """Content of a file, at most 4 MiB of it; None when it cannot be read."""
        try:
            with self.path(name).open("rb") as file:
                blocks = iter(lambda: file.read(_BLOCK_B), b"")
                return b"".join(islice(blocks, _MAX_FILE_B // _BLOCK_B))
        except (OSError, ValueError):
            return None

    def exists(self, name: str) -> bool:
        """Whether a path is there and visible."""
        try:
            return self.path(name).exists()
        except OSError:
            return False

    def glob(self, pattern: str) -> list[str]:
        """Absolute paths of the host that match, sorted; folders that cannot be read hold nothing."""
        try:
            found = sorted(self.root.glob(pattern.lstrip("/")))
        except OSError:
            return []
        return ["/" + str(path.relative_to(self.root)) for path in found]

    @cached_property
    def release(self) -> str:
        """Release of the running kernel, as `uname -r` prints it."""
        return self.text("/proc/sys/kernel/osrelease") or "unknown"

    @cached_property
    def family(self) -> str:
        """Package family of the distribution: debian, rhel, suse, arch, or "" for another."""
        release = self.text("/etc/os-release") or ""
        pairs = (line.partition("=") for line in release.splitlines())
        values = {key: value.strip("\"'") for key, _, value in pairs}
        words = [values.get("ID", ""), *values.get("ID_LIKE", "").split()]
        return next((_FAMILIES[word] for word in words if word in _FAMILIES), "")

    @cached_property
    def distribution(self) -> str:
        """`ID` of the distribution, "" when it does not say."""
        match = re.search(r"^ID=[\"']?([\w.-]+)", self.text("/etc/os-release") or "", re.MULTILINE)
        return match[1] if match else ""

    @cached_property
    def effective_caps(self) -> int:
        """Effective capabilities of this process, one bit each."""
        match = re.search(r"^CapEff:\s*([0-9a-fA-F]+)$", self.text("/proc/self/status") or "", re.MULTILINE)
        return int(match[1], 16) if match else 0

    @cached_property
    def is_root(self) -> bool:
        """Whether the effective user is root."""
        match = re.search(r"^Uid:\s*\d+\s+(\d+)", self.text("/proc/self/status") or "", re.MULTILINE)
        return match is not None and match[1] == "0"

    def has_cap(self, cap: int) -> bool:
        """Whether this process holds a capability; CAP_SYS_ADMIN stands in for CAP_BPF and CAP_PERFMON."""
        held = bool(self.effective_caps >> cap & 1)
        return held or (cap in (CAP_BPF, CAP_PERFMON) and bool(self.effective_caps >> CAP_SYS_ADMIN & 1))

    def install(self, packages: Mapping[str, str]) -> str:
        """Command that installs a package.

        Args:
            packages: its name by family; "" is what to say on any other distribution.
        """
        command, name = _INSTALL.get(self.family), packages.get(self.family)
        return f"{command} {name}" if command and name else packages.get("", "")

    def library(self, soname: str) -> str | None:
        """Path of a shared library as the loader would find it: LD_LIBRARY_PATH, its cache, the usual folders."""
        folders = [
            folder for folder in self.env.get("LD_LIBRARY_PATH", "").split(":") if folder.startswith("/")
        ]
        for folder in folders:
            if self.exists(f"{folder}/{soname}"):
                return f"{folder}/{soname}"
        cache = self.content("/etc/ld.so.cache") or b""
        pattern = rb"\0(/[^\0\n]{1,400}/" + re.escape(soname.encode()) + rb")\0"
        paths = [match.decode("utf-8", "replace") for match in re.findall(pattern, cache)]
        usual = [path for folder in _LIB_FOLDERS for path in self.glob(f"{folder}/{soname}")]
        return next((path for path in [*paths, *usual] if self.exists(path)), None)


_FAMILIES = {
    **dict.fromkeys(("debian", "ubuntu"), "debian"),
    **dict.fromkeys(("rhel", "fedora", "centos", "rocky", "almalinux", "ol", "amzn", "azurelinux"), "rhel"),
    **dict.fromkeys(("suse", "opensuse", "sles", "opensuse-leap", "opensuse-tumbleweed"), "suse"),
    "arch": "arch",
}
_INSTALL = {
    "debian": "sudo apt install",
    "rhel": "sudo dnf install",
    "suse": "sudo zypper install",
    "arch": "sudo pacman -S",
}
_LIB_FOLDERS = (
    "/usr/lib/*-linux-gnu",
    "/lib/*-linux-gnu",
    "/usr/lib64",
    "/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
)
