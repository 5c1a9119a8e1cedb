"""Where the time to first token begins to grow faster with the length of the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]

MIN_SIZES = 4
"""Two lines need two lengths each."""
MIN_SAMPLES = 8
"""With one sample per length and 10 % noise, 15 of 100 straight lines looked bent; with three of each, none."""
MIN_BIC = 10.0
"""Gain of the bent line in BIC over the straight one; over 10 is called very strong (Kass and Raftery 1995)."""
MIN_BEND = 1.25
"""Slopes that differ by less are called one line."""
NOISE_FLOOR = 0.002
"""Relative error assumed at least, so that a few samples that agree by chance prove nothing."""
RESAMPLES = 200
_CANDIDATES = 96


@dataclass(frozen=True)
class Knee:
    """A bend of TTFT against prompt length.

    Attributes:
        tokens: where it is.
        low_tokens: 5th percentile over resamples.
        high_tokens: 95th percentile.
        before_ns: growth per token before it.
        after_ns: growth per token after it.
    """

    tokens: float
    low_tokens: float
    high_tokens: float
    before_ns: float
    after_ns: float


@dataclass(frozen=True)
class _Fit:
    at: float
    error: float
    before: float
    after: float


def find_knee(tokens: Floats, ttft_ns: Floats, seed: int = 0) -> tuple[Knee | None, str]:
    """Fit one line and two joined lines; the bend counts when it explains the samples much better.

    Errors count relative to the TTFT of their length, because long prompts scatter more in absolute time.

    Args:
        tokens: prompt length of each sample, shape (n,).
        ttft_ns: its TTFT, shape (n,), finite and positive.
        seed: of the resampling.

    Returns:
        The knee and "", or None and why there is none.
    """
    groups = _groups(tokens)
    if len(groups) < MIN_SIZES:
        return None, f"a knee needs {MIN_SIZES} lengths with answers, there are {len(groups)}"
    if len(tokens) < MIN_SAMPLES:
        return None, f"a knee needs {MIN_SAMPLES} answers, there are {len(tokens)}"
    x, y = _ordered(tokens, ttft_ns, groups)
    sizes = [len(group) for group in groups]
    line, bent = _straight(x, y), _bent(x, y, sizes)
    gain = _bic(line.error, len(x), 2) - _bic(bent.error, len(x), 4)
    if gain < MIN_BIC or not _is_bend(bent):
        return None, "one line fits as well: no knee between the shortest and the longest prompt"
    spread = _resampled(x, y, sizes, np.random.default_rng(seed))
    if spread is None:
        return None, "the bend comes and goes with the samples chosen: no knee that can be relied on"
    return Knee(bent.at, spread[0], spread[1], bent.before, bent.after), ""


def _groups(tokens: Floats) -> list[Floats]:
    """Indices of samples of about the same length: within 5 % of the shortest of them."""
    order = np.argsort(tokens, kind="stable")
    groups: list[list[int]] = []
    for place in order:
        if groups and tokens[place] <= tokens[groups[-1][0]] * 1.05:
            groups[-1].append(int(place))
        else:
            groups.append([int(place)])
    return [np.array(group) for group in groups]


def _ordered(tokens: Floats, ttft_ns: Floats, groups: list[Floats]) -> tuple[Floats, Floats]:
    """Samples by length: tokens, shape (n,), and TTFT beside the median TTFT of its length, shape (n, 2)."""
    order = np.concatenate(groups)
    medians = np.concatenate([np.full(len(group), np.median(ttft_ns[group])) for group in groups])
    return tokens[order].astype(np.float64), np.column_stack((ttft_ns[order], medians)).astype(np.float64)


def _solve(columns: Floats, y: Floats) -> tuple[Floats, float]:
    """Least squares with errors relative to the median: coefficients and the sum of squared relative errors."""
    weighted, wanted = columns / y[:, 1:], y[:, 0] / y[:, 1]
    solution = np.asarray(np.linalg.lstsq(weighted, wanted, rcond=None)[0], np.float64)
    return solution, float(np.sum((weighted @ solution - wanted) ** 2))


def _straight(x: Floats, y: Floats) -> _Fit:
    solution, error = _solve(np.column_stack((np.ones_like(x), x)), y)
    return _Fit(float("nan"), error, float(solution[1]), float(solution[1]))


def _bent(x: Floats, y: Floats, sizes: list[int]) -> _Fit:
    """The best two joined lines with at least two lengths on either side of the joint."""
    ends = np.cumsum(sizes)
    low, high = float(x[ends[1] - 1]), float(x[ends[-3]])
    fits = (_joined(x, y, at) for at in np.geomspace(low, high, _CANDIDATES))
    return min(fits, key=lambda fit: fit.error)


def _joined(x: Floats, y: Floats, at: float) -> _Fit:
    columns = np.column_stack((np.ones_like(x), x, np.maximum(x - at, 0.0)))
    solution, error = _solve(columns, y)
    return _Fit(float(at), error, float(solution[1]), float(solution[1] + solution[2]))


def _bic(error: float, n: int, parameters: int) -> float:
    return float(n * np.log(error / n + NOISE_FLOOR**2) + parameters * np.log(n))


def _is_bend(fit: _Fit) -> bool:
    """Whether time grows with length after the joint, and clearly faster than before."""
    return fit.after > 0 and fit.after > MIN_BEND * fit.before


def _resampled(
    x: Floats, y: Floats, sizes: list[int], rng: np.random.Generator
) -> tuple[float, float] | None:
    """5th and 95th percentile of the joint over resamples within each length; None when 1 in 20 shows no bend."""
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    places = []
    for _ in range(RESAMPLES):
        parts = [start + rng.integers(0, n, n) for start, n in zip(starts, sizes, strict=True)]
        chosen = np.concatenate(parts)
        fit = _bent(x[chosen], y[chosen], sizes)
        if _is_bend(fit):
            places.append(fit.at)
    if len(places) < 0.95 * RESAMPLES:
        return None
    low, high = np.percentile(places, (5, 95))
    return float(low), float(high)
