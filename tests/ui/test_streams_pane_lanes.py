"""The lanes of the streams pane: what a stream did over time."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from opusmon.clock import NS
from opusmon.ui.panes.streams_bins import wanted
from opusmon.ui.panes.streams_lanes import LaneCodes, axis, lane_codes
from opusmon.ui.panes.streams_state import snapshot

from .fakestreams import (
    IDLE,
    MS,
    WORKER,
    FakeStreams,
    draw,
    phases,
    picture,
    serving,
    stream_fields,
)
from .fakeview import END, NAN, T0, frame


def test_a_lane_reads_as_the_phases_of_its_stream():
    view = phases()
    streams = snapshot(frame(view, t=END)).streams
    # 61 one-second bins end with the playhead's own; the first of the session is a second after its start
    codes = lane_codes(frame(view, t=END, span_ns=60 * NS), streams, 60, NS)
    assert codes.shape == (1, 60)
    lines = draw(view, 64, 10, t=END)  # 64 - 4 cells for 60 bins
    assert lines[3] == "   " + "".join(mark * 10 for mark in ".=#wwO")


def test_lanes_have_holes_where_nothing_was_recorded():
    view = FakeStreams()
    for second in (1, 2, 59, 60):
        view.add("stream", T0 + second * NS, **stream_fields(**{**IDLE, "launches": 9}))
    assert draw(view, 64, 10, t=END)[3] == "   ==" + " " * 56 + "=="


def test_a_bin_whose_launches_were_not_counted_is_not_idle():
    view = FakeStreams()
    for second in range(1, 61):
        counted = {} if second % 2 else {"launches": NAN}
        view.add("stream", T0 + second * NS, **stream_fields(**{**IDLE, **counted}))
    assert draw(view, 64, 10, t=END)[3] == "   " + ".?" * 30


def test_bubbles_are_a_share_of_the_time_in_which_launches_were_counted():
    # one second in ten is counted, with 300 ms of bubbles in it: 30 %, not 3 %
    view = FakeStreams()
    for second in range(60):
        counted = {"bubble_ns": 300 * MS} if second % 10 == 5 else {"launches": NAN, "bubble_ns": NAN}
        view.add("stream", T0 + second * NS, **stream_fields(**{**IDLE, "launches": 5, **counted}))
    for span_s, columns in ((60, 6), (3600, 360)):
        it = frame(view, t=T0 + 59 * NS, span_ns=span_s * NS)
        assert lane_codes(it, snapshot(it).streams, columns, NS)[0, -6:].tolist() == [6] * 6


def test_lanes_are_drawn_anew_when_rows_come_late():
    view = FakeStreams()
    for second in (1, 2, 59, 60):
        view.add("stream", T0 + second * NS, **stream_fields(**{**IDLE, "launches": 9}))
    before = draw(view, 64, 10, t=END)[3]
    view.add("stream", T0 + 30 * NS, **stream_fields(**{**IDLE, "launches": 9}))
    after = draw(view, 64, 10, t=END)[3]
    assert (before.count("="), after.count("=")) == (4, 5)
    other = FakeStreams()
    for second in (1, 2, 3, 4, 60):
        other.add("stream", T0 + second * NS, **stream_fields(**{**IDLE, "copies": 9}))
    assert draw(other, 64, 10, t=END)[3].count("-") == 5


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_lanes_moved_on_are_those_computed_at_once(data):
    view, kept = FakeStreams(), LaneCodes()
    t = T0
    for _ in range(data.draw(st.integers(1, 40))):
        t += data.draw(st.sampled_from([NS // 3, NS, 2 * NS, 40 * NS]))
        for stream in data.draw(st.sets(st.integers(5, 8), max_size=3)):
            late = data.draw(st.sampled_from([0, 0, 0, 0, 0, 12 * NS]))
            longest = data.draw(st.sampled_from([0, 0, 0, 0, 9 * NS]))
            calls = {"launches": data.draw(st.sampled_from([0, 3])), "wait_max_ns": longest, "stream": stream}
            view.add("stream", t - late, **stream_fields(**{**IDLE, **calls}))
        it = frame(view, t=t)
        series = data.draw(
            st.sampled_from([((WORKER, 5), (WORKER, 6)), ((WORKER, 5), (WORKER, 6), (WORKER, 7))])
        )
        want = replace(wanted(it, [], 20, NS), series=series)
        assert kept(it, want).tolist() == LaneCodes()(it, want).tolist()


def test_a_wait_or_bubble_longer_than_its_row_fills_the_time_before_it():
    view = FakeStreams()
    for second in range(1, 61):
        long = {
            40: {"waits": 1, "wait_ns": 20 * NS, "wait_max_ns": 20 * NS},
            55: {"bubbles": 1, "bubble_ns": 5 * NS, "bubble_max_ns": 5 * NS, "launches": 1},
        }
        view.add("stream", T0 + second * NS, **stream_fields(**{**IDLE, **long.get(second, {})}))
    # the wait ended in the 40th second and began in the 20th; bins between are full
    assert draw(view, 64, 10, t=END)[3] == "   " + "." * 20 + "w" * 20 + "." * 10 + "O" * 5 + "." * 5


def test_a_mean_over_a_bin_of_many_rows():
    # bins of 10 s: in each, half of the rows wait 900 ms of a second, 45 % of the time; then 55 %
    view = FakeStreams()
    for second in range(60):
        share = 0.9 if second < 30 else 1.1
        wait = {"wait_ns": (second % 2) * share * NS, "launches": 5}
        view.add("stream", T0 + second * NS, **stream_fields(**{**IDLE, **wait}))
    streams = snapshot(frame(view, t=T0 + 59 * NS)).streams
    codes = lane_codes(frame(view, t=T0 + 59 * NS), streams, 6, NS)
    assert codes.tolist() == [[3, 3, 3, 5, 5, 5]]


def test_wide_spans_are_read_from_bins_and_say_the_same():
    view = phases()
    streams = snapshot(frame(view, t=END)).streams
    wide = lane_codes(frame(view, t=END, span_ns=3600 * NS), streams, 360, NS)
    short = lane_codes(frame(view, t=END, span_ns=900 * NS), streams, 90, NS)
    assert wide.shape == (1, 360)
    assert wide[0, -7:].tolist() == short[0, -7:].tolist()
    assert not wide[0, :-7].any()


def test_lanes_of_streams_with_equal_handles_in_two_processes_are_kept_apart():
    view = FakeStreams()
    for second in range(1, 61):
        t = T0 + second * NS
        view.add("stream", t, **stream_fields(**{**IDLE, "launches": 1, "wait_ns": 1}))
        view.add("stream", t, **stream_fields(**{**IDLE, "graph_launches": 1}, pid=1))
        view.add("stream", t, **stream_fields(**{**IDLE, "copies": 1}, pid=1, stream=2**63 + 1))
    lines = draw(view, 64, 14, t=END)
    assert [set(line.strip()) for line in lines[3:8:2]] == [{"="}, {"#"}, {"-"}]


def test_maximized_puts_measured_activity_over_the_lanes():
    lines = draw(serving(others=30), 158, 45, maximized=True)
    assert lines[0].startswith(" GPU 0 SM 84 % measured ")
    start = lines[1].index("-1m")
    assert lines[1][start:].split() == ["-1m", "-30s", "0"]
    assert set(lines[0][start:]) == {"#"}  # 84 % is the 7th of 8 levels
    assert set(lines[2][start:]) == {"w"}
    assert set(lines[3][start:]) == {"-"}
    assert "by host evidence, not GPU time" in lines[34]
    assert lines[36].startswith(" vllm/worker-0  pid 12345  thread 12399  stream 0x55d0c84b2e00")
    assert lines[41].endswith("1920 ################--------  67 %")


def test_the_histogram_is_of_one_process_and_of_the_whole_span():
    view = FakeStreams()
    for second in range(1, 61):
        view.add("stream", T0 + second * NS, **stream_fields(**{**IDLE, "wait_lt_10us": 1, "wait_ge_1s": 2}))
        view.add("stream", T0 + second * NS, **stream_fields(**{**IDLE, "wait_lt_1s": 5}, pid=1))
    for span_s, words in ((30, "30s"), (60, "1m"), (3600, "1h")):
        seconds = min(span_s, 60)
        body = picture(view, 158, 45, t=END, selected=1, maximized=True, span_ns=span_s * NS)
        assert f"{3 * seconds} waits in {words}, by how long they took" in body
        counts = [line.split()[-4] for line in body.splitlines() if line.endswith((" 33 %", " 67 %"))]
        assert counts == [str(seconds), str(2 * seconds)]


def test_room_under_the_lanes_shows_waits_and_bubbles_over_time():
    # lanes of 78 cells for 60 s; 700 ms/s of waits in the fourth and fifth ten seconds, 64 % of bubbles in the last
    lines = draw(phases(), 158, 45, t=END, maximized=True)
    start = lines[1].index("-1m")
    wait = next(number for number, line in enumerate(lines) if line.endswith("wait 100 %"))
    bubble = next(number for number, line in enumerate(lines) if line.endswith("bubble 100 %"))
    bottom = bubble - 1
    assert lines[bottom][start - 4 : start].strip() == "0 %"
    assert lines[bottom][start:] == "." * 39 + "@" * 26 + "." * 13
    tall = bubble - wait  # 70 % of 12 lines are 8.4, 64 % of the other 12 are 7.7
    assert (tall, sum("@" in line[start:] for line in lines[wait:bubble])) == (12, 8)
    assert sum(line[start:].rstrip().endswith("@" * 13) for line in lines[bubble : bubble + 12]) == 7


def test_eight_gpus_over_the_lanes_or_in_one_line():
    lines = draw(serving(gpus=8), 158, 60, maximized=True)
    assert [line[:23] for line in lines[:8]] == [f" GPU {gpu} SM 84 % measured" for gpu in range(8)]
    assert draw(serving(gpus=8), 78, 21)[0] == " SM measured" + "".join(f"  {gpu} 84 %" for gpu in range(8))
    assert draw(serving(gpus=2), 78, 21)[0].startswith(" GPU 0 SM 84 % measured  GPU 1 SM 84 % measured  ")


def test_axis():
    assert axis(300 * NS, 31) == "-5m" + " " * 9 + "-2m30s" + " " * 12 + "0"
    assert axis(300 * NS, 10) == "-5m      0"
    assert [len(axis(300 * NS, width)) for width in range(60)] == list(range(60))
