"""Run the rules: over a whole recording in pieces, or live over the last minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module

from opusmon.clock import NS
from opusmon.triage.finding import Finding, by_time, merge
from opusmon.triage.scene import RULES, Rule, Scene, View
from opusmon.triage.trail import Trail

MODULES: tuple[str, ...] = (
    "rules_gpu",
    "rules_gpu_health",
    "rules_gpu_work",
    "rules_nvlink",
    "rules_cuda",
    "rules_stalls",
    "rules_host",
    "rules_api",
    "rules_demand",
)
"""Beside this module; importing them fills `RULES`."""

PIECE_NS = 600 * NS
"""A recording is looked at in pieces of this length, each with the look back that the rule asks for."""


def rules() -> Mapping[str, Rule]:
    """Every rule by name."""
    for name in MODULES:
        import_module(f"opusmon.triage.{name}")
    return RULES


def look(
    view: View, t0: int, t1: int, limits: Mapping[str, float] | None = None, only: Iterable[str] = ()
) -> list[Finding]:
    """What the rules find in a range, in the order of time.

    Args:
        view: what was measured.
        t0: rows after this time count.
        t1: up to this one.
        limits: thresholds in force; the usual ones by default.
        only: names of rules, all of them when empty.
    """
    wanted = [one for name, one in rules().items() if not only or name in set(only)]
    scene = Scene(view, t0, t1, limits) if limits is not None else Scene(view, t0, t1)
    return sorted(
        (finding for one in wanted for finding in merge(run_rule(one, scene), one.join_ns)),
        key=by_time,
    )


def run_rule(one: Rule, scene: Scene) -> Iterator[Finding]:
    """The findings of a rule; none where the session has nothing that it reads."""
    if not one.quiet(scene) and any(
        channel in scene.view.channels and len(scene.rows(channel)) for channel in one.channels
    ):
        yield from one.find(scene)


def look_over(
    view: View,
    t0: int,
    t1: int,
    limits: Mapping[str, float] | None = None,
    only: Iterable[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> list[Finding]:
    """`look` over a range of any length, in pieces that overlap by what each rule looks back, merged.

    Args:
        view: what was measured.
        t0: rows after this time count.
        t1: up to this one.
        limits: thresholds in force.
        only: names of rules, all of them when empty.
        progress: called with the pieces done and in all.
    """
    return merged(gathered(view, t0, t1, pieces(t0, t1), limits, only, progress))


def pieces(t0: int, t1: int) -> range:
    """Where the pieces of a range begin."""
    return range(t0, max(t1, t0 + 1), PIECE_NS)


def gathered(
    view: View,
    t0: int,
    t1: int,
    starts: Sequence[int],
    limits: Mapping[str, float] | None = None,
    only: Iterable[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, list[Finding]]:
    """What each rule finds in some of the `pieces` of a range, piece by piece; the rest as for `look_over`."""
    wanted = [one for name, one in rules().items() if not only or name in set(only)]
    trail = Trail(view, PIECE_NS + max((one.lookback_ns for one in wanted), default=0))
    found: dict[str, list[Finding]] = {one.name: [] for one in wanted}
    for done, start in enumerate(starts):
        end = min(start + PIECE_NS, t1)
        scenes: dict[int, Scene] = {}  # rules that look back equally far share what was read
        for one in wanted:
            begin = max(t0, start - one.lookback_ns)
            if begin not in scenes:
                scenes[begin] = Scene(trail, begin, end, *(() if limits is None else (limits,)))
            found[one.name].extend(run_rule(one, scenes[begin]))
        if progress is not None:
            progress(done + 1, len(starts))
    return found


def merged(found: Mapping[str, Iterable[Finding]]) -> list[Finding]:
    """Findings of all pieces as one list, in the order of time."""
    every = [finding for name, each in found.items() for finding in merge(each, rules()[name].join_ns)]
    return sorted(every, key=by_time)
