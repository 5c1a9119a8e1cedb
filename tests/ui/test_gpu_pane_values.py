import pytest

from opusmon.clock import NS
from opusmon.ui.text import plain

from .fakeview import (
    END,
    NAN,
    PANE,
    T0,
    FakeView,
    add_status,
    device_fields,
    frame,
    gpu_fields,
    render,
    session,
    single,
    styles_of,
    text,
)


def test_before_any_data():
    assert render(FakeView(), 60, 4)[0] == " no sample yet at this time"
    assert PANE.title(frame(FakeView())) == "2 gpu  NVML no sample"
    assert PANE.items(frame(FakeView())) == 0
    assert render(session(1), 60, 4, t=T0 - NS)[0] == " no sample yet at this time"


def test_a_host_without_a_driver_says_so_with_what_to_do_and_what_would_be_here():
    view = FakeView()
    add_status(view, channel="", reason="no NVIDIA driver on this host", remedy="install the NVIDIA driver")
    lines = render(view, 40, 12)
    assert lines[0] == "Not running: no NVIDIA driver on this"  # whole, on as many lines as it needs
    assert lines[1] == "host"
    assert "  install the NVIDIA driver" in lines
    assert "It would show:" in lines
    assert not any("yet" in line for line in lines)
    assert PANE.title(frame(view)) == "2 gpu  off"
    assert plain(PANE.summary(frame(view))).rstrip() == "2 gpu  off: no NVIDIA driver on this host"


def test_a_missing_number_is_dashes_and_zero_is_zero():
    lines = render(single(sm_occupancy_pct=NAN, tensor_pct=0.0, pcie_tx_bps=NAN), 80, 17)
    assert lines[1].endswith("SM  84 %  occ  -- %  tensor   0 %")
    assert "PCIe tx   -- rx  2.7 GB/s" in lines[2]


def test_a_missing_number_with_a_reason_says_so_at_the_foot():
    view = single(tensor_pct=NAN)
    add_status(view, field="tensor_pct", state="not_supported", reason="needs Hopper or newer")
    lines = render(view, 80, 17)
    assert "tensor n/a %" in lines[1]
    assert lines[-1] == " tensor_pct: needs Hopper or newer   L2: --deep"


def test_the_reason_of_another_gpu_is_not_ours():
    view = session(2, tensor_pct=NAN)
    add_status(view, field="tensor_pct", scope="gpu 1", state="not_supported", reason="x")
    lines = render(view, 80, 17)
    found = [line[-12:] for line in lines if "tensor" in line]
    assert found[:2] == ["tensor  -- %", "tensor n/a %"]


def test_the_foot_puts_what_broke_first_and_counts_the_rest():
    view = single()
    add_status(view, field="mem_temp_c", state="not_supported", reason="not measured")
    add_status(view, field="power_mw", state="no_permission", reason="no permission")
    add_status(view, state="error", reason="driver 580, library 570", remedy="reboot")
    add_status(view, field="temp_c", state="ok", reason="fine again")
    assert render(view, 100, 17)[-1] == " ! driver 580, library 570 (reboot)  +2 more: w   L2: --deep"
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
    assert "busy" in [line.strip()[:4] for line in body.splitlines()]  # so the history is called as well
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
    view.add("l2", END - NS, gpu=0, **l2_fields())
    assert "--deep" not in text(view)


def l2_fields(**changes):
    """4 TB/s asked for by SMs, of which 3 came from HBM; 8 TB/s through the L2 in all."""
    found = {
        "dt_ns": NS,
        "l2_hit_pct": 25.0,
        "l2_to_hbm_ratio": 0.375,
        "l2_bps": 8e12,
        "hbm_read_bps": 3e12,
        "hbm_write_bps": 0.5e12,
        "bank_conflicts_per_s": NAN,
    }
    return {**found, **changes}


def test_the_hardware_counters_have_a_line_with_their_age():
    view = single()
    view.add("l2", END - NS, gpu=0, **l2_fields())
    (line,) = [line for line in render(view, 100, 17) if "L2" in line]
    assert line == "  L2 hit  25 %  8.00 TB/s  HBM rd  3.00 wr  0.50 TB/s"
    assert "deep CUPTI" in PANE.title(frame(view))
    old = single()
    old.add("l2", END - 20 * NS, gpu=0, **l2_fields())
    assert "20.4 s ago" in text(old)  # the playhead stands 0.4 s after the newest row


def test_without_a_hit_rate_the_ratio_has_its_own_name():
    view = single()
    view.add("l2", END, gpu=0, **l2_fields(l2_hit_pct=NAN))
    assert "L2 to HBM  38 %  8.00 TB/s" in text(view)
    idle = single()
    idle.add("l2", END, gpu=0, **l2_fields(l2_hit_pct=NAN, l2_to_hbm_ratio=NAN, l2_bps=0.0))
    assert "L2 idle  0.00 TB/s" in text(idle)


def test_what_is_sampled_in_turn_stands_side_by_side():
    view = single()
    view.add("l2", END - NS, gpu=0, **l2_fields())
    view.add("l2", END, gpu=0, **dict.fromkeys(l2_fields(), NAN) | {"dt_ns": NS, "bank_conflicts_per_s": 5e6})
    assert "L2 hit  25 %" in text(view)
    assert "bank conflicts    5.0 M/s" in text(view)


def test_why_there_are_no_hardware_counters_is_said_at_the_foot():
    view = single()
    view.add(
        "status",
        END,
        collector="l2",
        state="unavailable",
        reason="another profiler holds the hardware counters",
        remedy="Stop it",
    )
    assert "L2: another profiler holds the hardware counters (Stop it)" in text(view)
    asked = single()
    asked.add(
        "status",
        END,
        collector="l2",
        state="unavailable",
        reason="runs only when asked for",
        remedy="opusmon --deep",
    )
    assert "L2: not reported by NVML; run with --deep" in text(asked)


def test_a_gpu_in_full_has_the_history_of_its_hardware_counters():
    view = single()
    for n in range(30):
        view.add("l2", END - n * NS, gpu=0, **l2_fields())
    lines = "\n".join(render(view, 160, 60, maximized=True))
    assert "L2 hit rate 25 %" in lines
    assert "HBM read 3.00 TB/s" in lines


def test_memory_without_numbers_divides_by_nothing():
    lines = render(single(mem_used_b=NAN, mem_total_b=NAN), 80, 12)
    assert lines[0] == " 0 H200  HBM ????????????????   --/-- GiB  -- %"
    assert "0/0 GiB  -- %" in render(single(mem_used_b=0, mem_total_b=0), 80, 12)[0]


def test_unified_memory_is_not_called_hbm():
    view = FakeView()
    view.add("gpu_device", END, gpu=0, **device_fields(name="NVIDIA GB10", memory_kind="unified", links=0))
    view.add("gpu", END, gpu=0, **gpu_fields())
    assert render(view, 80, 12)[0].startswith(" 0 GB10  unified ###")


def test_title_says_source_interval_and_span():
    assert PANE.title(frame(single())) == "2 gpu  NVML 1 s  history 1m"
    assert PANE.title(frame(single(), span_ns=300 * NS)) == "2 gpu  NVML 1 s  history 5m"


def test_title_gives_the_age_once_rows_fail_to_come():
    view = single()
    assert PANE.title(frame(view, t=END + 1_500_000_000)) == "2 gpu  NVML 1 s  history 1m"
    assert PANE.title(frame(view, t=END + 1_600_000_000)) == "2 gpu  NVML 1 s  age 1.6 s  history 1m"


@pytest.mark.parametrize(
    ("dt_ms", "words"),
    [
        (998.8, "1 s"),
        (1_013.3, "1 s"),
        (1_041.0, "1 s"),
        (988.0, "1 s"),
        (940.0, "940 ms"),
        (250.4, "250 ms"),
        (99.7, "100 ms"),
        (502.0, "500 ms"),
        (2_004.0, "2 s"),
        (1_300.0, "1.3 s"),
        (9_990.0, "10 s"),
    ],
)
def test_the_interval_reads_as_people_write_it(dt_ms, words):
    view = FakeView()
    for tick in range(20):
        t = END - round((19 - tick) * dt_ms * 1e6)
        view.add("gpu", t, gpu=0, **gpu_fields(dt_ns=round(dt_ms * 1e6)))
    assert PANE.title(frame(view, t=END + 1)).startswith(f"2 gpu  NVML {words}  ")


def test_one_late_tick_does_not_change_the_title():
    view = FakeView()
    for second in range(1, 61):
        dt_ns = 1_480_000_000 if second == 60 else NS
        view.add("gpu", T0 + second * NS, gpu=0, **gpu_fields(dt_ns=dt_ns))
    assert PANE.title(frame(view)) == "2 gpu  NVML 1 s  history 1m"


def test_one_late_tick_is_not_stale_and_three_are():
    view = single()
    assert "stale" not in text(view, t=END + 2_400_000_000)
    assert "! stale 2.6 s" in text(view, t=END + 2_600_000_000)
    assert PANE.title(frame(view, t=END + 2_600_000_000)) == "2 gpu  NVML 1 s  stale 2.6 s  history 1m"


def test_stale_numbers_are_dim():
    view = single()
    assert styles_of(view, "612/700 W") == {"value"}
    assert styles_of(view, "612/700 W", t=END + 5 * NS) == {"dim"}


def test_slow_sampling_is_not_stale():
    view = FakeView()
    view.add("gpu", END - 5 * NS, gpu=0, **gpu_fields(dt_ns=5 * NS))
    assert "stale" not in text(view)
    assert PANE.title(frame(view)) == "2 gpu  NVML 5 s  history 1m"


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
