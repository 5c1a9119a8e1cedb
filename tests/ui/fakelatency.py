"""Sessions with requests and engines for the latency pane to draw: known times, so that figures are arithmetic."""

from __future__ import annotations

import math

from opusmon.clock import NS
from opusmon.ui.panes.latency import LatencyPane
from opusmon.ui.text import plain

from .fakestreams import FakeStreams
from .fakeview import NAN, T0, frame, gpu_fields

PANE = LatencyPane()
MS = 1_000_000
SECONDS = 300
END = T0 + SECONDS * NS
NOW = END + 400 * MS
ENGINE = "127.0.0.1:8000/metrics"
TTFT_EDGES_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The first upper edges of vLLM's histogram of the time to first token."""


class FakeLatency(FakeStreams):
    """A view with requests, engines and objectives."""

    number = 0

    def request(self, t, **changes):
        """A request that streamed 201 tokens in 4.2 s: first token after 200 ms, then one every 20 ms."""
        self.number += 1
        fields = {
            "source": "proxy",
            "start": "sent upstream",
            "endpoint": "/v1/messages",
            "model": "claude-sonnet-5-5",
            "number": self.number,
            "outcome": "ok",
            "stop": "end_turn",
            "streaming": 1,
            "status": 200,
            "headers_ns": 50 * MS,
            "first_event_ns": 60 * MS,
            "ttft_ns": 200 * MS,
            "first_answer_ns": 210 * MS,
            "last_token_ns": 4200 * MS,
            "e2e_ns": 4210 * MS,
            "tpot_ns": 20 * MS,
            "chunks": 201,
            "gap_mean_ns": 20 * MS,
            "gap_p95_ns": 24 * MS,
            "gap_max_ns": 80 * MS,
            "request_b": 40_000,
            "response_b": 60_000,
            "input_tokens": 12_000,
            "output_tokens": 201,
            "cache_read_tokens": 9_000,
            "cache_write_tokens": 0,
            "retry": 0,
            "reused": 1,
            "own_ns": 400_000,
            "own_chunk_ns": 12_000,
        }
        self.add("request", t, **{**fields, **changes})

    def failed(self, t, status=529, **changes):
        """A request that the server refused after 30 ms."""
        nothing = dict.fromkeys(
            (
                "first_event_ns",
                "ttft_ns",
                "first_answer_ns",
                "last_token_ns",
                "tpot_ns",
                "chunks",
                "gap_mean_ns",
                "gap_p95_ns",
                "gap_max_ns",
                "output_tokens",
                "cache_read_tokens",
                "cache_write_tokens",
                "own_ns",
                "own_chunk_ns",
            ),
            NAN,
        )
        fields = {
            "outcome": "upstream_http_error",
            "error": "overloaded_error",
            "stop": "",
            "status": status,
            "headers_ns": 29 * MS,
            "e2e_ns": 30 * MS,
            "id": "req_011CSHoEeqs5C35K2UUqR7Fy",
        }
        self.request(t, **{**nothing, **fields, **changes})

    def open(self, t, number, **changes):
        """A request in flight for 12 s that has no token yet."""
        fields = {
            "source": "proxy",
            "start": "sent upstream",
            "endpoint": "/v1/messages",
            "model": "claude-sonnet-5-5",
            "number": number,
            "phase": "waiting",
            "age_ns": 12 * NS,
            "chunks": 0,
            "silent_ns": 12 * NS,
            "no_token_ns": 12 * NS,
        }
        self.add("request_open", t, **{**fields, **changes})

    def scrape(self, t, **changes):
        """An engine under load: 64 running, 37 waiting."""
        fields = {
            "engine": ENGINE,
            "model": "llama-70b",
            "kind": "vllm",
            "pid": 4321,
            "dt_ns": NS,
            "scrape_ns": 3 * MS,
            "ranks": 1,
            "running": 64,
            "waiting": 37,
            "kv_used_pct": 97,
            "kv_used_max_pct": 97,
            "prefix_hit_pct": 41,
            "preemptions": 0,
            "input_tps": 12_000,
            "output_tps": 4_100,
            "finished": 4,
            "failed": 0,
            "restarts": 0,
            "ttft_n": 4,
            "ttft_sum_s": 1.2,
            "queue_n": 4,
            "queue_sum_s": 0.4,
        }
        self.add("engine", t, **{**fields, **changes})

    def bucket(self, t, metric, lo_s, hi_s, count, **changes):
        fields = {"engine": ENGINE, "model": "llama-70b", "metric": metric, "dt_ns": NS}
        self.add("engine_bucket", t, lo_s=lo_s, hi_s=hi_s, count=count, **{**fields, **changes})

    def slo(self, text, t=END - 20 * NS):
        self.add("status", t, collector="slo", scope=text, state="ok", reason=text)

    def status(self, collector, t=END - 20 * NS, **changes):
        self.add("status", t, collector=collector, **changes)


def serving(*, seconds=SECONDS, proxy=True, engine=True, slos=("ttft_p95<800ms", "errors<1%")):
    """Five minutes behind a proxy and of its engine: slow and refused requests in the last minute, two in flight."""
    view = FakeLatency(wall_ns=1_795_956_000 * NS)
    sizes = (600, 2_500, 9_000, 30_000, 90_000)
    for second in range(1, seconds + 1):
        t = T0 + second * NS
        if proxy:
            for number in range(3):
                size = sizes[(second + number) % 5]
                wave = 1 + 0.6 * math.sin(second / 17 + number)
                slow = 6 if second > seconds - 60 and (second + number) % 7 == 0 else 1
                ttft = (120 + size / 200) * wave * slow * MS
                tokens = 50 + 37 * ((second * 3 + number) % 11)
                last = ttft + 18 * MS * (tokens - 1)
                view.request(
                    t + number * 250 * MS,
                    label=("chat", "agents", "batch")[number],
                    headers_ns=0.6 * ttft,
                    first_event_ns=0.8 * ttft,
                    ttft_ns=ttft,
                    first_answer_ns=1.02 * ttft,
                    last_token_ns=last,
                    e2e_ns=last + 2 * MS,
                    tpot_ns=18 * MS,
                    input_tokens=size,
                    output_tokens=tokens,
                    cache_read_tokens=size * 0.4,
                    limit_requests=50,
                    left_requests=31,
                    limit_input_tokens=400_000,
                    left_input_tokens=300_000,
                )
            if second > seconds - 60 and second % 8 == 0:
                view.failed(t + 500 * MS, retry=1)
            if second % 90 == 0:
                view.request(t + 600 * MS, outcome="truncated", e2e_ns=2 * NS)
        if engine:
            view.scrape(t, waiting=37 if second > seconds - 60 else 2)
            peak = 8 + int(3 * math.sin(second / 17)) + (3 if second > seconds - 60 else 0)
            for place, count in ((peak - 1, 1), (peak, 2), (peak + 1, 1)):
                edges = (0.0, *TTFT_EDGES_S)
                view.bucket(t, "ttft", edges[place], edges[place + 1], count)
            view.bucket(t, "itl", 0.01, 0.025, 60)
            view.bucket(t, "itl", 0.025, 0.05, 3)
            view.bucket(t, "e2e", 2.5, 5.0, 3)
            view.bucket(t, "e2e", 5.0, 10.0, 1)
            view.bucket(t, "queue", 0.0, 0.3, 4)
        view.add("gpu", t, gpu=0, **gpu_fields(sm_util_pct=50 + 40 * math.sin(second / 3), hbm_bw_pct=60.0))
    if proxy:
        view.open(END + 100 * MS, 5001)
        view.open(END + 100 * MS, 5002, phase="answering", age_ns=3 * NS, ttft_ns=400 * MS, chunks=90)
    view.add(
        "stall", END - 3 * NS, kind="wait", process="vllm", thread="worker-0", pid=9, tid=9, dur_ns=84.2e6
    )
    for text in slos:
        view.slo(text)
    view.status(
        "canary", state="unavailable", reason="runs only when asked for", remedy="opusmon --probe URL"
    )
    view.status(
        "otlp", state="unavailable", reason="runs only when asked for", remedy="opusmon --otlp-listen"
    )
    return view


def at(view, width=78, height=21, *, t=NOW, span_ns=SECONDS * NS, **options):
    """A frame at the end of a session, over all of it."""
    return frame(view, width, height, t=t, span_ns=span_ns, **options)


def render(view, *args, **options):
    return [plain(line).rstrip() for line in PANE.render(at(view, *args, **options))]


def text(view, *args, **options):
    return "\n".join(render(view, *args, **options))


def styles_of(view, words, *args, **options):
    """Styles of the spans that hold `words`."""
    return {s for line in PANE.render(at(view, *args, **options)) for part, s in line if words in part}


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
