"""`opusmon triage` as a user meets it: what it prints, and the exit status that scripts live by."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from sessions import DATA, h200x2
from triage.session import T0, Session

from opusmon import cli
from opusmon.channels import BY_NAME
from opusmon.clock import NS, ManualClock
from opusmon.recording import Recorder
from opusmon.schema import Batch
from opusmon.triage.limits import LIMITS

QUIET = DATA / "h200-streams.opusmon"
EVIL = "a|b\x1b[31m`c`\n# d"


class Ran:
    """What a run of the command line said."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def problem(self) -> str:
        """The one line of a run that failed, or whose words could not be used."""
        assert self.status in (1, 2), (self.status, self.out, self.err)
        assert self.out == "", (self.status, self.out, self.err)
        (line,) = self.err.splitlines()
        assert line.startswith("opusmon: ")
        return line.removeprefix("opusmon: ")


@pytest.fixture
def triage(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run the verb in this process, with an empty config folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def run(*words: object) -> Ran:
        capsys.readouterr()
        status = cli.main(["triage", *map(str, words)])
        return Ran(status, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """25 minutes: bandwidth at its limit from 100 to 129 s (warning), an XID at 900.5 s (critical)."""
    path = tmp_path_factory.mktemp("night") / "night.opusmon"
    session = Session()
    for t in range(1, 1501):
        session.add("gpu", t, gpu=0, gi=-1, hbm_bw_pct=97.0 if 100 <= t < 130 else 40.0)
    session.add("gpu_event", 900.5, gpu=0, gi=-1, kind="xid", code=79, detail=EVIL)
    clock = ManualClock(T0, 1_700_000_000 * NS)
    recorder = Recorder(path, strings=session.strings, clock=clock, session={"host": "h"})
    for channel, records in session._records.items():
        recorder.push(Batch(BY_NAME[channel], BY_NAME[channel].rows(records)))
    recorder.close()
    return path


def rules(ran: Ran) -> list[tuple[str, str]]:
    """Rule and severity of each finding of a run with --json."""
    return [(one["rule"], one["severity"]) for one in json.loads(ran.out)["findings"]]


BOTH = [("hbm_bandwidth_saturated", "warning"), ("xid", "critical")]


# -- what it prints ----------------------------------------------------------------------------------------------


def test_a_real_process_over_a_recording_of_two_gpus() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "opusmon", "triage", h200x2()], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout.splitlines()[0] == "2 findings: 2 notes"
    assert done.stdout.count("GPU 0 held back by the power cap: SM clock 1470 of 1980 MHz") == 1


def test_nothing_found_is_said_and_is_status_0(triage) -> None:
    done = triage(QUIET)
    assert (done.status, done.out, done.err) == (0, "nothing found\n", "")
    assert rules(triage(QUIET, "--json")) == []


def test_text_has_the_worst_first(triage, night: Path) -> None:
    done = triage(night)
    assert done.status == 3
    assert done.err == ""
    assert re.findall(r"^(!!|!|i) .*\[(\w+)\]$", done.out, re.MULTILINE) == [
        ("!!", "xid"),
        ("!", "hbm_bandwidth_saturated"),
    ]
    assert "\x1b" not in done.out


def test_json_has_times_that_replay_and_dump_understand(triage, night: Path) -> None:
    done = triage(night, "--json")
    assert done.status == 3
    body = json.loads(done.out)
    assert (body["format"], body["recording"]) == (1, "night.opusmon")
    first, second = body["findings"]
    assert (first["rule"], first["subject"], first["severity"]) == (
        "hbm_bandwidth_saturated",
        "gpu 0",
        "warning",
    )
    assert (first["t0"] - T0, first["t1"] - T0, first["open"]) == (100 * NS, 129 * NS, False)
    assert set(first) >= {
        *("rule", "subject", "severity", "t0", "t1", "time0", "time1", "open", "title"),
        *("evidence", "cause", "next"),
    }
    assert second["t0"] - T0 == round(900.5 * NS)
    assert rules(triage(night, "--json", "--from", second["time0"])) == [("xid", "critical")]


def test_markdown_is_for_a_ticket(triage, night: Path) -> None:
    done = triage(night, "--markdown")
    assert done.status == 3
    lines = done.out.splitlines()
    assert lines[0] == "## opusmon triage of night.opusmon"
    heads = [line for line in lines if line.startswith("#")]
    assert len(heads) == 3  # the name in the XID's detail made none
    assert heads[1].startswith("### !! XID 79")
    assert "\x1b" not in done.out
    assert r"a\|b?\[31m\`c\`" in done.out


# -- parts of it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ((), BOTH),
        (("--from", "10m"), BOTH[1:]),
        (("--to", "10m"), BOTH[:1]),
        (("--from", "5m", "--to", "10m"), []),
        (("--from", "-9m"), []),  # before the end: from 960 s
        (("--from", "-10m"), BOTH[1:]),  # from 900 s
        (("--from", "120s", "--to", "20m"), BOTH),  # the rest of it, 10 s, is a finding too
        (("--from", "128s"), BOTH[1:]),  # two samples are none
    ],
)
def test_from_and_to(triage, night: Path, words: tuple[str, ...], found: list[tuple[str, str]]) -> None:
    done = triage(night, "--json", *words)
    assert rules(done) == found
    assert done.status == (3 if found else 0)


def test_the_evidence_lies_within_what_was_asked_for(triage, night: Path) -> None:
    (one, _) = json.loads(triage(night, "--json", "--from", "120s").out)["findings"]
    assert (one["t0"] - T0, one["t1"] - T0) == (
        121 * NS,
        129 * NS,
    )  # 120 s after the first row, which is at 1 s
    (one,) = json.loads(triage(night, "--json", "--to", "110s").out)["findings"]
    assert (one["t1"] - T0, one["open"]) == (111 * NS, True)


@pytest.mark.parametrize(
    ("fail_on", "words", "status"),
    [
        ("note", (), 3),
        ("warning", (), 3),
        ("critical", (), 3),
        ("warning", ("--to", "10m"), 3),
        ("critical", ("--to", "10m"), 0),
        ("note", ("--from", "20m"), 0),
    ],
)
def test_fail_on(triage, night: Path, fail_on: str, words: tuple[str, ...], status: int) -> None:
    """What is found is printed all the same."""
    done = triage(night, "--fail-on", fail_on, *words)
    assert done.status == status
    assert ("nothing found" in done.out) == (words == ("--from", "20m"))


def test_notes_alone_are_no_failure_when_told_so(triage) -> None:
    done = triage(h200x2(), "--fail-on", "warning")
    assert done.status == 0
    assert done.out.startswith("2 findings")


# -- limits ------------------------------------------------------------------------------------------------------


def test_limits_of_a_file_are_those_it_uses(triage, night: Path, tmp_path: Path) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text("hbm_bw_pct = 98  # ours\n")
    assert rules(triage(night, "--json", "--limits", limits)) == BOTH[1:]
    limits.write_text("hbm_bw_pct = 96.5\n")
    (one, _) = json.loads(triage(night, "--json", "--limits", limits).out)["findings"]
    assert one["evidence"][0]["threshold"] == 96.5


def test_limits_of_the_config_folder_are_found_and_a_file_named_goes_before_them(
    triage, night: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "config" / "opusmon"
    folder.mkdir(parents=True)
    (folder / "triage.toml").write_text("hbm_bw_pct = 98\n")
    assert rules(triage(night, "--json")) == BOTH[1:]
    (tmp_path / "other.toml").write_text("")
    assert rules(triage(night, "--json", "--limits", tmp_path / "other.toml")) == BOTH


@pytest.mark.parametrize(("limit", "words"), [("95", "1&#160;finding&#160;!"), ("98", "")])
def test_limits_of_the_config_folder_are_those_of_the_screen(
    triage, night: Path, tmp_path: Path, limit: str, words: str
) -> None:
    folder = tmp_path / "config" / "opusmon"
    folder.mkdir(parents=True)
    (folder / "triage.toml").write_text(f"hbm_bw_pct = {limit}\n")
    picture = tmp_path / "x.svg"
    assert cli.main(["replay", str(night), "--at", "120s", "--screenshot", str(picture)]) == 0
    found = re.search(r"\d+&#160;findings?&#160;!+", picture.read_text())
    assert (found[0] if found else "") == words


def test_limits_help_is_a_file_of_limits(triage, night: Path, tmp_path: Path) -> None:
    import tomllib

    done = triage("--limits-help")
    assert (done.status, done.err) == (0, "")
    said = tomllib.loads(done.out)
    assert said.keys() == LIMITS.keys()
    for name, value in said.items():
        assert value == pytest.approx(LIMITS[name].value, rel=1e-5), name
    assert all("  # " in line for line in done.out.splitlines())
    (tmp_path / "limits.toml").write_text(done.out)
    assert rules(triage(night, "--json", "--limits", tmp_path / "limits.toml")) == BOTH


def test_limits_that_cannot_be_used_are_one_line(triage, night: Path, tmp_path: Path) -> None:
    place = tmp_path / "limits.toml"
    assert triage(night, "--limits", place).problem == f"{place}: no such file or directory"
    place.write_text("hbm_bw_pct = nan\n")
    assert triage(night, "--limits", place).problem == f"{place}: hbm_bw_pct must be a number (%)"


# -- what cannot be done -----------------------------------------------------------------------------------------


def test_errors_are_one_line(triage, night: Path, tmp_path: Path) -> None:
    assert triage().problem == "name the recording: opusmon triage FILE"
    (tmp_path / "text").write_text("not a recording" * 1000)
    (tmp_path / "cut").write_bytes(night.read_bytes()[:2000])
    for name in ("missing.opusmon", "text", "cut", "."):
        assert triage(tmp_path / name).problem
    assert "tomorrow-ish" in triage(night, "--from", "tomorrow-ish").problem
    assert triage(night, "--to", "9h").problem


@pytest.mark.parametrize("words", [("--fail-on", "fatal"), ("--fail-on",), ("--jsonl",)])
def test_usage_is_status_2(triage, night: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as stopped:
        triage(night, *words)
    assert stopped.value.code == 2


def test_the_recording_is_not_written_to(triage, night: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(night, tmp_path / "evidence.opusmon"))
    copy.chmod(0o400)
    before = copy.read_bytes()
    assert triage(copy).status == 3
    assert copy.read_bytes() == before
    assert [path.name for path in tmp_path.glob("evidence*")] == ["evidence.opusmon"]


def test_an_empty_recording_is_not_said_to_be_without_faults(triage, tmp_path: Path) -> None:
    path = tmp_path / "empty.opusmon"
    recorder = Recorder(path, strings=Session().strings, clock=ManualClock(T0, NS), session={})
    recorder.close()
    done = triage(path)
    assert (done.status, done.out) == (1, "")
    assert "holds no rows: it was closed before anything was recorded" in done.err


def test_channels_that_this_version_does_not_know_are_passed_over(
    triage, night: Path, tmp_path: Path
) -> None:
    newer = Path(shutil.copy(night, tmp_path / "newer.opusmon"))
    with sqlite3.connect(newer) as db:
        db.execute("pragma user_version = 99")
    db.close()
    done = triage(newer, "--json")
    assert (done.status, rules(done)) == (3, BOTH)
    assert "newer" in done.err
