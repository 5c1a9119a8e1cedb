"""The header, the footer and the list of marks: pure functions over a window."""

from dataclasses import replace
from pathlib import Path

import pytest

from opusmon.channels import COST, GPU, GPU_DEVICE, GPU_EVENT
from opusmon.clock import NS, Anchor, Anchors
from opusmon.collectors.base import Status, status_batch
from opusmon.collectors.ebpf.hit_price import Price
from opusmon.recording import Mark, RecorderState
from opusmon.schema import Batch, StringTable
from opusmon.ui.header import Facts, cpu_pct, header, recording_words
from opusmon.ui.keys import footer, sheet_lines
from opusmon.ui.marks import Places, neighbour
from opusmon.ui.screens.cost import cost_lines
from opusmon.ui.text import line_cells, plain
from opusmon.window import Window

T = 100 * NS


def row(channel, t, **values):
    """A row with the given fields, the others missing."""
    nan = float("nan")
    defaults = {f.name: (nan if f.dtype[1] == "f" else 0) for f in channel.fields}
    defaults.update(values)
    return (t, *(defaults[f.name] for f in channel.fields))


@pytest.fixture
def view():
    strings = StringTable()
    window = Window(strings, Anchors([Anchor(0, 1_700_000_000 * NS)]))
    devices = [
        row(
            GPU_DEVICE,
            T,
            gpu=n,
            gi=-1,
            name=strings.intern("NVIDIA H200"),
            driver=strings.intern("580.159.04"),
        )
        for n in range(2)
    ]
    window.push(Batch(GPU_DEVICE, GPU_DEVICE.rows(devices)))
    window.push(Batch(GPU, GPU.rows([row(GPU, T, gpu=n, gi=-1, dt_ns=NS) for n in range(2)])))
    return window


def facts(**changes):
    given = {"host": "gpu-host-7", "word": "LIVE", "tracking": True, "behind_ns": 0, "recording": "rec 3h12m 84 MiB",
             "trouble": "", "sample": (T - NS, T), "late_ns": 0, **changes}  # fmt: skip
    return Facts(**given)


def test_the_header_says_where_what_and_when(view):
    text = plain(header(view, T, facts(), 160))
    assert len(text) == 160
    for word in (
        "opusmon",
        "gpu-host-7",
        "2 x H200",
        "driver 580.159.04",
        "LIVE",
        "rec 3h12m 84 MiB",
        "? help",
    ):
        assert word in text
    begin, end = text.split(" - ")
    assert end.split()[0].split(":")[2] == "00.0"  # 22:15:00 UTC: 1 700 000 100 s after the epoch
    assert begin.split()[-1].split(":")[2] == "59.0"


def test_lateness_and_trouble_come_before_everything_optional(view):
    text = plain(header(view, T, facts(late_ns=2_300_000_000, trouble="disk full: recording stopped"), 80))
    assert "!! LATE 2.3 s" in text
    assert "LATE" not in plain(header(view, T, facts(late_ns=1_900_000_000), 80))
    slow = facts(late_ns=7 * NS, sample=(T - 5 * NS, T))  # a sample every 5 s is late after 10 s
    assert "LATE" not in plain(header(view, T, slow, 80))
    said = [plain(header(view, T, facts(late_ns=s * NS, sample=None), 80)) for s in (11, 13)]
    assert ["LATE" in text for text in said] == [
        False,
        True,
    ]  # cost rows come every 5 s, whatever else does not
    assert "!! disk full" in plain(header(view, T, facts(trouble="disk full"), 120))


def test_paused_says_how_far_back(view):
    assert "PAUSED 14:02:10 (-71 s)" in plain(
        header(view, T, facts(word="PAUSED 14:02:10", tracking=False, behind_ns=71 * NS), 160)
    )


@pytest.mark.parametrize("width", [0, 1, 5, 40, 79, 100, 250])
def test_any_width(view, width):
    assert line_cells(header(view, T, facts(), width)) == width
    assert line_cells(footer(width, paused=True, follows=True)) == width


def test_a_host_name_cannot_write_escapes(view):
    assert "\x1b" not in plain(header(view, T, facts(host="\x1b[31mred"), 160))


def test_recording_words():
    state = RecorderState(Path("f"), recording=True, size_b=84 * 2**20, error="", dropped_rows=0, started_t=0)
    assert recording_words(state, 11_520 * NS + 5) == "rec 3h12m 84.0 MiB"
    assert recording_words(replace(state, dropped_rows=7), 9 * NS) == "rec 9 s 84.0 MiB 7 rows dropped"
    assert recording_words(None, 0) == ""


def test_cost_is_the_sum_over_processes(view):
    assert cpu_pct(view, T) is None
    assert "not measured" in plain(cost_lines(view, T)[0])
    names = [view.strings.intern(name) for name in ("screen", "gpu")]
    rows = [
        row(COST, T, collector=names[0], dt_ns=5 * NS, cpu_ns=50_000_000, rss_b=2**20),
        row(
            COST, T, collector=names[1], dt_ns=5 * NS, cpu_ns=25_000_000, rss_b=2**20, calls=465, call_ns=1e8
        ),
    ]
    view.push(Batch(COST, COST.rows(rows)))
    assert cpu_pct(view, T) == pytest.approx(1.5)
    lines = [plain(line) for line in cost_lines(view, T)]
    assert any("1.50 % of one core, 2.0 MiB" in line for line in lines)
    gpu = next(line for line in lines if line.startswith("gpu"))
    assert " 93" in gpu
    assert "2.00 %" in gpu


def test_the_sheet_of_costs_says_what_a_probe_hit_is_taken_to_cost(view):
    said = Status("stalls", "ok", Price(1_330, 8_600, 700, measured=True).words(), "", "cost", "call_ns")
    view.push(status_batch(T, [said, Status("gpu", "ok", "fine")], view.strings))
    view.push(Batch(COST, COST.rows([row(COST, T, collector=view.strings.intern("stalls"), dt_ns=5 * NS)])))
    lines = [plain(line) for line in cost_lines(view, T)]
    assert "stalls: a probe hit is taken to cost 1.33 us at entry, 0.70 us at return (measured here)" in lines
    assert not any("fine" in line for line in lines)


def test_the_sheet_of_costs_keeps_its_figures_and_words_in_a_small_terminal(view):
    said = Status(
        "stalls", "ok", "at most 10 % of the ring buffer (8 MiB) was in use; nothing lost " + "x" * 40
    )
    cost = {"dt_ns": 5 * NS, "cpu_ns": 5e7, "rss_b": 2**20, "late": 3, "dropped": 42, "slowest_ns": 2e6}
    slowest = view.strings.intern("nvmlDeviceGetProcessUtilization of a long name")
    view.push(status_batch(T, [said], view.strings))
    rows = [row(COST, T, collector=view.strings.intern("gpu"), slowest=slowest, **cost)]
    view.push(Batch(COST, COST.rows(rows)))
    lines = [plain(line) for line in cost_lines(view, T, 75)]
    assert max(map(len, lines)) <= 75
    head, gpu = lines[0].split(), lines[1]
    assert head[-4:] == ["late", "lost", "slowest", "call"]
    assert gpu.split()[-5:-2] == ["3", "42", "2"]
    assert gpu.endswith("~")
    words = " ".join(" ".join(lines).split())
    assert "pages shared between them count twice" in words
    assert "250 ns at tracepoints" in words


def test_events_and_marks_are_one_list(view):
    intern = view.strings.intern
    rows = [
        row(GPU_EVENT, T + 5, gpu=1, gi=-1, kind=intern("xid"), code=79, detail=intern("fell off the bus")),
        row(GPU_EVENT, T + 6, gpu=1, gi=-1, kind=intern("throttle_on"), code=4, detail=0),
        row(GPU_EVENT, T + 7, gpu=1, gi=-1, kind=intern("xid"), code=79, detail=intern("fell off the bus")),
    ]
    view.push(Batch(GPU_EVENT, GPU_EVENT.rows(rows)))
    view.add_mark(Mark(T + 1, T + 2, "bookmark", "here"))
    places = Places(view)
    found = places.update()
    assert [(place.t - T, place.kind) for place in found] == [(1, "bookmark"), (5, "xid"), (7, "xid")]
    assert found[1].text == "GPU 1: fell off the bus"
    assert neighbour(found, T + 1, 1).t == T + 5
    assert neighbour(found, T + 5, -1).t == T + 1
    assert neighbour(found, T + 7, 1) is None
    late = row(GPU_EVENT, T + 6, gpu=0, gi=-1, kind=intern("lost"), detail=intern("gone"))
    view.push(Batch(GPU_EVENT, GPU_EVENT.rows([late])))
    assert [place.kind for place in places.update()] == ["bookmark", "xid", "critical", "xid"]


def test_help_fits_eighty_columns():
    assert max(line_cells(line) for line in sheet_lines()) <= 76
