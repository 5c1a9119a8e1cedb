"""Compiles the BPF sources to the objects that are shipped: `python tests/bpf_objects.py` after a change in one.

Needs clang, llvm-strip and the headers of linux-libc-dev and libbpf-dev. Sources go in through stdin and nothing but
types of the maps stays of the debug information, so that no path of this machine gets into an object.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from opusmon.collectors.ebpf import prebuilt, source_text, stall_maps, stream_table

MACHINES = ("x86_64", "aarch64")
SOURCES: dict[str, Callable[[str], list[str]]] = {
    "streams": stream_table.cflags,
    "stalls": stall_maps.cflags,
}
"""Name of a source to the function that says its flags on a machine."""

_FLAGS = (
    "-target",
    "bpf",
    "-O2",
    "-g",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unused-parameter",
    "-fdebug-compilation-dir=.",
)


def clang_version() -> str:
    """Of the clang here, "14.0.6"; "" when there is none."""
    if shutil.which("clang") is None:
        return ""
    done = subprocess.run(["clang", "--version"], capture_output=True, text=True, check=True)
    match = re.search(r"version (\d+\.\d+\.\d+)", done.stdout)
    return match[1] if match else ""


def compiled(name: str, machine: str, folder: Path = source_text.SOURCES) -> bytes:
    """The object of a source in `folder`, whose headers lie where ours do, for a machine."""
    source = (folder / f"{name}.bpf.c").read_text(encoding="utf-8")
    text = source_text.inlined(source, source_text.read_from(source_text.SOURCES))
    triplet = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    flags = [*_FLAGS, f"-DMACHINE_{machine}", *SOURCES[name](machine), f"-I/usr/include/{triplet}"]
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "object"
        command = ["clang", *flags, "-x", "c", "-", "-c", "-o", str(place)]
        subprocess.run(command, input=text.encode("utf-8"), check=True)
        strip = ["llvm-strip", "-g", "--discard-all", "-R", ".BTF.ext", "-R", ".llvm_addrsig"]
        subprocess.run([*strip, str(place)], check=True)
        return place.read_bytes()


def main() -> None:
    """Write all objects and the manifest."""
    prebuilt.FOLDER.mkdir(exist_ok=True)
    entries = {}
    for name, flags in SOURCES.items():
        for machine in MACHINES:
            content, file = compiled(name, machine), prebuilt.file_name(name, machine)
            (prebuilt.FOLDER / file).write_bytes(content)
            entries[file] = {
                "sha256": hashlib.sha256(content).hexdigest(),
                "source_sha256": prebuilt.source_sha256(name),
                "cflags": flags(machine),
                "clang": clang_version(),
            }
            print(f"{file}: {len(content)} bytes")
    text = json.dumps(entries, indent=2) + "\n"
    (prebuilt.FOLDER / prebuilt.MANIFEST).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
