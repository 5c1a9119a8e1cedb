"""The bundled demo is a real recording: what it shows must be what the load itself counted."""

import json
from pathlib import Path

import numpy as np
import pytest
from sessions import h200x2

from opusmon.clock import NS
from opusmon.recording import Recording

LOAD = json.loads((Path(__file__).parent / "data" / "h200x2-load.json").read_text())
PHASES = {phase["phase"]: phase for phase in LOAD}


@pytest.fixture(scope="module")
def demo():
    with Recording.open(h200x2()) as recording:
        yield recording


def seen(demo, phase, gpu, field):
    """Median of a field in the middle of a phase."""
    load = PHASES[phase]
    rows = demo.query("gpu", load["t0"] + 3 * NS, load["t1"] - 2 * NS)
    return float(np.nanmedian(rows[rows["gpu"] == gpu][field]))


def test_it_is_long_small_and_of_two_gpus(demo):
    assert demo.t1 - demo.t0 >= 180 * NS
    assert h200x2().stat().st_size <= 1_000_000
    assert set(demo.query("gpu", 0, demo.t1)["gpu"].tolist()) == {0, 1}
    assert [mark.text.split(":")[0] for mark in demo.marks()] == [phase["phase"] for phase in LOAD]


@pytest.mark.parametrize(
    ("phase", "gpu"), [("hbm copy on gpu 0", 0), ("hbm copy on both", 0), ("hbm copy on both", 1)]
)
def test_a_copy_uses_the_bandwidth_it_counted(demo, phase, gpu):
    assert seen(demo, phase, gpu, "hbm_bw_bps") == pytest.approx(PHASES[phase]["hbm_bps"], rel=0.01)


@pytest.mark.parametrize(("phase", "source", "target"), [("peer 0 to 1", 0, 1), ("peer 1 to 0", 1, 0)])
def test_a_peer_copy_goes_one_way_and_costs_a_little_protocol(demo, phase, source, target):
    payload_bps = PHASES[phase]["peer_bps"]
    for gpu, field in ((source, "nvlink_tx_bps"), (target, "nvlink_rx_bps")):
        assert payload_bps < seen(demo, phase, gpu, field) < 1.06 * payload_bps
    assert seen(demo, phase, source, "nvlink_rx_bps") == 0
    assert seen(demo, phase, target, "nvlink_tx_bps") == 0


def test_the_links_share_the_traffic_evenly(demo):
    load = PHASES["peer 0 to 1"]
    rows = demo.query("nvlink", load["t0"] + 3 * NS, load["t1"] - 2 * NS)
    means = [float(rows[(rows["gpu"] == 0) & (rows["link"] == link)]["tx_bps"].mean()) for link in range(18)]
    assert sum(means) == pytest.approx(seen(demo, "peer 0 to 1", 0, "nvlink_tx_bps"), rel=0.02)
    assert max(means) < 1.05 * min(means)


def test_products_keep_the_tensor_pipes_busy_until_the_power_cap(demo):
    for gpu in (0, 1):
        assert seen(demo, "matmul", gpu, "tensor_pct") > 85
        assert seen(demo, "matmul", gpu, "throttle_mask") == 4
        assert seen(demo, "matmul", gpu, "sm_clock_mhz") < 1980
        assert 650_000 < seen(demo, "matmul", gpu, "power_mw") < 720_000
    events = [demo.strings.text(row["kind"]) for row in demo.query("gpu_event", 0, demo.t1)]
    assert events.count("throttle_on") == events.count("throttle_off") == 2


def test_idle_is_a_measured_zero(demo):
    assert seen(demo, "idle", 0, "sm_util_pct") == 0
    assert seen(demo, "idle", 0, "nvlink_tx_bps") == 0
    assert seen(demo, "idle", 0, "power_mw") > 50_000


def test_allocated_memory_is_in_use(demo):
    load = PHASES["hbm copy on gpu 0"]
    assert 0 <= seen(demo, load["phase"], 0, "mem_used_b") - load["allocated_b"] < 1e9
