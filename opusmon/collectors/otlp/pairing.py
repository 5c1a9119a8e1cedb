"""One row per request where Claude Code tells of it twice or three times: a span, an event, a refusal."""

from __future__ import annotations

import math
from collections import OrderedDict

from opusmon.clock import NS
from opusmon.collectors.api.request import Request
from opusmon.collectors.otlp.spans import Seen

HOLD_S = 6.0
"""Spans and events of one request are sent by two exporters, 5 s apart at most by their defaults."""
REMEMBERED = 4096
_FILLED = ("model", "stop", "error")
_COUNTED = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "status", "retry")


class Pairs:
    """Holds what has a request id until its other records can be here; the rest goes on at once.

    The record with the highest rank has the clocks, for each starts its own elsewhere; the others fill what it lacks.

    Args:
        hold_ns: how long.
        limit: requests held and released but not taken; more are refused.
    """

    def __init__(self, hold_ns: int = round(HOLD_S * NS), limit: int = 20_000) -> None:
        self._hold_ns, self._limit = hold_ns, limit
        self._held: OrderedDict[str, tuple[int, Seen]] = OrderedDict()
        self._ready: list[Request] = []
        self._released: OrderedDict[str, None] = OrderedDict()

    def add(self, one: Seen, now: int) -> bool:
        """Take a record at `now` (monotonic ns); False when there is no room."""
        key = one.request.id
        if not one.paired or not key:
            return self._at_once(one.request)
        if key in self._released:
            return True
        if key in self._held:
            since, other = self._held[key]
            self._held[key] = since, _merged(one, other)
            return True
        if len(self) >= self._limit:
            return False
        self._held[key] = now, one
        return True

    def due(self, now: int) -> list[Request]:
        """The requests that are complete at `now`."""
        while self._held and now - next(iter(self._held.values()))[0] >= self._hold_ns:
            self._release_oldest()
        ready, self._ready = self._ready, []
        return ready

    def release(self) -> None:
        """Wait for no others: all that is held is due."""
        while self._held:
            self._release_oldest()

    def _release_oldest(self) -> None:
        key, (_, one) = self._held.popitem(last=False)
        self._ready.append(one.request)
        self._remember(key)

    def __len__(self) -> int:
        return len(self._held) + len(self._ready)

    def _at_once(self, request: Request) -> bool:
        if len(self) >= self._limit:
            return False
        self._ready.append(request)
        return True

    def _remember(self, key: str) -> None:
        self._released[key] = None
        if len(self._released) > REMEMBERED:
            self._released.popitem(last=False)


def _merged(one: Seen, other: Seen) -> Seen:
    high, low = (one, other) if one.rank > other.rank else (other, one)
    for name in _FILLED:
        setattr(high.request, name, getattr(high.request, name) or getattr(low.request, name))
    for name in _COUNTED:
        if math.isnan(getattr(high.request, name)):
            setattr(high.request, name, getattr(low.request, name))
    return high
