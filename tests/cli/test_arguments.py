"""Words that cannot be meant are refused in a line, before there is a file or a probe."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opusmon import cli
from opusmon.clock import SystemClock
from opusmon.collectors.host import HostCollector
from opusmon.schema import StringTable

DATA = Path(__file__).parents[1] / "data" / "h200x2.opusmon"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of its own: what is recorded by default can be seen."""
    for name in ("STATE", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    return tmp_path


def problem(capsys: pytest.CaptureFixture[str], *words: object, status: int = 2) -> str:
    """The one line that a call says whose words cannot be used, or that fails with another status."""
    assert cli.main([str(word) for word in words]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.removeprefix("opusmon: ").rstrip()


def usage(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a call with status 2 says."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("verb", ["record", "live", "stream"])
def test_an_interval_that_no_collector_keeps_is_refused(capsys, verb: str) -> None:
    words = {"live": ("--screenshot", "/dev/null"), "stream": ("--only", "host")}.get(verb, ())
    assert "250ms is the shortest" in problem(capsys, verb, *words, "--interval", "249ms")
    assert "5s is the longest" in problem(capsys, verb, *words, "--interval", "5001ms")


def test_the_shortest_interval_is_kept() -> None:
    collector = HostCollector(StringTable(), SystemClock(), 250_000_000, frozenset())
    assert collector._interval_ns == 250_000_000


SCREEN = ("live", "--screenshot", "/dev/null")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("record", "--only", "host", "--duration", "soon"), "--duration: 'soon' is not a duration"),
        (("record", "--only", "host", "--duration", "0"), "--duration 0: it must be more than nothing"),
        (("proxy", "--upstream", "http://127.0.0.1:1", "--duration", "soon"), "--duration: 'soon' is not a duration"),
        (("calibrate", "--duration", "0s"), "--duration 0s: it must be more than nothing"),
        ((*SCREEN, "--span", "wide"), "--span: 'wide' is not a duration"),
        ((*SCREEN, "--span", "0"), "--span 0: it must be more than nothing"),
        ((*SCREEN, "--size", "huge"), "--size huge: write columns x lines"),
        ((*SCREEN, "--retain", "long"), "--retain: 'long' is not a duration"),
        ((*SCREEN, "--stall-threshold", "0"), "--stall-threshold 0: it must be more than nothing"),
        ((*SCREEN, "--probe-budget", "nan"), "--probe-budget nan: per cent"),
        ((*SCREEN, "--probe-budget", "0"), "--probe-budget 0: per cent"),
        ((*SCREEN, "--probe-budget=-1",), "--probe-budget -1: per cent"),
    ],
)  # fmt: skip
def test_nothing_is_recorded_for_words_that_cannot_be_meant(capsys, home, words, said: str) -> None:
    assert problem(capsys, *words).startswith(said)
    assert list(home.rglob("*.opusmon*")) == []


def test_characters_that_the_config_file_cannot_mean_are_one_line(capsys, home: Path) -> None:
    config = home / "config" / "opusmon" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('glyphs = "emoji"\n')
    said = "--glyphs emoji: choose one of auto, braille, block, ascii"
    assert problem(capsys, *SCREEN) == f"{said} (options of {config} are in force)"
    assert list(home.rglob("*.opusmon*")) == []


@pytest.mark.parametrize("number", ["0", "-1"])
def test_a_process_has_a_positive_number(capsys, number: str) -> None:
    assert "a process has a number from 1 on" in usage(capsys, "record", f"--pid={number}")


def test_what_is_no_verb_is_said_with_a_way_on(capsys) -> None:
    assert "there is no verb 'frobnicate'; opusmon --help lists them" in usage(capsys, "frobnicate")
    assert f"to look at a recording: opusmon replay {DATA}" in usage(capsys, str(DATA))


def test_an_option_of_another_verb_is_said_with_the_usage_of_this_one(capsys) -> None:
    said = usage(capsys, "info", str(DATA), "--deep")
    assert said.startswith("usage: opusmon info ")
    assert said.endswith("opusmon info: error: unrecognized arguments: --deep\n")
    assert "opusmon live: error: unrecognized arguments: --bogus" in usage(capsys, "--bogus")


def test_a_theme_that_is_not_there_is_said_with_the_picture(capsys, tmp_path: Path) -> None:
    picture = tmp_path / "x.svg"
    assert cli.main(["replay", str(DATA), "--theme", "nope", "--screenshot", str(picture)]) == 0
    assert capsys.readouterr().err == "opusmon: no theme is named 'nope'; `opusmon themes` lists them\n"
    assert picture.stat().st_size


def test_frames_are_not_written_to_a_terminal() -> None:
    ours, theirs = os.openpty()
    words = [sys.executable, "-m", "opusmon", "stream", "--only", "host"]
    done = subprocess.run(words, stdout=theirs, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=60)
    os.close(theirs)
    os.close(ours)
    assert done.returncode == 1
    assert b"send them to a pipe" in done.stderr


def test_a_state_folder_that_cannot_be_written_names_another_place(capsys, home: Path) -> None:
    (home / "state").touch()
    said = problem(capsys, "record", "--only", "host", "--duration", "1s", status=1)
    assert said.startswith(f"cannot write {home}/state/opusmon/")
    assert said.endswith("; -o FILE records elsewhere")
    said = problem(
        capsys, "record", "--only", "host", "--duration", "1s", "-o", home / "state" / "a.opusmon", status=1
    )
    assert "elsewhere" not in said
