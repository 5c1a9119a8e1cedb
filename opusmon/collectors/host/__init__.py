"""The host: pressure, memory, control groups and the serving processes, from /proc and /sys."""

from opusmon.collectors.host.collector import HostCollector

__all__ = ["HostCollector"]
