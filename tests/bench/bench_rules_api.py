"""What the rules over API latency cost: live over their look back, and over a day of a recording.

    python tests/bench/bench_rules_api.py

A proxy with 20 requests a second, an engine scraped each second with 40 buckets, 2 objectives; medians of 60 looks one
second apart after 20 minutes, and a file's worth of 10-minute pieces.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from opusmon.channels import ENGINE, ENGINE_BUCKET, REQUEST, STATUS
from opusmon.clock import NS, Anchors
from opusmon.schema import Batch, StringTable
from opusmon.triage import run
from opusmon.triage.scene import RULES, Scene
from opusmon.window import Window

MINUTES = int(sys.argv[1]) if len(sys.argv) > 1 else 30
PER_S = 20
T0 = 3600 * NS


def filled(channel, n, t, **columns):
    """Rows of a channel: what is not named is NaN or 0."""
    rows = np.zeros(n, channel.dtype)
    for field in channel.fields:
        if field.dtype in ("<f4", "<f8"):
            rows[field.name] = np.nan
    rows["t"] = t
    for name, value in columns.items():
        rows[name] = value
    return rows


def view(seconds):
    """A window with that many seconds of traffic, some of it slow and refused."""
    strings = StringTable()
    ids = {
        word: strings.intern(word) for word in ("proxy", "sent upstream", "ok", "upstream_http_error", "m")
    }
    words = {
        word: strings.intern(word) for word in ("chat", "batch", "127.0.0.1:8000/metrics", "ttft", "slo")
    }
    rng = np.random.default_rng(1)
    n = seconds * PER_S
    bad = rng.random(n) < 0.03
    ttft = rng.exponential(300e6, n)
    size = np.exp(rng.uniform(6, 10.5, n))
    requests = filled(
        REQUEST,
        n,
        T0 + (np.arange(1, n + 1) * (NS // PER_S)),
        source=ids["proxy"],
        start=ids["sent upstream"],
        model=ids["m"],
        label=np.where(rng.random(n) < 0.5, words["chat"], words["batch"]),
        outcome=np.where(bad, ids["upstream_http_error"], ids["ok"]),
        status=np.where(bad, 529, 200),
        ttft_ns=np.where(bad, np.nan, ttft + 20_000 * size),
        e2e_ns=ttft + 20_000 * size + 2e9,
        input_tokens=size,
        retry=(rng.random(n) < 0.03).astype(float),
        limit_requests=50,
        left_requests=40,
    )
    load = 1 + (np.arange(1, seconds + 1) * 7) % 64
    running = np.minimum(load, 25)
    engine = filled(
        ENGINE,
        seconds,
        T0 + np.arange(1, seconds + 1) * NS,
        engine=words["127.0.0.1:8000/metrics"],
        model=ids["m"],
        dt_ns=NS,
        running=running,
        waiting=load - running,
        output_tps=40 * running * (1 + 0.05 * rng.standard_normal(seconds)),
        kv_used_max_pct=90,
        preemptions=0,
        finished=running / 5,
        failed=0,
        e2e_sum_s=load,
    )
    edges = np.geomspace(0.001, 60, 41)
    buckets = filled(
        ENGINE_BUCKET,
        seconds * 40,
        T0 + np.repeat(np.arange(1, seconds + 1), 40) * NS,
        engine=words["127.0.0.1:8000/metrics"],
        model=ids["m"],
        metric=words["ttft"],
        dt_ns=NS,
        lo_s=np.tile(edges[:-1], seconds),
        hi_s=np.tile(edges[1:], seconds),
        count=1,
    )
    minutes = seconds // 60
    status = [
        filled(STATUS, minutes, T0 + np.arange(minutes) * 60 * NS, collector=words["slo"], scope=i, reason=i)
        for i in (strings.intern("ttft_p95<800ms"), strings.intern("errors<1%"))
    ]
    channels = (REQUEST, ENGINE, ENGINE_BUCKET, STATUS)
    window = Window(strings, Anchors(), channels=channels, keep_ns=86_400 * NS, cap_b=8 << 30)
    for channel, rows in (
        (REQUEST, requests),
        (ENGINE, engine),
        (ENGINE_BUCKET, buckets),
        (STATUS, status[0]),
    ):
        window.push(Batch(channel, rows))
    window.push(Batch(STATUS, status[1]))
    return window


def live(window, seconds):
    """Time of each look, ms, all rules together and by rule."""
    wanted = [one for name, one in run.rules().items()]
    totals, by_rule = [], {one.name: [] for one in wanted}
    for now in range(seconds - 75, seconds):
        t1 = T0 + now * NS + NS // 3
        begin = time.perf_counter()
        for one in wanted:
            start = time.perf_counter()
            list(run.run_rule(one, Scene(window, t1 - one.lookback_ns, t1)))
            by_rule[one.name].append(1e3 * (time.perf_counter() - start))
        totals.append(1e3 * (time.perf_counter() - begin))
    return totals[15:], by_rule


def main():
    run.MODULES = ("rules_api",)
    seconds = 60 * MINUTES
    window = view(seconds)
    totals, by_rule = live(window, seconds)
    for name, spent in sorted(by_rule.items(), key=lambda item: -statistics.median(item[1])):
        print(f"{name:<22} median {statistics.median(spent):7.3f} ms  worst {max(spent):8.2f} ms")
    print(
        f"all together           median {statistics.median(totals):7.3f} ms  mean {statistics.mean(totals):.3f} ms"
        f"  worst {max(totals):.2f} ms"
    )
    start = time.perf_counter()
    found = run.look_over(window, T0, T0 + seconds * NS)
    took = time.perf_counter() - start
    print(
        f"look_over {MINUTES} min: {took:.2f} s, {len(found)} findings of {sorted({one.rule for one in found})}"
    )
    print(f"for 24 h: {took * 1440 / MINUTES:.1f} s; {len(RULES)} rules")


if __name__ == "__main__":
    main()
