"""Dumps and summaries, of a small fake recording whose every value is known."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opusmon.channels import GPU_DEVICE
from opusmon.clock import NS, Anchor, Anchors, ManualClock
from opusmon.export.rows import ExportError, columns, dump
from opusmon.export.summary import render, summary
from opusmon.recording import Recorder, Recording
from opusmon.schema import Batch, Channel, Field, StringTable
from opusmon.times import format_iso

WALL = 1_795_961_001 * NS  # 2026-11-29T14:03:21Z
CET = timezone(timedelta(hours=1))

PROBE = Channel(
    "probe",
    "gauge",
    (
        Field("pid", "<i4"),
        Field("stream", "<u8"),
        Field("comm", "<u4", text=True),
        Field("share_pct", "<f4", "%"),
        Field("bytes_b", "<f8", "B"),
    ),
    key=("pid",),
)
LATER = Channel("later", "event", (Field("time", "<i8"), Field("origin", "<i4")))


@dataclass
class Fake:
    """A recording made of batches."""

    parts: list[Batch]
    strings: StringTable = field(default_factory=StringTable)
    anchors: Anchors = field(default_factory=lambda: Anchors([Anchor(1000, WALL + 1000)]))
    session: dict[str, str] = field(default_factory=dict)
    path: Path = Path("night.opusmon")
    size_b: int = 84_200_000
    finished: bool = True
    warnings: list[str] = field(default_factory=list)
    damaged_chunks: int = 0
    all_marks: list[tuple[int, int, str, str]] = field(default_factory=list)
    asked: list[Sequence[str] | None] = field(default_factory=list)

    @property
    def channels(self) -> dict[str, Channel]:
        return {part.channel.name: part.channel for part in self.parts}

    @property
    def t0(self) -> int:
        return min(part.t0 for part in self.parts)

    @property
    def t1(self) -> int:
        return max(part.t1 for part in self.parts)

    def batches(self, t0: int, t1: int, channels: Sequence[str] | None = None) -> Iterator[Batch]:
        self.asked.append(channels)
        for part in self.parts:
            if (channels is None or part.channel.name in channels) and part.t1 > t0 and part.t0 <= t1:
                yield part

    def marks(self, t0: int | None = None, t1: int | None = None) -> list[tuple[int, int, str, str]]:
        return self.all_marks


def recording() -> Fake:
    strings = StringTable()
    worker, odd = strings.intern("vllm/worker-0"), strings.intern('=1+1,"two"\nlines \udcff')
    first = PROBE.rows([(1000, 12345, 2**64 - 1, worker, 71.3, 0.1), (2000, 12345, 7, odd, np.nan, np.nan)])
    second = PROBE.rows([(1_500_003_000, 1, 0, 0, -0.0, 1e300), (9 * NS, -1, 2**53 + 1, 999, np.inf, 5e-324)])
    return Fake(
        [Batch(PROBE, first), Batch(PROBE, second, "gpu-host-8"), Batch(LATER, LATER.rows([(1500, 5, 6)]))],
        strings,
    )


def dumped(source: Fake, channel: str, fmt: str, t0: int = 0, t1: int = 10 * NS) -> str:
    out = io.StringIO(newline="")
    dump(source, channel, t0, t1, fmt, out, UTC)
    return out.getvalue()


def test_ndjson_has_every_value_exactly() -> None:
    rows = [json.loads(line) for line in dumped(recording(), "probe", "ndjson").splitlines()]
    assert rows == [
        {
            "t": 1000,
            "time": "2026-11-29T14:03:21.000001+00:00",
            "pid": 12345,
            "stream": 18_446_744_073_709_551_615,
            "comm": "vllm/worker-0",
            "share_pct": 71.3,
            "bytes_b": 0.1,
            "origin": "",
        },
        {
            "t": 2000,
            "time": "2026-11-29T14:03:21.000002+00:00",
            "pid": 12345,
            "stream": 7,
            "comm": '=1+1,"two"\nlines \\udcff',
            "share_pct": None,
            "bytes_b": None,
            "origin": "",
        },
        {
            "t": 1_500_003_000,
            "time": "2026-11-29T14:03:22.500003+00:00",
            "pid": 1,
            "stream": 0,
            "comm": "",
            "share_pct": 0.0,
            "bytes_b": 1e300,
            "origin": "gpu-host-8",
        },
        {
            "t": 9 * NS,
            "time": "2026-11-29T14:03:30.000000+00:00",
            "pid": -1,
            "stream": 9_007_199_254_740_993,
            "comm": "?",
            "share_pct": None,
            "bytes_b": 5e-324,
            "origin": "gpu-host-8",
        },
    ]


def test_csv_text_as_it_stands() -> None:
    text = dumped(recording(), "probe", "csv", 0, 2000)
    assert text == (
        "t,time,pid,stream,comm,share_pct,bytes_b,origin\n"
        "1000,2026-11-29T14:03:21.000001+00:00,12345,18446744073709551615,vllm/worker-0,71.3,0.1,\n"
        '2000,2026-11-29T14:03:21.000002+00:00,12345,7,"=1+1,""two""\nlines \\udcff",,,\n'
    )
    assert [row["pid"] for row in csv.DictReader(io.StringIO(text, newline=""))] == ["12345", "12345"]


@pytest.mark.parametrize("fmt", ["csv", "ndjson"])
def test_only_rows_of_the_range_and_of_the_channel(fmt: str) -> None:
    source, out = recording(), io.StringIO()
    assert dump(source, "probe", 1999, 9 * NS - 1, fmt, out, UTC) == 2
    assert source.asked == [["probe"]]
    assert dump(source, "probe", 9 * NS - 1, 9 * NS, fmt, io.StringIO(), UTC) == 1
    assert dump(source, "probe", 1000, 2000, fmt, io.StringIO(), UTC) == 1  # after t0, up to t1
    assert dump(source, "probe", 2000, 4000, fmt, io.StringIO(), UTC) == 0


def test_times_carry_the_zone() -> None:
    out = io.StringIO()
    dump(recording(), "later", 0, NS, "csv", out, CET)
    assert out.getvalue() == "t,time,time_,origin_,origin\n1500,2026-11-29T15:03:21.000001+01:00,5,6,\n"
    assert columns(PROBE) == ["t", "time", "pid", "stream", "comm", "share_pct", "bytes_b", "origin"]


def test_what_is_not_there_is_named_in_one_line() -> None:
    with pytest.raises(ExportError, match=r"no channel 'gpu' in this recording; it has later, probe"):
        dumped(recording(), "gpu", "csv")
    with pytest.raises(ExportError, match=r"no format 'xml'; there are csv, ndjson"):
        dumped(recording(), "probe", "xml")


def test_a_reader_that_leaves_ends_the_dump() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        dump(recording(), "probe", 0, NS, "csv", Closed(), UTC)


def test_rows_are_read_batch_by_batch() -> None:
    """When the first batch is written the second has not been asked for."""
    order: list[str] = []
    source = recording()
    parts = source.parts

    class Slow(Fake):
        def batches(self, t0: int, t1: int, channels: Sequence[str] | None = None) -> Iterator[Batch]:
            for number, part in enumerate(parts[:2]):
                order.append(f"read {number}")
                yield part

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            if "T14:03" in text:
                order.append("write")
            return len(text)

    dump(Slow(parts, source.strings), "probe", 0, 10 * NS, "ndjson", Out(), UTC)
    assert order == ["read 0", "write", "write", "read 1", "write", "write"]


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=20), st.lists(st.integers(0, 10**6 * NS), max_size=20)
)
def test_floats_read_back_and_times_agree(values: list[float], more: list[int]) -> None:
    channel = Channel("x", "gauge", (Field("v", "<f4"),))
    times = sorted([*more, *range(len(values))])[: len(values)]
    source = Fake([Batch(channel, channel.rows(zip(times, values, strict=True)))])
    source.anchors = Anchors([Anchor(0, WALL), Anchor(500 * NS, WALL + 300 * NS, -200 * NS)])
    rows = [json.loads(line) for line in dumped(source, "x", "ndjson", -1, 2**62).splitlines()]
    for row, value, t in zip(rows, values, times, strict=True):
        wanted = None if not np.isfinite(value) else np.float32(value)
        assert (row["v"] is None and wanted is None) or np.float32(row["v"]) == wanted
        assert row["time"] == format_iso(source.anchors, t, UTC)


@pytest.mark.parametrize("fmt", ["csv", "ndjson"])
def test_a_real_recording_dumps_what_was_recorded(tmp_path: Path, fmt: str) -> None:
    """Written by the recorder, read by `Recording`: the same text as from the fake."""
    source = recording()
    source.strings.put(2, "=1+1")
    path = tmp_path / "night.opusmon"
    recorder = Recorder(
        path, strings=source.strings, clock=ManualClock(1000, WALL + 1000), session={"host": "gpu-host-7"}
    )
    for part in source.parts:
        recorder.push(part)
    recorder.close()
    with Recording.open(path) as real:
        facts = summary(real, UTC)
        wanted, got = dumped(source, "probe", fmt), dumped(real, "probe", fmt)
    assert got == wanted
    assert facts["finished"]
    assert {name: one["rows"] for name, one in facts["channels"].items()} == {"later": 1, "probe": 4}
    assert facts["host"] == "gpu-host-7"


def night() -> Fake:
    source = recording()
    device: dict[str, Any] = dict.fromkeys(GPU_DEVICE.by_name, 0)
    names = [
        source.strings.intern(text)
        for text in ("NVIDIA H200", "GPU-11", "580.159.04", "NVIDIA\x1b[2J H200", "GPU-22")
    ]
    rows = []
    for t, gpu, gi, name, uuid in (
        (1000, 1, -1, 3, 4),
        (1000, 0, -1, 0, 1),
        (2000, 0, -1, 0, 1),
        (2000, 0, 2, 3, 4),
    ):
        rows.append(
            (
                t,
                *{
                    **device,
                    "gpu": gpu,
                    "gi": gi,
                    "name": names[name],
                    "uuid": names[uuid],
                    "driver": names[2],
                }.values(),
            )
        )
    source.parts.append(Batch(GPU_DEVICE, GPU_DEVICE.rows(rows)))
    source.session = {"host": "gpu-host-7", "kernel": "6.8.0-85-generic", "opusmon": "0.1.0"}
    source.all_marks = [
        (1500, 1500, "bookmark", "here"),
        (1600, 1700, "drop", "12 stall rows lost: queue full"),
        (1700, 1700, "bookmark", ""),
    ]
    source.anchors = Anchors([Anchor(1000, WALL + 1000), Anchor(5 * NS, WALL + 3 * NS, -2 * NS)])
    return source


def test_summary_of_a_night() -> None:
    facts = json.loads(json.dumps(summary(night(), UTC)))
    assert facts["file"] == "night.opusmon"
    assert (facts["start"], facts["end"]) == (
        "2026-11-29T14:03:21.000001+00:00",
        "2026-11-29T14:03:28.000000+00:00",
    )
    assert facts["duration_s"] == pytest.approx(8.999999)
    assert (facts["host"], facts["driver"], facts["opusmon"]) == ("gpu-host-7", "580.159.04", "0.1.0")
    assert facts["channels"] == {
        "gpu_device": {"kind": "event", "rows": 4},
        "later": {"kind": "event", "rows": 1},
        "probe": {"kind": "gauge", "rows": 4},
    }
    assert [(gpu["gpu"], gpu["uuid"]) for gpu in facts["gpus"]] == [(0, "GPU-11"), (1, "GPU-22")]
    assert facts["marks"] == {"bookmark": 2, "drop": 1}
    assert facts["dropped"] == ["12 stall rows lost: queue full"]
    assert facts["clock_steps"] == [{"time": "2026-11-29T14:03:24.000000+00:00", "step_s": -2.0}]


def test_counts_come_from_the_index_when_there_is_one() -> None:
    source = night()
    source.counts = lambda: {"probe": 1_000_000}  # type: ignore[attr-defined]
    assert {name: one["rows"] for name, one in summary(source)["channels"].items()} == {
        "gpu_device": 0,
        "later": 0,
        "probe": 1_000_000,
    }
    assert None not in source.asked


def test_summary_as_text() -> None:
    source = night()
    source.finished, source.damaged_chunks, source.warnings = False, 3, ["the last second is missing"]
    text = render(summary(source, UTC))
    assert text.splitlines() == [
        "file      night.opusmon  84.2 MB",
        "time      2026-11-29 14:03:21 +00:00 to 2026-11-29 14:03:28 +00:00",
        "lasts     9 s",
        "host      gpu-host-7  kernel 6.8.0-85-generic  driver 580.159.04",
        "opusmon   0.1.0",
        "closed    no: being written, its writer was killed, or it was copied while it was written",
        "gpus      0  NVIDIA H200  GPU-11",
        "          1  NVIDIA?[2J H200  GPU-22",
        "channels  gpu_device      event               4 rows",
        "          later           event               1 rows",
        "          probe           gauge               4 rows",
        "marks     2 bookmark, 1 drop",
        "stepped   the wall clock by -2.000 s at 2026-11-29 14:03:24 +00:00",
        "dropped   12 stall rows lost: queue full",
        "damaged   3 chunks could not be read: `opusmon salvage` makes a copy of the rest",
        "warning   the last second is missing",
    ]


def test_a_quiet_session_has_no_lines_of_trouble() -> None:
    words = {line.split(" ")[0] for line in render(summary(recording(), UTC)).splitlines()}
    assert words.isdisjoint({"stepped", "dropped", "damaged", "warning", "marks", "gpus"})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("fmt", ["csv", "ndjson"])
def test_text_cannot_command_a_terminal_and_stays_exact_elsewhere(fmt: str) -> None:
    strings = StringTable()
    comm = "\x1b]52;c;ZXZpbA==\x07é\x9b"
    rows = PROBE.rows([(1000, 1, 2, strings.intern(comm), 1.0, 2.0)])
    source = Fake([Batch(PROBE, rows, "host\x1b[31m")], strings)
    out = Terminal()
    dump(source, "probe", 0, NS, fmt, out, UTC)
    assert "".join(out.getvalue().splitlines()).isprintable()
    read = csv.DictReader(io.StringIO(out.getvalue())) if fmt == "csv" else [json.loads(out.getvalue())]
    (record,) = read
    assert (record["comm"], record["origin"]) == ("?]52;c;ZXZpbA==?é?", "host?[31m")
    exact = dumped(source, "probe", fmt)
    (record,) = csv.DictReader(io.StringIO(exact)) if fmt == "csv" else [json.loads(exact)]
    assert (record["comm"], record["origin"]) == (comm, "host\x1b[31m")


def test_a_summary_of_a_file_reads_no_rows_to_count_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path / "a", strings=StringTable(), clock=ManualClock())
    recorder.push(Batch(PROBE, PROBE.rows([(second * NS, 1, 2, 0, 1.0, 2.0) for second in range(1, 31)])))
    recorder.close()
    monkeypatch.setattr(Recording, "batches", lambda *_: pytest.fail("rows were read"))
    with Recording.open(tmp_path / "a") as opened:
        assert summary(opened)["channels"] == {"probe": {"kind": "gauge", "rows": 30}}
