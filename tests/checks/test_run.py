"""The child process: what becomes of code that crashes, hangs, has no torch, or says a lot."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from opusmon.checks import run as running
from opusmon.checks import worker
from opusmon.checks.result import Fact, Missing, Problem, Result, Table, from_json, to_json
from opusmon.checks.run import run

PLAIN = Path(__file__).parent / "targets" / "plain.py"


def graph(name, **more):
    """A check that calls the target before anything else."""
    return run("graph", {"target": f"{PLAIN}:{name}", "buckets": {}}, **{"limit_s": 60.0, **more})


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """An interpreter that has no packages."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


def test_without_torch_the_command_that_installs_it_is_named(bare_python):
    result = graph("pair", python=bare_python)
    assert result.error == "torch is not installed here"
    assert result.remedy.startswith("pip install 'opusmon[torch]'")


@pytest.mark.parametrize(
    ("name", "words"),
    [("crashes", "was killed by SIGSEGV during: "), ("exits", "ended with status 7 during: ")],
)
def test_code_that_ends_the_process_is_named_by_its_stage(name, words):
    result = graph(name)
    assert words in result.error
    assert len(result.error) > len(words) + 10


@pytest.fixture
def pids(tmp_path, monkeypatch):
    """Where code that hangs names itself and what it has started."""
    path = tmp_path / "pids"
    monkeypatch.setenv("PLAIN_PIDS", str(path))
    return path


def wait_until(true, within_s=30.0):
    until = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


def is_gone(pid):
    """Ended, whether or not somebody has taken note of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_code_that_hangs_is_ended_at_the_limit_with_all_that_it_started(capfd, pids):
    began = time.monotonic()
    result = graph("hangs", limit_s=8.0)
    assert 8.0 <= time.monotonic() - began < 20
    started = pids.read_text(encoding="ascii").split()
    assert len(started) == 3
    wait_until(lambda: all(map(is_gone, started)))
    assert result.error.startswith("still running after 8 s during: ")
    assert result.remedy == "--time-limit gives it longer"
    out, err = capfd.readouterr()
    assert (out, "said on stdout" in err) == ("", True)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_when_the_command_is_ended_the_child_does_not_live_on(pids, tmp_path, how):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "opusmon", "check", "graph", f"{PLAIN}:hangs"]
    with (tmp_path / "err").open("w") as err:
        parent = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(scratch)}, stderr=err)
    wait_until(lambda: pids.exists() and pids.read_text(encoding="ascii").endswith("\n"))
    child, *helpers = pids.read_text(encoding="ascii").split()
    parent.send_signal(how)
    status = parent.wait(30)
    wait_until(lambda: is_gone(child))
    if how == signal.SIGKILL:
        # Nobody is left to end what the code has started, or to clear up.
        for helper in helpers:
            os.kill(int(helper), signal.SIGKILL)
        return
    wait_until(lambda: all(map(is_gone, helpers)))
    assert status == 128 + how
    assert "Traceback" not in (tmp_path / "err").read_text()
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(("limit_s", "left_s"), [(300.0, 282.0), (60.0, 54.0), (4.0, 2.0), (None, 282.0)])
def test_a_check_stops_early_enough_to_say_what_it_found(monkeypatch, limit_s, left_s):
    monkeypatch.setattr(running.time, "monotonic", lambda: 1000.0)
    assert running.deadline_s({"limit_s": limit_s}) == pytest.approx(1000.0 + left_s)


def test_a_check_is_told_its_limit(tmp_path):
    script = """
from opusmon.checks.result import Result, to_json
with os.fdopen(pipe, "w") as out:
    out.write(json.dumps({"result": to_json(Result("graph", basis=sys.argv[-2]))}) + "\\n")
"""
    assert said(tmp_path, script).basis == '{"limit_s": 30.0}'


def test_a_child_that_the_driver_does_not_let_go_is_not_waited_for(monkeypatch):
    class Held(subprocess.Popen):
        """As in an uninterruptible wait: a kill has no effect for now."""

        def kill(self):
            pass

    monkeypatch.setattr(running, "KILLED_S", 0.2)
    child = Held(["sleep", "60"])
    try:
        began = time.monotonic()
        running._end(child, own_group=False)
        assert time.monotonic() - began < 10
        result = running._result("graph", "a.py:f", b'{"stage": "loading"}\n', child.returncode, None)
        assert result.error == "the checked code does not end though it was killed during: loading"
    finally:
        subprocess.Popen.kill(child)
        child.wait()


def test_a_second_interrupt_does_not_leave_the_child(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    monkeypatch.setattr(running.os, "waitid", interrupted)
    with pytest.raises(KeyboardInterrupt):
        running._end(child, own_group=True)
    assert child.returncode == -signal.SIGKILL


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path):
    assert "was killed by signal 35" in said(tmp_path, "os.kill(os.getpid(), 35)").error


def test_what_the_users_code_raises_is_told_with_its_line():
    result = graph("broken")
    assert result.error.startswith("KeyError: 'missing' at ")
    assert 'return {}["missing"]  # raises' in result.error


def test_code_that_leaves_the_process_is_told_with_its_line_not_with_the_signal_that_ended_it():
    result = graph("leaves")
    assert result.error.startswith("the code ends the process, sys.exit: no licence at ")
    assert result.error.endswith('raise SystemExit("no licence")  # leaves')


def test_code_that_closes_the_pipe_is_not_said_to_be_killed_by_the_signal_that_ends_it():
    assert graph("closes").error.startswith("the checked code closed the way to its answer during: ")


def test_a_child_that_is_out_of_time_says_nothing_more(capfd):
    assert graph("pair", limit_s=0.05).error.startswith("still running after 0.05 s")
    assert "Traceback" not in capfd.readouterr().err


def test_the_traceback_is_shown_when_it_is_asked_for(capfd):
    options = {"target": f"{PLAIN}:broken", "buckets": {}}
    run("graph", options, limit_s=60.0)
    assert "Traceback" not in capfd.readouterr().err
    run("graph", {**options, "debug": True}, limit_s=60.0)
    assert 'return {}["missing"]  # raises' in capfd.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("Torch not compiled with CUDA enabled"),
        # A stream, with torch 2.11 for CUDA 13.0 on an H200 host where CUDA_VISIBLE_DEVICES is empty.
        RuntimeError(
            "CUDA error: no CUDA-capable device is detected\nSearch for `cudaErrorNoDevice' in https://x"
        ),
        RuntimeError("No CUDA GPUs are available"),
    ],
)
def test_code_that_wants_a_gpu_is_told_to_whatever_check_it_is_given(monkeypatch, error):
    def check(options, say):
        raise error

    monkeypatch.setitem(sys.modules, "a_check", SimpleNamespace(check=check))
    monkeypatch.setitem(worker.CHECKS, "compile", "a_check")
    result = worker.run("compile", {"target": None}, lambda stage: None)
    assert (result.target, result.remedy) == ("", worker.NEEDS_GPU)


@pytest.mark.parametrize("name", ["graph", "compile"])
def test_the_caches_of_the_users_programs_are_left_alone(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    result = run(name, {"target": f"{PLAIN}:caches", "buckets": {}}, limit_s=60.0)
    words = result.error.partition(" at ")[0].removeprefix("ValueError: ").split()
    assert len(words) == 2
    assert all("opusmon-check-" in word for word in words)


def test_what_is_no_python_is_told_with_its_line(tmp_path):
    (tmp_path / "wrong.py").write_text("import os\ndef step(:\n")
    result = run("graph", {"target": f"{tmp_path}/wrong.py:step", "buckets": {}}, limit_s=60.0)
    assert result.error.startswith("SyntaxError: ")
    assert result.error.endswith(f"{tmp_path}/wrong.py:2: def step(:")


def test_nothing_beside_a_dump_is_run(tmp_path, monkeypatch):
    """Files of the working directory that are named like modules: a dump may have come with them."""
    monkeypatch.chdir(tmp_path)
    for name in ("json", "dataclasses", "torch", "opusmon"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()\n", encoding="ascii")
    (tmp_path / "kv.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    assert (
        run("kv-layout", {"target": "kv.safetensors"}, limit_s=60.0).error
        == "kv.safetensors holds no tensors"
    )
    assert not (tmp_path / "ran").exists()


def test_an_interpreter_that_is_not_there():
    assert "does not start" in graph("pair", python="/nowhere/python").error


def test_an_interpreter_that_is_too_old(tmp_path):
    old = tmp_path / "python"
    old.write_text(f"#!/bin/sh\nexit {running._TOO_OLD}\n", encoding="utf-8")
    old.chmod(0o755)
    assert graph("pair", python=str(old)).error == "the interpreter is older than 3.10"


def said(tmp_path, script):
    """What is made of a child that writes to its pipe whatever it likes."""
    child = tmp_path / "python"
    child.write_text(
        f"#!{sys.executable}\nimport os, sys, json\npipe = int(sys.argv[-1])\n{script}\n", encoding="utf-8"
    )
    child.chmod(0o755)
    return run("graph", {}, python=str(child), limit_s=30.0)


def test_an_answer_longer_than_the_pipe_holds_ends_the_wait_though_the_pipe_stays_open(tmp_path):
    """A process that the code has started holds the pipe: the answer counts, not its end."""
    script = """
from opusmon.checks.result import Missing, Result, to_json
if os.fork() == 0:
    import time
    time.sleep(600)
answer = Result("graph", not_measured=[Missing("x" * 100, "y")] * 3000)
with os.fdopen(pipe, "w") as out:
    out.write(json.dumps({"stage": "begins"}) + "\\n" + json.dumps({"result": to_json(answer)}) + "\\n")
"""
    began = time.monotonic()
    result = said(tmp_path, script)
    assert (result.error, len(result.not_measured)) == ("", 3000)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("program", ["/bin/true", "/bin/false"])
def test_an_interpreter_that_is_none_is_told_from_code_that_ends(program):
    result = graph("pair", python=program)
    status = 0 if program == "/bin/true" else 1
    assert result.error == f"the interpreter ended with status {status} before the check began"
    assert "--python" in result.remedy


def test_an_answer_that_is_none_is_an_error(tmp_path):
    assert (
        "ended with status 0"
        in said(tmp_path, 'os.write(pipe, b\'{"result": {"check": 3}}\\nnonsense\\n\')').error
    )
    assert "ended with status 0" in said(tmp_path, "pass").error


def test_a_child_that_never_stops_writing_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "MAX_ANSWER_B", 1_000_000)
    result = said(tmp_path, "while True: os.write(pipe, b'x' * 65536)")
    assert result.error == "the answer is longer than 1,000,000 bytes"


def test_no_scratch_folder_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(running.tempfile, "tempdir", None)
    graph("exits")
    assert list(tmp_path.iterdir()) == []


def test_a_result_survives_the_way():
    result = Result(
        "graph",
        "a.py:f",
        "measured",
        [Problem("item", "reads", "a.py:3", "x.item()", "900", "keep it", facts={"count": 3})],
        [Fact("replay_ms", 0.5, "replay 0.5 ms")],
        [Table("times", ("name", "ms"), (("a", 1.5), ("b", None)))],
        [Missing("bank conflicts", "no GPU")],
    )
    assert from_json(to_json(result)) == result
    assert not result.clean
    assert Result("graph", problems=[Problem("x", "y", level="note")]).clean


def test_what_is_no_number_is_null():
    document = to_json(Result("graph", facts=[Fact("a", float("nan"), ""), Fact("b", float("inf"), "")]))
    assert [fact["value"] for fact in document["facts"]] == [None, None]
