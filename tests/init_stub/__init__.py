"""The libraries of CUDA that `opusmon check init` calls, without a GPU."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).parent / "init_stub.c"


def built(*, old: bool = False) -> Path:
    """The library, compiled once per version of its source and user; `old` lacks what came with CUDA 11.4 and 12."""
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"init-stub-{os.getuid()}-{digest}"
    library = folder / ("init-stub-old.so" if old else "init-stub.so")
    if not library.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        fresh = library.with_name(f"{os.getpid()}.{library.name}")
        words = ["-std=gnu11", "-O1", "-Wall", "-shared", "-fPIC", "-pthread", *(["-DOLD"] if old else [])]
        subprocess.run(["gcc", *words, str(_SOURCE), "-o", str(fresh)], check=True)
        fresh.replace(library)
    return library
