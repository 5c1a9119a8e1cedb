"""The verbs that say what is wrong in a recording."""

from __future__ import annotations

import argparse
import contextlib
import sys

from opusmon import config
from opusmon.cli.words import (
    ERROR,
    FINDINGS,
    OK,
    UsageError,
    need_rows,
    open_recording,
    progress,
    range_of,
    say_damage,
)

LEVELS = {"note": 1, "warning": 2, "critical": 3}


def triage(args: argparse.Namespace) -> int:
    """`opusmon triage`."""
    if args.limits_help:
        return _limits_help()
    if args.file is None:
        raise UsageError("name the recording: opusmon triage FILE")
    from opusmon.cli.halves import look_over
    from opusmon.triage import report
    from opusmon.window import Window

    limits = config.limits(args.limits)
    with open_recording(args.file, through=True) as recording:
        need_rows(recording)
        view = Window.over(recording)
        t0, t1 = range_of(args, recording)
        found = look_over(recording, t0, t1, limits, _progress)
        if args.scenarios:
            from opusmon.triage.scenarios import causes, of_stalls, scenarios, table
            from opusmon.triage.scene import Scene

            scene = Scene(view, t0, t1, limits)
            text = "\n".join(table(scenarios(scene, [*causes(found), *of_stalls(scene)]))) + "\n"
        elif args.json:
            text = report.as_json(found, recording.anchors, args.file.name) + "\n"
        elif args.markdown:
            text = report.as_markdown(found, recording.anchors, args.file.name)
        else:
            text = report.as_text(found, recording.anchors)
        # Who reads only the first lines gets the status all the same.
        with contextlib.suppress(BrokenPipeError):
            print(text, end="")
        damaged = say_damage(recording)
    if any(one.severity >= LEVELS[args.fail_on] for one in found):
        return FINDINGS
    return ERROR if damaged else OK


def explain(args: argparse.Namespace) -> int:
    """`opusmon explain`."""
    import json

    from opusmon.times import parse_time
    from opusmon.triage import narrate
    from opusmon.triage.explain import explain as compare
    from opusmon.triage.sequence import render, to_json
    from opusmon.window import Window

    if args.llm and not args.model:
        raise UsageError("--llm needs --model, as the server names it")
    with open_recording(args.file) as recording:
        need_rows(recording)

        def at(text: str) -> int:
            return parse_time(text, anchors=recording.anchors, t0=recording.t0, t1=recording.t1)

        before = (at(args.before[0]), at(args.before[1])) if args.before else None
        told = compare(Window.over(recording), at(args.begin), at(args.end), before)
        status = ERROR if say_damage(recording) else OK
        if args.json:
            print(json.dumps(to_json(told), indent=2))
            return status
        if not args.llm:
            print(render(told))
            return status
        prompt = narrate.preview(told, args.model, mask=not args.names)
        try:
            for part in narrate.parts(told, prompt, dry_run=args.dry_run):
                print(part)
        except narrate.NarrateError as error:  # the report above stands alone
            print(f"opusmon: {error}", file=sys.stderr)
    return status


def _progress(done: int, total: int) -> None:
    if total > 2:
        progress(done, total)


def _limits_help() -> int:
    from opusmon.triage.limits import LIMITS

    for name, limit in sorted(LIMITS.items()):
        print(f"{name} = {limit.value:g}  # {limit.unit + ', ' if limit.unit else ''}{limit.why}")
    return OK
