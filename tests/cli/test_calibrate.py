"""`opusmon calibrate` as a user meets it: a real process over a stub libcuda, with root and without."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cuda_stub import Load, copy_of_library
from needs import lacking, needs
from sessions import DATA

from opusmon import cli
from opusmon.collectors import streams

Done = subprocess.CompletedProcess[str]


def calibrate(*words: object, before: tuple[str, ...] = ()) -> Done:
    argv = [*before, sys.executable, "-m", "opusmon", "calibrate", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


def problem(done: Done) -> str:
    """The one line of a run that failed, after the one that says what is done."""
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "Traceback" not in done.stderr
    *others, last = done.stderr.splitlines()
    assert len(others) <= 1
    assert last.startswith("opusmon: ")
    return last.removeprefix("opusmon: ")


def can_probe() -> None:
    needs("root", "gcc")
    if why := streams.probe():
        lacking("root", f"probes cannot be set here: {why.reason}")


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    can_probe()
    with Load(copy_of_library(tmp_path)) as it:
        yield it


@contextlib.contextmanager
def launching(load: Load) -> Iterator[None]:
    """A server that launches all the time, for as long as the block runs."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            load.do("kernel 2000 7")

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield
    finally:
        stop.set()
        worker.join()


# -- with root ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Done, Done]:
    """A server that launches, and what two runs over it at once said: as text and as JSON."""
    can_probe()
    with Load(copy_of_library(tmp_path_factory.mktemp("ran"))) as load, launching(load):
        argv = [sys.executable, "-m", "opusmon", "calibrate", "--duration", "1500ms", "--pid", str(load.pid)]
        both = [
            subprocess.Popen([*argv, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for more in ((), ("--json",))
        ]
        said = [process.communicate(timeout=60) for process in both]
        text, body = (
            subprocess.CompletedProcess(argv, process.returncode, *words)
            for process, words in zip(both, said, strict=True)
        )
        return load.pid, text, body


def test_a_threshold_is_proposed_that_triage_takes(
    ran: tuple[int, Done, Done], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pid, done, _ = ran
    assert done.returncode == 0, done.stderr
    assert done.stderr == "opusmon: timing launch calls for 1.5 s\n"
    first, second, *_ = done.stdout.splitlines()
    assert re.fullmatch(r"[\d,]+ launch calls of 1 process, timed for \d s of 2 s", first)
    assert second.startswith(f"  {pid} cuda_load  ")
    (line,) = re.findall(r"^    (launch_call_us = .*)$", done.stdout, re.MULTILINE)
    # The stub's calls take nanoseconds: what is measured is what the probes take, and a busy machine.
    assert 0.1 <= tomllib.loads(line)["launch_call_us"] < 1000
    limits = tmp_path / "limits.toml"
    limits.write_text(line)
    assert cli.main(["triage", str(DATA / "h200-streams.opusmon"), "--limits", str(limits)]) == 0
    assert capsys.readouterr().out == "nothing found\n"


def test_json_has_every_call_in_a_bin(ran: tuple[int, Done, Done]) -> None:
    pid, _, done = ran
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    (process,) = said["processes"]
    assert (process["pid"], process["name"]) == (pid, "cuda_load")
    assert sum(one["count"] for one in process["bins"]) == said["proposal"]["samples"] >= 10_000
    assert said["timed_s"] <= said["seconds"]
    assert said["seconds"] == pytest.approx(1.5, abs=0.5)
    assert said["proposal"]["toml"].startswith("launch_call_us = ")


def test_too_few_calls_propose_nothing_and_are_no_error(load: Load) -> None:
    done = calibrate("--duration", "300ms", "--pid", load.pid)
    assert done.returncode == 0
    assert "No threshold is proposed: too few launch calls" in done.stdout


def test_a_process_without_cuda_is_one_line(load: Load) -> None:
    assert f"none of the processes {os.getpid()} maps libcuda" in problem(
        calibrate("--duration", "1s", "--pid", os.getpid())
    )


def has_probes(pid: int) -> bool:
    """Whether a process holds programs or probes in the kernel."""
    with contextlib.suppress(OSError):
        held = [str(one.readlink()) for one in Path(f"/proc/{pid}/fd").iterdir()]
        return any(re.match(r"anon_inode:\[?(bpf|perf_event)", one) for one in held)
    return False


def test_ctrl_c_leaves_no_probe(load: Load) -> None:
    argv = [sys.executable, "-m", "opusmon", "calibrate", "--pid", str(load.pid)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 30
        # Its own: probes of another opusmon on this host may be on the library too.
        while not has_probes(process.pid) or not load.is_probed():
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "")
    assert err == "opusmon: timing launch calls for 30 s\n"
    while load.is_probed():
        assert time.monotonic() < deadline + 30, "the probes are still on"


# -- without -----------------------------------------------------------------------------------------------------


def nobody() -> tuple[str, ...]:
    """Words that make root an ordinary user who can search folders that are closed to others."""
    if os.geteuid() != 0:
        return ()
    if shutil.which("setpriv") is None:
        lacking("sudo", "setpriv is not installed")
    caps = ("--inh-caps", "-all,+dac_read_search", "--ambient-caps", "-all,+dac_read_search")
    return ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", *caps)


def test_without_root_it_is_one_line_that_says_how() -> None:
    line = problem(calibrate("--duration", "1s", before=nobody()))
    assert "privileges: an ordinary user, probes in the kernel need CAP_BPF, CAP_PERFMON" in line
    assert "sudo" in line


def test_a_duration_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", "--duration", "soon"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "opusmon: --duration: 'soon' is not a duration: use 10m, 90s, 1h30m, 500ms or seconds\n"
