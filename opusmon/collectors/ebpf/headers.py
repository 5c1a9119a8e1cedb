"""Kernel headers for bcc: found, or put together from a distribution's package of another version.

Headers of another version do, because the probes here dereference no kernel structure. bcc takes
BCC_KERNEL_SOURCE as it is and knows no split into a common and an architecture part, as Debian ships them; a
folder of links that merges the two serves it.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from opusmon.collectors.ebpf.errors import ProbesUnavailable
from opusmon.paths import cache_dir

_ARCH = {"x86_64": ("amd64", "x86"), "aarch64": ("arm64", "arm64")}
"""Machine to the words for it in Debian's package names and in the kernel tree."""


@dataclass(frozen=True, slots=True)
class Headers:
    """Where bcc will read kernel headers.

    Attributes:
        source: value for BCC_KERNEL_SOURCE; None leaves bcc to its own ways (/lib/modules, kheaders).
        origin: what they are, for people.
    """

    source: Path | None
    origin: str


def find(root: Path = Path("/"), cache: Path | None = None) -> Headers:
    """Headers of the running kernel, or else the newest there are.

    Args:
        root: folder that holds the host's tree.
        cache: where a merged tree may be made; `opusmon.paths.cache_dir()` by default.

    Raises:
        ProbesUnavailable: there are none.
    """
    release, machine = os.uname().release, os.uname().machine
    given = os.environ.get("BCC_KERNEL_SOURCE", "")
    if given and _complete(Path(given), machine):
        return Headers(Path(given), given)
    if (root / f"lib/modules/{release}/build/include").is_dir():
        return Headers(None, f"/lib/modules/{release}/build")
    if (root / "sys/kernel/kheaders.tar.xz").exists():
        return Headers(None, "/sys/kernel/kheaders.tar.xz")
    for folder in _candidates(root, release):
        if _complete(folder, machine):
            return Headers(folder, str(folder))
    for common in _newest(list((root / "usr/src").glob("linux-headers-*-common"))):
        part = common.with_name(f"{common.name.removesuffix('-common')}-{_words(machine)[0]}")
        if part.is_dir():
            return Headers(_merged(common, part, cache or cache_dir()), f"{common.name} and {part.name}")
    raise ProbesUnavailable("there are no kernel headers to compile the probes with", _remedy(machine))


def _words(machine: str) -> tuple[str, str]:
    return _ARCH.get(machine, (machine, machine))


def _remedy(machine: str) -> str:
    return f"sudo apt install linux-headers-{_words(machine)[0]}"


def _candidates(root: Path, release: str) -> list[Path]:
    """Single folders that may hold everything, those of the running kernel first."""
    exact = [root / f"usr/src/linux-headers-{release}", root / f"usr/src/kernels/{release}"]
    others = [*(root / "usr/src").glob("linux-headers-*"), *(root / "usr/src/kernels").glob("*")]
    return [*exact, *_newest(others)]


def _newest(folders: list[Path]) -> list[Path]:
    """By the numbers in the name, the highest first."""
    return sorted(folders, key=lambda folder: [int(n) for n in re.findall(r"\d+", folder.name)], reverse=True)


def _complete(folder: Path, machine: str) -> bool:
    """Whether a folder can stand for a kernel's source tree on its own."""
    arch = folder / "arch" / _words(machine)[1] / "include"
    parts = (folder / "include/linux/kconfig.h", folder / "include/generated", arch / "generated")
    return all(part.exists() for part in parts) and (arch / "asm").is_dir()


def _merged(common: Path, part: Path, cache: Path) -> Path:
    """A folder of links over both parts; one made earlier serves while it is whole and only we can write it."""
    machine = os.uname().machine
    tree = cache / f"kernel-headers-{part.name.removeprefix('linux-headers-')}"
    if _ours(tree) and _complete(tree, machine):
        return tree
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f"{tree.name}.", dir=cache))
    for below in ("include", f"arch/{_words(machine)[1]}/include"):
        (fresh / below).mkdir(parents=True)
        for source in (common / below, part / below):
            for entry in sorted(source.glob("*")):
                link = fresh / below / entry.name
                link.unlink(missing_ok=True)
                link.symlink_to(entry)
    if tree.is_symlink():
        tree.unlink()
    shutil.rmtree(tree, ignore_errors=True)
    try:
        fresh.rename(tree)
    except OSError:  # another process was faster
        return fresh
    return tree


def _ours(tree: Path) -> bool:
    """Root must not compile what somebody else may change."""
    try:
        info = tree.lstat()
    except OSError:
        return False
    return info.st_uid == os.geteuid() and not tree.is_symlink() and not info.st_mode & 0o022
