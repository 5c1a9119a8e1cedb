"""What a collector has to say about itself: said when it changes, and every 60 s while it holds."""

from __future__ import annotations

import os

from opusmon.channels import KEYFRAME_NS
from opusmon.collectors.base import Status

Key = tuple[str, str, str]
"""Channel, field and scope; "" for all."""


class Notes:
    """The `status` rows in force.

    Args:
        collector: name in the rows.
    """

    def __init__(self, collector: str) -> None:
        self._collector = collector
        self._held: dict[Key, Status] = {}
        self._said: dict[Key, Status] = {}
        self._keyframe: int | None = None

    def put(self, key: Key, state: str, reason: str = "", remedy: str = "") -> None:
        """Say this from now on."""
        self._held[key] = Status(self._collector, state, reason, remedy, *key)

    def drop(self, key: Key) -> None:
        """It no longer holds."""
        self._held.pop(key, None)

    def due(self, t: int) -> list[Status]:
        """What to say at `t` (monotonic ns)."""
        mended = [
            Status(self._collector, "ok", "", "", *key) for key in self._said.keys() - self._held.keys()
        ]
        if self._keyframe is None or t - self._keyframe >= KEYFRAME_NS:
            self._keyframe = t
            fresh = list(self._held.values())
        else:
            fresh = [status for key, status in self._held.items() if self._said.get(key) != status]
        self._said = dict(self._held)
        return [*mended, *fresh]


def hidden(count: int) -> tuple[str, str]:
    """State and reason of processes that may not be looked into; root has no way to mend it, so nothing is wrong then."""
    return ("ok" if os.geteuid() == 0 else "no_permission"), f"processes that may not be looked into: {count}"
