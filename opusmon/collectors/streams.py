"""CUDA streams through eBPF: not collected in this version. Says what the pane will show and what it will need."""

from __future__ import annotations

from opusmon.collectors import facilities_ebpf as ebpf
from opusmon.collectors.base import Unavailable
from opusmon.collectors.facilities import Host, not_in_this_version

SHOWS: tuple[str, ...] = (
    "kernel launches, graph launches and copies per second, per process and stream",
    "time the host waits for each stream, in ms per second",
    "bubbles: time in which a stream had no work queued",
    "a lane per stream over the span shown",
)

NEEDS = (
    ebpf.lockdown,
    ebpf.kernel_options,
    ebpf.perf_event_paranoid,
    ebpf.tracefs,
    ebpf.bcc,
    ebpf.headers,
    ebpf.privileges,
)
"""Privileges last: the command that gives them also starts opusmon."""


def probe(host: Host | None = None) -> Unavailable:
    """Why there is nothing to show, with the commands that prepare this host. Cheap, never raises."""
    return not_in_this_version("streams", NEEDS, host or Host())
