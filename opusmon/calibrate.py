"""`opusmon calibrate`: how long launch calls take on this host, and the threshold that follows from it.

The probes of the streams collector time every launch call for half a minute; the kernel sorts the times into bins of
1/16 octave. `propose` is pure: it takes the highest of p99, p99.9 and p99.99 that enough calls lie beyond.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from opusmon import quantiles
from opusmon.clock import NS, Clock, SystemClock
from opusmon.collectors import streams
from opusmon.collectors.base import Unavailable
from opusmon.collectors.ebpf import probes
from opusmon.collectors.ebpf.errors import ProbesUnavailable
from opusmon.collectors.ebpf.stream_timing import LaunchTimes
from opusmon.quantiles import Buckets
from opusmon.text import printable
from opusmon.times import format_duration

LIMIT = "launch_call_us"
"""Name of the threshold in the file of limits."""
CANDIDATES = (0.99, 0.999, 0.9999)
MIN_BEYOND = 100
"""So many calls must lie beyond a quantile before it is proposed: their number is then known to 20 % (twice its
standard error, 1/sqrt(100)). p99 takes 10,000 calls, p99.9 takes 100,000, p99.99 a million."""
Z95 = 1.959964
"""Standard normal, two-sided 95 %."""
TURN_NS = NS
"""The probes are on, or off, for so long at a time."""


class CalibrationError(Exception):
    """Launch calls cannot be timed here; the text is one line.

    Attributes:
        why: reason and remedy.
    """

    def __init__(self, why: Unavailable) -> None:
        super().__init__(f"{why.reason} ({why.remedy})" if why.remedy else why.reason)
        self.why = why


@dataclass(frozen=True, slots=True)
class Proposal:
    """A threshold, or why there is none.

    Attributes:
        threshold_ns: at least `quantile` of the calls took no longer; NaN when none is proposed.
        quantile: which one, 0-1; NaN likewise.
        low_ns: lower end of its 95 % interval by order statistics, as if calls were independent; NaN likewise.
        high_ns: upper end.
        samples: calls it rests on.
        beyond: of them, those beyond the threshold, about.
        reason: why none is proposed, "" when one is.
    """

    threshold_ns: float
    quantile: float
    low_ns: float
    high_ns: float
    samples: int
    beyond: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ProcessCalls:
    """One process.

    Attributes:
        pid: its id.
        name: as the kernel calls it, "" when it has ended.
        calls: its launch calls, times in ns.
    """

    pid: int
    name: str
    calls: Buckets


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured.

    Attributes:
        seconds: how long.
        timed_s: of them, those in which calls were timed.
        lost: calls that could not be kept.
        processes: those that launched, the busiest first.
        proposal: what follows.
    """

    seconds: float
    timed_s: float
    lost: int
    processes: Sequence[ProcessCalls]
    proposal: Proposal

    @property
    def calls(self) -> Buckets:
        """Those of all processes."""
        return quantiles.merge([process.calls for process in self.processes])


# What follows from the times


def propose(given: Buckets, min_beyond: int = MIN_BEYOND) -> Proposal:
    """The highest of `CANDIDATES` that `min_beyond` calls lie beyond.

    The threshold is the upper edge of the bin that holds the quantile: the bin is 1/16 octave wide, 4.4-6.3 %. The
    interval reaches from the bin of order statistic n q - z s to that of n q + z s, s = sqrt(n q (1 - q)).

    Args:
        given: times of calls in ns.
        min_beyond: calls that must lie beyond the quantile.
    """
    n = round(given.n)
    good = [q for q in CANDIDATES if n * (1 - q) >= min_beyond * (1 - 1e-9)]
    if not good:
        need = math.ceil(min_beyond / (1 - CANDIDATES[0]) - 1e-6)
        return _none(n, f"too few launch calls: {n:,} were timed, p99 takes {need:,}")
    q = good[-1]
    threshold_ns = quantiles.quantile(given, q).hi
    if math.isinf(threshold_ns):
        return _none(n, "the launch calls took longer than can be told apart")
    low_rank, high_rank = order_ranks(n, q)
    return Proposal(
        threshold_ns=threshold_ns,
        quantile=q,
        low_ns=quantiles.quantile(given, low_rank / n).lo,
        high_ns=quantiles.quantile(given, high_rank / n).hi,
        samples=n,
        beyond=round(float(given.count[given.lo >= threshold_ns].sum())),
    )


def _none(samples: int, reason: str) -> Proposal:
    return Proposal(math.nan, math.nan, math.nan, math.nan, samples, 0, reason)


def order_ranks(n: int, q: float, z: float = Z95) -> tuple[int, int]:
    """Ranks (from 1) between whose order statistics the q-quantile lies with the confidence that `z` stands for.

    How many of n calls are at most the true quantile is binomial (n, q); its normal approximation serves here, where
    n (1 - q) is 100 and more.
    """
    spread = z * math.sqrt(n * q * (1 - q))
    return max(1, math.floor(n * q - spread)), min(n, math.ceil(n * q + spread) + 1)


def toml_line(proposal: Proposal) -> str:
    """`launch_call_us = 14.2`, for the file of limits, rounded up to 0.1 us; "" when none is proposed."""
    if math.isnan(proposal.threshold_ns):
        return ""
    return f"{LIMIT} = {math.ceil(proposal.threshold_ns / 100 - 1e-9) / 10:.1f}"


# For people and for programs


def render(calibration: Calibration) -> str:
    """The calibration as text, lines ended by newlines."""
    calls, found = calibration.calls, calibration.proposal
    count = len(calibration.processes)
    who = "1 process" if count == 1 else f"{count} processes"
    timed = f"timed for {calibration.timed_s:.0f} s of {calibration.seconds:.0f} s"
    lines = [
        f"{found.samples:,} launch calls of {who}, {timed}",
        *(_line(f"{one.pid} {printable(one.name)}", one.calls) for one in calibration.processes),
    ]
    if count > 1:
        lines.append(_line("all", calls))
    if calibration.lost:
        lines.append(f"{calibration.lost:,} more could not be kept")
    lines += _proposed(found)
    lines.append("Times run from entry to return and include some 0.8 us that the probes take themselves.")
    return "\n".join(lines) + "\n"


def _line(name: str, calls: Buckets) -> str:
    """`  4242 python  412,345 calls  p50 <= 4.35 us  p99 <= 9.73 us`: quantiles by the bins' edges."""
    words = [
        f"{_percent(q)} {_bound(quantiles.quantile(calls, q))}"
        for q in (0.5, *CANDIDATES)
        if quantiles.enough(calls.n, q)
    ]
    return "  " + "  ".join([name, f"{calls.n:,.0f} calls", *words])


def _bound(found: quantiles.Quantile) -> str:
    open_ended = math.isinf(found.hi)
    return f"{'>' if open_ended else '<='} {format_duration(round(found.lo if open_ended else found.hi))}"


def _percent(q: float) -> str:
    return f"p{100 * q:.6g}"


def _proposed(found: Proposal) -> list[str]:
    if found.reason:
        return [f"No threshold is proposed: {found.reason}."]
    low, high = (format_duration(round(ns)) for ns in (found.low_ns, found.high_ns))
    quantile = f"{_percent(found.quantile)} of these calls, {found.beyond:,} of them are beyond it"
    interval = f"95 % interval {low} to {high}, if calls are independent"
    return [f"Proposed: {quantile}; {interval}.", f"    {toml_line(found)}"]


def document(calibration: Calibration) -> dict[str, Any]:
    """The calibration for JSON; missing numbers are None."""
    found = calibration.proposal
    numbers = ("threshold_ns", "quantile", "low_ns", "high_ns", "samples", "beyond")
    return {
        "seconds": calibration.seconds,
        "timed_s": calibration.timed_s,
        "lost": calibration.lost,
        "proposal": {
            **{name: _or_none(getattr(found, name)) for name in numbers},
            "reason": found.reason,
            "toml": toml_line(found),
        },
        "processes": [
            {"pid": one.pid, "name": printable(one.name), "bins": _bins(one.calls)}
            for one in calibration.processes
        ],
    }


def _bins(calls: Buckets) -> list[dict[str, float | None]]:
    rows = zip(calls.lo.tolist(), calls.hi.tolist(), calls.count.tolist(), strict=True)
    return [{"lo_ns": lo, "hi_ns": _or_none(hi), "count": count} for lo, hi, count in rows]


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


# Measuring


async def measure(
    seconds: float = 30.0,
    pids: frozenset[int] = frozenset(),
    clock: Clock | None = None,
    *,
    budget_pct: float = 5.0,
    make_backend: Callable[[str, Sequence[str]], probes.Backend] = probes.load,
) -> Calibration:
    """Time the launch calls of running processes. Needs root, as the streams collector does.

    Args:
        seconds: for how long.
        pids: of these processes only; of all when empty.
        clock: ours by default.
        budget_pct: what the probes may take from the server, in percent of one core. A busy one is timed in one
            second of every N, up to one of 60.
        make_backend: loads the BPF programs of a source, from its name and compiler flags.

    Raises:
        CalibrationError: probes cannot be set here, or none of the processes uses CUDA.
    """
    if why := streams.probe():
        raise CalibrationError(why)
    clock = clock or SystemClock()
    times = LaunchTimes(clock, pids, budget_pct)
    with ThreadPoolExecutor(1, "ebpf") as pool:  # the backend is for one thread, and its calls block

        async def aside(function: Callable[..., Any], *words: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(pool, function, *words)

        try:
            await aside(times.begin, make_backend)
            began = clock.now()
            while (left_ns := began + round(seconds * NS) - clock.now()) > 0:
                await asyncio.sleep(min(TURN_NS, left_ns) / NS)
                await aside(times.turn)
            return _calibration(times, (clock.now() - began) / NS)
        except ProbesUnavailable as error:
            raise CalibrationError(error.why) from error
        finally:
            pool.submit(times.close)


def _calibration(times: LaunchTimes, seconds: float) -> Calibration:
    processes = [ProcessCalls(pid, times.name(pid), calls) for pid, calls in times.bins().items()]
    processes.sort(key=lambda one: -one.calls.n)
    proposal = propose(quantiles.merge([one.calls for one in processes]))
    return Calibration(seconds, times.timed_ns / NS, times.lost, processes, proposal)
