"""What a hit of a uprobe costs the thread that makes it, measured on this host: on code of our own, run by ourselves.

The code lies in a file in memory that no other process has, so that no thread but ours meets these probes. The programs
are those for polls. Between calls some memory is read, as a thread does that launches work: with everything still in
the caches a hit took 1.0 us where it took 1.3 us so, and 1.2 to 1.7 us per launch of a process that computes (H200).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from opusmon.collectors.ebpf import maps
from opusmon.collectors.ebpf.errors import ProbesUnavailable
from opusmon.collectors.ebpf.libbpf import LibbpfBackend
from opusmon.collectors.ebpf.probes import Backend
from opusmon.collectors.ebpf.stream_table import POLL_SLOT, cflags

CALLS = 300
"""Per kind of probe, and as many without any: 35 ms of one core in all."""
TRIES = 3
LEAST_NS, MOST_NS = 100, 100_000
"""What is beyond that was no hit, or something else came between."""
_MACHINE = "x86_64"
_PAGE_B = 4096
_EMULATED, _STEPPED = _PAGE_B, _PAGE_B + 64
_CODE = {
    _EMULATED: bytes.fromhex("55 31c0 5d c3"),  # push rbp; xor eax, eax; pop rbp; ret
    _STEPPED: bytes.fromhex("31c0 c3"),  # xor eax, eax; ret
}
"""Functions by their address in the file: the kernel emulates the first instruction of one, and single-steps the
other's. They return 0, which is not CUDA_ERROR_NOT_READY, so that the programs count nothing but the hit."""
_READ_B = 256 << 10

_Function = Callable[[int, int], int]


@dataclass(frozen=True, slots=True)
class Price:
    """What a hit costs, counting included, ns.

    Attributes:
        entry_ns: at the entry of a function whose first instruction the kernel emulates.
        step_ns: what it costs more where the kernel has to single-step that.
        return_ns: at the return, beside a probe at the entry.
        measured: on this host; else on others.
    """

    entry_ns: int
    step_ns: int
    return_ns: int
    measured: bool = False

    def hit_ns(self, *, cheap: bool) -> int:
        """At an entry; `cheap` says that the kernel emulates the instruction."""
        return self.entry_ns if cheap else self.entry_ns + self.step_ns

    def pair_ns(self, *, cheap: bool) -> int:
        """Of one hit where each call has two, at entry and return."""
        return (self.hit_ns(cheap=cheap) + self.return_ns) // 2

    def words(self) -> str:
        """For people; the sheet of costs shows what begins so."""
        origin = "measured here" if self.measured else "assumed, as measured on H200 hosts"
        return f"a probe hit is taken to cost {self.entry_ns / 1e3:.2f} us at entry, {self.return_ns / 1e3:.2f} us at return ({origin})"


ASSUMED = Price(1_500, 6_500, 1_500)
"""1.2-1.7 us per launch on H200 hosts where the kernel emulates the first instruction, 7.7 us where it single-steps it."""


def price_of(backend: Backend) -> Price:
    """The price of a hit of such probes as `backend` sets; `ASSUMED` where it cannot be measured.

    Blocks for 0.2 s; for `TRIES` times that on a host so busy that what it measures can be no price.

    bcc would have to compile the programs once more, and machine code is at hand for x86-64 only.
    """
    if not isinstance(backend, LibbpfBackend) or platform.machine() != _MACHINE:
        return ASSUMED
    try:
        for _ in range(TRIES):
            with contextlib.closing(LibbpfBackend("streams", cflags(), by_multi=backend.by_multi)) as own:
                if price := _measured(own):
                    return price
    except (ProbesUnavailable, OSError):
        pass
    return ASSUMED


def _measured(backend: LibbpfBackend) -> Price | None:
    """None when what was measured can be no price."""
    with _own_code() as (path, functions):
        bare = {place: _call_ns(function) for place, function in functions.items()}
        backend.attach(path, _EMULATED, "poll_stream")
        backend.attach(path, _STEPPED, "poll_stream")
        entry, stepped = (_call_ns(functions[place]) - bare[place] for place in (_EMULATED, _STEPPED))
        backend.attach(path, _EMULATED, "poll_end", on_return=True)
        both = _call_ns(functions[_EMULATED]) - bare[_EMULATED]
        hits = maps.read_percpu(backend.map_fd("counts"), POLL_SLOT)
        backend.close()
    if hits != 4 * CALLS or not LEAST_NS <= entry < both <= MOST_NS or stepped > MOST_NS:
        return None
    return Price(round(entry), max(0, round(stepped - entry)), round(both - entry), measured=True)


@contextlib.contextmanager
def _own_code() -> Iterator[tuple[str, dict[int, _Function]]]:
    """A file with `_CODE` that this process alone maps: its path, and its functions by address.

    Raises:
        OSError: such a file cannot be made, or not be run.
    """
    fd = os.memfd_create("opusmon")
    try:
        os.write(fd, _file())
        with mmap.mmap(fd, 2 * _PAGE_B, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC) as image:
            address = np.frombuffer(image, np.uint8).ctypes.data
            kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong)
            yield f"/proc/self/fd/{fd}", {place: kind(address + place) for place in _CODE}
    finally:
        os.close(fd)


def _file() -> bytes:
    """An ELF64 library of one segment, which is all of the file, without symbols."""
    size = 2 * _PAGE_B
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head = ident + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 1, 64, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, size, size, _PAGE_B)
    content = bytearray((head + segment).ljust(size, b"\0"))
    for place, code in _CODE.items():
        content[place : place + len(code)] = code
    return bytes(content)


def _call_ns(function: _Function) -> float:
    """Median time of a call, after other memory has been read."""
    now, other, took = time.perf_counter_ns, np.zeros(_READ_B // 8), []
    for _ in range(CALLS):
        other.sum()
        began = now()
        function(0, 17)
        took.append(now() - began)
    return statistics.median(took)
