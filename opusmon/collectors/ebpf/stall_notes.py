"""What the stalls collector has to say about itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from opusmon.collectors.ebpf import stall_words as words
from opusmon.collectors.ebpf.hit_price import ASSUMED, Price
from opusmon.collectors.ebpf.libcuda import Scan
from opusmon.collectors.ebpf.stall_maps import RING_B, OpenWait
from opusmon.collectors.ebpf.stall_probes import StallProbes
from opusmon.collectors.ebpf.stall_ration import GROUPS, Ration
from opusmon.collectors.ebpf.stall_rows import MAX_TEXTS
from opusmon.collectors.ebpf.symbols import STALL_ENTRIES, TLS_ENTRIES
from opusmon.collectors.notes import Key, hidden
from opusmon.text import counted

NS = 1_000_000_000
MAX_OPEN = 8
_AGES_S = (3600, 600, 300, 120, 60, 30, 10)

Said = tuple[str, str, str]
"""State, reason and remedy."""

_RETURNS = {"end_wait": "wait", "end_end": "capture", "end_slow": "alloc, free, module"}
"""Program at the return of functions to the values of `kind` it gives."""
_SAMPLED = {
    "launch": ("before", "kernel launches and asynchronous copies"),
    "poll": ("by_call", "polls (cuStreamQuery, cuEventQuery)"),
}


@dataclass(frozen=True, slots=True)
class Sight:
    """What there is to see.

    Attributes:
        scan: processes that map libcuda.
        tls_scan: those of the watched that map libssl.
        probes: None before the first such process was found.
        ration: when the frequent probes are on.
        ring_peak: the fullest the ring was, 0 to 1.
        lost: events that were lost so far, because the ring or a map was full or they were too many.
        texts_full: no new stacks and sequences are kept.
        interval_ns: the tick.
        open_waits: waits for the GPU that have lasted for long and have not ended, the longest first.
        price: what a probe hit costs.
    """

    scan: Scan
    tls_scan: Scan
    probes: StallProbes | None
    ration: Ration
    ring_peak: float
    lost: int
    texts_full: bool
    interval_ns: int
    open_waits: Sequence[OpenWait] = ()
    price: Price = ASSUMED


def statements(sight: Sight) -> Mapping[Key, Said]:
    """What holds now, by key."""
    said: dict[Key, Said] = {("", "", ""): ("ok", watching(sight), "")}
    if sight.scan.hidden:
        said["", "", "hidden"] = (*hidden(sight.scan.hidden), "")
    if sight.probes is not None:
        said.update(_of_probes(sight.probes, sight))
        said.update(_of_budget(sight))
        said["stall", "", "ring"] = ("ok", _ring(sight), "")
        said["cost", "call_ns", ""] = ("ok", sight.price.words(), "")
    said.update(map(_open, sight.open_waits[:MAX_OPEN]))
    if sight.texts_full:
        reason = f"{MAX_TEXTS:,} different ones were kept: new ones are not"
        said["stall", "stack", ""] = said["stall", "before", "texts"] = ("unavailable", reason, "")
    return said


def watching(sight: Sight) -> str:
    """Which processes are watched."""
    count = len(sight.scan.processes)
    others = len(sight.tls_scan.processes.keys() - sight.scan.processes.keys())
    also = f"; TLS of {others} more" if others else ""
    if not count:
        return f"no process maps libcuda{also}"
    files = sight.probes.cuda.probed if sight.probes is not None else 0
    processes = "1 process" if count == 1 else f"{count} processes"
    return f"watching {processes}, probes are on {counted(files, 'libcuda file')}{also}"


def _open(wait: OpenWait) -> tuple[Key, Said]:
    """In steps, so that it is not said anew all the time."""
    age_s = next((step for step in _AGES_S if wait.age_ns >= step * NS), _AGES_S[-1])
    reason = f"{words.call(wait.call)} has not returned for over {age_s} s; it becomes a row when it does"
    return ("stall", "dur_ns", f"pid {wait.pid} thread {wait.tid}"), ("stale", reason, "")


def _ring(sight: Sight) -> str:
    """In steps of 10 %, so that it is not said anew all the time."""
    peak = max(10, math.ceil(sight.ring_peak * 10) * 10)
    lost = f"{sight.lost:,} events lost so far" if sight.lost else "nothing lost"
    return f"at most {peak} % of the ring buffer ({RING_B >> 20} MiB) was in use; {lost}"


def _of_probes(probes: StallProbes, sight: Sight) -> Iterator[tuple[Key, Said]]:
    for event, (serves, why) in probes.missing.items():
        yield ("stall", "kind", event), ("not_supported", f"no {serves}: {event}: {why}", _remedy(why))
    if not probes.has_syscalls:
        reason = "this kernel has no type information (BTF): the system call of off_cpu and kind futex are not told"
        yield ("stall", "call", "off_cpu"), ("not_supported", reason, "")
    if not probes.has_exit_codes:
        yield ("stall", "code", "jit"), ("not_supported", "the kernel does not say how a program ended", "")
    yield (
        ("stall", "count", "page_faults"),
        ("not_supported", "major page faults cannot be told from minor ones there", ""),
    )
    for path, why in {**probes.cuda.refused, **probes.tls.refused}.items():
        yield ("stall", "", path), ("error", why, "")
    yield from _of_symbols(probes, sight)


def _of_symbols(probes: StallProbes, sight: Sight) -> Iterator[tuple[Key, Said]]:
    """Groups of functions that no library exports, and a libssl that nobody maps."""
    if probes.cuda.probed:
        lacking = set(probes.cuda.lacks(STALL_ENTRIES))
        for program, kinds in _RETURNS.items():
            group = {entry.symbol for entry in STALL_ENTRIES.values() if entry.on_return == program}
            if group <= lacking:
                reason = f"no {kinds}: libcuda exports none of the functions concerned"
                yield ("stall", "kind", kinds), ("not_supported", reason, "")
    if not sight.tls_scan.processes:
        yield ("stall", "kind", "tls"), ("unavailable", "no watched process maps OpenSSL's libssl", "")
    elif probes.tls.lacks(TLS_ENTRIES):
        yield ("stall", "kind", "tls"), ("not_supported", "libssl does not export SSL_do_handshake", "")


def _of_budget(sight: Sight) -> Iterator[tuple[Key, Said]]:
    for group in GROUPS:
        every = sight.ration.bursts[group].every
        if every > 1:
            field, calls = _SAMPLED[group]
            seconds = every * sight.interval_ns / 1e9
            reason = f"{calls} are watched in one interval of {seconds:g} s, and while graphs are captured: all would cost over the budget"
            yield ("stall", field, ""), ("sampled", reason, "")


def _remedy(why: str) -> str:
    return "sudo mount -t tracefs tracefs /sys/kernel/tracing" if "tracefs" in why else ""
