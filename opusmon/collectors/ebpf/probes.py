"""What loads BPF programs and sets probes: a small interface, and the choice between the two behind it.

libbpf with a ready-compiled object is preferred: it starts at once, is small, and needs neither compiler nor headers.
bcc compiles the same source on the host, where libbpf is not installed or has no object.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from opusmon.collectors.ebpf import bcc_import, headers, tracefs
from opusmon.collectors.ebpf.bcc_text import source
from opusmon.collectors.ebpf.errors import ProbesUnavailable
from opusmon.collectors.ebpf.libbpf import LibbpfBackend
from opusmon.collectors.facilities_ebpf import multi_uprobes
from opusmon.collectors.facility import CAP_SYS_ADMIN, Host

VARIABLE = "OPUSMON_BPF"
"""Environment variable that forces a backend."""

_EXPLAIN = "`opusmon doctor` says what this host lacks"


class Backend(Protocol):
    """Programs in the kernel, their maps and their probes. Not for use by two threads at a time."""

    @property
    def origin(self) -> str:
        """What it was made with, for people."""
        ...

    @property
    def at_once(self) -> int:
        """How many uprobes it removes in the time that one takes."""
        ...

    def map_fd(self, name: str) -> int:
        """File descriptor of a map; the backend owns it."""
        ...

    def attach(self, path: str, address: int, program: str, *, on_return: bool = False) -> object:
        """Set a uprobe for all processes.

        Args:
            path: the library; the file it names at this moment is probed.
            address: virtual address in it, relative to its load address.
            program: name of the BPF function.
            on_return: run it when the function returns.

        Returns:
            What `detach` takes.

        Raises:
            ProbesUnavailable: the kernel refuses.
        """
        ...

    def attach_tracepoint(self, category: str, event: str, program: str) -> object:
        """Run a program at a tracepoint of the kernel, for example ("sched", "sched_switch").

        Returns:
            What `detach` takes.

        Raises:
            ProbesUnavailable: the kernel has no such tracepoint, or refuses.
        """
        ...

    def detach(self, *links: object) -> None:
        """Remove probes; `at_once` uprobes may take 0.1 s, while the kernel waits for those that are in them."""
        ...

    def close(self) -> None:
        """Remove all probes and programs. Harmless when called again."""
        ...


@dataclass(frozen=True, slots=True)
class _Tracepoint:
    point: str


class BccBackend:
    """Compiles the C source on this host; 1 to 2 s and some 130 MB.

    Args:
        source: C text in bcc's dialect.
        cflags: compiler flags.

    Raises:
        ProbesUnavailable: bcc or headers are missing, or the kernel refuses the programs.
    """

    at_once = 1

    def __init__(self, source: str, cflags: Sequence[str] = ()) -> None:
        found = headers.find()
        if found.source is not None:
            os.environ["BCC_KERNEL_SOURCE"] = str(found.source)
        self._bcc = bcc_import.load()
        self._fds: dict[str, int] = {}
        self._bpf: Any = None
        with _unavailable("the probes do not compile"):
            self._bpf = self._bcc.BPF(text=source, cflags=list(cflags))
        # bcc's own clean-up at exit stops at the first probe that fails and prints a traceback.
        atexit.unregister(self._bpf.cleanup)
        atexit.register(self.close)
        _give_back_memory()
        self.origin = f"bcc {getattr(self._bcc, '__version__', '?')}, headers {found.origin}"

    def map_fd(self, name: str) -> int:
        """File descriptor of a map."""
        if name not in self._fds:
            self._fds[name] = int(self._bpf[name].map_fd)
        return self._fds[name]

    def attach(self, path: str, address: int, program: str, *, on_return: bool = False) -> object:
        """Set a uprobe for all processes; see `Backend`."""
        place: Callable[..., Any] = self._bpf.attach_uretprobe if on_return else self._bpf.attach_uprobe
        before = set(self._bpf.uprobe_fds)
        with _unavailable(f"{program} cannot be attached"):
            place(name=path, addr=address, fn_name=program)
        fresh = set(self._bpf.uprobe_fds) - before
        if len(fresh) != 1:
            raise ProbesUnavailable(f"{program}: the place is probed already")
        return fresh.pop()

    def attach_tracepoint(self, category: str, event: str, program: str) -> object:
        """Run a program at a tracepoint; see `Backend`. A tracepoint takes one program."""
        point = f"{category}:{event}"
        if point.encode() in self._bpf.tracepoint_fds:
            raise ProbesUnavailable(f"{program}: {point} is probed already")
        with _unavailable(f"{program} cannot be attached to {point}"):
            self._bpf.attach_tracepoint(tp=point, fn_name=program)
        return _Tracepoint(point)

    def detach(self, *links: object) -> None:
        """Remove probes."""
        for link in links:
            self._detach(link)

    def _detach(self, link: object) -> None:
        """Remove a probe: closing its descriptor does. bcc would then look for a trace of it in tracefs and complain."""
        if isinstance(link, _Tracepoint):
            with contextlib.suppress(Exception):
                self._bpf.detach_tracepoint(link.point)
            return
        if tracefs.mounted():
            with contextlib.suppress(Exception):
                self._bpf.detach_uprobe_event(link)
        elif link in self._bpf.uprobe_fds:
            self._bcc.lib.bpf_close_perf_event_fd(self._bpf.uprobe_fds[link])
        if link in self._bpf.uprobe_fds:
            self._bpf._del_uprobe_fd(link)  # noqa: SLF001  (bcc has a quota and counts its probes)

    def close(self) -> None:
        """Remove everything; one probe that bcc stumbles over does not keep the others."""
        bpf = self._bpf
        if bpf is None:
            return
        atexit.unregister(self.close)
        self.detach(*bpf.uprobe_fds)
        self._bpf = None
        with contextlib.suppress(Exception):
            bpf.cleanup()


def _give_back_memory() -> None:
    """Hand to the kernel what the compiler has freed: 27 of 163 MB. Only glibc has the call."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def _unavailable(what: str) -> Iterator[None]:
    """Turn what bcc raises (plain exceptions) into a reason; what its compiler prints went to stderr."""
    try:
        yield
    except Exception as error:
        words = str(error).splitlines() or [type(error).__name__]
        raise ProbesUnavailable(f"{what}: {words[0][:200]}", _EXPLAIN) from error


def load(name: str, cflags: Sequence[str] = (), host: Host | None = None) -> Backend:
    """Load the programs of NAME.bpf.c by whatever this host has.

    `OPUSMON_BPF=libbpf` or `OPUSMON_BPF=bcc` in the environment forces one; nothing else is tried then.

    Args:
        name: of a source beside this module, without suffix.
        cflags: its bounds, as compiler flags.
        host: where to look for the variable and for capabilities.

    Raises:
        ProbesUnavailable: neither way works, or the forced one does not, or the variable has another value.
    """
    view = host or Host()
    forced = view.env.get(VARIABLE, "")
    if forced not in ("", "libbpf", "bcc"):
        raise ProbesUnavailable(f"{VARIABLE} is neither libbpf nor bcc", f"unset {VARIABLE}")
    if forced == "bcc":
        return BccBackend(source(name), cflags)
    if forced == "libbpf":
        return _by_libbpf(name, cflags, view)
    return _either(name, cflags, view)


def _by_libbpf(name: str, cflags: Sequence[str], host: Host) -> Backend:
    """By uprobe_multi links where the kernel has them.

    Raises where this process has too few capabilities for the other kind of uprobe, before anything is loaded.
    """
    if multi_uprobes(host.release):
        try:
            return LibbpfBackend(name, cflags, by_multi=True)
        except ProbesUnavailable:
            if not host.has_cap(CAP_SYS_ADMIN):
                raise
    elif not host.has_cap(CAP_SYS_ADMIN):
        raise ProbesUnavailable("kernels before 6.6 let only CAP_SYS_ADMIN set uprobes by libbpf")
    return LibbpfBackend(name, cflags)


def _either(name: str, cflags: Sequence[str], host: Host) -> Backend:
    try:
        return _by_libbpf(name, cflags, host)
    except ProbesUnavailable as error:
        why = error.why
    try:
        backend = BccBackend(source(name), cflags)
    except ProbesUnavailable as error:
        reason = f"neither libbpf nor bcc can set probes: {why.reason}; {error.why.reason}"
        raise ProbesUnavailable(reason, why.remedy or error.why.remedy) from error
    backend.origin += f" (not libbpf: {why.reason})"
    return backend
