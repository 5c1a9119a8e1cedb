"""Repeats scenarios in fresh processes and counts how they go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opusmon.checks.init_fork import Work, run_forks
from opusmon.checks.init_scenarios import Lab, Scenario, work
from opusmon.checks.init_tally import Count


def repeated(
    scenarios: Sequence[Scenario], lab: Lab, *, repeats: int, at_once: int, deadline_s: float, hang_s: float
) -> tuple[list[Count], bool]:
    """Repeat each scenario, in turns, so that all have been repeated equally often when the time is up.

    Returns:
        A count for each scenario, and whether all repetitions were done before the deadline.
    """
    counts = [Count.of(scenario) for scenario in scenarios]

    def jobs() -> Iterator[tuple[int, Work]]:
        for _ in range(repeats):
            for place, scenario in enumerate(scenarios):
                if not counts[place].over:
                    yield place, work(scenario, lab)

    all_done = run_forks(
        jobs(),
        lambda place, ended: counts[place].add(ended),
        at_once=at_once,
        deadline_s=deadline_s,
        hang_s=hang_s,
    )
    return counts, all_done
