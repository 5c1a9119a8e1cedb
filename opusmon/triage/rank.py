"""The order in which findings are told: what explains the others first, then what it explains.

One fault shows in many places: a second program takes the memory bandwidth, so waits grow, so does the queue, so an
objective burns. All of that is true and found, and only the first is where to act. The order is made of four things:

1. Causal depth. Rules are of classes, and a class can lead to certain others (`CLASSES`): hardware and the host to what
   CUDA does, that to the engine, and that to what clients see; never the other way round. The table says what is
   possible by how such machines are built; it is not learned from data.
2. Onset. A cause does not begin after its effect, as far as rules can tell: several look at a whole minute, and say that
   it began with the first row of that minute (`SLACK_NS`). Of several possible causes the one that began last before
   the effect is taken, and none that had been so for long: that changed nothing (`FRESH_NS`).
3. Share of time. What explains another finding covers a good part of it (`LEAST_SHARE`): three seconds of waiting for a
   disk do not explain ten minutes of slow answers. Events (a failed capture, an XID, a lost link) leave something
   behind that lasts; they cover all that comes after them.
4. Severity, of a finding and of the worst that it explains: a warning about the cause comes before the critical burn of an
   objective that follows from it. A note explains nothing: what is normal is not the cause of what is wrong.

Each finding has one cause at most, so that they form trees. Roots are ordered by the worst severity in their tree, depth,
how many kinds of findings it holds, and onset; each is followed by others of its rule, then by its tree in the order of
depth. Notes come last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from opusmon.clock import NS
from opusmon.triage.finding import Finding
from opusmon.triage.severity import NOTE

Times = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]
Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]
Flags = np.ndarray[tuple[Any, ...], np.dtype[np.bool_]]

SLACK_NS = 60 * NS
"""A cause may be told to begin so long after its effect: a rule over a minute dates its finding back by up to that."""
LAG_NS = 60 * NS
"""An effect goes on for so long after its cause at most, and for no longer than that lasted: queues drain, windows of a
minute pass."""
FRESH_NS = 300 * NS
"""What has been so for longer when something else begins is no cause of it, unless it is an event or grows."""
LEAST_SHARE = 1 / 3
"""Part of an effect's time that its cause covers, that lag included."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Findings of one kind.

    Attributes:
        rules: from cause to effect: each can lead to those after it.
        leads_to: classes of which it can be the cause.
        lasts: rules whose findings are events that leave something behind.
    """

    rules: tuple[str, ...]
    leads_to: tuple[str, ...]
    lasts: tuple[str, ...] = ()


_BELOW_HARDWARE = ("memory", "gpu", "driver", "cuda", "engine", "client")

CLASSES: Mapping[str, Kind] = {
    "hardware": Kind(
        (
            *(
                "ecc_uncorrected",
                "row_remap",
                "nvlink_errors",
                "pcie_replays",
                "xid",
                "gpu_lost",
                "driver_asks_for_recovery",
            ),
            *("nvlink_down", "throttled", "clocks_low"),
        ),
        _BELOW_HARDWARE,
        ("ecc_uncorrected", "xid", "gpu_lost", "driver_asks_for_recovery", "nvlink_down"),
    ),
    "host": Kind(
        (
            *("cpu_stolen", "cgroup_memory_near_limit", "memory_pressure", "oom_kill", "storage_waits"),
            *("cpu_quota_throttling", "cpu_saturated", "process_starved", "page_fault_storm"),
        ),
        ("driver", "cuda", "engine", "way", "client"),
        ("oom_kill",),
    ),
    # What is asked for: more of it fills the GPU, the cache and the queue.
    "demand": Kind(("long_inputs",), ("gpu", "cuda", "engine", "refusal", "client")),
    "memory": Kind(
        ("hbm_filling", "hbm_nearly_full"), ("driver", "cuda", "engine", "client"), ("hbm_filling",)
    ),
    "gpu": Kind(
        (
            *("gpu_contended", "hbm_bandwidth_saturated", "l2_misses_slow", "nvlink_hot_link"),
            "nvlink_imbalance",
        ),
        ("cuda", "engine", "client"),
    ),
    # Work that the driver does in the middle of serving. Compiling ends in loading, that in first use and allocations.
    "driver": Kind(
        (
            *("init_in_capture", "capture_aborted", "jit_while_serving", "module_while_serving"),
            "allocation_while_serving",
        ),
        ("cuda", "engine", "client"),
        ("init_in_capture", "capture_aborted"),
    ),
    "cuda": Kind(
        (
            *("graph_fallback", "stalled_thread", "launch_latency", "pipeline_bubbles", "wait_on_idle_gpu"),
            *("gpu_bound", "gpu_busy_blind"),
        ),
        ("engine", "client"),
        ("graph_fallback",),
    ),
    "engine": Kind(
        (
            *("kv_pressure", "preemptions", "gpu_idle_requests_wait", "stalled_on_others", "queue_growth"),
            "saturated",
        ),
        ("client",),
    ),
    # No GPU makes the way to the engine longer, or an account's limit smaller.
    "way": Kind(("tls_handshakes", "slow_upstream"), ("client",)),
    "refusal": Kind(("rate_limited", "rate_limit_near"), ("client",)),
    # What is wrong with the answers, then what that does to users.
    "client": Kind(
        (
            *("overloaded", "request_errors", "retries_hide_latency", "latency_knee", "volatile_latency"),
            *("slo_burn_fast", "slo_burn_slow"),
        ),
        (),
    ),
}
"""From the deepest cause to what users feel."""

_ON_OTHERS = ("lock", "network", "pipe, socket", "waiting for a child")
"""How the reasons of stalls begin in which a thread waits for another one: an effect of what holds that one up."""

_PLACES: Mapping[str, tuple[str, int]] = {
    rule: (name, place) for name, kind in CLASSES.items() for place, rule in enumerate(kind.rules)
}
_DEPTHS = {name: depth for depth, name in enumerate(CLASSES)}
_RANKS = {rule: number for number, rule in enumerate(_PLACES)}
_LASTING = frozenset(rule for kind in CLASSES.values() for rule in kind.lasts)


def depth(rule: str) -> tuple[int, int]:
    """How near to the cause a rule is: its class, and its place there; rules that are not in the table come last."""
    name, place = _PLACES.get(rule, ("", 0))
    return _DEPTHS.get(name, len(_DEPTHS)), place


def name_of(finding: Finding) -> str:
    """Under which name a finding stands in the table: its rule, or `stalled_on_others` for a thread that waits for one."""
    if finding.rule == "stalled_thread" and finding.subject.rpartition(": ")[2].startswith(_ON_OTHERS):
        return "stalled_on_others"
    return finding.rule


def can_lead_to(cause: str, effect: str) -> bool:
    """Whether what one rule finds can be the cause of what another one finds, by their names."""
    if cause not in _PLACES or effect not in _PLACES or cause == effect:
        return False
    (one, place), (other, later) = _PLACES[cause], _PLACES[effect]
    return place < later if one == other else other in CLASSES[one].leads_to


@dataclass(frozen=True, slots=True)
class _Columns:
    """n findings, shape (n,) each: of a night in which everything is wrong there are thousands, and pairs of them millions.

    Attributes:
        names: as in the table.
        t0: beginnings, monotonic ns.
        t1: ends.
        until: what each has to do with ends here: after its end, or never.
        lasts: it is an event that leaves something behind.
    """

    names: tuple[str, ...]
    t0: Times
    t1: Times
    until: Times
    lasts: Flags

    @classmethod
    def of(cls, findings: Sequence[Finding]) -> _Columns:
        names = tuple(map(name_of, findings))
        t0, t1 = (np.array([getattr(one, name) for one in findings], np.int64) for name in ("t0", "t1"))
        lasts = np.array([name in _LASTING for name in names], bool)
        still = lasts | np.array([one.open for one in findings], bool)
        until = np.where(still, np.iinfo(np.int64).max, t1 + np.minimum(LAG_NS, t1 - t0))
        return cls(names, t0, t1, until, lasts)

    def cover(self, place: int) -> Floats:
        """Part of the time of one finding in which each one held, or had left something behind, 0 to 1; see the module."""
        end = int(self.t1[place])
        begin = np.maximum(self.t0, self.t0[place])
        soon = (self.t0 <= self.t0[place] + SLACK_NS) & (begin <= end + SLACK_NS)
        soon &= (self.t0 >= self.t0[place] - FRESH_NS) | self.lasts
        covered = np.clip(np.minimum(self.until, end) - begin, 0, None)
        share = np.where(end > begin, covered / np.maximum(end - begin, 1), self.until >= begin)
        return np.where(soon, share, 0.0)


def causes(findings: Sequence[Finding]) -> list[int | None]:
    """The place of the likely cause of each finding among them; None for what nothing found explains.

    Of those that began about last before it the deepest one, of these the first in `findings`. Notes explain nothing and
    are left to themselves.
    """
    columns = _Columns.of(findings)
    depths = np.array([_RANKS.get(name, len(_RANKS)) for name in columns.names], np.int64)
    loud = np.array([one.severity > NOTE for one in findings], bool)
    leads = {
        effect: loud & np.array([can_lead_to(cause, effect) for cause in columns.names], bool)
        for effect in set(columns.names)
    }
    found: list[int | None] = []
    for place, name in enumerate(columns.names):
        on = leads[name] & (columns.cover(place) >= LEAST_SHARE) if loud[place] else np.zeros(0, bool)
        possible = np.flatnonzero(on)
        early = np.maximum(columns.t0[place] - columns.t0[possible] - SLACK_NS, 0)
        best = np.lexsort((possible, depths[possible], early))
        found.append(int(possible[best[0]]) if len(best) else None)
    return found


def rank(findings: Sequence[Finding]) -> list[Finding]:
    """Findings in the order in which they are to be told, the likeliest cause of the worst first.

    Args:
        findings: of one session, in any order; the result does not depend on it.
    """
    every = sorted(findings, key=_by_depth)
    loud = [one for one in every if one.severity > NOTE]
    trees: dict[int, list[int]] = {}
    cause = causes(loud)
    for place in range(len(loud)):
        trees.setdefault(_root(place, cause), []).append(place)
    roots = sorted(trees, key=lambda one: _by_reach(loud[one], [loud[place] for place in trees[one]]))
    told: dict[int, None] = {}
    for root, alike in _alike(roots, loud):
        below = sorted(place for one in (root, *alike) for place in trees[one])
        told.update(dict.fromkeys((root, *alike, *below)))
    return [*(loud[place] for place in told), *(one for one in every if one.severity <= NOTE)]


def _root(place: int, cause: Sequence[int | None]) -> int:
    """Causes are above their effects in the table, so that this ends."""
    above = cause[place]
    return place if above is None else _root(above, cause)


def _alike(roots: Sequence[int], findings: Sequence[Finding]) -> Iterator[tuple[int, list[int]]]:
    """Roots in their order, each with the others that the same rule found at about the same time."""
    by_rule: dict[str, list[int]] = {}
    for root in roots:
        by_rule.setdefault(findings[root].rule, []).append(root)
    for root in roots:
        one = findings[root]
        near = [
            other
            for other in by_rule[one.rule]
            if max(one.t0, findings[other].t0) - min(one.t1, findings[other].t1) <= SLACK_NS
        ]
        if root in near:
            near.remove(root)
            by_rule[one.rule] = [other for other in by_rule[one.rule] if other != root and other not in near]
            yield root, near


def _by_depth(one: Finding) -> tuple[tuple[int, int], int, int, int, str, str, str, bool]:
    told = one.rule, one.subject, one.title, one.open
    return depth(name_of(one)), -one.severity, one.t0, one.t0 - one.t1, *told


def _by_reach(one: Finding, tree: Sequence[Finding]) -> tuple[int, int, int, int, int]:
    """Worst severity accounted for, depth, kinds explained, onset, share of the time."""
    worst = max(other.severity for other in tree)
    kinds = len({other.rule for other in tree})
    return -worst, depth(name_of(one))[0], -kinds, one.t0, one.t0 - one.t1
