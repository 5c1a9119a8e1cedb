import math
import re

import numpy as np
import pytest

from opusmon.clock import NS
from opusmon.ui.glyphs import ASCII
from opusmon.ui.panes.latency_heat import overlap, scale

from .fakelatency import (
    END,
    MS,
    PANE,
    FakeLatency,
    at,
    ladder,
    line_with,
    render,
    serving,
    styles_of,
    text,
)
from .fakeview import gpu_fields

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
    begin = next(n for n, line in enumerate(lines) if "OUTCOME" in line)
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


def test_what_is_shown_as_the_end_of_a_request_can_be_filtered():
    view = FakeLatency()
    view.failed(END - 4 * NS, status=529)
    view.failed(END - 3 * NS, status=500)
    view.request(END - 2 * NS, outcome="json_error_in_200")
    view.request(END - NS, outcome="client_disconnect")
    view.open(END + 100 * MS, 77)
    ends = {"529": "! 529", "Error in 200": "! error in 200", "client left": "client left", "wait": "waiting"}
    for wanted, shown in ends.items():
        assert shown in listed(view, filter=wanted)[0]
        assert PANE.items(at(view, filter=wanted)) == 1
    assert PANE.items(at(view, filter="json_error_in_200")) == 1


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
