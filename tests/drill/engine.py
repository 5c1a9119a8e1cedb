"""A small engine with continuous batching: what requests, batches and a KV cache do when something slows it down.

Steps of 100 ms. In each the engine first computes prompts, at most half of the time, then decode steps for all that run.
The figures are those of a 70B model on two GPUs: a step of 12 ms and 0.15 ms per request, 12,000 prompt tokens a second.
Effects of a planted cause (queue, preemptions, TTFT, throughput) follow from the model; they are not drawn by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

STEP_S = 0.1
DECODE_S, DECODE_PER_REQUEST_S = 0.012, 0.00015
PREFILL_TPS = 12_000
PREFILL_SHARE = 0.5
PREFILL_BANK_S = 0.5
"""Time for prompts that may be saved up: single long ones are computed at once, at full speed."""
PREFILL_LEAST_S = 0.045
"""Tokenizing, scheduling and the first step of a prompt however short."""


@dataclass
class Demand:
    """What is asked of the engine and what holds it back, per second, shape (n,) each.

    Attributes:
        arrivals: requests per second.
        input_scale: length of prompts, as a multiple of the usual.
        slow: time of GPU work, as a multiple of the usual.
        halted: share of the second in which it does nothing.
        host_s: host time added to each decode step.
        upstream_s: time lost between proxy and engine before the first token.
    """

    arrivals: np.ndarray
    input_scale: np.ndarray
    slow: np.ndarray
    halted: np.ndarray
    host_s: np.ndarray
    upstream_s: np.ndarray
    input_tokens: float = 900.0
    output_tokens: float = 200.0
    kv_tokens: float = 120_000.0
    most_running: int = 48

    @classmethod
    def usual(cls, seconds, per_s=2.5):
        one, none = np.ones(seconds), np.zeros(seconds)
        return cls(per_s * one, one.copy(), one.copy(), none.copy(), none.copy(), none.copy())


@dataclass
class Served:
    """What the engine did, per second, shape (n,) each, and the requests that ended.

    Attributes:
        ended: one row per request: start, first token, end (s), input and output tokens, queue (s).
    """

    running: np.ndarray
    waiting: np.ndarray
    kv_pct: np.ndarray
    preemptions: np.ndarray
    prefill_tokens: np.ndarray
    prefills: np.ndarray
    tokens: np.ndarray
    steps: np.ndarray
    decode_s: np.ndarray
    prefill_s: np.ndarray
    ended: np.ndarray = field(default_factory=lambda: np.empty((0, 6)))


# A request in the engine is a row: start, input, output, tokens done, prompt left, first token, end of the queue.


def serve(demand, rng):
    """Run the engine for as many seconds as `demand` has."""
    seconds = len(demand.arrivals)
    out = {
        name: np.zeros(seconds)
        for name in (
            *("running", "waiting", "kv_pct", "preemptions", "prefill_tokens", "prefills", "tokens", "steps"),
            *("decode_s", "prefill_s"),
        )
    }
    arriving = _arrivals(demand, rng)
    queue, live, ended, place, bank_s = [], np.empty((0, 7)), [], 0, PREFILL_BANK_S
    for step in range(round(seconds / STEP_S)):
        now, second = (step + 1) * STEP_S, int(step * STEP_S + 1e-9)
        while place < len(arriving) and arriving[place, 0] <= now:
            queue.append(arriving[place])
            place += 1
        time_s = STEP_S * (1 - demand.halted[second])
        slow = demand.slow[second]
        if time_s > 0:
            live = _admit(queue, live, demand, now)
            bank_s = min(bank_s + time_s * PREFILL_SHARE, PREFILL_BANK_S)
            used = _prefill(live, min(bank_s, time_s), slow, demand.host_s[second], out, second, now)
            bank_s -= used
            live = _decode(live, time_s - used, slow, demand, second, out)
            live = _evict(live, queue, demand, out, second)
            done = live[:, 3] >= live[:, 2]
            ended += [(r[0], r[5], now - rng.uniform(0, STEP_S), r[1], r[2], r[6] - r[0]) for r in live[done]]
            live = live[~done]
        if round((step + 1) % (1 / STEP_S)) == 0:
            out["running"][second], out["waiting"][second] = len(live), len(queue)
        out["kv_pct"][second] = max(out["kv_pct"][second], _kv_pct(live, demand))
    table = np.array(ended) if ended else np.empty((0, 6))
    if len(table):
        table[:, 1] = np.minimum(table[:, 1], table[:, 2])
    return Served(**out, ended=table)


def _arrivals(demand, rng):
    counts = rng.poisson(demand.arrivals)
    start = np.repeat(np.arange(len(counts)), counts) + rng.uniform(size=counts.sum())
    start.sort()
    n, second = len(start), start.astype(int)
    inputs = np.maximum(
        rng.lognormal(np.log(demand.input_tokens), 0.6, n) * demand.input_scale[second], 8
    ).round()
    outputs = np.clip(rng.lognormal(np.log(demand.output_tokens), 0.5, n), 4, 1500).round()
    zero = np.zeros(n)
    return np.stack((start, inputs, outputs, zero, inputs, np.full(n, np.nan), np.full(n, np.nan)), axis=1)


def _kv_pct(live, demand):
    return 100 * (live[:, 1] - live[:, 4] + live[:, 3]).sum() / demand.kv_tokens


def _admit(queue, live, demand, now):
    """From the head of the queue, while there is a place and room in the cache."""
    taken, room = [], demand.kv_tokens - (live[:, 1] + live[:, 3]).sum()
    while queue and len(live) + len(taken) < demand.most_running and queue[0][1] + 16 <= room:
        row = queue.pop(0)
        if np.isnan(row[6]):
            row[6] = now
        room -= row[1] + 16
        taken.append(row)
    return np.concatenate((live, taken)) if taken else live


def _prefill(live, time_s, slow, host_s, out, second, now):
    """Prompt tokens in the order of arrival, as many as there is time for; gives the time it took."""
    budget, used = time_s * PREFILL_TPS / slow, 0.0
    for row in live:
        if row[4] <= 0:
            continue
        part = min(row[4], budget - used)
        if part <= 0:
            break
        row[4] -= part
        used += part
        if row[4] <= 0 and np.isnan(row[5]):
            alone_s = row[1] * slow / PREFILL_TPS
            row[5] = max(now - STEP_S + used * slow / PREFILL_TPS, row[0] + alone_s) + PREFILL_LEAST_S * slow
            row[5] += host_s
        out["prefills"][second] += row[4] <= 0
    took = used * slow / PREFILL_TPS
    out["prefill_tokens"][second] += used
    out["prefill_s"][second] += took
    return took


def _decode(live, time_s, slow, demand, second, out):
    ready = live[:, 4] <= 0
    n = int(ready.sum())
    if not n:
        return live
    step_s = (DECODE_S + DECODE_PER_REQUEST_S * n) * slow + demand.host_s[second]
    steps = time_s / step_s
    live[ready, 3] += steps
    out["steps"][second] += steps
    out["tokens"][second] += steps * n
    out["decode_s"][second] += steps * (step_s - demand.host_s[second])
    return live


def _evict(live, queue, demand, out, second):
    """Requests that came last go back to the head of the queue while the cache is over its size."""
    while len(live) > 1 and _kv_pct(live, demand) > 100:
        row = live[-1].copy()
        row[4] = row[1] = row[1] + np.floor(row[3])
        row[2] -= np.floor(row[3])
        row[3] = 0
        queue.insert(0, row)
        live = live[:-1]
        out["preemptions"][second] += 1
    return live
