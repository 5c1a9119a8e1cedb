"""Which values are missing and why; says so when it changes and every 60 s while it holds."""

from __future__ import annotations

from collections.abc import Mapping

from opusmon.channels import KEYFRAME_NS
from opusmon.collectors.base import Status
from opusmon.collectors.missing import Missing
from opusmon.collectors.notes import Key

OK = Missing("ok", "")


class Board:
    """The reasons in force, by owner (a device, the event waiter).

    Args:
        collector: name in the status rows.
    """

    def __init__(self, collector: str) -> None:
        self._collector = collector
        self._said: dict[str, dict[Key, Missing]] = {}
        self._fresh: list[Status] = []
        self._keyframe: int | None = None

    def update(self, owner: str, now: Mapping[Key, Missing]) -> None:
        """Replace all reasons of an owner; what changed or mended is said at the next `due`."""
        before = self._said.get(owner, {})
        if before == now:
            return
        for key, why in now.items():
            if before.get(key) != why:
                self._fresh.append(self._status(key, why))
        self._fresh += [self._status(key, OK) for key in before if key not in now]
        self._said[owner] = dict(now)

    def add(self, owner: str, key: Key, why: Missing) -> None:
        """Set one reason and leave the owner's others as they are."""
        self.update(owner, {**self._said.get(owner, {}), key: why})

    def due(self, t: int) -> list[Status]:
        """What is to be said at `t` (monotonic ns): all of it every 60 s, the changes between."""
        fresh, self._fresh = self._fresh, []
        if self._keyframe is not None and t - self._keyframe < KEYFRAME_NS:
            return fresh
        self._keyframe = t
        mended = [status for status in fresh if status.state == "ok"]
        return [Status(self._collector, "ok"), *mended, *self._all()]

    def _all(self) -> list[Status]:
        return [self._status(key, why) for reasons in self._said.values() for key, why in reasons.items()]

    def _status(self, key: Key, why: Missing) -> Status:
        channel, field, scope = key
        return Status(self._collector, why.state, why.reason, why.remedy, channel, field, scope)
