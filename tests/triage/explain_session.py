"""Sessions of many series made column by column, in which changes are planted at known times."""

from __future__ import annotations

import numpy as np

from opusmon.channels import BY_NAME
from opusmon.clock import NS, Anchor, Anchors
from opusmon.schema import Batch, StringTable
from opusmon.window import Window

T0 = 1_000 * NS
"""Monotonic start; planted times are seconds after it."""
WALL = 1_700_000_000 * NS


class Planted:
    """A view being made. Samples are means over their interval, a second long, their ends late by up to 20 ms."""

    def __init__(self, seconds, seed=0):
        self.rng = np.random.default_rng(seed)
        self.strings = StringTable()
        self.window = Window(self.strings, Anchors([Anchor(T0, WALL)]), keep_ns=10**16, cap_b=2**40)
        self.seconds = seconds

    def ends(self):
        """Ends of the samples in seconds, and their lengths."""
        late = self.rng.uniform(0, 0.02, self.seconds + 1)
        ends = np.arange(self.seconds + 1) + late
        return ends[1:], np.diff(ends)

    def level(self, before, after=None, at=None, noise=0.0, until=None):
        """What samples read when a level changes at a time; noise as a share of the level before."""
        ends, lengths = self.clock
        value = np.full(len(ends), float(before))
        if at is not None:
            over = np.clip((ends - at) / lengths, 0, 1)
            if until is not None:
                over -= np.clip((ends - until) / lengths, 0, 1)
            value += (after - before) * over
        return value + noise * max(abs(before), 1e-9) * self.rng.normal(size=len(ends))

    def channel(self, name, /, **columns):
        """Rows of one series; text columns are given as text, others as numbers or arrays."""
        t = (np.asarray(columns.pop("t")) * NS).astype(np.int64) + T0
        kind = BY_NAME[name]
        rows = np.zeros(len(t), kind.dtype)
        rows["t"] = t
        for field in kind.fields:
            if field.name in columns:
                value = columns.pop(field.name)
                rows[field.name] = self.strings.intern(value) if isinstance(value, str) else value
            elif field.dtype in ("<f4", "<f8"):
                rows[field.name] = np.nan
        assert not columns, f"{name} has no {sorted(columns)}"
        order = np.argsort(rows["t"], kind="stable")
        self.window.push(Batch(kind, rows[order]))

    def sampled(self, name, /, **columns):
        """A series with a sample a second; draws its own sample times unless `level` was asked before."""
        ends, lengths = self.clock
        if "dt_ns" in BY_NAME[name].by_name:
            columns["dt_ns"] = (lengths * NS).astype(np.int64)
        self.channel(name, t=ends, **columns)

    def tick(self):
        """New sample times for the series that follow."""
        self.clock = self.ends()
        return self

    def requests(self, per_s, ttft_s, source="proxy", model="m", e2e_s=0.5, outcome="ok"):
        """Requests that show their first token evenly spread; `ttft_s` is a function of that time."""
        first = np.sort(self.rng.uniform(0, self.seconds, int(per_s * self.seconds)))
        ttft = ttft_s(first)
        self.channel(
            "request",
            t=first + e2e_s,
            source=source,
            model=model,
            outcome=outcome,
            ttft_ns=ttft * NS,
            e2e_ns=(ttft + e2e_s) * NS,
            input_tokens=self.rng.poisson(500, len(first)),
            output_tokens=self.rng.poisson(100, len(first)),
            retry=0,
        )


def ns(seconds):
    return T0 + round(seconds * NS)


def nvlink(planted, gpu, slow=None, at=None, links=18, noise=0.01):
    """A GPU's links at 12.1 GB/s; those in `slow` at 6 GB/s from `at` on."""
    for link in range(links):
        planted.tick()
        halved = slow is not None and link in slow
        tx = planted.level(12.1e9, 6.0e9 if halved else None, at if halved else None, noise)
        planted.sampled(
            "nvlink", gpu=gpu, link=link, tx_bps=tx, rx_bps=planted.level(12.1e9, noise=noise), state=1
        )


def stream(planted, at=None, pid=1234, handle=7, process="python", factor=2.0):
    """A stream whose 50 waits a second take 3.1 ms each, `factor` times that from `at` on."""
    planted.tick()
    mean = planted.level(3.1e6, 3.1e6 * factor, at, 0.05)
    waits = planted.level(50, noise=0.04).round()
    launches = planted.level(900, noise=0.03)
    planted.sampled(
        "stream", pid=pid, stream=handle, tid=pid, process=process, waits=waits, wait_ns=mean * waits,
        launches=launches,
    )  # fmt: skip
