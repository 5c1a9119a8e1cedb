"""What moved first: planted orders come out, sessions without changes stay quiet, real ones tell what was done."""

import json
from pathlib import Path

import numpy as np
import pytest

from opusmon.clock import NS, ManualClock
from opusmon.recording import Recorder, Recording
from opusmon.schema import Batch, Channel, Field
from opusmon.triage.explain import ExplainError, explain
from opusmon.triage.sequence import change_words, lines, render, to_json
from opusmon.window import Window

from .explain_session import T0, WALL, Planted, ns, nvlink, stream

ROOT = Path(__file__).parents[2]


def incident(seed=0, first=62.3, gap_s=(2.4, 3.1), links=18, slow=(7,), noise=0.01):
    """NVLink link 7 halves, then waits double, then TTFT rises by 640 ms."""
    planted = Planted(120, seed)
    nvlink(planted, 0, slow, first, links, noise)
    second = first + gap_s[0]
    stream(planted, second)
    third = second + gap_s[1]
    planted.requests(12, lambda t: 0.4 + 0.64 * (t > third) + 0.02 * planted.rng.normal(size=len(t)))
    return planted.window, (first, second, third)


def by_quantity(told):
    return {one.quantity: one for one in told.changes}


def test_the_planted_order_is_told_with_its_numbers():
    view, _ = incident()
    told = explain(view, ns(60), ns(120))
    texts = [change_words(one) for step in told.steps for one in step.changes]
    assert texts[0].startswith("gpu 0 link 7 NVLink TX halves (12.1 -> 6.0")
    assert texts[1].startswith("python 1234 stream 0x7 waits double (3.1")
    assert texts[2].startswith("TTFT p95 (proxy, m) +6")
    shift = by_quantity(told)["ttft_p95"].shift
    assert shift.after - shift.before == pytest.approx(0.64e9, rel=0.05)
    assert shift.before == pytest.approx(0.43e9, rel=0.05)


def test_the_order_and_the_bounds_hold_over_200_seeds():
    orders = inside = onsets = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        first = 61 + 20 * rng.random()
        view, planted = incident(seed, first, tuple(rng.uniform(2.2, 4, 2)), 3, (1,), noise=0.05)
        told = explain(view, ns(60), ns(120))
        place = {c.quantity: n for n, step in enumerate(told.steps) for c in step.changes}
        wanted = ("tx_bps", "mean_wait", "ttft_p95")
        found = [place.get(name, -1) for name in wanted]
        orders += -1 < found[0] < found[1] < found[2]
        changes = by_quantity(told)
        for name, t in zip(wanted, planted, strict=True):
            if name in changes:
                onsets += 1
                inside += changes[name].shift.lo <= ns(t) <= changes[name].shift.hi
    assert orders >= 190
    assert onsets >= 590
    assert inside >= 0.95 * onsets


def test_sessions_without_a_change_list_no_more_than_stated():
    listed = compared = 0
    stated = 0.0
    for seed in range(6):
        planted = Planted(120, seed)
        for gpu in range(4):
            nvlink(planted, gpu, noise=0.1)
        for pid in range(10):
            stream(planted, pid=pid + 1)
        planted.requests(12, lambda t: planted.rng.lognormal(-1, 0.5, len(t)))  # noqa: B023
        told = explain(planted.window, ns(60), ns(120))
        listed += len(told.changes) + len(told.more)
        compared += told.compared
        stated += told.chance
    assert compared > 1400
    assert listed <= stated


def test_nothing_changed_is_said():
    planted = Planted(120, 5)
    nvlink(planted, 0)
    told = explain(planted.window, ns(60), ns(120))
    assert told.steps == ()
    assert "Nothing changed: no series left its level." in render(told)


def test_changes_at_one_time_are_one_step():
    planted = Planted(120, 1)
    stream(planted, 70.4)
    nvlink(planted, 0, (2,), 70.4)
    told = explain(planted.window, ns(60), ns(120))
    assert [len(step.changes) for step in told.steps] == [2]
    text = lines(told)
    assert any(line.lstrip().startswith("& ") for line in text)


def test_an_order_that_the_samples_do_not_tell_is_marked():
    planted = Planted(120, 1)
    nvlink(planted, 0, (2,), 70.4)
    planted.channel(
        "gpu_process",
        t=np.arange(1, 121, 4),
        gpu=0,
        gi=-1,
        pid=5,
        name="p",
        sm_pct=np.where(np.arange(1, 121, 4) < 71, 10, 60),
    )
    planted.tick().sampled("host", cpu_busy_pct=planted.level(10, 60, 72.6, 0.01))
    told = explain(planted.window, ns(60), ns(120))
    # 1, 5, ..., 69 s read 10 %, 73 s reads 60 %: the onset lies in (69, 73] s.
    bounds = {one.quantity: (one.shift.lo, one.shift.hi) for one in told.changes}
    assert bounds["sm_pct"] == (ns(69), ns(73))
    assert [step.unsure for step in told.steps] == [False, True]
    assert any(line.startswith("~") for line in lines(told))
    assert "~ may as well" in " ".join(lines(told))


def test_all_links_are_one_line_and_some_are_named():
    planted = Planted(120, 1)
    nvlink(planted, 0, range(18), 70.4)
    nvlink(planted, 1, (3, 9), 90.2)
    told = explain(planted.window, ns(60), ns(120))
    texts = [change_words(one) for step in told.steps for one in step.changes]
    assert texts == [
        "gpu 0, per link NVLink TX halves (12.1 -> 6.0 GB/s; 18 of 18 links)",
        "gpu 1, per link NVLink TX halves (12.1 -> 6.0 GB/s; 2 of 18 links: 3, 9)",
    ]


def test_the_sum_over_the_links_stands_for_them_and_one_link_for_the_sum():
    planted = Planted(120, 1)
    nvlink(planted, 0, range(18), 70.4)
    planted.tick().sampled("gpu", gpu=0, gi=-1, nvlink_tx_bps=planted.level(218e9, 108e9, 70.4, 0.002))
    nvlink(planted, 1, (5,), 70.4, links=2)
    planted.tick().sampled("gpu", gpu=1, gi=-1, nvlink_tx_bps=planted.level(24.2e9, 18.1e9, 70.4, 0.01))
    told = explain(planted.window, ns(60), ns(120))
    assert sorted(change_words(one) for one in told.changes) == [
        "gpu 0 NVLink TX halves (218 -> 108 GB/s; 18 of 18 links)",
        "gpu 1 NVLink TX -25 % (24.2 -> 18.1 GB/s)",
    ]
    planted = Planted(120, 1)
    nvlink(planted, 1, (1,), 70.4, links=2)
    planted.tick().sampled("gpu", gpu=1, gi=-1, nvlink_tx_bps=planted.level(24.2e9, 18.1e9, 70.4, 0.01))
    told = explain(planted.window, ns(60), ns(120))
    assert [change_words(one) for one in told.changes] == ["gpu 1 link 1 NVLink TX halves (12.1 -> 6.0 GB/s)"]


def test_the_same_quantity_in_two_channels_is_told_once():
    planted = Planted(120, 2).tick()
    planted.sampled("gpu", gpu=0, gi=-1, pcie_tx_bps=planted.level(1e9, 4e9, 80.5, 0.02))
    planted.sampled("l2", gpu=0, source="cupti", pcie_write_bps=planted.level(1e9, 4e9, 80.5, 0.02))
    told = explain(planted.window, ns(60), ns(120))
    assert [one.channel for one in told.changes] == ["gpu"]


def test_counters_since_boot_are_rates():
    planted = Planted(120, 3).tick()
    held = np.cumsum(planted.level(0, 0.4e9, 75.0)) + 5e12
    planted.sampled("gpu", gpu=0, gi=-1, throttle_power_ns=held)
    planted.sampled("host", oom_kills=7.0)
    told = explain(planted.window, ns(60), ns(120))
    assert [change_words(one) for one in told.changes] == [
        "gpu 0 time held back by the power cap starts (0 -> 400 ms/s)"
    ]


def test_a_change_before_the_range_is_found_within_the_margin():
    view, _ = incident(first=52.3)
    told = explain(view, ns(60), ns(120))
    assert by_quantity(told)["tx_bps"].shift.lo < ns(52.3) < by_quantity(told)["tx_bps"].shift.hi
    late = explain(view, ns(60), ns(120), margin_ns=0)
    assert "tx_bps" not in by_quantity(late) or by_quantity(late)["tx_bps"].shift.hi > ns(60)


def test_another_range_can_be_chosen_to_compare_with():
    planted = Planted(300, 4)
    stream(planted, 100.0)
    told = explain(planted.window, ns(200), ns(260), (ns(10), ns(80)))
    assert by_quantity(told)["mean_wait"].shift.before == pytest.approx(3.1e6, rel=0.03)
    assert "by " in render(told)
    assert explain(planted.window, ns(200), ns(260)).changes == []


def test_stalls_and_requests_in_flight_are_counted_per_second():
    planted = Planted(120, 6)
    planted.tick().sampled("host", load1=planted.level(3, noise=0.02))
    starts = np.sort(planted.rng.uniform(70, 120, 400))
    planted.channel(
        "stall", t=starts, kind="run_queue", pid=77, tid=77, process="vllm", thread="w", dur_ns=20e6, count=1
    )
    for number in range(12):
        t = np.arange(1, 121) if number < 4 else np.arange(90, 121)
        planted.channel("request_open", t=t, source="proxy", number=number, phase="waiting")
    told = explain(planted.window, ns(60), ns(120))
    words = [change_words(one) for step in told.steps for one in step.changes]
    assert words[0].startswith("vllm 77 run queue time in stalls starts (0 -> 1")
    assert words[1] == "requests in flight (proxy) x3.0 (4.0 -> 12.0)"


def test_failed_requests_are_a_share_of_those_that_ended():
    planted = Planted(120, 6)
    planted.requests(10, lambda t: np.full(len(t), 0.2))
    t = np.sort(planted.rng.uniform(80, 119, 390))
    planted.channel(
        "request", t=t, source="proxy", model="m", outcome="timeout", e2e_ns=1e8, retry=0, ttft_ns=np.nan
    )
    told = explain(planted.window, ns(60), ns(120))
    failed = by_quantity(told)["failed_pct"]
    assert failed.shift.before == 0
    assert failed.shift.after == pytest.approx(50, abs=6)


def test_quantiles_of_an_engines_histogram():
    planted = Planted(240, 6)
    for lo, hi, count in ((0.1, 0.2, 20), (0.2, 0.4, 20)):
        planted.channel(
            "engine_bucket", t=np.arange(1, 241), engine="h:1", model="m", metric="ttft", dt_ns=NS, lo_s=lo,
            hi_s=hi, count=count,
        )  # fmt: skip
    slow = np.arange(181, 241)
    planted.channel(
        "engine_bucket", t=slow, engine="h:1", model="m", metric="ttft", dt_ns=NS, lo_s=0.8, hi_s=1.6,
        count=40,
    )  # fmt: skip
    told = explain(planted.window, ns(120), ns(240))
    p95 = by_quantity(told)["ttft_p95"]
    # Half of 80 lie in (0.8, 1.6]: the 76th is nine tenths into it; before, the 38th of 40 nine tenths into (0.2, 0.4].
    assert p95.shift.before == pytest.approx(0.38)
    assert p95.shift.after == pytest.approx(1.52)
    assert p95.shift.lo < ns(181) <= p95.shift.hi


def test_events_are_placed_in_the_sequence_and_storms_are_one():
    view, _ = incident()
    planted = Planted(120, 1)
    planted.window = view
    planted.strings = view.strings
    planted.channel("gpu_event", t=[66.0], gpu=0, gi=-1, kind="xid", code=79.0, detail="off the bus")
    planted.channel(
        "stall", t=70 + np.arange(14) * 1.0, kind="jit", pid=1234, process="python", call="ptxas", dur_ns=2e8,
        count=1,
    )  # fmt: skip
    planted.channel("gpu_event", t=[20.0], gpu=0, gi=-1, kind="xid", code=13.0, detail="long before")
    told = explain(view, ns(60), ns(120))
    events = [one for step in told.steps for one in step.events]
    assert [(one.kind, one.t, one.count) for one in events] == [("xid", ns(66), 1), ("jit", ns(69.8), 14)]
    text = render(told)
    assert text.index("link 7") < text.index("XID 79 (off the bus)") < text.index("TTFT")
    assert "python 1234 compiles, 14 times in 13 s" in text


def test_a_process_that_comes_and_one_that_goes_are_events():
    planted = Planted(120, 6)
    planted.channel("process", t=np.arange(1, 121), pid=1, name="vllm", dt_ns=NS, rss_b=1e9)
    planted.channel("process", t=np.arange(75, 121), pid=2, name="hog", dt_ns=NS, rss_b=1e9)
    planted.channel("process", t=np.arange(1, 90), pid=3, name="old", dt_ns=NS, rss_b=1e9)
    told = explain(planted.window, ns(60), ns(120))
    events = [(one.kind, one.t, one.names) for step in told.steps for one in step.events]
    assert events == [("started", ns(75), ("hog",)), ("ended", ns(89), ("old",))]


def test_a_flood_of_events_leaves_the_rare_ones():
    view, _ = incident()
    planted = Planted(120, 1)
    planted.window, planted.strings = view, view.strings
    for gpu in range(60):
        planted.channel(
            "gpu_event", t=[70 + gpu / 2], gpu=gpu, gi=-1, kind="throttle_on", code=4.0, detail=""
        )
    planted.channel("gpu_event", t=[110.0], gpu=0, gi=-1, kind="xid", code=79.0, detail="off the bus")
    told = explain(view, ns(60), ns(120))
    events = [one for step in told.steps for one in step.events]
    assert len(events) == 40
    assert events[-1].kind == "xid"
    assert told.events_left_out == 21
    assert "21 more events" in render(told)


def test_the_same_data_raw_and_from_a_file_give_the_same_answer(tmp_path):
    view, _ = incident()
    recorder = Recorder(tmp_path / "s.opusmon", strings=view.strings, clock=ManualClock(T0, WALL), flush_ns=1)
    for name, channel in view.channels.items():
        recorder.push(Batch(channel, view.query(name, view.t0 - 1, view.t1)))
    recorder.close()
    with Recording.open(tmp_path / "s.opusmon") as recording:
        filed = explain(Window.over(recording), ns(60), ns(120))
    live = explain(view, ns(60), ns(120))
    assert filed.changes == live.changes
    assert filed.steps == live.steps


def test_the_text_fits_80_columns_and_says_what_an_order_is_worth():
    view, _ = incident()
    told = explain(view, ns(60), ns(120))
    text = lines(told)
    assert max(map(len, text)) <= 80
    assert "correlation" in " ".join(text)
    assert max(map(len, lines(told, 60))) <= 60


def test_names_from_outside_cannot_act_on_the_terminal_or_on_the_format():
    planted = Planted(120, 1)
    stream(planted, 70.4, process="ev\x1b[2Jil{0}{x!r}%s")
    told = explain(planted.window, ns(60), ns(120))
    assert "ev?[2Jil{0}{x!r}%s 1234 stream 0x7 waits double" in " ".join(render(told, 200).split())


def test_the_document_is_json_with_wall_times():
    view, _ = incident()
    body = json.loads(json.dumps(to_json(explain(view, ns(60), ns(120))), allow_nan=False))
    first = body["steps"][0]["changes"][0]
    assert (first["channel"], first["quantity"], first["subject"]) == ("nvlink", "tx_bps", "gpu 0 link 7")
    assert first["onset"][0] < ns(62.3) <= first["onset"][1]
    # 1,700,000,000 s is 2023-11-14 22:13:20 UTC, a minute before the planted change.
    assert body["steps"][0]["time"].startswith(("2023-11-1", "2023-11-15"))


@pytest.mark.parametrize(
    ("a", "b", "before", "word"),
    [
        (60, 62, None, "--to"),
        (60, 120, (50, 70), "--before"),
        (60, 120, (40, 30), "--before"),
        (2, 60, None, "--from"),
        (113, 120, (104, 111), "widen"),
    ],
)
def test_ranges_that_cannot_be_compared_are_one_line(a, b, before, word):
    view, _ = incident(links=1, slow=None)
    with pytest.raises(ExplainError, match=word) as caught:
        explain(view, ns(a), ns(b), before and (ns(before[0]), ns(before[1])))
    assert "\n" not in str(caught.value)


def test_a_short_range_is_compared_with_more_than_its_own_length():
    """Twelve seconds at one sample a second, less a quarter, are too few to know what was usual."""
    view, _ = incident(links=1, slow=(0,))
    told = explain(view, ns(58), ns(70))
    assert told.before == (ns(40), ns(58))  # a quarter before it, and fifteen seconds before that
    assert "tx_bps" in by_quantity(told)


def test_a_long_range_is_read_from_rollups_and_says_the_same():
    planted = Planted(4 * 3600, 3).tick()
    planted.sampled("gpu", gpu=0, gi=-1, power_mw=planted.level(500e3, 300e3, 9000.0, 0.02))
    stream(planted, 11000.0)
    told = explain(planted.window, ns(7200), ns(14400))
    shift = by_quantity(told)["power_mw"].shift
    assert shift.lo < ns(9000) <= shift.hi
    assert shift.hi - shift.lo <= 60 * NS
    assert shift.after == pytest.approx(300e3, rel=0.01)
    assert any(
        change_words(one).startswith("python 1234 stream 0x7 waits double (3.1") for one in told.changes
    )


def test_a_field_nobody_has_words_for_is_compared_all_the_same():
    channel = Channel("novel", "gauge", (Field("pid", "<i4"), Field("flux_b", "<f8", "B")), key=("pid",))
    planted = Planted(120, 1).tick()
    planted.sampled("host", load1=1.0)
    rows = np.zeros(120, channel.dtype)
    rows["t"], rows["pid"] = T0 + np.arange(1, 121) * NS, 9
    rows["flux_b"] = np.where(np.arange(120) < 80, 2**30, 2**33)
    planted.window.push(Batch(channel, rows))
    told = explain(planted.window, ns(60), ns(120))
    assert [change_words(one) for one in told.changes] == ["pid 9 flux x8.0 (1.00 -> 8.00 GiB)"]


class TestRecordings:
    """Against sessions recorded on H200s, whose load noted what it did and when."""

    @pytest.fixture
    def demo(self):
        load = {one["phase"]: one for one in json.loads((ROOT / "tests/data/h200x2-load.json").read_text())}
        with Recording.open(ROOT / "tests/data/h200x2.opusmon") as recording:
            yield Window.over(recording), load

    def test_a_copy_between_gpus_is_seen_on_all_links_of_both(self, demo):
        view, load = demo
        begin = load["peer 0 to 1"]["t0"]
        told = explain(view, begin - 2 * NS, load["peer 0 to 1"]["t1"], (begin - 16 * NS, begin - 3 * NS))
        words = {change_words(one): one for one in told.changes}
        for text in (
            "gpu 0 NVLink TX starts (0 -> 401 GB/s; 18 of 18 links)",
            "gpu 1 NVLink RX starts (0 -> 401 GB/s; 18 of 18 links)",
        ):
            # The load's own clock, read just before it enqueued the first copy.
            assert words[text].shift.lo <= begin + 0.2 * NS <= words[text].shift.hi + NS

    def test_power_capping_begins_with_the_matmul(self, demo):
        view, load = demo
        begin = load["matmul"]["t0"]
        told = explain(view, begin - 3 * NS, load["matmul"]["t1"], (begin - 25 * NS, begin - 4 * NS))
        changes = {(one.subject, one.quantity): one.shift for one in told.changes}
        for gpu in ("gpu 0", "gpu 1"):
            held = changes[gpu, "throttle_power_ns"]
            assert held.before == 0
            assert held.after > 0.9e9
            assert abs(held.onset - begin) < 2 * NS
        kinds = [one.kind for step in told.steps for one in step.events]
        assert kinds.count("throttle_on") == 2

    def test_nothing_moves_while_it_idles(self, demo):
        view, load = demo
        begin = load["idle again"]["t0"] + 2 * NS
        end = load["idle again"]["t1"]
        told = explain(view, end - 6 * NS, end, (begin, end - 6 * NS), margin_ns=0)
        loads = [
            one
            for one in told.changes
            if one.quantity not in ("temp_c", "mem_temp_c", "power_mw", "sm_clock_mhz")
        ]
        assert loads == []


@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_file_holds_there_is_an_answer(seed):
    """Random bytes in every column of every channel: infinities, signalling NaN, sizes near the largest float."""
    from opusmon.channels import ALL

    rng = np.random.default_rng(seed)
    planted = Planted(60, seed)
    for text in ("ok", "proxy", "xid", "jit", "capture", "x{y}\x1b", ""):
        planted.strings.intern(text)
    for kind in ALL:
        rows = np.frombuffer(rng.bytes(400 * kind.dtype.itemsize), kind.dtype).copy()
        rows["t"] = np.sort(T0 + rng.integers(1, 60 * NS, 400))
        for name in kind.key if seed % 2 else ():
            rows[name] = rng.integers(0, 3, 400).astype(kind.dtype[name])
        for field in kind.fields:
            if field.text:
                rows[field.name] = rng.integers(0, 9, 400)
            elif field.dtype in ("<f4", "<f8") and seed % 3 == 0:
                rows[field.name] = rng.choice([0, 1, -1, np.inf, -np.inf, np.nan, 3e38, 1e-40], 400)
        planted.window.push(Batch(kind, rows))
    told = explain(planted.window, ns(30), ns(60))
    assert max(map(len, lines(told))) <= 80
    assert all(line.isprintable() for line in lines(told))
    json.dumps(to_json(told), allow_nan=False)
