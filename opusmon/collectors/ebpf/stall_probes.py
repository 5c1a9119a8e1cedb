"""The probes of the stalls collector: on libcuda, on libssl, on tracepoints. Its calls block: keep them on one thread."""

from __future__ import annotations

from opusmon.collectors.ebpf.attach import Libraries, Open
from opusmon.collectors.ebpf.errors import ProbesUnavailable
from opusmon.collectors.ebpf.libcuda import Scan
from opusmon.collectors.ebpf.probes import Backend
from opusmon.collectors.ebpf.stall_btf import exit_code_offset
from opusmon.collectors.ebpf.stall_maps import OF_CUDA, OF_TLS, StallMaps, descendants, parents
from opusmon.collectors.ebpf.stall_ration import GROUPS, Sampled
from opusmon.collectors.ebpf.stall_tracepoints import POINTS, Point, misfit
from opusmon.collectors.ebpf.symbols import STALL_ENTRIES, TLS_ENTRIES
from opusmon.jit_words import COMPILERS


class StallProbes:
    """Sets and removes probes as processes come and go.

    Args:
        backend: sets them.
        maps: filled with what the programs need to know.
        open_mapped: gives a descriptor of the file behind a mapping.
        threshold_ns: shorter waits are not reported.
        tls_threshold_ns: faster handshakes are not reported.

    Attributes:
        missing: tracepoint ("sched_switch") to what there is none of without it, and why.
        has_exit_codes: the kernel says how a program ended.
        has_syscalls: it says which system call a thread is blocked in.
    """

    def __init__(
        self, backend: Backend, maps: StallMaps, open_mapped: Open, threshold_ns: int, tls_threshold_ns: int
    ) -> None:
        self.backend = backend
        self.maps = maps
        self.cuda = Libraries(backend, STALL_ENTRIES, open_mapped)
        self.tls = Libraries(backend, TLS_ENTRIES, open_mapped)
        self.cuda.on |= set(GROUPS)
        self.missing: dict[str, tuple[str, str]] = {}
        self.has_syscalls = True
        self._adopted: set[int] = set()
        exit_code_at = exit_code_offset()
        self.has_exit_codes = bool(exit_code_at)
        maps.configure(threshold_ns, tls_threshold_ns, exit_code_at)
        maps.name_compilers(COMPILERS)
        for point in POINTS:
            self._set(point)

    @property
    def cheap(self) -> bool:
        """Whether no hit costs a single step."""
        return self.cuda.cheap

    def is_on(self, group: Sampled) -> bool:
        """Whether a group is set, or about to be."""
        return group in self.cuda.on

    def switch(self, group: Sampled, on: bool) -> None:
        """Set or remove a group."""
        self.cuda.switch(group, on)

    def follow(self, scan: Scan, tls_scan: Scan) -> None:
        """Probe what is new.

        Args:
            scan: processes that map libcuda.
            tls_scan: those among the watched that map libssl.
        """
        flags = dict.fromkeys(scan.processes, OF_CUDA)
        for pid in tls_scan.processes:
            flags[pid] = flags.get(pid, 0) | OF_TLS
        self.maps.watch(flags)
        self.cuda.follow(scan)
        self.tls.follow(tls_scan)
        kin = descendants(scan.processes, parents())
        self.maps.adopt({pid: root for pid, root in kin.items() if pid not in self._adopted})
        self._adopted = set(kin)

    def close(self) -> None:
        """Remove everything."""
        self.backend.close()
        self.cuda.close()
        self.tls.close()

    def _set(self, point: Point) -> None:
        why = misfit(point)
        for program in () if why else point.programs:
            try:
                self.backend.attach_tracepoint(point.category, point.event, program)
            except ProbesUnavailable as error:
                why = str(error)
                continue
            self.has_syscalls &= program != "on_switch_plain"
            return
        self.missing[point.event] = (point.serves, why)
