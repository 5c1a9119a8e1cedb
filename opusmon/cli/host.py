"""The verbs about this host and this installation."""

from __future__ import annotations

import argparse
import sys

from opusmon.cli.words import ERROR, OK, CliError, duration_ns


def doctor(args: argparse.Namespace) -> int:
    """`opusmon doctor`."""
    from opusmon.doctor import run

    return run(json=args.json, out=sys.stdout)


def calibrate(args: argparse.Namespace) -> int:
    """`opusmon calibrate`."""
    import asyncio
    import json

    from opusmon import calibrate as launches

    seconds = duration_ns("--duration", args.duration) / 1e9
    print(f"opusmon: timing launch calls for {seconds:g} s", file=sys.stderr)
    try:
        found = asyncio.run(launches.measure(seconds, frozenset(args.pid)))
    except launches.CalibrationError as error:
        raise CliError(str(error)) from error
    print(json.dumps(launches.document(found), indent=2) if args.json else launches.render(found))
    return OK


def themes(args: argparse.Namespace) -> int:
    """`opusmon themes`."""
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
