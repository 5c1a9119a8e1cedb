"""argv -> a session and what is done with it. No logic of its own; heavy imports wait until a verb needs them."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from opusmon import __version__

if TYPE_CHECKING:
    from opusmon.recording import Recording
    from opusmon.session import LiveSession, Session
    from opusmon.ui.playhead import Playhead

OK, ERROR = 0, 1

EPILOG = """\
examples:
  opusmon                          watch this host and record
  opusmon demo                     a recorded session of two H200s; no GPU, no root, no network
  opusmon record -o night.opusmon --duration 8h
  opusmon replay night.opusmon --at 03:12
  opusmon replay --follow FILE     watch what another process records
  opusmon dump night.opusmon --channel gpu --from -10m --format csv
  opusmon doctor                   what is missing on this host and how to get it

times: 10m (after the start), -90s (before the end), 14:03, 14:03:21, 0:30, ISO 8601, epoch seconds
exit status: 0 ok, 1 error, 2 usage, 3 findings
"""


class CliError(Exception):
    """One line for the person at the terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run opusmon; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser, verbs = _parser()
    if not words or (words[0] not in verbs and words[0] not in ("-h", "--help", "--version")):
        words.insert(0, "live")
    args = parser.parse_args(_join_times(words))
    # Text ids, paths and threads never need many threads of linear algebra: one keeps memory and start small.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:
        if args.debug or not _expected(error):
            raise
        print(f"opusmon: {_printable(str(error))}", file=sys.stderr)
        return ERROR
    return status


def _printable(text: str) -> str:
    """Text that may hold names from a file, without control characters."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _write_private(path: Path, text: str) -> None:
    """A picture shows host and process names: it is for its owner, as the recording is."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
        out.write(text)


def _join_times(words: list[str]) -> list[str]:
    """Write `--from -10m` as `--from=-10m`: argparse would take the time for an option."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in ("--at", "--from", "--to") and re.match(r"-\d", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _expected(error: Exception) -> bool:
    """Whether the text of an error is meant for the user."""
    from opusmon.recording import RecordingError
    from opusmon.session import NothingToWatch
    from opusmon.times import TimeError

    return isinstance(error, CliError | RecordingError | NothingToWatch | TimeError | OSError)


def _parser() -> tuple[argparse.ArgumentParser, frozenset[str]]:
    parser = argparse.ArgumentParser(
        prog="opusmon",
        description="Terminal monitor and flight recorder for hosts that serve LLMs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"opusmon {__version__}")
    parser.set_defaults(debug=False)
    verbs = parser.add_subparsers(metavar="VERB", title="verbs")
    _watching(verbs)
    _files(verbs)
    _host(verbs)
    return parser, frozenset(verbs.choices)


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    help_text: str,
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
    parser.add_argument("--debug", action="store_true", help="show a traceback instead of one line")
    parser.set_defaults(run=run)
    return parser


def _watching(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    live = _verb(verbs, "live", _live, "watch this host on the screen and record (what `opusmon` alone does)")
    _collecting(live)
    _screen(live)
    live.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="record here (default: a new file in the state folder)",
    )
    live.add_argument(
        "--no-record", action="store_true", help="keep nothing on disk; scrub back 15 minutes at most"
    )
    record = _verb(verbs, "record", _record, "record this host without a screen")
    _collecting(record)
    record.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: a new file in the state folder"
    )
    record.add_argument(
        "--duration", metavar="TIME", help="stop after this long (10m); default: until interrupted"
    )
    stream = _verb(
        verbs, "stream", _stream, "write one collector's batches to stdout, for another opusmon to read"
    )
    stream.add_argument("--only", required=True, metavar="COLLECTOR", help="gpu or streams")
    stream.add_argument("--interval", default="1s", metavar="TIME", help="sampling interval (default 1s)")
    _pids(stream)
    stream.add_argument("--compress", action="store_true", help="for a network")


def _pids(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pid",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="watch only this process (repeatable)",
    )


def _collecting(parser: argparse.ArgumentParser) -> None:
    _pids(parser)
    parser.add_argument(
        "--only",
        metavar="NAMES",
        default="",
        help="collectors to run, comma-separated: gpu, streams (eBPF, as root, at a price)",
    )
    parser.add_argument(
        "--interval", default="1s", metavar="TIME", help="sampling interval, 200ms to 5s (default 1s)"
    )
    parser.add_argument(
        "--retain", default="24h", metavar="TIME", help="forget rows older than this (default 24h)"
    )
    parser.add_argument(
        "--retain-size", default="2GiB", metavar="SIZE", help="keep the file under this (default 2GiB)"
    )


def _screen(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--span", default="5m", metavar="TIME", help="time range of the histories (default 5m)"
    )
    parser.add_argument("--theme", default="", metavar="NAME", help="see `opusmon themes`")
    parser.add_argument(
        "--glyphs",
        choices=("auto", "braille", "block", "ascii"),
        default="auto",
        help="characters to draw with",
    )
    parser.add_argument(
        "--screenshot", type=Path, metavar="OUT.svg", help="draw one frame without a terminal and exit"
    )
    parser.add_argument(
        "--size", default="160x50", metavar="COLSxLINES", help="size of the screenshot (default 160x50)"
    )


def _files(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    replay = _verb(verbs, "replay", _replay, "show a recording, also one that is still being written")
    replay.add_argument("file", type=Path, metavar="FILE")
    replay.add_argument("--at", metavar="TIME", help="where to start, paused there")
    replay.add_argument(
        "--speed", type=_speed, default=1.0, metavar="N", help="session seconds per second (default 1)"
    )
    replay.add_argument("--follow", action="store_true", help="stay at the newest row while it is written")
    _screen(replay)
    demo = _verb(verbs, "demo", _demo, "replay the bundled session: two H200s under a known load")
    demo.add_argument("--at", metavar="TIME", help="where to start, paused there")
    demo.add_argument(
        "--speed", type=_speed, default=1.0, metavar="N", help="session seconds per second (default 1)"
    )
    _screen(demo)
    info = _verb(verbs, "info", _info, "what a recording holds")
    info.add_argument("file", type=Path, metavar="FILE")
    info.add_argument("--json", action="store_true", help="for programs")
    dump = _verb(verbs, "dump", _dump, "rows of one channel as text, on stdout")
    dump.add_argument("file", type=Path, metavar="FILE")
    dump.add_argument("--channel", required=True, metavar="C", help="`opusmon info FILE` lists them")
    dump.add_argument("--from", dest="begin", metavar="TIME", help="rows after this time")
    dump.add_argument("--to", dest="end", metavar="TIME", help="rows up to this time")
    dump.add_argument("--format", choices=("csv", "ndjson"), default="csv", help="default csv")
    salvage = _verb(verbs, "salvage", _salvage, "rescue what a truncated or damaged recording still holds")
    salvage.add_argument("file", type=Path, metavar="FILE")
    salvage.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="the new recording")


def _host(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = _verb(
        verbs, "doctor", _doctor, "what this host has, what is missing, why, and the command that mends it"
    )
    doctor.add_argument("--json", action="store_true", help="for programs")
    themes = _verb(verbs, "themes", _themes, "list the themes")
    themes.add_argument("--dir", action="store_true", help="print the folder that user themes are read from")


# -- verbs -------------------------------------------------------------------------------------------------


def _live(args: argparse.Namespace) -> int:
    _need_terminal(args)
    session = _live_session(args, keep_window=True, process="screen")
    status = _show(session, args)
    state = session.recording
    if state is not None:
        print(f"opusmon: recorded to {state.path}", file=sys.stderr)
    return status


def _record(args: argparse.Namespace) -> int:
    import asyncio
    import contextlib
    import signal

    from opusmon.session import record
    from opusmon.times import parse_duration

    duration_s = parse_duration(args.duration) / 1e9 if args.duration else None
    session = _live_session(args, keep_window=False, process="record")
    said: list[str] = []

    def report() -> None:
        state = session.recording
        if state is not None and state.error not in ("", *said[-1:]):
            said.append(state.error)
            print(f"opusmon: {state.error}", file=sys.stderr)

    async def run() -> None:
        task = asyncio.ensure_future(record(session, duration_s, report))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    state = session.recording
    if state is not None:
        print(f"opusmon: recording to {state.path}; ctrl+c stops", file=sys.stderr)
    if session.warning:
        print(f"opusmon: {session.warning}", file=sys.stderr)
    try:
        asyncio.run(run())
    finally:
        session.close()
    state = session.recording
    if state is not None:
        print(f"opusmon: {state.size_b / 1e6:.1f} MB in {state.path}", file=sys.stderr)
    return ERROR if state is not None and state.error else OK


def _live_session(args: argparse.Namespace, *, keep_window: bool, process: str) -> LiveSession:
    from opusmon.clock import SystemClock
    from opusmon.session import LiveSession, default_path, plan
    from opusmon.times import parse_duration

    interval_ns = parse_duration(args.interval)
    if interval_ns > 5_000_000_000:
        raise CliError(
            f"--interval {args.interval}: 5s is the longest; beyond it the screen calls a value stale"
        )
    if interval_ns < 200_000_000:
        raise CliError(
            f"--interval {args.interval}: the GPU's counters need 200ms or more (under 100 ms they read NaN)"
        )
    wanted = plan([name for name in args.only.split(",") if name])
    path = None if getattr(args, "no_record", False) else args.output or default_path()
    return LiveSession(
        wanted,
        SystemClock(),
        path=path,
        keep_window=keep_window,
        interval_ns=interval_ns,
        pids=args.pid,
        retain_ns=parse_duration(args.retain),
        retain_b=_size_b(args.retain_size),
        process=process,
    )


def _stream(args: argparse.Namespace) -> int:
    from opusmon import collectors
    from opusmon.times import parse_duration
    from opusmon.worker import serve

    if args.only not in collectors.REGISTRY:
        raise CliError(f"no collector is named {args.only!r}; there is {', '.join(collectors.REGISTRY)}")
    status = serve(args.only, parse_duration(args.interval), pids=args.pid, compress=args.compress)
    # A thread that is stuck in a driver call must not keep this process: leave without waiting for threads.
    os._exit(status)


def _replay(args: argparse.Namespace) -> int:
    from opusmon.clock import SystemClock
    from opusmon.session import ReplaySession

    _need_terminal(args)
    recording = _open(args.file)
    session = ReplaySession(recording, SystemClock(), follow=getattr(args, "follow", False))
    playhead = _playhead(session, args)
    return _show(session, args, playhead)


def _demo(args: argparse.Namespace) -> int:
    from opusmon.paths import demo_file

    args.file = demo_file()
    return _replay(args)


def _playhead(session: Session, args: argparse.Namespace) -> Playhead:
    from opusmon.times import parse_time
    from opusmon.ui.screens.dashboard import playhead_of

    playhead = playhead_of(session)
    playhead.set_speed(args.speed)
    window = session.window
    if args.at:
        playhead.pause()
        playhead.seek(parse_time(args.at, anchors=window.anchors, t0=window.t0, t1=window.t1))
    elif args.screenshot is not None and not session.follows:
        playhead.pause()
        playhead.seek(window.t0 + (window.t1 - window.t0) // 2)
    return playhead


def _show(session: Session, args: argparse.Namespace, playhead: Playhead | None = None) -> int:
    """Run the screen, or draw one frame of it."""
    import asyncio

    from opusmon.times import parse_duration
    from opusmon.ui.app import OpusmonApp, screenshot
    from opusmon.ui.glyphs import pick, terminal_encoding
    from opusmon.ui.themes import DEFAULT

    drawing = args.screenshot is not None
    glyphs, theme = args.glyphs, args.theme
    if drawing:  # an SVG has every character and colour, whatever this terminal has
        glyphs = "braille" if glyphs == "auto" else glyphs
        theme = theme or ("" if "NO_COLOR" in os.environ else DEFAULT)
    try:
        app = OpusmonApp(
            session,
            glyphs=pick(glyphs, os.environ, terminal_encoding(os.environ)),
            theme=theme,
            environ=os.environ,
            playhead=playhead,
            span_ns=parse_duration(args.span),
        )
        if drawing:
            svg = asyncio.run(screenshot(app, _columns_lines(args.size), lambda: session.window.t1 > 0, 5.0))
            _write_private(args.screenshot, svg)
        else:
            app.run()
        return app.return_code or OK
    finally:
        session.close()


def _info(args: argparse.Namespace) -> int:
    import json

    from opusmon.export.summary import render, summary

    with _open(args.file) as recording:
        facts = summary(recording)
    print(json.dumps(facts, indent=2, ensure_ascii=False) if args.json else render(facts))
    return OK


def _dump(args: argparse.Namespace) -> int:
    from opusmon.export.rows import dump
    from opusmon.times import parse_time

    with _open(args.file) as recording:
        if args.channel not in recording.channels:
            names = ", ".join(sorted(recording.channels))
            raise CliError(f"{args.file} has no channel {args.channel!r}; it has {names}")
        t0, t1 = recording.t0 - 1, recording.t1
        if args.begin:
            # A row at exactly that time is wanted, and ranges are open at their start.
            t0 = parse_time(args.begin, anchors=recording.anchors, t0=recording.t0, t1=recording.t1) - 1
        if args.end:
            t1 = parse_time(args.end, anchors=recording.anchors, t0=recording.t0, t1=recording.t1)
        dump(recording, args.channel, t0, t1, args.format, sys.stdout)
    return OK


def _salvage(args: argparse.Namespace) -> int:
    from opusmon.recording import salvage

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{100 * done // max(total, 1):3d} %", end="", file=sys.stderr, flush=True)

    report = salvage(args.file, args.output, progress)
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    print(report)
    return OK


def _doctor(args: argparse.Namespace) -> int:
    from opusmon.doctor import run

    return run(json=args.json, out=sys.stdout)


def _themes(args: argparse.Namespace) -> int:
    from opusmon.paths import theme_dirs

    if args.dir:
        print(theme_dirs()[-1])
        return OK
    from opusmon.ui.themes import load_themes

    found, problems = load_themes()
    for name in found:
        print(name)
    for problem in problems:
        print(f"opusmon: {problem}", file=sys.stderr)
    return ERROR if problems else OK


# -- arguments ---------------------------------------------------------------------------------------------


def _open(path: Path) -> Recording:
    from opusmon.recording import Recording

    recording = Recording.open(path)
    for warning in recording.warnings:
        print(f"opusmon: {warning}", file=sys.stderr)
    return recording


def _need_terminal(args: argparse.Namespace) -> None:
    # The screen is drawn on stderr, so that stdout stays free for data.
    if args.screenshot is None and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise CliError(
            "this needs a terminal; `opusmon record` runs without one, --screenshot OUT.svg draws one frame"
        )


def _speed(text: str) -> float:
    value = float(text)
    if not 0.01 <= value <= 1000:
        raise argparse.ArgumentTypeError("a speed lies between 0.01 and 1000")
    return value


def _columns_lines(text: str) -> tuple[int, int]:
    columns, _, lines = text.lower().partition("x")
    plain = text.isascii() and columns.isdecimal() and lines.isdecimal()
    if not (plain and 0 < int(columns) <= 1000 and 0 < int(lines) <= 500):
        raise CliError(f"--size {text}: write columns x lines, as 160x50")
    return int(columns), int(lines)


def _size_b(text: str) -> int:
    """Bytes of `500MB`, `2GiB`, `2G` (binary, as du has it), or a plain number."""
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
        _bad_size(text)
    if size_b <= 0:
        _bad_size(text)
    return size_b


def _bad_size(text: str) -> NoReturn:
    raise CliError(f"{text!r} is not a size: write 500MB or 2GiB")
