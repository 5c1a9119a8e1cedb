"""When the frequent probes of the stalls collector are on: within a budget, and while graphs are captured.

Launches show which threads feed a GPU, and what a capture consisted of when it was broken. The first needs a moment
now and then; the second needs the probes during captures, which a serving process makes while it warms up. They are
so rare then that the budget gives way, for a bounded time.
"""

from __future__ import annotations

from typing import Literal

from opusmon.collectors.ebpf.budget import Bursts

Sampled = Literal["launch", "poll"]
GROUPS: tuple[Sampled, ...] = ("launch", "poll")
NS = 1_000_000_000
LINGER_NS = 5 * NS
"""After a capture, the next one of a series is waited for so long."""
HOLD_NS, REST_NS = 30 * NS, 90 * NS
"""Beyond the budget at most so long in a row, and then not again for so long."""


class CaptureHold:
    """Whether captures keep the probes on, budget or not."""

    def __init__(self) -> None:
        self._seen: int | None = None
        self._since: int | None = None
        self._rest_until = 0

    def saw(self, now: int) -> None:
        """A capture was open, or ended, by `now` (monotonic ns)."""
        self._seen = now

    def holds(self, now: int) -> bool:
        """Whether to keep the probes on at `now`."""
        if self._seen is None or now - self._seen > LINGER_NS:
            self._since = None
            return False
        if now < self._rest_until:
            return False
        if self._since is None:
            self._since = now
        if now - self._since > HOLD_NS:
            self._since, self._rest_until = None, now + REST_NS
            return False
        return True


class Ration:
    """Decides, once per interval, which groups are to be on.

    Args:
        budget_pct: what each group may cost, in percent of one core.

    Attributes:
        since: group to when its probes went on (monotonic ns), None while they are not all on.
    """

    def __init__(self, budget_pct: float) -> None:
        self.bursts = {group: Bursts(budget_pct) for group in GROUPS}
        self.since: dict[Sampled, int | None] = dict.fromkeys(GROUPS)
        self.hold = CaptureHold()

    def wanted(self, group: Sampled, hits: int, begin: int, now: int, hit_ns: int) -> bool:
        """Whether a group is to be on in the interval that begins now.

        Args:
            group: which one.
            hits: its hits in the interval that ends now.
            begin: when that interval began, monotonic ns.
            now: monotonic ns.
            hit_ns: what a hit costs.
        """
        bursts, since = self.bursts[group], self.since[group]
        if since is not None and since <= begin < now:
            bursts.measured(hits, now - begin, hit_ns)
        else:
            bursts.passed(hits)
        return bursts.wanted or self.hold.holds(now)
