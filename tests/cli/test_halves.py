"""A long recording in two processes: the same findings as in one, whatever becomes of the second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from triage.test_trail import MINUTES, filed, serving

from opusmon.cli import halves
from opusmon.recording import Recording
from opusmon.triage import run
from opusmon.triage.finding import Finding
from opusmon.triage.limits import overridden
from opusmon.window import Window

LIMITS = overridden({"run_delay_pct_warn": 4})


@pytest.fixture(scope="module")
def starved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    """A process waits for a CPU for a while in each half, and across its middle; a link early on."""
    at = (*range(300, 320), *range(1190, 1210), *range(2000, 2050))
    session = serving(
        process=lambda t: {"run_delay_pct": 10 + t / 100} if t in at else {},
        nvlink=lambda t: {"tx_bps": 22e9} if 100 <= t < 110 else {},
    )
    with filed(session, tmp_path_factory.mktemp("halves") / "starved.opusmon") as recording:
        yield recording


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two cores, and a recording that counts as long; the pieces that this process looks at."""
    looked: list[int] = []
    plain = run.gathered

    def gathered(view, t0, t1, starts, *more, **options):
        looked.extend(starts)
        return plain(view, t0, t1, starts, *more, **options)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(halves, "LEAST_PIECES", 4)
    monkeypatch.setattr(run, "gathered", gathered)
    return looked


def plain(recording: Recording) -> list[str]:
    """As text: a threshold that is missing is not equal to itself."""
    found = run.look_over(Window.over(recording), recording.t0 - 1, recording.t1, LIMITS)
    return list(map(repr, found))


def halved(recording: Recording) -> list[str]:
    return list(map(repr, halves.look_over(recording, recording.t0 - 1, recording.t1, LIMITS)))


def test_two_processes_find_what_one_finds(starved: Recording, two: list[int]) -> None:
    found = halved(starved)
    assert len(two) == MINUTES // 20  # the other half was looked at elsewhere
    two.clear()
    assert found == plain(starved)
    assert sum("process_starved" in one for one in found) == 3
    assert any("hot" in one for one in found)


def test_a_second_process_that_fails_costs_no_finding(
    starved: Recording, two: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(starved)
    start = subprocess.Popen
    here = str(Path(halves.__file__))
    said = (
        "",
        "{}x",
        "[]",
        json.dumps({"by": here, "found": {"process_starved": [{"rule": 1}]}}),
        json.dumps({"by": "/another/opusmon", "found": {"process_starved": []}}),
    )
    for code in ("raise SystemExit(1)", *(f"print({words!r})" for words in said)):
        command = [sys.executable, "-c", code]
        monkeypatch.setattr(subprocess, "Popen", partial(instead, start, command))
        two.clear()
        assert halved(starved) == expected
        assert len(two) == MINUTES // 10


def instead(start, command, _command, **options):
    """Start another command than the one asked for."""
    return start(command, **options)


def test_one_that_cannot_be_started_costs_no_finding(
    starved: Recording, two: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(Path("/nowhere/python")))
    assert halved(starved) == plain(starved)


def test_on_one_core_and_for_a_short_range_there_is_one_process(
    starved: Recording, two: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    halves.look_over(starved, starved.t0 - 1, starved.t0 + run.PIECE_NS, LIMITS)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert halved(starved) == plain(starved)


def test_findings_survive_the_way_between_processes_whole() -> None:
    from opusmon.triage.finding import Evidence

    evidence = (Evidence("a", 0.1 + 0.2, "%", 3.0, "x"), Evidence("b", "\udc80 \u2713"))
    one = Finding("r", "s", 2, -5, 2**62, "t", evidence, "c", "n", open=True, weight=-1e300)
    (back,) = halves.from_json(halves.to_json({"r": [one]}))["r"]
    assert repr(back) == repr(one)
