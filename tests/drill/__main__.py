"""The drill over many seeds, from the folder tests: `python -m drill --seeds 5`; beside it severity and time alone."""

from __future__ import annotations

import argparse

from drill.score import PLANTED, QUIET, drill, is_top, table, told, top


def by_severity(findings):
    """The order without causes: the worst first, then by time."""
    return sorted(findings, key=lambda one: (-one.severity, one.t0))


def main():
    """Print what goes wrong by seed, and the table of the first one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    for seed in range(1, parser.parse_args().seeds + 1):
        found = drill(seed)
        if seed == 1:
            print(*table(found), sep="\n")
        right = sum(is_top(one, found[one.name]) for one in PLANTED)
        plain = sum(is_top(one, by_severity(found[one.name])) for one in PLANTED)
        loud = [one.name for one in QUIET if top(found[one.name]) is not None]
        print(
            f"seed {seed}: {right} of {len(PLANTED)} right; by severity and time alone {plain}; quiet but told: {loud}"
        )
        for one in PLANTED:
            if not is_top(one, found[one.name]):
                print(f"  {one.name}: {told(found[one.name][:3])}")


main()
