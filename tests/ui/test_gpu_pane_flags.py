import re

import pytest

from opusmon.clock import NS
from opusmon.ui.glyphs import ASCII
from opusmon.ui.panes.gpu_flags import throttle_flags
from opusmon.ui.text import plain

from .fakeview import (
    END,
    GIB,
    NAN,
    PANE,
    T0,
    FakeView,
    add_status,
    device_fields,
    frame,
    gpu_fields,
    link_fields,
    render,
    session,
    single,
    styles_of,
    text,
    troubled,
)

NOON_NS = 1_795_953_600 * NS  # 2026-11-29 12:00:00 UTC


pytestmark = pytest.mark.usefixtures("utc")


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
        ({"hbm_bw_pct": 95.6}, "! bw 96 %", "warn"),
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


@pytest.mark.parametrize("used", [134.7, 138.4, 140.0])
def test_a_flag_and_the_number_beside_it_are_the_same(used):
    line = render(single(mem_used_b=used * GIB), 90, 12)[0]
    (number,), (flag,) = re.findall(r"GiB +(\d+) %", line), re.findall(r"! hbm (\d+) %", line)
    assert number == flag


def test_nothing_wrong_raises_no_flag():
    assert "!" not in text(single(hbm_bw_pct=95.0, temp_c=85, throttle_mask=1))


@pytest.mark.parametrize("width", [40, 48, 60, 80])
def test_a_narrow_table_gives_up_other_columns_for_what_is_wrong(width):
    view = session(8)
    assert "flags" in render(view, 80, 17)[0]
    view.add("gpu", END + 1, gpu=5, **gpu_fields(throttle_mask=0x4))
    assert "! pwr-cap" in render(view, width, 17)[6]


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
    assert "612" in lines[2]


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
    assert lines[3] == "  NVLink tx .__+___@____-_____  45.3 GB/s  hot 7 3 12"
    assert lines[4] == "         rx __________________   0.0 GB/s"


def test_the_strip_is_on_the_scale_of_the_line_rate():
    # a measured copy: 401 GB/s over 18 links is 22.3 GB/s each, 84 % of 26.562, level 7 of 8
    view = linked(**{f"link{link}": {"tx_bps": 401.0e9 / 18} for link in range(18)})
    assert render(view, 80, 12)[3] == f"  NVLink tx {'#' * 18} 401.0 GB/s  hot all"
    assert ASCII.levels.index("#") == 6


def test_down_and_unknown_links_stand_out_at_rest():
    view = linked(link7={"state": 0}, link10={"tx_bps": NAN, "rx_bps": NAN})
    lines = render(view, 100, 12)
    assert "!! link 7 down" in lines[0]
    assert "NVLink tx _______x__?_______" in lines[3]
    assert styles_of(view, "x", 100, 12) >= {"bad"}


def counted(before, now, *, at=T0 + NS, **options):
    """One GPU whose link 9 had `before` CRC errors at `at` and has `now` at the end."""
    view = session(1, links=0)
    for link in range(18):
        errors = {"crc_errors": before} if link == 9 else {}
        view.add("nvlink", at, gpu=0, **link_fields(link, **errors))
    for link in range(18):
        errors = {"crc_errors": now, **options} if link == 9 else {}
        view.add("nvlink", END, gpu=0, **link_fields(link, **errors))
    return view


def test_errors_from_before_the_span_are_said_dim_and_are_no_warning():
    view = counted(12, 12)
    lines = render(view, 80, 12)
    assert "!" not in "".join(lines)
    assert lines[4] == "         rx __________________   0.0 GB/s  crc 12 since load"
    assert "12 since load" in text(view, 118, 12)
    assert {"dim"} == styles_of(view, "crc 12", 80, 12)
    assert "e" not in lines[3][12:30]


def test_errors_that_grow_within_the_span_are_a_warning():
    view = counted(12, 15)
    lines = render(view, 80, 12, span_ns=59 * NS)
    assert "! link 9 err +3" in lines[0]
    assert "NVLink tx _________e________" in lines[3]
    assert "crc 15 since load" in lines[4]
    assert styles_of(view, "link 9 err", 80, 12) == {"warn"}
    assert "+3 !" in text(view, 158, 46, maximized=True)


def test_errors_that_grew_before_the_span_are_over():
    view = counted(12, 15)
    for link in range(18):
        errors = {"crc_errors": 15} if link == 9 else {}
        view.add("nvlink", END - 9 * NS, gpu=0, **link_fields(link, **errors))
    assert "err" in text(view, 80, 12)
    assert "err" not in text(view, 80, 12, span_ns=5 * NS)


@pytest.mark.parametrize("span_ns", [60 * NS, 3600 * NS])
def test_a_session_younger_than_the_span_compares_with_its_first_rows(span_ns):
    assert "! link 9 err +3" in text(counted(12, 15), 80, 12, span_ns=span_ns)
    assert "err" not in text(counted(12, 12), 80, 12, span_ns=span_ns)


def test_counters_that_start_anew_count_from_zero():
    view = counted(12, 0)
    assert "err" not in text(view, 80, 12)
    assert "since load" not in text(view, 80, 12)


def test_kinds_of_errors_are_told_apart():
    assert "crc 12  replay 3 since load" in text(counted(12, 12, replay_errors=3), 80, 12)


def test_a_power_cap_marks_power_and_clock():
    view = single(throttle_mask=0x4, power_mw=693_000, sm_clock_mhz=1515)
    assert "! pwr-cap" in render(view, 78, 21)[0]
    assert styles_of(view, "693/700 W", 78, 21) == {"warn"}
    assert styles_of(view, "1515/1980 MHz", 78, 21) == {"warn"}
    assert styles_of(single(throttle_mask=0x1), "1830/1980 MHz", 78, 21) == {"value"}


def test_a_busy_memory_is_not_an_alarm():
    view = single(hbm_bw_pct=88.3, hbm_bw_bps=4.25e12)
    styles = {style for line in PANE.render(frame(view, 78, 21)) for _, style in line}
    assert not styles & {"warn", "bad", "series1"}  # every theme draws series1 in the hue of a warning


def test_a_card_without_a_bridge_is_one_warning():
    view = linked(**{f"link{link}": {"state": 0} for link in range(18)})
    assert "! all 18 links inactive" in render(view, 100, 12)[0]


def test_more_links_than_cells_are_folded_and_the_worst_shows():
    view = session(1, links=0)
    for link in range(36):
        view.add("nvlink", END, gpu=0, **link_fields(link, state=0 if link == 35 else 1))
    assert render(view, 100, 12)[3][12:30] == "_________________x"
    view.add("nvlink", END + 1, gpu=0, **link_fields(0, tx_bps=NAN))
    view.add("nvlink", END + 1, gpu=0, **link_fields(1, tx_bps=26.0e9))
    assert render(view, 100, 12)[3][12:30] == "@________________x"


def test_links_that_gave_no_numbers():
    view = session(1, links=0, nvlink_tx_bps=NAN, nvlink_rx_bps=NAN)
    assert render(view, 80, 12)[3] == "  NVLink --"
    add_status(view, channel="nvlink", state="not_supported", reason="counters need driver 550")
    assert render(view, 80, 12)[3] == "  NVLink n/a"
