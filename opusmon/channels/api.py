"""API latency: from the engine's metrics, from a proxy, from a canary, from telemetry. Never mixed into one number."""

from __future__ import annotations

from opusmon.schema import Channel, Field

METRICS: tuple[str, ...] = ("ttft", "itl", "tpot", "e2e", "queue", "prefill", "decode")
"""Latencies an engine may publish: fields of `engine` begin with these, rows of `engine_bucket` carry one."""

_ENGINE = Field(
    "engine", "<u4", help="where it was scraped, scheme and query left out: host:port/path", text=True
)

ENGINE = Channel(
    "engine",
    "gauge",
    (
        _ENGINE,
        Field("model", "<u4", help='served model; "" where the page does not say', text=True),
        Field("kind", "<u4", help="vllm, sglang, trtllm, triton, tgi, llamacpp, dcgm", text=True),
        Field("pid", "<i4", help="process that listens there, 0 where that is not known"),
        Field("dt_ns", "<i8", "ns", "counts and rates cover [t - dt_ns, t]"),
        Field("scrape_ns", "<f8", "ns", "time the scrape took"),
        Field("ranks", "<f4", "", "engines or ranks on the page that were combined"),
        Field("running", "<f4", "", "requests being worked on, all ranks"),
        Field("waiting", "<f4", "", "requests in the queue, all ranks"),
        Field("kv_used_pct", "<f4", "%", "KV cache in use, mean over ranks"),
        Field("kv_used_max_pct", "<f4", "%", "KV cache in use, fullest rank"),
        Field("prefix_hit_pct", "<f4", "%", "prompt tokens found in the prefix cache in this window"),
        Field("preemptions", "<f4", "", "requests thrown out of the batch"),
        Field("input_tps", "<f4", "1/s", "prompt tokens"),
        Field("output_tps", "<f4", "1/s", "generated tokens"),
        Field("finished", "<f4", "", "requests that ended, whatever way"),
        Field("failed", "<f4", "", "of them aborted, refused or in error"),
        Field(
            "graph_pct", "<f4", "%", "decode passes run as a CUDA graph; NaN where the engine does not say"
        ),
        Field("spec_accept_pct", "<f4", "%", "speculated tokens accepted"),
        Field("restarts", "<f4", "", "1 when counters went backwards since the previous scrape"),
        *(
            field
            for name in METRICS
            for field in (
                Field(f"{name}_n", "<f4", "", "observations in this window"),
                Field(f"{name}_sum_s", "<f8", "s", "their sum; mean = sum / n"),
            )
        ),
    ),
    key=("engine", "model"),
    help="One row per engine, model and scrape; what the engine says about itself.",
)

ENGINE_BUCKET = Channel(
    "engine_bucket",
    "counter",
    (
        _ENGINE,
        Field("model", "<u4", text=True),
        Field("metric", "<u4", help="ttft, itl, tpot, e2e, queue, prefill or decode", text=True),
        Field("dt_ns", "<i8", "ns", "counts cover [t - dt_ns, t]"),
        Field("lo_s", "<f8", "s", "observations are over this"),
        Field("hi_s", "<f8", "s", "and at most this; infinite in the last bucket"),
        Field("count", "<f4", "", "observations in this window; buckets without any have no row"),
    ),
    key=("engine", "model", "metric", "lo_s", "hi_s"),
    help="Histogram buckets, the difference between two scrapes, summed over ranks.",
)

_IDENTITY = (
    Field("source", "<u4", help="proxy, canary or otlp: who saw it", text=True),
    Field(
        "start", "<u4", help="where its clocks start: sent upstream, API call, intended send time", text=True
    ),
    Field("endpoint", "<u4", help="path, without its query", text=True),
    Field("model", "<u4", text=True),
    Field("label", "<u4", help='x-opusmon-label header, or ""', text=True),
    Field("number", "<u8", help="of the request in this session and source; joins request and request_open"),
)

REQUEST = Channel(
    "request",
    "event",
    (
        *_IDENTITY,
        Field(
            "id", "<u4", help="request id of the server; kept for slow and failed requests only", text=True
        ),
        Field(
            "outcome",
            "<u4",
            help="ok, stream_error_event, truncated, upstream_http_error, json_error_in_200, client_disconnect, monitor_stopped (opusmon was ended while it was in flight), timeout, transport_error",
            text=True,
        ),
        Field("error", "<u4", help="type of the error as the server names it", text=True),
        Field("stop", "<u4", help="stop reason as the server names it", text=True),
        Field("streaming", "<f4", "", "1 when the answer was a stream"),
        Field("status", "<f4", "", "HTTP status; NaN when there was none"),
        Field("e2e_ns", "<f8", "ns", "the request covers [t - e2e_ns, t]"),
        Field("headers_ns", "<f8", "ns", "start to response headers"),
        Field(
            "first_event_ns", "<f8", "ns", "start to the first event of the stream, comments and pings aside"
        ),
        Field(
            "ttft_ns",
            "<f8",
            "ns",
            "start to the first generated delta, thinking included; NaN when not streamed",
        ),
        Field("first_answer_ns", "<f8", "ns", "start to the first text or tool input"),
        Field("last_token_ns", "<f8", "ns", "start to the last generated delta"),
        Field("tpot_ns", "<f8", "ns", "(last - first token) / (output tokens - 1)"),
        Field("chunks", "<f4", "", "generated deltas seen"),
        Field("gap_mean_ns", "<f8", "ns", "mean time between generated deltas: inter-chunk, not inter-token"),
        Field("gap_p95_ns", "<f8", "ns"),
        Field("gap_max_ns", "<f8", "ns"),
        Field("request_b", "<f8", "B", "size of the request's body"),
        Field("response_b", "<f8", "B", "size of the response's body as it was on the wire"),
        Field("input_tokens", "<f4", "", "whole prompt: uncached, read from and written to the cache"),
        Field("output_tokens", "<f4"),
        Field("cache_read_tokens", "<f4"),
        Field("cache_write_tokens", "<f4"),
        Field("thinking_tokens", "<f4"),
        Field("tool_calls", "<f4"),
        Field(
            "usage_more", "<u4", help="usage fields this version does not know: name=number, ...", text=True
        ),
        Field("retry", "<f4", "", "the client's retry count: 0 is the first attempt"),
        Field("retry_after_s", "<f4", "s", "what the server asked for"),
        Field("limit_requests", "<f4"),
        Field("left_requests", "<f4"),
        Field("limit_input_tokens", "<f4"),
        Field("left_input_tokens", "<f4"),
        Field("limit_output_tokens", "<f4"),
        Field("left_output_tokens", "<f4"),
        Field("dns_ns", "<f8", "ns", "NaN where it was not seen or a connection was reused"),
        Field("connect_ns", "<f8", "ns", "NaN where it was not seen or a connection was reused"),
        Field("tls_ns", "<f8", "ns", "NaN where it was not seen or a connection was reused"),
        Field("reused", "<f4", "", "1 when it went over an open connection"),
        Field("late_ns", "<f8", "ns", "intended to actual send time (canary)"),
        Field("own_ns", "<f8", "ns", "time opusmon itself added before the first generated delta (proxy)"),
        Field("own_chunk_ns", "<f8", "ns", "mean time it held a chunk (proxy)"),
    ),
    key=("source", "endpoint", "model", "label"),
    help="One row per API request, written when it ends; t is its end.",
)

REQUEST_OPEN = Channel(
    "request_open",
    "gauge",
    (
        *_IDENTITY,
        Field("phase", "<u4", help="sending, waiting, thinking, answering or ending", text=True),
        Field("age_ns", "<f8", "ns", "since its clocks started"),
        Field("ttft_ns", "<f8", "ns", "NaN while there is no token"),
        Field("chunks", "<f4"),
        Field("silent_ns", "<f8", "ns", "since the last byte from the server"),
        Field("no_token_ns", "<f8", "ns", "since the last generated delta, or since the start"),
    ),
    key=("source", "number"),
    help="One row per second and request that is in flight.",
)
