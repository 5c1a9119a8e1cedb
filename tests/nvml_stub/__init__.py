"""A libnvidia-ml.so.1 without a GPU: builds the C stub, writes its configuration, runs programs on it.

The configuration file is read again whenever it is replaced, so faults come and go while a program runs. Lines:

    devices N | profile h200|b200|a100|ada|gb10|mig | driver VERSION
    costs real|load             calls take as long as on an idle H200, or one with its memory busy
    set GPU KEY VALUE           power temp mem_temp sm_clock mem_clock gpu_busy mem_busy mask mem_total mem_used
                                bus_width power_limit ecc_corrected ecc_uncorrected remapped_c remapped_u
                                remap_pending remap_failed pcie_replays event_mask mig gpm zero_total
    gpm GPU ID VALUE [RC [GI]]                      a GPM metric
    field GPU ID SCOPE VALUE [RC [TYPE [RATE]]]     a field value; RATE is added per second
    proc GPU PID MEM_B SM c|g [GI]                  a process
    sample GPU PID SM                               a stray process utilization sample
    mig GPU GI CI MEM_TOTAL MEM_USED                a MIG device
    event SEQ GPU TYPE VALUE [GI]                   an event, delivered once
    fault CALL GPU return RC | hang | delay US | sentinel | nan

NVML_STUB_LOG names a file to which each call but event waits is written: name, GPU, and for field values ID:SCOPE each.
The NVLink counters answer scope 4294967295 (all links) with their sum, on b200 not at all.

GPU is an index or `*`; CALL is a C function name or `*` (every call on a device).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml_stub.c")
XID_EVENT = 0x8
"""nvmlEventTypeXidCriticalError."""


def library_dir() -> Path:
    """Folder with the compiled stub; compiled once per version of the source and user."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"nvml-stub-{os.getuid()}-{digest}"
    library = folder / "libnvidia-ml.so.1"
    if not library.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        fresh = folder / f"{os.getpid()}.so"
        flags = ["-std=gnu11", "-O2", "-Wall", "-shared", "-fPIC"]
        subprocess.run(["gcc", *flags, str(SOURCE), "-o", str(fresh), "-lm", "-lpthread"], check=True)
        fresh.replace(library)
    return folder


class Stub:
    """One configuration of the stub.

    Args:
        folder: where the configuration file goes; one folder per Stub.
    """

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder) / "nvml_stub.conf"
        self.lines: list[str] = []
        self._head = ["devices 1", "profile h200"]
        self._events = 0
        self._library: Path | None = None

    def build(self) -> Stub:
        """Compile the library if need be and write the configuration."""
        self._library = library_dir()
        self._write()
        return self

    def configure(
        self,
        *,
        devices: int = 1,
        profile: str = "h200",
        driver: str = "580.159.04",
        lines: Iterable[str] = (),
    ) -> Stub:
        """Replace the whole configuration."""
        self._head = [f"devices {devices}", f"profile {profile}", f"driver {driver}"]
        self.lines = list(lines)
        self._write()
        return self

    def add(self, *lines: str) -> None:
        """Add lines; where two say the same thing the later one wins (the first one for faults)."""
        self.lines += lines
        self._write()

    def remove(self, start: str) -> None:
        """Drop the lines that begin with `start`."""
        self.lines = [line for line in self.lines if not line.startswith(start)]
        self._write()

    def set(self, gpu: int | str, key: str, value: float) -> None:
        """Give a simple value."""
        self.add(f"set {gpu} {key} {value}")

    def fault(self, call: str, kind: str, *, gpu: int | str = "*") -> None:
        """Make a call fail; `kind` is "return 15", "hang", "delay 5000", "sentinel" or "nan"."""
        self.add(f"fault {call} {gpu} {kind}")

    def mend(self) -> None:
        """Drop all faults; calls that hang return."""
        self.remove("fault ")

    def event(self, gpu: int, value: int, kind: int = XID_EVENT) -> None:
        """Deliver an event (an XID unless `kind` says otherwise) to whoever waits."""
        self._events += 1
        self.add(f"event {self._events} {gpu} {kind} {value}")

    def log(self, path: Path) -> dict[str, str]:
        """As `env`, and calls are written to `path`."""
        return {**self.env(), "NVML_STUB_LOG": str(path)}

    def env(self) -> dict[str, str]:
        """Environment for a program that should see the stub; the current one with two variables changed."""
        folder = self._library or library_dir()
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]))
        return {**os.environ, "LD_LIBRARY_PATH": path, "NVML_STUB_CONFIG": str(self.path)}

    def _write(self) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text("\n".join([*self._head, *self.lines, ""]), encoding="utf-8")
        fresh.replace(self.path)
