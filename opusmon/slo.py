"""Service level objectives: `ttft_p95<800ms`, `errors<1%`, and how fast their error budget burns. Pure.

Burn is the share of bad requests over the share that the objective allows: 1 uses the budget up exactly at the end of
its period. An alert needs a long window and a short one over the same threshold, so that it begins soon and ends soon;
thresholds are budget share x period / window (Google SRE workbook, chapter 5). Requests in error are bad in every
latency objective. What is known from histogram buckets only, with a limit between two edges, is a bracket.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from opusmon.request_rows import BROKEN_OFF
from opusmon.schema import Rows
from opusmon.text import printable
from opusmon.times import TimeError, parse_duration

Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]
Ints = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]
Flags = np.ndarray[tuple[Any, ...], np.dtype[np.bool_]]
Text = Callable[[int], str]
Severity = Literal["page", "ticket"]
State = Literal["page", "ticket", "few", "ok", "unknown"]

_S = 1_000_000_000
_H = 3600 * _S
DAY_NS = 24 * _H
PERIOD_NS = 30 * DAY_NS
MIN_PERIOD_NS, MAX_PERIOD_NS = 6 * _H, 366 * DAY_NS
SHORT_SHARE = 12
"""The short window is this part of the long one."""
MIN_VALID, MIN_BAD = 20, 3
"""With fewer requests, or fewer bad ones, an alert says more about luck than about the server."""
WILSON_Z = 1.96

COLLECTOR = "slo"
"""`status` rows of this collector carry the objectives in force: their `reason` is the text of one, so that a replay
judges by the same ones."""
REQUEST_FIELDS = {"ttft": "ttft_ns", "tpot": "tpot_ns", "e2e": "e2e_ns"}
"""Latencies that rows of `request` hold; their gaps are between chunks, so `itl` is not among them."""
_LATENCIES = ("ttft", "itl", "tpot", "e2e", "queue")
_FORMS = (
    "write for example ttft_p95<800ms, itl_p95<50ms, e2e_p99<20s or errors<1%, with /7d for another period"
)
_LATENCY = re.compile(rf"({'|'.join(_LATENCIES)})_p(\d{{1,2}}(?:\.\d{{1,3}})?)<=?([^/]+)")
_ERRORS = re.compile(r"errors<=?(\d{1,2}(?:\.\d{1,4})?)%")

_LONG_RULES: tuple[tuple[Severity, float, int], ...] = (
    ("page", 0.02, _H),
    ("page", 0.05, 6 * _H),
    ("ticket", 0.10, 72 * _H),
)
_SHORT_RULES: tuple[tuple[Severity, float, int], ...] = (
    ("page", 0.02, 300 * _S),
    ("page", 0.05, 1800 * _S),
    ("ticket", 0.10, 144 * 60 * _S),
)
"""For periods of a few days: 2 % of a day's budget in an hour is a burn of 0.48, which is no trouble."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When an objective is broken badly enough.

    Attributes:
        severity: page or ticket.
        long_ns: length of the long window.
        burn: both windows must burn faster than this.
    """

    severity: Severity
    long_ns: int
    burn: float

    @property
    def short_ns(self) -> int:
        """Length of the short window."""
        return self.long_ns // SHORT_SHARE


@dataclass(frozen=True, slots=True)
class Slo:
    """An objective.

    Attributes:
        text: as it is written.
        metric: ttft, itl, tpot, e2e, queue or errors.
        objective: share of requests that must be good, between 0 and 1.
        limit_ns: a good request takes at most this; NaN for errors.
        period_ns: the budget is for this long.
    """

    text: str
    metric: str
    objective: float
    limit_ns: float
    period_ns: int = PERIOD_NS

    @property
    def budget(self) -> float:
        """Share of requests that may be bad."""
        return 1.0 - self.objective

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Those that mean something for the period: a burn under 1 never uses the budget up."""
        table = _LONG_RULES if 0.02 * self.period_ns / _H >= 2 else _SHORT_RULES
        rules = (
            Rule(severity, long_ns, share * self.period_ns / long_ns) for severity, share, long_ns in table
        )
        return tuple(rule for rule in rules if rule.burn >= 1 - 1e-9)

    def reaches(self, rule: Rule) -> bool:
        """Whether the burn can be as high as the rule needs: with every request bad it is 1 / budget."""
        return rule.burn * self.budget < 1 - 1e-9


def parse_slo(text: str) -> Slo:
    """Read an objective: `METRIC_pN<DURATION` or `errors<N%`, with `/PERIOD` for other budgets than 30 days.

    Raises:
        ValueError: it is none; the text is one line that says why and what to write.
    """
    plain = "".join(text.split()).lower()[:64]
    shown = printable(plain)
    body, slash, period = plain.partition("/")
    period_ns = _period(shown, period) if slash else PERIOD_NS
    errors = _ERRORS.fullmatch(body)
    if errors:
        share = float(errors[1]) / 100
        if not share > 0:
            raise ValueError(f"SLO {shown!r}: a budget of 0 % is used up by the first error; write errors<1%")
        return Slo(plain, "errors", 1 - share, math.nan, period_ns)
    match = _LATENCY.fullmatch(body)
    if match is None:
        raise ValueError(f"SLO {shown!r} is not understood: {_FORMS}")
    percent = float(match[2])
    if not percent > 0:
        raise ValueError(f"SLO {shown!r}: p0 promises nothing; write p50 to p99.9")
    return Slo(plain, match[1], percent / 100, float(_limit(shown, match[3])), period_ns)


def _limit(shown: str, text: str) -> int:
    if text[-1:].isdigit():
        raise ValueError(f"SLO {shown!r}: {text} has no unit; write {text}ms or {text}s")
    try:
        limit_ns = parse_duration(text)
    except TimeError as error:
        raise ValueError(f"SLO {shown!r}: {error}") from error
    if limit_ns <= 0:
        raise ValueError(f"SLO {shown!r}: the limit must be over 0")
    return limit_ns


def _period(shown: str, text: str) -> int:
    try:
        period_ns = parse_duration(text)
    except TimeError as error:
        raise ValueError(f"SLO {shown!r}: {error}") from error
    if not MIN_PERIOD_NS <= period_ns <= MAX_PERIOD_NS:
        raise ValueError(f"SLO {shown!r}: the period must be 6h to 366d; write for example /1d or /30d")
    return period_ns


def objectives(texts: Iterable[str]) -> tuple[list[Slo], list[str]]:
    """Objectives from the texts of `status` rows, and what is wrong with those that cannot be read; "" is none."""
    found: list[Slo] = []
    wrong: list[str] = []
    for text in filter(None, texts):
        try:
            found.append(parse_slo(text))
        except ValueError as error:
            wrong.append(str(error))
    return found, wrong


def problems(slo: Slo) -> tuple[str, ...]:
    """Alerts of an objective that can never fire, one sentence each."""
    return tuple(
        f"{slo.text}: {rule.severity} needs a burn over {rule.burn:g} and the most possible is"
        f" {1 / slo.budget:.3g}; only the other windows count"
        for rule in slo.rules
        if not slo.reaches(rule)
    )


# -- judging rows ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """Requests by the time they were seen, each column of shape (n,).

    Attributes:
        t: monotonic ns.
        valid: requests that count.
        good: of them surely good.
        perhaps: of them good or possibly good: more than `good` only where a limit lies between bucket edges.
        failed: of them in error, which are bad whatever the objective is about; 0 where a histogram does not say.
    """

    t: Ints
    valid: Floats
    good: Floats
    perhaps: Floats
    failed: Floats


def channel_of(slo: Slo, *, engine: bool) -> str:
    """Where what an objective is about is read, of an engine or of requests; "" when that source cannot see it."""
    if engine:
        return "engine" if slo.metric == "errors" else "engine_bucket"
    return "request" if slo.metric == "errors" or slo.metric in REQUEST_FIELDS else ""


def judge(slo: Slo, rows: Rows, text: Text) -> Judged | None:
    """Judge rows of `request`, `engine_bucket` or `engine`; None when they do not hold what the objective is about."""
    if not len(rows):
        return None
    names = rows.dtype.names or ()
    if "outcome" in names:
        return judge_requests(slo, rows, text)
    return judge_buckets(slo, rows, text) if "hi_s" in names else judge_engine(slo, rows)


def judge_requests(slo: Slo, rows: Rows, text: Text) -> Judged | None:
    """Judge rows of channel `request`; None when the objective is about what they do not hold.

    Not valid are answers without the number (a TTFT of an answer that was no stream) and requests that were broken
    off, see `BROKEN_OFF`, before the limit. One that was after the first token is judged by it.
    """
    ok, left = _with(rows["outcome"], text, "ok"), _with(rows["outcome"], text, *BROKEN_OFF)
    if slo.metric == "errors":
        return _judged(rows["t"], ~left, ok, ~ok)
    name = REQUEST_FIELDS.get(slo.metric)
    if name is None:
        return None
    value = rows[name].astype(np.float64)
    seen = ~np.isnan(value) & (slo.metric != "e2e")
    waited = (rows["e2e_ns"] > slo.limit_ns) & (
        slo.metric != "tpot"
    )  # a time per token is no time to wait for
    too_soon = left & ~seen & ~waited
    judged_by_value = ok | (left & seen)
    valid = ~too_soon & ~(ok & np.isnan(value))
    return _judged(rows["t"], valid, judged_by_value & (value <= slo.limit_ns), ~ok & ~left)


def judge_engine(slo: Slo, rows: Rows) -> Judged | None:
    """Judge rows of channel `engine` by an objective about errors; None for one about latency."""
    if slo.metric != "errors":
        return None
    known = rows[~(np.isnan(rows["finished"]) | np.isnan(rows["failed"]))]
    finished = known["finished"].astype(np.float64)
    good = np.maximum(finished - known["failed"], 0.0)
    return Judged(known["t"], finished, good, good, finished - good)


def judge_buckets(slo: Slo, rows: Rows, text: Text) -> Judged:
    """Judge rows of channel `engine_bucket`; those of other metrics do not count."""
    rows = rows[_with(rows["metric"], text, slo.metric)]
    limit_s = slo.limit_ns / 1e9
    count = np.nan_to_num(rows["count"].astype(np.float64), nan=0.0)
    good = np.where(rows["hi_s"] <= limit_s * (1 + 1e-9), count, 0.0)
    perhaps = np.where(rows["lo_s"] < limit_s * (1 - 1e-9), count, 0.0)
    return Judged(rows["t"], count, good, perhaps, np.zeros(len(rows)))


def bracket_s(slo: Slo, rows: Rows, text: Text) -> tuple[float, float] | None:
    """The edges (s) of the bucket that the limit lies inside of; None when it is an edge itself."""
    rows = rows[_with(rows["metric"], text, slo.metric)]
    limit_s = slo.limit_ns / 1e9
    inside = rows[(rows["lo_s"] < limit_s * (1 - 1e-9)) & (rows["hi_s"] > limit_s * (1 + 1e-9))]
    return (float(inside["lo_s"].min()), float(inside["hi_s"].max())) if len(inside) else None


def _judged(t: Ints, valid: Flags, good: Flags, failed: Flags) -> Judged:
    surely = (valid & good).astype(np.float64)
    return Judged(t, valid.astype(np.float64), surely, surely, (valid & failed).astype(np.float64))


def _with(ids: np.ndarray[tuple[Any, ...], np.dtype[Any]], text: Text, *words: str) -> Flags:
    """Which of these text ids mean one of the words."""
    known = [number for number in np.unique(ids).tolist() if text(number) in words]
    return np.isin(ids, known)


# -- burn and budget ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """Judged requests in slots of equal length, oldest first.

    Attributes:
        first_t: where the first one begins, monotonic ns.
        step_ns: length of a slot.
        sums: valid, good, perhaps good and failed, shape (4, slots).
    """

    first_t: int
    step_ns: int
    sums: Floats


def no_sums(slots: int) -> Floats:
    """Those of `Tally` in which nothing was judged."""
    return np.zeros((4, slots))


def tally(judged: Judged, first_t: int, step_ns: int, slots: int) -> Tally:
    """Sum judged requests by slot: a row at `t` is in the one with begin < t <= end; the others are left out."""
    place = (judged.t - first_t - 1) // step_ns
    inside = (place >= 0) & (place < slots)
    columns = (judged.valid, judged.good, judged.perhaps, judged.failed)
    sums = [np.bincount(place[inside], weights=column[inside], minlength=slots) for column in columns]
    return Tally(first_t, step_ns, np.array(sums, np.float64).reshape(len(columns), slots))


@dataclass(frozen=True, slots=True)
class Burn:
    """How fast the budget burnt in a window.

    Attributes:
        window_ns: its length.
        covered_ns: from the first request seen in it to its end.
        low: the burn at least; NaN without a request.
        high: and at most; as `low` unless the limit lies between bucket edges.
        valid: requests.
        bad: of them surely bad.
        failed: of those in error, as far as the source says.
    """

    window_ns: int
    covered_ns: int = 0
    low: float = math.nan
    high: float = math.nan
    valid: float = 0.0
    bad: float = 0.0
    failed: float = 0.0

    @property
    def mostly_failed(self) -> bool:
        """More of the bad ones were in error than bad by the number alone."""
        return 2 * self.failed > self.bad


@dataclass(frozen=True, slots=True)
class Check:
    """A rule and what its windows hold.

    Attributes:
        rule: it.
        long: the long window.
        short: the short window.
        state: page or ticket when both burn too fast, few when too little was seen to say so, else ok or unknown.
    """

    rule: Rule
    long: Burn
    short: Burn
    state: State


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An objective at an instant.

    Attributes:
        slo: it.
        checks: one per rule that can fire.
        seen: everything that was tallied.
        left: budget left at the end of what was seen, at least and at most: 1 is all of it, under 0 is overdrawn;
            NaN without a request. What was not seen is taken to have used nothing.
    """

    slo: Slo
    checks: tuple[Check, ...]
    seen: Burn
    left: tuple[float, float] = field(default=(math.nan, math.nan))

    @property
    def state(self) -> State:
        """The worst of the checks."""
        order: Sequence[State] = ("page", "ticket", "few", "ok")
        states = {check.state for check in self.checks}
        return next((state for state in order if state in states), "unknown")


def evaluate(slo: Slo, given: Tally, t: int, *, longest_ns: int = MAX_PERIOD_NS) -> Evaluation:
    """Judge an objective at `t` (monotonic ns) by what was tallied up to there.

    Args:
        slo: the objective.
        given: its slots; windows begin at whole slots.
        t: end of all windows.
        longest_ns: rules with a longer long window are left out: the tally cannot hold them.
    """
    rules = [rule for rule in slo.rules if rule.long_ns <= longest_ns and slo.reaches(rule)]
    checks = tuple(_check(slo, rule, given, t) for rule in rules)
    seen = burn(slo, given, t, max(t - given.first_t, 0))
    used = seen.covered_ns / slo.period_ns
    return Evaluation(slo, checks, seen, (1 - seen.high * used, 1 - seen.low * used))


def burn(slo: Slo, given: Tally, t: int, window_ns: int) -> Burn:
    """The burn in (t - window_ns, t]."""
    begin = max(-(-(t - window_ns - given.first_t) // given.step_ns), 0)
    end = max(-(-(t - given.first_t) // given.step_ns), 0)
    part = given.sums[:, begin:end]
    found = np.flatnonzero(part[0])
    if not len(found):
        return Burn(window_ns)
    valid, good, perhaps, failed = part.sum(axis=1).tolist()
    covered_ns = min(t - given.first_t - (begin + int(found[0])) * given.step_ns, window_ns)
    allowed = valid * slo.budget
    low, high = (valid - perhaps) / allowed, (valid - good) / allowed
    return Burn(window_ns, covered_ns, low, high, valid, valid - perhaps, failed)


def _check(slo: Slo, rule: Rule, given: Tally, t: int) -> Check:
    long, short = burn(slo, given, t, rule.long_ns), burn(slo, given, t, rule.short_ns)
    if math.isnan(long.low):
        return Check(rule, long, short, "unknown")
    if not (long.low > rule.burn and short.low > rule.burn):
        return Check(rule, long, short, "ok")
    return Check(rule, long, short, rule.severity if enough(slo, long) else "few")


def enough(slo: Slo, seen: Burn) -> bool:
    """Whether there were enough requests for an alert: 3 bad of 20, or so many bad ones that luck is ruled out."""
    return bool(are_enough(slo.budget, np.array([seen.bad]), np.array([seen.valid]))[0])


def are_enough(budget: float, bad: Floats, valid: Floats) -> Flags:
    """`enough` for many windows, shape (n,) each; `budget` is the share that may be bad."""
    luck = wilson_lows(bad, valid) <= budget
    return (bad >= MIN_BAD) & ((valid >= MIN_VALID) | ~luck)


def wilson_low(hits: float, n: float, z: float = WILSON_Z) -> float:
    """Lower bound of a share of which `hits` of `n` were seen (Wilson score interval, 95 % for z = 1.96)."""
    return float(wilson_lows(np.array([hits]), np.array([n]), z)[0])


def wilson_lows(hits: Floats, n: Floats, z: float = WILSON_Z) -> Floats:
    """`wilson_low` of many shares, shape (n,); 0 where nothing was seen."""
    seen = np.where(n > 0, n, 1.0)
    share = np.where(n > 0, hits / seen, 0.0)
    middle = share + z * z / (2 * seen)
    wide = z * np.sqrt(np.maximum(share * (1 - share), 0.0) / seen + z * z / (4 * seen * seen))
    return np.where(n > 0, (middle - wide) / (1 + z * z / seen), 0.0)
