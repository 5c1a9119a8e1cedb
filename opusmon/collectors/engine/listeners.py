"""Listening TCP sockets of this network namespace, and the processes that may be inference servers.

Reads /proc only. Command lines are looked at to find a port and a program, and go nowhere else.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from opusmon.collectors.engine.kinds import KINDS

_LISTEN = "0A"
_BLOCK_B = 1 << 16
_ARGUMENTS_B = 1 << 16
_PYTHON = re.compile(r"(python|pypy)[\d.]*$")
_FORWARDERS = ("docker-proxy", "rootlessport", "conmon", "slirp4netns", "kubectl")
_PORT = re.compile(r"(?:^|[=:])(\d{2,5})$")


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that waits for connections.

    Attributes:
        host: address it is bound to, as text.
        port: 1-65535.
        inode: of the socket; another one means another process life.
    """

    host: str
    port: int
    inode: int

    @property
    def loopback(self) -> str:
        """The loopback address that reaches it, "" when none does."""
        if self.host in ("0.0.0.0", "127.0.0.1", "::"):  # noqa: S104  (compared, not bound)
            return "127.0.0.1"
        if self.host == "::1" or self.host.startswith("127."):
            return self.host
        return ""


@dataclass(frozen=True, slots=True)
class Program:
    """A process that may be an inference server.

    Attributes:
        pid: of it.
        kind: the engine it looks like, "" for any Python program and for port forwarders of containers.
        ports: numbers its command line names that may be ports.
    """

    pid: int
    kind: str
    ports: frozenset[int]


def listeners(proc: Path = Path("/proc")) -> list[Listener]:
    """All listening TCP sockets, IPv4 and IPv6, by port; one per port, reachable by loopback where there is one."""
    found: dict[int, Listener] = {}
    for name in ("tcp", "tcp6"):
        for one in parse_table(_lines(proc / "net" / name)):
            if one.port not in found or (one.loopback and not found[one.port].loopback):
                found[one.port] = one
    return [found[port] for port in sorted(found)]


def parse_table(lines: Iterable[str]) -> Iterator[Listener]:
    """Listeners from the lines of /proc/net/tcp or tcp6, its head left out; ends at the first other socket.

    The kernel lists the listening ones first, and a busy server has a hundred thousand others.
    """
    for line in lines:
        words = line.split()
        if len(words) < 10:
            continue
        if words[3] != _LISTEN:
            return
        address, _, port = words[1].partition(":")
        yield Listener(_host(address), int(port, 16), int(words[9]))


def programs(proc: Path = Path("/proc"), own: Iterable[int] = ()) -> list[Program]:
    """Processes that may serve models, opusmon's own left out."""
    skipped = set(own)
    found = []
    for pid in _pids(proc):
        program = None if pid in skipped else _program(proc, pid)
        if program is not None:
            found.append(program)
    return found


def owners(proc: Path, pids: Iterable[int], inodes: set[int]) -> tuple[dict[int, int], int]:
    """Socket inode to the lowest of these pids that holds it, and how many of them may not be looked into."""
    found: dict[int, int] = {}
    hidden = 0
    for pid in sorted(pids, reverse=True):
        try:
            held = set(_sockets(proc / str(pid) / "fd"))
        except PermissionError:
            hidden += 1
            continue
        found.update(dict.fromkeys(inodes & held, pid))
    return found, hidden


def kind_of(comm: str, arguments: list[str]) -> str | None:
    """The engine a process looks like, "" for one that may be any, None for one that is none.

    Args:
        comm: name of its main thread, which vLLM and SGLang set.
        arguments: its command line.
    """
    words = [comm.lower(), *(Path(word).name.lower() for word in _program_words(arguments))]
    if any(word.startswith("opusmon") for word in words):
        return None
    for kind in KINDS:
        if any(word.startswith(kind.programs) for word in words):
            return kind.name
    python = _PYTHON.match(comm.lower()) or (len(words) > 1 and _PYTHON.match(words[1]))
    return "" if python or comm in _FORWARDERS else None


def _program_words(arguments: list[str]) -> Iterator[str]:
    """The executable and, of an interpreter, the script or module that it runs: an editor of vllm.py serves nothing."""
    yield from arguments[:1]
    rest = iter(arguments[1:] if arguments and _PYTHON.match(Path(arguments[0]).name) else ())
    for word in rest:
        if word == "-m":
            yield next(rest, "")
            return
        if not word.startswith("-"):
            yield word
            return


def _program(proc: Path, pid: int) -> Program | None:
    folder = proc / str(pid)
    comm = _read(folder / "comm", 64).strip()
    if not comm:
        return None
    arguments = _read(folder / "cmdline", _ARGUMENTS_B).split("\0")
    kind = kind_of(comm, [word for word in arguments if word])
    return None if kind is None else Program(pid, kind, frozenset(_ports(arguments)))


def _ports(arguments: list[str]) -> Iterator[int]:
    for word in arguments:
        match = _PORT.search(word) if len(word) < 100 else None
        if match and 0 < int(match[1]) < 65_536:
            yield int(match[1])


def _host(text: str) -> str:
    """An address as the kernel prints it: 32-bit words in the machine's byte order."""
    packed = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    if len(packed) == 4:
        return socket.inet_ntop(socket.AF_INET, packed)
    if packed[:12] == b"\0" * 10 + b"\xff\xff":
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return socket.inet_ntop(socket.AF_INET6, packed)


def _lines(path: Path) -> Iterator[str]:
    """Lines after the first, read in blocks so that the reader can stop; none where the file cannot be read."""
    try:
        with path.open(encoding="ascii", errors="replace", buffering=_BLOCK_B) as file:
            next(file, "")
            yield from file
    except OSError:
        return


def _pids(proc: Path) -> list[int]:
    try:
        return [int(name) for name in os.listdir(proc) if name.isdecimal()]  # noqa: PTH208  (thrice as fast)
    except OSError:
        return []


def _sockets(folder: Path) -> Iterator[int]:
    """Inodes of the sockets a process holds; none when it has ended.

    Raises:
        PermissionError: it is another user's.
    """
    try:
        names = os.listdir(folder)  # noqa: PTH208  (thrice as fast)
    except (FileNotFoundError, ProcessLookupError):
        return
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")  # noqa: PTH115  (thousands of these)
        except OSError:
            continue
        if target.startswith("socket:["):
            yield int(target[8:-1])


def _read(path: Path, most_b: int) -> str:
    """The head of a small file; "" where the process has gone or may not be looked at."""
    try:
        with path.open("rb") as file:
            return file.read(most_b).decode("utf-8", "replace")
    except OSError:
        return ""
