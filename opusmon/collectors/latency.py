"""API latency: not collected in this version. Says what the pane will show and what it will need."""

from __future__ import annotations

from opusmon.collectors.base import Unavailable

SHOWS: tuple[str, ...] = (
    "TTFT, ITL and E2E: p50, p95 and p99, and a heat map over time",
    "requests running and waiting, KV cache use, prefix hits, tokens per second",
    "errors, retries and truncated answers by share",
    "SLO burn rate and the budget that is left",
)


def probe() -> Unavailable:
    """Why there is nothing to show. Asks nothing over the network."""
    return Unavailable(
        "this version of opusmon has no latency collector yet;"
        " it will read the engine's /metrics or stand before it as a proxy, and needs nothing else from this host"
    )
