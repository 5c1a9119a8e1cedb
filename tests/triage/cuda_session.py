"""Sessions with CUDA streams and stalls: one process that serves, with one thread and one stream of note."""

from __future__ import annotations

import pytest

from opusmon.channels import WHOLE_CONTEXT, WHOLE_GPU
from opusmon.clock import NS
from opusmon.triage import run

from .session import T0, Session

MS, US = 1_000_000, 1_000
PID, TID = 1234, 1288
HANDLE = 0x55D0C84B2E00
PROCESS = f"vllm {PID}"
THREAD = f"{PROCESS} worker-0 {TID}"
SUBJECT = f"{PROCESS} stream {HANDLE:#x}"
WHO = {"pid": PID, "tid": TID, "process": "vllm", "thread": "worker-0"}
NOTHING = dict.fromkeys(
    (
        *("launches", "graph_launches", "copies", "waits", "wait_ns", "bubbles", "bubble_ns"),
        "timed_launches",
    ),
    0,
)


class CudaSession(Session):
    """Rows of streams, stalls and GPUs; times are seconds after `T0`."""

    def stream(self, t_s, **fields):
        self.add("stream", t_s, **{**WHO, "stream": HANDLE, **NOTHING, **fields})

    def stall(self, t_s, kind, **fields):
        self.add("stall", t_s, **{**WHO, "stream": WHOLE_CONTEXT, "count": 1, "kind": kind, **fields})

    def gpu(self, seconds, pct, gpu=0):
        """A GPU that is so busy in each of these seconds."""
        for t_s in seconds:
            self.add("gpu", t_s, gpu=gpu, gi=WHOLE_GPU, sm_util_pct=pct, gpu_busy_pct=pct)

    def find(self, rule, **limits):
        """What a rule finds: the same in one piece, and in pieces of any length, however they lie."""
        view = self.view()
        values = {**run.Scene(view, 0, 0).limits, **limits}

        def over(piece_s, shift_s):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(run, "PIECE_NS", piece_s * NS)
                return run.look_over(view, T0 - shift_s * NS, view.t1, values, only=[rule])

        found = over(10**6, 0)
        for piece_s in (60, 600):
            for shift_s in (0, 1, 7, 59):
                # As text: a threshold that is missing is not equal to itself.
                cut = over(piece_s, shift_s)
                assert list(map(repr, cut)) == list(map(repr, found)), (piece_s, shift_s)
        return found
