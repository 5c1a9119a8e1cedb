"""Hardware counters of a real H200 against kernels whose bytes are known; made by workloads/l2_phases.py.

The recording has windows of 50 ms every 3 s on GPU 0, which worked, and GPU 1, which did not.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from opusmon.clock import NS
from opusmon.recording import Recording

DATA = Path(__file__).parent / "data"
PHASES = [json.loads(line) for line in (DATA / "h200x2-l2.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def session():
    with Recording.open(DATA / "h200x2-l2.opusmon") as recording:
        yield recording


def within(session, channel, phase):
    """Rows of GPU 0 whose window lies within a phase."""
    begin, end = phase["t_ns"]
    rows = session.query(channel, begin, end)
    return rows[(rows["gpu"] == 0) & (rows["t"] - rows["dt_ns"] >= begin + NS // 20)]


def named(name, **more):
    (phase,) = [
        one for one in PHASES if one["name"] == name and all(one.get(k) == v for k, v in more.items())
    ]
    return phase


@pytest.mark.parametrize("name", ["copy", "read", "write"])
def test_bytes_read_and_written_are_those_of_the_kernels(session, name):
    phase = named(name)
    rows = within(session, "l2", phase)
    assert len(rows) >= 1
    seconds = (phase["t_ns"][1] - phase["t_ns"][0]) / 1e9
    for field, moved in (("hbm_read_bps", "read_b"), ("hbm_write_bps", "write_b")):
        assert float(np.mean(rows[field])) == pytest.approx(phase[moved] / seconds, rel=0.05, abs=5e9)


@pytest.mark.parametrize("name", ["copy", "read", "write"])
def test_they_agree_with_gpm(session, name):
    phase = named(name)
    rows, gpm = within(session, "l2", phase), within(session, "gpu", phase)
    counters = float(np.mean(rows["hbm_read_bps"] + rows["hbm_write_bps"]))
    assert counters == pytest.approx(float(np.mean(gpm["hbm_bw_bps"])), rel=0.05)


def test_a_peer_copy_leaves_by_the_links(session):
    phase = named("peer")
    rows = within(session, "l2", phase)
    seconds = (phase["t_ns"][1] - phase["t_ns"][0]) / 1e9
    payload = phase["read_b"] / seconds
    assert float(np.mean(rows["hbm_read_bps"])) == pytest.approx(payload, rel=0.05)
    gpu = within(session, "gpu", phase)
    assert gpu["nvlink_tx_bps"].tolist() == pytest.approx([payload] * len(gpu), rel=0.05)
    assert gpu["nvlink_rx_bps"].tolist() == [0] * len(gpu)


def test_the_counters_of_the_links_count_payload(session):
    """One way, from GPU 0 to GPU 1: what the copy moves out of one and into the other, and nothing back."""
    phase = named("peer")
    begin, end = phase["t_ns"]
    payload = phase["read_b"] / (end - begin) * 1e9
    rows = session.query("l2", begin, end)
    rows = rows[rows["t"] - rows["dt_ns"] >= begin + NS // 20]
    for gpu, out, back in ((0, "nvlink_tx_bps", "nvlink_rx_bps"), (1, "nvlink_rx_bps", "nvlink_tx_bps")):
        own = rows[rows["gpu"] == gpu]
        assert len(own) >= 1
        assert own[out].tolist() == pytest.approx([payload] * len(own), rel=0.05)
        assert own[back].tolist() == [0] * len(own)


def test_the_hit_rate_falls_from_all_to_none_over_the_size_of_the_l2(session):
    """60 MB on this part: what fits is hit, what does not is not."""
    rates = {
        phase["mib"]: float(np.mean(rows["l2_hit_pct"]))
        for phase in PHASES
        if phase["name"] == "sweep" and len(rows := within(session, "l2", phase))
    }
    assert len(rates) >= 4
    assert all(rate > 99 for mib, rate in rates.items() if mib <= 32)
    assert all(rate < 2 for mib, rate in rates.items() if mib >= 64)
    assert any(mib <= 32 for mib in rates)
    assert any(mib >= 64 for mib in rates)
    assert all(10 < rate < 99 for mib, rate in rates.items() if 40 <= mib <= 48)
    assert any(40 <= mib <= 48 for mib in rates)


def test_hits_per_lookup_agree_where_all_or_none_is_hit_and_are_fewer_between(session):
    """Counted by the L2 itself, in the same window; a sector in its other half is looked up twice."""
    seen = 0
    for phase in PHASES:
        rows = within(session, "l2", phase)
        if phase["name"] == "peer" or not len(rows):
            continue
        apart = float(np.mean(rows["l2_hit_pct"] - rows["l2_lookup_hit_pct"]))
        if phase["name"] == "sweep" and 40 <= phase["mib"] <= 56:
            assert 0.5 < apart < 12
            seen += 1
        else:
            assert abs(apart) < 1.5
    assert seen >= 2


def test_what_is_only_read_is_not_hit_and_what_is_only_written_is(session):
    assert float(np.mean(within(session, "l2", named("read"))["l2_hit_pct"])) < 2
    assert float(np.mean(within(session, "l2", named("write"))["l2_hit_pct"])) > 99
    assert float(np.mean(within(session, "l2", named("copy"))["l2_hit_pct"])) == pytest.approx(50, abs=2)


def test_bank_conflicts_are_those_that_the_stride_makes():
    """32 threads that read words 32 apart: 31 more passes for every load; made by workloads/bank_conflicts.cu."""
    phases = [json.loads(line) for line in (DATA / "h200-banks.jsonl").read_text().splitlines()]
    with Recording.open(DATA / "h200-banks.opusmon") as recording:
        for phase in phases:
            begin, end = phase["t"]
            rows = recording.query("l2", begin + NS // 5, end)
            assert len(rows) >= 3
            counted = phase["conflicts"] / (end - begin) * 1e9
            assert rows["bank_conflicts_per_s"].tolist() == pytest.approx([counted] * len(rows), rel=0.02)
