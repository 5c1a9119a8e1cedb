"""Channels, rows and files that the recording tests share."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from opusmon.clock import NS
from opusmon.recording import RecordingError, store
from opusmon.recording.stage import Stage
from opusmon.schema import Batch, Channel, Field, Rows, StringTable, sort_rows

MIXED = Channel(
    "mixed",
    "gauge",
    (
        Field("gpu", "<i2"),
        Field("stream", "<u8"),
        Field("i4", "<i4"),
        Field("i8", "<i8"),
        Field("u4", "<u4"),
        Field("f4", "<f4"),
        Field("f8", "<f8"),
        Field("name", "<u4", text=True),
    ),
    key=("gpu", "stream"),
)
POWER = Channel("power", "gauge", (Field("gpu", "<i2"), Field("power_mw", "<f4", "mW")), key=("gpu",))
FAULT = Channel("fault", "event", (Field("code", "<f8"), Field("what", "<u4", text=True)))


def power(*points: tuple[float, int, float], origin: str = "") -> Batch:
    """A `power` batch from (seconds, gpu, mW)."""
    return Batch(POWER, POWER.rows((round(s * NS), gpu, mw) for s, gpu, mw in points), origin)


def fault(second: float, code: float = 1.0, n: int = 1) -> Batch:
    """A `fault` batch of n equal rows."""
    return Batch(FAULT, FAULT.rows([(round(second * NS), code, 0)] * n))


def write(path: Path, transactions: Sequence[Sequence[Batch]], *, finish: bool = True) -> None:
    """Write a file with these transactions; unfinished it is as a killed recorder leaves it."""
    connection, _ = store.create(path)
    stage = Stage(StringTable())
    for batches in transactions:
        stage.build(batches).apply(connection)
    if finish:
        stage.finish([("closed", "1")]).apply(connection)
        store.finish(connection)
    else:
        connection.close()


def in_range(batches: Sequence[Batch], channel: Channel, t0: int, t1: int) -> Rows:
    """What a query must give, from the batches themselves."""
    rows = np.concatenate([np.empty(0, channel.dtype), *(b.rows for b in batches if b.channel == channel)])
    ordered = rows[np.argsort(rows["t"], kind="stable")]
    return ordered[(ordered["t"] > t0) & (ordered["t"] <= t1)]


def ticks(seconds: int, gpus: int = 2, start: int = 0) -> list[list[Batch]]:
    """One transaction a second with a row per GPU; the power is 100 x second + gpu."""
    return [
        [power(*((s, g, 100.0 * s + g) for g in range(gpus)))] for s in range(start + 1, start + seconds + 1)
    ]


_FLOATS = st.sampled_from([float("nan"), 0.0, -0.0, 1.5, -3.25, float("inf"), 1e-30, 7e30, 123456.789])
_SECONDS = st.integers(0, 40)


@st.composite
def mixed_batches(draw: st.DrawFn, horizon_s: int = 2000) -> list[Batch]:
    """Batches of `mixed` that mostly move on in time, with late rows, ties, NaN and several hosts."""
    out: list[Batch] = []
    now_s = draw(st.integers(-50, 50))
    for _ in range(draw(st.integers(1, 16))):
        now_s += draw(st.sampled_from([0, 0, 1, 1, 5, 60, 61, 599, 600, 1300]))
        late_s = draw(st.sampled_from([0, 0, 0, 3, 30, 700, horizon_s]))
        n = draw(st.integers(1, 8))
        rows = np.zeros(n, MIXED.dtype)
        seconds = np.array(draw(st.lists(_SECONDS, min_size=n, max_size=n)))
        rows["t"] = (now_s - late_s + seconds // 4) * NS + draw(st.sampled_from([0, 0, 1, NS - 1]))
        rows["gpu"] = draw(st.lists(st.integers(-1, 1), min_size=n, max_size=n))
        rows["stream"] = draw(st.lists(st.sampled_from([0, 7, 2**64 - 1]), min_size=n, max_size=n))
        rows["i8"] = draw(st.lists(st.integers(-(2**50), 2**50), min_size=n, max_size=n))
        rows["i4"] = draw(st.integers(-(2**31), 2**31 - 1))
        rows["u4"] = draw(st.integers(0, 2**32 - 1))
        for name in ("f4", "f8"):
            rows[name] = draw(st.lists(_FLOATS, min_size=n, max_size=n))
        rows["name"] = draw(st.integers(0, 3))
        out.append(Batch(MIXED, sort_rows(rows), draw(st.sampled_from(["", "", "host-b"]))))
    return out


def edit(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as raw:
        for statement in statements:
            raw.execute(statement)
    raw.close()


def refused(call: Callable[[], object]) -> int:
    """Whether a call raises a `RecordingError`, of one line; anything else it raises is the test's failure."""
    try:
        call()
    except RecordingError as error:
        if "\n" in str(error):
            raise
        return 1
    return 0


def damage(data: bytes, seed: int) -> bytes:
    """Some bytes changed at random, more often than not in the middle of a page's structure."""
    randoms = random.Random(seed)
    out = bytearray(data)
    for _ in range(randoms.choice([1, 5, 50, 500])):
        in_page = randoms.randrange(4096) + 4096 * randoms.randrange(len(out) // 4096)
        place = randoms.randrange(len(out)) if randoms.random() < 0.7 else in_page
        flipped = out[place] ^ (1 << randoms.randrange(8))
        out[place] = randoms.choice([0, 255, flipped, randoms.randrange(256)])
    return bytes(out)


_LIMITED = """
import resource
from pathlib import Path
from opusmon.recording import *
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
{}
print(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024)
"""
"""Not `ru_maxrss`: across fork and exec that also counts what the parent had."""


def measured(code: str) -> int:
    """Peak memory in MB of a child that runs `code`; it is not allowed over 1 GB."""
    child = subprocess.run(
        [
            sys.executable,
            "-c",
            _LIMITED.format(code),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-500:]
    return int(child.stdout.split()[-1])
