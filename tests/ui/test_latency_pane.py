import math
import re

import numpy as np
import pytest

from opusmon.clock import NS
from opusmon.request_rows import SIZE_CLASSES, size_class
from opusmon.ui.text import plain

from .fakelatency import (
    END,
    ENGINE,
    MS,
    NOW,
    PANE,
    FakeLatency,
    after,
    at,
    ladder,
    line_with,
    render,
    serving,
    styles_of,
    text,
)
from .fakeview import NAN

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


IN_USE = {"state": "unavailable", "reason": "127.0.0.1:8788 is in use", "remedy": "choose another address"}


def test_a_source_that_was_wanted_and_does_not_run_is_no_limit():
    view = serving(proxy=False)
    view.status("engine", scope=ENGINE, field="itl", state="not_supported", reason="this engine has no ITL")
    view.status("engine", channel="engine", scope="x:1", state="unavailable", reason="HTTP 404")
    view.status("proxy", **IN_USE)
    assert render(view)[-1].startswith(" ! proxy: 127.0.0.1:8788 is in use (choose another address)")


def test_before_anything_is_measured_what_was_wanted_comes_first():
    """What nobody asked for fills the lines of a small terminal, and what single figures lack does not matter yet."""
    view = FakeLatency()
    unasked = {"state": "unavailable", "reason": "not asked for: --only named proxy"}
    view.status("canary", **unasked, remedy="start opusmon without --only")
    view.status("engine", channel="engine", state="unavailable", reason="no metrics anywhere")
    view.status("otlp", state="ok", reason="takes OTLP/HTTP at 127.0.0.1:4318")
    view.status("otlp", channel="request", field="tpot_ns", state="not_supported", reason="has no time")
    view.status(
        "otlp", channel="request", scope="left out", state="not_supported", reason="none is a request"
    )
    view.status("proxy", **IN_USE)
    lines = render(view, 78, 30)[2:]
    assert [line for line in lines if ": " in line and line[0] != " "] == [
        "proxy: 127.0.0.1:8788 is in use",
        "engine: no metrics anywhere",
        "otlp left out: none is a request",
        "otlp: takes OTLP/HTTP at 127.0.0.1:4318",
        "canary: not asked for: --only named proxy",
    ]
    assert plain(PANE.summary(at(view, 80, 1))).startswith("1 latency  proxy: 127.0.0.1:8788 is in use; ")
    assert "has no time" not in text(view, 78, 30)
    assert "opusmon --otlp-listen" not in text(view, 78, 30)


def test_every_reason_is_said_where_there_is_room():
    view = FakeLatency()
    view.scrape(END)
    for number in range(4):
        view.status(
            "engine", channel="engine", scope=ENGINE, field=f"f{number}", state="not_supported", reason="none"
        )
    tall = render(view, 78, 40)
    assert [line.strip() for line in tall[-4:]] == [f"engine {ENGINE} f{n}: none" for n in range(4)]
    low = render(view, 78, 5)
    assert "f0: none" in low[-1]
    assert low[-1].endswith("+3 more: w")


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
