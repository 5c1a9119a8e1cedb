"""Which collectors run, and what is said of the others."""

import pytest

from opusmon import collectors
from opusmon.collectors.base import Unavailable
from opusmon.session import NothingToWatch, plan


@pytest.fixture
def able(monkeypatch):
    """A host on which the named collectors could run."""
    can = {"gpu", "streams"}
    monkeypatch.setattr(
        collectors,
        "probe",
        lambda name: None if name in can else Unavailable(f"{name} lacks something", f"get {name}"),
    )
    return can


def test_a_collector_with_a_price_runs_only_when_named(able):
    usual = plan()
    assert usual.runnable == ("gpu",)
    assert usual.absent["streams"].remedy.startswith("opusmon --only gpu,streams")
    assert usual.absent["stalls"].reason == "stalls lacks something"
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
    with pytest.raises(
        NothingToWatch, match="no collector is named 'gpus'; there is gpu, streams, latency, stalls"
    ):
        plan(["gpus"])
