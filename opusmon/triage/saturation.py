"""How throughput answers to load: where it stops growing, and on which side of that the server works.

Load is what Little's law calls N: requests in the system, running and waiting (or streams and the queue before them).
Three curves are fitted by least squares and the one with the least AICc is taken, the straight line unless it is
refuted:

* linear, X = lambda N: no limit was seen;
* flat-top, X = min(lambda N, X_max): a limit that is reached and held, as by a cap on the batch;
* the universal scalability law, X = lambda N / (1 + sigma (N - 1) + kappa N (N - 1)) (Gunther 1993): contention and
  coherence, so throughput may fall again.

The knee is where X^2 / N is greatest, throughput over the time in the system by Little's law: Kleinrock's power (1979).
On a flat-top that is its corner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from opusmon.clock import NS
from opusmon.schema import Rows
from opusmon.triage.curves import KINDS, Curve, Floats, Ints, Points, curve_of
from opusmon.triage.scene import Scene

MAX_BINS = 40
"""Samples of about the same load are averaged first: single scrapes scatter with the length of answers."""
LEAST_LOAD, MOST = 1e-3, 1e12
"""Loads from a thousandth of a request on; larger numbers are none that a server has."""
MIN_LOADS = 3
MIN_SPREAD = 2.0
"""The largest load over the smallest: with less there is no curve to see."""
CLOSE = 0.05
"""With too few points for AICc: the simplest curve that misses none by more than this, or else the closest one."""
BEYOND_KNEE = 1.15
"""A knee counts as reached when loads so far beyond it were seen: a curve that only ends low proves nothing."""
NO_SUPPORT = 10.0
"""A straight line counts as refuted when its AICc is so much higher: then it has essentially no support (Burnham and
Anderson 2002)."""
RESAMPLES = 100
PARAMETERS: Mapping[str, int] = {"linear": 1, "flat-top": 2, "usl": 3}


@dataclass(frozen=True, slots=True)
class Little:
    """Little's law as a cross-check: N = X R.

    Attributes:
        seen: mean requests in the system, as sampled.
        derived: requests that ended per second x their mean time in the system.
    """

    seen: float = math.nan
    derived: float = math.nan

    @property
    def ratio(self) -> float:
        """Derived over seen: near 1 when the figures are about the same requests; NaN where not known."""
        return self.derived / self.seen if self.seen > 0 else math.nan


@dataclass(frozen=True, slots=True)
class Saturation:
    """The fitted curve and where on it the server works.

    Attributes:
        curve: the one taken.
        tried: AICc by kind; NaN where there are too few points for it.
        points: loads that were told apart.
        samples: samples in them.
        knee: load at the knee; infinite when it was not reached.
        knee_low: 5th percentile of it over resamples; NaN where samples do not repeat.
        knee_high: 95th percentile.
        agreed: share of the resamples in which the same kind of curve has a knee within the loads seen; NaN likewise.
        knee_running: requests running (or streams) at the first load seen that reaches the knee.
        deeper_pct: throughput that loads beyond that one brought at most, as measured, per cent; NaN without a knee.
        load: present load.
        running: present concurrency.
        throughput: present throughput, 1/s.
        best: greatest throughput of the curve up to the largest load seen.
        gain_pct: throughput that twice the present load would add, by the curve, per cent.
        little: the cross-check.
    """

    curve: Curve
    tried: Mapping[str, float]
    points: int
    samples: int
    knee: float
    knee_low: float
    knee_high: float
    agreed: float
    knee_running: float
    deeper_pct: float
    load: float
    running: float
    throughput: float
    best: float
    gain_pct: float
    little: Little = field(default_factory=Little)

    @property
    def past_knee(self) -> bool:
        """The present load is at the knee (within `CLOSE`) or past it."""
        return self.load >= (1 - CLOSE) * self.knee

    @property
    def loss_pct(self) -> float:
        """Throughput under the best one of smaller loads, by the curve, per cent."""
        here = float(self.curve.at(self.load))
        return 100 * (1 - here / self.best) if self.load > self.curve.peak else 0.0

    def lines(self) -> list[str]:
        """In words, one fact a line."""
        curve = self.curve
        fitted = {
            "linear": f"throughput grows by {curve.slope:.4g}/s with each request: no limit seen up to here",
            "flat-top": f"throughput grows by {curve.slope:.4g}/s with each request up to {curve.top:.4g}/s",
            "usl": f"universal scalability law: {curve.slope:.4g}/s for one request, contention {curve.sigma:.3g},"
            f" coherence {curve.kappa:.3g}",
        }[curve.kind]
        sure = ""
        if not math.isnan(self.knee_low):
            sure = f", 90 % of resamples {self.knee_low:.4g}-{self.knee_high:.4g}"
        knee = "not reached"
        if math.isfinite(self.knee):
            knee = (
                f"at {self.knee:.4g} requests in the system{sure}, {self.knee_running:.4g} of them running; a deeper"
                f" queue brought {self.deeper_pct:.2g} % more throughput"
            )
        law = ""
        if not math.isnan(self.little.ratio):
            law = f"Little's law: {self.little.seen:.4g} seen, {self.little.derived:.4g} by rate x time"
        return [
            f"{fitted} ({self.points} loads, {self.samples} samples)",
            f"knee: {knee}",
            f"now: {self.load:.4g} requests, {self.throughput:.4g}/s; twice as many would add {self.gain_pct:.3g} %",
            *([law] if law else []),
        ]


# -- arrays ------------------------------------------------------------------------------------------------------


def fit(
    running: Any,
    waiting: Any,
    throughput: Any,
    *,
    now: tuple[float, float, float] | None = None,
    resamples: int = RESAMPLES,
    only_past: bool = False,
    seed: int = 0,
) -> tuple[Saturation | None, str]:
    """Fit throughput against load.

    Args:
        running: requests or streams at work, shape (n,).
        waiting: requests or work queued before them, shape (n,).
        throughput: finished work per second, shape (n,), in any unit.
        now: the present running, waiting and throughput; by default the newest sample.
        resamples: for the confidence of the knee; 0 for none.
        only_past: resample only where the present load is past the knee.
        seed: of the resampling.

    Returns:
        The fit and "", or None and why there is none.
    """
    run, wait, rate = (np.asarray(column, np.float64) for column in (running, waiting, throughput))
    with np.errstate(invalid="ignore", over="ignore"):
        load = run + wait
    with np.errstate(invalid="ignore"):
        good = (load >= LEAST_LOAD) & (load < MOST) & (rate >= 0) & (rate < MOST)
    run, load, rate = run[good], load[good], rate[good]
    if not len(load):
        return None, "no sample has both a load and a throughput"
    order = np.argsort(load, kind="stable")
    starts = _bins(load[order])
    if len(starts) < MIN_LOADS or load.max() < MIN_SPREAD * load.min():
        return (
            None,
            f"the load stayed between {load.min():.3g} and {load.max():.3g}: too little to see a curve",
        )
    points = Points.of(load[order], run[order], rate[order], starts)
    if not points.rate.max() > 1 / MOST:
        return None, "nothing was finished at any load"
    if now is None:
        now = (float(run[-1]), float(load[-1] - run[-1]), float(rate[-1]))
    found = _fitted(points, len(rate), now)
    if not resamples or not math.isfinite(found.knee) or (only_past and not found.past_knee):
        return found, ""
    low, high, agreed = _spread(
        points, rate[order], starts, found.curve.kind, np.random.default_rng(seed), resamples
    )
    return replace(found, knee_low=low, knee_high=high, agreed=agreed), ""


def _bins(load: Floats) -> Ints:
    """Where each group of about equal loads begins, of loads in ascending order."""
    changes = np.flatnonzero(np.diff(load) > 0) + 1
    if len(changes) < MAX_BINS:
        return np.concatenate(([0], changes)).astype(np.int64)
    edges = np.geomspace(load[0], load[-1], MAX_BINS + 1)[1:-1]
    place = np.searchsorted(edges, load, side="right")
    return np.concatenate(([0], np.flatnonzero(np.diff(place) > 0) + 1)).astype(np.int64)


def _fitted(points: Points, samples: int, now: tuple[float, float, float]) -> Saturation:
    every = {kind: fitted(points, points.rate[None, :]) for kind, fitted in KINDS.items()}
    curves = {kind: curve_of(kind, *found, row=0) for kind, found in every.items()}
    tried = {kind: _aicc(curve, len(points.load)) for kind, curve in curves.items()}
    curve = curves[_choose(curves, tried, points)]
    running, waiting, throughput = now
    load = running + waiting
    reach = float(points.load.max())
    knee = curve.knee if BEYOND_KNEE * curve.knee <= reach else math.inf
    knee_running, deeper_pct = _at_knee(points, knee)
    here = float(curve.at(load))
    return Saturation(
        curve=curve,
        tried=tried,
        points=len(points.load),
        samples=samples,
        knee=knee,
        knee_low=math.nan,
        knee_high=math.nan,
        agreed=math.nan,
        knee_running=knee_running,
        deeper_pct=deeper_pct,
        load=load,
        running=running,
        throughput=throughput,
        best=float(curve.at(min(curve.peak, max(reach, load)))),
        gain_pct=100 * (float(curve.at(2 * load)) / here - 1) if here > 0 else math.nan,
    )


def _at_knee(points: Points, knee: float) -> tuple[float, float]:
    """Concurrency at the first load that reaches the knee, and what larger loads brought, per cent."""
    reached = np.flatnonzero(points.load >= knee)
    if not len(reached):
        return math.nan, math.nan
    rates = points.rate[reached]
    more = 100 * (float(rates[1:].max()) / float(rates[0]) - 1) if len(rates) > 1 and rates[0] > 0 else 0.0
    return float(points.run[reached[0]]), max(more, 0.0)


def _aicc(curve: Curve, m: int) -> float:
    """Akaike's criterion for m points, corrected for few of them; the variance counts as a parameter."""
    k = PARAMETERS[curve.kind] + 1
    if m - k - 1 <= 0:
        return math.nan
    return m * math.log(max(curve.error, 1e-300)) + 2 * k + 2 * k * (k + 1) / (m - k - 1)


def _choose(curves: Mapping[str, Curve], tried: Mapping[str, float], points: Points) -> str:
    """The kind with the least AICc; where that does not exist, the simplest that comes close enough."""
    if not any(math.isnan(value) for value in tried.values()):
        floor = (0.001 * float(points.rate.max())) ** 2  # an error of a thousandth is none
        scored = {k: _aicc(replace(c, error=c.error + floor), len(points.load)) for k, c in curves.items()}
        best = min(scored, key=lambda kind: scored[kind])
        return best if scored["linear"] - scored[best] > NO_SUPPORT else "linear"
    for kind, curve in curves.items():
        if (np.abs(curve.at(points.load) - points.rate) <= CLOSE * points.rate).all():
            return kind
    return min(curves, key=lambda kind: curves[kind].error)


def _spread(
    points: Points, rate: Floats, starts: Ints, kind: str, rng: np.random.Generator, resamples: int
) -> tuple[float, float, float]:
    """5th and 95th percentile of the knee over resamples within each load, and the share that has one there."""
    count = np.diff(starts, append=len(rate))
    if np.median(count) < 2:
        return math.nan, math.nan, math.nan
    place = np.repeat(starts, count) + (rng.random((resamples, len(rate))) * np.repeat(count, count)).astype(
        np.int64
    )
    found = KINDS[kind](points, np.add.reduceat(rate[place], starts, axis=1) / count)
    knees = np.array([curve_of(kind, *found, row=n).knee for n in range(resamples)])
    inside = knees[knees <= points.load.max()]
    if not len(inside):
        return math.nan, math.nan, 0.0
    low, high = np.percentile(inside, (5, 95)).tolist()
    return low, high, len(inside) / resamples


# -- recordings --------------------------------------------------------------------------------------------------

NOW_NS = 30 * NS
"""What "now" covers."""


def of_rows(rows: Rows, t: int, *, only_past: bool = False) -> tuple[Saturation | None, str]:
    """Fit what one engine said of itself; output tokens per second against requests running and waiting.

    Args:
        rows: of channel `engine`, of one engine and model, in time order.
        t: present, monotonic ns.
        only_past: as for `fit`.

    Returns:
        The fit and "", or None and why there is none.
    """
    columns = [np.asarray(rows[name], np.float64) for name in ("running", "waiting", "output_tps")]
    recent = rows["t"] > t - NOW_NS
    with np.errstate(invalid="ignore"):
        known = np.isfinite(columns[0] + columns[1] + columns[2]) & recent
    if not known.any():
        return None, "the engine said neither load nor throughput of late"
    now = tuple(float(column[known].mean()) for column in columns)
    found, why = fit(*columns, now=(now[0], now[1], now[2]), only_past=only_past)
    return (replace(found, little=little(rows)), "") if found is not None else (None, why)


def of_scene(scene: Scene) -> dict[tuple[int, int], tuple[Saturation | None, str]]:
    """Fits over a whole scene by text ids of engine and model."""
    return {
        (key[0], key[1]): of_rows(rows, scene.t1) for key, rows in scene.series("engine", "engine", "model")
    }


def little(rows: Rows) -> Little:
    """Little's law over rows of one engine: means weighted by the time that each row covers."""
    dt_s = rows["dt_ns"].astype(np.float64) / NS
    inside = rows["running"].astype(np.float64) + rows["waiting"]
    known = np.isfinite(inside) & (dt_s > 0)
    ended = np.isfinite(rows["e2e_sum_s"]) & (dt_s > 0)
    if not known.any() or not ended.any():
        return Little()
    seen = float(np.average(inside[known], weights=dt_s[known]))
    return Little(seen, float(rows["e2e_sum_s"][ended].sum() / dt_s[ended].sum()))
