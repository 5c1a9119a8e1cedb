"""Sessions made row by row, and what rules find in them however they are cut into pieces."""

from __future__ import annotations

import math

from opusmon.channels import BY_NAME
from opusmon.clock import NS, Anchors
from opusmon.schema import Batch, StringTable
from opusmon.triage import run
from opusmon.window import Window

T0 = 5_000 * NS
"""Monotonic start; times of the sessions are seconds after it."""
NAN = math.nan
GIB = 1024**3
MINE = ("rules_gpu", "rules_gpu_health", "rules_gpu_work", "rules_nvlink", "rules_host")
SHIFTS_S = (0, 1, 7, 59)


class Session:
    """Rows of the real channels; fields left out are NaN, or 0 for whole numbers and texts."""

    def __init__(self):
        self.strings = StringTable()
        self._records = {}

    def add(self, channel, t_s, /, **fields):
        kind = BY_NAME[channel]
        fields.setdefault("dt_ns", NS)
        row = [T0 + round(t_s * NS)]
        for field in kind.fields:
            value = fields.pop(field.name, NAN if field.dtype in ("<f4", "<f8") else 0)
            row.append(self.strings.intern(value) if isinstance(value, str) else value)
        fields.pop("dt_ns", None)
        assert not fields, f"{channel} has no {sorted(fields)}"
        self._records.setdefault(channel, []).append(tuple(row))

    def each_second(self, channel, seconds, row):
        """Rows at 1, 2, ... `seconds`; `row` gives the fields, or several such, at a time."""
        for t_s in range(1, seconds + 1):
            rows = row(t_s)
            for fields in [rows] if isinstance(rows, dict) else rows:
                self.add(channel, t_s, **fields)

    def view(self):
        view = Window(self.strings, Anchors(), keep_ns=10**15, cap_b=2**40)
        for channel, records in self._records.items():
            view.push(Batch(BY_NAME[channel], BY_NAME[channel].rows(records)))
        return view


def find(monkeypatch, session, *only, limits=None):
    """Findings of the rules named, or of all; the same from one piece and from pieces of a minute, however they lie."""
    return cut(monkeypatch, session.view(), only, limits)


def cut(monkeypatch, view, only=(), limits=None):
    monkeypatch.setattr(run, "MODULES", MINE)
    monkeypatch.setattr(run, "PIECE_NS", 10**15)
    only = only or [
        name for name, one in run.rules().items() if one.find.__module__.rpartition(".")[2] in MINE
    ]
    whole = run.look_over(view, view.t0 - 1, view.t1, limits, only)
    monkeypatch.setattr(run, "PIECE_NS", 60 * NS)
    for shift_s in SHIFTS_S:
        pieces = run.look_over(view, view.t0 - 1 - shift_s * NS, view.t1, limits, only)
        assert pieces == whole, f"pieces shifted by {shift_s} s"
    return whole


def seconds(finding):
    """Range of a finding in seconds of the session."""
    return (finding.t0 - T0) / NS, (finding.t1 - T0) / NS


def told(finding):
    """Evidence by name."""
    return {one.name: one.value for one in finding.evidence}


def threshold(finding, name):
    return {one.name: one.threshold for one in finding.evidence}[name]
