"""Two pages to figures: deltas, restarts, what each engine counts, and the rows made of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client import generate_latest as text_format
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_format

from opusmon.clock import NS
from opusmon.collectors.engine.deltas import Deltas
from opusmon.collectors.engine.figures import figures
from opusmon.collectors.engine.kinds import BY_NAME, WANTED
from opusmon.collectors.engine.page import Reader, Samples
from opusmon.collectors.engine.rows import Scrape, batches, reasons
from opusmon.collectors.engine.vocabulary import counters
from opusmon.quantiles import quantile
from opusmon.schema import StringTable

from .engine_pages import ENGINE_PAGES, Everything, grown, observed, page, window

# --- deltas


def vllm(engine: int) -> str:
    return f'engine="{engine}",model_name="meta-llama/Llama-3.1-70B-Instruct"'


def test_two_vllm_engines_are_combined() -> None:
    """Counts summed, shares averaged, buckets added; a window of 2 s."""
    first = page("vllm")
    gains = [
        (f"vllm:prompt_tokens_total{{{vllm(0)}}}", 3000),
        (f"vllm:prompt_tokens_total{{{vllm(1)}}}", 1000),
        (f"vllm:generation_tokens_total{{{vllm(0)}}}", 500),
        (f"vllm:prefix_cache_queries_total{{{vllm(0)}}}", 300),
        (f"vllm:prefix_cache_queries_total{{{vllm(1)}}}", 100),
        (f"vllm:prefix_cache_hits_total{{{vllm(0)}}}", 90),
        (f"vllm:prefix_cache_hits_total{{{vllm(1)}}}", 30),
        (f"vllm:num_preemptions_total{{{vllm(1)}}}", 2),
        ('vllm:request_success_total{engine="0",finished_reason="stop"', 6),
        ('vllm:request_success_total{engine="1",finished_reason="abort"', 3),
        ('vllm:request_success_total{engine="1",finished_reason="error"', 1),
        ("vllm:admission_rejections_total", 4),
        ("vllm:spec_decode_num_draft_tokens_total", 50),
        ("vllm:spec_decode_num_accepted_tokens_total", 20),
        *observed("vllm:time_to_first_token_seconds", vllm(0) + ",", _from(0.25), 6, 1.2),
        *observed("vllm:time_to_first_token_seconds", vllm(1) + ",", _from(1.0), 2, 1.8),
    ]
    [entry] = window(first, grown(first, *gains), 2 * NS)
    values = entry.values
    assert (values["input_tps"], values["output_tps"]) == (2000, 250)
    assert values["prefix_hit_pct"] == pytest.approx(30)
    assert values["spec_accept_pct"] == pytest.approx(40)
    assert (values["preemptions"], values["finished"], values["failed"]) == (2, 14, 8)
    assert (values["ttft_n"], values["ttft_sum_s"]) == (8, pytest.approx(3.0))
    found = entry.buckets["ttft"]
    assert (found.lo.tolist(), found.hi.tolist(), found.count.tolist()) == ([0.1, 0.75], [0.25, 1.0], [6, 2])
    p95 = quantile(found, 0.95)
    assert (p95.kind, p95.lo, p95.hi) == ("interpolated", 0.75, 1.0)
    assert "graph_pct" not in values  # vLLM logs it and publishes nothing


def _from(edge: float) -> str:
    """That edge and those above it, of vLLM's TTFT."""
    edges = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0]
    edges += [20.0, 40.0, 80.0, 160.0, 640.0, 2560.0]
    return " ".join([*(str(one) for one in edges if one >= edge), "+Inf"])


def test_a_window_without_observations_has_a_measured_zero_and_no_buckets() -> None:
    [entry] = window(page("vllm"), page("vllm"))
    assert (entry.values["ttft_n"], entry.values["ttft_sum_s"], entry.buckets) == (0, 0, {})
    assert (entry.values["finished"], entry.values["restarts"]) == (0, 0)
    assert math.isnan(entry.values["prefix_hit_pct"])  # nothing was asked of the cache


def test_the_first_scrape_has_gauges_only() -> None:
    kind = BY_NAME["vllm"]
    samples = Reader(WANTED).read(page("vllm")).samples
    [entry] = figures(kind, samples, Deltas(counters(kind)).advance(samples), 0)
    assert entry.values["running"] == 63
    assert not {"ttft_n", "finished", "input_tps"} & entry.values.keys()
    assert math.isnan(entry.values["restarts"])


def lines(**values: float) -> Samples:
    return Reader(Everything()).read("".join(f"{k} {v}\n" for k, v in values.items())).samples


def test_a_counter_that_went_back_is_a_restart_of_the_whole_engine() -> None:
    deltas = Deltas(frozenset({"a_total", "b_total"}))
    assert deltas.advance(lines(a_total=5, b_total=5)).first
    step = deltas.advance(lines(a_total=9, b_total=4))
    assert (step.restarted, step.gains) == (True, {})
    step = deltas.advance(lines(a_total=10, b_total=6))
    assert (step.restarted, step.gains) == (False, {"a_total": {(): 1.0}, "b_total": {(): 2.0}})


@pytest.mark.parametrize(
    ("name", "before", "after", "restarted"),
    [
        ("x_created", 1.7e9, 1.7e9 + 100, True),
        ("process_start_time_seconds", 1.7e9, 1.7e9 + 60, True),
        (
            "process_start_time_seconds",
            1.7e9,
            1.7e9 + 1,
            False,
        ),  # made from the boot time, which the clock moves
        ("gauge", 9, 4, False),
        ("x_sum", 9, 4, False),
    ],
)
def test_other_signs_of_a_restart(name: str, before: float, after: float, restarted: bool) -> None:
    """An engine that came back busier than it left: no counter went back, but it says when it was made."""
    deltas = Deltas(frozenset({"x_total"}))
    deltas.advance(lines(x_total=1, **{name: before}))
    assert deltas.advance(lines(x_total=5, **{name: after})).restarted is restarted


def test_a_series_that_comes_later_began_at_zero_and_one_that_returns_did_not() -> None:
    deltas = Deltas(frozenset({"a_total", "b_total"}))
    deltas.advance(lines(a_total=5))
    assert deltas.advance(lines(a_total=5, b_total=3)).gains["b_total"] == {(): 3.0}
    deltas.advance(lines(a_total=5))
    assert deltas.advance(lines(a_total=5, b_total=4)).gains["b_total"] == {(): 1.0}


def test_vanished_series_are_not_remembered_without_end() -> None:
    deltas = Deltas(frozenset())
    for start in range(0, 100_000, 5_000):
        deltas.advance({"x": {(("n", str(n)),): 1.0 for n in range(start, start + 5_000)}})
    assert len(deltas._last) <= 25_000


def test_a_restarted_vllm_has_no_counts_in_that_window() -> None:
    first = page("vllm")
    [entry] = window(first, grown(first, (f"vllm:prompt_tokens_total{{{vllm(1)}}}", -1)))
    assert entry.values["restarts"] == 1
    assert not {"ttft_n", "finished", "input_tps", "prefix_hit_pct"} & entry.values.keys()
    assert (entry.buckets, entry.values["running"]) == ({}, 63)


def test_sglang_copies_are_not_counted_twice() -> None:
    first = page("sglang")
    gains = [
        ("sglang:num_retracted_requests_total{", 3),  # on all four: two ranks with two copies each
        ('sglang:cuda_graph_passes_total{mode="decode_cuda_graph"', 30),
        ('sglang:cuda_graph_passes_total{mode="decode_none"', 10),
        ('sglang:cuda_graph_passes_total{mode="prefill_none"', 500),
        ("sglang:prompt_tokens_total{", 200),
        ("sglang:cached_tokens_total{", 60),
        ("sglang:num_requests_total{", 5),
        ("sglang:num_aborted_requests_total{", 1),
    ]
    [entry] = window(first, grown(first, *gains))
    values = entry.values
    assert (values["preemptions"], values["finished"], values["failed"]) == (6, 10, 1)
    assert values["graph_pct"] == pytest.approx(75)  # decode passes alone
    assert values["prefix_hit_pct"] == pytest.approx(30)  # 120 of 400, and not the gauge beside it
    assert values["spec_accept_pct"] == pytest.approx(60)  # a gauge: the mean of 0.7 and 0.5
    assert entry.gauged == {"spec_accept_pct"}


def test_sglang_priorities_are_within_the_total() -> None:
    text = (
        'sglang:num_running_reqs{model_name="m",priority="",tp_rank="0"} 9\n'
        'sglang:num_running_reqs{model_name="m",priority="0",tp_rank="0"} 6\n'
        'sglang:num_running_reqs{model_name="m",priority="1",tp_rank="0"} 3\n'
    )
    [entry] = window(text, text)
    assert entry.values["running"] == 9


def test_sglang_ttft_of_requests_that_are_not_streamed_is_left_out() -> None:
    first = page("sglang")
    [entry] = window(
        first, grown(first, ("sglang:time_to_first_token_seconds", 1), ("sglang:e2e_request", 1))
    )
    assert (entry.values["ttft_n"], entry.values["e2e_n"]) == (1, 2)


def test_what_was_called_time_per_output_token_is_the_inter_token_latency() -> None:
    for name, engine in (("vllm_old", "vllm"), ("sglang_old", "sglang")):
        first = page(name)
        [entry] = window(first, grown(first, (f"{engine}:time_per_output_token_seconds_count", 7)))
        assert entry.values["itl_n"] == 7
        assert "tpot_n" in entry.missing


@pytest.mark.parametrize("prefix", ["trtllm_", "trtllm:"])
def test_trtllm_under_both_spellings(prefix: str) -> None:
    first = page("trtllm" if prefix == "trtllm_" else "trtllm_old")
    gains = [
        (f"{prefix}request_success_total", 4),  # two reasons
        (f"{prefix}time_to_first_token_seconds_count", 8),
        (f"{prefix}time_to_first_token_seconds_sum", 2.0),
        (f"{prefix}prompt_tokens_total", 100),
        (f"{prefix}prompt_cached_tokens_total", 25),
        (f"{prefix}request_error_total", 1),
    ]
    [entry] = window(first, grown(first, *gains))
    assert (entry.values["ttft_n"], entry.values["ttft_sum_s"]) == (8, 2.0)
    if prefix == "trtllm_":
        assert (entry.values["finished"], entry.values["failed"], entry.values["prefix_hit_pct"]) == (
            9,
            1,
            25,
        )
    else:
        assert (entry.values["finished"], "failed" in entry.missing) == (8, True)


def test_trtllm_reuse_of_blocks_where_tokens_are_not_counted() -> None:
    first = "\n".join(line for line in page("trtllm").splitlines() if "prompt_cached" not in line) + "\n"
    gains = [("trtllm_kv_cache_reused_blocks_total", 10), ("trtllm_kv_cache_missed_blocks_total", 30)]
    [entry] = window(first, grown(first, *gains))
    assert entry.values["prefix_hit_pct"] == 25


def test_triton_means_from_counters_and_milliseconds_from_its_histogram() -> None:
    first = page("triton")
    gains = [
        ('nv_inference_request_success{model="tensorrt_llm"', 10),
        ('nv_inference_request_failure{model="tensorrt_llm",version="1",reason="BACKEND"', 2),
        ('nv_inference_request_duration_us{model="tensorrt_llm"', 25_000_000),
        ('nv_inference_queue_duration_us{model="tensorrt_llm"', 500_000),
        *observed(
            "nv_inference_first_response_histogram_ms",
            'model="tensorrt_llm",version="1",',
            "2000.0 5000.0 +Inf",
            10,
            12_000,
        ),
    ]
    _, entry = window(first, grown(first, *gains))
    values = entry.values
    assert (values["e2e_n"], values["e2e_sum_s"], values["queue_sum_s"]) == (10, 25, 0.5)
    assert (values["ttft_n"], values["ttft_sum_s"]) == (10, 12)
    assert (entry.buckets["ttft"].lo.tolist(), entry.buckets["ttft"].hi.tolist()) == ([0.5], [2.0])
    assert (values["finished"], values["failed"]) == (12, 2)
    assert entry.bare == {"e2e", "queue"}


def test_llamacpp_time_per_token_from_counters() -> None:
    first = page("llamacpp")
    gains = [("llamacpp:tokens_predicted_total", 40), ("llamacpp:tokens_predicted_seconds_total", 2.0)]
    [entry] = window(first, grown(first, *gains), 2 * NS)
    assert (entry.values["tpot_n"], entry.values["tpot_sum_s"]) == (40, pytest.approx(2.0))
    assert (entry.values["output_tps"], entry.model) == (20, "")


def test_tgi_tokens_from_the_sums_of_its_histograms() -> None:
    first = page("tgi")
    gains = [
        ("tgi_request_input_length_sum", 800),
        ("tgi_request_generated_tokens_sum", 90),
        ("tgi_request_success", 3),
        ('tgi_request_failure{err="overloaded"}', 2),
    ]
    [entry] = window(first, grown(first, *gains))
    values = entry.values
    assert (values["input_tps"], values["output_tps"], values["finished"], values["failed"]) == (
        800,
        90,
        5,
        2,
    )


def test_a_sum_that_went_back_is_no_latency() -> None:
    """vLLM takes TTFT from the wall clock; when that is set back, the sum is."""
    first = page("vllm")
    count = "vllm:time_to_first_token_seconds_count"
    [entry] = window(first, grown(first, (count, 1), ("vllm:time_to_first_token_seconds_sum", -50)))
    assert (entry.values["ttft_n"], entry.values["restarts"]) == (2, 0)
    assert math.isnan(entry.values["ttft_sum_s"])


def test_buckets_that_contradict_each_other_are_left_out() -> None:
    first = page("vllm_old")
    [entry] = window(first, grown(first, ('vllm:time_to_first_token_seconds_bucket{model_name="meta', 0)))
    assert not entry.bare
    labels = 'model_name="meta-llama/Llama-3.1-70B-Instruct",'
    lower = f'vllm:time_to_first_token_seconds_bucket{{{labels}le="0.1"}}'
    [entry] = window(first, grown(first, (lower, 5)))
    assert (entry.bare, entry.buckets) == ({"ttft"}, {})


def test_a_summary_without_buckets_has_its_mean() -> None:
    text = "tgi_request_duration_sum 10\ntgi_request_duration_count 5\ntgi_queue_size 0\n"
    [entry] = window(text, grown(text, ("tgi_request_duration_sum", 3), ("tgi_request_duration_count", 2)))
    assert (entry.values["e2e_n"], entry.values["e2e_sum_s"], entry.bare) == (2, 3, {"e2e"})


def test_a_series_without_a_model_belongs_to_the_only_one() -> None:
    text = 'vllm:num_requests_running{model_name="m"} 1\nvllm:num_requests_waiting 2\nprocess_start_time_seconds 5\n'
    [entry] = window(text, text)
    assert (entry.model, entry.values["waiting"]) == ("m", 2)


def test_a_stray_series_makes_no_row_of_its_own() -> None:
    text = (
        'vllm:num_requests_running{model_name="a"} 1\nvllm:num_requests_running{model_name="b"} 2\n'
        "process_start_time_seconds 5\n"
    )
    assert [entry.model for entry in window(text, text)] == ["a", "b"]


def test_models_and_their_names_are_bounded() -> None:
    text = "".join(f'vllm:num_requests_running{{model_name="{n:04}{"x" * 300}"}} 1\n' for n in range(100))
    entries = window(text, text)
    assert (len(entries), {len(entry.model) for entry in entries}) == (32, {200})
    text = 'vllm:num_requests_running{model_name="a\\nb\x1b[31m"} 1\n'
    assert window(text, text)[0].model == "a?b?[31m"


@pytest.mark.parametrize("style", [text_format, openmetrics_format], ids=["text", "openmetrics"])
def test_pages_made_by_the_library_the_engines_use(style: Callable[[CollectorRegistry], bytes]) -> None:
    """vLLM, SGLang and TensorRT-LLM publish through prometheus_client.

    In OpenMetrics it adds exemplars and an end mark, and writes vllm_ for vllm: in names.
    """
    registry = CollectorRegistry()
    labels = ["model_name", "engine"]
    ttft = Histogram(
        "vllm:time_to_first_token_seconds", "x", labels, buckets=(0.1, 0.5, 1), registry=registry
    )
    done = Counter("vllm:request_success", "x", [*labels, "finished_reason"], registry=registry)
    ttft.labels("m", "0").observe(0.3)
    done.labels("m", "0", "stop").inc()
    first = style(registry).decode()
    for value in (0.05, 0.3, 0.3, 7.0):
        ttft.labels("m", "1").observe(value, {"trace_id": "abc"})
    done.labels("m", "0", "stop").inc(3)
    done.labels("m", "0", "abort").inc(1)  # a series that was not there before
    [entry] = window(first, style(registry).decode())
    assert (entry.model, entry.values["restarts"]) == ("m", 0)
    assert (entry.values["finished"], entry.values["failed"]) == (4, 1)
    assert (entry.values["ttft_n"], entry.values["ttft_sum_s"]) == (4, pytest.approx(7.65))
    found = entry.buckets["ttft"]
    assert found.lo.tolist() == [0, 0.1, 1]
    assert found.hi.tolist() == [0.1, 0.5, math.inf]
    assert found.count.tolist() == [1, 2, 1]
    assert (quantile(found, 0.1).kind, quantile(found, 0.99).kind) == ("at_most", "over")


# --- rows


def test_rows_carry_the_figures() -> None:
    first = page("vllm")
    entries = window(
        first, grown(first, *observed("vllm:time_to_first_token_seconds", vllm(0) + ",", _from(0.25), 6, 1.2))
    )
    strings = StringTable()
    scrape = Scrape(5 * NS, 2 * NS, 7_000_000, "127.0.0.1:8000/metrics", BY_NAME["vllm"], 42)
    rows, bucket_rows = (batch.rows[0] for batch in batches(scrape, entries, strings))
    assert [strings.text(rows[name]) for name in ("engine", "model", "kind")] == [
        "127.0.0.1:8000/metrics",
        "meta-llama/Llama-3.1-70B-Instruct",
        "vllm",
    ]
    assert (rows["t"], rows["dt_ns"], rows["scrape_ns"], rows["pid"]) == (5 * NS, 2 * NS, 7e6, 42)
    assert (rows["running"], rows["ttft_n"], rows["ttft_sum_s"]) == (63, 6, pytest.approx(1.2))
    assert np.isnan(rows["graph_pct"])
    assert (bucket_rows["lo_s"], bucket_rows["hi_s"], bucket_rows["count"]) == (0.1, 0.25, 6)
    assert strings.text(bucket_rows["metric"]) == "ttft"


@pytest.mark.parametrize("name", ENGINE_PAGES)
def test_every_missing_number_has_its_reason(name: str) -> None:
    kind = BY_NAME[name.partition("_")[0]]
    entries = window(page(name), page(name))
    told = {key[1] for key, state, _, _ in reasons("x", kind, entries) if state == "not_supported"}
    strings = StringTable()
    [batch] = list(batches(Scrape(1, NS, 1, "x", kind), entries, strings))
    ratios = {
        "prefix_hit_pct",
        "spec_accept_pct",
        "graph_pct",
    }  # may have nothing to divide by in this window
    for field in batch.rows.dtype.names or ():
        if bool(np.isnan(batch.rows[field].astype(float)).all()):
            assert field in told or field in ratios, field


def test_reasons_name_what_was_looked_for() -> None:
    entries = window(page("llamacpp"), page("llamacpp"))
    told = {
        key: (state, reason, remedy)
        for key, state, reason, remedy in reasons("x", BY_NAME["llamacpp"], entries)
    }
    # The page is read: to switch its metrics on would give nothing more.
    missing = ("not_supported", "llama.cpp does not publish llamacpp:kv_cache_usage_ratio", "")
    assert told["engine", "kv_used_pct", "x"] == missing
    assert told["engine", "ttft_n", "x"][1] == "llama.cpp has no metric for it"
    assert "no percentiles" in told["engine_bucket", "count", "x"][1]


def test_a_page_without_any_of_its_metrics_says_how_to_switch_them_on() -> None:
    bare = [replace(entry, values={}) for entry in window(page("llamacpp"), page("llamacpp"))]
    remedies = {key[1]: remedy for key, _, _, remedy in reasons("x", BY_NAME["llamacpp"], bare)}
    assert remedies["kv_used_pct"] == "start llama-server with --metrics"
