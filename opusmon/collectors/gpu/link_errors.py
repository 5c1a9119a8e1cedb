"""NVLink error counts: their sums every few seconds, those of single links only when a sum has changed.

A count of one link costs as much time in the driver as a hundred sensor readings; a sum over all links costs the
same once. So links are read one per tick, and only when there is something to learn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from opusmon.channels import WHOLE_GPU
from opusmon.collectors.gpu import fields as f
from opusmon.collectors.gpu.fields import FieldGroup, FieldReader, Floats, entry_missing
from opusmon.collectors.gpu.nvml import NOT_SUPPORTED, Nvml
from opusmon.collectors.gpu.reading import Event, scope
from opusmon.collectors.missing import Missing
from opusmon.collectors.notes import Key

NAMES = ("replay_errors", "recovery_errors", "crc_errors")
FAMILIES = (
    (f.LINK_REPLAY, f.LINK_RECOVERY, f.LINK_CRC),
    (f.LINK5_RETRY_BLOCKS, f.LINK5_RECOVERY, f.LINK5_RCV_ERRORS),
)
"""Field ids in the order of `NAMES`: up to Hopper, and their nearest kin on NVLink 5 (Blackwell and newer)."""

NOT_READ = Missing("unavailable", "not read yet: the counts of one link are read per tick")
INVALID = 2
UNREAD_CODE = -3
HOPELESS = frozenset({NOT_SUPPORTED, INVALID})


class LinkErrors:
    """The error counts of one device.

    Args:
        nvml: the edge of the calling thread.
        handle: device handle.
        gpu: device index.
        count: links; at least one.

    Attributes:
        values: cumulative counts, shape (count, 3), columns as in `NAMES`, NaN where missing.
        missing: why counts are missing, by status key.
        fresh: `values` has been written; whoever takes them over clears it.
    """

    def __init__(self, nvml: Nvml, handle: Any, gpu: int, count: int) -> None:
        self.values: Floats = np.full((count, len(NAMES)), math.nan)
        self.missing: dict[Key, Missing] = {}
        self.fresh = False
        self._gpu, self._count = gpu, count
        self._readers = [
            FieldReader(nvml, handle, {"errors": [(field, f.ALL_LINKS) for field in family]})
            for family in FAMILIES
        ]
        self._reader: FieldReader | None = None
        self._sums: list[float] | None = None
        self._sums_answered = False
        self._codes = [[UNREAD_CODE] * len(NAMES) for _ in range(count)]
        self._queue: deque[int] = deque()
        self._refused: list[int] = []

    def turn(self, t: int, *, slow: bool) -> list[Event]:
        """Read what is due: the sums when `slow`, and at most one link.

        Args:
            t: of the events, monotonic ns.
            slow: a few seconds have passed.

        Returns:
            An event for each count that has grown on the link that was read.
        """
        if self._reader is None and (slow or not self._refused):
            self._choose()
        elif slow and self._sums_answered:
            self._compare()
        if self._reader is None or not self._queue:
            return []
        link = self._queue.popleft()
        if not self._sums_answered:
            self._queue.append(link)
        return self._read_link(self._reader, link, t)

    def _choose(self) -> None:
        """Find the fields this device answers: by their sums, else by those of the first link."""
        if self._refused and set(self._refused) <= HOPELESS:
            return
        self._refused = []
        for where in (f.ALL_LINKS, 0):
            for reader in self._readers:
                group = _ask(reader, where)
                if all(group.codes):
                    self._refused = self._refused or group.codes
                    continue
                self._reader, self._sums_answered = reader, where == f.ALL_LINKS
                self._sums = group.values if self._sums_answered else None
                if self._sums_answered and not any(group.codes) and not any(group.values):
                    self._settle_at_zero()
                else:
                    self._queue = deque(range(self._count))
                self._name_missing()
                return
        self._codes = [list(self._refused)] * self._count
        self._name_missing()

    def _settle_at_zero(self) -> None:
        """Counts never go below zero, so sums of zero are the count of every link: a healthy host reads no link."""
        self.values[:], self.fresh = 0.0, True
        self._codes = [[0] * len(NAMES) for _ in range(self._count)]

    def _compare(self) -> None:
        """Have every link read when a sum is not what it was."""
        assert self._reader is not None  # noqa: S101  (sums are answered by a chosen reader)
        group = _ask(self._reader, f.ALL_LINKS)
        if all(group.codes):
            return
        before, self._sums = self._sums, group.values
        if before is None or not _same(before, self._sums):
            waiting = set(self._queue)
            self._queue.extend(link for link in range(self._count) if link not in waiting)

    def _read_link(self, reader: FieldReader, link: int, t: int) -> list[Event]:
        group = _ask(reader, link)
        before = self.values[link].tolist()
        self.values[link], self.fresh = group.values, True
        if group.codes != self._codes[link]:
            self._codes[link] = group.codes
            self._name_missing()
        return [
            Event(
                t, self._gpu, WHOLE_GPU, "link_errors", link, f"NVLink link {link}: {_words(name)} have grown"
            )
            for name, old, new in zip(NAMES, before, group.values, strict=True)
            if new > old
        ]

    def _name_missing(self) -> None:
        self.missing = {}
        for place, name in enumerate(NAMES):
            self._name_column(name, [codes[place] for codes in self._codes])

    def _name_column(self, name: str, codes: Sequence[int]) -> None:
        whole = ("nvlink", name, scope(self._gpu))
        if UNREAD_CODE in codes:
            self.missing[whole] = NOT_READ
        elif codes[0] and len(set(codes)) == 1:
            self.missing[whole] = entry_missing(codes[0], name)
            return
        for link, code in enumerate(codes):
            if code not in (0, UNREAD_CODE):
                self.missing["nvlink", name, scope(self._gpu, link=link)] = entry_missing(code, name)


def _ask(reader: FieldReader, where: int) -> FieldGroup:
    """The counts of a link or their sums; a call that fails as a whole fails each of them."""
    reader.aim(where)
    answers = reader.read()
    if isinstance(answers, Missing):
        n = len(NAMES)
        return FieldGroup([math.nan] * n, [answers.code or NOT_SUPPORTED] * n, [0] * n)
    return answers["errors"]


def _same(before: Sequence[float], after: Sequence[float]) -> bool:
    return all(old == new or (old != old and new != new) for old, new in zip(before, after, strict=True))


def _words(name: str) -> str:
    return name.replace("_", " ")
