"""Where TTFT begins to grow faster with the length of the input, in any traffic: two joined lines against one.

The lengths are what clients send, not chosen as in a sweep of `opusmon probe`: requests are grouped by length
first, and all joints are tried at once, as projections, so that a fit with its confidence takes a few ms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]

MIN_REQUESTS = 40
MAX_REQUESTS = 4000
GROUPS = 20
MIN_GROUPS = 8
CANDIDATES = 32
RESAMPLES = 100
NOISE_FLOOR = 0.01
"""Relative error assumed at least: groups that agree by chance prove nothing."""
MIN_EFFECT = 1.25
"""The longest inputs take so much longer than without the bend, or it does not matter."""


@dataclass(frozen=True, slots=True)
class Bend:
    """Two joined lines through TTFT against input tokens.

    Attributes:
        tokens: where they meet.
        low_tokens: 5th percentile of that over resamples.
        high_tokens: 95th percentile.
        agreed: share of the resamples that bend upwards.
        before_ns: growth per token before, at least 0.
        after_ns: growth per token after.
        gain_bic: of the bent line over the straight one.
        effect: TTFT of the longest inputs over what the first line would give.
        n: requests.
    """

    tokens: float
    low_tokens: float
    high_tokens: float
    agreed: float
    before_ns: float
    after_ns: float
    gain_bic: float
    effect: float
    n: int

    @property
    def ratio(self) -> float:
        """Growth after over before, at most 1000."""
        return min(self.after_ns / self.before_ns, 1000.0) if self.before_ns > 0 else 1000.0


def find_bend(tokens: Floats, ttft_ns: Floats, *, min_gain: float = 10.0, seed: int = 0) -> Bend | None:
    """Fit one line and two joined lines to the median TTFT of requests of about the same length.

    Errors count relative to the TTFT of their group: long inputs scatter more in absolute time.

    Args:
        tokens: input tokens, shape (n,).
        ttft_ns: time to first token, shape (n,).
        min_gain: what the bent line must gain in BIC.
        seed: of the resampling.

    Returns:
        The bend, or None where one line does as well or there are too few requests.
    """
    good = np.isfinite(tokens) & (tokens > 0) & np.isfinite(ttft_ns) & (ttft_ns > 0)
    x, y = tokens[good][-MAX_REQUESTS:], ttft_ns[good][-MAX_REQUESTS:]
    if len(x) < MIN_REQUESTS:
        return None
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    groups = _groups(x)
    if len(groups) < MIN_GROUPS:
        return None
    at = np.array([np.add.reduce(x[group]) / (group.stop - group.start) for group in groups])
    middle = np.array([_median(y[group]) for group in groups])
    lines = _Lines.over(at, middle)
    gain, place, slopes = lines.best(np.ones((1, len(at))))
    before, after = (float(value) for value in slopes[0])
    effect = _effect(lines, middle, at, int(place[0]))
    if gain[0] < min_gain or not after > max(before, 0.0) or effect < MIN_EFFECT:
        return None
    again = _resampled(y, groups, np.random.default_rng(seed)) / middle
    _, places, many = lines.best(again)
    bends = many[:, 1] > np.maximum(many[:, 0], 0.0)
    joints = lines.joints[places[bends]]
    low, high = np.percentile(joints, (5, 95)).tolist() if len(joints) else (math.nan, math.nan)
    return Bend(
        tokens=float(lines.joints[place[0]]),
        low_tokens=low,
        high_tokens=high,
        agreed=float(bends.mean()),
        before_ns=max(before, 0.0),
        after_ns=after,
        gain_bic=float(gain[0]),
        effect=effect,
        n=len(x),
    )


def _groups(x: Floats) -> list[slice]:
    """Requests of about the same length, about equally many in each; equal lengths are not parted."""
    edges = {0, len(x)}
    for n in range(1, GROUPS):
        edges.add(int(np.searchsorted(x, x[n * len(x) // GROUPS], side="left")))
    places = sorted(edges)
    return [slice(a, b) for a, b in pairwise(places) if b - a >= 2]


def _median(values: Floats) -> float:
    """`np.median` of some numbers, whose checks take longer than its work on so few."""
    half = len(values) // 2
    if len(values) % 2:
        return float(np.partition(values, half)[half])
    parted = np.partition(values, (half - 1, half))
    return float(parted[half - 1] + parted[half]) / 2


def _resampled(y: Floats, groups: list[slice], rng: np.random.Generator) -> Floats:
    """Medians of resamples within each group, shape (`RESAMPLES`, groups)."""
    columns = []
    for group in groups:
        own = y[group]
        chosen = own[rng.integers(0, len(own), (RESAMPLES, len(own)))]
        columns.append(np.median(chosen, axis=1))
    return np.stack(columns, axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class _Lines:
    """All bent lines that are tried, as projections, so that many resamples cost little.

    Attributes:
        joints: where they bend, shape (c,).
        straight: orthonormal columns of the straight line, relative to the medians, shape (g, 2).
        bent: likewise of the bent ones, shape (c, g, 3).
        upper: what the columns were made with: coefficients solve upper @ b = projection, shape (c, 3, 3).
    """

    joints: Floats
    straight: Floats
    bent: Floats
    upper: Floats

    @classmethod
    def over(cls, at: Floats, middle: Floats) -> _Lines:
        """Joints from the second group to the last but one."""
        joints = np.geomspace(at[1], at[-2], CANDIDATES)
        one, line = np.ones_like(at), at
        bends = np.maximum(at - joints[:, None], 0.0)
        columns = np.stack(
            (np.broadcast_to(one, bends.shape), np.broadcast_to(line, bends.shape), bends), axis=2
        )
        bent, upper = np.linalg.qr(columns / middle[:, None])
        straight, _ = np.linalg.qr(np.stack((one, line), axis=1) / middle[:, None])
        return cls(joints, straight, bent, upper)

    def best(self, given: Floats) -> tuple[Floats, Floats, Floats]:
        """The best bent line of each sample.

        Args:
            given: group medians relative to those of the whole, shape (b, g).

        Returns:
            Gain in BIC over the straight line (b,), place of the joint (b,), slopes before and after (b, 2).
        """
        total = np.einsum("bg,bg->b", given, given)
        plain = total - np.square(given @ self.straight).sum(axis=1)
        onto = np.einsum("cgk,bg->bck", self.bent, given)
        left = total[:, None] - np.square(onto).sum(axis=2)
        place = np.argmin(left, axis=1)
        rows = np.arange(len(given))
        solved = np.linalg.solve(self.upper[place], onto[rows, place][:, :, None])[:, :, 0]
        m = given.shape[1]
        gain = _bic(plain, m, 2) - _bic(left[rows, place], m, 4)
        return gain, place, np.stack((solved[:, 1], solved[:, 1] + solved[:, 2]), axis=1)


def _bic(error: Floats, m: int, parameters: int) -> Floats:
    return np.asarray(m * np.log(np.maximum(error, 0.0) / m + NOISE_FLOOR**2) + parameters * math.log(m))


def _effect(lines: _Lines, middle: Floats, at: Floats, place: int) -> float:
    """The last group's fitted time over what the line before the joint would give there."""
    onto = lines.bent[place].T @ np.ones(len(middle))
    base, slope, more = np.linalg.solve(lines.upper[place], onto).tolist()
    straight = base + max(slope, 0.0) * float(at[-1])
    bent = base + slope * float(at[-1]) + more * float(at[-1] - lines.joints[place])
    return bent / straight if straight > 0 else math.inf
