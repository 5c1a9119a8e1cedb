"""What the latency pane knows at the playhead, read once per frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opusmon.clock import NS
from opusmon.slo import COLLECTOR, objectives
from opusmon.ui.panes.base import Frame
from opusmon.ui.panes.history import nice_step
from opusmon.ui.panes.latency_buckets import BucketRows, read_buckets
from opusmon.ui.panes.latency_facts import RequestFacts, request_facts
from opusmon.ui.panes.latency_list import Slowest, slowest
from opusmon.ui.panes.latency_numbers import Block, Engine, engine_blocks, read_engines, request_blocks
from opusmon.ui.panes.latency_read import (
    COLLECTORS,
    REMEDIES,
    Requests,
    read_open,
    read_requests,
)
from opusmon.ui.panes.latency_slo import Verdict, unjudged, verdicts
from opusmon.ui.panes.memo import FrameMemo
from opusmon.ui.panes.statuses import Status, read_statuses

_ORDER = ("proxy", "engine", "otlp", "canary")
"""What real clients feel comes first, what a canary feels last."""
_WIDE_COLUMNS = 240
"""Bins that a wide span is read in: more than a pane has columns."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """All of it.

    Attributes:
        blocks: figures by source, the most important one first.
        facts: of the sources of requests, by `Block.start_id`.
        engines: the engines, by `Block.engine`.
        requests: those of the span.
        buckets: histograms of the span; None without any.
        slowest: the list.
        verdicts: objectives judged.
        wrong_slos: texts of objectives that cannot be read, or that no source sees, and why.
        statuses: what the sources say of themselves.
    """

    blocks: tuple[Block, ...]
    facts: Mapping[tuple[int, int], RequestFacts]
    engines: Mapping[tuple[int, int], Engine]
    requests: Requests
    buckets: BucketRows | None
    slowest: Slowest
    verdicts: tuple[Verdict, ...]
    wrong_slos: tuple[str, ...]
    statuses: tuple[Status, ...]

    @property
    def is_empty(self) -> bool:
        """Nothing was measured, nothing is in flight."""
        return not self.blocks and not len(self.slowest) and not self.requests.total

    def in_flight(self, start_id: tuple[int, int]) -> int:
        """Requests of a source and start that have not ended."""
        rows = self.slowest.open
        return (
            int(((rows["source"] == start_id[0]) & (rows["start"] == start_id[1])).sum()) if len(rows) else 0
        )

    def limits_ns(self, field: str) -> list[float]:
        """Limits of the objectives about a latency."""
        return sorted({v.slo.limit_ns for v in self.verdicts if v.slo.metric == field})

    def is_over(self, block: Block, field: str, q: float, value_ns: float) -> bool:
        """Whether a percentile is over the limit of an objective about it."""
        return any(
            v.block is block
            and v.slo.metric == field
            and abs(v.slo.objective - q) < 1e-6
            and value_ns > v.slo.limit_ns
            for v in self.verdicts
        )


def _snapshot(frame: Frame) -> Snapshot:
    """Read the view at the playhead."""
    statuses = read_statuses(frame.view, frame.t, *COLLECTORS, COLLECTOR)
    requests = read_requests(frame)
    step_ns = nice_step(max(frame.span_ns, 1), _WIDE_COLUMNS, NS)
    buckets = read_buckets(frame, step_ns)
    engines = read_engines(frame)
    blocks = [*request_blocks(frame, requests), *engine_blocks(frame, engines, buckets, step_ns)]
    blocks.sort(key=lambda block: _ORDER.index(block.source) if block.source in _ORDER else len(_ORDER))
    slos, wrong = objectives(s.reason for s in statuses if s.collector == COLLECTOR)
    judged = verdicts(frame, slos, blocks)
    ids = [block.start_id for block in blocks if block.start_id is not None]
    return Snapshot(
        blocks=tuple(blocks),
        facts={key: request_facts(frame, requests, key) for key in ids},
        engines={engine.key: engine for engine in engines},
        requests=requests,
        buckets=buckets,
        slowest=slowest(frame, requests, read_open(frame, requests.rows)),
        verdicts=tuple(judged),
        wrong_slos=(*wrong, *unjudged(slos, judged)),
        statuses=statuses,
    )


snapshot = FrameMemo(_snapshot)
"""What is known at the playhead, read once per frame."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A source that says nothing.

    Attributes:
        name: of the source.
        reason: why, "" when nothing was recorded about it.
        remedy: what switches it on.
        is_unasked: nobody wanted it to run; else something keeps it from it.
    """

    name: str
    reason: str
    remedy: str
    is_unasked: bool


def absent(known: Snapshot) -> list[Absent]:
    """Sources that say nothing, in the order of `COLLECTORS`."""
    present = {block.source for block in known.blocks}
    said = {status.collector: status for status in known.statuses if status.is_whole}
    found: list[Absent] = []
    for name in COLLECTORS:
        status = said.get(name)
        if name in present or (status is not None and status.is_ok):
            continue
        reason = status.why if status is not None else ""
        remedy = (status.remedy if status is not None else "") or REMEDIES[name]
        found.append(Absent(name, reason, remedy, status is None or status.is_unasked))
    return found
