"""`--sudo` as a user without root meets it: the eBPF workers are root, the screen is not, and nothing outlives it.

The user, and what sudo lets them do, exist in a mount namespace of each test alone: the machine's own files stay as
they are, however a test ends.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cuda_stub import Load, copy_of_library
from needs import lacking, needs

from opusmon import session, sudo
from opusmon.collectors.streams import StreamsCollector

from . import api_runs

USER, UID = "opusmon-test", 64_123
LIMIT_S = 60.0
MS = 1_000_000
WORDS = ("record", "--sudo", "--only", "streams,stalls,host", "--interval", "500ms")

# A tmpfs over sudo's time stamps, so that nothing of this user is remembered. The user may search folders that are
# closed to others (a checkout or an interpreter in somebody's home), and may do nothing else that others may not.
SCRIPT = """
set -e
mount --bind "$1/passwd" /etc/passwd
mount --bind "$1/sudoers" /etc/sudoers
mkdir -p /run/sudo && mount -t tmpfs tmpfs /run/sudo
uid="$2"
shift 2
exec setpriv --reuid "$uid" --regid "$uid" --clear-groups \
  --inh-caps -all,+dac_read_search --ambient-caps -all,+dac_read_search "$@"
"""


@pytest.fixture(scope="module", autouse=True)
def _facilities() -> None:
    needs("root", "gcc", "sudo")
    if why := StreamsCollector.probe():
        lacking("root", f"probes cannot be set here: {why.reason}")


@dataclass
class Person:
    """A user of this test's own, in a folder that is theirs.

    Attributes:
        folder: theirs, for recordings.
        etc: what they and root see of /etc.
    """

    folder: Path
    etc: Path
    running: list[Terminal] = field(default_factory=list)

    def may(self, rule: str) -> None:
        """What sudoers says of them."""
        text = f"Defaults env_reset, use_pty, !lecture, passwd_tries=1\n{rule}\n"
        (self.etc / "sudoers").write_text(text)
        (self.etc / "sudoers").chmod(0o440)

    def argv(self, *words: str) -> list[str]:
        """A command line of theirs."""
        folders = (str(self.etc), str(UID))
        return ["unshare", "--mount", "sh", "-c", SCRIPT, "sh", *folders, *words]

    def env(self) -> dict[str, str]:
        home = {"HOME": str(self.folder), "XDG_STATE_HOME": str(self.folder), "USER": USER}
        kept = {name: value for name, value in os.environ.items() if name in ("PATH", "OPUSMON_BPF")}
        return {**kept, **home, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}

    def terminal(self, *words: str) -> Terminal:
        """opusmon in a terminal."""
        argv = self.argv(sys.executable, "-P", "-m", "opusmon", *words)
        self.running.append(Terminal(argv, self.env(), self.folder))
        return self.running[-1]

    def without_terminal(self, *words: str, path: str = "") -> subprocess.CompletedProcess[str]:
        """opusmon as cron starts it, to its end."""
        return subprocess.run(
            self.argv(
                *(["env", f"PATH={path}"] if path else []), sys.executable, "-P", "-m", "opusmon", *words
            ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self.env(),
            cwd=self.folder,
            timeout=LIMIT_S,
            start_new_session=True,
        )


class Terminal:
    """A program in a pty, and what it has written."""

    def __init__(self, argv: list[str], env: dict[str, str], folder: Path) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(argv[0], argv, env)
        self.output = b""
        self.status: int | None = None

    def until(self, ready: Callable[[], object]) -> None:
        """Read on until something is so."""
        end = time.monotonic() + LIMIT_S
        while not ready():
            assert time.monotonic() < end, f"not seen; it wrote: {self.output[-2000:]!r}"
            self._read(0.05)

    def send(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def close(self) -> None:
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    def _read(self, seconds: float) -> None:
        if select.select([self._fd], [], [], seconds)[0]:
            with contextlib.suppress(OSError):  # the other side has closed it
                self.output += os.read(self._fd, 65_536)


@pytest.fixture
def person() -> Iterator[Person]:
    """Somebody who may run this interpreter as root, and nothing else, without a password."""
    with tempfile.TemporaryDirectory(prefix="opusmon-sudo-") as name:
        place = Path(name)
        place.chmod(0o755)
        etc, folder = place / "etc", place / "home"
        etc.mkdir()
        folder.mkdir()
        os.chown(folder, UID, UID)
        entry = f"{USER}:*:{UID}:{UID}::{folder}:/bin/sh\n"
        (etc / "passwd").write_text(Path("/etc/passwd").read_text() + entry)
        it = Person(folder, etc)
        it.may(f"{USER} ALL=(root) NOPASSWD: {sys.executable}")
        yield it
        for terminal in it.running:
            terminal.close()


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    with Load(copy_of_library(tmp_path)) as it:
        yield it


# -- what can be seen from outside -------------------------------------------------------------------------------


def uids(pid: int) -> set[int]:
    """Real, effective, saved and filesystem user of a process."""
    found = re.search(r"^Uid:\s+(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return set(map(int, found[1].split()))


def family(pid: int) -> dict[int, list[str]]:
    """A process and all that descend from it, with their command lines."""
    found = {}
    with contextlib.suppress(OSError):
        found[pid] = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found |= family(int(child))
    return found


def workers(pid: int) -> dict[str, int]:
    """Collector to the process that runs it, below a process; not the sudo before it."""
    return {
        words[words.index("--only") + 1]: one
        for one, words in family(pid).items()
        if "stream" in words and not words[0].endswith("sudo")
    }


def has_probes(pid: int) -> bool:
    """Whether a process holds programs or probes in the kernel."""
    with contextlib.suppress(OSError):
        held = [str(one.readlink()) for one in Path(f"/proc/{pid}/fd").iterdir()]
        return any(re.match(r"anon_inode:\[?(bpf|perf_event)", one) for one in held)
    return False


def is_on(terminal: Terminal, load: Load) -> bool:
    """Whether the worker of a terminal's opusmon has set its probes; those of another may be on too."""
    return has_probes(workers(terminal.pid).get("streams", 0)) and load.is_probed()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def rows(path: Path, channel: str) -> list[dict[str, object]]:
    """Rows of a recording with their texts; none while it is being made."""
    try:
        return api_runs.rows(path, channel)
    except Exception:
        if path.exists() and path.stat().st_size > 100_000:
            raise
        return []


# -- it works ----------------------------------------------------------------------------------------------------


def test_the_probes_are_roots_and_the_recorder_is_not(person: Person, load: Load) -> None:
    path = person.folder / "s.opusmon"
    terminal = person.terminal(*WORDS, "-o", str(path))
    terminal.until(lambda: is_on(terminal, load))
    found = workers(terminal.pid)
    assert uids(found["streams"]) == {0}
    assert uids(terminal.pid) == {UID}  # the shell and setpriv have become the recorder

    def waits() -> float:
        seen = [one for one in rows(path, "stream") if (one["pid"], one["stream"]) == (load.pid, 9)]
        return sum(float(str(one["waits"])) for one in seen)

    # Again and again: probes of another opusmon on this host may have slowed the launches before ours were on.
    terminal.until(lambda: load.do(f"wait 3 9 {5 * MS}") and waits())
    terminal.send(b"\x03")
    terminal.until(terminal.ended)
    assert terminal.status == 0
    assert path.stat().st_uid == UID
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in person.folder.glob("s.opusmon*")] == ["s.opusmon"]
    assert rows(path, "host")
    assert b"assword" not in terminal.output
    terminal.until(lambda: not load.is_probed() and all(map(is_gone, found.values())))


def test_no_probe_is_left_when_the_recorder_is_killed(person: Person, load: Load) -> None:
    terminal = person.terminal(*WORDS, "-o", str(person.folder / "s.opusmon"))
    terminal.until(lambda: is_on(terminal, load))
    everybody = family(terminal.pid)
    assert len(everybody) >= 3  # the recorder, sudo, the worker
    os.kill(terminal.pid, signal.SIGKILL)
    terminal.until(lambda: not load.is_probed() and all(map(is_gone, everybody)))


def test_no_probe_is_left_when_the_worker_is_killed_and_it_comes_back(person: Person, load: Load) -> None:
    path = person.folder / "s.opusmon"
    terminal = person.terminal(*WORDS, "-o", str(path))
    terminal.until(lambda: is_on(terminal, load))
    first = workers(terminal.pid)["streams"]
    os.kill(first, signal.SIGKILL)
    terminal.until(lambda: workers(terminal.pid).get("streams", first) != first and is_on(terminal, load))
    told = [
        one for one in rows(path, "status") if (one["collector"], one["state"]) == ("streams", "restarting")
    ]
    assert len(told) == 1
    terminal.send(b"\x03")
    terminal.until(terminal.ended)
    terminal.until(lambda: not load.is_probed())


# -- it is refused -----------------------------------------------------------------------------------------------


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """Ours, after whatever sudo itself has said."""
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    ours = [line for line in done.stderr.splitlines() if line.startswith("opusmon: ")]
    assert len(ours) == 1
    return ours[0]


def test_a_password_that_nobody_can_type_is_one_line(person: Person) -> None:
    person.may(f"{USER} ALL=(root) {sys.executable}")
    line = one_line(person.without_terminal(*WORDS))
    assert line == "opusmon: --sudo: sudo refused; leave --sudo out to watch without the eBPF probes"
    assert list(person.folder.rglob("*.opusmon")) == []


def test_somebody_whom_sudo_does_not_know_is_one_line(person: Person) -> None:
    person.may("root ALL=(ALL:ALL) ALL")
    assert "sudo refused" in one_line(person.without_terminal(*WORDS))


def test_a_host_without_sudo_is_one_line(person: Person) -> None:
    line = one_line(person.without_terminal(*WORDS, path="/nowhere"))
    assert line == "opusmon: --sudo: there is no sudo on this host; start opusmon as root instead"


def test_ctrl_c_at_the_password_leaves_nothing(person: Person) -> None:
    person.may(f"{USER} ALL=(root) {sys.executable}")
    terminal = person.terminal(*WORDS)
    terminal.until(lambda: f"opusmon: password of {USER} for the eBPF probes: ".encode() in terminal.output)
    terminal.send(b"\x03")
    terminal.until(terminal.ended)
    assert terminal.status == 130
    assert b"Traceback" not in terminal.output
    assert list(person.folder.rglob("*.opusmon")) == []


# -- which collectors get it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["streams", "stalls"])
def test_who_lacks_only_root_gets_it(person: Person, name: str) -> None:
    code = f"from opusmon import session; print(*session.plan(['host', {name!r}], sudo=True).raised)"
    words = person.argv(sys.executable, "-P", "-c", code)
    done = subprocess.run(
        words, capture_output=True, text=True, env=person.env(), timeout=LIMIT_S, check=True
    )
    assert done.stdout.split() == [name]


# -- and is not asked for what it is not needed for ---------------------------------------------------------------


def test_sudo_is_not_asked_when_no_collector_needs_it(person: Person) -> None:
    person.may("root ALL=(ALL:ALL) ALL")
    done = person.without_terminal(
        "record", "--sudo", "--only", "host", "--duration", "1s", "-o", "s.opusmon"
    )
    assert done.returncode == 0, done.stderr
    assert "sudo" not in done.stderr


def test_without_it_the_remedy_is_told(person: Person) -> None:
    done = person.without_terminal("record", "--only", "streams", "--duration", "1s")
    assert "opusmon doctor" in one_line(done)


def test_root_needs_no_sudo() -> None:
    assert session.plan(["streams"], sudo=True).raised == frozenset()


def test_the_command_never_asks_again() -> None:
    words = sudo.command(["python3", "-c", "-n"])
    assert words[1:] == ["-n", "--", "python3", "-c", "-n"]
