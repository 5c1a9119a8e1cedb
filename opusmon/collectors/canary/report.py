"""What `opusmon probe` prints: one line per request, and the table of a sweep. Plain text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from opusmon.collectors.api.request import Request
from opusmon.collectors.canary.knee import Knee
from opusmon.collectors.canary.sweep import Point, SweepResult, plain
from opusmon.text import counted

MISSING = "-"
_COLUMNS = (
    ("asked", 8),
    ("tokens", 8),
    ("n", 4),
    ("failed", 7),
    ("TTFT p50", 11),
    ("p25-p75", 19),
    ("max", 11),
    ("TPOT p50", 11),
    ("p25-p75", 19),
)


def render(result: SweepResult) -> str:
    """A sweep as text, lines ended by newlines."""
    return "\n".join(_lines(result)) + "\n"


def request_line(request: Request) -> str:
    """One request: how it ended, its phases apart, its first token and its end, all from where its clocks start."""
    words = [f"{request.number:>4}  {request.outcome}{f' ({request.error})' if request.error else ''}"]
    if not math.isnan(request.status):
        words.append(f"HTTP {request.status:.0f}")
    words.append("reused connection" if request.reused == 1 else _opening(request))
    words += [
        f"{name} {_ms(value)}"
        for name, value in (
            ("headers", request.headers_ns),
            ("TTFT", request.ttft_ns),
            ("E2E", request.e2e_ns),
            ("TPOT", request.tpot_ns),
            ("late", request.late_ns),
            ("client", request.own_ns),
        )
        if not math.isnan(value)
    ]
    if not math.isnan(request.retry_after_s):
        words.append(f"retry after {request.retry_after_s:g} s")
    return "  ".join(words)


def request_json(request: Request) -> dict[str, Any]:
    """One request in plain values; missing numbers are None."""
    body: dict[str, Any] = plain(asdict(request))
    return body


def summary(requests: Sequence[Request]) -> str:
    """Counts and medians of some requests, one line."""
    good = [one for one in requests if one.outcome == "ok"]
    ttft = [one.ttft_ns for one in good if not math.isnan(one.ttft_ns)]
    e2e = [one.e2e_ns for one in good]
    return (
        f"{len(good)} of {len(requests)} ok  TTFT p50 {_ms(median(ttft)) if ttft else MISSING}"
        f"  E2E p50 {_ms(median(e2e)) if e2e else MISSING}  (n {len(good)})"
    )


def _opening(request: Request) -> str:
    phases = (("dns", request.dns_ns), ("connect", request.connect_ns), ("tls", request.tls_ns))
    return (
        "  ".join(f"{name} {_ms(value)}" for name, value in phases if not math.isnan(value))
        or "not connected"
    )


def _lines(result: SweepResult) -> Iterator[str]:
    yield f"{result.model} at {result.host}: clocks start when a request was sent, connecting left out"
    yield "".join(title.rjust(width) for title, width in _COLUMNS)
    yield from map(_row, result.points)
    yield _knee_line(result.knee, result.no_knee)
    cached = [point for point in result.points if point.cached_tokens > 0.05 * point.tokens]
    if cached:
        sizes = ", ".join(f"{point.size:,}" for point in cached)
        yield f"prefix cache: the server took prompt tokens from its cache at {sizes}, although every prompt was new"
    else:
        yield "prefix cache: every prompt began with text of its own, none could be served from it"
    yield f"spent {result.spent_tokens:,} tokens of {result.planned_tokens:,} in {counted(len(result.requests), 'request')}"
    if result.aborted:
        yield f"ended early: {result.aborted}"


def _row(point: Point) -> str:
    cells = (
        f"{point.size:,}",
        MISSING if math.isnan(point.tokens) else f"{point.tokens:,.0f}",
        str(point.n),
        str(point.failed),
        _ms(point.ttft_ns),
        _range(point.ttft_low_ns, point.ttft_high_ns),
        _ms(point.ttft_max_ns),
        _ms(point.tpot_ns),
        _range(point.tpot_low_ns, point.tpot_high_ns),
    )
    return "".join(cell.rjust(width) for cell, (_, width) in zip(cells, _COLUMNS, strict=True))


def _knee_line(knee: Knee | None, why: str) -> str:
    if knee is None:
        return f"knee: none ({why})"
    return (
        f"knee: TTFT bends at {knee.tokens:,.0f} tokens (90 % of resamples {knee.low_tokens:,.0f}"
        f"-{knee.high_tokens:,.0f}), from {knee.before_ns / 1e3:.3g} to {knee.after_ns / 1e3:.3g} us per token"
    )


def _ms(ns: float) -> str:
    return MISSING if math.isnan(ns) else f"{ns / 1e6:,.1f} ms"


def _range(low_ns: float, high_ns: float) -> str:
    return MISSING if math.isnan(low_ns) else f"{low_ns / 1e6:,.1f}-{high_ns / 1e6:,.1f} ms"
