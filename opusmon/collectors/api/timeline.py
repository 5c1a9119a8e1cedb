"""The clocks of one request and the gaps between what it generated."""

from __future__ import annotations

from array import array

import numpy as np

from opusmon.collectors.api.request import NAN, Phase, Request
from opusmon.stats import percentile

_MAX_GAPS = 65_536
"""Gaps kept for the percentile; a longer answer's later ones still count in mean and maximum."""


class Timeline:
    """When things happened, monotonic ns; None while they have not.

    Attributes:
        first_event: the first event of the stream; comments and pings are none.
        first_token: the first generated delta that is not empty, thinking included.
        first_answer: the first text or tool input.
        last_token: the last generated delta.
        chunks: generated deltas.
    """

    __slots__ = ("_gap_max", "_gaps", "chunks", "first_answer", "first_event", "first_token", "last_token")

    def __init__(self) -> None:
        self.first_event: int | None = None
        self.first_token: int | None = None
        self.first_answer: int | None = None
        self.last_token: int | None = None
        self.chunks = 0
        self._gaps = array("q")
        self._gap_max = 0

    def event(self, t: int) -> None:
        """An event came."""
        if self.first_event is None:
            self.first_event = t

    def token(self, t: int, *, answer: bool) -> None:
        """A generated delta came.

        Args:
            t: when, monotonic ns.
            answer: it is text or tool input, not thinking.
        """
        if self.first_token is None:
            self.first_token = t
        if answer and self.first_answer is None:
            self.first_answer = t
        if self.last_token is not None:
            gap = t - self.last_token
            self._gap_max = max(self._gap_max, gap)
            if len(self._gaps) < _MAX_GAPS:
                self._gaps.append(gap)
        self.last_token = t
        self.chunks += 1

    @property
    def phase(self) -> Phase:
        """What is being generated."""
        if self.first_token is None:
            return "waiting"
        return "thinking" if self.first_answer is None else "answering"

    def fill(self, request: Request, start: int) -> None:
        """Put the clocks, as ns since `start`, and the gaps into a streamed request's row."""
        request.first_event_ns = _since(self.first_event, start)
        request.ttft_ns = _since(self.first_token, start)
        request.first_answer_ns = _since(self.first_answer, start)
        request.last_token_ns = _since(self.last_token, start)
        request.chunks = self.chunks
        if self.chunks > 1 and self.last_token is not None and self.first_token is not None:
            span = self.last_token - self.first_token
            request.gap_mean_ns = span / (self.chunks - 1)
            request.gap_p95_ns = percentile(np.frombuffer(self._gaps, np.int64), 95)
            request.gap_max_ns = self._gap_max
            if request.outcome == "ok" and request.output_tokens >= 2:
                request.tpot_ns = span / (request.output_tokens - 1)


def _since(t: int | None, start: int) -> float:
    return NAN if t is None else t - start
