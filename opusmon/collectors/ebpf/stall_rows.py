"""Events of the kernel as rows of `stall`, and a flood of them folded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from opusmon.channels import STALL, WHOLE_CONTEXT
from opusmon.collectors.ebpf import stall_maps as kernel
from opusmon.collectors.ebpf import stall_words as words
from opusmon.collectors.ebpf.maps import Table
from opusmon.schema import Batch, StringTable

NAN = float("nan")
SINGLE, RARE = 20, 500
"""Rows of one kind and thread in an interval that stay single: of waits and the scheduler's, of the others."""
MOST = 4000
"""Rows in an interval at most; the shortest are dropped and counted."""
FEW = 256
"""So many events of the frequent kinds are not urgent."""
MAX_TEXTS = 8_000
"""Distinct stacks and sequences in a session; the string table holds 65,536 texts of all collectors."""

_OFTEN = (kernel.WAIT, kernel.OFF_CPU, kernel.RUN_QUEUE, kernel.FUTEX)
_SLOW_KINDS = {
    **dict.fromkeys(("cuMemAlloc_v2", "cuMemAllocAsync", "cuMemCreate"), "alloc"),
    "cuMemFree_v2": "free",
}


@dataclass(frozen=True, slots=True)
class Stall:
    """A row of `stall` before its texts have ids; fields as there."""

    t: int
    kind: str
    pid: int
    tid: int
    thread: str
    call: str = ""
    reason: str = ""
    dur_ns: float = NAN
    stream: int = WHOLE_CONTEXT
    code: float = NAN
    count: float = 1.0
    size_b: float = NAN
    by_tid: int = 0
    by_thread: str = ""
    by_call: str = ""
    by_code: float = NAN
    before: str = ""
    stack: str = ""


def text(comm: bytes) -> str:
    """A thread's name as the kernel gives it."""
    return comm.decode("utf-8", "replace")


def from_event(event: np.void, before: str, stack: str) -> Stall:
    """An event of the kernel (dtype `stall_maps.EVENT`) as a stall."""
    kind = int(event["kind"])
    base = Stall(
        t=int(event["t"]),
        kind=words.KINDS[kind] if kind < len(words.KINDS) else "",
        pid=int(event["tgid"]),
        tid=int(event["tid"]),
        thread=text(event["comm"]),
        call=words.call(int(event["call"])),
        dur_ns=_known(event["dur"]),
        stream=int(event["stream"]),
        size_b=_known(event["size"]),
        stack=stack,
    )
    stall = _result(base, kind, event, before)
    return _SAID[kind](stall, event) if kind in _SAID else stall


def _known(value: np.uint64) -> float:
    return NAN if int(value) == kernel.UNKNOWN else float(value)


def _result(stall: Stall, kind: int, event: np.void, before: str) -> Stall:
    if kind in (kernel.OFF_CPU, kernel.RUN_QUEUE, kernel.FUTEX, kernel.JIT):
        return stall
    return replace(stall, code=float(event["code"]), before=before)


def _wait(stall: Stall, _: np.void) -> Stall:
    failed = f", failed with CUDA error {stall.code:.0f}" if stall.code else ""
    return replace(stall, reason=f"waiting for the GPU{failed}")


def _off_cpu(stall: Stall, event: np.void) -> Stall:
    state = int(event["state"])
    name = words.syscall(int(event["syscall"]), state)
    inside = f", inside {stall.call}" if stall.call else ""
    return replace(stall, call=name, reason=words.blocked(state, name) + inside)


def _run_queue(stall: Stall, event: np.void) -> Stall:
    state, inside = int(event["state"]), f", inside {stall.call}" if stall.call else ""
    name = words.syscall(int(event["syscall"]), state)
    return replace(stall, call=name, reason=words.queued(state, name) + inside, stack="")


def _jit(stall: Stall, event: np.void) -> Stall:
    code, reason = words.exit_status(int(event["code"]), bool(int(event["flags"]) & kernel.CODE_KNOWN))
    return replace(stall, call=stall.thread, code=code, reason=reason)


def _capture(stall: Stall, event: np.void) -> Stall:
    reason = words.capture(int(event["code"]), int(event["flags"]))
    by_tid = int(event["by_tid"])
    if not by_tid:
        return replace(stall, reason=reason)
    return replace(
        stall,
        reason=reason,
        by_tid=by_tid,
        by_thread=text(event["by_comm"]),
        by_call=words.call(int(event["by_call"])),
        by_code=float(event["by_code"]),
    )


def _init(stall: Stall, _: np.void) -> Stall:
    return replace(stall, reason=words.in_capture(stall.call))


def _tls(stall: Stall, event: np.void) -> Stall:
    return replace(stall, reason=words.tls(int(event["code"])))


_SAID: dict[int, Callable[[Stall, np.void], Stall]] = {
    kernel.WAIT: _wait,
    kernel.OFF_CPU: _off_cpu,
    kernel.FUTEX: _off_cpu,
    kernel.RUN_QUEUE: _run_queue,
    kernel.JIT: _jit,
    kernel.CAPTURE: _capture,
    kernel.INIT: _init,
    kernel.TLS: _tls,
}


def from_slow(key: np.void, value: np.void) -> Stall:
    """Calls of one function by one thread in an interval, added up: taking and freeing memory, loading code."""
    name = words.call(int(key["call"]))
    kind = _SLOW_KINDS.get(name, "module")
    return Stall(
        t=int(value["last"]),
        kind=kind,
        pid=int(value["tgid"]),
        tid=int(key["tid"]),
        thread=text(value["comm"]),
        call=name,
        reason="after warm-up",
        dur_ns=float(value["dur"]),
        code=float(value["failed"]),
        count=float(value["n"]),
        size_b=float(value["size"]) if kind == "alloc" else NAN,
    )


def page_faults(t: int, pid: int, thread: str, count: int, dt_ns: int, most: float) -> Stall:
    """So many page faults in the interval that ends at `t` were over the rate of `most` per second."""
    return Stall(
        t, "page_faults", pid, pid, thread, "", f"over {most:,.0f} a second", float(dt_ns), count=float(count)
    )


class Sieve:
    """Keeps the longest events of each thread and kind in an interval; the others become one row."""

    def __init__(self) -> None:
        self._used: dict[int, int] = {}
        self._rest: dict[int, list[Any]] = {}
        self._kept = 0
        self.dropped = 0
        """Events beyond `MOST` since the last call of `rest`; they are in no row."""

    def admit(self, events: Table) -> Table:
        """Those of `events` (dtype `stall_maps.EVENT`) that stay single; the others are added up."""
        if not len(events):
            return events
        keys = events["tid"].astype(np.uint64) << np.uint64(8) | events["kind"].astype(np.uint64)
        unique, group, counts = np.unique(keys, return_inverse=True, return_counts=True)
        room = np.array([self._room(int(key)) for key in unique])
        kept = _longest(events["dur"], group, room)
        for key, count, most in zip(unique.tolist(), counts.tolist(), room.tolist(), strict=True):
            self._used[key] = self._used.get(key, 0) + min(count, most)
        if kept.all():
            return self._bounded(events)
        self._add(events, unique, group, np.flatnonzero(~kept))
        return self._bounded(events[kept])

    def rest(self) -> list[Stall]:
        """What was added up since the last call: one row per thread and kind, `count` events, `dur_ns` their sum."""
        found = [_folded(key, *value) for key, value in self._rest.items()]
        self._used, self._rest, self._kept, self.dropped = {}, {}, 0, 0
        return found

    def _room(self, key: int) -> int:
        return max(0, (SINGLE if key & 0xFF in _OFTEN else RARE) - self._used.get(key, 0))

    def _add(self, events: Table, unique: Table, group: Table, others: Table) -> None:
        """Add up the events with the indices `others`, by the group of each."""
        of = group[others]
        counts = np.bincount(of, minlength=len(unique))
        sums = np.zeros(len(unique), np.uint64)
        np.add.at(sums, of, events["dur"][others])
        last = np.zeros(len(unique), np.int64)
        last[of] = others  # of several, the last one stays
        for at in np.flatnonzero(counts).tolist():
            held = self._rest.setdefault(int(unique[at]), [0, 0, None])
            held[0] += int(counts[at])
            held[1] += int(sums[at])
            held[2] = events[last[at]].copy()

    def _bounded(self, events: Table) -> Table:
        left = MOST - self._kept
        self.dropped += max(0, len(events) - left)
        if len(events) > left:
            events = events[np.sort(np.argsort(events["dur"], kind="stable")[len(events) - left :])]
        self._kept += len(events)
        return events


def _longest(durations: Table, group: Table, room: Table) -> Table:
    """Which elements are among the `room[g]` longest of their group g; of equal ones the first."""
    order = np.lexsort((-durations.astype(np.int64), group))
    starts = np.searchsorted(group[order], np.arange(len(room)))
    kept = np.zeros(len(group), bool)
    kept[order] = np.arange(len(group)) - starts[group[order]] < room[group[order]]
    return kept


def _folded(key: int, count: int, dur_ns: int, last: np.void) -> Stall:
    kind = words.KINDS[key & 0xFF]
    return Stall(
        int(last["t"]),
        kind,
        int(last["tgid"]),
        int(last["tid"]),
        text(last["comm"]),
        reason="shorter ones, folded",
        dur_ns=float(dur_ns),
        count=float(count),
    )


class Interner:
    """Rows with text ids.

    Args:
        strings: the table.
    """

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings
        self._long: set[str] = set()
        self.full = False
        """Stacks and sequences that are new are no longer kept."""

    def batch(self, stalls: Sequence[Stall], processes: Mapping[int, int]) -> Batch | None:
        """Stalls as rows; None when there are none.

        Args:
            stalls: in any order.
            processes: pid to the text id of its name, 0 where that is not known.
        """
        if not stalls:
            return None
        return Batch(STALL, STALL.rows(self._record(stall, processes.get(stall.pid, 0)) for stall in stalls))

    def _record(self, stall: Stall, process: int) -> tuple[Any, ...]:
        intern = self._strings.intern
        thread = intern(stall.thread)
        # A process that has ended cannot be asked; its first thread carries its name.
        name = process or (thread if stall.tid == stall.pid else 0)
        return (
            stall.t,
            intern(stall.kind),
            stall.pid,
            stall.tid,
            name,
            thread or name,
            intern(stall.call),
            intern(stall.reason),
            stall.dur_ns,
            stall.stream,
            stall.code,
            stall.count,
            stall.size_b,
            stall.by_tid,
            intern(stall.by_thread),
            intern(stall.by_call),
            stall.by_code,
            self._bounded(stall.before),
            self._bounded(stall.stack),
        )

    def _bounded(self, words_of: str) -> int:
        if words_of in self._long or not words_of:
            return self._strings.intern(words_of)
        if len(self._long) >= MAX_TEXTS:
            self.full = True
            return 0
        self._long.add(words_of)
        return self._strings.intern(words_of)


def is_urgent(events: Table) -> bool:
    """Whether events (dtype `stall_maps.EVENT`) should be read at once: they are `FEW` or more, or one is of a rare kind.

    After those a process may end, and with it the names in its stacks.
    """
    return len(events) >= FEW or not bool(np.isin(events["kind"], _OFTEN).all())


def of_pids(events: Table, pids: Iterable[int]) -> Table:
    """Events of these processes; all of them when there are no pids."""
    wanted = sorted(pids)
    return events[np.isin(events["tgid"], wanted)] if wanted else events
