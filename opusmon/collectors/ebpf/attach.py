"""Which libraries are probed: each file once, however many processes and containers map it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from opusmon.collectors.ebpf import elf
from opusmon.collectors.ebpf.errors import ProbesUnavailable
from opusmon.collectors.ebpf.libcuda import Mapping as Mapped
from opusmon.collectors.ebpf.libcuda import Scan
from opusmon.collectors.ebpf.probes import Backend
from opusmon.collectors.ebpf.symbols import Entry, Group

MAX_LIBRARIES = 11
"""bcc allows 1000 probes at once; a library takes up to 70."""
KEEP_UNUSED = 4
"""Files that no process maps any more stay probed, so that the next process is seen from its first call."""
RETRY_SCANS = 30
"""A file that could not be opened or read is tried again after so many scans."""

FileKey = tuple[int, int]
Open = Callable[[int, Mapped], int]


@dataclass(slots=True)
class Library:
    """A probed file.

    Attributes:
        fd: keeps its inode, and the name under which it was probed.
        path: as the first process saw it.
        targets: address and entry of each function, by group.
        cheap: hits cost the kernel no single step.
        links: the probes that are set, by group.
        used: of the latest scans, the last one in which a process mapped it.
    """

    fd: int
    path: str
    targets: Mapping[Group, Sequence[tuple[int, Entry]]]
    cheap: bool
    links: dict[Group, list[object]] = field(default_factory=dict)
    used: int = 0


class Libraries:
    """Sets and removes probes as libraries come and go. Its calls block: keep them on one thread.

    Args:
        backend: sets the probes.
        entries: what to probe, by symbol.
        open_mapped: gives a descriptor of the file behind a mapping.
        machine: as `platform.machine()` says it.
    """

    def __init__(
        self,
        backend: Backend,
        entries: Mapping[str, Entry],
        open_mapped: Open,
        machine: str | None = None,
    ) -> None:
        self._backend = backend
        self._entries = entries
        self._open = open_mapped
        self._machine = machine or platform.machine()
        self._files: dict[tuple[str, int], FileKey] = {}
        self._libraries: dict[FileKey, Library] = {}
        self._scans = 0
        self._unread: dict[str, str] = {}
        self._partly: dict[str, str] = {}
        self.on: set[Group] = {"always"}

    @property
    def probed(self) -> int:
        """How many files have probes on them."""
        return sum(any(library.links.values()) for library in self._libraries.values())

    @property
    def refused(self) -> dict[str, str]:
        """Path to why that library, or part of it, is not probed."""
        return {**self._unread, **self._partly}

    @property
    def cheap(self) -> bool:
        """Whether no hit costs a single step."""
        return all(library.cheap for library in self._libraries.values())

    def lacks(self, symbols: Collection[str]) -> list[str]:
        """Those of `symbols` that no probed file exports."""
        had = {
            entry.symbol
            for library in self._libraries.values()
            for targets in library.targets.values()
            for _, entry in targets
        }
        return sorted(set(symbols) - had)

    def follow(self, scan: Scan) -> None:
        """Probe what is new; forget files that have long been unused."""
        self._scans += 1
        if self._scans % RETRY_SCANS == 0:
            self._unread.clear()
        for pid, mappings in scan.processes.items():
            for mapping in mappings:
                self._use(pid, mapping)
        unused = [key for key, library in self._libraries.items() if library.used < self._scans]
        unused.sort(key=lambda key: self._libraries[key].used)
        for key in unused[: max(0, len(unused) - KEEP_UNUSED)]:
            self._drop(key)

    def switch(self, group: Group, on: bool) -> None:
        """Set or remove the probes of a group on all libraries."""
        if on:
            self.on.add(group)
        else:
            self.on.discard(group)
        for library in self._libraries.values():
            if on:
                self._set(library, group)
            else:
                self._unset(library, group)

    def _use(self, pid: int, mapping: Mapped) -> None:
        key = self._files.get(mapping.key)
        if key is None and mapping.path not in self._unread:
            key = self._add(pid, mapping)
        if key in self._libraries:
            self._libraries[key].used = self._scans

    def _add(self, pid: int, mapping: Mapped) -> FileKey | None:
        """Probe the file behind a mapping, unless it is one that is probed already."""
        try:
            fd = self._open(pid, mapping)
        except OSError as error:
            if not isinstance(error, FileNotFoundError | ProcessLookupError):
                self._unread[mapping.path] = f"cannot be opened: {error.strerror}"
            return None  # the process has ended, or its file is gone
        info = os.fstat(fd)
        key = (info.st_dev, info.st_ino)
        library = None if key in self._libraries else self._read(fd, mapping.path)
        if library is None:
            os.close(fd)
        else:
            self._libraries[key] = library
            for group in self.on:
                self._set(library, group)
        if key in self._libraries:
            self._files[mapping.key] = key
        return key

    def _read(self, fd: int, path: str) -> Library | None:
        if len(self._libraries) >= MAX_LIBRARIES:
            self._unread[path] = f"{MAX_LIBRARIES} other libraries are probed already"
            return None
        try:
            with os.fdopen(os.dup(fd), "rb") as file:
                found = elf.by_address(elf.functions(file, self._entries.keys()))
        except elf.NotALibrary as error:
            self._unread[path] = f"is not a library that can be read: {error}"
            return None
        if not found:
            self._unread[path] = "exports none of the functions that are probed"
            return None
        places = {function.name: elf.entry(function, self._machine) for function in found.values()}
        targets: dict[Group, list[tuple[int, Entry]]] = {"always": [], "launch": [], "poll": []}
        for name, entry in self._entries.items():
            if name in places:
                targets[entry.group].append((places[name][0], entry))
        return Library(fd, path, targets, all(cheap for _, cheap in places.values()))

    def _set(self, library: Library, group: Group) -> None:
        if library.links.get(group):
            return
        links = library.links.setdefault(group, [])
        path = f"/proc/self/fd/{library.fd}"
        for address, entry in library.targets[group]:
            try:
                # The return first: a call that enters between the two must not leave its entry behind.
                if entry.on_return:
                    links.append(self._backend.attach(path, address, entry.on_return, on_return=True))
                if entry.program:
                    links.append(self._backend.attach(path, address, entry.program))
            except ProbesUnavailable as error:
                self._partly[library.path] = f"{entry.symbol}: {error}"

    def _unset(self, library: Library, group: Group) -> None:
        self._backend.detach(*library.links.pop(group, []))

    def _drop(self, key: FileKey) -> None:
        library = self._libraries.pop(key)
        self._files = {mapped: file for mapped, file in self._files.items() if file != key}
        for group in list(library.links):
            self._unset(library, group)
        self._partly.pop(library.path, None)
        os.close(library.fd)

    def close(self) -> None:
        """Let go of the files; the backend removes the probes."""
        for library in self._libraries.values():
            os.close(library.fd)
        self._libraries.clear()
