"""Whatever rows hold, rules neither fail nor say what is not so: wild numbers, and recordings of other versions."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triage.session import MINE, T0, Session, cut

from opusmon.channels import BY_NAME
from opusmon.clock import NS, Anchors
from opusmon.schema import Batch, Channel, StringTable
from opusmon.triage import run
from opusmon.triage.finding import SEVERITIES
from opusmon.triage.limits import overridden
from opusmon.window import Window

CHANNELS = (
    "gpu",
    "gpu_device",
    "nvlink",
    "gpu_process",
    "gpu_event",
    "l2",
    "stream",
    "status",
    "host",
    "cgroup",
    "process",
    "engine",
    "request_open",
)
WILD = np.array([0, 1, 3, 50, 96, 99.9, 1e3, 1e9, 1e12, 1.5e11, -1, math.nan, math.inf, -math.inf, 3e38])
WORDS = (
    "",
    "xid",
    "lost",
    "back",
    "link_down",
    "recovery",
    "unavailable",
    "streams",
    "gpu",
    "ok",
    "gpu 0",
    "waiting",
)


def wild_rows(kind, random, n):
    rows = np.zeros(n, kind.dtype)
    rows["t"] = np.sort(T0 + random.integers(0, 40, n) * NS // 2)
    for field in kind.fields:
        if field.text:
            rows[field.name] = random.integers(0, len(WORDS), n)
        elif field.dtype in ("<f4", "<f8"):
            rows[field.name] = random.choice(WILD, n) if random.random() < 0.5 else random.choice(WILD)
        else:
            rows[field.name] = random.integers(0, 3, n)
    return rows


def wild_view(seed, channel_of=BY_NAME.__getitem__):
    random = np.random.default_rng(seed)
    view = Window(StringTable(dict(enumerate(WORDS))), Anchors(), keep_ns=10**15)
    for name in CHANNELS:
        kind = channel_of(name)
        with np.errstate(over="ignore"):
            view.push(Batch(kind, wild_rows(kind, random, 60)))
    return view


def look(view):
    return run.look_over(view, view.t0 - 1, view.t1, only=[n for n, one in run.RULES.items() if ours(one)])


def ours(rule):
    return rule.find.__module__.rpartition(".")[2] in MINE


@pytest.fixture(autouse=True)
def _rules(monkeypatch):
    monkeypatch.setattr(run, "MODULES", MINE)
    run.rules()


def check(view):
    for one in look(view):
        assert view.t0 <= one.t0 <= one.t1 <= view.t1
        assert one.severity in SEVERITIES
        assert one.rule in run.RULES
        assert one.title
        assert one.cause
        assert one.next
        assert "nan" not in one.title.lower().split()
        one.to_json()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32))
def test_wild_numbers(seed):
    check(wild_view(seed))


NEAR = {
    "hbm_bw_pct": (94.0, 96.0),
    "mem_total_b": (100e9,),
    "mem_used_b": (70e9, 95.5e9, 98.5e9),
    "sm_util_pct": (5.0, 60.0),
    "gpu_busy_pct": (0.0, 90.0),
    "sm_clock_mhz": (1000, 1100, 1980),
    "max_sm_clock_mhz": (1980,),
    "throttle_mask": (0, 0, 0x4, 0x40),
    "tx_bps": (5e9, 5e9, 5e9, 5e9, 22e9),
    "state": (0, 1, 1, 1),
    "psi_cpu_some_pct": (5, 16, 50),
    "psi_memory_some_pct": (5, 8),
    "throttled_pct": (0, 5, 12),
    "run_delay_pct": (0, 6, 30),
    "waiting": (0, 3),
    "no_token_ns": (0, 5e9),
}
"""Values on both sides of thresholds; of other fields 0 and 1."""


def near_view(seed, n=150, hold=0.85):
    """A row of each series every second; values stay for some seconds, now and then one is missing."""
    random = np.random.default_rng(seed)
    view = Window(StringTable(dict(enumerate(WORDS))), Anchors(), keep_ns=10**15)
    for name in CHANNELS:
        kind = BY_NAME[name]
        count = 6 if name == "nvlink" else 2
        rows = np.zeros((n, count), kind.dtype)
        rows["t"] = T0 + np.arange(1, n + 1)[:, None] * NS + (np.arange(count) if count < 3 else 0)
        for field in kind.fields:
            rows[field.name] = near(field, random, n, count, hold)
        if name == "nvlink":
            rows["gpu"], rows["link"] = 0, np.arange(count)
        elif kind.key:
            rows[kind.key[0]] = np.arange(count)
        if "gi" in rows.dtype.names:
            rows["gi"] = -1
        view.push(Batch(kind, rows.reshape(-1)))
    return view


def near(field, random, n, count, hold):
    if field.text:
        values = random.integers(0, len(WORDS), (n, count))
    elif field.dtype in ("<f4", "<f8"):
        values = random.choice(NEAR.get(field.name, (0.0, 1.0)), (n, count)).astype(float)
        values[random.random((n, count)) < 0.02] = math.nan
    else:
        return NS if field.name == "dt_ns" else 0
    stays = random.random((n, count)) < hold
    for place in range(1, n):
        values[place] = np.where(stays[place], values[place - 1], values[place])
    return values


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32))
def test_it_does_not_matter_how_a_recording_is_cut(monkeypatch, seed):
    view = near_view(seed)
    limits = overridden({"throttle_power_long_s": 12})
    names = [name for name, one in run.RULES.items() if ours(one)]
    found = cut(monkeypatch, view, names, limits)
    assert len({one.rule for one in found}) > 8


@pytest.mark.parametrize("seed", range(6))
def test_recordings_that_lack_fields(seed):
    """Of each channel a part of the fields is not there, the key at times."""
    random = np.random.default_rng(seed)

    def older(name):
        kind = BY_NAME[name]
        kept = tuple(
            field for field in kind.fields if random.random() < 0.6 or (field.name in kind.key and seed % 2)
        )
        names = {field.name for field in kept}
        return Channel(name, kind.kind, kept, tuple(key for key in kind.key if key in names))

    check(wild_view(seed, older))


def test_every_rule_says_what_it_is_and_every_limit_why():
    from opusmon.triage import limits_gpu, limits_host

    for one in filter(ours, run.RULES.values()):
        assert one.help.endswith(".")
        assert set(one.channels) <= set(BY_NAME)
    for name, limit in {**limits_gpu.LIMITS, **limits_host.LIMITS}.items():
        assert limit.why, name


def test_no_rows_no_findings():
    assert look(Session().view()) == []
