"""The system's libbpf.so.1, by which ready-compiled BPF programs are loaded.

Measured with the programs of streams: 17 ms and 1 MB, against 1.3 s and 99 MB with bcc; a hit costs the same.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterator, Sequence
from ctypes import c_bool, c_char_p, c_int, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

from opusmon.collectors.ebpf import elf, multi, prebuilt
from opusmon.collectors.ebpf.errors import ProbesUnavailable

SONAME = "libbpf.so.1"
EVERYBODY = -1
"""Process of a uprobe that is set for all of them."""

_EXPLAIN = "`opusmon doctor` says what this host lacks"
_KPROBE = 2
"""BPF_PROG_TYPE_KPROBE, which programs for uprobes are too."""
_WARN = 0
_LINE_B = 4096
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "libbpf_set_print": (c_void_p, (c_void_p,)),
    "libbpf_major_version": (c_uint32, ()),
    "libbpf_minor_version": (c_uint32, ()),
    "bpf_object__open_mem": (c_void_p, (c_char_p, c_size_t, c_void_p)),
    "bpf_object__load": (c_int, (c_void_p,)),
    "bpf_object__close": (None, (c_void_p,)),
    "bpf_object__find_program_by_name": (c_void_p, (c_void_p, c_char_p)),
    "bpf_object__find_map_fd_by_name": (c_int, (c_void_p, c_char_p)),
    "bpf_object__next_program": (c_void_p, (c_void_p, c_void_p)),
    "bpf_program__type": (c_int, (c_void_p,)),
    "bpf_program__set_expected_attach_type": (c_int, (c_void_p, c_int)),
    "bpf_program__fd": (c_int, (c_void_p,)),
    "bpf_program__attach_uprobe": (c_void_p, (c_void_p, c_bool, c_int, c_char_p, c_size_t)),
    "bpf_program__attach_tracepoint": (c_void_p, (c_void_p, c_char_p, c_char_p)),
    "bpf_link__destroy": (c_int, (c_void_p,)),
}
"""What is called, with result and arguments: all of it is in every version from 1.0 on."""

_said: deque[str] = deque(maxlen=64)
"""Warnings of libbpf since the call before the last one began, the oldest first."""


@dataclass(frozen=True, slots=True, eq=False)
class _Link:
    """A probe that is set: a `struct bpf_link`, or a descriptor. Compared by identity, because both are used again."""

    handle: int
    is_fd: bool = False


class LibbpfBackend:
    """Loads the object compiled from NAME.bpf.c for this machine. See `opusmon.collectors.ebpf.probes.Backend`.

    Its probes and programs are held by descriptors of this process, so they end with it however it ends.

    Args:
        name: of the source, without suffix.
        cflags: the bounds it must have been compiled with.
        by_multi: set uprobes by links of the kind uprobe_multi, see `opusmon.collectors.ebpf.multi`.

    Attributes:
        by_multi: as it was asked for.
        at_once: how many uprobes it removes in the time that one takes.

    Raises:
        ProbesUnavailable: there is no libbpf or no such object, or the kernel refuses the programs or has no such links.
    """

    def __init__(self, name: str, cflags: Sequence[str] = (), *, by_multi: bool = False) -> None:
        self._object: int | None = None
        self.by_multi = by_multi
        self.at_once = multi.AT_ONCE if by_multi else 1
        self._links: set[_Link] = set()
        compiled = prebuilt.find(name, cflags)
        self._lib = library()
        self._image = compiled.content  # libbpf reads it until the object is closed
        self._object = self._open(compiled.file)
        version = f"{self._lib.libbpf_major_version()}.{self._lib.libbpf_minor_version()}"
        links = ", uprobe_multi links" if by_multi else ""
        self.origin = f"libbpf {version}, {compiled.file}{links}"

    def _open(self, file: str) -> int:
        _listen(self._lib)
        opened: int | None = self._lib.bpf_object__open_mem(self._image, len(self._image), None)
        if not opened:
            raise _refused(f"{file} cannot be opened")
        uprobes = [one for one in self._programs(opened) if self._lib.bpf_program__type(one) == _KPROBE]
        for program in uprobes if self.by_multi else ():
            self._lib.bpf_program__set_expected_attach_type(program, multi.ATTACH_TYPE)
        code = self._lib.bpf_object__load(opened)
        error = _refused(f"{file} cannot be loaded", -code) if code else None
        if not code and self.by_multi and not multi.supported(self._lib.bpf_program__fd(uprobes[0])):
            error = ProbesUnavailable("the kernel has no uprobe_multi links")
        if error is not None:
            self._lib.bpf_object__close(opened)
            raise error
        return opened

    def map_fd(self, name: str) -> int:
        """File descriptor of a map.

        Raises:
            ProbesUnavailable: the object has no such map.
        """
        fd = int(self._lib.bpf_object__find_map_fd_by_name(self._handle(), name.encode()))
        if fd < 0:
            raise ProbesUnavailable(f"there is no map {name}")
        return fd

    def attach(self, path: str, address: int, program: str, *, on_return: bool = False) -> object:
        """Set a uprobe for all processes; see `Backend`."""
        what = f"{program} cannot be attached"
        found = self._program(program)
        try:
            with open(path, "rb") as file:  # noqa: PTH123  (a path of /proc/self/fd is opened as it stands)
                offset = elf.file_offset(file, address)
            if self.by_multi:
                return self._attach_multi(found, path, offset, on_return)
        except (OSError, elf.NotALibrary) as error:
            words = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise ProbesUnavailable(f"{what}: {words}", _EXPLAIN) from error
        link = self._lib.bpf_program__attach_uprobe(found, on_return, EVERYBODY, os.fsencode(path), offset)
        return self._kept(link, what)

    def _attach_multi(self, program: int, path: str, offset: int, on_return: bool) -> _Link:
        fd = multi.attach(self._lib.bpf_program__fd(program), path, offset, on_return=on_return)
        link = _Link(fd, is_fd=True)
        self._links.add(link)
        return link

    def attach_tracepoint(self, category: str, event: str, program: str) -> object:
        """Run a program at a tracepoint; see `Backend`."""
        found = self._program(program)
        link = self._lib.bpf_program__attach_tracepoint(found, category.encode(), event.encode())
        return self._kept(link, f"{program} cannot be attached to {category}:{event}")

    def detach(self, *links: object) -> None:
        """Remove probes; one that is gone is no error."""
        ours = {link for link in links if isinstance(link, _Link)} & self._links
        self._links -= ours
        multi.close([link.handle for link in ours if link.is_fd])
        for link in ours:
            if not link.is_fd:
                self._lib.bpf_link__destroy(link.handle)

    def close(self) -> None:
        """Remove all probes and programs."""
        self.detach(*self._links)
        opened, self._object = self._object, None
        if opened is not None:
            self._lib.bpf_object__close(opened)

    def _handle(self) -> int:
        if self._object is None:
            raise ProbesUnavailable("the probes have been removed")
        return self._object

    def _programs(self, opened: int) -> Iterator[int]:
        program: int | None = self._lib.bpf_object__next_program(opened, None)
        while program:
            yield program
            program = self._lib.bpf_object__next_program(opened, program)

    def _program(self, name: str) -> int:
        _listen(self._lib)
        found: int | None = self._lib.bpf_object__find_program_by_name(self._handle(), name.encode())
        if not found:
            raise ProbesUnavailable(f"there is no program {name}")
        return found

    def _kept(self, made: int | None, what: str) -> _Link:
        if not made:
            raise _refused(what)
        link = _Link(made)
        self._links.add(link)
        return link


@cache
def library() -> ctypes.CDLL:
    """libbpf, with its warnings kept for messages instead of printed.

    Raises:
        ProbesUnavailable: it is not installed, does not load, or lacks a function.
    """
    try:
        lib = ctypes.CDLL(SONAME, use_errno=True)
    except OSError as error:
        raise ProbesUnavailable(f"{SONAME} does not load: {error}", "sudo apt install libbpf1") from error
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(lib, name, None)
        if function is None:
            raise ProbesUnavailable(f"{SONAME} has no {name}", "Install libbpf 1.0 or newer")
        function.restype, function.argtypes = result, arguments
    return lib


def _listen(lib: ctypes.CDLL) -> None:
    """Keep what libbpf says from now on; bcc in the same process takes the callback for itself."""
    _said.clear()
    lib.libbpf_set_print(_PRINT)


def _refused(what: str, code: int | None = None) -> ProbesUnavailable:
    """What libbpf said first, which names the program and the cause, or else what errno means."""
    number = ctypes.get_errno() if code is None else code
    words = next((line for line in _said if line), "") or os.strerror(number)
    return ProbesUnavailable(f"{what}: {words[:200]}", _EXPLAIN)


def _keep(level: int, form: int, arguments: int) -> int:
    """Take a message of libbpf. A va_list is passed by reference on both machines."""
    if level != _WARN:
        return 0
    buffer = ctypes.create_string_buffer(_LINE_B)
    ctypes.CDLL(None).vsnprintf(buffer, c_size_t(_LINE_B), c_void_p(form), c_void_p(arguments))
    text = buffer.value.decode("utf-8", "replace").removeprefix("libbpf: ")
    _said.append("".join(letter for letter in text.split("\n")[0] if letter.isprintable()))
    return 0


_CALLBACK = ctypes.CFUNCTYPE(c_int, c_int, c_void_p, c_void_p)(_keep)
_PRINT = ctypes.cast(_CALLBACK, c_void_p)
"""libbpf keeps the address, so it lives as long as this module."""
