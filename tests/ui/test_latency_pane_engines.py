import math
import re

import pytest

from opusmon.clock import NS
from opusmon.ui.panes.latency_numbers import short_place
from opusmon.ui.panes.latency_slo import CHUNK_NS
from opusmon.ui.text import plain

from .fakelatency import (
    END,
    MS,
    PANE,
    FakeLatency,
    after,
    at,
    ladder,
    line_with,
    render,
    styles_of,
    text,
)

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


def test_an_objective_that_no_source_sees_is_said():
    """Requests have no queue time, and of chunks of several tokens no ITL."""
    for metric in ("queue", "itl"):
        view = ladder(30)
        view.slo(f"{metric}_p95<1s")
        view.slo("ttft_p95<800ms")
        foot = render(view, 98, 40)[-1]
        assert foot == f" ! {metric}_p95<1s: judged by no source here; only an engine's metrics tell {metric}"


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
