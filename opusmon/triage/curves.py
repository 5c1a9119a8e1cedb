"""Curves of throughput against load, and their least-squares fits: straight, flat-top, universal scalability law."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]
Ints = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Curve:
    """Throughput against load.

    Attributes:
        kind: linear, flat-top or usl.
        slope: lambda: throughput of one request alone, 1/s.
        top: X_max of a flat-top; infinite for the others.
        sigma: contention, 0 to 1; 0 unless usl.
        kappa: coherence; 0 unless usl.
        error: weighted mean of squared errors.
    """

    kind: str
    slope: float
    top: float = math.inf
    sigma: float = 0.0
    kappa: float = 0.0
    error: float = math.nan

    def at(self, load: Any) -> Any:
        """Throughput at a load, number or array."""
        denominator = 1 + self.sigma * (load - 1) + self.kappa * load * (load - 1)
        return np.minimum(self.slope * load / denominator, self.top)

    @property
    def knee(self) -> float:
        """Load with the greatest X^2 / N; infinite where no limit was seen."""
        if self.kind != "usl":
            return self.top / self.slope if self.slope > 0 else math.inf
        sigma, kappa = self.sigma, self.kappa
        if kappa > 0:
            b = sigma - kappa
            return max(1.0, (math.sqrt(b * b + 12 * kappa * (1 - sigma)) - b) / (6 * kappa))
        return max(1.0, (1 - sigma) / sigma) if sigma > 0 else math.inf

    @property
    def peak(self) -> float:
        """Load with the greatest throughput; infinite where it never falls."""
        return max(1.0, math.sqrt((1 - self.sigma) / self.kappa)) if self.kappa > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Points:
    """Means of samples of about the same load, shape (m,) each; `weight` is their share of all samples."""

    load: Floats
    run: Floats
    rate: Floats
    weight: Floats

    @classmethod
    def of(cls, load: Floats, run: Floats, rate: Floats, starts: Ints) -> Points:
        """From samples in ascending order of load, and where each group of them begins."""
        count = np.diff(starts, append=len(load)).astype(np.float64)
        at, active, made = (np.add.reduceat(column, starts) / count for column in (load, run, rate))
        return cls(at, active, made, count / count.sum())


# -- curves, of many throughputs at once -------------------------------------------------------------------------


def curve_of(kind: str, parameters: Floats, errors: Floats, *, row: int) -> Curve:
    """One curve of those that `KINDS` fits."""
    slope, second, third = parameters[row].tolist()
    error = float(errors[row])
    if kind == "usl":
        return Curve(kind, slope, sigma=second, kappa=third, error=error)
    return Curve(kind, slope, top=second, error=error)


def _linear(points: Points, rates: Floats) -> tuple[Floats, Floats]:
    n, w = points.load, points.weight
    slope = rates @ (w * n) / float(w @ (n * n))
    error = (rates - slope[:, None] * n) ** 2 @ w
    return np.stack((slope, np.full_like(slope, np.inf), np.zeros_like(slope)), axis=1), error


def _flat_top(points: Points, rates: Floats) -> tuple[Floats, Floats]:
    """The best of all splits: a line through the origin before, a constant from there on."""
    n, w = points.load, points.weight
    slope = np.cumsum(rates * (w * n), axis=1) / np.cumsum(w * n * n)
    top = np.cumsum((rates * w)[:, ::-1], axis=1)[:, ::-1] / np.cumsum(w[::-1])[::-1]
    slopes, tops = slope[:, :-1], top[:, 1:]
    fitted = np.minimum(slopes[:, :, None] * n, tops[:, :, None])
    errors = (fitted - rates[:, None, :]) ** 2 @ w
    best = np.argmin(errors, axis=1)
    rows = np.arange(len(rates))
    chosen = np.stack((slopes[rows, best], tops[rows, best], np.zeros(len(rates))), axis=1)
    return chosen, errors[rows, best]


_DIAGONAL = np.arange(3)
_LEAST = np.array([1e-12, 0.0, 0.0])
_GREATEST = np.array([np.inf, 1.0, np.inf])
"""Bounds of slope, sigma and kappa."""


def _usl(points: Points, rates: Floats) -> tuple[Floats, Floats]:
    """Levenberg-Marquardt from the linearised fit, sigma in [0, 1] and kappa >= 0.

    A parameter whose bound holds it back is left out of a step: else steps go on being cut off there and the others
    creep. A fit has settled when a step changes its error by less than a millionth, or none makes it less.
    """
    n, w = points.load, points.weight
    now = _usl_start(n, w, rates)
    fitted, gains = _usl_at(now, n)
    error = (fitted - rates) ** 2 @ w
    damping = np.full(len(rates), 1e-3)
    for _ in range(30):
        weighted = gains * w
        square = weighted @ gains.transpose(0, 2, 1)
        wanted = (weighted @ (rates - fitted)[:, :, None])[:, :, 0]
        free = ((now > _LEAST) | (wanted > 0)) & ((now < _GREATEST) | (wanted < 0))
        square *= free[:, :, None] & free[:, None, :]
        square[:, _DIAGONAL, _DIAGONAL] += damping[:, None] * square[:, _DIAGONAL, _DIAGONAL] + 1e-300 + ~free
        step = np.linalg.solve(square, (wanted * free)[:, :, None])[:, :, 0]
        tried = np.clip(now + step, _LEAST, _GREATEST)
        tried_fitted, tried_gains = _usl_at(tried, n)
        found = (tried_fitted - rates) ** 2 @ w
        better = found < error
        settled = np.abs(found - error) <= 1e-6 * error
        # Without any damping columns that say the same, as of two loads, could not be solved for.
        damping = np.maximum(damping * np.where(better, 0.1, 10), 1e-9)
        if better.all():
            now, error, fitted, gains = tried, found, tried_fitted, tried_gains
        elif better.any():
            now[better], error[better] = tried[better], found[better]
            fitted[better], gains[better] = tried_fitted[better], tried_gains[better]
        if (settled | (damping > 1e3)).all():
            break
    return now, error


def _usl_start(n: Floats, w: Floats, rates: Floats) -> Floats:
    """N / X is a parabola: its weighted least squares, as far as it is within bounds."""
    rates = np.maximum(rates, 1e-9 * np.max(rates, axis=1, keepdims=True) + 1e-300)
    columns = np.stack((np.ones_like(n), n - 1, n * (n - 1)), axis=1)
    weights = w * (rates * rates / n) ** 2
    square = np.einsum("bm,mi,mj->bij", weights, columns, columns)
    wanted = np.einsum("bm,mi,bm->bi", weights, columns, n / rates)
    scale = np.einsum("bii->bi", square)
    found = np.linalg.solve(square + np.eye(3) * (1e-9 * scale + 1e-300)[:, None, :], wanted[:, :, None])[
        :, :, 0
    ]
    least = np.min(n / rates, axis=1)
    alone = np.where(found[:, 0] > 0.01 * least, found[:, 0], least)
    start = np.stack((1 / alone, found[:, 1] / alone, found[:, 2] / alone), axis=1)
    return np.asarray(np.clip(start, _LEAST, _GREATEST), np.float64)


def _usl_at(now: Floats, n: Floats) -> tuple[Floats, Floats]:
    """Throughput at each load, shape (b, m), and its derivatives by the parameters, shape (b, 3, m)."""
    slope, sigma, kappa = (column[:, None] for column in now.T)
    pairs = n * (n - 1)
    alone = n / (1 + sigma * (n - 1) + kappa * pairs)
    fitted = slope * alone
    gains = np.empty((len(now), 3, len(n)))
    gains[:, 0] = alone
    share = np.divide(fitted, n, out=gains[:, 1])
    share *= -alone
    np.multiply(share, pairs, out=gains[:, 2])
    share *= n - 1
    return fitted, gains


KINDS = {"linear": _linear, "flat-top": _flat_top, "usl": _usl}
"""Parameters (b, 3) and weighted mean squared error (b,) of each kind of curve, for throughputs of shape (b, m)."""
