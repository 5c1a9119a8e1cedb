"""A recording that never raises under the screen, and always has the columns this version knows.

A file can be cut, overwritten or damaged while it is shown, and can come from another version. The screen goes on
with what can still be read and says what cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from opusmon import stats
from opusmon.channels import BY_NAME
from opusmon.clock import Anchors
from opusmon.recording import Mark, Recording, RecordingError
from opusmon.schema import Channel, Rows, StringTable, conform

T = TypeVar("T")


class GuardedStore:
    """A `window.Store` over a recording.

    Args:
        recording: what is read.

    Attributes:
        trouble: why the last read failed, "" when it did not.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.trouble = ""

    @property
    def channels(self) -> Mapping[str, Channel]:
        """The file's channels by name, each as this version declares it where it does."""
        return {name: BY_NAME.get(name, channel) for name, channel in self._recording.channels.items()}

    @property
    def strings(self) -> StringTable:
        """Text of the ids in the rows."""
        return self._recording.strings

    @property
    def anchors(self) -> Anchors:
        """Wall time."""
        return self._recording.anchors

    @property
    def finished(self) -> bool:
        """The recorder has closed the file."""
        return self._recording.finished

    @property
    def t0(self) -> int:
        """Time of the first row."""
        return self._recording.t0

    @property
    def t1(self) -> int:
        """Time of the last row."""
        return self._recording.t1

    def refresh(self) -> bool:
        """Notice what was written since."""
        return self._try(self._recording.refresh, False)

    def query(self, channel: str, t0: int, t1: int) -> Rows:
        """Rows with t0 < t <= t1 in the declared columns; none when they cannot be read."""
        kind = self._kind(channel)
        empty: Rows = np.empty(0, dtype=kind.dtype)
        return self._try(lambda: conform(self._recording.query(channel, t0, t1), kind), empty)

    def binned(self, channel: str, fields: Sequence[str], t0: int, t1: int, step_ns: int) -> Rows:
        """`stats.rollup` of those rows; from the file's rollups when its columns are the declared ones."""
        kind = self._kind(channel)
        if self._recording.channels[channel].dtype != kind.dtype:
            return stats.rollup(self.query(channel, t0, t1), kind, fields, step_ns)
        empty: Rows = np.empty(0, dtype=stats.rollup_dtype(kind, fields))
        return self._try(lambda: self._recording.binned(channel, fields, t0, t1, step_ns), empty)

    def extremes(self, channel: str, fields: Sequence[str], t0: int, t1: int) -> Rows | None:
        """As `Recording.extremes`, when the file's columns are the declared ones."""
        if self._recording.channels[channel].dtype != self._kind(channel).dtype:
            return None
        return self._try(lambda: self._recording.extremes(channel, fields, t0, t1), None)

    def step(self, channel: str, t: int, direction: int) -> int | None:
        """Time of the sample after (+1) or before (-1) `t`."""
        return self._try(lambda: self._recording.step(channel, t, direction), None)

    def marks(self, t0: int | None = None, t1: int | None = None) -> Sequence[Mark]:
        """Marks that touch the range."""
        return self._try(lambda: self._recording.marks(t0, t1), [])

    def close(self) -> None:
        """Close the file."""
        self._try(self._recording.close, None)

    def _kind(self, channel: str) -> Channel:
        return BY_NAME.get(channel) or self._recording.channels[channel]

    def _try(self, read: Callable[[], T], instead: T) -> T:
        try:
            answer = read()
        except RecordingError as error:
            self.trouble = str(error)
            return instead
        self.trouble = ""
        return answer
