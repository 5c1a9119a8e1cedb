"""The drill on real GPUs: sessions of two H200s with one known cause each, made by workloads/drill.sh.

Each begins quietly; then the cause is planted in the small server or beside it. `out_of_memory` is no plant: `transformers
serve` on one H200 under 16 and 48 streams fills the memory and dies of it at 35 s, by its own log; every request after
that is answered with 503 at once.
"""

from pathlib import Path

import pytest
from drill.score import moved, told, top

from opusmon.clock import NS
from opusmon.recording import Recording
from opusmon.triage.explain import explain
from opusmon.triage.rank import rank
from opusmon.triage.run import look_over
from opusmon.triage.severity import CRIT, NOTE
from opusmon.window import Window

DATA = Path(__file__).parents[1] / "data" / "drill"

CAUSES = {
    "bandwidth_hog": ("gpu_contended", "gpu 0 HBM bandwidth"),
    "peer_traffic": ("gpu_contended", "gpu 0 NVLink"),
    "busy_loop_beside": ("process_starved", "python3"),
    "sync_stall": ("stalled_thread", "waiting for the GPU"),
    "capture_broken_by_a_thread": ("capture_aborted", "cuMemAlloc_v2"),
    "compiling_while_serving": ("jit_while_serving", "python3"),
    "memory_grows": ("hbm_filling", "gpu 0"),
    "slow_network": ("slow_upstream", "proxy"),
    "long_inputs": ("long_inputs", "proxy"),
    "out_of_memory": ("hbm_nearly_full", "gpu 0"),
}
"""Name of the session to the rule that must give the top finding, and part of its subject."""

BEGAN_S = {
    "bandwidth_hog": (21.9, 26),
    "peer_traffic": (22.3, 26),
    "busy_loop_beside": (17, 29),  # counted until a share of ten seconds is over its limit
    "sync_stall": (16.9, 19),
    "capture_broken_by_a_thread": (26.1, 27),
    "compiling_while_serving": (25.8, 29),
    "memory_grows": (4.7, 125),  # growth is told once it has gone on for two minutes
    "slow_network": (0, 15),  # planted at 14; rules over a minute date back by up to that
    "long_inputs": (0, 52),  # planted at 50; likewise
    "out_of_memory": (0, 2),  # nearly full from the start
}
"""When the finding may begin, seconds after the first row: from when the load's own clock says that the cause began."""


def found_in(name):
    """Findings in the order in which they are told, and the time of the first row."""
    with Recording.open(DATA / f"{name}.opusmon") as recording:
        return rank(look_over(Window.over(recording), recording.t0 - 1, recording.t1)), recording.t0


@pytest.fixture(scope="module")
def drilled():
    return {name: found_in(name) for name in (*CAUSES, "quiet")}


def test_the_right_cause_is_the_top_finding_in_each(drilled, capsys):
    lines, wrong = [f"{'recorded on H200s':<28}{'cause':<24}top finding"], {}
    for name, (rule, subject) in CAUSES.items():
        first = top(drilled[name][0])
        right = first is not None and first.rule == rule and subject in first.subject
        lines.append(f"{name:<28}{rule:<24}{'right' if right else f'WRONG: {first and first.rule}'}")
        if not right:
            wrong[name] = told(drilled[name][0][:4])
    with capsys.disabled():
        print("", *lines, sep="\n")
    assert wrong == {}


def test_nothing_but_notes_in_the_quiet_one(drilled):
    assert told([one for one in drilled["quiet"][0] if one.severity > NOTE]) == []


@pytest.mark.parametrize(("name", "between_s"), BEGAN_S.items())
def test_the_cause_is_dated_when_it_was_planted(drilled, name, between_s):
    found, t0 = drilled[name]
    first = top(found)
    assert between_s[0] <= (first.t0 - t0) / NS <= between_s[1]


def test_what_a_server_that_died_answers_is_an_error_and_not_slow(drilled):
    found, t0 = drilled["out_of_memory"]
    (refused,) = [one for one in found if one.subject.endswith("HTTP 503")]
    assert (refused.rule, refused.severity) == ("request_errors", CRIT)
    assert (refused.t0 - t0) / NS == pytest.approx(35, abs=2)
    (burning,) = [one for one in found if one.rule == "slo_burn_fast"]
    numbers = {one.name: one.value for one in burning.evidence}
    # 22 more than those with an error had waited over 800 ms for their first token.
    assert numbers["bad"] - numbers["failed"] == 22
    assert burning.cause.startswith(
        "errors, which are bad in this objective too, more than TTFT over 800 ms, "
    )


ORDER = {
    "bandwidth_hog": (
        18,
        40,
        20.4,
        [("gpu", "gpu 0 mem_used"), ("gpu", "gpu 0 sm_occupancy")],
    ),
    "peer_traffic": (18, 40, 20.7, [("gpu", "gpu 0 mem_used"), ("gpu", "gpu 0 nvlink_tx")]),
    "capture_broken_by_a_thread": (25, 40, 26.1, [("stall", "capture")]),
    "long_inputs": (45, 80, 50.0, [("request", "input_tokens"), ("request", "ttft")]),
}
"""Range compared (seconds after the first row), when it was planted there, and what moves, in this order.

A load that is a process of its own takes its memory a second and a half before it says that it begins.
"""


@pytest.mark.parametrize("name", ORDER)
def test_what_moved_first_is_what_was_planted(name):
    begin_s, end_s, at_s, order = ORDER[name]
    with Recording.open(DATA / f"{name}.opusmon") as recording:
        t0 = recording.t0
        found = explain(Window.over(recording), t0 + begin_s * NS, t0 + end_s * NS, shown=60)
    steps = [moved(found, channel, quantity, t0) for channel, quantity in order]
    assert [number for number, _, _ in steps] == sorted(number for number, _, _ in steps), steps
    _, lo, hi = steps[0]
    assert lo - 2 <= at_s <= hi + 2, steps
