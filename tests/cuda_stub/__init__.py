"""A libcuda.so.1 without a GPU, and a program that drives it as told: for probes to be set on."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

FREE_NS = 150
"""A call of the stub takes 3-10 ns; with a probe on it, 250 ns and more."""

_HERE = Path(__file__).parent
_FLAGS = ["-std=gnu11", "-O0", "-Wall", "-fno-omit-frame-pointer", "-fcf-protection=none"]


def built() -> Path:
    """Folder with libcuda.so.1 and cuda_load; compiled once per version of the sources and user."""
    sources = [_HERE / "cuda_stub.c", _HERE / "cuda_load.c"]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"cuda-stub-{os.getuid()}-{digest}"
    if not (folder / "done").exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        shared = [*_FLAGS, "-shared", "-fPIC", str(sources[0])]
        _compile([*shared], folder / "libcuda.so.1")
        _compile([*shared, "-DSMALL"], folder / "small.so")
        _compile([*_FLAGS, str(sources[1]), "-ldl", "-pthread"], folder / "cuda_load")
        (folder / "done").touch()
    return folder


def _compile(words: list[str], place: Path) -> None:
    fresh = place.with_name(f"{os.getpid()}.{place.name}")
    subprocess.run(["gcc", *words, "-o", str(fresh)], check=True)
    fresh.replace(place)


def copy_of_library(folder: Path) -> Path:
    """Another file, as a container's compat library is; of its functions it has only two, to be probed quickly."""
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(built() / "small.so", folder / "libcuda.so.1"))


class Load:
    """A running process that has libcuda mapped.

    Args:
        library: the file it maps; the shared stub by default.
        wrap: words before its command line.
    """

    def __init__(self, library: Path | str | None = None, wrap: tuple[str, ...] = ()) -> None:
        folder = built()
        argv = [*wrap, str(folder / "cuda_load"), str(library or folder / "libcuda.so.1")]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._ready()

    def do(self, command: str) -> int:
        """Run a command; returns the nanoseconds it took."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return int(self._line())

    def is_probed(self, call: str = "kernel", stream: int = 7) -> bool:
        """Whether a call costs what a probe costs: the fastest of five runs, as this machine may be busy."""
        return min(self.do(f"{call} 5000 {stream}") for _ in range(5)) / 5000 > FREE_NS

    def exec(self, library: Path) -> None:
        """Replace the process's image by a new one that maps another library; the pid stays."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"exec {built() / 'cuda_load'} {library}\n")
        self._process.stdin.flush()
        assert self._ready() == self.pid

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready(self) -> int:
        word, pid = self._line().split()
        assert word == "ready"
        return int(pid)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the load program has ended"
        return line
