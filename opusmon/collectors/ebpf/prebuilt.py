"""BPF programs compiled before: which object serves a source on this machine, and whether it still is that source's.

`objects/manifest.json` has an entry per object; `tests/bpf_objects.py` writes both. An object whose source has
changed since, or that was compiled with other bounds, is refused: it would not be what the source says.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opusmon.collectors.ebpf.errors import ProbesUnavailable
from opusmon.collectors.ebpf.source_text import SOURCES, whole

FOLDER = SOURCES / "objects"
MANIFEST = "manifest.json"

_REINSTALL = "Install opusmon again"


@dataclass(frozen=True, slots=True)
class Compiled:
    """An object that fits.

    Attributes:
        file: its name.
        content: the ELF file.
    """

    file: str
    content: bytes


def file_name(name: str, machine: str) -> str:
    """Name of the object of NAME.bpf.c; ELF calls every BPF object's machine the same, so ours is in the name."""
    return f"{name}.{machine}.bpf.o"


def source_sha256(name: str, sources: Path = SOURCES) -> str:
    """Digest of NAME.bpf.c with all its parts."""
    return hashlib.sha256(whole(name, sources).encode("utf-8")).hexdigest()


def find(
    name: str,
    cflags: Sequence[str] = (),
    machine: str | None = None,
    folder: Path = FOLDER,
    sources: Path = SOURCES,
) -> Compiled:
    """The object of NAME.bpf.c.

    Args:
        name: of the source, without suffix.
        cflags: what it must have been compiled with.
        machine: as `platform.machine()` says it.
        folder: where objects lie.
        sources: where sources lie.

    Raises:
        ProbesUnavailable: there is none for this machine, or it is damaged, of another source or of other flags.
    """
    machine = machine or platform.machine()
    file = file_name(name, machine)
    try:
        entry = _entry(folder / MANIFEST, file)
        if entry is None:
            raise ProbesUnavailable(f"{name} was not compiled for {machine}")
        content = (folder / file).read_bytes()
        source = source_sha256(name, sources)
    except (OSError, ValueError) as error:
        words = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ProbesUnavailable(f"{file} cannot be read: {words}", _REINSTALL) from error
    if hashlib.sha256(content).hexdigest() != entry.get("sha256"):
        raise ProbesUnavailable(f"{file} is not the file that was shipped", _REINSTALL)
    if source != entry.get("source_sha256"):
        raise ProbesUnavailable(f"{name}.bpf.c has changed since {file} was compiled")
    if list(cflags) != entry.get("cflags"):
        raise ProbesUnavailable(f"{file} was compiled with other bounds")
    return Compiled(file, content)


def _entry(manifest: Path, file: str) -> dict[str, Any] | None:
    """What the manifest says of a file; None when it does not name it."""
    entries = json.loads(manifest.read_text(encoding="utf-8"))
    entry = entries.get(file) if isinstance(entries, dict) else None
    return entry if isinstance(entry, dict) else None
