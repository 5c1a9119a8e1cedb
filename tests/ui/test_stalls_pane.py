import numpy as np
import pytest

from opusmon.channels import BY_NAME, WHOLE_CONTEXT
from opusmon.clock import NS
from opusmon.schema import Batch
from opusmon.ui.glyphs import ASCII, BRAILLE
from opusmon.ui.panes import stalls_state
from opusmon.ui.panes.base import Frame, PaneState, Size
from opusmon.ui.panes.stalls_state import SORTS, snapshot
from opusmon.ui.panes.stalls_totals import duration_counts, kind_totals, when_line
from opusmon.ui.panes.stalls_words import KINDS, bar_share, code_words, duration_cell
from opusmon.ui.text import plain
from opusmon.window import Window

from .fakestalls import (
    CAPTURE,
    MS,
    PANE,
    FakeStalls,
    add_host,
    add_stall,
    add_status,
    draw,
    four,
    many,
    picture,
    quiet,
)
from .fakeview import END, NAN, T0, frame

pytestmark = pytest.mark.usefixtures("utc")


def kinds_of(view, **state):
    known = snapshot(frame(view, t=END, **state))
    return [known.stall(int(place)).kind for place in known.order]


def listed(view, **options):
    """The kind column of the list."""
    lines = draw(view, **options)
    return [line[16:25].strip() for line in lines if line[3:4] == ":"]


def title(view, t=END):
    return PANE.title(frame(view, t=t))


def test_78x21():
    # 84.2 + 11 + 31 + 412 ms are 538.2 ms; of it 412 are 77 %, 84.2 are 16 %, 31 are 6 %, 11 are 2 %. The row under
    # the head has 72 cells for 60 s: 50 s end in its cell 60, 58 s in 69, 59.75 s and 60 s in the last one, where the
    # wait stands for both. Bars: log10(84.2) / 4 of 6 cells is 2.9, log10(11) / 4 of 6 is 1.6, log10(412) / 4 is 3.9.
    assert draw(four()) == [
        " 4 stalls in 1m  !! 1 critical  ! 3 warning  . 0 note",
        " -1m ___________________________________________________________j________C_w 0",
        " TIME*      SEV KIND      DUR log 1ms-10s PROC/THREAD    STREAM, CALL, REASON",
        ">12:40:00.0  !w sync wait  84.2 ms ###--- vllm/worker-0  ~b2e00  cuStreamSync~",
        " 12:39:59.7  !o off-cpu      11 ms ##---- vllm/worker-0  futex  lock",
        " 12:39:58.0 !!c capture      31 ms 901 invalidated by cuEventQuery thread pt_~",
        " 12:39:50.0  !j jit         412 ms ####-- vllm           ptxas",
        "",
        " ! sync wait  84.2 ms  12:39:59.915 - 12:40:00.000  wait for the GPU",
        " vllm/worker-0  pid 12345  thread 12399  stream 0x55d0c84b2e00",
        " warning from 40 ms: MLPerf per token: 40 ms interactive, 200 ms server",
        " call cuStreamSynchronize  count 1",
        " then   stream  kernels 1200/s  graphs 48/s  wait 610 ms/s  bubbles 120 ms/s",
        " then   GPU 0 SM 84 % measured",
        " same thread within 1 s: 1 other stall",
        "    -0.25 s   ! off-cpu  11 ms  futex  lock",
        " stack cuStreamSynchronize (libcuda.so.1) < run (libtorch.so) < main (python3.",
        " time 538.2 ms  jit 77 %  sync wait 16 %  capture 6 %  off-cpu 2 %",
        "             <5ms   5ms  10ms  20ms  50ms  0.1s  0.2s  0.5s    1s    2s   5s+",
        " durations     _+     _    @1    @1    @1     _    @1     _     _     _     _",
        " host run queue 3 on 16 CPUs  PSI cpu 1.2 %  PSI mem 0 %  PSI io 0.3 %",
    ]


# -- the list ----------------------------------------------------------------------------------------------------


def test_only_what_ended_in_the_span_up_to_the_playhead():
    view = FakeStalls()
    for t, kind in (
        (T0 + 10 * NS, "wait"),
        (T0 + 20 * NS, "futex"),
        (T0 + 20 * NS + 1, "jit"),
        (T0 + 30 * NS, "tls"),
    ):
        add_stall(view, t, kind)

    def seen(t):
        known = snapshot(frame(view, t=t, span_ns=10 * NS))
        return [known.stall(int(place)).kind for place in known.order]

    assert seen(T0 + 20 * NS) == ["futex"]  # the wait ended when the span begins: not in it
    assert seen(T0 + 30 * NS) == ["tls", "jit"]
    assert seen(END) == []


def test_sorted_newest_first_and_by_what_is_asked_for():
    view = four()
    assert kinds_of(view) == ["wait", "off_cpu", "capture", "jit"]
    orders = {sort: kinds_of(view, sort=sort) for sort in SORTS}
    assert orders == {
        "newest": ["wait", "off_cpu", "capture", "jit"],
        "longest": ["jit", "wait", "capture", "off_cpu"],
        "severity": ["capture", "wait", "off_cpu", "jit"],
        "kind": ["capture", "jit", "wait", "off_cpu"],
    }
    heads = {sort: draw(view, sort=sort)[2] for sort in SORTS}
    assert "TIME*" in heads["newest"]
    assert "*DUR" in heads["longest"]
    assert "*SEV" in heads["severity"]
    assert "KIND*" in heads["kind"]
    assert all(line.count("*") == 1 for line in heads.values())


def test_missing_durations_are_last_and_read_as_missing():
    view = FakeStalls()
    for number, dur_ns in enumerate((NAN, 5 * MS, 0, 7 * MS)):
        add_stall(view, END - number, "wait", dur_ns=dur_ns, call=f"call{number}")
    known = snapshot(frame(view, t=END, sort="longest"))
    assert [known.stall(int(place)).call for place in known.order] == ["call3", "call1", "call2", "call0"]
    counts, unknown = duration_counts(known)
    assert counts.tolist() == [1, 2, *[0] * 9]
    assert unknown == 1
    lines = draw(view, 118, 21)
    assert "    --    ??????" in lines[3]
    assert "1 without one" in picture(view, 118, 21)


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ("ptxas", ["jit"]),
        ("JIT", ["jit"]),
        ("compil", ["jit"]),
        ("off-cpu", ["off_cpu"]),
        ("off_cpu", ["off_cpu"]),
        ("sync wait", ["wait"]),
        ("nccl", ["capture"]),
        ("cuEventQuery", ["capture"]),
        ("worker-0", ["wait", "off_cpu", "capture"]),
        ("worker-0 lock", ["off_cpu"]),
        ("12345", ["wait", "off_cpu", "capture", "jit"]),
        ("12399", ["wait", "off_cpu", "capture", "jit"]),
        ("!!", ["capture"]),
        ("~b2e00", ["wait", "capture"]),
        ("legacy", []),
        ("zzz", []),
    ],
)
def test_filter_by_any_word(words, kinds):
    assert kinds_of(four(), filter=words) == kinds


def test_a_filter_is_said_and_the_totals_are_of_what_passes():
    lines = draw(four(), filter="worker-0 lock")
    assert lines[0] == " filter: worker-0 lock  1 of 4 stalls in 1m  !! 0 critical  ! 1 warning"
    assert lines[17] == " time 11 ms  off-cpu 100 %"
    assert PANE.items(frame(four(), t=END, filter="worker-0 lock")) == 1
    assert ' no stall matches "zzz"' in draw(four(), filter="zzz")


def test_what_has_no_room_is_folded_and_the_selected_one_is_in_sight():
    view = many()  # 187: of 21 lines 2 are on top, 1 is the heading, 1 says how many more, 4 are at the foot
    lines = draw(view)
    assert len([line for line in lines if line[3:4] == ":"]) == 13
    assert lines[16] == " +174 more"
    lines = draw(view, selected=100)
    assert lines[15].startswith(">12:39:")
    assert lines[16] == " +88 above  +86 more"
    assert draw(view, selected=10**6)[15].startswith(">12:39:00.")
    assert PANE.items(frame(view, t=END)) == 187


def test_broken_captures_say_what_broke_them():
    view = FakeStalls()
    add_stall(view, END - 3, **CAPTURE)
    add_stall(view, END - 2, **{**CAPTURE, "by_tid": 0, "by_thread": "", "by_call": "", "code": 908})
    add_stall(view, END - 1, **{**CAPTURE, "by_thread": "", "code": 12})
    add_stall(
        view, END, **{**CAPTURE, "by_tid": 0, "by_thread": "", "by_call": "", "code": 0, "reason": "ended"}
    )
    lines = draw(view, 118, 9)
    assert [line[66:].strip() for line in lines[2:6]] == [
        "cuStreamEndCapture    0x55d0c84b2e00 ended",
        "12 by cuEventQuery thread 12444",
        "908 wrong thread  by what was not seen",
        "901 invalidated by cuEventQuery thread pt_nccl_watc~",
    ]
    assert [line[12:15] for line in lines[2:6]] == ["  c", "!!c", "!!c", "!!c"]


def test_amounts_and_results():
    view = FakeStalls()
    add_stall(view, END - 4, "alloc", call="cuMemAlloc_v2", count=12, size_b=1.5 * 1024**3)
    add_stall(view, END - 3, "page_faults", call="", count=12_345)
    add_stall(view, END - 2, "jit", call="ptxas", code=1)
    add_stall(view, END - 1, "tls", call="SSL_do_handshake", code=-1, reason="failed: shut down by protocol")
    add_stall(view, END, "wait", code=700)
    for filter_, words in (
        ("alloc", "x12, 84.2 ms in all  1.5 GiB"),
        ("faults", "12k faults in 84.2 ms"),
        ("jit", "exit 1"),
        ("tls", "failed: shut down by protocol"),
        ("sync", "700 illegal address"),
    ):
        assert words in draw(view, 158, 9, filter=filter_)[2]
    assert "SSL -1" not in picture(view, 158, 9)


def test_streams_have_names():
    view = FakeStalls()
    for number, stream in enumerate((WHOLE_CONTEXT, 7, 2, 0)):
        add_stall(view, END - number, stream=stream, call="c")
    lines = draw(view, 158, 9)
    cells = [line[112:126].strip() for line in lines[2:6]]
    assert cells == ["", "0x7", "per-thread", "legacy stream"]


def test_a_kind_this_version_does_not_know_is_called_as_it_is():
    view = FakeStalls()
    add_stall(view, END, "novel_thing", call="f")
    assert " !* novel_th~" in draw(view)[3]
    assert kinds_of(view, filter="novel") == ["novel_thing"]


def test_text_from_outside_is_plain():
    view = FakeStalls()
    hostile = "\x1b[31mred\x1b]0;title\x07\u202e[bold]x"
    fields = dict.fromkeys(
        ("process", "thread", "call", "reason", "by_thread", "by_call", "before", "stack"), hostile
    )
    add_stall(view, END, **fields, code=901)
    for state in ({}, {"detail": True}, {"maximized": True}):
        shown = picture(view, 158, 40, **state)
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert "[bold]x" in shown


def test_a_selected_stall_is_found_again_when_others_have_come():
    view = four()
    before = frame(view, t=END, selected=2)
    who = PANE.identity(before)
    add_stall(view, END + NS)
    add_stall(view, END - 2 * NS, "futex")  # at the very time of the capture
    after = frame(view, t=END + NS, selected=2)
    place = PANE.place(after, who)
    assert place == 4
    assert PANE.place(after, PANE.identity(frame(view, t=END + NS, selected=3))) == 3  # the futex
    known = snapshot(after)
    assert known.stall(known.chosen(place)).kind == "capture"
    assert PANE.place(frame(view, t=END + NS, sort="severity"), who) == 0
    assert PANE.place(frame(view, t=END + NS, filter="lock"), who) is None
    assert PANE.place(frame(view, t=END + 100 * NS), who) is None
    assert PANE.identity(frame(FakeStalls(), t=END)) is None


# -- totals ------------------------------------------------------------------------------------------------------


def test_histogram_bins_at_their_edges():
    view = FakeStalls()
    for ms, count in (
        (4.9, 1),
        (5, 2),
        (9.9, 3),
        (10, 4),
        (20, 5),
        (50, 6),
        (100, 7),
        (500, 8),
        (1000, 9),
        (5000, 10),
    ):
        for number in range(count):
            add_stall(view, END - number, dur_ns=ms * MS)
    counts, unknown = duration_counts(snapshot(frame(view, t=END)))
    assert counts.tolist() == [1, 5, 4, 5, 6, 7, 0, 8, 9, 0, 10]
    assert unknown == 0
    strip = draw(view)[-2]
    assert strip == " durations    .1+    +5    =4    +5    +6    *7     _    #8    @9     _   @10"
    whole = picture(view, 158, 45, maximized=True)
    assert "55 stalls by how long they took" in whole
    assert "+ waits under the threshold (5 ms) are not seen" in whole


def test_share_of_time_by_kind():
    totals = kind_totals(snapshot(frame(four(), t=END)))
    assert [(total.short, total.count, total.time_ns / MS, total.longest_ns / MS) for total in totals] == [
        ("jit", 1, 412, 412),
        ("sync wait", 1, 84.2, 84.2),
        ("capture", 1, 31, 31),
        ("off-cpu", 1, 11, 11),
    ]
    assert [total.level for total in totals] == [2, 2, 3, 2]


def test_several_of_a_kind_add_up_and_the_longest_is_said():
    view = FakeStalls()
    for dur_ns in (20 * MS, 70 * MS, NAN, 10 * MS):
        add_stall(view, END, dur_ns=dur_ns)
    add_stall(view, END, "tls", dur_ns=NAN)
    totals = kind_totals(snapshot(frame(view, t=END)))
    assert [(total.short, total.count, total.time_ns / MS) for total in totals] == [
        ("sync wait", 4, 100),
        ("tls", 1, 0),
    ]
    assert totals[0].longest_ns == 70 * MS
    assert np.isnan(totals[1].longest_ns)
    assert kind_totals(snapshot(frame(view, t=END, filter="zzz"))) == []


def test_rows_of_another_version_are_drawn_as_far_as_they_go():
    view = four()
    whole = view.query

    def fewer(channel, t0, t1):
        rows = whole(channel, t0, t1)
        names = ["t", "kind", "pid", "process", "dur_ns"]
        return (
            rows[names].astype([(name, rows.dtype[name]) for name in names]) if channel == "stall" else rows
        )

    view.query = fewer
    assert listed(view) == ["sync wait", "off-cpu", "capture", "jit"]
    assert " vllm  pid 12345  thread 0 " in picture(view, maximized=True)


def test_rows_that_fold_several_count_as_so_many_of_their_mean():
    view = FakeStalls()
    add_stall(view, END - 2, dur_ns=900 * MS, count=150, reason="shorter ones, folded")  # 6 ms each
    add_stall(view, END - 1, dur_ns=50 * MS)
    add_stall(view, END, "page_faults", dur_ns=1000 * MS, count=50_000)
    known = snapshot(frame(view, t=END, sort="longest"))
    assert [known.stall(int(place)).count for place in known.order] == [1, 150, 50_000]
    counts, unknown = duration_counts(known)
    assert counts.tolist() == [0, 150, 0, 0, 1, *[0] * 6]
    assert unknown == 1
    totals = kind_totals(known)
    assert [(total.short, total.count, total.time_ns / MS) for total in totals] == [
        ("sync wait", 151, 950),
        ("faults", 1, 0),
    ]
    lines = draw(view, 158, 30)
    assert lines[0].startswith(
        " 3 stalls in 1m  149 more folded into them  !! 0 critical  ! 2 warning  . 1 note"
    )
    assert " .w sync wait     6 ms " in lines[5]
    assert "x150, 900 ms in all  shorter" in lines[5]


def test_when_shows_the_worst_of_each_moment():
    view = FakeStalls()
    for second, kind, changes in (
        (1, "wait", {"dur_ns": 6 * MS}),
        (1, "futex", {"dur_ns": 150 * MS}),
        (30, "wait", {"dur_ns": 300 * MS}),
        (60, "novel", {"dur_ns": 6 * MS}),
    ):
        add_stall(view, T0 + second * NS, kind, **changes)
    it = frame(view, t=END)
    line = when_line(it, snapshot(it), 60)
    assert plain(line) == "f" + "_" * 28 + "W" + "_" * 29 + "*"
    assert [style for text, style in line if text.strip("_")] == ["warn", "bad", "dim"]


# -- many --------------------------------------------------------------------------------------------------------


def test_too_many_rows_are_not_all_read_and_it_says_so(monkeypatch):
    monkeypatch.setattr(stalls_state, "MAX_ROWS", 100)
    view = many()
    head = draw(view, 118)[0]
    assert head.startswith(" 100 of 187 stalls in 1m  only the newest 100 are read  !! ")
    assert PANE.items(frame(view, t=END)) == 100
    assert listed(view)[:3] == ["sync wait", "off-cpu", "run queue"]


def test_a_wide_span_reads_the_newest_rows(monkeypatch):
    monkeypatch.setattr(stalls_state, "MAX_FAR_ROWS", 50)
    view = FakeStalls()
    hour = 3600 * NS
    for number in range(120):  # two a minute
        add_stall(view, T0 + (number + 1) * 30 * NS, tid=number)
    known = snapshot(frame(view, t=T0 + hour, span_ns=hour))
    assert known.unread == 70
    assert known.rows["tid"].tolist() == list(range(70, 120))
    everything = snapshot(frame(view, t=T0 + hour, span_ns=2 * hour, filter="vllm"))
    monkeypatch.setattr(stalls_state, "MAX_FAR_ROWS", 500)
    assert len(everything.rows) == 50
    assert len(snapshot(frame(view, t=T0 + hour, span_ns=2 * hour)).rows) == 120


def test_a_window_draws_what_the_plain_view_does():
    view = many()
    window = Window(view.strings, view.anchors)
    for channel in view.channels:
        for row in np.split(view.rows(channel), len(view.rows(channel))):
            window.push(Batch(BY_NAME[channel], row))
    for state in (
        PaneState(),
        PaneState(sort="longest", filter="worker-1"),
        PaneState(maximized=True, selected=9),
    ):
        for span_ns in (20 * NS, 60 * NS, 3600 * NS):
            frames = [Frame(one, END, span_ns, Size(158, 45), ASCII, state) for one in (view, window)]
            assert PANE.render(frames[0]) == PANE.render(frames[1])


# -- states ------------------------------------------------------------------------------------------------------


def test_nothing_recorded():
    view = FakeStalls()
    assert title(view) == "4 stalls  off"
    assert draw(view)[0] == "Not running: this session has no such data at this time"
    assert PANE.items(frame(view, t=END)) == 0


def test_not_running_says_why_and_how_and_still_shows_the_host():
    view = FakeStalls()
    add_status(view, state="unavailable", reason="eBPF needs root", remedy="sudo opusmon")
    assert "host" not in picture(view)
    add_host(view)
    lines = draw(view)
    assert lines[0] == "Not running: eBPF needs root"
    assert "  sudo opusmon" in lines
    assert lines[-1].startswith(" host run queue 3 on 16 CPUs")
    assert plain(PANE.summary(frame(view, t=END))).startswith("4 stalls  off: eBPF needs root")


def test_running_and_nothing_seen():
    view = quiet()
    assert title(view) == "4 stalls  eBPF  watching 2 processes"
    lines = draw(view)
    assert lines[0] == " 0 stalls in 1m"
    assert lines[2:4] == [" no stall in 1m", " waits under the threshold (5 ms) are not seen"]
    assert plain(PANE.summary(frame(view, t=END))).rstrip() == "4 stalls  no stall in 1m"


def test_a_collector_that_fell_silent_or_failed_is_named():
    view = four()
    assert title(view, END + 12 * NS) == "4 stalls  eBPF  watching 2 processes"  # two and a half of its 5 s
    assert title(view, END + 13 * NS) == "4 stalls  eBPF  watching 2 processes  stale 13 s"
    add_status(view, END, state="restarting", reason="the worker died", remedy="see the log")
    assert title(view) == "4 stalls  eBPF  restarting"
    assert draw(view)[-2] == " ! the worker died (see the log)"
    assert kinds_of(view) == ["wait", "off_cpu", "capture", "jit"]


def test_a_limit_is_not_an_alarm():
    view = four()
    add_status(view, END, reason="watching 1 process, probes are on 1 libcuda file")
    add_status(
        view, channel="stall", field="kind", scope="", state="unavailable", reason="no process maps libssl"
    )
    add_status(view, channel="stall", scope="ring", state="ok", reason="nothing lost")
    assert title(view) == "4 stalls  eBPF  watching 1 process"
    assert draw(view)[-2] == " kind: no process maps libssl"
    add_status(view, scope="hidden", state="no_permission", reason="2 may not be looked into")
    assert draw(view)[-2] == " ! hidden: 2 may not be looked into  +1 more: w"


def test_what_is_not_seen_is_said_at_the_foot():
    view = four()
    add_status(view, channel="stall", field="tls", state="not_supported", reason="no process maps libssl")
    add_status(
        view, channel="stall", field="stack", state="error", reason="stacks are full", remedy="restart"
    )
    assert draw(view)[-2] == " ! stack: stacks are full (restart)  +1 more: w"


def test_summary_is_the_worst_of_the_span():
    view = four()
    line = plain(PANE.summary(frame(view, t=END)))
    assert line.rstrip() == "4 stalls  !! capture  901 invalidated  vllm/worker-0  by cuEventQuery  4 in 1m"
    line = plain(PANE.summary(frame(view, t=END, filter="lock")))
    assert line.startswith("4 stalls  ! off-cpu  11 ms  vllm/worker-0  futex  12:39:59.7  1 in 1m")


# -- cells -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ns", "cell"),
    [
        (84.2e6, " 84.2 ms"),
        (1.9e9, "  1.9 s "),
        (412e6, "  412 ms"),
        (999.96e6, " 1000 ms"),
        (5e3, "    5 us"),
        (0, "    0 s "),
        (90e9, "  1.5 m "),
        (NAN, "   --   "),
        (1e300, "##### d "),
    ],
)
def test_durations_line_up(ns, cell):
    assert duration_cell(ns) == cell
    assert len(cell) == 8


def test_bars_are_logarithmic():
    # 1 ms is nothing, 10 s is full, each factor of ten is a quarter
    assert [bar_share(ns) for ns in (1e5, 1e6, 1e10, 1e12)] == [0, 0, 1, 1]
    assert [bar_share(10.0**n) for n in (7, 8, 9)] == pytest.approx([0.25, 0.5, 0.75])
    assert np.isnan(bar_share(NAN))


def test_codes():
    assert [code_words("capture", code) for code in (0, 901, 12, NAN)] == ["", "901 invalidated", "12", ""]
    assert [code_words("tls", code) for code in (1, 0, -1)] == ["", "SSL 0", "SSL -1"]
    assert [code_words("jit", code) for code in (0, 1, -9)] == ["", "exit 1", "signal 9"]


def test_kinds_and_letters():
    assert {kind.name for kind in KINDS} == set(BY_NAME["stall"].by_name["kind"].help.split(", "))
    assert len({kind.letter for kind in KINDS}) == len(KINDS)
    assert max(len(kind.short) for kind in KINDS) <= 9


def test_ascii_glyphs_give_ascii():
    for view in (four(), many()):
        for state in ({}, {"maximized": True}, {"detail": True}):
            assert picture(view, 158, 45, **state).isascii()
    assert "·" in picture(many(), glyphs=BRAILLE)


def test_severity_has_a_shape_beside_its_colour():
    lines = PANE.render(frame(four(), 78, 21, t=END))
    styled = {style: text for line in lines[3:7] for text, style in line if style in ("warn", "bad")}
    assert styled["bad"].startswith("!!")
    assert styled["warn"].startswith(" !")
