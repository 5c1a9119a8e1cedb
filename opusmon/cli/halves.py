"""A long recording looked over by two processes: the later half by a child, where there is a second core.

The child is this module run by the same interpreter. It reads what to do from its standard input and answers on its
standard output, both JSON; an answer that does not come is no loss but of time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from opusmon.recording import Recording
from opusmon.triage import run
from opusmon.triage.finding import Evidence, Finding
from opusmon.window import Window

LEAST_PIECES = 24
"""Four hours take one process 2 s; what is shorter is not worth starting another one."""

HEAD_START = 18
"""The child has that part of all pieces less to do: it starts later, and reads some hours before its own."""

Found = dict[str, list[Finding]]

_HERE = str(Path(__file__).resolve())


def look_over(
    recording: Recording,
    t0: int,
    t1: int,
    limits: Mapping[str, float],
    progress: Callable[[int, int], None] | None = None,
) -> list[Finding]:
    """`opusmon.triage.run.look_over` of a recording; the same findings, sooner.

    Args:
        recording: what to look at.
        t0: rows after this time count, monotonic ns.
        t1: up to this one.
        limits: thresholds in force.
        progress: called with the pieces done and in all; of one half where there are two.

    Raises:
        RecordingError: it cannot be read.
    """
    starts = run.pieces(t0, t1)
    if len(starts) < LEAST_PIECES or len(os.sched_getaffinity(0)) < 2:
        return run.look_over(Window.over(recording), t0, t1, limits, progress=progress)
    middle = (len(starts) + len(starts) // HEAD_START) // 2
    first, second = starts[:middle], starts[middle:]

    def look(part: Sequence[int]) -> Found:
        return run.gathered(Window.over(recording), t0, t1, part, limits, progress=progress)

    child = _start(
        {"path": str(recording.path), "t0": t0, "t1": t1, "from": second[0], "limits": dict(limits)}
    )
    try:
        found = look(first)
        later = _answer(child) or look(second)
    finally:
        _end(child)
    return run.merged({name: [*each, *later[name]] for name, each in found.items()})


def to_json(found: Mapping[str, Iterable[Finding]]) -> str:
    """Findings by rule with all that they have."""
    plain = {name: [asdict(one) for one in each] for name, each in found.items()}
    return json.dumps({"by": _HERE, "found": plain})


def from_json(text: str | bytes) -> Found:
    """What `to_json` of this very file wrote.

    Raises:
        ValueError: it is something else, or of another installation, whose rules may be others.
        TypeError: it is something else.
    """
    body = json.loads(text)
    if not isinstance(body, dict) or body.get("by") != _HERE:
        raise ValueError("not from here")
    return {name: [_finding(**one) for one in each] for name, each in body["found"].items()}


def _finding(evidence: list[dict[str, Any]], **fields: Any) -> Finding:
    return Finding(evidence=tuple(Evidence(**one) for one in evidence), **fields)


def _start(order: Mapping[str, Any]) -> subprocess.Popen[bytes] | None:
    """The child at work; None where it cannot be started."""
    with suppress(OSError):
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what it cannot do is done here, and said here
        )
        if child.stdin is not None:
            with suppress(OSError):
                child.stdin.write(json.dumps(order).encode())
                child.stdin.close()
        return child
    return None


def _answer(child: subprocess.Popen[bytes] | None) -> Found | None:
    """What the child found; None when it failed."""
    if child is None or child.stdout is None:
        return None
    text = child.stdout.read()
    with suppress(ValueError, TypeError):
        return from_json(text) if child.wait() == 0 else None
    return None


def _end(child: subprocess.Popen[bytes] | None) -> None:
    if child is not None:
        child.kill()
        if child.stdout is not None:
            child.stdout.close()
        child.wait()


def main() -> None:
    """The child."""
    order = json.load(sys.stdin)
    t0, t1 = int(order["t0"]), int(order["t1"])
    with Recording.open(Path(order["path"]), through=True) as recording:
        starts = [start for start in run.pieces(t0, t1) if start >= order["from"]]
        found = run.gathered(Window.over(recording), t0, t1, starts, order["limits"])
        if recording.damaged_chunks:  # the parent looks itself, and so learns of them
            sys.exit(1)
    sys.stdout.write(to_json(found))


if __name__ == "__main__":
    main()
