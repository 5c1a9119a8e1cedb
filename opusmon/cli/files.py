"""The verbs that read recordings."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opusmon import config
from opusmon.cli.words import (
    ERROR,
    OK,
    CliError,
    UsageError,
    columns_lines,
    duration_ns,
    need_rows,
    need_terminal,
    open_recording,
    progress,
    range_of,
    say_damage,
    write_private,
)

if TYPE_CHECKING:
    from opusmon.session import Session
    from opusmon.ui.playhead import Playhead


def replay(args: argparse.Namespace) -> int:
    """`opusmon replay`."""
    from opusmon.clock import SystemClock
    from opusmon.session import ReplaySession

    need_terminal(args)
    recording = open_recording(args.file)
    session = ReplaySession(recording, SystemClock(), follow=getattr(args, "follow", False))
    playhead = _playhead(session, args)
    return show(session, args, playhead)


def demo(args: argparse.Namespace) -> int:
    """`opusmon demo`."""
    from opusmon.paths import demo_file

    args.file = demo_file()
    return replay(args)


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


@dataclass(frozen=True, slots=True)
class ScreenOptions:
    """What the words and the user's files say of the screen.

    Attributes:
        span_ns: time range of the histories.
        size: columns and lines of a picture.
        limits: thresholds of the rules in force.
    """

    span_ns: int
    size: tuple[int, int]
    limits: dict[str, float]


def screen_options(args: argparse.Namespace) -> ScreenOptions:
    """What the screen is told, to be asked for before anything has begun.

    Raises:
        UsageError, TimeError, ConfigError: one of them cannot be used.
    """
    from opusmon.ui.glyphs import NAMES

    if args.glyphs not in NAMES:  # argparse looks at the command line only, not at the config file
        raise UsageError(f"--glyphs {args.glyphs}: choose one of {', '.join(NAMES)}")
    return ScreenOptions(duration_ns("--span", args.span), columns_lines(args.size), config.limits())


def show(
    session: Session,
    args: argparse.Namespace,
    playhead: Playhead | None = None,
    options: ScreenOptions | None = None,
) -> int:
    """Run the screen, or draw one frame of it; `options` where they had to be read before the session began."""
    import asyncio

    from opusmon.ui.app import OpusmonApp, screenshot
    from opusmon.ui.glyphs import pick, terminal_encoding
    from opusmon.ui.themes import DEFAULT

    drawing = args.screenshot is not None
    glyphs, theme = args.glyphs, args.theme
    if drawing:  # an SVG has every character and colour, whatever this terminal has
        glyphs = "braille" if glyphs == "auto" else glyphs
        theme = theme or ("" if "NO_COLOR" in os.environ else DEFAULT)
    try:
        options = options or screen_options(args)
        app = OpusmonApp(
            session,
            glyphs=pick(glyphs, os.environ, terminal_encoding(os.environ)),
            theme=theme,
            environ=os.environ,
            playhead=playhead,
            span_ns=options.span_ns,
            limits=options.limits,
        )
        if drawing:
            svg = asyncio.run(screenshot(app, options.size, lambda: session.window.t1 > 0, 5.0))
            for problem in app.theme_problems:
                print(f"opusmon: {problem}", file=sys.stderr)
            write_private(args.screenshot, svg)
        else:
            app.run()
        return app.return_code or OK
    finally:
        session.close()


def info(args: argparse.Namespace) -> int:
    """`opusmon info`."""
    import json

    from opusmon.export.summary import render, summary

    with open_recording(args.file) as recording:
        damaged = recording.verify(progress)
        facts = summary(recording)
    print(json.dumps(facts, indent=2) if args.json else render(facts))
    return ERROR if damaged else OK


def dump(args: argparse.Namespace) -> int:
    """`opusmon dump`."""
    from opusmon.export.rows import dump as write_rows

    with open_recording(args.file) as recording:
        need_rows(recording)
        if args.channel not in recording.channels:
            names = ", ".join(sorted(recording.channels))
            raise CliError(f"{args.file} has no channel {args.channel!r}; it has {names}")
        write_rows(recording, args.channel, *range_of(args, recording), args.format, sys.stdout)
        return ERROR if say_damage(recording) else OK


def rescue(args: argparse.Namespace) -> int:
    """`opusmon salvage`."""
    from opusmon.recording import salvage

    print(salvage(args.file, args.output, progress))
    return OK
