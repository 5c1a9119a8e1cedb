"""The canary: a few requests an hour to any Messages endpoint, timed from when they were meant to be sent."""

from opusmon.collectors.canary.collector import CanaryCollector
from opusmon.collectors.canary.endpoint import CanaryConfig, CanaryRefused, announce, check

__all__ = ["CanaryCollector", "CanaryConfig", "CanaryRefused", "announce", "check"]
