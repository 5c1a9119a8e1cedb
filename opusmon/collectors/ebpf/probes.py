"""A backend that loads BPF programs and sets uprobes: a small interface, and bcc behind it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from opusmon.collectors.ebpf import bcc_import, headers
from opusmon.collectors.ebpf.errors import ProbesUnavailable

_EXPLAIN = "`opusmon doctor` says what this host lacks"


class Backend(Protocol):
    """Programs in the kernel, their maps and their probes. Not for use by two threads at a time."""

    @property
    def origin(self) -> str:
        """What it was made with, for people."""
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

    def detach(self, link: object) -> None:
        """Remove a probe; a uprobe may take 0.1 s, while the kernel waits for those that are in it."""
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

    def detach(self, link: object) -> None:
        """Remove a probe. bcc fails on the trace of it in tracefs where that was mounted later; it is gone then too."""
        if isinstance(link, _Tracepoint):
            with contextlib.suppress(Exception):
                self._bpf.detach_tracepoint(link.point)
            return
        # Its descriptor is closed first, and that removes the probe.
        with contextlib.suppress(Exception):
            self._bpf.detach_uprobe_event(link)
        if self._bpf.uprobe_fds.pop(link, None) is not None:
            self._bcc.BPF._num_open_probes -= 1  # noqa: SLF001  (bcc has a quota and counts on its own)

    def close(self) -> None:
        """Remove everything; one probe that bcc stumbles over does not keep the others."""
        bpf = self._bpf
        if bpf is None:
            return
        atexit.unregister(self.close)
        for link in list(bpf.uprobe_fds):
            self.detach(link)
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


def source(name: str) -> str:
    """Text of a BPF C file beside this module."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
