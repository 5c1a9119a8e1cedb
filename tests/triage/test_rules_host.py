"""The host: CPUs, memory, storage, control groups and processes that wait."""

import pytest
from triage.session import GIB, NAN, Session, find, seconds, threshold, told

from opusmon.clock import NS
from opusmon.triage.limits import LIMITS, overridden
from opusmon.triage.severity import CRIT, HOST_LIMITS, WARN

CALM = {
    "cpus": 16,
    "cpu_busy_pct": 60.0,
    "runnable": 5,
    "psi_cpu_some_pct": 2.0,
    "psi_memory_some_pct": 0.0,
    "psi_memory_full_pct": 0.0,
    "psi_io_some_pct": 1.0,
    "cpu_iowait_pct": 1.0,
    "cpu_steal_pct": 0.0,
    "swap_in_bps": 0.0,
    "swap_out_bps": 0.0,
    "direct_reclaim_pages_per_s": 0.0,
    "oom_kills": 0,
    "mem_available_b": 100 * GIB,
}


def host(n, changes, between=(70, 90)):
    """A calm host but for a range."""
    session = Session()
    session.each_second("host", n, lambda t: {**CALM, **(changes if between[0] <= t <= between[1] else {})})
    return session


CASES = [
    (
        "cpu_saturated",
        {"psi_cpu_some_pct": 15.0, "cpu_busy_pct": 50.0},
        WARN,
        "some task waits for a CPU 15 % of the time",
    ),
    (
        "cpu_saturated",
        {"psi_cpu_some_pct": 40.0, "runnable": 30, "cpu_busy_pct": NAN},
        CRIT,
        "some task waits for a CPU 40 %",
    ),
    ("cpu_saturated", {"runnable": 24}, WARN, "1.5 tasks per CPU"),
    ("cpu_saturated", {"runnable": 48, "psi_cpu_some_pct": NAN}, CRIT, "3.0 tasks per CPU"),
    ("memory_pressure", {"psi_memory_some_pct": 7.0}, WARN, "some task waits for memory 7 %"),
    (
        "memory_pressure",
        {"psi_memory_full_pct": 10.0, "psi_memory_some_pct": 12},
        CRIT,
        "all tasks wait for memory 10 %",
    ),
    ("memory_pressure", {"direct_reclaim_pages_per_s": 5_000}, WARN, "threads free 5000 pages/s themselves"),
    ("memory_pressure", {"swap_in_bps": 30e6, "swap_out_bps": 30e6}, CRIT, "60.0 MB/s to and from swap"),
    ("storage_waits", {"psi_io_some_pct": 20.0}, WARN, "some task waits 20 % of the time"),
    ("storage_waits", {"cpu_iowait_pct": 60.0}, CRIT, "CPUs idle for it 60 % of the time"),
    ("cpu_stolen", {"cpu_steal_pct": 3.5}, WARN, "3.5 % of the CPU time"),
]


def test_pressure_on_an_idle_host_is_that_of_a_few_cpus(monkeypatch):
    """Measured: four busy loops on two of 32 CPUs, 95 % pressure, 6 % busy."""
    assert find(monkeypatch, host(200, {"psi_cpu_some_pct": 95.2, "cpu_busy_pct": 6.4})) == []
    assert len(find(monkeypatch, host(200, {"psi_cpu_some_pct": 95.2, "cpu_busy_pct": 50.0}))) == 1


@pytest.mark.parametrize(
    ("rule", "changes", "severity", "words"), CASES, ids=[f"{c[0]} {next(iter(c[1]))}" for c in CASES]
)
def test_a_figure_of_the_host_over_its_limit(monkeypatch, rule, changes, severity, words):
    (found,) = find(monkeypatch, host(200, changes))
    assert (found.rule, found.subject, found.severity, seconds(found)) == (rule, "host", severity, (70, 90))
    assert words in found.title
    name = next(name for name in told(found) if name in HOST_LIMITS or name.startswith(("psi", "direct")))
    assert threshold(found, name) == LIMITS[f"{name}_warn"].value


def test_a_calm_host_has_no_findings(monkeypatch):
    assert find(monkeypatch, host(200, {})) == []


def test_missing_figures_have_no_findings(monkeypatch):
    session = Session()
    session.each_second("host", 90, lambda _: {})
    session.each_second("cgroup", 90, lambda _: {"cgroup": "/a"})
    session.each_second("process", 90, lambda _: {"pid": 7})
    assert find(monkeypatch, session) == []


@pytest.mark.parametrize("changes", [changes for _, changes, _, _ in CASES])
def test_two_samples_are_not_enough(monkeypatch, changes):
    assert find(monkeypatch, host(120, changes, between=(70, 71))) == []


def test_just_under_the_limits_is_fine(monkeypatch):
    changes = {
        "psi_cpu_some_pct": 14.9,
        "runnable": 23,
        "psi_memory_some_pct": 6.9,
        "psi_memory_full_pct": 2.9,
        "direct_reclaim_pages_per_s": 4_999,
        "swap_in_bps": 1_000_000,
        "psi_io_some_pct": 14.9,
        "cpu_iowait_pct": 19.9,
        "cpu_steal_pct": 2.9,
    }
    assert find(monkeypatch, host(120, changes)) == []


def test_the_worst_sample_gives_the_words(monkeypatch):
    """A critical second among warnings: pressure counts more than a larger multiple of another limit."""
    session = Session()
    session.each_second(
        "host",
        200,
        lambda t: {**CALM, "psi_cpu_some_pct": 16.0 + t % 5 if t != 118 else 44.0 if t > 60 else 2.0},
    )
    (found,) = find(monkeypatch, session)
    assert (found.severity, found.title) == (
        CRIT,
        "CPUs overloaded: some task waits for a CPU 44 % of the time",
    )


# -- killed ------------------------------------------------------------------------------------------------------


def test_oom_kills_of_the_host_and_of_a_group(monkeypatch):
    session = Session()
    session.each_second("host", 150, lambda t: {**CALM, "oom_kills": 2 + (t >= 61) + (t >= 63)})
    session.each_second(
        "cgroup", 150, lambda t: {"cgroup": "/pod/vllm", "oom_kills": int(t >= 61), "mem_limit_b": 64 * GIB}
    )
    found = find(monkeypatch, session, "oom_kill")
    assert [(one.subject, one.severity, seconds(one)) for one in found] == [
        ("cgroup /pod/vllm", CRIT, (61, 61)),
        ("host", CRIT, (61, 63)),
    ]
    assert "4 since boot" in found[1].title
    assert told(found[0])["mem_limit_b"] == 64 * GIB


def test_old_kills_and_a_count_that_starts_anew_are_none(monkeypatch):
    session = Session()
    session.each_second("host", 90, lambda t: {**CALM, "oom_kills": 9 if t < 50 else 0})
    session.each_second("cgroup", 90, lambda t: {"cgroup": "/a", "oom_kills": NAN if t < 50 else 3})
    assert find(monkeypatch, session, "oom_kill") == []


# -- control groups ----------------------------------------------------------------------------------------------


def group(n, *groups):
    session = Session()
    session.each_second("cgroup", n, lambda t: [one(t) for one in groups])
    return session


def test_a_cpu_limit_that_holds_back(monkeypatch):
    session = group(
        130,
        lambda t: {
            "cgroup": "/pod/vllm",
            "throttled_pct": 12.0 + (t == 75) if 70 <= t <= 80 else 0.5,
            "cpu_quota_cores": 4,
            "cpu_cores": 3.9,
        },
    )
    (found,) = find(monkeypatch, session)
    assert (found.rule, found.subject, found.severity, seconds(found)) == (
        "cpu_quota_throttling",
        "cgroup /pod/vllm",
        CRIT,
        (70, 80),
    )
    assert found.title == "CPU limit of 4 cores holds /pod/vllm back 13 % of the time"


def test_a_limit_above_is_told_once(monkeypatch):
    held = {"throttled_pct": 5.0, "cpu_quota_cores": 4}
    session = group(
        130,
        lambda _: {"cgroup": "/pod", **held},
        lambda _: {"cgroup": "/pod/a", **held},
        lambda _: {"cgroup": "/pod/b", **held, "cpu_quota_cores": 1},
        lambda _: {"cgroup": "/podium", **held},
    )
    found = find(monkeypatch, session)
    assert sorted(one.subject for one in found) == ["cgroup /pod", "cgroup /pod/b", "cgroup /podium"]


def test_group_memory_without_what_can_be_dropped(monkeypatch):
    """64 GiB: 61 held are 95.3 %, 63.5 are 99.2 %. With a cache of 60 GiB at the limit there is room."""

    def row(t):
        return {
            "cgroup": "/pod",
            "mem_limit_b": 64 * GIB,
            "mem_used_b": 64 * GIB,
            "mem_cache_b": (60 if t < 50 else 3 if t < 100 else 0.5) * GIB,
        }

    (found,) = find(monkeypatch, group(130, row))
    assert (found.rule, found.severity, seconds(found)) == ("cgroup_memory_near_limit", CRIT, (50, 130))
    assert found.title == "Memory of /pod at 99.2 % of its limit, 0.50 GiB left"
    (warning,) = find(monkeypatch, group(90, row))
    assert (warning.severity, seconds(warning)) == (WARN, (50, 90))


def test_a_group_without_limits_is_fine(monkeypatch):
    assert (
        find(monkeypatch, group(90, lambda _: {"cgroup": "/a", "mem_used_b": 1e12, "throttled_pct": 0.0}))
        == []
    )


# -- processes ---------------------------------------------------------------------------------------------------


def starved(delay_pct=25.0, *, busy_pct=40.0, throttled_pct=0.0):
    session = Session()
    session.each_second("host", 150, lambda _: {**CALM, "cpu_busy_pct": busy_pct})
    session.each_second(
        "process",
        150,
        lambda t: {
            "pid": 1234,
            "name": "vllm",
            "cgroup": "/pod",
            "run_delay_pct": delay_pct if 70 <= t <= 90 else 0.2,
            "cpu_pct": 100.0,
            "dt_ns": NS,
        },
    )
    session.each_second("cgroup", 150, lambda _: {"cgroup": "/pod", "throttled_pct": throttled_pct})
    return session


@pytest.mark.parametrize(
    ("around", "cause"),
    [
        ({"busy_pct": 98.0}, "all CPUs are busy: likely other work on the host"),
        ({}, "CPUs are free, but not those it runs on: likely pinned beside another busy thread"),
        ({"throttled_pct": 30.0}, "likely the CPU limit of its control group"),
    ],
)
def test_a_starved_process_and_who_keeps_it_waiting(monkeypatch, around, cause):
    (found,) = find(monkeypatch, starved(**around), "process_starved")
    assert (found.subject, found.severity, seconds(found)) == ("vllm 1234", CRIT, (70, 90))
    assert (found.title, found.cause) == ("vllm 1234 waits for a CPU 25 % of the time", cause)
    assert threshold(found, "run_delay_pct") == 5


def test_a_process_that_gets_its_cpu_is_fine_on_a_busy_host(monkeypatch):
    assert find(monkeypatch, starved(4.9, busy_pct=99.0), "process_starved") == []


def test_a_limit_of_nothing_is_allowed(monkeypatch):
    limits = overridden({"psi_io_some_pct_warn": 0, "psi_io_some_pct_crit": 90})
    (found,) = find(monkeypatch, host(70, {}), "storage_waits", limits=limits)
    assert (found.severity, seconds(found)) == (WARN, (1, 70))


def test_the_limits_are_those_the_screen_colours_by():
    for name, limits in HOST_LIMITS.items():
        assert (LIMITS[f"{name}_warn"].value, LIMITS[f"{name}_crit"].value) == (limits.warn, limits.crit)
