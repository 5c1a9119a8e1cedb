"""`opusmon check` as a user meets it: exit status, errors, marks in a recording."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sessions import DATA

from opusmon import cli
from opusmon.checks.banks import ACCESSES, ELEMENTS, SWIZZLES, WIDTHS_B
from opusmon.checks.kv_rules import BUILDS, MASKS
from opusmon.checks.kv_tensor import LAYOUTS
from opusmon.cli import check
from opusmon.recording import Recording

TARGETS = Path(__file__).parents[1] / "checks" / "targets"
DUMP_FREE = [
    "check",
    "kv-layout",
    "--tile",
    "32x64",
    "--elem",
    "bf16",
    "--swizzle",
    "128B",
    "--access",
    "row",
]


def ran(capfd, *words):
    status = cli.main([str(word) for word in words])
    out, err = capfd.readouterr()
    return status, out, err


def test_no_check_named_is_a_usage_error(capfd):
    with pytest.raises(SystemExit) as ended:
        cli.main(["check"])
    assert ended.value.code == 2
    assert "CHECK" in capfd.readouterr().err


def test_the_help_names_every_check(capfd):
    with pytest.raises(SystemExit):
        cli.main(["check", "--help"])
    out = capfd.readouterr().out
    assert all(name in out for name in ("graph", "compile", "kv-layout", "triton", "init"))
    assert "1 could not run, 2 usage, 3 problems" in out


def test_what_can_be_chosen_is_what_the_checks_know():
    """The command line names it itself, so that the checks are not loaded to print a help."""
    parser = argparse.ArgumentParser()
    check.arguments(parser)
    checks = next(one for one in parser._actions if isinstance(one, argparse._SubParsersAction)).choices
    given = {one.dest: one.choices for one in checks["kv-layout"]._actions if one.choices}
    assert given == {
        "layout": LAYOUTS,
        "build": BUILDS,
        "mask": MASKS,
        "elem": tuple(ELEMENTS),
        "swizzle": tuple(SWIZZLES),
        "access": ACCESSES,
        "width": WIDTHS_B,
    }


def test_a_bucket_that_is_none_is_one_line(capfd):
    status, out, err = ran(capfd, "check", "graph", "a.py:f", "--bucket", "batch")
    assert (status, out) == (2, "")
    assert err == "opusmon: 'batch' is no bucket: write name=value,value\n"


@pytest.mark.parametrize("dtype", ["float9", "torch.float16", ""])
def test_a_dtype_that_is_none_is_one_line(capfd, dtype):
    status, out, err = ran(capfd, "check", "kv-layout", "kv.pt", "--dtype", dtype)
    assert (status, out) == (2, "")
    assert err.startswith(f"opusmon: --dtype {dtype!r} is not known: it is one of bfloat16, bool, ")
    assert "float8_e4m3fn" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("width", ["0", "3", "32", "x"])
def test_a_width_that_no_lane_loads_is_a_usage_error(capfd, width):
    with pytest.raises(SystemExit) as ended:
        cli.main([*DUMP_FREE, "--width", width])
    assert ended.value.code == 2
    assert "--width" in capfd.readouterr().err


def test_nothing_to_check_names_no_target(capfd):
    status, out, _ = ran(capfd, "check", "kv-layout")
    assert status == 1
    assert out.startswith("check kv-layout: could not run: nothing to look at")


@pytest.mark.parametrize("before", [True, False])
def test_a_traceback_is_shown_with_debug_wherever_it_stands(capfd, before):
    words = ["graph", f"{TARGETS}/plain.py:broken"]
    _, _, err = ran(capfd, "check", *(["--debug", *words] if before else [*words, "--debug"]))
    assert "Traceback" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--mark-at", "5s"), "--mark-at says where in a recording: name it with --mark FILE"),
        (("--mark-at", "-5s"), "--mark-at says where in a recording: name it with --mark FILE"),
        (("--time-limit", "0"), "--time-limit 0: it must be more than nothing"),
        (("--time-limit", "soon"), "--time-limit: 'soon' is not a duration"),
    ],
)
def test_a_time_that_makes_no_sense_is_one_line(capfd, words, said):
    status, out, err = ran(capfd, "check", "graph", "a.py:f", *words)
    assert (status, out) == (2, "")
    assert err.startswith(f"opusmon: {said}")
    assert err.count("\n") == 1


def test_code_that_is_checked_has_its_own_threads(capfd, monkeypatch):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    assert ran(capfd, *DUMP_FREE)[0] == 0
    assert "OPENBLAS_NUM_THREADS" not in os.environ


def test_a_target_that_is_not_there_could_not_run(capfd):
    status, out, _ = ran(capfd, "check", "graph", "/nowhere/a.py:f")
    assert status == 1
    assert out.startswith("check graph /nowhere/a.py:f: could not run: there is no file /nowhere/a.py\n")


def test_findings_are_added_to_a_recording_as_marks(capfd, tmp_path):
    path = tmp_path / "night.opusmon"
    shutil.copy(DATA / "h200-streams.opusmon", path)
    status, out, err = ran(
        capfd, "check", "graph", "/nowhere/a.py:f", "--json", "--mark", path, "--mark-at", "5s"
    )
    assert (status, json.loads(out)["error"]) == (1, "there is no file /nowhere/a.py")
    assert err.endswith(f"opusmon: 1 mark added to {path}\n")
    with Recording.open(path) as recording:
        (mark,) = [one for one in recording.marks() if one.kind == "check"]
        assert mark.t0 == recording.t0 + 5_000_000_000
    assert mark.text == "check graph /nowhere/a.py:f: could not run: there is no file /nowhere/a.py"


def test_each_problem_is_a_mark_with_its_line(capfd, tmp_path):
    path = tmp_path / "night.opusmon"
    shutil.copy(DATA / "h200-streams.opusmon", path)
    status, _, _ = ran(capfd, "check", "graph", f"{TARGETS / 'graph_plain.py'}:item", "--mark", path)
    assert status == 3
    with Recording.open(path) as recording:
        marks = [one for one in recording.marks() if one.kind == "check"]
        assert {one.t0 for one in marks} == {recording.t1}
    assert marks[0].text.startswith("check graph ")
    assert any("graph_plain.py:" in one.text for one in marks[1:])


def test_a_recording_that_is_not_there_is_told_before_anything_runs(capfd, tmp_path):
    status, out, err = ran(capfd, "check", "graph", "/nowhere/a.py:f", "--mark", tmp_path / "none.opusmon")
    assert (status, out) == (1, "")
    assert "none.opusmon" in err


def test_clean_is_zero(capfd):
    status, out, _ = ran(capfd, *DUMP_FREE)
    assert status == 0, out
    assert out.startswith("check kv-layout")


def test_without_a_stdout_it_is_said_that_there_is_no_report():
    command = 'exec "$0" -m opusmon check kv-layout --tile 32x64 --elem bf16 --swizzle 128B --access row >&-'
    done = subprocess.run(["/bin/sh", "-c", command, sys.executable], capture_output=True, check=False)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert done.stderr.startswith(b"opusmon: ")
