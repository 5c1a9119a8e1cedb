"""Which listeners are worth asking for /metrics, and when: the policy, without any network.

A stray GET must not disturb a server. So only listeners of likely programs and on likely ports are asked, a few per
scan, the likeliest first; once when they appear, again after a minute (an engine may still load its model), then
every five minutes. A port out of the range that the kernel hands out is asked only where the command line of its
owner names it: those are mostly sockets of NCCL, ZeroMQ and torch.distributed, which do not speak HTTP.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from opusmon.clock import NS
from opusmon.collectors.engine import listeners as sockets
from opusmon.collectors.engine.kinds import BY_NAME, KINDS
from opusmon.collectors.engine.listeners import Listener, Program

SCAN_NS = 10 * NS
PER_SCAN = 4
AGAIN_NS = (60 * NS, 300 * NS)
"""Waits before the second and every later question."""
EPHEMERAL = (32_768, 60_999)
"""Linux's default of net.ipv4.ip_local_port_range."""

NOT_HTTP = frozenset(
    {21, 22, 23, 25, 53, 88, 110, 111, 139, 143, 179, 389, 445, 465, 514, 587, 631, 636, 873, 993, 995}
    | {1433, 1521, 1883, 2049, 3306, 3389, 4369, 5432, 5671, 5672, 5678, 6379, 6380, 8125, 9042, 9092, 9093}
    | {10001, 11211, 25672, 26379, 27017, 27018, 50051, 61613}
)
"""Ports of well-known services that speak something else: never asked."""
_TORCH = range(29_400, 29_600)
"""MASTER_PORT of torch.distributed and vLLM's data-parallel RPC."""
KNOWN_PORTS: frozenset[int] = frozenset(port for kind in KINDS for port in kind.ports)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A listener to ask.

    Attributes:
        listener: where.
        pid: its owner, 0 where that may not be known.
        kind: the engine it looks like, "" for none in particular.
        rank: 0 is the likeliest.
    """

    listener: Listener
    pid: int
    kind: str
    rank: int

    @property
    def paths(self) -> tuple[str, ...]:
        """Where its page may be, the likeliest first."""
        return BY_NAME[self.kind].paths if self.kind else ("/metrics", "/prometheus/metrics")


@dataclass(frozen=True, slots=True)
class View:
    """What was seen in one scan.

    Attributes:
        candidates: likely listeners, the likeliest first.
        programs: processes that look like an engine, whether or not a listener of theirs was seen.
        remote: likely listeners that loopback does not reach.
        hidden: likely processes whose sockets may not be looked at.
        ports: all that have a listener.
    """

    candidates: tuple[Candidate, ...] = ()
    programs: tuple[Program, ...] = ()
    remote: tuple[Candidate, ...] = ()
    hidden: int = 0
    ports: frozenset[int] = frozenset()


def look(
    proc: Path = Path("/proc"), own: Iterable[int] = (), only_pids: frozenset[int] = frozenset()
) -> View:
    """Scan this host. Blocks for milliseconds; run it in a thread."""
    waiting = [one for one in sockets.listeners(proc) if one.port not in NOT_HTTP and one.port not in _TORCH]
    likely = sockets.programs(proc, own)
    inodes = {one.inode for one in waiting}
    held, hidden = sockets.owners(proc, (program.pid for program in likely), inodes)
    return replace(choose(waiting, likely, held, ephemeral(proc), only_pids), hidden=hidden)


def choose(
    waiting: Sequence[Listener],
    likely: Sequence[Program],
    held: Mapping[int, int],
    ephemeral_ports: tuple[int, int] = EPHEMERAL,
    only_pids: frozenset[int] = frozenset(),
) -> View:
    """Rank listeners by their owner and port.

    Args:
        waiting: listeners.
        likely: processes that may serve models.
        held: socket inode to its owner among those.
        ephemeral_ports: first and last port that the kernel hands out by itself.
        only_pids: owners to accept, all when empty.
    """
    by_pid = {program.pid: program for program in likely}
    by_port = {port: program for program in reversed(likely) if program.kind for port in program.ports}
    found = []
    for listener in waiting:
        owner = by_pid.get(held.get(listener.inode, 0)) or by_port.get(listener.port)
        rank = _rank(listener, owner, ephemeral_ports)
        pid = owner.pid if owner else 0
        if rank is not None and (not only_pids or pid in only_pids):
            found.append(Candidate(listener, pid, owner.kind if owner else "", rank))
    found.sort(key=lambda one: (one.rank, one.listener.port))
    return View(
        tuple(one for one in found if one.listener.loopback),
        tuple(program for program in likely if program.kind),
        tuple(one for one in found if not one.listener.loopback and one.kind),
        ports=frozenset(listener.port for listener in waiting),
    )


def _rank(listener: Listener, owner: Program | None, ephemeral_ports: tuple[int, int]) -> int | None:
    """How likely a listener is an engine's, 0 most; None for not worth a question."""
    port = listener.port
    if owner is not None and port in owner.ports:
        return 0 if owner.kind else 2
    if ephemeral_ports[0] <= port <= ephemeral_ports[1]:
        return None
    if owner is not None and owner.kind:
        return 1 if port in BY_NAME[owner.kind].ports else 3
    if port in KNOWN_PORTS:
        return 4
    return 5 if owner is not None else None


def ephemeral(proc: Path) -> tuple[int, int]:
    """First and last port that the kernel hands out by itself."""
    try:
        words = (proc / "sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
        return int(words[0]), int(words[1])
    except (OSError, ValueError, IndexError):
        return EPHEMERAL


class Questions:
    """Remembers whom it has asked, and says whom to ask now."""

    def __init__(self) -> None:
        self._asked: dict[tuple[int, int], tuple[int, int]] = {}
        self._settled: set[tuple[int, int]] = set()

    def due(self, view: View, now: int, taken: Container[int] = ()) -> list[Candidate]:
        """Candidates to ask at `now` (monotonic ns), `PER_SCAN` at most.

        A process of which one listener turned out to be an engine's is not asked at its others.

        Args:
            view: what the scan saw.
            now: monotonic ns.
            taken: ports that are asked by others.
        """
        alive = {_key(one) for one in view.candidates}
        self._asked = {key: asked for key, asked in self._asked.items() if key in alive}
        self._settled &= alive
        known = {_key(one) for one in view.candidates if one.listener.port in taken} | self._settled
        known_pids = {one.pid for one in view.candidates if _key(one) in known} - {0}
        open_ones = (one for one in view.candidates if _key(one) not in known and one.pid not in known_pids)
        return [one for one in open_ones if self._is_due(one, now)][:PER_SCAN]

    def asked(self, candidate: Candidate, now: int) -> int:
        """It is asked at `now` (monotonic ns); how often it was before."""
        times = self._asked.get(_key(candidate), (0, 0))[1]
        self._asked[_key(candidate)] = (now, times + 1)
        return times

    def settle(self, candidate: Candidate) -> None:
        """It is known what it is; it need not be asked while it lives."""
        self._settled.add(_key(candidate))

    def _is_due(self, candidate: Candidate, now: int) -> bool:
        at, times = self._asked.get(_key(candidate), (0, 0))
        return not times or now - at >= AGAIN_NS[min(times, len(AGAIN_NS)) - 1]


def _key(candidate: Candidate) -> tuple[int, int]:
    return candidate.listener.port, candidate.listener.inode
