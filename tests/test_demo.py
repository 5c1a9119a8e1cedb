"""The bundled demo is a real incident on two H200s: what it shows must be what the loads themselves counted."""

import json
from pathlib import Path

import numpy as np
import pytest

from opusmon.clock import NS
from opusmon.paths import demo_file
from opusmon.recording import Recording
from opusmon.triage.run import look_over
from opusmon.window import Window

DATA = Path(__file__).parent / "data"


def lines(name):
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


PLANTED = lines("incident-planted.jsonl")
HOG = {line["name"]: line for line in lines("incident-hog.jsonl")}
CHAT = [line for line in lines("incident-chat.jsonl") if "number" in line]
PID = PLANTED[0]["pid"]


@pytest.fixture(scope="module")
def demo():
    with Recording.open(demo_file()) as recording:
        yield recording


def stalls(demo, planted, kind, call=""):
    """Rows of a kind of the planting process while it planted this."""
    rows = demo.query("stall", planted["t0"], planted["t1"] + NS // 4)
    text = demo.strings.text
    fits = [
        row["pid"] == PID and text(row["kind"]) == kind and (not call or text(row["call"]) == call)
        for row in rows
    ]
    return rows[fits]


def of(kind, **more):
    (line,) = [
        line for line in PLANTED if line["kind"] == kind and all(line.get(k) == v for k, v in more.items())
    ]
    return line


def test_it_is_small_and_has_every_pane(demo):
    assert demo_file().stat().st_size <= 1_000_000
    assert demo.t1 - demo.t0 >= 110 * NS
    wanted = {
        "gpu",
        "nvlink",
        "l2",
        "stream",
        "stall",
        "host",
        "process",
        "engine",
        "request",
        "request_open",
    }
    assert wanted <= set(demo.channels)
    texts = [mark.text for mark in demo.marks()]
    assert any(text.startswith("chat load: 48") for text in texts)
    assert any("another thread allocates" in text for text in texts)


@pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"])
def test_every_wait_is_there_with_its_length(demo, call):
    planted = of("wait", call=call)
    seen = stalls(demo, planted, "wait", call)["dur_ns"].tolist()
    assert len(seen) == planted["count"]
    # The load's own clock runs around the call: it is longer, by well under a millisecond.
    assert all(0 <= told - row < 500_000 for told, row in zip(planted["took_ns"], seen, strict=True))


@pytest.mark.parametrize(
    ("how", "code", "by", "by_code"),
    [
        ("same thread reads back", 901, "cuStreamSynchronize", 900),
        ("another thread allocates", 901, "cuMemAlloc_v2", 900),
        ("a side stream is not joined", 904, "", None),
    ],
)
def test_every_broken_capture_has_its_code_and_its_culprit(demo, how, code, by, by_code):
    planted = of("capture_aborted", how=how)
    rows = stalls(demo, planted, "capture")
    assert rows["code"].tolist() == [code] * planted["count"]
    assert {demo.strings.text(row["by_call"]) for row in rows} == {by}
    if by_code is None:
        assert np.isnan(rows["by_code"]).all()
    else:
        assert set(rows["by_code"].tolist()) == {by_code}
    same_thread = rows["by_tid"] == planted["tid"]
    assert same_thread.all() if how.startswith("same") else not same_thread.any()


def test_captures_that_were_broken_in_one_way_are_one_finding(demo):
    """Four threads came one after another, each of which broke one capture by the same call."""
    found = look_over(Window.over(demo), demo.t0 - 1, demo.t1, only=["capture_aborted"])
    begun, ended = PLANTED[0]["t0"], PLANTED[-1]["t1"]
    told = [
        (one.subject.partition(": ")[2], next(each.value for each in one.evidence if each.name == "count"))
        for one in found
        if begun <= one.t0 <= ended
    ]
    assert sorted(told) == [
        ("901 by cuMemAlloc_v2 in thread python3", 4),
        ("901 by cuStreamSynchronize in the capturing thread", 3),
        ("904", 2),
    ]


def test_nvlink_figures_that_were_no_payload_are_left_out_and_it_is_said(demo):
    """The counters of that day had the protocol in them: 259 GB/s came in while a copy went one way."""
    rows = demo.query("l2", demo.t0 - 1, demo.t1)
    said = demo.query("status", demo.t0 - 1, demo.t1)
    text = demo.strings.text
    for field in ("nvlink_rx_bps", "nvlink_tx_bps"):
        assert np.isnan(rows[field]).all()
        reasons = [
            text(row["reason"]) for row in said if (text(row["channel"]), text(row["field"])) == ("l2", field)
        ]
        assert reasons == ["left out of this session: its counters included the protocol"]


def test_captures_that_end_well_are_no_failures(demo):
    planted = of("capture")
    assert stalls(demo, planted, "capture")["code"].tolist() == [0] * planted["count"]


def test_memory_calls_page_faults_locks_and_compilers_are_counted(demo):
    alloc = of("alloc")
    for kind, call in (("alloc", "cuMemAlloc_v2"), ("free", "cuMemFree_v2")):
        assert stalls(demo, alloc, kind, call)["count"].sum() == alloc["count"]
    assert stalls(demo, alloc, "alloc")["size_b"].sum() == alloc["count"] * alloc["size_b"]
    assert stalls(demo, of("page_faults"), "page_faults")["count"].sum() >= of("page_faults")["count"]
    locks = of("futex")
    held = stalls(demo, locks, "futex")["dur_ns"]
    assert len(held) == locks["count"]
    assert all(abs(ns - locks["held_ns"]) < 5_000_000 for ns in held)
    compiled = stalls(demo, of("jit"), "jit")
    assert len(compiled) >= of("jit")["count"]
    assert {demo.strings.text(row["call"]) for row in compiled} == {"ptxas"}


def test_the_hog_moved_what_it_counted(demo):
    copy, peer = HOG["copy"], HOG["peer"]
    gpu = demo.query("gpu", copy["t0"] + 2 * NS, copy["t1"])
    seen = float(np.median(gpu[gpu["gpu"] == 0]["hbm_bw_bps"]))
    counted = 2 * copy["n"] * copy["b"] / (copy["t1"] - copy["t0"]) * 1e9
    assert counted < seen < 1.25 * counted  # the server beside it moved some as well
    gpu = demo.query("gpu", peer["t0"] + 2 * NS, peer["t1"])
    payload = peer["n"] * peer["b"] / (peer["t1"] - peer["t0"]) * 1e9
    assert payload < float(np.median(gpu[gpu["gpu"] == 0]["nvlink_tx_bps"])) < 1.06 * payload


def test_every_request_of_the_clients_is_there_with_its_times(demo):
    rows = demo.query("request", 0, demo.t1)
    rows = rows[[demo.strings.text(row["source"]) == "proxy" for row in rows]]
    # The first one, which loads the model, was sent before the recording's proxy had been scraped once: it counts too.
    ended = [line for line in CHAT if line["t0"] + line["e2e_ns"] < demo.t1]
    assert len(rows) == pytest.approx(len(ended), abs=1)
    left = [line for line in ended if line.get("left")]
    outcomes = [demo.strings.text(row["outcome"]) for row in rows]
    assert outcomes.count("client_disconnect") == len(left)
    apart = []
    for line in ended:
        nearest = rows[np.argmin(abs(rows["t"] - (line["t0"] + line["e2e_ns"])))]
        if "ttft_ns" in line and abs(int(nearest["t"]) - line["t0"] - line["e2e_ns"]) < NS // 50:
            apart.append(line["ttft_ns"] - float(nearest["ttft_ns"]))
    assert len(apart) > 0.9 * len(ended)
    assert 0 < np.nanmedian(apart) < 3_000_000  # the proxy's clock starts when it sends, the client's before


def test_the_rules_say_what_went_wrong(demo):
    found = {one.rule: one for one in look_over(Window.over(demo), demo.t0 - 1, demo.t1)}
    assert {"request_errors", "slo_burn_slow", "capture_aborted", "hbm_nearly_full"} <= set(found)
    assert found["hbm_nearly_full"].subject.startswith("gpu 0")
