"""Thresholds of the rules about API latency, the engine's queue and its saturation."""

from __future__ import annotations

from collections.abc import Mapping

from opusmon.triage.limit import Limit

_OWN = "this project's own choice"

LIMITS: Mapping[str, Limit] = {
    # Objectives bring their own thresholds: budget share x period / window (SRE workbook, chapter 5).
    "errors_min": Limit(3, "requests", "fewer say more about luck than about the server (SRE workbook: 3-5)"),
    "errors_warn_pct": Limit(
        1, "%", "surely over it (Wilson bound): the usual budget of an objective about errors"
    ),
    "errors_crit_pct": Limit(10, "%", "surely over it: ten such budgets at once, a burn of 10"),
    "headroom_note_pct": Limit(20, "%", "of a rate limit left: where the latency pane begins to mark it"),
    "headroom_warn_pct": Limit(5, "%", "of a rate limit left: one burst from refusals; " + _OWN),
    "retries_min": Limit(3, "requests", "fewer say more about luck"),
    "retries_note_pct": Limit(
        5, "%", "surely over it, of attempts: from here a p95 of attempts is not that of users"
    ),
    "retries_warn_pct": Limit(20, "%", "surely over it, of attempts: one in five is asked twice"),
    "queue_growth_min": Limit(
        8, "requests", "more than a queue goes up and down by within a minute: " + _OWN
    ),
    "queue_wait_warn_s": Limit(
        2, "s", "to serve the queue: MLPerf Inference 5.0 allows 2 s to a first token"
    ),
    "queue_wait_crit_s": Limit(20, "s", "to serve the queue: ten times that"),
    "kv_high_pct": Limit(95, "%", "of the KV cache: a handful of long answers fills the rest; " + _OWN),
    "kv_in_a_row": Limit(3, "scrapes", "one scrape between two answers is not a state"),
    "preemptions_min": Limit(3, "requests", "in a minute: a single one happens where answers grow long"),
    "preemptions_crit_pct": Limit(10, "%", "of the answers that ended: their prefill is computed twice"),
    "knee_ratio": Limit(
        1.5, "", "growth of TTFT per token, after over before: less is the curve of attention"
    ),
    "knee_gain_bic": Limit(10, "", "very strong evidence (Kass and Raftery 1995); 10 at least"),
    "volatility_ratio": Limit(
        3, "", "p95 over mean; ln 20 = 3.0 for exponentially distributed times, as a queue makes them"
    ),
    "volatility_warn_ratio": Limit(
        5, "", "p95 over mean: few requests wait for something that others never meet"
    ),
    "long_inputs_ratio": Limit(
        3,
        "x",
        "mean of a minute over the five before: mixed traffic of 50 requests moves by half of that: " + _OWN,
    ),
    "long_inputs_slower_ratio": Limit(
        1.5, "x", "TTFT likewise: longer inputs that cost nothing are no matter"
    ),
    "long_inputs_min": Limit(20, "requests", "in both ranges: fewer are single long ones"),
    "upstream_lost_s": Limit(
        0.5, "s", "a quarter of the 2 s to a first token that MLPerf allows, lost outside the engine"
    ),
    "upstream_min": Limit(20, "requests", "in a minute: means of fewer are those of a few slow ones"),
    "saturated_gain_pct": Limit(10, "%", "throughput gained by twice the load: less is not worth any wait"),
    "saturated_past_ratio": Limit(
        2, "x", "load over the knee where nobody waits: steady demand alone scatters up to 1.4 times: " + _OWN
    ),
    "saturated_loss_pct": Limit(
        5,
        "%",
        "throughput under its own peak: more than curves scatter by; the server does worse the more it has",
    ),
}
"""Name to limit. Rates count as over a threshold when the lower Wilson bound (95 %) of what was seen is."""
