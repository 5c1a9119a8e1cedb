import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opusmon.channels import GPU
from opusmon.clock import NS
from opusmon.schema import Batch
from opusmon.ui.glyphs import ASCII, BRAILLE, BY_NAME
from opusmon.ui.panes.base import Frame, PaneState, Size
from opusmon.ui.panes.gpu import GpuPane
from opusmon.ui.panes.gpu_flags import throttle_flags
from opusmon.ui.panes.history import histories, nice_step
from opusmon.ui.text import STYLES, line_cells, plain
from opusmon.window import Window

from .fakeview import (
    GIB,
    NAN,
    T0,
    FakeView,
    add_processes,
    device_fields,
    end_of,
    gpu_fields,
    link_fields,
    session,
)

PANE = GpuPane()
END = T0 + 60 * NS
NOON_NS = 1_795_953_600 * NS  # 2026-11-29 12:00:00 UTC


@pytest.fixture(autouse=True)
def utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def frame(view, width=80, height=17, *, t=None, glyphs=ASCII, span_ns=60 * NS, **state):
    return Frame(view, end_of() if t is None else t, span_ns, Size(width, height), glyphs, PaneState(**state))


def render(view, *args, **options):
    return [plain(line).rstrip() for line in PANE.render(frame(view, *args, **options))]


def text(view, *args, **options):
    return "\n".join(render(view, *args, **options))


def styles_of(view, words, *args, **options):
    """Styles of the spans that hold `words`."""
    lines = PANE.render(frame(view, *args, **options))
    return {style for line in lines for part, style in line if words in part}


def single(**changes):
    """One GPU, one row, at the end of the session."""
    return session(1, seconds=60, **changes)


# --- golden frames -----------------------------------------------------------------------------------------


def test_one_gpu_78x12():
    assert render(single(), 78, 12) == [
        " 0 H200  HBM ###########-----  98/140 GiB  70 %",
        "  bw  71 % 3.42 TB/s  PCIe tx  0.2 rx  2.7 GB/s  bw 0-100 %, last 1m",
        "  SM  84 %  occ  38 %  tensor  25 %                   ..",
        "   612/700 W   63 C  HBM  70 C  1830 MHz            **@@@@-",
        "  NVLink tx ::::::::::::::::::  99.8 hot all       @@@@@@@@--               =",
        "  GB/s   rx __________________   0.0             ##@@@@@@@@@@.              @",
        "                                                 @@@@@@@@@@@@@             *@",
        "                                                 @@@@@@@@@@@@@*          --@@",
        "                                                 @@@@@@@@@@@@@@==       .@@@@",
        "                                                 @@@@@@@@@@@@@@@@-    ..@@@@@",
        "                                                 @@@@@@@@@@@@@@@@@==.-@@@@@@@",
        " L2: not reported by NVML",
    ]


def test_two_gpus_80x17():
    view = session(2)
    add_processes(view, END - 2 * NS, 2, each=2)
    lines = render(view)
    assert [line[:52].rstrip() if "/worker" in line else line[:48].rstrip() for line in lines] == [
        ">0 H200  HBM ###########-----  98/140 GiB  70 %",
        "  bw  71 % 3.42 TB/s  PCIe tx  0.2 rx  2.7 GB/s",
        "  SM  84 %  occ  38 %  tensor  25 %",
        "   612/700 W   63 C  HBM  70 C  1830 MHz",
        "  NVLink tx ::::::::::::::::::  99.8 hot all",
        "  GB/s   rx __________________   0.0",
        " 1 H200  HBM ###########-----  98/140 GiB  70 %",
        "  bw  71 % 3.42 TB/s  PCIe tx  0.2 rx  2.7 GB/s",
        "  SM  84 %  occ  38 %  tensor  25 %",
        "   612/700 W   63 C  HBM  70 C  1830 MHz",
        "  NVLink tx ::::::::::::::::::  99.8 hot all",
        "  GB/s   rx __________________   0.0",
        "      PID USER     GPU      GiB*  SM% PROCESS",
        "    12000 vllm     0        95.1   84 vllm/worker-0",
        "    12001 vllm     0        94.1   84 vllm/worker-1",
        " +2 more",
        " L2: not reported by NVML",
    ]


def test_eight_gpus_80x17():
    view = session(8)
    add_processes(view, END - 2 * NS, 8, each=2)
    lines = render(view)
    assert lines[0] == " GPU HBM          GiB  bw% history  SM%    W   C NVL tx rx GB/s flags"
    assert lines[1] == "> 0  ######--  98/140  71  #@@*-.:*  84  612  63    99.8    0.0"
    assert [line[:26] for line in lines[2:9]] == [f"  {gpu}  ######--  98/140  71 " for gpu in range(1, 8)]
    assert lines[9:] == [
        "      PID USER     GPU      GiB*  SM% PROCESS",
        "    12000 vllm     0        95.1   84 vllm/worker-0",
        "    12001 vllm     0        94.1   84 vllm/worker-1",
        "    12100 vllm     1        92.1   83 vllm/worker-0",
        "    12101 vllm     1        91.1   83 vllm/worker-1",
        "    12200 vllm     2        89.1   82 vllm/worker-0",
        " +11 more",
        " L2: not reported by NVML",
    ]


@pytest.mark.parametrize(("width", "height"), [(80, 17), (78, 21), (118, 32), (236, 60)])
@pytest.mark.parametrize("count", [1, 2, 8, 16])
def test_every_gpu_is_shown_or_counted(count, width, height):
    lines = render(session(count), width, height)
    heads = [line for line in lines if " 98/140" in line]
    more = [int(line.split("+")[1].split()[0]) for line in lines if line.startswith(" +")]
    assert len(heads) + sum(more) >= count  # the selected one may be open in full as well
    assert len(heads) <= count + 1
    assert lines[-1] == " L2: not reported by NVML"
    if (count, height) != (16, 17):
        assert more == []


def test_sixteen_gpus_scroll_to_the_selected_one():
    view = session(16)
    lines = render(view)
    assert lines[14:] == ["", " +2 more", " L2: not reported by NVML"] or lines[15] == " +2 more"
    lines = render(view, selected=15)
    assert lines[14].startswith(">15 ")
    assert lines[15] == " +2 above"


def test_detail_opens_the_selected_gpu_under_the_table():
    lines = render(session(16), 78, 21, selected=3, detail=True)
    assert lines[0].startswith(" GPU")
    assert sum(line.startswith(">") for line in lines) == 2
    assert ">3 H200  HBM" in lines[14]
    assert "NVLink tx" in lines[18]


def test_maximized_shows_every_history_and_the_links_as_a_matrix():
    lines = render(single(), 158, 46, maximized=True)
    body = "\n".join(lines)
    titles = [
        "HBM bandwidth 71 %",
        "HBM used 98.0 GiB",
        "SM occupancy 38 %",
        "tensor pipes 25 %",
        "power 612 W",
    ]
    for title in [
        *titles,
        "temperature 63 C",
        "SM clock 1830 MHz",
        "NVLink tx 99.8 GB/s",
        "PCIe rx 2.7 GB/s",
    ]:
        assert title in body
    at = lines.index("NVLink  tx 99.8 GB/s  rx 0 B/s  GB/s per link")
    assert lines[at + 1].split() == ["link", *map(str, range(18))]
    assert lines[at + 2].split() == ["tx", *["5.5:"] * 18]
    assert lines[at + 3].split() == ["rx", *["0.0_"] * 18]
    assert "of 140.4 GiB" in body
    assert "of 478.1 GB/s" in body  # 18 links x 26.562 GB/s


# --- size ---------------------------------------------------------------------------------------------------


def troubled():
    """Four GPUs: one hot and capped, one lost, one with broken links and missing numbers, one with an XID; MIG."""
    view = session(4)
    t = END + NS // 10
    hot = {
        "throttle_mask": 0x5,
        "hbm_bw_pct": 97.5,
        "hbm_bw_bps": 4.68e12,
        "temp_c": 88,
        "mem_used_b": 139.0 * GIB,
    }
    view.add("gpu", t, gpu=0, **gpu_fields(**hot))
    view.add(
        "gpu", t, gpu=2, **gpu_fields(throttle_mask=0x48, hbm_bw_pct=NAN, hbm_bw_bps=NAN, sm_util_pct=NAN)
    )
    view.add("nvlink", t, gpu=2, **link_fields(7, state=0))
    view.add("nvlink", t, gpu=2, **link_fields(9, replay_errors=11))
    view.add("gpu_event", t, gpu=1, gi=-1, kind="lost", detail="fell off the bus")
    view.add("gpu_event", END - 5 * NS, gpu=3, gi=-1, kind="xid", code=79, detail="off the bus")
    view.add("gpu", t, gpu=3, **gpu_fields(gi=1, mem_total_b=16 * GIB, mem_used_b=4 * GIB, power_mw=NAN))
    add_status(view, scope="gpu 1", state="error", reason="GPU is lost", remedy="reset it or reboot")
    add_status(view, field="mem_temp_c", state="not_supported", reason="not measured on this GPU")
    view.add(
        "gpu_process",
        END,
        gpu=0,
        gi=-1,
        pid=1,
        name="\x1b[31m日本語\x1b]0;t\x07 \u202eevil",
        user="ü",
        kind="",
        mem_b=5,
    )
    return view


def add_status(view, t=END, *, channel="gpu", field="", scope="", state="error", reason="", remedy=""):
    view.add(
        "status",
        t,
        collector="gpu",
        channel=channel,
        field=field,
        scope=scope,
        state=state,
        reason=reason,
        remedy=remedy,
    )


VIEWS = {"none": FakeView(), "one": session(1), "sixteen": session(16), "troubled": troubled()}
STATES = st.builds(
    PaneState,
    selected=st.integers(-1, 20),
    scroll=st.integers(-1, 20),
    filter=st.sampled_from(["", "vllm", "\x1b[31m"]),
    sort=st.sampled_from(["", "pid", "name", "nonsense"]),
    detail=st.booleans(),
    processes=st.booleans(),
    maximized=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(VIEWS)),
    st.integers(0, 260),
    st.integers(0, 80),
    st.sampled_from(list(BY_NAME)),
    STATES,
)
def test_any_size_gives_exactly_that_many_lines_and_cells(name, width, height, glyphs, state):
    drawn = Frame(VIEWS[name], end_of(), 60 * NS, Size(width, height), BY_NAME[glyphs], state)
    lines = PANE.render(drawn)
    assert len(lines) == height
    assert {line_cells(line) for line in lines} <= {width}
    assert {style for line in lines for _, style in line} <= set(STYLES)
    assert "\x1b" not in "".join(map(plain, lines))
    assert line_cells(PANE.summary(drawn)) == width
    assert "\x1b" not in PANE.title(drawn)


@pytest.mark.parametrize("size", [(0, 0), (1, 1), (5, 2), (0, 10), (10, 0), (2, 1), (260, 1), (1, 80)])
@pytest.mark.parametrize("name", list(VIEWS))
def test_the_smallest_terminals(name, size):
    lines = PANE.render(frame(VIEWS[name], *size))
    assert [line_cells(line) for line in lines] == [size[0]] * size[1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32), min_size=12, max_size=12))
def test_any_numbers_can_be_drawn(numbers):
    view = FakeView()
    names = [name for name in GPU.values if name not in ("gi", "dt_ns")][:12]
    view.add("gpu", END, gpu=0, **{**gpu_fields(), **dict(zip(names, numbers, strict=True))})
    view.add(
        "gpu_device", END, gpu=0, **device_fields(power_limit_mw=numbers[0], max_sm_clock_mhz=numbers[1])
    )
    view.add(
        "nvlink", END, gpu=0, **link_fields(0, tx_bps=numbers[2], rx_bps=numbers[3], speed_bps=numbers[4])
    )
    for state in (PaneState(), PaneState(maximized=True), PaneState(processes=True)):
        lines = PANE.render(Frame(view, end_of(), 60 * NS, Size(80, 24), BRAILLE, state))
        assert {line_cells(line) for line in lines} == {80}


# --- honest values ------------------------------------------------------------------------------------------


def test_before_any_data():
    assert render(FakeView(), 60, 4)[0] == " no sample yet at this time"
    assert PANE.title(frame(FakeView())) == "2 gpu  NVML no sample"
    assert PANE.items(frame(FakeView())) == 0
    assert render(session(1), 60, 4, t=T0 - NS)[0] == " no sample yet at this time"


def test_a_missing_number_is_dashes_and_zero_is_zero():
    lines = render(single(sm_occupancy_pct=NAN, tensor_pct=0.0, pcie_tx_bps=NAN), 80, 17)
    assert lines[2].startswith("  SM  84 %  occ  -- %  tensor   0 %")
    assert "PCIe tx   -- rx  2.7 GB/s" in lines[1]


def test_a_missing_number_with_a_reason_says_so_at_the_foot():
    view = single(tensor_pct=NAN)
    add_status(view, field="tensor_pct", state="not_supported", reason="needs Hopper or newer")
    lines = render(view, 80, 17)
    assert "tensor n/a %" in lines[2]
    assert lines[-1] == " tensor_pct: needs Hopper or newer   L2: not reported by NVML"


def test_the_reason_of_another_gpu_is_not_ours():
    view = session(2, tensor_pct=NAN)
    add_status(view, field="tensor_pct", scope="gpu 1", state="not_supported", reason="x")
    lines = render(view, 80, 17)
    found = [line[23:35] for line in lines if "tensor" in line]
    assert found[:2] == ["tensor  -- %", "tensor n/a %"]


def test_the_foot_puts_what_broke_first_and_counts_the_rest():
    view = single()
    add_status(view, field="mem_temp_c", state="not_supported", reason="not measured")
    add_status(view, field="power_mw", state="no_permission", reason="no permission")
    add_status(view, state="error", reason="driver 580, library 570", remedy="reboot")
    add_status(view, field="temp_c", state="ok", reason="fine again")
    assert (
        render(view, 100, 17)[-1] == " ! driver 580, library 570 (reboot)  +2 more   L2: not reported by NVML"
    )
    assert styles_of(view, "driver 580") == {"warn"}


def test_a_reason_about_another_collector_is_not_shown():
    view = single()
    view.add(
        "status",
        END,
        collector="proxy",
        channel="request",
        field="",
        scope="",
        state="error",
        reason="port in use",
    )
    assert "port in use" not in text(view)


def test_before_hopper_memory_busy_is_never_called_bandwidth():
    view = FakeView()
    view.add("gpu_device", END, gpu=0, **device_fields(name="NVIDIA A100-SXM4-80GB", gpm=0, links=0))
    older = dict.fromkeys(("hbm_bw_pct", "hbm_bw_bps", "sm_util_pct", "sm_occupancy_pct", "tensor_pct"), NAN)
    view.add("gpu", END, gpu=0, **gpu_fields(**older, mem_busy_pct=62.0, gpu_busy_pct=99.0))
    body = text(view, 80, 12)
    assert "mem busy  62 %" in body
    assert "mem busy 0-100 %, last 1m" in body
    assert "bw" not in body
    assert "TB/s" not in body
    assert "gpu busy  99 %" in body
    assert "NVLink" not in body
    assert "mem busy 62 %" in plain(PANE.summary(frame(view)))


def test_a_hopper_gpu_without_a_number_for_now_does_not_fall_back_to_memory_busy():
    body = text(single(hbm_bw_pct=NAN, hbm_bw_bps=NAN), 80, 12)
    assert "bw  -- %" in body
    assert "mem busy" not in body


def test_many_older_gpus_mark_the_column_and_explain_the_mark():
    view = FakeView()
    for gpu in range(8):
        view.add("gpu", END, gpu=gpu, **gpu_fields(hbm_bw_pct=NAN, hbm_bw_bps=NAN, mem_busy_pct=62.0))
    lines = render(view, 100, 12)
    assert all(" 62* " in line for line in lines[1:9])
    assert "* share of time memory was busy, not bandwidth" in lines[-1]


def test_the_l2_note_goes_when_something_reports_it():
    view = single()
    view.channels["l2"] = GPU
    assert "L2" not in text(view)


def test_memory_without_numbers_divides_by_nothing():
    lines = render(single(mem_used_b=NAN, mem_total_b=NAN), 80, 12)
    assert lines[0] == " 0 H200  HBM ????????????????   --/-- GiB  -- %"
    assert "0/0 GiB  -- %" in render(single(mem_used_b=0, mem_total_b=0), 80, 12)[0]


def test_unified_memory_is_not_called_hbm():
    view = FakeView()
    view.add("gpu_device", END, gpu=0, **device_fields(name="NVIDIA GB10", memory_kind="unified", links=0))
    view.add("gpu", END, gpu=0, **gpu_fields())
    assert render(view, 80, 12)[0].startswith(" 0 GB10  unified ###")


# --- age ----------------------------------------------------------------------------------------------------


def test_title_says_source_and_age():
    assert PANE.title(frame(single())) == "2 gpu  NVML 1 s  age 0.4 s"


def test_one_late_tick_is_not_stale_and_three_are():
    view = single()
    assert "stale" not in text(view, t=END + 2_400_000_000)
    assert "! stale 2.6 s" in text(view, t=END + 2_600_000_000)
    assert PANE.title(frame(view, t=END + 2_600_000_000)) == "2 gpu  NVML 1 s  stale 2.6 s"


def test_stale_numbers_are_dim():
    view = single()
    assert styles_of(view, "612/700 W") == {"value"}
    assert styles_of(view, "612/700 W", t=END + 5 * NS) == {"dim"}


def test_slow_sampling_is_not_stale():
    view = FakeView()
    view.add("gpu", END - 5 * NS, gpu=0, **gpu_fields(dt_ns=5 * NS))
    assert "stale" not in text(view)
    assert PANE.title(frame(view)) == "2 gpu  NVML 5 s  age 5.4 s"


def test_after_a_minute_old_numbers_are_gone():
    view = single()
    assert " 612 W" in text(view, t=END + 59 * NS)  # without the limit: the device row is over a minute old
    late = text(view, t=END + 61 * NS)
    assert "612" not in late
    assert "no sample yet at this time" in late or "GPU 0: no sample in the last 1 m" in late


def test_the_playhead_decides_what_is_shown():
    view = session(1, power_mw=500_000)
    assert "500/700 W" in text(view)
    assert "612/700 W" in text(view, t=END - 5 * NS)


# --- what is wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (0x0, []),
        (0x1, []),
        (0x4, [(1, "pwr-cap")]),
        (0x5, [(1, "pwr-cap")]),
        (0x8, [(2, "hw-slow")]),
        (0x48, [(2, "hw-therm")]),
        (0x88, [(2, "pwr-brake")]),
        (0x20, [(1, "sw-therm")]),
        (0x2, [(1, "app-clk")]),
        (0x64, [(2, "hw-therm"), (1, "sw-therm"), (1, "pwr-cap")]),
        (0x1000, [(1, "throttle 0x1000")]),
        (NAN, []),
        (-1.0, []),
    ],
)
def test_throttle_words(mask, expected):
    assert [(flag.severity, flag.words) for flag in throttle_flags(mask)] == expected


@pytest.mark.parametrize(
    ("changes", "words", "style"),
    [
        ({"hbm_bw_pct": 95.5}, "! bw 95 %", "warn"),
        ({"mem_used_b": 139 * GIB}, "! hbm 99 %", "warn"),
        ({"throttle_mask": 0x40}, "!! hw-therm", "bad"),
        ({"throttle_mask": 0x4}, "! pwr-cap", "warn"),
        ({"temp_c": 88}, "! hot 88 C", "warn"),
        ({"mem_temp_c": 97}, "! hbm hot 97 C", "warn"),
        ({"ecc_uncorrected": 2}, "!! ecc 2 uncorrected", "bad"),
        ({"ecc_corrected": 3}, "! ecc 3 corrected", "warn"),
        ({"remap_failed": 1}, "!! row remap failed", "bad"),
        ({"remap_pending": 1}, "! row remap needs reset", "warn"),
    ],
)
def test_flags(changes, words, style):
    view = single(**changes)
    assert words in render(view, 90, 12)[0]
    assert styles_of(view, words, 90, 12) == {style}
    assert words in plain(PANE.summary(frame(view, 100)))


def test_nothing_wrong_raises_no_flag():
    assert "!" not in text(single(hbm_bw_pct=95.0, temp_c=85, throttle_mask=1))


def test_the_worst_flag_survives_when_there_is_little_room():
    view = single(throttle_mask=0x44, temp_c=90, hbm_bw_pct=99)
    assert "!! hw-therm  +3" in text(view, 66, 12)


def test_the_summary_names_the_worst_gpu():
    summary = plain(PANE.summary(frame(troubled(), 80)))
    assert summary.startswith("2 gpu  !! GPU 1 lost at")
    assert plain(PANE.summary(frame(single(), 60))).rstrip() == "2 gpu  GPU 0  HBM 70 %  bw 71 %  SM 84 %"


def lost(*, wall=True):
    """GPU 1 of two stops 20 s before the end and is reported lost."""
    view = FakeView(wall_ns=NOON_NS - END if wall else None)
    for second in range(60):
        t = T0 + (second + 1) * NS
        for gpu in (0, 1):
            if gpu == 0 or second < 40:
                view.add("gpu", t, gpu=gpu, **gpu_fields())
    view.add("gpu_event", END - 19 * NS, gpu=1, gi=-1, kind="lost", detail="fell off the bus")
    view.add("gpu_device", END - 20 * NS, gpu=1, **device_fields())
    return view


def test_a_lost_gpu_says_when_and_the_others_go_on():
    view = lost()
    lines = render(view)
    assert "!! GPU 1 lost at 11:59:41" in "\n".join(lines)
    assert styles_of(view, "GPU 1 lost") == {"bad"}
    assert "612" in lines[3]


def test_a_lost_gpu_without_wall_time():
    assert "!! GPU 1 lost 19.4 s ago" in text(lost(wall=False))


def test_a_gpu_that_came_back_is_not_lost():
    view = lost()
    view.add("gpu_event", END - NS, gpu=1, gi=-1, kind="back")
    view.add("gpu", END, gpu=1, **gpu_fields())
    assert "lost" not in text(view)


def test_a_gpu_that_answers_again_is_not_lost_before_its_first_row():
    view = lost()
    assert "lost" in text(view)
    view.add("gpu_event", END - NS, gpu=1, gi=-1, kind="back")
    assert "lost" not in text(view)
    assert "stale 20.4 s" in text(view)


def test_a_gpu_lost_hours_ago_is_still_reported_while_its_status_is_repeated():
    view = lost()
    t = END + 3 * 3600 * NS
    view.add("gpu", t, gpu=0, **gpu_fields())
    add_status(view, t, scope="gpu 1", state="error", reason="GPU is lost")
    assert "!! GPU 1 lost at 11:59:41" in text(view, t=t + NS // 2)


def test_a_gpu_that_never_answered_gives_its_reason():
    view = single()
    add_status(view, scope="gpu 1", state="no_permission", reason="no permission for this device")
    assert "!! GPU 1: no permission for this device" in text(view)


def test_an_xid_in_the_span_is_flagged_and_an_older_one_is_not():
    view = single()
    view.add("gpu_event", END - 30 * NS, gpu=0, gi=-1, kind="xid", code=79)
    assert "!! xid 79" in text(view)
    assert "xid" not in text(view, span_ns=10 * NS)
    add_status(
        view, scope="gpu 1", state="error", reason="GPU is lost"
    )  # now older events are looked for as well
    assert "xid" not in text(view, span_ns=10 * NS)


# --- links --------------------------------------------------------------------------------------------------


def linked(**links):
    """One GPU with 18 idle links, some changed: link7={"tx_bps": ...}."""
    view = session(1, links=0, nvlink_tx_bps=NAN, nvlink_rx_bps=NAN)
    for link in range(18):
        view.add("nvlink", END, gpu=0, **link_fields(link, **links.get(f"link{link}", {})))
    return view


def test_links_by_traffic_with_the_hot_ones_named_busiest_first():
    # 26.562 GB/s per link: 25.0 is 94 % of it (level 8 of 8), 13.5 is 51 % (5), 6.7 is 25.2 % (3), 0.1 is below hot
    view = linked(
        link7={"tx_bps": 25.0e9}, link3={"tx_bps": 13.5e9}, link12={"tx_bps": 6.7e9}, link0={"tx_bps": 0.1e9}
    )
    lines = render(view, 80, 12)
    assert lines[4][:47].rstrip() == "  NVLink tx .__+___@____-_____  45.3 hot 7 3 12"
    assert lines[5][:47].rstrip() == "  GB/s   rx __________________   0.0"


def test_down_links_and_errors_stand_out_at_rest():
    view = linked(link7={"state": 0}, link9={"crc_errors": 11}, link10={"tx_bps": NAN, "rx_bps": NAN})
    lines = render(view, 100, 12)
    assert "!! link 7 down  ! link 9 err 11" in lines[0]
    assert "NVLink tx _______x_e?_______" in lines[4]
    assert styles_of(view, "x", 100, 12) >= {"bad"}


def test_a_card_without_a_bridge_is_one_warning():
    view = linked(**{f"link{link}": {"state": 0} for link in range(18)})
    assert "! all 18 links inactive" in render(view, 100, 12)[0]


def test_more_links_than_cells_are_folded_and_the_worst_shows():
    view = session(1, links=0)
    for link in range(36):
        view.add("nvlink", END, gpu=0, **link_fields(link, state=0 if link == 35 else 1))
    assert render(view, 100, 12)[4][12:30] == "_________________x"
    view.add("nvlink", END + 1, gpu=0, **link_fields(0, tx_bps=NAN))
    view.add("nvlink", END + 1, gpu=0, **link_fields(1, tx_bps=26.0e9))
    assert render(view, 100, 12)[4][12:30] == "@________________x"


def test_links_that_gave_no_numbers():
    view = session(1, links=0, nvlink_tx_bps=NAN, nvlink_rx_bps=NAN)
    assert render(view, 80, 12)[4][:20].rstrip() == "  NVLink --"
    add_status(view, channel="nvlink", state="not_supported", reason="counters need driver 550")
    assert render(view, 80, 12)[4][:20].rstrip() == "  NVLink n/a"


# --- MIG and processes --------------------------------------------------------------------------------------


def test_mig_instances_are_indented_under_their_gpu():
    view = session(1)
    for gi in (1, 2):
        view.add(
            "gpu", END, gpu=0, **gpu_fields(gi=gi, mem_total_b=16 * GIB, mem_used_b=4 * GIB, power_mw=NAN)
        )
    lines = render(view, 80, 17)
    rows = [line for line in lines if line.startswith("   gi")]
    assert [row.split()[0] for row in rows] == ["gi1", "gi2"]
    assert all("4/16" in row and " --" in row for row in rows)
    assert lines.index(rows[0]) > next(at for at, line in enumerate(lines) if "H200" in line)
    assert PANE.items(frame(view)) == 3


def processes(**state):
    view = session(2)
    add_processes(view, END - 2 * NS, 2, each=3)
    view.add(
        "gpu_process",
        END - 2 * NS,
        gpu=1,
        gi=-1,
        pid=99,
        name="",
        user="root",
        kind="",
        mem_b=NAN,
        sm_pct=NAN,
    )
    lines = render(view, 80, 17, processes=True, **state)
    at = next(place for place, line in enumerate(lines) if "PID" in line)
    return [line for line in lines[at + 1 : -1] if line]


def test_processes_are_sorted_by_memory_with_the_unknown_last():
    pids = [line.lstrip("> ").split()[0] for line in processes()]
    assert pids == ["12000", "12001", "12002", "12100", "12101", "12102", "99"]
    assert processes()[-1].split(None, 3)[-1].endswith("(not visible from here)")


@pytest.mark.parametrize(
    ("sort", "first"), [("pid", "99"), ("sm", "12000"), ("name", "99"), ("user", "99"), ("gpu", "12000")]
)
def test_processes_can_be_sorted(sort, first):
    assert processes(sort=sort)[0].lstrip("> ").split()[0] == first


def test_processes_can_be_filtered():
    assert len(processes(filter="worker-1")) == 2
    assert len(processes(filter="ROOT")) == 1
    assert processes(filter="nothing")[0] == ' no process matches "nothing"'


def test_the_selection_moves_among_the_processes():
    assert [line.startswith(">") for line in processes(selected=2)] == [False, False, True, *[False] * 4]


def test_a_process_that_ended_is_gone_at_the_next_scan():
    view = session(1)
    add_processes(view, END - 6 * NS, 1, each=2)
    add_processes(view, END - NS, 1, each=1)
    body = text(view, 80, 24, processes=True)
    assert "12000" in body
    assert "12001" not in body


def test_a_process_name_cannot_reach_the_terminal():
    view = session(1)
    view.add(
        "gpu_process",
        END,
        gpu=0,
        gi=-1,
        pid=7,
        name="\x1b[2J\x07[red]x\n\u202e",
        user="a\tb",
        kind="",
        mem_b=1,
    )
    body = text(view, 80, 20)
    assert "?[red]x ?" in body
    assert body.replace("\n", "").isprintable()


# --- histories ----------------------------------------------------------------------------------------------


def history(view, t, columns=60, span_ns=60 * NS):
    drawn = frame(view, t=t, span_ns=span_ns)
    return histories(drawn, "gpu", ["hbm_bw_pct"], GPU.key, columns, NS)[0, -1]["hbm_bw_pct"]


def test_steps_are_round_and_never_finer_than_the_rows():
    assert nice_step(60 * NS, 60, NS) == NS
    assert nice_step(60 * NS, 400, NS) == NS
    assert nice_step(300 * NS, 200, NS) == 2 * NS
    assert nice_step(3600 * NS, 100, NS) == 60 * NS
    assert nice_step(24 * 3600 * NS, 100, NS) == 1200 * NS
    assert nice_step(10**18, 10, NS) % (24 * 3600 * NS) == 0


def test_history_holds_the_measured_values_in_order():
    view = FakeView()
    for second in range(1, 61):
        view.add("gpu", T0 + second * NS, gpu=0, **gpu_fields(hbm_bw_pct=float(second)))
    assert history(view, END).tolist() == [float(second) for second in range(1, 61)]


def test_a_gap_stays_a_gap_and_one_late_tick_is_bridged():
    view = FakeView()
    for second in range(1, 61):
        if not 20 <= second < 30 and second != 50:
            value = NAN if second == 55 else float(second)
            view.add("gpu", T0 + second * NS, gpu=0, **gpu_fields(hbm_bw_pct=value))
    values = history(view, END)
    assert np.isnan(values[19:29]).all()
    assert values[18] == 19
    assert values[29] == 30
    assert values[49] == 49
    assert math.isnan(values[54])  # a row without a value is not bridged


def test_bins_do_not_shimmer_as_the_playhead_moves():
    view = session(1)
    early, late = history(view, END - NS, 20), history(view, END - NS + 100_000_000, 20)
    assert early.tolist() == late.tolist()
    step_ns = nice_step(60 * NS, 20, NS)
    moved = history(view, END - NS + step_ns, 20)
    assert moved[:-2].tolist() == early[1:-1].tolist()


def test_drawing_is_a_function_of_the_frame_alone():
    view = troubled()
    assert PANE.render(frame(view)) == PANE.render(frame(view))


@pytest.mark.parametrize("name", list(VIEWS))
@pytest.mark.parametrize("state", [PaneState(), PaneState(maximized=True), PaneState(processes=True)])
def test_the_real_window_draws_the_same(name, state):
    fake = VIEWS[name]
    window = Window(fake.strings, fake.anchors, channels=list(fake.channels.values()))
    for channel in fake.channels.values():
        window.push(Batch(channel, fake.rows(channel.name)))
    for size in (Size(80, 17), Size(158, 46)):
        frames = [Frame(view, end_of(), 60 * NS, size, ASCII, state) for view in (fake, window)]
        assert PANE.render(frames[0]) == PANE.render(frames[1])
        assert PANE.title(frames[0]) == PANE.title(frames[1])
