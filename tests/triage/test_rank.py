"""The order in which findings are told: by cause, onset, share of time and severity."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opusmon.clock import NS, Anchor, Anchors
from opusmon.triage import rank as ranking
from opusmon.triage import report, run
from opusmon.triage.finding import Finding
from opusmon.triage.rank import CLASSES, LEAST_SHARE, can_lead_to, causes, depth, rank
from opusmon.triage.severity import CRIT, NOTE, WARN


def found(rule, t0_s, t1_s, severity=WARN, subject="", still=False):
    return Finding(rule, subject, severity, t0_s * NS, t1_s * NS, rule, (), "c", "n", open=still)


def rules(findings):
    return [one.rule for one in rank(findings)]


def test_every_rule_has_a_place_and_only_rules_have():
    placed = [rule for kind in CLASSES.values() for rule in kind.rules]
    assert len(placed) == len(set(placed))
    assert set(placed) - {"stalled_on_others"} == set(run.rules())
    assert {rule for kind in CLASSES.values() for rule in kind.lasts} <= set(placed)


def test_causes_lead_down_only():
    names = list(CLASSES)
    for name, kind in CLASSES.items():
        assert all(names.index(other) > names.index(name) for other in kind.leads_to), name
    for cause in run.rules():
        for effect in run.rules():
            if can_lead_to(cause, effect):
                assert depth(cause) < depth(effect)
                assert not can_lead_to(effect, cause)


def test_the_cause_comes_before_what_is_worse_and_follows_from_it():
    burn, stall = (
        found("slo_burn_fast", 310, 600, CRIT),
        found("stalled_thread", 302, 600, CRIT, "p: preempted"),
    )
    assert rules([burn, stall, found("process_starved", 303, 600), found("cpu_saturated", 301, 600)]) == [
        *("cpu_saturated", "process_starved", "stalled_thread", "slo_burn_fast"),
    ]


def test_what_began_after_its_effect_is_no_cause():
    burn = found("slo_burn_fast", 300, 600, CRIT)
    assert rules([burn, found("gpu_contended", 360, 600)]) == [
        "gpu_contended",
        "slo_burn_fast",
    ]  # dated back: a minute
    assert rules([burn, found("gpu_contended", 361, 600)]) == ["slo_burn_fast", "gpu_contended"]


@pytest.mark.parametrize(("until_s", "is_cause"), [(303, False), (355, True), (352, True), (346, False)])
def test_a_cause_covers_a_third_of_its_effect(until_s, is_cause):
    """From 300 to 600 s; 50 s and as long again after it are a third."""
    burn = found("slo_burn_fast", 300, 600, CRIT)
    first = rules([burn, found("storage_waits", 300, until_s)])[0]
    assert first == ("storage_waits" if is_cause else "slo_burn_fast")
    assert pytest.approx(1 / 3) == LEAST_SHARE


def test_what_an_event_leaves_behind_lasts():
    slow = found("slo_burn_fast", 330, 900, CRIT)
    assert causes([found("capture_aborted", 300, 300, CRIT), slow]) == [None, 0]
    assert causes([found("jit_while_serving", 300, 300, CRIT), slow]) == [None, None]
    assert causes([found("jit_while_serving", 300, 900, CRIT), slow]) == [None, 0]


def test_of_two_causes_the_one_that_began_last_is_taken():
    """HBM was full since ever; what changed is the cache."""
    full, cache = found("hbm_nearly_full", 0, 900), found("kv_pressure", 500, 900)
    burn = found("slo_burn_fast", 510, 900, CRIT)
    assert causes([full, cache, burn])[2] == 1
    assert rules([full, cache, burn])[0] == "kv_pressure"
    assert causes([full, burn]) == [None, None]
    assert causes([found("hbm_nearly_full", 210, 900), burn]) == [None, 0]
    assert causes([found("hbm_filling", 0, 900), burn]) == [None, 0]  # what grows ends in something


def test_notes_come_last_and_explain_nothing():
    notes = [found("throttled", 0, 900, NOTE), found("latency_knee", 0, 900, NOTE)]
    burn = found("slo_burn_fast", 300, 900, CRIT)
    assert rules([*notes, burn]) == ["slo_burn_fast", "throttled", "latency_knee"]


def test_a_thread_that_waits_for_another_is_no_cause_of_an_idle_gpu():
    idle = found("gpu_idle_requests_wait", 303, 600)
    assert (
        rules([found("stalled_thread", 290, 600, CRIT, "vllm 1: lock"), idle])[0] == "gpu_idle_requests_wait"
    )
    assert rules([found("stalled_thread", 290, 600, CRIT, "vllm 1: preempted"), idle])[0] == "stalled_thread"


def test_a_gpu_does_not_make_the_network_slow():
    slow = found("slow_upstream", 300, 600)
    assert (
        rules([found("throttled", 299, 600), slow, found("slo_burn_fast", 301, 600, CRIT)])[-1] != "throttled"
    )
    assert causes([found("throttled", 299, 600), slow]) == [None, None]
    assert causes([found("process_starved", 299, 600), slow]) == [None, 0]


def test_the_same_on_two_gpus_is_told_together():
    both = [found("gpu_contended", 300, 600, subject=f"gpu {gpu} NVLink") for gpu in (0, 1)]
    assert rules([found("slo_burn_fast", 310, 600, CRIT), *both]) == [
        "gpu_contended",
        "gpu_contended",
        "slo_burn_fast",
    ]


def test_unknown_rules_are_told_by_severity():
    assert rules([found("new_rule", 0, 9), found("slo_burn_fast", 0, 9)]) == ["slo_burn_fast", "new_rule"]
    assert rules([found("new_rule", 0, 9, CRIT), found("slo_burn_fast", 0, 9)]) == [
        "new_rule",
        "slo_burn_fast",
    ]


FINDINGS = st.lists(
    st.builds(
        lambda rule, t0, length, severity, subject, still: found(
            rule, t0, t0 + length, severity, subject, still
        ),
        st.sampled_from([*sorted(run.rules()), "new_rule"]),
        st.integers(0, 700),
        st.integers(0, 500),
        st.sampled_from([NOTE, WARN, CRIT]),
        st.sampled_from(["a", "b", "p: lock"]),
        st.booleans(),
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(FINDINGS, st.randoms(use_true_random=False))
def test_the_order_holds_all_of_them_and_is_that_of_any_order_given(findings, rng):
    ordered = rank(findings)
    assert sorted(map(repr, ordered)) == sorted(map(repr, findings))
    again = list(findings)
    rng.shuffle(again)
    assert list(map(repr, rank(again))) == list(map(repr, ordered))
    loud = [one for one in findings if one.severity > NOTE]
    if loud:
        assert ordered[0].severity > NOTE
        worst = max(one.severity for one in loud)
        assert ordered[0].severity == worst or any(
            place is not None and ordered[0].severity > NOTE for place in causes(sorted(loud, key=repr))
        )


def test_a_night_in_which_everything_is_wrong_is_ordered_soon():
    """2000 findings are the most that are kept; pairs of them would be millions."""
    names = sorted(run.rules())
    many = [
        found(names[n % len(names)], 13 * n, 13 * n + 200, WARN + n % 2, f"s{n % 5}") for n in range(2000)
    ]
    begun = time.process_time()
    assert len(rank(many)) == 2000
    assert time.process_time() - begun < 5  # 0.2 s here


def test_reports_are_in_this_order_and_json_in_that_of_time():
    findings = [found("slo_burn_fast", 280, 600, CRIT), found("gpu_contended", 300, 600)]
    anchors = Anchors([Anchor(0, 1_700_000_000 * NS)])
    text = report.as_text(findings, anchors)
    assert text.index("gpu_contended") < text.index("slo_burn_fast")
    markdown = report.as_markdown(findings, anchors, "f")
    assert markdown.index("contended") < markdown.index("slo")
    told = report.document(findings, anchors, "f")["findings"]
    assert [(one["rule"], one["rank"]) for one in told] == [("slo_burn_fast", 2), ("gpu_contended", 1)]


def test_a_place_in_the_table_is_no_accident():
    assert (
        ranking.name_of(found("stalled_thread", 0, 1, subject="vllm 1: waiting for a child"))
        == "stalled_on_others"
    )
    assert (
        ranking.name_of(found("stalled_thread", 0, 1, subject="vllm: lock 1: preempted")) == "stalled_thread"
    )
