import math
import re

import numpy as np
import pytest

from opusmon.clock import NS
from opusmon.request_rows import SIZE_CLASSES, size_class
from opusmon.ui.glyphs import ASCII
from opusmon.ui.panes.latency_heat import overlap, scale
from opusmon.ui.panes.latency_numbers import short_place
from opusmon.ui.panes.latency_slo import CHUNK_NS
from opusmon.ui.text import plain

from .fakelatency import END, ENGINE, MS, NOW, PANE, FakeLatency, at, render, serving, styles_of, text
from .fakeview import NAN, gpu_fields


def line_with(lines, *words):
    """The first line that holds all the words."""
    return next((line for line in lines if all(word in line for word in words)), "")


def after(lines, heading, label):
    """The first line that begins with a label after the one that holds the heading."""
    place = next(n for n, line in enumerate(lines) if heading in line)
    return next(line for line in lines[place:] if line.startswith(f" {label}"))


def ladder(n, step_ms=10, view=None, **changes):
    """n requests whose first tokens came after 1, 2, ... n steps: the q-quantile is the ceil(q n)-th of them."""
    view = view or FakeLatency()
    for number in range(1, n + 1):
        view.request(END - 30 * NS + number * MS, ttft_ns=number * step_ms * MS, **changes)
    return view


# -- percentiles -------------------------------------------------------------------------------------------------


def test_percentiles_of_requests():
    lines = render(ladder(100), 118, 30)
    row = after(lines, "proxy", "TTFT")
    assert row.split()[1:] == [
        *("505", "ms", "500", "ms", "950", "ms", "990", "ms", "+88", "%", "100"),  # now: the mean is 505
        *("505", "ms", "500", "ms", "950", "ms", "990", "ms", "+88", "%", "100"),
    ]


def test_now_and_the_span_are_told_apart():
    view = ladder(30)
    for number in range(70):
        view.request(END - 200 * NS + number * MS, ttft_ns=3 * NS)
    row = after(render(view), "proxy", "TTFT")
    assert re.findall(r"\d[\d.]* m?s", row) == ["150 ms", "290 ms", "300 ms", "3 s", "3 s", "3 s"]
    assert re.findall(r" (\d+)(?= {3}|$)", row) == ["30", "100"]


@pytest.mark.parametrize(
    ("n", "p95_rough", "p99_rough"), [(19, True, True), (20, False, True), (100, False, False)]
)
def test_percentiles_of_few_requests_are_grey_and_marked(n, p95_rough, p99_rough):
    view = ladder(n)
    p95, p99 = (f"{math.ceil(q * n - 1e-9) * 10} ms" for q in (0.95, 0.99))
    row = after(render(view), "proxy", "TTFT")
    assert (f"~{p95}" in row) == p95_rough or p95 == p99
    assert (f"~{p99}" in row) == p99_rough
    if p99_rough:
        assert styles_of(view, f"~{p99}") == {"dim"}


def test_without_requests_of_late_there_is_no_number():
    view = FakeLatency()
    for number in range(40):
        view.request(END - 200 * NS + number * MS)
    row = after(render(view), "proxy", "TTFT")
    assert row.count("--") == 3
    assert " 0 " in row


def test_failures_have_no_e2e():
    view = ladder(30, e2e_ns=2 * NS)
    for number in range(30):
        view.failed(END - 20 * NS + number * MS)
    row = after(render(view), "proxy", "E2E")
    assert "30 ms" not in row
    assert "2 s" in row


def test_sources_and_starts_are_not_mixed():
    view = ladder(30)
    for number in range(30):
        view.request(END - 20 * NS + number * MS, source="canary", start="intended send time", ttft_ns=7 * NS)
        view.request(END - 20 * NS + number * MS, source="otlp", start="API call", ttft_ns=5 * NS)
    lines = render(view, 78, 40)
    assert "sent upstream" in line_with(lines, " proxy")
    assert "150 ms" in after(lines, " proxy", "TTFT")
    assert "intended send time" in line_with(lines, " canary")
    assert after(lines, " canary", "TTFT").count("7 s") == 6
    assert "API call" in line_with(lines, " otlp")
    assert after(lines, " otlp", "TTFT").count("5 s") == 6


def test_chunk_gaps_are_not_called_inter_token_latency():
    found = text(ladder(30), 100, 40)
    assert "GAP" in found
    assert "ITL" not in found


# -- engines -----------------------------------------------------------------------------------------------------


def engine(*rows, **changes):
    """An engine with these buckets (metric, lo, hi, count) in the last minute."""
    view = FakeLatency()
    view.scrape(END, **changes)
    for metric, lo, hi, count in rows:
        view.bucket(END, metric, lo, hi, count)
    return view


def test_quantiles_of_buckets():
    """100 observations, 50 in (0.1, 0.2]: the median is at 0.1 s + 0.1 s x (50 - 20) / 50."""
    view = engine(("ttft", 0.0, 0.1, 20), ("ttft", 0.1, 0.2, 50), ("ttft", 0.2, 0.4, 30))
    row = after(render(view), "engine", "TTFT")
    assert re.findall(r"\d[\d.]* m?s", row)[0] == "160 ms"
    assert re.findall(r"\d[\d.]* m?s", row)[1] == "367 ms"  # 0.2 + 0.2 x 25 / 30
    assert "100" in row


def test_latencies_with_the_same_edges_are_not_mixed():
    view = engine(("ttft", 1.0, 2.0, 40), ("e2e", 1.0, 2.0, 30), ("queue", 1.0, 2.0, 20))
    lines = render(view, 78, 30)
    assert [after(lines, "engine", name).split()[-1] for name in ("TTFT", "E2E", "QUEUE")] == [
        "40",
        "30",
        "20",
    ]


def test_bounds_are_said_as_bounds():
    view = engine(("ttft", 0.0, 0.3, 100), ("e2e", 5.0, math.inf, 100), ("itl", 0.0, 0.01, 5))
    lines = render(view, 78, 30)
    assert "<=300 ms" in after(lines, "engine", "TTFT")
    assert ">5 s" in after(lines, "engine", "E2E")
    assert "~<=10 ms" in after(lines, "engine", "ITL")


def test_buckets_of_scrapes_add_up_before_the_quantile():
    view = FakeLatency()
    for second in range(30):
        view.scrape(END - second * NS)
        view.bucket(END - second * NS, "ttft", 0.1, 0.2, 1)
        view.bucket(END - 100 * NS - second * NS, "ttft", 1.0, 2.0, 1)
    row = after(render(view), "engine", "TTFT")
    first = re.findall(r"\d[\d.]* m?s", row)
    assert first[0] == "150 ms"  # now: 30 in (0.1, 0.2]
    assert first[4] == "1.9 s"  # over the span, p95: 57 of 60, the 27th of 30 in (1, 2]


def test_an_engine_without_a_histogram_has_a_mean():
    view = engine(ttft_n=10, ttft_sum_s=2.5, queue_n=math.nan, queue_sum_s=math.nan)
    row = after(render(view), "engine", "TTFT")
    assert re.search(r"mean +250 ms", row)


def test_two_engines_are_two_blocks():
    view = engine(("ttft", 0.1, 0.2, 50))
    view.scrape(END, engine="127.0.0.1:30000/metrics", kind="sglang", waiting=90)
    view.bucket(END, "ttft", 1.0, 2.0, 50, engine="127.0.0.1:30000/metrics")
    lines = render(view, 78, 30)
    assert after(lines, "sglang :30000", "TTFT").count("1.") >= 2
    assert "150 ms" in after(lines, "vllm :8000", "TTFT")
    assert line_with(lines, "sglang") < line_with(lines, "vllm") or lines.index(
        line_with(lines, "sglang")
    ) < lines.index(line_with(lines, "vllm"))  # the one with more waiting comes first


def test_state_of_an_engine():
    view = engine(preemptions=3, failed=2, graph_pct=98)
    found = text(view, 198, 30)
    for words in ("running 64", "waiting 37 !", "KV 97 % !", "prefix 41 %", "out 4100 tok/s", "in 12k tok/s"):
        assert words in found
    assert "preempted 3 !" in found
    assert "failed 2 !" in found
    assert "graphs 98 %" in found
    assert styles_of(view, "37 !", 198, 30) == {"warn"}


def test_a_quiet_engine_raises_no_alarm():
    assert "!" not in text(engine(waiting=2, kv_used_pct=20, kv_used_max_pct=20), 198, 30)


def test_an_engine_that_is_no_longer_scraped():
    view = FakeLatency()
    view.scrape(END - 10 * NS)
    view.bucket(END - 10 * NS, "ttft", 0.1, 0.2, 50)
    assert "! stale 10 s" in text(view)
    assert "stale 10 s" in PANE.title(at(view))
    assert "stale" not in PANE.title(at(view, t=END - 9 * NS))


@pytest.mark.parametrize(
    ("where", "short"),
    [
        ("127.0.0.1:8000/metrics", ":8000"),
        ("localhost:8000/prometheus/metrics", ":8000/prometheus/metrics"),
        ("gpu-7:8000/metrics", "gpu-7:8000"),
        ("[::1]:9000/metrics", ":9000"),
        ("host:99999999/x", "host:99999999/x"),
        ("", ""),
    ],
)
def test_where_an_engine_is(where, short):
    assert short_place(where) == short


# -- outcomes ----------------------------------------------------------------------------------------------------


def test_errors_by_outcome():
    view = ladder(95)
    for number in range(3):
        view.failed(END - 10 * NS + number * MS, 529)
    view.failed(END - 9 * NS, 429)
    view.request(END - 8 * NS, outcome="truncated")
    found = text(view, 120, 30)
    for words in ("ok 95 %", "529 3 % !", "429 1 % !", "truncated 1 % !"):
        assert words in found


def test_what_is_not_all_is_not_rounded_to_all():
    view = ladder(2500, step_ms=1)
    view.failed(END - 10 * NS, 500)
    found = text(view, 120, 30)
    assert "ok >99.9 %" in found
    assert "500 <0.1 %" in found


@pytest.mark.parametrize(
    ("outcome", "word"), [("client_disconnect", "client left"), ("monitor_stopped", "opusmon stopped")]
)
def test_what_was_broken_off_on_this_side_is_no_alarm(outcome, word):
    view = ladder(99)
    view.request(END - 8 * NS, outcome=outcome)
    found = text(view, 120, 30)
    assert f"{word} 1 %" in found
    assert f"{word} 1 % !" not in found


def test_headroom_is_that_of_the_tightest_limit_in_the_newest_answer():
    view = FakeLatency()
    view.request(END - 20 * NS, limit_requests=50, left_requests=1)
    view.request(
        END - 10 * NS, limit_requests=50, left_requests=40, limit_input_tokens=1000, left_input_tokens=150
    )
    found = text(view, 120, 30)
    assert "limit headroom 15 % (input tokens) !" in found
    later = text(view, 120, 30, t=END + 110 * NS)
    assert "limit headroom 15 % (input tokens, 2 m ago)" in later  # limits fill up again: no alarm
    assert "ago) !" not in later


def test_rates_and_retries():
    view = FakeLatency()
    for number in range(120):
        view.request(END - 119 * NS // 2 + number * NS // 2, output_tokens=30, retry=float(number % 4 == 0))
    found = text(view, 198, 30)
    assert "2 req/s" in found
    assert "out 60 tok/s" in found
    assert "retries 25 % !" in found
    assert "from cache 75 %" in found
    assert "opusmon adds 400 us" in found


# -- volatility --------------------------------------------------------------------------------------------------


def test_size_classes():
    tokens = [0, 999, 1000, 3999, 4000, 15_999, 16_000, 63_999, 64_000, 1e6, NAN]
    assert size_class(np.array(tokens)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert len(SIZE_CLASSES) == 5


def test_volatility_by_size_and_label():
    """A ladder of 100: p95 950 ms over a mean of 505 ms is +88 %; of equal times it is 0."""
    view = ladder(100, label="chat", input_tokens=500)
    for number in range(40):
        view.request(END - 20 * NS + number * MS, label="batch", input_tokens=90_000)
    assert "p95 over mean, TTFT by input tokens  <1k +88 %  >64k +0 %" in text(view, 98, 40)
    lines = render(view, 198, 55, maximized=True)
    assert re.search(r"<1k +100 +505 ms +950 ms +\+88 %", line_with(lines, "<1k"))
    assert re.search(r"chat +100 +505 ms +950 ms +\+88 %", line_with(lines, "chat "))
    assert re.search(r"batch +40 +200 ms +200 ms +\+0 %", line_with(lines, "batch "))


def test_without_labels_the_models_are_told_apart():
    view = ladder(30)
    assert "TTFT by model" in text(view, 198, 55, maximized=True)


def test_volatility_of_few_is_marked():
    assert "<1k ~+" in text(ladder(10, input_tokens=500), 98, 40)


# -- objectives --------------------------------------------------------------------------------------------------


def test_a_page():
    """20 of 100 requests in error where 1 % may be: a burn of 20."""
    view = ladder(80)
    for number in range(20):
        view.failed(END - 20 * NS + number * MS)
    view.slo("errors<1%")
    line = line_with(render(view, 98, 40), "SLO errors<1%")
    assert "by proxy" in line
    assert "!! page" in line
    assert "burn 20x" in line
    assert "budget left >99.9 % of 30d" in line
    assert line.count("x/") == 1  # nothing is older than the short window, so both say the same
    assert "bad" in styles_of(view, "!! page", 98, 40)
    assert "!! SLO errors<1% burn 20x" in plain(PANE.summary(at(view, 80, 1)))


def test_a_limit_is_marked_where_it_is_broken():
    view = ladder(100)
    view.slo("ttft_p95<800ms")
    row = after(render(view), "proxy", "TTFT")
    assert row.count("950 ms!") == 2
    assert "990 ms!" not in row  # the objective is about p95
    assert styles_of(view, "950 ms!") == {"bad"}
    assert "950 ms!" not in after(render(ladder(100)), "proxy", "TTFT")
    assert "! burning" in text(view, 98, 40)  # 20 % over the limit where 5 % may be, and no alert yet
    assert "burn 4x" in text(view, 98, 40)


def test_an_objective_between_bucket_edges_is_a_bracket():
    view = engine(("ttft", 0.0, 0.5, 90), ("ttft", 0.5, 1.0, 6), ("ttft", 1.0, math.inf, 4))
    view.slo("ttft_p95<800ms")
    line = line_with(render(view, 198, 40), "SLO ttft_p95<800ms")
    assert "burn 0.8-2x" in line
    assert "limit is inside the bucket 500 ms to 1 s" in line


def test_the_objectives_of_the_time_shown():
    view = ladder(30)
    view.slo("ttft_p95<800ms", END)
    assert "SLO" in text(view, 98, 40)
    assert "SLO" not in text(view, 98, 40, t=END - NS)


def test_an_objective_that_cannot_be_read_is_said():
    view = ladder(30)
    view.slo("speed_p95<1s")
    assert "! SLO 'speed_p95<1s' is not understood" in text(view, 98, 40)


def test_an_alert_out_of_reach_is_said():
    view = ladder(30)
    view.slo("ttft_p90<800ms")
    assert "most possible is 10" in text(view, 198, 40)


def test_what_has_passed_is_counted_once_and_again_when_the_playhead_moves():
    """An hour of one request a second, ever more of them bad: the burn is right at every playhead, there and back."""
    view = FakeLatency()
    bad = []
    for second in range(3600):
        t = END - 3599 * NS + second * NS
        if second % (20 if second < 1800 else 4) == 0:
            view.failed(t)
            bad.append(t)
        else:
            view.request(t)
    playheads = [END - 1000 * NS, END - 1590 * NS, END, END - 1000 * NS + CHUNK_NS // 2, END - 400 * NS]
    for playhead in sorted(playheads):
        view.slo("errors<1%", playhead - NS)
    for playhead in playheads:
        line = line_with(render(view, 98, 40, t=playhead), "SLO errors<1%")
        found = re.search(r"burn ([\d.]+)x/\w+ ([\d.]+)x/(\d+)m", line)
        assert found, line
        window_ns = int(found[3]) * 60 * NS
        long = sum(t <= playhead for t in bad) / ((playhead - END) / NS + 3600)
        short = sum(playhead - window_ns < t <= playhead for t in bad) / (window_ns / NS)
        assert float(found[1]) == pytest.approx(100 * long, rel=0.02)
        assert float(found[2]) == pytest.approx(100 * short, rel=0.02)


# -- heat map ----------------------------------------------------------------------------------------------------


def test_the_heat_map_shows_when_it_became_slow():
    view = FakeLatency()
    for second in range(1, 301):
        view.request(END - 300 * NS + second * NS, ttft_ns=100 * MS if second <= 200 else 5 * NS)
    lines = render(view, 78, 40, glyphs=ASCII)
    begin = next(n for n, line in enumerate(lines) if "TTFT over 5m, proxy" in line)
    chart = [line.ljust(78)[8:] for line in lines[begin + 1 : begin + 10]]
    high = next(line for line in chart if line.strip())
    assert high[:46].isspace()  # 200 s of 300 s are 46.7 of 70 columns
    assert high[48:].strip()


def test_a_bucket_is_spread_over_the_lines_between_its_edges():
    lo, hi = (
        np.array([0.0, 1.0, 1.0, 10.0, 5.0, 1e-9]),
        np.array([1.0, 10.0, 100.0, math.inf, math.inf, 1e-6]),
    )
    found = overlap(lo, hi, np.array([0.1, 1.0, 10.0, 100.0]))
    expected = [[1, 0, 0], [0, 1, 0], [0, 0.5, 0.5], [0, 0, 1], [0, 1, 0], [1, 0, 0]]
    assert found == pytest.approx(np.array(expected))


def test_the_scale_ends_at_nice_numbers_and_is_logarithmic():
    edges = scale(120e6, 1.9e9, 2)
    assert edges == pytest.approx([100e6, math.sqrt(100e6 * 2e9), 2e9])
    assert scale(0.0, 0.0, 1)[0] > 0


def test_slow_is_up():
    """From 100 ms to 4 s: the labels grow upwards, and each line is called by its lower edge."""
    view = FakeLatency()
    for number in range(40):
        view.request(END - 100 * NS + number * NS, ttft_ns=100 * MS * (1 + number))
    lines = render(view, 78, 40)
    begin = next(n for n, line in enumerate(lines) if "TTFT over 5m, proxy" in line)
    words = [line[:8].strip() for line in lines[begin + 1 : begin + 16]]
    labels = [word for word in words if word]
    times = [float(word.split()[0]) * (1000 if word.endswith(" s") else 1) for word in labels]
    assert times == sorted(times, reverse=True)
    assert times[-1] == 100


def test_the_limit_is_marked_in_the_heat_map():
    view = serving()
    assert "800 ms!" in text(view, 78, 40)
    assert " 800 ms!" not in text(serving(slos=()), 78, 40)


def test_the_heat_map_of_an_engine():
    view = serving(proxy=False)
    found = text(view, 78, 30)
    assert "TTFT over 5m, engine" in found


# -- the list ----------------------------------------------------------------------------------------------------


def listed(view, **state):
    """The lines of the list, without its heading."""
    lines = render(view, 118, 40, **state)
    begin = next(n for n, line in enumerate(lines) if line.startswith("      E2E"))
    return lines[begin + 1 :]


def three():
    view = FakeLatency()
    view.request(END - 30 * NS, e2e_ns=9 * NS, ttft_ns=1 * NS, model="model-a", input_tokens=100)
    view.request(END - 20 * NS, e2e_ns=3 * NS, ttft_ns=2 * NS, model="model-b", input_tokens=900)
    view.request(END - 10 * NS, e2e_ns=6 * NS, ttft_ns=3 * NS, model="model-c", input_tokens=500)
    return view


@pytest.mark.parametrize(
    ("sort", "order"),
    [("", "acb"), ("e2e", "acb"), ("ttft", "cba"), ("newest", "cba"), ("input", "bca"), ("no such", "acb")],
)
def test_sort(sort, order):
    found = "".join(re.search(r"model-(\w)", line)[1] for line in listed(three(), sort=sort)[:3])
    assert found == order


def test_filter():
    view = three()
    assert PANE.items(at(view, filter="MODEL-B")) == 1
    assert "model-b" in listed(view, filter="model-b")[0]
    assert PANE.items(at(view, filter="3")) == 1  # its number
    assert "filter" in text(view, 118, 40, filter="model-b")
    assert "1 of 3 requests" in text(view, 118, 40, filter="model-b")
    assert 'no request matches "zzz"' in text(view, 118, 40, filter="zzz")


def test_requests_in_flight_grow_older_with_the_playhead():
    view = three()
    view.open(END, 77, age_ns=20 * NS)
    first = listed(view, t=END + NS // 2)[0]
    assert "20 s+" in first
    assert "waiting" in first
    assert "22 s+" in listed(view, t=END + 2 * NS)[0]
    assert styles_of(view, "20 s+", 118, 40) == {"accent"}
    assert "waiting" not in text(view, 118, 40, t=END + 4 * NS)  # no row for 2.5 s: it is not known any more


def test_a_request_that_ended_is_not_in_flight():
    view = FakeLatency()
    view.open(END - NS, 1, age_ns=NS)
    view.request(END - NS // 2, e2e_ns=1.5 * NS)
    assert view.number == 1
    assert PANE.items(at(view)) == 1
    assert "+" not in listed(view)[0].replace("+0", "")


def test_the_bar_shows_what_took_the_time():
    view = FakeLatency()
    view.request(END - NS, headers_ns=2 * NS, ttft_ns=5 * NS, e2e_ns=10 * NS)
    (bar,) = re.findall(r"[:=#]{4,}", listed(view, glyphs=ASCII)[0])
    assert (bar.count(":"), bar.count("="), bar.count("#")) == pytest.approx(
        (0.2 * len(bar), 0.3 * len(bar), 0.5 * len(bar)), abs=1
    )


def test_the_selected_request_is_in_sight():
    view = ladder(200)
    lines = render(view, 78, 40, selected=150)
    assert any(line.startswith(">") for line in lines)
    assert "above" in "\n".join(lines)


# -- one request -------------------------------------------------------------------------------------------------


def test_the_clocks_of_a_request():
    view = FakeLatency()
    view.request(
        END - NS,
        headers_ns=1 * NS,
        first_event_ns=2 * NS,
        ttft_ns=4 * NS,
        first_answer_ns=5 * NS,
        last_token_ns=9 * NS,
        e2e_ns=10 * NS,
        limit_requests=50,
        left_requests=31,
        retry=2,
        retry_after_s=3,
        usage_more="queue_ms=12",
    )
    for second in range(15):
        view.add("gpu", END - second * NS, gpu=0, **gpu_fields(sm_util_pct=40.0, hbm_bw_pct=70.0))
    view.add("stall", END - 6 * NS, kind="off_cpu", process="vllm", thread="w0", pid=1, tid=1, dur_ns=2e9)
    view.add("stall", END - 60 * NS, kind="wait", process="before", thread="x", pid=1, tid=1, dur_ns=1e9)
    view.add("stall", END, kind="wait", process="behind", thread="x", pid=1, tid=1, dur_ns=5e8)
    lines = render(view, 123, 55, glyphs=ASCII, maximized=True)
    wide = 123 - 14 - 9 - 1

    def mark(label):
        line = next(line for line in lines if line.startswith(f" {label}"))
        body = line[14 : 14 + wide]
        return round(body.index("#") / wide * 10), round((body.rindex("#") + 1) / wide * 10)

    assert [
        mark(label) for label in ("headers", "first event", "first token", "first answer", "last token")
    ] == [
        (0, 1),
        (1, 2),
        (2, 4),
        (4, 5),
        (5, 9),
    ]
    found = "\n".join(lines)
    for words in (
        "sent upstream",
        "end_turn",
        "chunks 201",
        "gap mean 20 ms",
        "longest 80 ms",
        "tokens in 12k",
        "from cache 9000 (75 %)",
        "out 201",
        "queue_ms=12",
        "requests left 62 %",
        "retry 2",
        "retry after 3 s",
        "connection reused",
        "opusmon added 400 us",
        "off cpu 2 s vllm/w0",
    ):
        assert words in found, words
    assert "before" not in found  # that stall had ended when the request began
    assert "behind" not in found  # and that one began when it had ended
    assert "40 %" in line_with(lines, "GPU 0 SM")
    assert "70 %" in line_with(lines, "GPU 0 HBM")
    stall = line_with(lines, " stalls")[14 : 14 + wide]
    assert round(stall.index("!") / wide * 10) == 3  # from 8 s to 6 s before the end of the session
    assert round((stall.rindex("!") + 1) / wide * 10) == 5


def test_a_request_in_flight_says_what_it_waits_for():
    view = FakeLatency()
    view.open(END, 9, phase="thinking", ttft_ns=2 * NS, silent_ns=3 * NS, no_token_ns=4 * NS)
    found = text(view, 98, 40, detail=True)
    assert "request 9" in found
    assert "thinking +" in found
    assert "silent 3 s" in found
    assert "no token for 4 s" in found


# -- what is missing ---------------------------------------------------------------------------------------------


def test_nothing_at_all_says_why_and_what_to_do():
    view = FakeLatency()
    view.status("engine", state="unavailable", reason="no engine listens here", remedy="opusmon --engine URL")
    found = text(view)
    assert "engine: no engine listens here" in found
    assert "opusmon --engine URL" in found
    assert "opusmon --proxy http" in found
    assert "It would show:" in found
    assert PANE.title(at(view)) == "1 latency  off"
    assert "no engine listens here" in plain(PANE.summary(at(view, 80, 1)))
    assert PANE.items(at(view)) == 0


def test_a_source_that_runs_and_has_seen_nothing_is_not_off():
    view = FakeLatency()
    view.status("canary", state="ok", reason="sends 12 requests per hour")
    view.status("engine", channel="engine", scope="--engine URL 1", state="unavailable", reason="refused")
    found = text(view)
    assert "canary: sends 12 requests per hour" in found
    assert "engine --engine URL 1: refused" in found
    assert "Not in this session: proxy, otlp" in found
    assert "opusmon --probe http" not in found
    assert PANE.title(at(view)) == "1 latency  nothing yet"


def test_the_foot_says_what_matters_most():
    view = serving()
    view.status("engine", scope=ENGINE, field="itl", state="not_supported", reason="this engine has no ITL")
    view.status("proxy", state="error", reason="upstream refuses connections", remedy="start it")
    foot = render(view)[-1]
    assert foot.startswith(" ! proxy: upstream refuses connections (start it)")
    assert "+3 more" in foot


def test_text_from_outside_is_plain():
    view = FakeLatency()
    view.request(END - NS, model="\x1b[31mred\x1b]0;t\x07 [bold]x[/]", label="\u202eevil", endpoint="/v1\n/x")
    found = text(view, 198, 55, maximized=True)
    assert "\x1b" not in found
    assert "\u202e" not in found
    assert "[bold]" in found


def test_summary_is_the_worst_number():
    words = plain(PANE.summary(at(serving(), 98, 1)))
    assert words.startswith("1 latency  ")
    assert "proxy TTFT p95" in words
    assert "waiting 37 !" in words
    assert "529" in words


def test_title():
    assert PANE.title(at(serving())) == "1 latency  proxy | vllm :8000 llama-70b 1 s"


def test_the_same_frame_twice_is_the_same():
    view = serving(seconds=60)
    assert render(view) == render(view)
    assert NOW > END
