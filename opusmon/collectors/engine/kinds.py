"""The engines, and their metric names old and new.

Sources: vLLM 0.33 and SGLang 0.5.23 as packaged, TensorRT-LLM `metrics/collector.py`, Triton's and TGI's metrics
documents, llama.cpp's server README. Where engines use one word for different things:

* ITL is one observation per engine step in vLLM, one per token in SGLang. What both once called
  `time_per_output_token_seconds` was that ITL, and is not TPOT.
* vLLM observes a TPOT of 0 for an answer of one token. TGI's `mean_time_per_token` contains the prefill.
* Triton's first response is the first message of the stream, or the whole answer where there is none.
* SGLang observes a TTFT for requests that are not streamed, which is their E2E: left out where it says so.
* vLLM's `request_success` contains the aborted and failed ones.
* llama.cpp has no histograms; its `tpot` observations are tokens, not requests.
"""

from __future__ import annotations

from collections.abc import Mapping

from opusmon.collectors.engine.vocabulary import EngineKind, Mean, Pick, Ratio, sample_names

_STREAMED = {"is_streaming": frozenset({"", "true", "True"})}
_ALL_PRIORITIES = {"priority": frozenset({""})}
"""With priority scheduling SGLang gives the total with an empty label, and each priority besides."""
US = 1e-6
MS = 1e-3


def _both(engine: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """With the colon, and with the underscore that prometheus_client makes of it in OpenMetrics."""
    return tuple(f"{engine}{mark}{name}" for mark in ":_" for name in names)


def _vllm(*names: str, **where: frozenset[str]) -> Pick:
    return Pick(_both("vllm", names), where)


def _sglang(*names: str, **where: frozenset[str]) -> Pick:
    return Pick(_both("sglang", names), where)


def _trtllm(name: str) -> Pick:
    """Both spellings; NVIDIA Dynamo and older documents use the colon."""
    return Pick((f"trtllm_{name}", f"trtllm:{name}"))


VLLM = EngineKind(
    name="vllm",
    title="vLLM",
    prefixes=("vllm:", "vllm_"),
    enable="start vLLM without --disable-log-stats",
    rank_labels=frozenset({"engine"}),
    ports=frozenset({8000}),
    programs=("vllm",),
    gauges={
        "running": (_vllm("num_requests_running"),),
        "waiting": (_vllm("num_requests_waiting"),),
    },
    kv=_vllm("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    counts={
        "preemptions": (_vllm("num_preemptions_total"),),
        "finished": (_vllm("request_success_total"), _vllm("admission_rejections_total")),
        "failed": (
            _vllm("request_success_total", finished_reason=frozenset({"abort", "error"})),
            _vllm("admission_rejections_total"),
        ),
    },
    rates={
        "input_tps": (_vllm("prompt_tokens_total"),),
        "output_tps": (_vllm("generation_tokens_total"),),
    },
    ratios={
        "prefix_hit_pct": (
            Ratio(
                _vllm("prefix_cache_hits_total", "gpu_prefix_cache_hits_total"),
                (_vllm("prefix_cache_queries_total", "gpu_prefix_cache_queries_total"),),
            ),
        ),
        "spec_accept_pct": (
            Ratio(
                _vllm("spec_decode_num_accepted_tokens_total"),
                (_vllm("spec_decode_num_draft_tokens_total"),),
            ),
        ),
    },
    shares={"prefix_hit_pct": _vllm("gpu_prefix_cache_hit_rate")},
    latencies={
        "ttft": _vllm("time_to_first_token_seconds"),
        "itl": _vllm("inter_token_latency_seconds", "time_per_output_token_seconds"),
        "tpot": _vllm("request_time_per_output_token_seconds"),
        "e2e": _vllm("e2e_request_latency_seconds"),
        "queue": _vllm("request_queue_time_seconds"),
        "prefill": _vllm("request_prefill_time_seconds"),
        "decode": _vllm("request_decode_time_seconds"),
    },
)

_GRAPH_PASSES = "cuda_graph_passes_total"

SGLANG = EngineKind(
    name="sglang",
    title="SGLang",
    prefixes=("sglang:", "sglang_"),
    enable="start SGLang with --enable-metrics",
    rank_labels=frozenset({"dp_rank"}),
    # A request is on every rank of its tensor, expert and pipeline parallel group.
    copy_labels=frozenset({"tp_rank", "moe_ep_rank", "pp_rank"}),
    ports=frozenset({30000}),
    programs=("sglang",),
    gauges={
        "running": (_sglang("num_running_reqs", **_ALL_PRIORITIES),),
        "waiting": (_sglang("num_queue_reqs", **_ALL_PRIORITIES),),
    },
    kv=_sglang("token_usage"),
    counts={
        "preemptions": (_sglang("num_retracted_requests_total"),),
        "finished": (_sglang("num_requests_total"),),
        "failed": (_sglang("num_aborted_requests_total"),),
    },
    rates={
        "input_tps": (_sglang("prompt_tokens_total"),),
        "output_tps": (_sglang("generation_tokens_total"),),
    },
    ratios={
        "prefix_hit_pct": (Ratio(_sglang("cached_tokens_total"), (_sglang("prompt_tokens_total"),)),),
        "graph_pct": (
            Ratio(
                _sglang(_GRAPH_PASSES, mode=frozenset({"decode_cuda_graph"})),
                (_sglang(_GRAPH_PASSES, mode=frozenset({"decode_cuda_graph", "decode_none"})),),
            ),
        ),
    },
    shares={"prefix_hit_pct": _sglang("cache_hit_rate"), "spec_accept_pct": _sglang("spec_accept_rate")},
    latencies={
        "ttft": _sglang("time_to_first_token_seconds", **_STREAMED),
        "itl": _sglang("inter_token_latency_seconds", "time_per_output_token_seconds"),
        "tpot": _sglang("request_time_per_output_token_seconds"),
        "e2e": _sglang("e2e_request_latency_seconds"),
        "queue": _sglang("queue_time_seconds"),
    },
)

TRTLLM = EngineKind(
    name="trtllm",
    title="TensorRT-LLM",
    prefixes=("trtllm_", "trtllm:"),
    enable="start trtllm-serve with return_perf_metrics: true in its options file",
    paths=("/prometheus/metrics", "/metrics"),
    ports=frozenset({8000}),
    programs=("trtllm", "tensorrt_llm"),
    gauges={
        "running": (_trtllm("num_requests_running"),),
        "waiting": (_trtllm("num_requests_waiting"),),
    },
    kv=_trtllm("kv_cache_utilization"),
    kv_of=Ratio(_trtllm("kv_cache_used_blocks"), (_trtllm("kv_cache_max_blocks"),)),
    counts={
        "finished": (_trtllm("request_success_total"), _trtllm("request_error_total")),
        "failed": (_trtllm("request_error_total"),),
    },
    rates={
        "input_tps": (_trtllm("prompt_tokens_total"),),
        "output_tps": (_trtllm("generation_tokens_total"),),
    },
    ratios={
        "prefix_hit_pct": (
            Ratio(_trtllm("prompt_cached_tokens_total"), (_trtllm("prompt_tokens_total"),)),
            Ratio(
                _trtllm("kv_cache_reused_blocks_total"),
                (_trtllm("kv_cache_reused_blocks_total"), _trtllm("kv_cache_missed_blocks_total")),
            ),
        ),
        "spec_accept_pct": (
            Ratio(
                _trtllm("spec_decode_num_accepted_tokens_total"),
                (_trtllm("spec_decode_num_draft_tokens_total"),),
            ),
        ),
    },
    latencies={
        "ttft": _trtllm("time_to_first_token_seconds"),
        "tpot": _trtllm("time_per_output_token_seconds"),
        "e2e": _trtllm("e2e_request_latency_seconds"),
        "queue": _trtllm("request_queue_time_seconds"),
        "prefill": _trtllm("request_prefill_time_seconds"),
        "decode": _trtllm("request_decode_time_seconds"),
    },
)


def _trt_requests(kind: str) -> Pick:
    return Pick(("nv_trt_llm_request_metrics",), {"request_type": frozenset({kind})})


def _trt_blocks(kind: str) -> Pick:
    return Pick(("nv_trt_llm_kv_cache_block_metrics",), {"kv_cache_block_type": frozenset({kind})})


_TRITON_DONE = Pick(("nv_inference_request_success",))

TRITON = EngineKind(
    name="triton",
    title="Triton",
    prefixes=("nv_inference_", "nv_trt_llm_"),
    enable="start tritonserver without --allow-metrics=false",
    model_labels=("model",),
    ports=frozenset({8002}),
    programs=("tritonserver",),
    gauges={
        "running": (_trt_requests("scheduled"),),
        "waiting": (_trt_requests("waiting"), Pick(("nv_inference_pending_request_count",))),
    },
    kv=_trt_blocks("fraction"),
    kv_of=Ratio(_trt_blocks("used"), (_trt_blocks("max"),)),
    counts={
        "finished": (_TRITON_DONE, Pick(("nv_inference_request_failure",))),
        "failed": (Pick(("nv_inference_request_failure",)),),
    },
    latencies={"ttft": Pick(("nv_inference_first_response_histogram_ms",), scale=MS)},
    means={
        "e2e": Mean(Pick(("nv_inference_request_duration_us",), scale=US), _TRITON_DONE),
        "queue": Mean(Pick(("nv_inference_queue_duration_us",), scale=US), _TRITON_DONE),
    },
)

TGI = EngineKind(
    name="tgi",
    title="TGI",
    prefixes=("tgi_",),
    ports=frozenset({80, 3000}),
    programs=("text-generation-",),
    gauges={
        "running": (Pick(("tgi_batch_current_size",)),),
        "waiting": (Pick(("tgi_queue_size",)),),
    },
    counts={
        "finished": (
            Pick(("tgi_request_success", "tgi_request_success_total")),
            Pick(("tgi_request_failure", "tgi_request_failure_total")),
        ),
        "failed": (Pick(("tgi_request_failure", "tgi_request_failure_total")),),
    },
    rates={
        "input_tps": (Pick(("tgi_request_input_length_sum",)),),
        "output_tps": (Pick(("tgi_request_generated_tokens_sum",)),),
    },
    latencies={
        "tpot": Pick(("tgi_request_mean_time_per_token_duration",)),
        "e2e": Pick(("tgi_request_duration",)),
        "queue": Pick(("tgi_request_queue_duration",)),
    },
)

LLAMACPP = EngineKind(
    name="llamacpp",
    title="llama.cpp",
    prefixes=("llamacpp:",),
    enable="start llama-server with --metrics",
    ports=frozenset({8080}),
    programs=("llama-server", "llama_server"),
    gauges={
        "running": (Pick(("llamacpp:requests_processing",)),),
        "waiting": (Pick(("llamacpp:requests_deferred",)),),
    },
    kv=Pick(("llamacpp:kv_cache_usage_ratio",)),
    rates={
        "input_tps": (Pick(("llamacpp:prompt_tokens_total",)),),
        "output_tps": (Pick(("llamacpp:tokens_predicted_total",)),),
    },
    means={
        "tpot": Mean(
            Pick(("llamacpp:tokens_predicted_seconds_total",)), Pick(("llamacpp:tokens_predicted_total",))
        ),
    },
)

DCGM = EngineKind(
    name="dcgm",
    title="dcgm-exporter",
    prefixes=("DCGM_FI_",),
    ports=frozenset({9400}),
    programs=("dcgm-exporter",),
)
"""Not an engine: recognised so that it is not asked again and again, read by `dcgm`."""

KINDS: tuple[EngineKind, ...] = (VLLM, SGLANG, TRTLLM, TRITON, TGI, LLAMACPP, DCGM)
BY_NAME: Mapping[str, EngineKind] = {kind.name: kind for kind in KINDS}

START_TIME = "process_start_time_seconds"
WANTED: frozenset[str] = frozenset(
    [START_TIME, "DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_PROF_DRAM_UTIL_RATIO"]
) | frozenset(name for kind in KINDS for name in sample_names(kind))


def recognise(names: Mapping[str, int]) -> EngineKind | None:
    """The kind with most series among these sample names; None when none has any."""
    series = {
        kind.name: sum(number for name, number in names.items() if name.startswith(kind.prefixes))
        for kind in KINDS
    }
    best = max(series, key=lambda name: series[name])
    return BY_NAME[best] if series[best] else None
