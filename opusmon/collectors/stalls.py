"""Host stalls through eBPF: not collected in this version. Says what the pane will show and what it will need."""

from __future__ import annotations

from opusmon.collectors.base import Unavailable
from opusmon.collectors.facilities import Host, not_in_this_version
from opusmon.collectors.streams import NEEDS


def probe(host: Host | None = None) -> Unavailable:
    """Why there is nothing to show, with the commands that prepare this host. Cheap, never raises."""
    return not_in_this_version("stalls", NEEDS, host or Host())
