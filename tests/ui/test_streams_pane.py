import pytest

from opusmon.channels import BY_NAME
from opusmon.clock import NS, Anchors
from opusmon.schema import Batch
from opusmon.ui.glyphs import ASCII, BRAILLE
from opusmon.ui.panes import PANES
from opusmon.ui.panes.base import Frame, PaneState, Size
from opusmon.ui.panes.streams_state import SORTS, snapshot
from opusmon.ui.text import plain
from opusmon.window import Window

from .fakestreams import (
    COPY,
    HANDLE,
    IDLE,
    MS,
    PANE,
    WORKER,
    FakeStreams,
    add_gpus,
    add_status,
    draw,
    one,
    phases,
    picture,
    serving,
    stream_fields,
)
from .fakeview import END, NAN, T0, frame, gpu_fields


def names(view, **state):
    return [stream.name for stream in snapshot(frame(view, **state)).streams]


def test_78x21():
    # 610 ms of waits in 1 s: two of four cells; 120 ms of bubbles in 1 s; 48 of 1248 launches are graphs
    lines = draw(serving())
    assert lines == [
        " GPU 0 SM 84 % measured                 2 streams  kernels 1200/s  graphs 48/s",
        " PROC/THREAD   STREAM LAUNCH/s GRAPH/s     GB/s*WAIT ms/s    MAX BUBBLE  SINCE",
        ">vllm/worker-0 ~b2e00     1200      48 <0.1 mix  610 ##--  84 ms   12 % 2.1 ms",
        "   " + "w" * 74,
        " vllm/copy     ~b3e00        0       0 55.3 d2d   22 #---   9 ms    3 % 2.1 ms",
        "   " + "-" * 74,
        " # graphs  = kernels  - copies  w wait 50 %+  o bubble 20 %+  O 50 %+  . none",
        "",
        " vllm/worker-0  pid 12345  thread 12399  stream 0x55d0c84b2e00",
        " kernels 1200 per s  graphs 48 per s  graph share 4 %  call 9.8 us, max 84 us",
        " copies 96 per s  h2d 2.0 MB/s  d2h 1.0 MB/s  d2d 0 B/s",
        " wait 610 ms/s  in 48 waits per s  mean 13 ms  longest 84 ms",
        " bubble 12 %  in 48 gaps per s  mean 2.5 ms  longest 4.1 ms",
        " 2880 waits in 1m, by how long they took",
        "     <10 us      180 ##--------------------------------------   6 %",
        "  10-100 us      120 ##--------------------------------------   4 %",
        "   0.1-1 ms        0 ----------------------------------------   0 %",
        "    1-10 ms      660 #########-------------------------------  23 %",
        "  10-100 ms     1920 ###########################-------------  67 %",
        "    0.1-1 s        0 ----------------------------------------   0 %",
        "      >=1 s        0 ----------------------------------------   0 %",
    ]


def test_rates_are_per_second_whatever_the_interval():
    # the same counts over two seconds are half the rate; 1220 ms of waits in 2 s are 610 ms/s
    line = draw(one(dt_ns=2 * NS, wait_ns=1220 * MS))[2]
    assert line.split()[2:] == ["600", "24", "<0.1", "mix", "610", "##--", "84", "ms", "6", "%", "2.1", "ms"]


def test_many_streams_are_folded_and_the_selected_one_is_in_sight():
    view = serving(others=193)  # 195 in all: 17 - 2 - 1 have room
    lines = draw(view, 80, 17)
    assert len([line for line in lines if "vllm/" in line]) == 14
    assert lines[-1] == " +181 more"
    lines = draw(view, 80, 17, selected=100)
    assert lines[15].startswith(">vllm/pool-98 ")
    assert lines[16] == " +87 above  +94 more"
    assert PANE.items(frame(view)) == 195


def test_sorted_by_wait_by_default_and_by_what_is_asked_for():
    view = FakeStreams()
    rows = {
        "a": {"wait_ns": 1 * MS, "launches": 5, "graph_launches": 1, "bubble_ns": 9 * MS, "d2d_b": 4e9},
        "b": {"wait_ns": 3 * MS, "launches": 4, "graph_launches": 3, "bubble_ns": 8 * MS, "d2d_b": 5e9},
        "C": {"wait_ns": 2 * MS, "launches": 6, "graph_launches": 2, "bubble_ns": 7 * MS, "d2d_b": 6e9},
    }
    for number, (name, fields) in enumerate(rows.items()):
        view.add(
            "stream",
            END,
            **stream_fields(**{**IDLE, "stream": 100 + number, "process": name, **fields}, thread=""),
        )
    assert names(view) == ["b", "C", "a"]
    orders = {sort: "".join(names(view, sort=sort)) for sort in SORTS}
    assert orders == {
        "wait": "bCa",
        "launches": "Cab",
        "graphs": "bCa",
        "bubble": "abC",
        "copies": "Cba",
        "name": "abC",
    }
    assert "LAUNCH/s*" not in picture(view)
    assert "*LAUNCH/s" in picture(view, sort="launches")


def test_unknown_numbers_sort_last():
    view = one(launches=NAN)
    view.add("stream", END, **stream_fields(**COPY))
    assert names(view, sort="launches") == ["vllm/copy", "vllm/worker-0"]


def test_filter_by_name_pid_and_handle():
    view = serving(others=2)
    view.add("stream", END, **stream_fields(pid=777, process="trainer", thread="trainer"))
    assert names(view, filter="COPY") == ["vllm/copy"]
    assert names(view, filter="777") == ["trainer"]
    assert names(view, filter=f"{HANDLE:x}") == ["trainer", "vllm/worker-0"]
    shown = next(
        word for word in picture(view).split() if word.startswith("~")
    )  # as the list writes a handle
    assert set(names(view, filter=shown)) <= {"trainer", "vllm/worker-0"}
    assert names(view, filter=shown)
    view.add("stream", END, **stream_fields(pid=778, process="default", thread="default", stream=0))
    assert names(view, filter="legacy") == ["default"]
    lines = draw(view, filter="copy")
    assert "filter: copy  1 of 6 streams" in lines[0]
    assert ' no stream matches "zzz"' in draw(view, filter="zzz")


def test_several_processes_are_told_apart_by_pid():
    view = one()
    assert "PID" not in draw(view)[1]
    view.add("stream", END, **stream_fields(pid=12_346))
    lines = draw(view)
    assert lines[1].split()[:3] == ["PROC/THREAD", "PID", "STREAM"]
    assert {line.split()[1] for line in lines if line[1:].startswith("vllm/worker-0  ") and "~" in line} == {
        "12345",
        "12346",
    }


@pytest.mark.parametrize(
    ("stream", "cell"),
    [(0, "legacy"), (1, "legacy"), (2, "thread"), (7, "0x7"), (HANDLE, "~b2e00"), (2**64 - 1, "ctx")],
)
def test_the_streams_that_cuda_names_have_names(stream, cell):
    assert draw(one(stream=stream))[2].split()[1] == cell


def test_a_whole_handle_where_there_is_room():
    assert " 0x55d0c84b2e00 " in draw(one(), 200, 21)[2]


def test_a_thread_called_like_its_process_is_not_said_twice():
    assert draw(one(process="python3", thread="python3"))[2].startswith(">python3       ~")


def test_copies_name_their_direction_unless_it_is_mixed():
    def cell(**changes):
        return " ".join(
            draw(one(**{"h2d_b": 0, "d2h_b": 0, "d2d_b": 0, "other_b": 0, **changes}))[2].split()[4:6]
        )

    assert cell(h2d_b=12.34e9) == "12.3 h2d"
    assert cell(d2h_b=9.1e9, h2d_b=0.9e9) == "10.0 d2h"
    assert cell(d2h_b=8.9e9, h2d_b=1.1e9) == "10.0 mix"
    assert cell(other_b=2e9) == "2.0 any"
    assert cell(d2d_b=1234e9) == "1234 d2d"
    assert cell().startswith("0.0 ")
    assert cell(h2d_b=NAN, d2h_b=NAN, d2d_b=NAN, other_b=NAN).startswith("-- ")


def test_a_bubble_that_began_earlier_is_not_a_share():
    assert ">100 %" in draw(one(bubble_ns=5 * NS))[2]
    assert " 100 %" in draw(one(bubble_ns=NS))[2]


def test_several_waiting_threads_add_up_and_the_bar_is_full():
    line = draw(one(wait_ns=3500 * MS))[2]
    assert "3500 ####" in line


def test_graph_share():
    # 48 of 1248 launches are 3.8 %; with the idle copy stream the total is the same
    assert "graph share 4 %" in picture(one())
    assert "graph share 75 %" in picture(one(launches=16))
    assert "graph share --" in picture(one(launches=0, graph_launches=0))
    assert "75 % of launches" in draw(one(launches=16), 118, 21)[0]


def test_launch_calls_show_their_last_times_where_they_are_timed_in_bursts():
    view = FakeStreams()
    unknown = {"timed_launches": 0, "launch_call_ns": NAN, "launch_call_max_ns": NAN}
    timed = {"timed_launches": 100, "launch_call_ns": 7100.0, "launch_call_max_ns": 2.4 * MS}
    for ago in range(30, -1, -1):
        t = END - ago * NS
        view.add("stream", t, **stream_fields(**(timed if ago == 23 else unknown)))
        view.add("stream", t, **stream_fields(stream=HANDLE + 1))  # whose times are not this stream's
    assert "call 7.1 us, max 2.4 ms  timed 23 s ago" in picture(view, 118)
    assert " call --" in picture(one(**unknown))


def test_launch_calls_have_columns_where_there_is_room():
    view = one(launch_call_max_ns=23 * MS)
    lines = draw(view, 118)
    head = next(line for line in lines if "CALL us" in line)
    row = lines[lines.index(head) + 1]
    for title, words in (("CALL us", "9.8"), ("MAX CALL", "23 ms")):
        end = head.index(title) + len(title)
        assert row[:end].endswith(f" {words}")
    assert "CALL us" not in picture(view)


def test_launches_that_are_not_counted_read_as_missing_and_the_foot_says_why():
    view = one(launches=NAN)
    reason = "counted 1 s in 30 to stay under 1 % of a core"
    add_status(view, state="ok")
    add_status(
        view, channel="stream", field="launches", state="stale", reason=reason, remedy="--probe-budget 5"
    )
    lines = draw(view)
    assert lines[2].split()[2:4] == ["--", "48"]
    assert "kernels --/s" in lines[0]
    assert "% of launches" not in lines[0]
    assert lines[-1] == f" launches: {reason} (--probe-budget 5)"


def test_the_foot_says_the_worst_reason_and_how_many_more():
    view = one()
    add_status(view, channel="stream", field="launches", state="sampled", reason="counted now and then")
    assert draw(view)[-1] == " launches: counted now and then"
    add_status(
        view, channel="stream", scope="/opt/libcuda.so.1", state="error", reason="has no cuLaunchKernel"
    )
    assert draw(view)[-1] == " ! /opt/libcuda.so.1: has no cuLaunchKernel  +1 more: w"


def test_a_stream_without_a_row_while_others_have_one_has_no_rates():
    view = FakeStreams()
    view.add("stream", END - 3 * NS, **stream_fields(since_launch_ns=NS))
    view.add("stream", END, **stream_fields(**COPY))
    line = next(line for line in draw(view) if "worker-0" in line and "~" in line)
    # the playhead is 0.4 s after the end: 1 s + 3.4 s
    assert line.split()[2:] == ["--", "--", "--", "--", "--", "--", "4.4", "s"]


def test_title_says_its_age_when_rows_fail_to_come():
    view = one()
    assert PANE.title(frame(view)) == "3 streams  eBPF 1 s (host evidence)"
    assert PANE.title(frame(view, t=END + 2 * NS)) == "3 streams  eBPF 1 s (host evidence)  age 2.0 s"
    assert PANE.title(frame(view, t=END + 4 * NS)) == "3 streams  eBPF 1 s (host evidence)  stale 4.0 s"
    assert PANE.title(frame(one(dt_ns=250 * MS), t=END)) == "3 streams  eBPF 250 ms (host evidence)"


# -- what is not there -------------------------------------------------------------------------------------------


def test_without_a_collector_the_reason_is_shown():
    view = add_gpus(FakeStreams())
    add_status(view, state="unavailable", reason="eBPF needs root", remedy="sudo opusmon")
    lines = draw(view)
    assert lines[:4] == ["Not running: eBPF needs root", "", "To enable it:", "  sudo opusmon"]
    assert PANE.title(frame(view)) == "3 streams  off"
    assert "off: eBPF needs root" in plain(PANE.summary(frame(view)))
    assert PANE.items(frame(view)) == 0


def test_a_session_that_says_nothing_about_streams():
    assert draw(FakeStreams())[0] == "Not running: this session has no such data at this time"


def test_a_collector_that_sees_no_process():
    view = add_gpus(FakeStreams(), gpu_busy_pct=3.0, sm_util_pct=1.0)
    add_status(view)
    assert draw(view)[:3] == [
        " GPU 0 SM 1 % measured",
        "",
        " no CUDA call has been seen in the last 10 s",
    ]
    add_status(view, END + 1, reason="no process maps libcuda")
    add_status(view, END + 1, scope="hidden", state="no_permission", reason="cannot look into 3 processes")
    lines = draw(view)
    assert lines[2:4] == [" no process maps libcuda", " no CUDA call has been seen in the last 10 s"]
    assert lines[-1] == " ! hidden: cannot look into 3 processes"
    add_status(
        view, END + 2, reason="probes are on 1 libcuda file, 2 processes map one; loaded by libbpf 1.1"
    )
    narrow = " ".join(line.strip() for line in draw(view, width=40)[2:6])
    assert "probes are on 1 libcuda file, 2 processes map one; loaded by libbpf 1.1" in narrow


def test_rows_that_stop_give_way_to_the_reason():
    view = one()
    add_status(view, END + 5 * NS, state="error", reason="the probes were removed", remedy="restart it")
    lines = draw(view, t=END + 6 * NS)
    assert "vllm/worker-0" in lines[2]
    assert lines[-1] == " ! the probes were removed (restart it)"
    assert draw(view, t=END + 11 * NS)[0] == "Not running: the probes were removed"


def blind(view, **options):
    found = [line for line in draw(view, **options) if "probe blind" in line]
    return found[0] if found else ""


def test_blind_when_a_gpu_is_busy_and_there_is_no_row():
    view = add_gpus(FakeStreams(), gpu_busy_pct=NAN)
    add_status(view, END - 30 * NS)
    words = "! probe blind: GPU 0 is 84 % busy and no CUDA call was seen"
    assert blind(view) == f" {words}"
    assert words in plain(PANE.summary(frame(view, 80, 1)))
    assert "SM 84 % measured" in draw(view)[0]


def test_blind_when_rows_hold_no_call():
    view = add_gpus(FakeStreams(), gpus=2)
    for second in range(1, 61):
        view.add("stream", T0 + second * NS, **stream_fields(**IDLE))
    assert blind(view) == " ! probe blind: GPU 0 is 99 % busy (1 more busy) and no CUDA call was seen"
    for name in ("launches", "graph_launches", "copies", "waits"):
        seen = serving_idle_with(name)
        assert blind(seen) == ""


def serving_idle_with(name):
    view = add_gpus(FakeStreams())
    for second in range(1, 61):
        view.add("stream", T0 + second * NS, **stream_fields(**{**IDLE, name: float(second == 57)}))
    return view


def test_not_blind_while_launches_are_not_counted():
    view = add_gpus(FakeStreams())
    for second in range(1, 61):
        view.add("stream", T0 + second * NS, **stream_fields(**{**IDLE, "launches": NAN}))
    assert blind(view) == ""


@pytest.mark.parametrize(("busy", "expected"), [(20.0, False), (20.5, True)])
def test_blind_from_twenty_per_cent_on(busy, expected):
    view = add_gpus(FakeStreams(), gpu_busy_pct=busy, sm_util_pct=0.0)
    add_status(view, END - 30 * NS)
    assert bool(blind(view)) is expected


@pytest.mark.parametrize(("seconds", "expected"), [(4, False), (5, True)])
def test_blind_after_five_seconds(seconds, expected):
    view = FakeStreams()
    add_status(view, END - 30 * NS)
    for second in range(1, 61):
        busy = 90.0 if second > 60 - seconds else 0.0
        view.add("gpu", T0 + second * NS, gpu=0, **gpu_fields(gpu_busy_pct=busy, sm_util_pct=busy))
    assert bool(blind(view)) is expected


def test_not_blind_when_the_collector_has_just_started_or_does_not_run():
    view = add_gpus(FakeStreams())
    assert blind(view) == ""
    add_status(view, END - 3 * NS)
    assert blind(view) == ""
    view = add_gpus(FakeStreams())
    add_status(view, END - 30 * NS, state="unavailable", reason="needs root")
    assert blind(view) == ""


def test_sm_activity_that_is_not_measured():
    view = add_gpus(FakeStreams(), sm_util_pct=NAN)
    view.add("stream", END, **stream_fields())
    assert draw(view)[0].startswith(" GPU 0 busy 99 % measured")
    bare = FakeStreams()
    bare.add("stream", END, **stream_fields())
    assert draw(bare)[0].startswith(" SM not measured")


# -- summary, text, sizes ----------------------------------------------------------------------------------------


def test_summary_in_80_cells():
    words = "3 streams  vllm/worker-0  wait 610 ms/s  bubble 12 %  SM 84 % measured"
    assert plain(PANE.summary(frame(serving(), 80, 1))).rstrip() == words
    assert "GPU 0 SM 84 % measured" in plain(PANE.summary(frame(serving(gpus=2), 100, 1)))


def test_text_from_outside_is_cleaned():
    view = one(process="\x1b[31m日本語\x1b]0;t\x07", thread="\u202eevil\n")
    add_status(view, channel="stream", field="launches", state="stale", reason="\x1b[2Jgone", remedy="a\nb")
    for line in draw(view):
        assert line.isprintable()
        assert "\x1b" not in line


def test_the_selected_stream_is_marked_and_shown_at_every_height():
    view = serving(others=30)
    for height in range(2, 50):
        for maximized in (False, True):
            lines = draw(view, 100, height, selected=20, maximized=maximized)
            assert sum(line.startswith(">vllm/pool-18 ") for line in lines) == 1, (height, maximized)


def test_a_window_gives_the_same_lines():
    view = serving(others=5)
    window = Window(view.strings, Anchors())
    for name in view.channels:
        window.push(Batch(BY_NAME[name], view.rows(name)))
    for state in (PaneState(), PaneState(maximized=True)):
        size = Size(158, 45)
        frames = [Frame(source, END + NS // 3, 60 * NS, size, ASCII, state) for source in (view, window)]
        assert PANE.render(frames[0]) == PANE.render(frames[1])


def test_pane_3_is_this_one():
    pane = PANES[2]
    assert (pane.name, pane.number, pane.channel, pane.sorts[0]) == ("streams", 3, "stream", "wait")


def test_blocks_are_used_where_the_terminal_has_them():
    lines = draw(phases(), 64, 10, t=END, glyphs=BRAILLE)
    assert lines[3] == "   " + "".join(mark * 10 for mark in ".▄█▒▒O")


assert WORKER == 12_345
