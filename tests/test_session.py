"""Which collectors run, what is said of the others, and how each is started."""

import asyncio
import contextlib

import pytest

from opusmon import collectors, sudo
from opusmon.clock import NS, ManualClock
from opusmon.collectors.base import Unavailable
from opusmon.session import LiveSession, NothingToWatch, plan
from opusmon.slo import parse_slo


@pytest.fixture
def able(monkeypatch):
    """A host on which the named collectors could run."""
    can = {"gpu", "streams", "proxy", "l2"}
    monkeypatch.setattr(
        collectors,
        "probe",
        lambda name: None if name in can else Unavailable(f"{name} lacks something", f"get {name}"),
    )
    return can


def test_what_can_run_runs_and_the_others_say_what_they_lack(able):
    usual = plan()
    assert usual.runnable == ("gpu", "streams")
    assert usual.absent["stalls"] == Unavailable("stalls lacks something", "get stalls")


def test_a_collector_that_must_be_told_what_to_watch_runs_only_then(able):
    assert plan().absent["proxy"].reason == "runs only when asked for"
    assert "--proxy" in plan().absent["proxy"].remedy
    assert "--deep" in plan().absent["l2"].remedy
    asked = plan((), {"proxy": {"upstream": "http://127.0.0.1:1"}, "l2": {"deep": True}, "otlp": {}})
    assert asked.runnable == ("gpu", "streams", "proxy", "l2")
    with pytest.raises(NothingToWatch, match="proxy: runs only when asked for"):
        plan(["proxy"])


def test_the_others_are_said_to_be_left_out_when_some_are_named(able):
    named = plan(["gpu", "streams"])
    assert named.runnable == ("gpu", "streams")
    assert named.absent["stalls"].reason == "not asked for: --only named gpu, streams"


def test_what_a_named_collector_lacks_is_said(able):
    able.discard("streams")
    named = plan(["gpu", "streams"])
    assert named.runnable == ("gpu",)
    assert named.absent["streams"].remedy == "get streams"


def test_nothing_that_can_run_is_one_line_with_the_reasons(able):
    able.clear()
    with pytest.raises(NothingToWatch, match=r"gpu: gpu lacks something.*opusmon doctor"):
        plan()
    with pytest.raises(NothingToWatch, match="no collector is named 'gpus'; there is gpu, streams, stalls"):
        plan(["gpus"])


def test_options_survive_the_way_to_a_child():
    said = {"urls": ["http://127.0.0.1:1/a=b", "http://127.0.0.1:2"], "discover": False}
    assert collectors.from_words("engine", collectors.to_words(said)) == said
    assert collectors.from_words("stalls", ["threshold_ns=5000000", "budget_pct=0.5"]) == {
        "threshold_ns": 5_000_000,
        "budget_pct": 0.5,
    }
    for wrong in ("nope=1", "threshold_ns", "threshold_ns=x"):
        with pytest.raises(ValueError, match=r"threshold_ns|invalid literal"):
            collectors.from_words("stalls", [wrong])


def test_every_option_is_one_that_the_constructor_takes():
    import inspect

    for name, entry in collectors.REGISTRY.items():
        taken = inspect.signature(collectors.load(name)).parameters
        assert set(entry.options) <= set(taken), name
        assert entry.needs in (*entry.options, ""), name


def test_sudo_is_for_those_that_only_lack_root(able, monkeypatch):
    able.discard("streams")
    monkeypatch.setattr(collectors, "lacks_only_root", lambda name: name == "streams")
    raised = plan((), sudo=True)
    assert raised.raised == {"streams"}
    assert raised.runnable == ("gpu", "streams")
    assert plan().raised == frozenset()


def test_root_is_all_that_is_lacking(monkeypatch):
    from opusmon.collectors import facilities

    for missing, only in (
        ({"privileges"}, True),
        ({"privileges", "tracefs"}, True),
        ({"privileges", "libbpf.so.1"}, False),
        (set(), False),
    ):
        found = [facilities.Facility(name, "missing", "") for name in missing]
        monkeypatch.setattr(facilities, "lacking", lambda needs, host, found=found: found)
        assert collectors.lacks_only_root("streams") is only


def test_the_child_behind_sudo_asks_for_nothing():
    argv = sudo.command(["python", "-m", "opusmon"])
    assert argv[0].endswith("sudo")
    assert argv[1:] == ["-n", "--", "python", "-m", "opusmon"]


async def test_objectives_are_in_every_minute_of_the_recording(able, monkeypatch):
    able.clear()
    able.add("gpu")

    class Silent:
        name = "gpu"
        channels = ()

        def __init__(self, *_, **__):
            pass

        async def batches(self):
            await asyncio.Event().wait()
            yield

    monkeypatch.setattr("opusmon.session.WorkerSource", Silent)
    slo = parse_slo("ttft_p95<800ms")
    session = LiveSession(plan(), ManualClock(5 * NS), path=None, slos=[slo])
    async with contextlib.aclosing(session.source.batches()) as batches:
        rows = (await anext(batches)).rows
    said = {session.strings.text(row["collector"]): session.strings.text(row["reason"]) for row in rows}
    assert said["slo"] == "ttft_p95<800ms"
    assert "stalls lacks something" in said["stalls"]
    session.close()
