"""What is said of recordings that are empty, cut or damaged, and to pipes and disks that take no more."""

import asyncio
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from fake_upstream import FakeUpstream, Script

from opusmon.cli.watch import headless
from opusmon.clock import NS, ManualClock
from opusmon.recording import Recorder, Recording
from opusmon.schema import StringTable

DATA = Path(__file__).parents[1] / "data"
HOG = DATA / "drill" / "bandwidth_hog.opusmon"
ENVIRON = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
"""Python as users start it: what is printed waits in a buffer, and may meet the full disk only at the end."""


def opusmon(*words, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "opusmon", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        env=ENVIRON,
        **kwargs,
    )


def shell(script, *words):
    """Run a bash script in which `$@` is opusmon with these words; its exit status is the script's own affair."""
    argv = [sys.executable, "-m", "opusmon", *map(str, words)]
    return subprocess.run(
        ["bash", "-c", script, "bash", *argv], capture_output=True, text=True, timeout=60, env=ENVIRON
    )


VERBS = [["info", HOG], ["dump", HOG, "--channel", "status"], ["triage", HOG], ["themes"], ["--help"]]


@pytest.mark.parametrize("words", VERBS)
def test_a_full_disk_under_stdout_is_one_line_and_an_error(words):
    done = shell('"$@" > /dev/full', *words)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["opusmon: cannot write to stdout: no space left on device"]


@pytest.mark.parametrize("words", VERBS)
def test_a_stdout_that_is_closed_is_one_line_and_an_error(words):
    done = shell('"$@" >&-', *words)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["opusmon: cannot write to stdout: bad file descriptor"]


def test_a_picture_that_finds_no_room_is_named():
    done = opusmon("demo", "--screenshot", "/dev/full")
    assert (done.returncode, done.stderr) == (1, "opusmon: cannot write /dev/full: no space left on device\n")


@pytest.mark.parametrize(("words", "status"), [(VERBS[0], 0), (VERBS[2], 3), (VERBS[4], 0)])
def test_a_pipe_nobody_reads_is_quiet_and_leaves_the_status(words, status):
    done = shell('"$@" | (exec <&-; sleep 3); echo "${PIPESTATUS[0]}"', *words)
    assert (done.stdout, done.stderr) == (f"{status}\n", "")


def test_an_error_without_a_stderr_is_not_written_among_the_data(tmp_path):
    done = shell('"$@" 2>&-', "dump", tmp_path / "none", "--channel", "gpu")
    assert (done.returncode, done.stdout) == (1, "")


def test_a_recorder_without_standard_streams_records(tmp_path):
    path = tmp_path / "r.opusmon"
    done = shell('"$@" <&- >&- 2>&-', "record", "-o", path, "--only", "host", "--duration", "1500ms")
    assert done.returncode == 0
    with Recording.open(path) as recording:
        assert recording.finished
        assert len(recording.query("host", recording.t0 - 1, recording.t1))


@pytest.fixture
def unwritten(tmp_path):
    """The file alone of a recording whose rows are all in its WAL, as `cp FILE` takes it."""
    path = tmp_path / "live.opusmon"
    recorder = Recorder(path, strings=StringTable(), clock=ManualClock(NS, NS))
    copy = tmp_path / "copy.opusmon"
    shutil.copy(path, copy)
    recorder.close()
    return copy


@pytest.mark.parametrize(
    "words", [["triage"], ["explain", "--from", "1", "--to", "9"], ["dump", "--channel", "gpu"]]
)
def test_a_copy_without_rows_is_not_said_to_be_without_faults(words, unwritten):
    done = opusmon(words[0], unwritten, *words[1:])
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "holds no rows" in line
    assert "-wal" in line
    assert ".backup" in line


def test_info_of_a_copy_without_rows_has_no_times(unwritten):
    text = opusmon("info", unwritten).stdout
    assert "time      no rows" in text
    assert "copied while it was written" in text
    assert "1970" not in text
    facts = json.loads(opusmon("info", unwritten, "--json").stdout)
    assert (facts["start"], facts["end"]) == (None, None)


@pytest.mark.parametrize("words", [["triage"], ["dump", "--channel", "gpu"]])
def test_a_range_that_ends_before_it_begins_is_refused(words):
    done = opusmon(words[0], HOG, *words[1:], "--from", "30s", "--to", "20s")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--from 30s lies after --to 20s" in done.stderr


def test_a_time_that_is_empty_is_not_taken_for_none():
    done = opusmon("dump", HOG, "--channel", "gpu", "--to", "")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'' is not a time" in done.stderr


@pytest.fixture
def damaged(tmp_path):
    """A recording in which one chunk of the gpu channel, of two rows, cannot be decoded."""
    path = tmp_path / "d.opusmon"
    shutil.copy(HOG, path)
    connection = sqlite3.connect(path)
    sql = (
        "SELECT chunk.id, n FROM chunk JOIN channel ON channel.id=channel WHERE name='gpu' ORDER BY chunk.id"
    )
    number, rows = connection.execute(sql).fetchall()[5]
    connection.execute("UPDATE chunk SET data=x'00' WHERE id=?", (number,))
    connection.commit()
    connection.close()
    return path, rows


def test_a_dump_says_that_rows_are_missing(damaged):
    path, lost = damaged
    whole = opusmon("dump", HOG, "--channel", "gpu")
    assert (whole.returncode, whole.stderr) == (0, "")
    done = opusmon("dump", path, "--channel", "gpu")
    assert done.returncode == 1
    assert done.stdout.count("\n") == whole.stdout.count("\n") - lost
    assert done.stderr == f"opusmon: 1 damaged chunk of {path} left out: rows are missing here\n"


def test_triage_says_that_rows_are_missing_and_nothing_found_is_no_all_clear(damaged):
    path, _ = damaged
    done = opusmon("triage", path)
    assert done.returncode == 3
    assert "1 damaged chunk" in done.stderr
    done = opusmon("triage", path, "--fail-on", "critical")
    assert done.returncode == 1
    assert opusmon("triage", HOG, "--fail-on", "critical").returncode == 0


def test_info_looks_into_every_chunk(damaged):
    path, _ = damaged
    done = opusmon("info", path)
    assert done.returncode == 1
    assert "damaged   1 chunk could not be read: `opusmon salvage` makes a copy of the rest" in done.stdout
    assert json.loads(opusmon("info", "--json", path).stdout)["damaged_chunks"] == 1
    whole = opusmon("info", "--json", HOG)
    assert (whole.returncode, json.loads(whole.stdout)["damaged_chunks"], whole.stderr) == (0, 0, "")


def test_explain_says_that_rows_are_missing(damaged):
    path, _ = damaged
    done = opusmon("explain", path, "--from", "20s", "--to", "40s", "--before", "0s", "20s")
    assert done.returncode == 1
    assert "1 damaged chunk" in done.stderr


@pytest.mark.parametrize(
    "words", [["record", "--proxy"], ["proxy", "--upstream"], ["record", "--only", "proxy", "--proxy"]]
)
def test_a_password_in_an_address_goes_no_further(words, tmp_path):
    done = opusmon(*words, "http://me:hunter2@127.0.0.1:9", "-o", tmp_path / "r.opusmon")
    assert done.returncode == 2
    assert "password" in done.stderr
    assert "hunter2" not in done.stderr
    assert list(tmp_path.iterdir()) == []


async def test_the_proxy_forwards_what_it_is_told_to(tmp_path):
    async with FakeUpstream() as upstream:
        upstream.on("/rank/one", Script.json({"ok": True}))
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        words = ["--upstream", upstream.url, "--listen", f"127.0.0.1:{port}", "--allow", "/rank/*"]
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "opusmon", "proxy", *words, "-o", tmp_path / "p.opusmon", env=ENVIRON
        )
        try:
            async with asyncio.timeout(50):
                assert await answered(f"http://127.0.0.1:{port}/rank/one") == 200
            assert await answered(f"http://127.0.0.1:{port}/other") == 404
        finally:
            child.send_signal(signal.SIGTERM)
            assert await child.wait() == 0
        assert [seen.target for seen in upstream.seen] == ["/rank/one"]


async def answered(url):
    """The status of the answer, once somebody listens there."""
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url) as response:
                    return response.status
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.1)


def test_a_recorder_says_when_it_records_again(monkeypatch, capsys):
    states = iter(["", "disk full", "disk full", "", ""])

    class Session:
        warning = ""
        recording = None
        source = SimpleNamespace(lost=dict)

        def close(self):
            pass

    async def record(session, duration_s, report):
        for error in states:
            session.recording = SimpleNamespace(error=error, path="f", size_b=0)
            report()

    monkeypatch.setattr("opusmon.session.record", record)
    assert headless(Session(), None) == 0
    assert capsys.readouterr().err.splitlines()[:2] == ["opusmon: disk full", "opusmon: recording again"]
