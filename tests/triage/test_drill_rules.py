"""What the drill found missing or wrong in rules: each with a session where it must tell and one where it must not."""

import math
from pathlib import Path

import numpy as np
import pytest
from triage.cuda_session import MS, CudaSession
from triage.session import T0, Session, seconds, told

from opusmon.clock import NS
from opusmon.recording import Recording
from opusmon.triage import run
from opusmon.triage.rules_api_engine import _is_pressed
from opusmon.triage.saturation import fit
from opusmon.triage.scene import Scene
from opusmon.triage.severity import CRIT, WARN

NAN = math.nan
ROOT = Path(__file__).parents[2]
LINE_BPS = 26.562e9 * 18


def find(session, rule):
    """What a rule finds, the same in one piece and in pieces wherever they lie."""
    view = session.view()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "PIECE_NS", 10**15)
        whole = run.look_over(view, view.t0 - 1, view.t1, only=[rule])
        for piece_s in (60, 600):
            for shift_s in (0, 1, 7, 59):
                patch.setattr(run, "PIECE_NS", piece_s * NS)
                cut = run.look_over(view, view.t0 - 1 - shift_s * NS, view.t1, only=[rule])
                assert list(map(repr, cut)) == list(map(repr, whole)), (piece_s, shift_s)
    return whole


# -- gpu_contended


def shared(hbm=57.0, nvlink_bps=1e9, guest_sm=50, host_sm=45, guest=True, links=18):
    """A GPU of which an engine holds most; a guest comes at 100 s."""
    session = Session()
    for t in range(1, 301):
        on = t > 100
        session.add(
            "gpu", t, gpu=0, gi=-1, hbm_bw_pct=hbm if on else 40.0, nvlink_tx_bps=nvlink_bps if on else 1e9, nvlink_rx_bps=1e9
        )  # fmt: skip
        if t % 60 == 1:
            session.add("gpu_device", t, gpu=0, gi=-1, links=links)
        if t % 5 == 0:
            session.add("gpu_process", t, gpu=0, gi=-1, pid=7, name="engine", mem_b=1.3e11, sm_pct=host_sm)
            if on and guest:
                session.add(
                    "gpu_process", t, gpu=0, gi=-1, pid=8, name="py\x1bthon", mem_b=2.8e9, sm_pct=guest_sm
                )
    return session


def test_a_copy_beside_an_engine_is_told_with_the_likely_guest():
    """57 %: what both reach taking turns on an H200 (measured), far below what `hbm_bandwidth_saturated` asks for."""
    (one,) = find(shared(), "gpu_contended")
    assert (one.subject, one.severity, one.open) == ("gpu 0 HBM bandwidth", WARN, True)
    assert seconds(one)[0] == 105  # processes are read every 5 s
    assert "py?thon 8, which holds the least" in one.cause
    assert told(one)["py?thon 8 holds"] == pytest.approx(2.8e9 / 1024**3)
    assert find(shared(), "hbm_bandwidth_saturated") == []


def test_the_copies_planted_beside_an_engine_on_real_gpus_are_found():
    """The bundled incident: copies within GPU 0 for 6 s, then from GPU 0 to GPU 1 for 6 s, beside an engine on GPU 0."""
    with Recording.open(ROOT / "opusmon/demo/incident.opusmon") as recording:
        found = run.look_over(recording, recording.t0 - 1, recording.t1, only=["gpu_contended"])
    assert [(one.subject, one.severity) for one in found] == [
        ("gpu 0 HBM bandwidth", WARN),
        ("gpu 0 NVLink", WARN),
        ("gpu 1 NVLink", WARN),
    ]
    assert all("python3 1079" in one.cause for one in found[:2])
    assert all(2 <= (one.t1 - one.t0) / NS <= 7 for one in found)


def test_peer_copies_run_on_no_sm_and_count_by_the_links():
    (one,) = find(shared(hbm=12.0, nvlink_bps=4.03e11, guest_sm=0), "gpu_contended")
    assert (one.subject, told(one)["NVLink used"]) == (
        "gpu 0 NVLink",
        pytest.approx(100 * 4.03e11 / LINE_BPS, rel=1e-4),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"guest": False},  # an engine that decodes large batches
        {"hbm": 49.0},
        {"guest_sm": 4},  # a monitor, or a program at rest
        {"hbm": 12.0, "nvlink_bps": 0.79 * LINE_BPS},
        {"hbm": 12.0, "nvlink_bps": 4.03e11, "guest": False},  # collectives of the engine itself
        {"hbm": 12.0, "nvlink_bps": 4.03e11, "links": NAN},
        {"hbm": NAN},
    ],
)
def test_one_program_or_a_gpu_with_room_is_not_contended(changes):
    assert find(shared(**changes), "gpu_contended") == []


# -- long_inputs, slow_upstream


def traffic(
    seconds_=700,
    tokens=lambda t: 900.0,
    ttft=lambda t: 0.2,
    engine=lambda t: 0.2,
    per_s=2,
    e2e=2.0,
    model="m",
    **more,
):
    session = Session()
    for n in range(seconds_ * per_s):
        t = n / per_s + 0.013
        session.add(
            "request", t + e2e, source="proxy", start="sent upstream", model="m", outcome="ok", input_tokens=tokens(t),
            ttft_ns=ttft(t) * NS, e2e_ns=e2e * NS, **more,
        )  # fmt: skip
    for t in range(1, seconds_):
        session.add(
            "engine",
            t,
            engine="e",
            model=model,
            ttft_n=per_s,
            ttft_sum_s=per_s * engine(t),
            running=4,
            waiting=0,
        )
    return session


def test_inputs_that_get_longer_and_slower_are_told():
    (one,) = find(
        traffic(tokens=lambda t: 900 if t < 400 else 6300, ttft=lambda t: 0.2 if t < 400 else 1.1),
        "long_inputs",
    )
    assert (one.severity, one.subject) == (WARN, "proxy (sent upstream)")
    begun, ended = seconds(one)
    assert 340 <= begun <= 402
    assert 520 <= ended <= 600  # then the five minutes before hold as many long ones
    # Answers take 2 s: of the minute up to 460 s 58 s are of long inputs, of the five minutes before none.
    assert told(one)["length_ratio"] == pytest.approx((58 * 6300 + 2 * 900) / 60 / 900, rel=0.01)
    assert told(one)["ttft_ratio"] == pytest.approx((58 * 1.1 + 2 * 0.2) / 60 / 0.2, rel=0.01)


@pytest.mark.parametrize(
    ("tokens", "ttft"),
    [
        (lambda t: 900 if t < 400 else 2600, lambda t: 0.2 if t < 400 else 1.1),  # under three times
        (lambda t: 900 if t < 400 else 6300, lambda t: 0.2),  # costs nothing
        (lambda t: 900.0, lambda t: 0.2 if t < 400 else 1.1),  # slow for another reason
    ],
)
def test_inputs_that_are_as_before_or_cost_nothing_are_not(tokens, ttft):
    assert find(traffic(tokens=tokens, ttft=ttft), "long_inputs") == []


def test_what_is_read_from_the_prefix_cache_makes_no_input_longer():
    session = traffic(
        ttft=lambda t: 0.2 if t < 400 else 1.1, tokens=lambda t: 6300.0, cache_read_tokens=5400.0
    )
    assert find(session, "long_inputs") == []


def test_time_lost_between_proxy_and_engine_is_told():
    (one,) = find(traffic(ttft=lambda t: 0.21 if t < 300 else 2.3), "slow_upstream")
    assert (one.subject, one.severity) == ("proxy (sent upstream) m", WARN)
    assert told(one)["lost_s"] == pytest.approx(2.1, abs=0.01)
    assert 240 <= seconds(one)[0] <= 305


@pytest.mark.parametrize(
    "changes",
    [
        {"ttft": lambda t: 0.6},  # 0.4 s
        {"ttft": lambda t: 3.0, "engine": lambda t: 2.2},  # the engine itself takes longer
        {"ttft": lambda t: 2.3, "model": "another"},  # served elsewhere
        {"ttft": lambda t: 2.3, "model": ""},  # not known
        {"ttft": lambda t: 2.3, "per_s": 2, "e2e": 70.0},  # first tokens of another minute
    ],
)
def test_time_that_the_engine_takes_is_not_lost_on_the_way(changes):
    assert find(traffic(**changes), "slow_upstream") == []


def test_an_engine_that_recovers_from_a_queue_is_not_slow_upstream():
    """Answers are logged when they end: those with slow first tokens still come in when the engine is quick again."""

    def slow(t):
        return 8.0 if 200 <= t < 320 else 0.2

    session = Session()
    for n in range(1400):
        start = n / 2 + 0.013
        session.add(
            "request", start + slow(start) + 25, source="proxy", start="sent upstream", model="m", outcome="ok",
            ttft_ns=slow(start) * NS, e2e_ns=(slow(start) + 25) * NS,
        )  # fmt: skip
    for t in range(1, 700):
        first = [n / 2 + 0.013 for n in range(1400) if t - 1 < n / 2 + 0.013 + slow(n / 2 + 0.013) <= t]
        session.add("engine", t, engine="e", model="m", ttft_n=len(first), ttft_sum_s=sum(map(slow, first)))
    assert find(session, "slow_upstream") == []


# -- rules that told of what is no fault


def test_prompts_between_decode_steps_are_no_fallback():
    """Long prompts add plain launches and slow the steps a little; graphs go on being replayed."""
    session = CudaSession()
    for t in range(1, 121):
        busy = t >= 60
        session.stream(t, graph_launches=30 if busy else 50, launches=9000 if busy else 700)
    assert session.find("graph_fallback") == []
    fallen = CudaSession()
    for t in range(1, 121):
        fallen.stream(t, graph_launches=12 if t >= 60 else 50, launches=9000 if t >= 60 else 700)
    assert len(fallen.find("graph_fallback")) == 1


def light(busy_pct):
    """A few requests a minute: each second 12 steps with a wait of 12 ms each; the GPU idles otherwise."""
    session = CudaSession()
    for t in range(1, 121):
        session.gpu([t], busy_pct)
        for k in range(12):
            session.stall(
                t - 0.9 + 0.07 * k,
                "wait",
                dur_ns=12 * MS,
                code=0,
                reason="waiting for the GPU",
                call="cuEventSynchronize",
            )
    return session


def test_decode_steps_of_a_server_with_little_to_do_are_no_stalls():
    assert light(18).find("stalled_thread") == []
    (one,) = light(0.5).find("stalled_thread")  # 5 ms of kernels in a second do not explain a wait of 12 ms
    assert one.subject.endswith("waiting for the GPU")


def test_a_long_wait_in_a_second_that_was_busy_for_as_long_is_explained():
    """The prompt that ends an idle second."""
    for busy_pct, expected in ((45, []), (20, [CRIT])):
        session = CudaSession()
        for t in range(1, 61):
            session.gpu([t], busy_pct if t % 3 == 0 else 0)
            if t % 3 == 0:
                session.stall(
                    t - 0.2,
                    "wait",
                    dur_ns=400 * MS,
                    code=0,
                    reason="waiting for the GPU",
                    call="cuStreamSynchronize",
                )
        assert [one.severity for one in session.find("stalled_thread")] == expected


def test_throughput_that_is_all_that_was_asked_for_is_no_knee():
    """The load scatters around 10 by chance, nobody waits, and the engine gives what is asked for."""
    rng = np.random.default_rng(1)
    load = np.clip(rng.normal(10, 3, 600), 1, None).round()
    rate = np.minimum(load, 9) * 55 * (1 + 0.02 * rng.normal(size=600))
    scene = Scene(Session().view(), T0, T0 + 600 * NS)
    for waiting, now, expected in ((0, 10.0, False), (2, 10.0, True), (0, 40.0, True)):
        found, why = fit(load, np.zeros(600), rate, now=(now, waiting, 500.0))
        assert why == ""
        assert found.past_knee
        assert _is_pressed(scene, [None, found]).tolist() == [False, expected]
