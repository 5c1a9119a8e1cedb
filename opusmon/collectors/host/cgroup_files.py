"""What one group says, v1 or v2: its CPU limit and use, its memory limit and use, its pressure."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from opusmon.collectors.host.files import MALFORMED, names, number, pick, read_short
from opusmon.collectors.host.pressure import NO_PSI, totals
from opusmon.collectors.host.reading import Answer
from opusmon.collectors.missing import Missing

UNLIMITED_B = 2**62
"""v1 writes the largest multiple of the page size below 2^63 for "no limit"."""
_US_NS = 1000

NOT_COUNTED = Missing(
    "not_supported", "the root group counts no memory of its own: channel host has the whole"
)
NO_MEMORY = Missing("not_supported", "the memory controller is not enabled for this group")
NO_CPUACCT = Missing("not_supported", "no cpuacct controller counts this group")
NO_PSI_V1 = Missing(
    "not_supported", "cgroup v1 has no pressure by group", "boot with a unified cgroup hierarchy"
)

_CPU_STAT = names("usage_usec", "nr_periods", "nr_throttled", "throttled_usec", "throttled_time")
_MEMORY_STAT = names("file", "shmem")
_MEMORY_STAT_V1 = names("total_cache", "total_shmem", "hierarchical_memory_limit")
_EVENTS = names("max", "oom_kill")


Limit = Answer | None
"""A limit, None for none, or why it is not known."""


@dataclass(slots=True)
class Cpu:
    """CPU of a group.

    Attributes:
        quota_cores: its own limit in cores.
        counters: usage_ns, nr_periods, nr_throttled, throttled_ns as far as it has them, cumulative.
        missing: why it has no usage_ns.
    """

    quota_cores: Limit = None
    counters: dict[str, int] = field(default_factory=dict)
    missing: Missing = MALFORMED


@dataclass(slots=True)
class Memory:
    """Memory of a group in bytes, and counts since it was made.

    Attributes:
        limit_b: the tightest limit from the group up to the root of the machine, beyond a container's view too;
            None where the group does not say (v2).
    """

    used_b: Answer
    cache_b: Answer
    limit_hits: Answer
    oom_kills: Answer
    limit_b: float | None = None


def missing_memory(why: Missing) -> Memory:
    """Nothing is known, for one reason."""
    return Memory(why, why, why, why)


def cpu_v2(folder: str) -> Cpu:
    """CPU of a v2 group. `cpu.stat` has the use even where the controller is not enabled."""
    out = Cpu(_limit([f"{folder}/cpu.max"], quota))
    text = read_short(f"{folder}/cpu.stat")
    if isinstance(text, Missing):
        out.missing = text
        return out
    found = pick(_CPU_STAT, text)
    out.counters = {name: found[name] for name in ("nr_periods", "nr_throttled") if name in found}
    for ours, theirs in (("usage_ns", "usage_usec"), ("throttled_ns", "throttled_usec")):
        if theirs in found:
            out.counters[ours] = found[theirs] * _US_NS
    return out


def cpu_v1(folder: str, usage_folder: str | None) -> Cpu:
    """CPU of a v1 group: limits from `cpu`, use from `cpuacct`, which may lie elsewhere or nowhere."""
    out = Cpu(_limit([f"{folder}/cpu.cfs_quota_us", f"{folder}/cpu.cfs_period_us"], quota))
    text = read_short(f"{folder}/cpu.stat")
    found = {} if isinstance(text, Missing) else pick(_CPU_STAT, text)
    for ours, theirs in (("nr_periods",) * 2, ("nr_throttled",) * 2, ("throttled_ns", "throttled_time")):
        if theirs in found:
            out.counters[ours] = found[theirs]
    usage_ns = NO_CPUACCT if usage_folder is None else _number(f"{usage_folder}/cpuacct.usage", NO_CPUACCT)
    if isinstance(usage_ns, Missing):
        out.missing = usage_ns
    else:
        out.counters["usage_ns"] = usage_ns
    return out


def quota(words: list[bytes]) -> float | None:
    """Cores from a quota and a period in microseconds; "max" and -1 are no limit.

    Raises:
        ValueError: they are not such numbers.
    """
    quota_us, period_us = words
    if quota_us in (b"max", b"-1"):
        return None
    return _unsigned(quota_us) / (_unsigned(period_us) or math.nan)


def limit_v2(folder: str) -> Limit:
    """Memory limit of a v2 group itself."""
    return _limit([f"{folder}/memory.max"], _bytes)


def limit_v1(folder: str) -> Limit:
    """Memory limit of a v1 group itself."""
    return _limit([f"{folder}/memory.limit_in_bytes"], _bytes)


def memory_v2(folder: str) -> Memory:
    """Memory of a v2 group."""
    used = _number(f"{folder}/memory.current", NO_MEMORY)
    if isinstance(used, Missing):
        return missing_memory(used)
    events = read_short(f"{folder}/memory.events")
    stat = read_short(f"{folder}/memory.stat")
    cache = stat if isinstance(stat, Missing) else _cache(pick(_MEMORY_STAT, stat), "file", "shmem")
    return Memory(used, cache, _event(events, "max"), _event(events, "oom_kill"))


def memory_v1(folder: str) -> Memory:
    """Memory of a v1 group."""
    used = _number(f"{folder}/memory.usage_in_bytes", NO_MEMORY)
    if isinstance(used, Missing):
        return missing_memory(used)
    stat = read_short(f"{folder}/memory.stat")
    found = {} if isinstance(stat, Missing) else pick(_MEMORY_STAT_V1, stat)
    limit_b = found.get("hierarchical_memory_limit", UNLIMITED_B)
    return Memory(
        used,
        stat if isinstance(stat, Missing) else _cache(found, "total_cache", "total_shmem"),
        _number(f"{folder}/memory.failcnt", MALFORMED),
        _event(read_short(f"{folder}/memory.oom_control"), "oom_kill"),
        float(limit_b) if limit_b < UNLIMITED_B else None,
    )


def waited_us(folder: str, what: str) -> int | Missing:
    """Microseconds in which some task of a v2 group waited for "cpu" or "memory"."""
    text = read_short(f"{folder}/{what}.pressure")
    if isinstance(text, Missing):
        return NO_PSI if text.state == "not_supported" else text
    return totals(text).get("some", MALFORMED)


def _limit(paths: list[str], parse: Callable[[list[bytes]], float | None]) -> Limit:
    """A limit from the words of some files; a group without the files has none."""
    words: list[bytes] = []
    for path in paths:
        text = read_short(path)
        if isinstance(text, Missing):
            return None if text.code == errno.ENOENT else text
        words += text.split()
    try:
        return parse(words)
    except ValueError:
        return MALFORMED


def _bytes(words: list[bytes]) -> float | None:
    (word,) = words
    if word in (b"max", b"-1"):
        return None
    limit_b = _unsigned(word)
    return float(limit_b) if limit_b < UNLIMITED_B else None


def _unsigned(word: bytes) -> int:
    value = number(word)
    if value is None:
        raise ValueError(f"not a number: {word!r}")
    return value


def _number(path: str, absent: Missing) -> int | Missing:
    """The number in a file; `absent` when there is no such file."""
    text = read_short(path)
    if isinstance(text, Missing):
        return absent if text.code == errno.ENOENT else text
    value = number(text)
    return MALFORMED if value is None else value


def _event(text: bytes | Missing, name: str) -> Answer:
    return text if isinstance(text, Missing) else pick(_EVENTS, text).get(name, MALFORMED)


def _cache(found: Mapping[str, int], total: str, shared: str) -> Answer:
    """Page cache without shared memory, which is charged as cache but cannot be dropped."""
    return max(0, found[total] - found[shared]) if found.keys() >= {total, shared} else MALFORMED
