"""Sessions of requests and engines whose figures are arithmetic, and what a rule finds in them."""

import numpy as np
from ui.fakelatency import ENGINE, MS, FakeLatency
from ui.fakeview import T0

from opusmon.clock import NS
from opusmon.triage import rules_api  # noqa: F401  (it brings the rules)
from opusmon.triage.finding import merge
from opusmon.triage.scene import RULES, Scene

PROXY = "proxy (sent upstream)"
LLAMA = f"engine {ENGINE} llama-70b"


def find(view, name, end_s, start_s=0):
    scene = Scene(view, T0 + start_s * NS, T0 + end_s * NS)
    return merge(RULES[name].find(scene), RULES[name].join_ns)


def at(finding):
    """Range in seconds of the session."""
    return (finding.t0 - T0) / NS, (finding.t1 - T0) / NS


def numbers(finding):
    return {one.name: one.value for one in finding.evidence}


def steady(seconds, view=None, per_s=2, begin=0, **changes):
    """`per_s` good requests a second."""
    view = view or FakeLatency()
    for number in range(per_s * begin, per_s * seconds):
        view.request(T0 + (number + 1) * NS // per_s, **changes)
    return view


def bent(n=400, knee=8000, before=10_000, after=60_000, noise=0.1, seed=1):
    """TTFT of 100 ms and 10 us per token, 60 us past the knee."""
    rng = np.random.default_rng(seed)
    tokens = np.exp(rng.uniform(np.log(500), np.log(40_000), n))
    ttft = 100e6 + before * tokens + (after - before) * np.maximum(tokens - knee, 0)
    return tokens, ttft * np.exp(noise * rng.standard_normal(n))


def burning(slos=("ttft_p95<800ms",), seconds=900, bad=(300, 600), every=1):
    """Two requests a second; between two times one of them has its first token after 2 s."""
    view = FakeLatency()
    for second in range(1, seconds + 1):
        view.request(T0 + second * NS)
        slow = bad[0] <= second < bad[1] and second % every == 0
        view.request(T0 + second * NS + 1, ttft_ns=(2000 if slow else 200) * MS)
        if second % 60 == 1:
            for text in slos:
                view.slo(text, T0 + second * NS)
    return view
