"""Objectives at the playhead: which there are, and how fast each source burns their budget.

Objectives come with what was recorded, as `status` rows of collector "slo" whose reason is the text of one, so that a
replay judges by the same ones. Windows of hours are summed once in chunks: what has passed does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opusmon.channels import BY_NAME
from opusmon.schema import Rows
from opusmon.slo import Evaluation, Slo, Tally, bracket_s, channel_of, evaluate
from opusmon.slo_past import CHUNK_NS, CHUNK_SLOTS, LONGEST_NS, SETTLED_NS, SLOT_NS, Kept, Room, chunk_sums
from opusmon.ui.panes.base import Frame
from opusmon.ui.panes.latency_numbers import Block
from opusmon.ui.panes.latency_read import Flags, Floats, read

MAX_READ_B = 24 * 1024 * 1024
MAX_READ_CHUNKS = 75
"""Most rows and chunks read for one verdict of one frame: older ones follow in later frames, until then they do not
count, and the time covered says so. The rules over an hour are complete in the first frame."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """An objective judged by one source.

    Attributes:
        block: the source.
        evaluation: burn and budget.
        bracket_ns: the bucket that the limit lies inside of; None when it is known exactly.
    """

    block: Block
    evaluation: Evaluation
    bracket_ns: tuple[float, float] | None = None

    @property
    def slo(self) -> Slo:
        """The objective."""
        return self.evaluation.slo


_KEPT = Kept(Room(MAX_READ_B, MAX_READ_CHUNKS))


def verdicts(frame: Frame, slos: Sequence[Slo], blocks: Sequence[Block]) -> list[Verdict]:
    """Each objective judged by each source that sees what it is about, in the order of both."""
    pairs = [(slo, block) for slo in slos for block in blocks if _channel(slo, block)]
    return [_verdict(frame, slo, block) for slo, block in pairs]


def unjudged(slos: Sequence[Slo], judged: Sequence[Verdict]) -> list[str]:
    """Objectives that no source sees, each with why: they must not look as if they were met."""
    seen = {verdict.slo.text for verdict in judged}
    return [
        f"{slo.text}: judged by no source here"
        + ("" if channel_of(slo, engine=False) else f"; only an engine's metrics tell {slo.metric}")
        for slo in slos
        if slo.text not in seen
    ]


def _channel(slo: Slo, block: Block) -> str:
    """Where what an objective is about is read for a source; "" when that source does not see it."""
    if block.engine is not None and slo.metric != "errors" and block.metric(slo.metric) is None:
        return ""
    return channel_of(slo, engine=block.engine is not None)


def _verdict(frame: Frame, slo: Slo, block: Block) -> Verdict:
    rules = [rule.long_ns for rule in slo.rules if rule.long_ns <= LONGEST_NS]
    first = (frame.t - max([CHUNK_NS, *rules])) // CHUNK_NS
    settled = (frame.t - SETTLED_NS) // CHUNK_NS

    def judged(number: int) -> tuple[Floats, int]:
        return _chunk(frame, slo, block, number)

    key = (slo.text, block.source, block.engine or block.start_id)
    past = _KEPT.past(frame.view, key, first, settled, judged)
    fresh = [judged(number)[0] for number in range(settled, frame.t // CHUNK_NS + 1)]
    begin = settled - past.shape[1] // CHUNK_SLOTS
    whole = Tally(begin * CHUNK_NS, SLOT_NS, np.concatenate([past, *fresh], axis=1))
    found = evaluate(slo, whole, frame.t, longest_ns=LONGEST_NS)
    return Verdict(block, found, _bracket(frame, slo, block))


def _chunk(frame: Frame, slo: Slo, block: Block, number: int) -> tuple[Floats, int]:
    """Sums of one chunk by slot, up to the playhead, and the bytes read."""
    begin, end = number * CHUNK_NS, min((number + 1) * CHUNK_NS, frame.t)
    rows = _rows(frame, slo, block, begin, end)
    return chunk_sums(slo, rows, frame.view.strings.text, begin)


def _rows(frame: Frame, slo: Slo, block: Block, begin: int, end: int) -> Rows:
    """The rows of a source in (begin, end]."""
    rows = read(frame.view, BY_NAME[_channel(slo, block)], begin, end)
    if block.engine is not None:
        return _only(rows, (rows["engine"] == block.engine[0]) & (rows["model"] == block.engine[1]))
    source, start = block.start_id or (-1, -1)
    return _only(rows, (rows["source"] == source) & (rows["start"] == start))


def _only(rows: Rows, mine: Flags) -> Rows:
    """The rows that are flagged, without a copy where all are."""
    return rows if bool(mine.all()) else np.asarray(rows[mine])


def _bracket(frame: Frame, slo: Slo, block: Block) -> tuple[float, float] | None:
    if _channel(slo, block) != "engine_bucket":
        return None
    rows = _rows(frame, slo, block, frame.t - CHUNK_NS, frame.t)
    edges = bracket_s(slo, rows, frame.view.strings.text) if len(rows) else None
    return (edges[0] * 1e9, edges[1] * 1e9) if edges else None
