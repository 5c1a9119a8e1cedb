"""A session recorded on an H200 beside a load that counted its own CUDA calls: the probes must have seen every one."""

import json
from pathlib import Path

import numpy as np
import pytest

from opusmon.clock import NS
from opusmon.recording import Recording

DATA = Path(__file__).parent / "data"
LOAD = json.loads((DATA / "h200-streams-load.json").read_text())


@pytest.fixture(scope="module")
def totals():
    """Sum of each field per stream over the counted part."""
    with Recording.open(DATA / "h200-streams.opusmon") as recording:
        rows = recording.query("stream", LOAD["t0"] - NS, LOAD["t1"] + NS + NS // 2)
        found = {}
        for name in "abc":
            mine = rows[rows["stream"] == int(LOAD[name], 16)]
            found[name] = {
                f: float(np.nansum(mine[f]))
                for f in ("launches", "graph_launches", "copies", "d2d_b", "waits")
            }
        return found


def test_every_call_was_seen_on_its_own_stream(totals):
    nothing = dict.fromkeys(("launches", "graph_launches", "copies", "d2d_b", "waits"), 0.0)
    assert totals["a"] == {**nothing, "launches": LOAD["a_launches"], "waits": LOAD["syncs_a"]}
    assert totals["b"] == {**nothing, "graph_launches": LOAD["b_graphs"]}
    assert totals["c"] == {**nothing, "copies": LOAD["c_copies"], "d2d_b": LOAD["copy_b"]}


def test_what_was_not_counted_is_missing_and_said():
    with Recording.open(DATA / "h200-streams.opusmon") as recording:
        later = recording.query("stream", LOAD["t1"] + 5 * NS, LOAD["t1"] + 15 * NS)
        launches = later[later["stream"] == 0]["launches"]  # a launch-bound loop on the legacy stream
        assert np.isnan(launches).any()
        assert not (launches == 0).any()
        reasons = [
            recording.strings.text(row["reason"]) for row in recording.query("status", 0, recording.t1)
        ]
        assert any("counted for 1 s of every" in reason for reason in reasons)
