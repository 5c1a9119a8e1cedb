"""The command line as a user meets it: real processes, real files, a stub NVML."""

import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from needs import needs
from nvml_stub import Stub
from sessions import h200x2

from opusmon.recording import Recording


def opusmon(*words, env=None, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "opusmon", *map(str, words)],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
        **kwargs,
    )


@pytest.fixture
def host(tmp_path):
    """Environment of a host with two H200s whose load is known."""
    needs("gcc")
    stub = Stub(tmp_path).build()
    stub.configure(devices=2)
    return {
        **stub.env(),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """A short recording made by `opusmon record`."""
    needs("gcc")
    folder = tmp_path_factory.mktemp("session")
    stub = Stub(folder).build()
    stub.configure(devices=2)
    done = opusmon(
        "record", "-o", folder / "s.opusmon", "--duration", "3500ms", "--interval", "500ms", env=stub.env()
    )
    assert done.returncode == 0, done.stderr
    return folder / "s.opusmon"


def one_line(done, status=1):
    assert done.returncode == status, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_help_and_version_say_what_there_is():
    text = opusmon("--help").stdout
    for verb in ("live", "record", "replay", "demo", "info", "dump", "salvage", "doctor", "themes"):
        assert f"  {verb}" in text
    assert "exit status" in text
    assert opusmon("--version").stdout.startswith("opusmon 0.")
    for verb in ("live", "record", "replay", "demo", "info", "dump", "salvage", "doctor", "stream", "themes"):
        assert opusmon(verb, "--help").returncode == 0


def test_a_recording_is_one_private_file_with_the_rows(session):
    assert [path.name for path in session.parent.glob("s.opusmon*")] == ["s.opusmon"]
    assert stat.S_IMODE(session.stat().st_mode) == 0o600
    with Recording.open(session) as recording:
        rows = recording.query("gpu", recording.t0 - 1, recording.t1)
        assert set(rows["gpu"].tolist()) == {0, 1}
        assert len(rows) >= 8
        assert set(rows["mem_total_b"].tolist()) == {150_754_820_096.0}
        collectors = {
            recording.strings.text(row["collector"]) for row in recording.query("status", 0, recording.t1)
        }
        assert {"engine", "host", "proxy", "l2"} <= collectors


def test_info_says_what_is_in_it(session):
    text = opusmon("info", session).stdout
    assert "gpu" in text
    assert "NVIDIA H200" in text
    facts = json.loads(opusmon("info", session, "--json").stdout)
    assert {"gpu", "nvlink", "status"} <= set(facts["channels"])


def test_dump_writes_nulls_for_what_is_missing(session):
    done = opusmon("dump", session, "--channel", "gpu", "--format", "ndjson")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows[0]["mem_total_b"] == 150_754_820_096
    assert rows[0]["time"].startswith("20")
    assert all(row["gpu"] in (0, 1) for row in rows)
    csv = opusmon("dump", session, "--channel", "nvlink", "--format", "csv").stdout.splitlines()
    assert csv[0].split(",")[:4] == ["t", "time", "gpu", "link"]
    assert len(csv) > 36


def test_dump_takes_times(session):
    everything = opusmon("dump", session, "--channel", "gpu").stdout.count("\n")
    later = opusmon("dump", session, "--channel", "gpu", "--from", "-1s").stdout.count("\n")
    assert 1 < later < everything


def test_a_dump_into_a_closed_pipe_is_quiet(session):
    command = f"{sys.executable} -m opusmon dump {session} --channel nvlink | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


@pytest.mark.parametrize("verb", ["replay", "info", "dump", "salvage"])
def test_bad_files_are_one_line(verb, session, tmp_path):
    options = {
        "dump": ["--channel", "gpu"],
        "salvage": ["-o", tmp_path / "out"],
        "replay": ["--screenshot", tmp_path / "x.svg"],
    }
    whole = session.read_bytes()
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as db:
        db.execute("create table chunk(a)")
    db.close()
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("not a recording" * 1000)
    (tmp_path / "cut").write_bytes(whole[:2000])
    for name in ("missing", "empty", "text", "foreign.db", "cut", "."):
        line = one_line(opusmon(verb, tmp_path / name, *options.get(verb, [])))
        assert line.startswith("opusmon: ")


def test_unknown_channel_and_time_outside(session):
    assert "it has gpu, gpu_device" in one_line(opusmon("dump", session, "--channel", "gpus"))
    assert one_line(opusmon("dump", session, "--channel", "gpu", "--from", "03:12:00"), 2)
    assert one_line(opusmon("dump", session, "--channel", "gpu", "--from", "tomorrow-ish"), 2)
    assert one_line(opusmon("replay", session, "--at", "-5h", "--screenshot", "/dev/null"), 2)


def test_a_newer_recording_is_read_as_far_as_it_goes(session, tmp_path):
    newer = tmp_path / "newer.opusmon"
    newer.write_bytes(session.read_bytes())
    with sqlite3.connect(newer) as db:
        db.execute("pragma user_version = 99")
        db.execute("create table holograms(id)")
    db.close()
    done = opusmon("info", newer)
    assert done.returncode == 0
    assert "newer" in done.stderr


def test_a_truncated_copy_is_salvaged(tmp_path):
    cut = tmp_path / "cut.opusmon"
    whole_bytes = h200x2().read_bytes()
    cut.write_bytes(whole_bytes[: int(len(whole_bytes) * 0.7)])
    assert "salvage" in one_line(opusmon("info", cut))
    done = opusmon("salvage", cut, "-o", tmp_path / "saved.opusmon")
    assert done.returncode == 0, done.stderr
    with Recording.open(tmp_path / "saved.opusmon") as saved, Recording.open(h200x2()) as whole:
        rows, original = saved.query("gpu", 0, saved.t1), whole.query("gpu", 0, whole.t1)
        assert len(rows) > len(original) // 2
        assert np.isin(rows["t"], original["t"]).all()


def test_nothing_to_watch_is_one_line_with_a_way_on(tmp_path):
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "LD_LIBRARY_PATH": ""}
    line = one_line(opusmon("record", "--only", "gpu", "--duration", "1s", env=env))
    assert "opusmon doctor" in line
    assert list(tmp_path.rglob("*.opusmon")) == []


def test_a_screen_needs_a_terminal(session):
    assert "terminal" in one_line(opusmon("replay", session, stdin=subprocess.DEVNULL))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_recorder_that_is_told_to_stop_leaves_one_whole_file(host, tmp_path, number):
    path = tmp_path / "s.opusmon"
    recorder = subprocess.Popen(
        [sys.executable, "-m", "opusmon", "record", "-o", str(path)],
        env=host,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_rows(path)
    recorder.send_signal(number)
    assert recorder.wait(20) == 0, recorder.stderr.read()
    recorder.stderr.close()
    assert [found.name for found in tmp_path.glob("s.opusmon*")] == ["s.opusmon"]
    with Recording.open(path) as recording:
        assert recording.finished


def test_under_nohup_a_lost_connection_does_not_end_a_recorder(host, tmp_path):
    path = tmp_path / "s.opusmon"
    argv = ["nohup", sys.executable, "-m", "opusmon", "record", "--only", "gpu", "-o", str(path)]
    recorder = subprocess.Popen(argv, env=host, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_rows(path)
    recorder.send_signal(signal.SIGHUP)
    wait_for_rows(path, rows_s(path) + 2)
    recorder.terminate()
    assert recorder.wait(20) == 0


def rows_s(path):
    """Length of a recording so far."""
    with Recording.open(path) as recording:
        return (recording.t1 - recording.t0) / 1e9


def test_a_recorder_that_is_killed_loses_a_second_at_most(host, tmp_path):
    path = tmp_path / "s.opusmon"
    recorder = subprocess.Popen(
        [sys.executable, "-m", "opusmon", "record", "-o", str(path)], env=host, stderr=subprocess.DEVNULL
    )
    wait_for_rows(path, 2)
    killed_t = time.monotonic_ns()
    recorder.kill()
    recorder.wait()
    with Recording.open(path) as recording:
        assert not recording.finished
        assert killed_t - recording.t1 < 2_500_000_000


def wait_for_rows(path, seconds=0.0):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists():
            try:
                with Recording.open(path) as recording:
                    if (
                        "gpu" in recording.channels
                        and recording.t1 - recording.t0 >= seconds * 1e9
                        and recording.t1
                    ):
                        return
            except Exception:  # it is being made
                pass
        time.sleep(0.05)
    raise AssertionError("nothing was recorded")


def test_screenshots_need_no_terminal(session, tmp_path):
    for size in ("160x50", "80x24", "240x70", "1x1"):
        out = tmp_path / f"{size}.svg"
        done = opusmon("replay", session, "--at", "-1s", "--screenshot", out, "--size", size)
        assert done.returncode == 0, done.stderr
        assert out.read_text().startswith("<svg")
    assert "H200" in (tmp_path / "160x50.svg").read_text()
    assert one_line(opusmon("replay", session, "--screenshot", tmp_path / "x.svg", "--size", "huge"), 2)


def test_themes_are_listed_and_their_folder_is_told(host):
    assert "okabe-ito" in opusmon("themes", env=host).stdout.split()
    assert opusmon("themes", "--dir", env=host).stdout.strip() == f"{host['XDG_CONFIG_HOME']}/opusmon/themes"


def test_a_driver_that_does_not_answer_ends_a_recorder_with_the_reason(tmp_path):
    """Library and kernel module of different versions: nothing else runs here, so there is nothing to wait for."""
    needs("gcc")
    stub = Stub(tmp_path).build()
    stub.fault("nvmlInitWithFlags", "return 18")
    env = {**stub.env(), "XDG_STATE_HOME": str(tmp_path)}
    done = opusmon("record", "--only", "gpu", "-o", tmp_path / "s.opusmon", "--duration", "20s", env=env)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "version" in done.stderr.splitlines()[-1]
    assert list(tmp_path.glob("s.opusmon*")) == []  # once it is mended, the same command works


def test_only_the_processes_asked_for_are_recorded(tmp_path):
    needs("gcc")
    stub = Stub(tmp_path).build()
    stub.add(f"proc 0 {os.getpid()} 5000000000 50 c", f"proc 0 {os.getppid()} 6000000000 50 c")
    path = tmp_path / "s.opusmon"
    done = opusmon("record", "-o", path, "--duration", "3s", "--pid", os.getpid(), env=stub.env())
    assert done.returncode == 0, done.stderr
    with Recording.open(path) as recording:
        assert set(recording.query("gpu_process", 0, recording.t1)["pid"].tolist()) == {os.getpid()}


def test_nothing_of_the_current_folder_is_run(host, tmp_path):
    """`sudo opusmon` in a folder that somebody else can write to."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("queue", "socket", "numpy", "opusmon"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    script = Path(sys.executable).with_name("opusmon")
    words = [script, "record", "-o", tmp_path / "s.opusmon", "--duration", "4s"]
    done = subprocess.run(words, cwd=here, env=host, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
    with Recording.open(tmp_path / "s.opusmon") as recording:
        assert len(recording.query("gpu", 0, recording.t1))


@pytest.mark.parametrize("verb", ["live", "demo"])
def test_limits_of_the_config_folder_are_those_of_the_screen(host, tmp_path, verb):
    folder = tmp_path / "config" / "opusmon"
    folder.mkdir(parents=True)
    (folder / "triage.toml").write_text("hbm_bw_pcts = 98\n")
    done = opusmon(verb, "--screenshot", tmp_path / "x.svg", env=host)
    assert f"{folder}/triage.toml: there is no limit 'hbm_bw_pcts'" in one_line(done)
    assert [*tmp_path.rglob("*.svg"), *tmp_path.rglob("*.opusmon")] == []


@pytest.mark.parametrize(
    "words",
    [["--interval", "50ms"], ["--interval", "90s"], ["--retain-size", "1e999"], ["--retain-size", "0"],
     ["--only", "bogus"], ["--retain", "soon"], ["--span", "wide"]],
)  # fmt: skip
def test_arguments_that_cannot_be_used_are_one_line(host, words):
    verb = ["live", "--screenshot", "/dev/null"] if words[0] == "--span" else ["record", "--duration", "1s"]
    done = opusmon(*verb, *words, env=host)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert words[1].lstrip("-") in done.stderr
