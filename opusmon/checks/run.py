"""Starts the child process of a check, keeps to its time limit, and takes what it says."""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from opusmon.checks.result import Result, from_json
from opusmon.checks.worker import SCRATCH
from opusmon.processes import KILLED_S, signal_name

MAX_ANSWER_B = 16_000_000
"""Most bytes of a child's answer."""

_MARGIN_S = 3.0
_MARGIN = 0.05

GRACE_S = 0.5
"""What a child that has said all, or is out of time, gets to end by itself."""

MIN_PYTHON = (3, 10)
"""Oldest interpreter that runs the child."""

_PARENT = str(Path(__file__).resolve().parents[2])
_BOOT = (
    "import sys\n"
    f"if sys.version_info < {MIN_PYTHON}: sys.exit(97)\n"
    # The working directory may hold somebody else's files beside a dump: only a target is imported from it.
    "if sys.path[0] == '': del sys.path[0]\n"
    # Last, so that the packages of the user's environment win over those that lie beside opusmon.
    "sys.path.append(sys.argv[1])\n"
    "from opusmon.checks.worker import main\n"
    "main(sys.argv[2], sys.argv[3], int(sys.argv[4]))\n"
)
_TOO_OLD = 97


LONGER = "--time-limit gives it longer"
"""What helps code that was ended at its limit."""


def deadline_s(options: Mapping[str, Any]) -> float:
    """Until when a check may wait for processes of its own, on time.monotonic.

    That is before its own limit (`limit_s` of the options), so that what was found by then can still be said.
    """
    limit_s = float(options.get("limit_s") or 300.0)
    return time.monotonic() + limit_s - min(limit_s / 2, _MARGIN_S + limit_s * _MARGIN)


def run(
    name: str,
    options: Mapping[str, Any],
    *,
    python: str = sys.executable,
    limit_s: float,
    env: Mapping[str, str] | None = None,
    own_group: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """Run a check in a child process.

    Its environment names a directory of its own (`worker.SCRATCH`), which is gone when it is, however it ends.

    Args:
        name: a key of `worker.CHECKS`.
        options: for it, JSON values; `limit_s` is added.
        python: interpreter that has torch.
        limit_s: after this long it is killed.
        env: added to the environment.
        own_group: False inside a child, so that the grandchildren die with it at its limit.
        say: told each stage that begins; inside a child its own `say`, so that the parent knows it too.

    Returns:
        Its result; one with an error when the child crashed or ran out of time, with the stage it was in.
    """
    # Inside that of the child that asks, if one does, so that it goes with it.
    with tempfile.TemporaryDirectory(
        prefix="opusmon-check-", dir=os.environ.get(SCRATCH), ignore_cleanup_errors=True
    ) as scratch:
        own = {**os.environ, **(env or {}), SCRATCH: scratch}
        limited = {**options, "limit_s": limit_s}
        try:
            return _run(name, limited, python, limit_s, own, say, own_group=own_group)
        finally:
            _end_rest(f"{SCRATCH}={scratch}".encode())


def _run(
    name: str,
    options: Mapping[str, Any],
    python: str,
    limit_s: float,
    env: Mapping[str, str],
    say: Callable[[str], None],
    *,
    own_group: bool,
) -> Result:
    target = str(options.get("target") or "")
    reading, writing = os.pipe()
    try:
        child = subprocess.Popen(
            [python, "-c", _BOOT, _PARENT, name, json.dumps(options), str(writing)],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=(writing,),
            start_new_session=own_group,
            env=env,
        )
    except OSError as error:
        os.close(reading)
        os.close(writing)
        return Result(name, target, error=f"{python} does not start: {error.strerror}")
    os.close(writing)
    try:
        said, in_time = _read(reading, time.monotonic() + limit_s, say)
    finally:
        os.close(reading)
        ended = _end(child, own_group=own_group)
    if len(said) > MAX_ANSWER_B:
        return Result(name, target, error=f"the answer is longer than {MAX_ANSWER_B:,} bytes")
    return _result(name, target, said, child.returncode, limit_s if not in_time else None, ended=ended)


def _read(pipe: int, deadline_s: float, say: Callable[[str], None]) -> tuple[bytes, bool]:
    """All that comes until the pipe closes; False when the time was up first."""
    said = bytearray()
    told = 0
    os.set_blocking(pipe, False)
    with selectors.DefaultSelector() as ready:
        ready.register(pipe, selectors.EVENT_READ)
        while (left_s := deadline_s - time.monotonic()) > 0:
            if not ready.select(left_s):
                continue
            data = os.read(pipe, 65536)
            if not data or len(said) > MAX_ANSWER_B:
                return bytes(said), True
            said += data
            told = _tell(said, told, say)
            # The pipe may live on in a process that the user's code has started.
            if said.endswith(b"\n") and said.startswith(b'{"result"', said.rfind(b"\n", 0, -1) + 1):
                return bytes(said), True
    return bytes(said), False


def _tell(said: bytearray, begin: int, say: Callable[[str], None]) -> int:
    """Pass on the stages of the lines that are whole; where the next line begins."""
    end = said.rfind(b"\n", begin) + 1
    for line in bytes(said[begin:end]).splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            say(str(json.loads(line)["stage"]))
    return max(begin, end)


def _end(child: subprocess.Popen[bytes], *, own_group: bool) -> bool:
    """Reap the child; what it has started goes with it. Whether it ended by itself."""
    # Until it is reaped its number, and that of its group, belong to nobody else.
    until_s = time.monotonic() + GRACE_S
    ended = None
    try:
        while ended is None and time.monotonic() < until_s:
            ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is None:
                time.sleep(0.002)
    finally:
        # Also when Ctrl-C comes a second time.
        if own_group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(KILLED_S)
    return ended is not None


def _end_rest(mark: bytes) -> None:
    """End what has left the child's group, as inductor's workers do: the child's folder is named in its environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        # Another user's, or gone meanwhile.
        with contextlib.suppress(OSError):
            if not _is_marked(folder, mark):
                continue
            process = os.pidfd_open(int(folder.name))
            try:
                # The number may be another process's by now; that which is held here stays the same.
                if _is_marked(folder, mark):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                    select.select([process], [], [], KILLED_S)
            finally:
                os.close(process)


def _is_marked(folder: Path, mark: bytes) -> bool:
    entries = (folder / "environ").read_bytes().split(b"\0")
    return any(entry == mark or entry.startswith(mark + b"/") for entry in entries)


def _result(
    name: str, target: str, said: bytes, status: int | None, limit_s: float | None, *, ended: bool = True
) -> Result:
    stage = ""
    for line in said.splitlines():
        try:
            document = json.loads(line)
            if "result" in document:
                return from_json(document["result"])
            stage = str(document["stage"])
        except (ValueError, KeyError, TypeError):
            continue
    during = f" during: {stage}" if stage else ""
    if limit_s is not None:
        why = f"still running after {limit_s:.4g} s{during}"
        return Result(name, target, error=why, remedy=LONGER)
    if status == _TOO_OLD:
        return Result(name, target, error=f"the interpreter is older than {'.'.join(map(str, MIN_PYTHON))}")
    if status is None:
        why = f"the checked code does not end though it was killed{during}"
        return Result(name, target, error=why, remedy="a driver holds it: see the kernel's log")
    if not ended:
        return Result(name, target, error=f"the checked code closed the way to its answer{during}")
    how = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
    if not stage:
        why = f"the interpreter {how} before the check began"
        return Result(name, target, error=why, remedy="--python PATH names a Python that has torch")
    return Result(name, target, error=f"the checked code {how}{during}")
