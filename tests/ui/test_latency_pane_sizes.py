import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opusmon.channels import ALL
from opusmon.clock import NS, Anchor, Anchors, ManualClock
from opusmon.recording import Recorder, Recording
from opusmon.schema import Batch, Channel, Field, conform
from opusmon.ui.glyphs import BY_NAME as GLYPHS
from opusmon.ui.panes.base import Frame, PaneState, Size
from opusmon.ui.panes.latency_list import SORTS
from opusmon.ui.text import plain
from opusmon.window import Window

from .fakelatency import END, NOW, PANE, FakeLatency, render, serving, text
from .fakeview import NAN, assert_fills


def odd():
    """Numbers and texts that no collector should send."""
    view = FakeLatency()
    numbers = {
        name: value
        for value in (NAN, math.inf, -1e18, 1e18)
        for name in ("e2e_ns", "ttft_ns", "headers_ns", "input_tokens", "own_ns", "status", "limit_requests")
    }
    for number, value in enumerate((NAN, math.inf, -math.inf, -1e18, 1e18, 0.0)):
        fields = dict.fromkeys(numbers, value)
        view.request(END - number * NS, **fields, model="日本語" * 9, label="ü" * 300, source="", start="")
    view.open(END, 2**64 - 1, age_ns=math.inf, source="")
    view.open(END, 7, age_ns=NAN)
    blank = dict.fromkeys(("running", "waiting", "kv_used_pct", "kv_used_max_pct", "output_tps"), NAN)
    view.scrape(END, **blank, model="", kind="", engine="::::", dt_ns=0)
    view.bucket(END, "ttft", 0.0, math.inf, 5, engine="::::", model="")
    view.bucket(END, "ttft", 1.0, 1.0, NAN, engine="::::", model="")
    view.bucket(END, "e2e", NAN, NAN, 5, engine="::::", model="")
    view.bucket(END, "queue", math.inf, -math.inf, 1e30, engine="::::", model="")
    view.slo("e2e_p99<1s")
    view.slo("\x1b[2J")
    return view


VIEWS = [
    FakeLatency(),
    serving(seconds=90),
    serving(seconds=30, engine=False),
    serving(seconds=30, proxy=False),
    odd(),
]


@settings(max_examples=250, deadline=None)
@given(
    st.sampled_from(VIEWS),
    st.integers(0, 220),
    st.integers(0, 60),
    st.sampled_from(list(GLYPHS.values())),
    st.builds(
        PaneState,
        selected=st.integers(0, 400),
        scroll=st.integers(0, 400),
        filter=st.sampled_from(["", "claude", "zzz"]),
        sort=st.sampled_from(["", *SORTS]),
        detail=st.booleans(),
        maximized=st.booleans(),
    ),
    st.sampled_from([0, 1, NS, 60 * NS, 300 * NS, 3600 * NS, 86_400 * NS]),
)
def test_exactly_the_size(view, width, height, glyphs, state, span_ns):
    it = Frame(view, END + NS // 3, span_ns, Size(width, height), glyphs, state)
    assert_fills(PANE, it)
    assert PANE.items(it) >= 0


@pytest.mark.parametrize("glyphs", list(GLYPHS.values()), ids=list(GLYPHS))
def test_ascii_is_ascii(glyphs):
    found = text(VIEWS[1], 198, 55, glyphs=glyphs, maximized=True)
    assert found.isascii() == (glyphs.name == "ascii")


def test_a_quadrant_has_everything_that_matters():
    """78 x 21 is a quarter of a 160 x 50 terminal."""
    found = text(serving(), 78, 21)
    for words in (
        "TTFT",
        "E2E",
        "QUEUE",
        "waiting 37 !",
        "KV 97 %",
        "529",
        "SLO",
        "TTFT over 5m",
        "OUTCOME",
        "12 s+",
    ):
        assert words in found, words


@pytest.mark.parametrize(("width", "height"), [(78, 16), (78, 21), (98, 30), (198, 55)])
@pytest.mark.parametrize("maximized", [False, True])
def test_no_line_is_wasted(width, height, maximized):
    lines = render(serving(), width, height, maximized=maximized)
    blank = [line for line in lines if not line.strip()]
    assert len(blank) <= height // 10


def window_of(view):
    """The rows of a view in a real window."""
    window = Window(view.strings, Anchors(), channels=ALL, keep_ns=10**15)
    for channel in ALL:
        rows = view.rows(channel.name)
        if len(rows):
            window.push(Batch(channel, rows))
    return window


@pytest.mark.parametrize("span_ns", [300 * NS, 3600 * NS])
def test_a_real_window_shows_the_same(span_ns):
    view = serving(seconds=120)
    window = window_of(view)
    frames = [Frame(given_view, END, span_ns, Size(118, 40)) for given_view in (view, window)]
    first, second = ([plain(line) for line in PANE.render(it)] for it in frames)
    assert [line for line in first if "13:0" not in line] == [line for line in second if "13:0" not in line]


def test_a_wide_span_adds_the_buckets_of_its_rollups():
    """An hour with 2 observations a second in one bucket and then 10 minutes in another: counts stay exact."""
    view = FakeLatency()
    for second in range(0, 3600, 10):
        t = END - 3599 * NS + second * NS
        view.scrape(t, dt_ns=10 * NS)
        view.bucket(t, "ttft", *((0.1, 0.2) if second < 3000 else (1.0, 2.0)), 20)
    row = next(line for line in render(view, 118, 30, span_ns=3600 * NS) if line.startswith(" TTFT"))
    assert "7200" in row
    assert row.split()[-1] == "7200"
    # p50 over the hour: the 3600th of 6000 in (0.1, 0.2] is at 160 ms
    assert "160 ms" in row


def test_a_wide_span_of_requests_says_what_it_covers():
    view = FakeLatency()
    for second in range(0, 3600, 10):
        view.request(END - 3599 * NS + second * NS, ttft_ns=(1e8 if second < 1800 else 4e9))
    lines = render(view, 118, 30, span_ns=3600 * NS)
    assert "last 15m only" in "\n".join(lines)
    heading = next(line for line in lines if "TTFT over 1h" in line)
    assert "least, mean and most" in heading
    chart = [line.ljust(118)[8:] for line in lines[lines.index(heading) + 1 :]]
    assert chart[0][:40].isspace()
    assert chart[0].strip()


@pytest.mark.parametrize("span_ns", [300 * NS, 3600 * NS])
def test_a_replayed_recording_shows_the_same(tmp_path, span_ns):
    view = serving(seconds=120)
    clock = ManualClock(END, 1_795_956_000 * NS + END)
    path = tmp_path / "latency.opusmon"
    recorder = Recorder(path, strings=view.strings, clock=clock, session={})
    recorder.anchor(Anchor(0, 1_795_956_000 * NS))
    for channel in ALL:
        rows = view.rows(channel.name)
        if len(rows):
            recorder.push(Batch(channel, rows))
    recorder.close()
    with Recording.open(path) as recording:
        frames = [Frame(it, NOW, span_ns, Size(118, 40)) for it in (view, Window.over(recording))]
        first, second = ([plain(line) for line in PANE.render(it)] for it in frames)
    assert first == second


@pytest.mark.parametrize("span_ns", [300 * NS, 3600 * NS])
def test_a_session_of_another_version(span_ns):
    """With a few columns only, in other types, and with one that is new: what is there is shown."""
    view = serving(seconds=60)
    kept = {
        "own_ns",
        "label",
        "left_requests",
        "queue_n",
        "prefix_hit_pct",
        "gap_p95_ns",
        "phase",
        "preemptions",
    }
    window = Window(view.strings, Anchors(), keep_ns=10**15)
    for channel in ALL:
        rows = view.rows(channel.name)
        fields = (*(field for field in channel.fields if field.name not in kept), Field("news", "<f8"))
        key = tuple(name for name in channel.key if name not in kept)
        other = Channel(channel.name, channel.kind, fields, key)
        if len(rows):
            window.push(Batch(other, conform(rows, other)))
    for state in (PaneState(), PaneState(maximized=True)):
        lines = [plain(line) for line in PANE.render(Frame(window, END, span_ns, Size(158, 50), state=state))]
        assert "TTFT" in "\n".join(lines)
        assert len(lines) == 50
