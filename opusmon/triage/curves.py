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


def _usl(points: Points, rates: Floats) -> tuple[Floats, Floats]:
    """Levenberg-Marquardt from the linearised fit, sigma in [0, 1] and kappa >= 0."""
    n, w = points.load, points.weight
    now = _usl_start(n, w, rates)
    error = _usl_error(now, n, w, rates)
    damping = np.full(len(rates), 1e-3)
    for _ in range(30):
        jacobian, residual = _usl_slopes(now, n, rates)
        weighted = jacobian * w[:, None]
        square = np.einsum("bmi,bmj->bij", weighted, jacobian)
        wanted = np.einsum("bmi,bm->bi", weighted, residual)
        diagonal = np.einsum("bii->bi", square)
        damped = square + np.eye(3) * (damping[:, None] * diagonal + 1e-300)[:, None, :]
        step = np.linalg.solve(damped, wanted[:, :, None])[:, :, 0]
        tried = _bounded(now + step)
        found = _usl_error(tried, n, w, rates)
        better = found < error
        gained = float(np.max(np.where(better, 1 - found / np.maximum(error, 1e-300), 0.0)))
        now[better], error[better] = tried[better], found[better]
        damping = np.where(better, damping * 0.1, damping * 10)
        if gained < 1e-6 and (better.any() or damping.min() > 1e3):
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
    return _bounded(np.stack((1 / alone, found[:, 1] / alone, found[:, 2] / alone), axis=1))


def _bounded(parameters: Floats) -> Floats:
    slope, sigma, kappa = parameters.T
    return np.stack((np.maximum(slope, 1e-12), np.clip(sigma, 0, 1), np.maximum(kappa, 0)), axis=1)


def _usl_slopes(now: Floats, n: Floats, rates: Floats) -> tuple[Floats, Floats]:
    """Derivatives by the parameters, shape (b, m, 3), and what is left to explain, shape (b, m)."""
    slope, sigma, kappa = (column[:, None] for column in now.T)
    below = 1 + sigma * (n - 1) + kappa * n * (n - 1)
    fitted = slope * n / below
    return np.stack(
        (n / below, -fitted * (n - 1) / below, -fitted * n * (n - 1) / below), axis=2
    ), rates - fitted


def _usl_error(now: Floats, n: Floats, w: Floats, rates: Floats) -> Floats:
    slope, sigma, kappa = (column[:, None] for column in now.T)
    fitted = slope * n / (1 + sigma * (n - 1) + kappa * n * (n - 1))
    return np.asarray((fitted - rates) ** 2 @ w, np.float64)


KINDS = {"linear": _linear, "flat-top": _flat_top, "usl": _usl}
"""Parameters (b, 3) and weighted mean squared error (b,) of each kind of curve, for throughputs of shape (b, m)."""
