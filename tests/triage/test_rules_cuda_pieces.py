"""Random sessions with everything in them: what the rules find does not depend on how a session is cut into pieces."""

import json

import numpy as np
import pytest

from opusmon.triage.severity import STALL_LIMITS

from .cuda_session import MS, NOTHING, PID, US, CudaSession
from .test_rules_cuda import RULES

REASONS = (
    *("preempted", "I/O", "lock", "network", "sleep", "waiting for the GPU"),
    *("driver call, inside cuStreamSynchronize", "shorter ones, folded"),
)
SECONDS = 400


def planted(seed):
    """Phases of 20 to 90 s, each with its own rates; a third of the numbers are missing at times."""
    random = np.random.default_rng(seed)
    session = CudaSession()
    age_s = random.uniform(0, 400)
    t_s = 1
    while t_s < SECONDS:
        length, graphs, plain = random.integers(20, 90), random.choice([0, 50]), random.choice([500, 9000])
        busy, running, often = random.choice([5, 40, 97]), random.choice([0, 8]), random.uniform(0, 2)
        call_us, bubble_ms, wait_ms = (
            random.choice([9, 30, 300]),
            random.choice([50, 400]),
            random.choice([100, 950]),
        )
        missing = random.random() < 0.3
        for second in range(t_s, min(t_s + length, SECONDS)):
            session.gpu(
                [second], np.nan if missing and random.random() < 0.3 else busy * random.uniform(0.9, 1.03)
            )
            session.add("process", second, pid=PID, name="vllm", age_ns=(age_s + second) * 1e9)
            session.add("engine", second, engine="e", running=running)
            noise = random.uniform(0.8, 1.2)
            counts = {
                **NOTHING,
                "launches": np.nan if missing and random.random() < 0.3 else plain * noise,
                "graph_launches": graphs * noise,
                "timed_launches": random.choice([0, 100]),
                "launch_call_ns": call_us * US * noise,
                "bubbles": 50,
                "bubble_ns": bubble_ms * MS * noise,
                "wait_ns": wait_ms * MS * noise,
            }
            session.stream(second, **counts)
            for _ in range(random.poisson(often)):
                kind = random.choice(list(STALL_LIMITS))
                session.stall(
                    second + random.uniform(0, 1),
                    kind,
                    reason=random.choice(REASONS),
                    tid=random.integers(1, 3),
                    call=random.choice(["a", "b"]),
                    dur_ns=round(5 * MS * 10 ** random.uniform(0, 2.5)),
                    count=random.choice([1, 1, 1, 40]),
                    code=random.choice([0, 0, 0, 1, 901, np.nan]),
                    stack=random.choice(["", "main;x", "main;y"]),
                )
        t_s += length
    return session


@pytest.mark.parametrize("seed", range(6))
def test_any_session_is_told_the_same_however_it_is_cut(seed):
    session = planted(seed)
    found = {rule: session.find(rule) for rule in RULES}
    assert sum(map(len, found.values())) > 10


def test_these_sessions_show_all_of_it():
    shown = {rule for seed in range(6, 12) for rule in RULES if planted(seed).find(rule)}
    assert shown == set(RULES)


def test_findings_are_for_programs_too():
    session = planted(6)
    for rule in RULES:
        for finding in session.find(rule):
            body = json.loads(json.dumps(finding.to_json(), allow_nan=False))
            assert body["evidence"]
            assert body["cause"].count("likely") == 1
            assert body["title"].isprintable()
            assert body["t0"] <= body["t1"]
