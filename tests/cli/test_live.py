"""The screen in a real terminal over a stub NVML: what an engineer does in the first minute, and on the way out."""

import asyncio
import fcntl
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time

import aiohttp
import fake_upstream as up
import pytest
from fake_upstream import FakeUpstream, Script
from needs import needs
from nvml_stub import Stub

from opusmon.recording import Recording


class Terminal:
    """A program in a pty, and what it has written."""

    def __init__(self, argv, env, size=(160, 50)):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
            os.execvpe(argv[0], argv, env)
        self.output = b""
        self.status = None

    def read(self, seconds):
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self.fd], [], [], min(left, 0.1))[0]:
                try:
                    self.output += os.read(self.fd, 65536)
                except OSError:
                    return
                return

    def expect(self, text, limit_s=60):
        """Wait until the program has written a text, since the last one that was waited for."""
        end = time.monotonic() + limit_s
        while text.encode() not in self.output:
            assert time.monotonic() < end, f"{text!r} did not come; last: {self.output[-2000:]!r}"
            self.read(0.2)
        self.output = self.output.split(text.encode(), 1)[1]

    def send(self, keys):
        os.write(self.fd, keys.encode())

    def end(self, limit_s):
        """Exit status, after at most this long."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            self.read(0.05)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
                return self.status
        raise AssertionError(f"still running after {limit_s} s")

    def end_unread(self, limit_s):
        """The same, and nobody reads what it writes."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
                return self.status
            time.sleep(0.05)
        raise AssertionError(f"still running after {limit_s} s")

    def fill(self):
        """Have it draw all of itself, over and over, while nobody reads: some MB."""
        for n in range(300):
            fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 150 + n % 10, 0, 0))
            time.sleep(0.01)

    def close(self):
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.fixture
def stub(tmp_path):
    needs("gcc")
    return Stub(tmp_path).build().configure(devices=2)


@pytest.fixture
def start(stub, tmp_path):
    """Start opusmon in a terminal."""
    env = {**stub.env(), "TERM": "xterm-256color", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
    env["XDG_STATE_HOME"] = str(tmp_path / "state")
    running = []

    def run(*words, **kwargs):
        running.append(Terminal([sys.executable, "-m", "opusmon", *map(str, words)], env, **kwargs))
        return running[-1]

    yield run
    for terminal in running:
        terminal.close()


def test_watch_pause_step_back_bookmark_and_quit(start, tmp_path):
    terminal = start("-o", tmp_path / "s.opusmon")
    terminal.expect("140 GiB")
    terminal.expect("LIVE")
    terminal.expect("rec ")
    terminal.send("T")
    terminal.expect("PAUSED")
    terminal.send("r")
    terminal.expect("Bookmark")
    terminal.send("odd\r")
    terminal.expect("kept in the recording")
    terminal.send(" ")
    terminal.expect("LIVE")
    terminal.send("q")
    assert terminal.end(5) == 0
    assert b"\x1b[?1049l" in terminal.output
    with Recording.open(tmp_path / "s.opusmon") as recording:
        assert recording.finished
        assert [mark.text for mark in recording.marks()] == ["odd"]
        assert len(recording.query("gpu", 0, recording.t1)) >= 4


def rows_of(path):
    with Recording.open(path) as recording:
        return len(recording.query("gpu", 0, recording.t1))


def wait_for_rows(path, count, limit_s=60):
    end = time.monotonic() + limit_s
    while rows_of(path) < count:
        assert time.monotonic() < end, f"no more than {rows_of(path)} rows"
        time.sleep(0.2)


def test_a_terminal_that_hangs_holds_up_neither_the_recording_nor_the_end(start, tmp_path):
    """A line of ssh that is dead, ctrl+s: Textual by itself waits for it, and all that it runs."""
    terminal = start("--only", "gpu", "-o", tmp_path / "s.opusmon")
    terminal.expect("140 GiB")
    terminal.fill()
    wait_for_rows(tmp_path / "s.opusmon", rows_of(tmp_path / "s.opusmon") + 6)
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.end_unread(15) == 0
    with Recording.open(tmp_path / "s.opusmon") as recording:
        assert recording.finished


def test_once_a_terminal_takes_output_again_all_is_drawn_anew(start, tmp_path):
    terminal = start("--only", "gpu", "-o", tmp_path / "s.opusmon")
    terminal.expect("140 GiB")
    terminal.fill()
    terminal.send("?")
    wait_for_rows(tmp_path / "s.opusmon", rows_of(tmp_path / "s.opusmon") + 4)
    # The help was drawn once, while nothing was taken.
    terminal.expect("previous sample; while live this pauses first")
    terminal.send("\x03")
    assert terminal.end(5) == 0


@pytest.mark.parametrize("term", ["dumb", "unknown"])
@pytest.mark.parametrize("words", [[], ["demo"]])
def test_a_terminal_that_can_only_print_is_said_instead_of_a_blank_screen(words, term):
    terminal = Terminal([sys.executable, "-m", "opusmon", *words], {**os.environ, "TERM": term})
    try:
        assert terminal.end(20) == 1
        assert f"TERM={term}; set it to".encode() in terminal.output
        assert b"\x1b" not in terminal.output
    finally:
        terminal.close()


def test_the_default_file_goes_to_the_state_folder_and_its_name_is_told(start, tmp_path):
    terminal = start()
    terminal.expect("140 GiB")
    terminal.send("q")
    assert terminal.end(5) == 0
    (path,) = (tmp_path / "state" / "opusmon").glob("*.opusmon")
    assert str(path).encode() in terminal.output


def test_nothing_is_kept_when_told_so(start, tmp_path):
    terminal = start("--no-record")
    terminal.expect("140 GiB")
    terminal.send("q")
    assert terminal.end(5) == 0
    assert list(tmp_path.rglob("*.opusmon")) == []


def test_a_driver_call_that_hangs_is_said_and_does_not_delay_leaving(start, stub):
    terminal = start("--no-record")
    terminal.expect("140 GiB")
    stub.fault("*", "hang", gpu=1)
    terminal.expect("stale")
    began = time.monotonic()
    terminal.send("q")
    assert terminal.end(5) == 0
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_lost_connection_closes_the_file(start, tmp_path, number):
    terminal = start("-o", tmp_path / "s.opusmon")
    terminal.expect("rec ")
    os.kill(terminal.pid, number)
    terminal.end(8)
    with Recording.open(tmp_path / "s.opusmon") as recording:
        assert recording.finished


def test_another_terminal_follows_what_a_recorder_writes(start, tmp_path):
    path = tmp_path / "s.opusmon"
    recorder = start("record", "-o", path)
    recorder.expect("recording to")
    end = time.monotonic() + 10
    while time.monotonic() < end and not (path.exists() and path.stat().st_size > 0):
        time.sleep(0.05)
    follower = start("replay", path, "--follow")
    follower.expect("FOLLOW")
    follower.expect("140 GiB")
    follower.send(" ")
    follower.expect("PAUSED")
    follower.send("q")
    assert follower.end(5) == 0
    os.kill(recorder.pid, signal.SIGINT)
    assert recorder.end(8) == 0


def test_a_full_disk_is_said_and_the_screen_goes_on(start, tmp_path):
    needs("root", "tmpfs")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=True)
    try:
        terminal = start("-o", disk / "s.opusmon")
        terminal.expect("rec 4 s")  # the first rows have been flushed by then, on a busy machine too
        with (disk / "ballast").open("wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(b"x" * 4096)
            except OSError:
                pass
        terminal.expect("disk full")
        terminal.expect("LIVE")
        terminal.send("q")
        assert terminal.end(8) == 0
        (disk / "ballast").unlink()
        with Recording.open(disk / "s.opusmon") as recording:
            assert len(recording.query("gpu", 0, recording.t1)) >= 2
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_text_from_outside_reaches_the_terminal_as_plain_text(start, stub):
    """A process may call itself anything: escapes and markup are neither obeyed nor interpreted."""
    code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'\\x1b[31m[b]EV\\x07L'); print('up', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        stub.add(f"proc 0 {process.pid} 1000000000 50 c")
        terminal = start("--no-record")
        terminal.send("p")
        terminal.expect("[b]EV")
        assert terminal.output.startswith(b"?L")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("way", ["q", signal.SIGTERM])
async def test_leaving_keeps_the_requests_that_ended_just_before_and_those_in_flight(start, tmp_path, way):
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    async with FakeUpstream() as upstream, aiohttp.ClientSession() as client:
        upstream.on("/v1/messages", Script(up.STREAM))
        upstream.on("/v1/responses", Script(up.RESPONSES_STREAM[:2], end="hang"))
        words = ("--proxy", upstream.url, "--proxy-listen", url.removeprefix("http://"), "--only", "proxy")
        terminal = start(*words, "-o", tmp_path / "s.opusmon")
        await asyncio.to_thread(terminal.expect, "forwards")
        hanging = await client.post(f"{url}/v1/responses", json={"stream": True})
        await hanging.content.readuntil(b"one")
        for _ in range(3):
            async with client.post(f"{url}/v1/messages", json={"stream": True}) as answer:
                assert await answer.read() == b"".join(up.STREAM)
        terminal.send("q") if way == "q" else os.kill(terminal.pid, way)
        await asyncio.to_thread(terminal.end, 5)
    with Recording.open(tmp_path / "s.opusmon") as recording:
        assert recording.finished
        ended = recording.query("request", 0, recording.t1)["outcome"].tolist()
        assert sorted(map(recording.strings.text, ended)) == ["monitor_stopped", "ok", "ok", "ok"]
