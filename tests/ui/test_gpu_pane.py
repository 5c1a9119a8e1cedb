import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opusmon.channels import GPU
from opusmon.clock import NS
from opusmon.schema import Batch
from opusmon.ui.glyphs import ASCII, BRAILLE, BY_NAME
from opusmon.ui.panes.base import Frame, PaneState, Size
from opusmon.ui.panes.gpu_rows import settle
from opusmon.ui.text import STYLES, fit, line_cells, plain
from opusmon.window import Window

from .fakeview import (
    END,
    PANE,
    FakeView,
    add_processes,
    device_fields,
    end_of,
    frame,
    gpu_fields,
    link_fields,
    render,
    session,
    single,
    text,
    troubled,
)


def test_one_gpu_78x12():
    # 60 s over 70 cells; the load is 45 + 45 sin(s / 9), so it peaks 14 s and 70 s after the start, at 90 %
    assert render(single(), 78, 12) == [
        " 0 H200  HBM ###########-----  98/140 GiB  70 %",
        "  bw  71 %  3.42 TB/s  SM  84 %  occ  38 %  tensor  25 %",
        "   612/700 W   63 C  HBM  70 C  1830/1980 MHz  PCIe tx  0.2 rx  2.7 GB/s",
        "  NVLink tx ::::::::::::::::::  99.8 GB/s  hot all",
        "         rx __________________   0.0 GB/s",
        "   100%      .:--==++*******+++=-:.                                          :",
        "     bw ==*#@@@@@@@@@@@@@@@@@@@@@@@@##*+=:.                            ..-=+*@",
        "      0 @@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@#*+=-:::.........:---=+*#@@@@@@@@",
        "   100%      .:--==++*******+++=-:.                                          +",
        "     SM ==*#@@@@@@@@@@@@@@@@@@@@@@@@##*+=:.                            ..-=+*@",
        "      0 @@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@#*+=-:::.........:---=+*#@@@@@@@@",
        " L2: not reported by NVML; run with --deep (costs about 1 %)",
    ]


def test_two_gpus_80x17():
    view = session(2)
    add_processes(view, END - 2 * NS, 2, each=2)
    lines = render(view)
    numbers = [
        "  bw  71 %  3.42 TB/s  SM  84 %  occ  38 %  tensor  25 %",
        "   612/700 W   63 C  HBM  70 C  1830/1980 MHz  PCIe tx  0.2 rx  2.7 GB/s",
        "  NVLink tx ::::::::::::::::::  99.8 GB/s  hot all",
        "         rx __________________   0.0 GB/s",
    ]
    assert lines[:5] == [">0 H200  HBM ###########-----  98/140 GiB  70 %", *numbers]
    assert lines[6:11] == [" 1 H200  HBM ###########-----  98/140 GiB  70 %", *numbers]
    assert lines[5].startswith("  bw    ==++***")
    assert lines[11].startswith("  bw    ###@@@@")
    assert lines[12:] == [
        "",
        "      PID USER     GPU      GiB*  SM% PROCESS",
        "    12000 vllm     0        95.1   84 vllm/worker-0",
        " +3 more",
        " L2: not reported by NVML; run with --deep (costs about 1 %)",
    ]


def test_a_wide_pane_puts_both_directions_of_nvlink_side_by_side():
    lines = render(session(2), 118, 32)
    beside = "  NVLink tx ::::::::::::::::::  99.8 GB/s  rx __________________   0.0 GB/s  hot all"
    assert lines.count(beside) == 2


def test_more_room_goes_to_more_histories():
    view = session(2)
    add_processes(view, END - 2 * NS, 2)

    def charts(width, height):
        return [
            line[:8].strip()
            for line in render(view, width, height)
            if line[:8].strip() in ("bw", "SM", "tx", "rx")
        ]

    assert charts(80, 17) == ["bw", "bw"]
    assert charts(78, 21) == ["bw", "bw"]
    assert charts(78, 25) == ["bw", "SM"] * 2
    assert charts(118, 32) == ["bw", "SM", "tx", "rx"] * 2
    lines = render(view, 118, 32)
    assert lines[10].startswith("   478G")  # 18 links x 26.562 GB/s
    assert lines[11][8:] == "=" * 110  # 99.8 of 478.1 GB/s: the fourth of the 16 levels of two lines


def test_eight_gpus_80x17():
    view = session(8)
    add_processes(view, END - 2 * NS, 8, each=2)
    lines = render(view)
    assert lines[0] == " GPU HBM          GiB  bw% history  SM%    W   C NVL tx rx GB/s flags"
    assert lines[1] == "> 0  ######--  98/140  71  #@@*-.-*  84  612  63    99.8    0.0"
    assert [line[:26] for line in lines[2:9]] == [f"  {gpu}  ######--  98/140  71 " for gpu in range(1, 8)]
    assert lines[9:] == [
        "      PID USER     GPU      GiB*  SM% PROCESS",
        "    12000 vllm     0        95.1   84 vllm/worker-0",
        "    12001 vllm     0        94.1   84 vllm/worker-1",
        "    12100 vllm     1        92.1   83 vllm/worker-0",
        "    12101 vllm     1        91.1   83 vllm/worker-1",
        "    12200 vllm     2        89.1   82 vllm/worker-0",
        " +11 more",
        " L2: not reported by NVML; run with --deep (costs about 1 %)",
    ]


def test_room_under_the_table_opens_the_selected_gpu():
    view = session(4)
    add_processes(view, END - 2 * NS, 4)
    lines = render(view, 78, 21, selected=2)
    assert lines[3].startswith("> 2 ")
    assert lines[5].startswith(">2 H200  HBM")
    assert [line.split()[0] for line in lines[-5:-1]] == ["12000", "12100", "12200", "12300"]


def test_blocks_and_processes_are_both_shown_at_a_quarter_screen():
    view = session(2)
    add_processes(view, END - 2 * NS, 2, each=3)
    lines = render(view, 78, 21, processes=True)
    assert sum("PCIe tx  0.2 rx  2.7 GB/s" in line for line in lines) == 2
    assert sum("vllm/worker-" in line for line in lines) == 6
    lines = render(view, 78, 15, processes=True)  # with less room one line per GPU
    assert [line[:3] for line in lines[:3]] == [" GP", "  0", "  1"]
    assert sum("vllm/worker-" in line for line in lines) == 6


@pytest.mark.parametrize(("width", "height"), [(80, 17), (78, 21), (118, 32), (236, 60)])
@pytest.mark.parametrize("count", [1, 2, 8, 16])
def test_every_gpu_is_shown_or_counted(count, width, height):
    lines = render(session(count), width, height)
    heads = [line for line in lines if " 98/140" in line]
    more = [int(line.split("+")[1].split()[0]) for line in lines if line.startswith(" +")]
    assert len(heads) + sum(more) >= count  # the selected one may be open in full as well
    assert len(heads) <= count + 1
    assert lines[-1] == " L2: not reported by NVML; run with --deep (costs about 1 %)"
    if (count, height) != (16, 17):
        assert more == []


def test_sixteen_gpus_scroll_to_the_selected_one():
    view = session(16)
    lines = render(view)
    assert lines[14:] == [
        lines[14],
        " +2 more",
        " L2: not reported by NVML; run with --deep (costs about 1 %)",
    ]
    lines = render(view, selected=15)
    assert lines[14].startswith(">15 ")
    assert lines[15] == " +2 above"


def test_what_is_wrong_with_a_gpu_out_of_sight_is_said():
    view = session(16)
    view.add("gpu", END + 1, gpu=15, **gpu_fields(throttle_mask=0x40))
    assert render(view)[15] == " +2 more   GPU 15 !! hw-therm"
    assert render(view, selected=15)[15] == " +2 above"
    view.add("gpu_event", END + 2, gpu=14, gi=-1, kind="lost")
    assert render(view)[15].startswith(" +2 more   !! GPU 14 lost at ")


def test_detail_opens_the_selected_gpu_under_the_table():
    lines = render(session(16), 78, 21, selected=3, detail=True)
    assert lines[0].startswith(" GPU")
    assert sum(line.startswith(">") for line in lines) == 2
    assert ">3 H200  HBM" in lines[14]
    assert "NVLink tx" in lines[17]


def test_maximized_shows_every_history_and_the_links_as_a_matrix():
    view = single()
    add_processes(view, END - 2 * NS, 2, each=2)
    lines = render(view, 158, 46, maximized=True)
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
    at = lines.index("NVLink  tx 99.8 GB/s  rx 0 B/s  GB/s per link   18 links up, no errors")
    assert lines[at + 1].split() == ["link", *map(str, range(18))]
    assert lines[at + 2].split() == ["tx", *["5.5:"] * 18]
    assert lines[at + 3].split() == ["rx", *["0.0_"] * 18]
    assert "of 140.4 GiB" in body
    assert "of 478.1 GB/s" in body  # 18 links x 26.562 GB/s
    assert [line.split()[:3] for line in lines if "vllm/" in line] == [
        ["12000", "vllm", "0"],
        ["12001", "vllm", "0"],
    ]
    assert "12100" not in body  # a process of the other GPU


def test_maximized_in_a_small_terminal_prefers_histories_to_an_idle_matrix():
    view = single()
    assert "links up" not in text(view, 78, 21, maximized=True)
    assert "SM occupancy" in text(view, 78, 21, maximized=True)
    view.add("nvlink", END + 1, gpu=0, **link_fields(7, state=0))
    assert "DOWN!!" in text(view, 78, 28, maximized=True)


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


# --- cost ---------------------------------------------------------------------------------------------------


def test_a_frame_reads_the_view_once():
    view = session(8)
    asked = []
    latest = view.latest
    view.latest = lambda *ask: asked.append(ask) or latest(*ask)
    drawn = frame(view, 78, 21)
    PANE.items(drawn)
    PANE.title(drawn)
    PANE.render(drawn)
    assert (
        len(asked) == len(set(asked)) == 7
    )  # gpu, gpu_device, gpu_event, nvlink, gpu_process, dcgm and status


def test_nothing_of_an_earlier_frame_is_shown_again():
    view = session(1)
    assert "612/700 W" in text(view)
    view.add("gpu", END + 1, gpu=0, **gpu_fields(power_mw=498_000))
    assert "498/700 W" in text(view)
    assert "612/700 W" in text(session(1))  # another view with the same times and as many rows
    assert "612/700 W" in text(view, t=END)


def seen(line):
    """What the eye sees: characters with their style, blanks only where the style has a background or an underline."""
    drawn = {"select", "mark", *(f"heat{n}" for n in range(8))}
    cells = [(char, style) for text, style in line for char in text]
    return [(char, style if style in drawn or char != " " else "") for char, style in cells]


@given(
    st.lists(
        st.tuples(st.sampled_from(["", " ", "  ", "ab", "日本", "x "]), st.sampled_from(STYLES)), max_size=12
    ),
    st.integers(0, 20),
)
def test_settled_lines_have_their_width_and_show_the_same(spans, width):
    line = settle(tuple(spans), width)
    assert line_cells(line) == width
    assert plain(line) == plain(fit(tuple(spans), width))
    assert seen(line) == seen(fit(tuple(spans), width))
    assert len(line) <= max(len(fit(tuple(spans), width)), 1)


def test_a_row_of_numbers_is_few_runs_of_colour():
    row = PANE.render(frame(session(8)))[2]
    assert [style for _, style in row] == ["title", "series4", "dim", "value", "series0", "value"]
