"""API latency: not collected in this version. Says what the pane will show and what it will need."""

from __future__ import annotations

from opusmon.collectors.base import Unavailable


def probe() -> Unavailable:
    """Why there is nothing to show. Asks nothing over the network."""
    return Unavailable(
        "this version of opusmon has no latency collector yet;"
        " it will read the engine's /metrics or stand before it as a proxy, and needs nothing else from this host"
    )
