"""One stall in full, and the host's line."""

import pytest

from opusmon.channels import WHOLE_CONTEXT
from opusmon.clock import NS
from opusmon.ui.panes.stalls_detail import detail_lines, nearest_stream_row
from opusmon.ui.panes.stalls_host import host_line, read_figures, worst_first
from opusmon.ui.panes.stalls_state import snapshot
from opusmon.ui.text import plain

from .fakestalls import (
    CAPTURE,
    MS,
    STREAM,
    WORKER,
    FakeStalls,
    add_host,
    add_stall,
    add_status,
    draw,
    four,
    picture,
)
from .fakestreams import stream_fields
from .fakeview import END, NAN, T0, frame


def detail(view, selected=0, width=100, height=60, **options):
    options.setdefault("t", END)
    it = frame(view, **options)
    known = snapshot(it)
    return [plain(line).rstrip() for line in detail_lines(it, known, known.chosen(selected), width, height)]


def line_with(lines, words):
    return next(line for line in lines if words in line)


def test_every_field_of_a_broken_capture():
    lines = detail(four(), 2)
    assert lines[0].startswith(" !! capture  31 ms  ")
    assert lines[1:8] == [
        " vllm/worker-0  pid 12345  thread 12399  stream 0x55d0c84b2e00",
        " critical: a capture that fails leaves the engine without its graph",
        " call cuStreamEndCapture  result 901 invalidated  reason aborted: invalidated  count 1",
        " broken by cuEventQuery  thread pt_nccl_watchdg (12444)  result 900 unsupported in capture",
        " before  cuLaunchKernel x3 on 0x7; cuMemcpyDtoDAsync_v2; cuMemAlloc_v2",
        " then   stream  kernels 1200/s  graphs 48/s  wait 610 ms/s  bubbles 120 ms/s  row +0.0 s",
        " then   GPU 0 SM 84 % measured",
    ]
    assert lines[8:] == [
        " stack, innermost first, 3 frames",
        "   cuStreamEndCapture (libcuda.so.1)",
        "   at::cuda::CUDAGraph::capture_end()+0x8c (libtorch_cuda.so)",
        "   main+0x1 (python3.12)",
    ]


def test_what_is_not_known_is_left_out():
    view = FakeStalls()
    add_stall(
        view, END, "run_queue", call="", count=NAN, dur_ns=NAN, stream=WHOLE_CONTEXT, thread="", process=""
    )
    lines = detail(view)
    assert lines[0].startswith(" run queue  --  ended ")
    assert lines[1] == " ?  pid 12345  thread 12399  stream none in particular"
    assert lines[-1] == " no stack was taken"
    assert not [line for line in lines if "count" in line or "result" in line or "before" in line]


def test_bytes_and_verdicts():
    view = FakeStalls()
    add_stall(view, END, "alloc", call="cuMemAlloc_v2", dur_ns=12 * MS, count=3, size_b=3 * 1024**2, code=0)
    lines = detail(view)
    assert lines[2] == " warning from 10 ms: it waits for the device; its place is before serving"
    assert lines[3] == " call cuMemAlloc_v2  result 0 success  count 3  size 3.0 MiB"
    view = FakeStalls()
    add_stall(view, END, "page_faults", count=123_456, dur_ns=NS)
    assert detail(view)[2].startswith(" critical from 100k: a fault takes about 1 us")


def test_of_folded_ones_the_mean_and_the_sum_and_no_begin():
    view = FakeStalls()
    add_stall(view, END, dur_ns=9000 * MS, count=150, reason="shorter ones, folded")
    head, _, verdict, *_ = detail(view)
    assert head.startswith(" ! sync wait  mean 60 ms of 150, in all 9 s  ended ")
    assert verdict.startswith(" warning from 40 ms: ")


def test_a_long_stack_is_cut_at_its_outer_end_and_says_so():
    view = FakeStalls()
    add_stall(view, END, stack=";".join(f"f{number}" for number in range(20)))
    lines = detail(view, height=12)
    assert len(lines) == 12
    head = lines.index(" stack, innermost first, 20 frames")
    assert lines[head + 1 : head + 3] == ["   f19", "   f18"]
    assert lines[-1] == f"   +{20 - (12 - head - 2)} more frames"
    assert detail(view, height=5)[-1].startswith(" stack f19 < f18 < f17 < ")
    assert detail(view, height=1)[0].startswith(" stack f19 <")
    assert detail(view, height=0) == []


def test_calls_before_are_wrapped_and_the_last_ones_kept():
    view = FakeStalls()
    calls = [f"cuCall{number:02}" for number in range(60)]
    add_stall(view, END, "capture", code=901, before="; ".join(calls))
    lines = detail(view, width=80)
    shown = [line for line in lines if "cuCall" in line]
    assert len(shown) == 4
    assert shown[0].startswith(" before ~cuCall")
    assert shown[-1].endswith("cuCall59")


def test_the_nearest_row_of_its_stream():
    view = FakeStalls()
    t = T0 + 30 * NS
    add_stall(view, t)
    for second, launches in ((28, 1), (29, 2), (31, 3)):
        view.add(
            "stream",
            T0 + second * NS + NS // 4,
            **stream_fields(pid=WORKER, stream=STREAM, launches=launches),
        )
    view.add("stream", t, **stream_fields(pid=WORKER, stream=STREAM + 1, launches=77))
    view.add("stream", t, **stream_fields(pid=WORKER + 1, stream=STREAM, launches=78))
    stall = snapshot(frame(view, t=END)).stall(0)
    assert (
        nearest_stream_row(frame(view, t=END), stall)["launches"] == 2
    )  # 0.75 s before; the next is 1.25 s after
    assert nearest_stream_row(frame(view, t=t), stall)["launches"] == 2
    assert nearest_stream_row(frame(FakeStalls(), t=END), stall) is None


def test_nothing_after_the_playhead_is_shown():
    view = FakeStalls()
    t = T0 + 30 * NS
    add_stall(view, t)
    view.add("stream", t + NS // 2, **stream_fields(pid=WORKER, stream=STREAM))
    stall = snapshot(frame(view, t=t)).stall(0)
    assert nearest_stream_row(frame(view, t=t), stall) is None
    assert nearest_stream_row(frame(view, t=t + NS), stall) is not None


def test_a_stall_of_no_stream_takes_that_of_its_thread():
    view = FakeStalls()
    add_stall(view, END, stream=WHOLE_CONTEXT)
    view.add("stream", END, **stream_fields(pid=WORKER, stream=9, tid=1, launches=1))
    view.add("stream", END, **stream_fields(pid=WORKER, stream=7, tid=WORKER + 54, launches=15))
    assert line_with(detail(view), "kernels").startswith(" then   stream 0x7  kernels 15/s")


def test_other_stalls_of_the_thread_within_a_second():
    view = FakeStalls()
    t = T0 + 30 * NS
    for offset_ms, kind, more in (
        (-1001, "futex", {}),
        (-1000, "off_cpu", {"call": "", "reason": "preempted", "dur_ns": 20 * MS}),
        (0, "wait", {}),
        (0, "jit", {"tid": 1}),
        (0, "tls", {"pid": 1}),
        (1000, "alloc", {"call": "cuMemAlloc_v2", "dur_ns": MS}),
        (1001, "free", {}),
    ):
        add_stall(view, t + offset_ms * MS, kind, **more)
    lines = detail(view, 4, t=END)
    begin = lines.index(" same thread within 1 s: 2 other stalls")
    assert lines[begin + 1 : begin + 3] == [
        "    -1.00 s   ! off-cpu  20 ms  preempted",
        "    +1.00 s   . alloc  1 ms  cuMemAlloc_v2",
    ]


def test_only_the_nearest_ones_of_many():
    view = FakeStalls()
    for number in range(-20, 21):
        add_stall(view, T0 + 30 * NS + number * 40 * MS)
    lines = detail(view, 20)
    begin = lines.index(" same thread within 1 s: 40 other stalls, the nearest 5")
    assert [line.split()[0] for line in lines[begin + 1 : begin + 6]] == [
        "-0.12",
        "-0.08",
        "-0.04",
        "+0.04",
        "+0.08",
    ]


def test_open_in_full_the_list_gives_way():
    lines = draw(four(), 78, 30, detail=True, selected=2)
    assert any(line.startswith(">") and "901" in line for line in lines)
    assert " stack, innermost first, 3 frames" in lines
    assert "   main+0x1 (python3.12)" in lines


def test_maximized_shows_it_beside_the_totals():
    shown = draw(four(), 158, 45, maximized=True, selected=2)
    assert "4 stalls by how long they took" in line_with(shown, " !! capture  31 ms")
    assert "10-20 ms" in line_with(shown, " call cuStreamEndCapture")
    assert line_with(shown, "KIND       COUNT     TIME  SHARE  LONGEST")


# -- the host ----------------------------------------------------------------------------------------------------


def host(view, width=200, t=END):
    return plain(host_line(view, t, width)).rstrip()


def test_the_host_in_order_while_all_is_well():
    view = FakeStalls()
    add_host(view)
    assert host(view) == (
        " host run queue 3 on 16 CPUs  PSI cpu 1.2 %  PSI mem 0 %  PSI io 0.3 %  swap 0 B/s  iowait 0.4 %  steal 0 %"
    )
    assert host(view, 60) == " host run queue 3 on 16 CPUs  PSI cpu 1.2 %  PSI mem 0 %"


def test_the_worst_comes_first_and_is_marked():
    view = FakeStalls()
    # 1.5 tasks a CPU warn, 3 are critical; 23 % throttled is 23 times the warning, 22 % memory stall 3.1 times
    add_host(view, runnable=70, psi_memory_some_pct=22, swap_in_bps=2e6, swap_out_bps=1e6)
    throttled = {"dt_ns": NS, "mem_used_b": 9.0e9, "mem_limit_b": 10e9}
    view.add("cgroup", END, cgroup="/system.slice/vllm.service", throttled_pct=23, **throttled)
    view.add(
        "cgroup", END, cgroup="/system.slice/other", throttled_pct=0.5, **{**throttled, "mem_limit_b": NAN}
    )
    view.add("process", END, pid=WORKER, name="vllm", dt_ns=NS, run_delay_pct=6)
    view.add("process", END, pid=WORKER + 1, name="api", dt_ns=NS, run_delay_pct=NAN)
    assert host(view).startswith(
        " host throttled 23 % !! vllm.service  PSI mem 22 % !!  run queue 70 on 16 CPUs !!  swap 3.0 MB/s !"
        "  run delay 6.0 % ! vllm  PSI cpu 1.2 %  PSI io 0.3 %  iowait 0.4 %  steal 0 %  cgroup mem 90 %"
    )
    figures = worst_first(read_figures(view, END))
    assert [figure.level for figure in figures] == sorted((figure.level for figure in figures), reverse=True)


def test_missing_figures_are_left_out():
    view = FakeStalls()
    add_host(
        view, psi_cpu_some_pct=NAN, psi_memory_some_pct=NAN, psi_io_some_pct=NAN, swap_in_bps=NAN, cpus=NAN
    )
    assert host(view) == " host iowait 0.4 %  steal 0 %"


def test_no_figures_says_why():
    view = FakeStalls()
    assert host(view) == " host: no figures: this session has none at this time"
    add_status(view, collector="host", state="unavailable", reason="/proc is not mounted", remedy="mount it")
    assert host(view) == " host: no figures: /proc is not mounted (mount it)"
    add_host(view, END - 10 * NS)
    assert "run queue" in host(view, t=END - NS)
    assert "no figures" in host(view)  # ten seconds old


def test_long_names_of_groups_keep_their_end():
    view = FakeStalls()
    name = "docker-0123456789abcdef0123456789abcdef.scope"
    view.add("cgroup", END, cgroup=f"/system.slice/{name}", dt_ns=NS, throttled_pct=50)
    assert host(view) == f" host throttled 50 % !! ~{name[-17:]}"


@pytest.mark.parametrize(("width", "height"), [(78, 21), (158, 45)])
def test_the_host_is_the_last_line(width, height):
    assert draw(four(), width, height)[-1].startswith(" host run queue")
    assert "host" not in picture(four(), width, 3)


def test_a_capture_in_a_wide_list_keeps_its_process():
    view = FakeStalls()
    add_stall(view, END, **CAPTURE)
    assert "vllm/worker-0" in draw(view, 158, 10)[2]
    assert "vllm/worker-0" not in draw(view, 78, 10)[2]
