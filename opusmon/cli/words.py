"""What the words of a command line mean, and how it fails."""

from __future__ import annotations

import argparse
import os
import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from opusmon.text import counted, reason_of

if TYPE_CHECKING:
    from opusmon.recording import Recording

OK, ERROR, USAGE, FINDINGS = 0, 1, 2, 3


class CliError(Exception):
    """One line for the person at the terminal."""


class UsageError(CliError):
    """A word of the command line cannot be used, whatever the host or the file has."""


def say(text: str, wait_s: float = 1.0) -> None:
    """A line for the person at the terminal, on stderr; nothing where that takes none within a time.

    A terminal that hangs must not hold up what records, nor its end.
    """
    try:
        takes = select.select([], [sys.stderr], [], wait_s)[1]
    except (OSError, ValueError):  # it has no descriptor that can be asked
        takes = [sys.stderr]
    if takes:
        print(f"opusmon: {text}", file=sys.stderr, flush=True)


def progress(done: int, total: int) -> None:
    """How much of a long work is done, on a terminal; wiped out at the end."""
    if sys.stderr.isatty():
        text = f"\r{100 * done // total:3d} %" if done < total else "\r     \r"
        print(text, end="", file=sys.stderr, flush=True)


def write_private(path: Path, text: str) -> None:
    """A picture shows host and process names: it is for its owner, as the recording is.

    Raises:
        CliError: it cannot be written.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(file, "w", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise CliError(f"cannot write {path}: {reason_of(error)}") from error


def open_recording(path: Path, *, through: bool = False) -> Recording:
    """Open a file, as `Recording.open`; what is odd about it goes to stderr.

    Raises:
        RecordingError: it cannot be read.
    """
    from opusmon.recording import Recording

    recording = Recording.open(path, through=through)
    for warning in recording.warnings:
        print(f"opusmon: {warning}", file=sys.stderr)
    return recording


def need_rows(recording: Recording) -> None:
    """Fail for a recording without rows: that nothing is wrong in it would say nothing.

    Raises:
        CliError: it has none.
    """
    if recording.t1:
        return
    if recording.finished:
        raise CliError(f"{recording.path} holds no rows: it was closed before anything was recorded")
    raise CliError(
        f"{recording.path} holds no rows: nothing was written yet, or it was copied without its -wal file; "
        f'copy it with: sqlite3 FILE ".backup COPY"'
    )


def range_of(args: argparse.Namespace, recording: Recording) -> tuple[int, int]:
    """`--from` and `--to` as `t0 < t <= t1`, monotonic ns; all of the recording where they are missing.

    Raises:
        UsageError: the one lies behind the other.
        TimeError: one is no time, or outside the recording.
    """
    from opusmon.times import parse_time

    first, last = (
        missing
        if text is None
        else parse_time(text, anchors=recording.anchors, t0=recording.t0, t1=recording.t1)
        for text, missing in ((args.begin, recording.t0), (args.end, recording.t1))
    )
    if first > last:
        raise UsageError(
            f"--from {args.begin} lies after --to {args.end or 'the end'}: nothing is between them"
        )
    # A row at exactly the first instant is wanted, and ranges are open at their start.
    return first - 1, last


def say_damage(recording: Recording) -> bool:
    """Tell of the chunks that could not be read, if there were any; whether there were."""
    count = recording.damaged_chunks
    if count:
        chunks = counted(count, "damaged chunk")
        print(f"opusmon: {chunks} of {recording.path} left out: rows are missing here", file=sys.stderr)
    return count > 0


def need_terminal(args: argparse.Namespace) -> None:
    """Fail when there is nowhere to draw.

    Raises:
        CliError: neither a terminal nor a screenshot, or a terminal that can only print.
    """
    term = os.environ.get("TERM", "")
    if args.screenshot is None and term.lower() in ("dumb", "unknown"):
        raise CliError(
            f"nothing can be drawn with TERM={term}; set it to what the terminal is, for example TERM=xterm-256color"
        )
    # The screen is drawn on stderr, so that stdout stays free for data.
    if args.screenshot is None and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise CliError(
            "this needs a terminal; `opusmon record` runs without one, --screenshot OUT.svg draws one frame"
        )


def speed(text: str) -> float:
    """A replay speed, for argparse."""
    value = float(text)
    if not 0.01 <= value <= 1000:
        raise argparse.ArgumentTypeError("a speed lies between 0.01 and 1000")
    return value


def pid(text: str) -> int:
    """A process number, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("a process has a number from 1 on")
    return value


def duration_ns(option: str, text: str) -> int:
    """Nanoseconds of a duration that must not be nothing.

    Args:
        option: whose value it is.
        text: the value.

    Raises:
        UsageError: it is 0, or no duration.
    """
    from opusmon.times import TimeError, parse_duration

    try:
        value = parse_duration(text)
    except TimeError as error:
        raise UsageError(f"{option}: {error}") from error
    if not value:
        raise UsageError(f"{option} {text}: it must be more than nothing")
    return value


def columns_lines(text: str) -> tuple[int, int]:
    """Columns and lines of `160x50`.

    Raises:
        UsageError: it is something else.
    """
    columns, _, lines = text.lower().partition("x")
    plain = text.isascii() and columns.isdecimal() and lines.isdecimal()
    if not (plain and 0 < int(columns) <= 1000 and 0 < int(lines) <= 500):
        raise UsageError(f"--size {text}: write columns x lines, as 160x50")
    return int(columns), int(lines)


def size_b_of(option: str, text: str) -> int:
    """Bytes of `500MB`, `2GiB`, `2G` (binary, as du has it), or a plain number.

    Args:
        option: whose value it is.
        text: the value.

    Raises:
        UsageError: it is no size, or nothing.
    """
    units = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
    plain = text.strip().lower()
    binary = not plain.endswith("b") or plain.endswith("ib")
    number = plain.removesuffix("b").removesuffix("i")
    letter = number[-1:] if number[-1:].isalpha() else ""
    try:
        value = float(number.removesuffix(letter))
        scale = units[letter] if binary else 1000 ** list(units).index(letter)
        size_b = int(value * scale)
    except (KeyError, ValueError, OverflowError):
        _bad_size(option, text)
    if size_b <= 0:
        _bad_size(option, text)
    return size_b


def _bad_size(option: str, text: str) -> NoReturn:
    raise UsageError(f"{option}: {text!r} is not a size: write 500MB or 2GiB")
