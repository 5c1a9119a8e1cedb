"""The verbs about API requests."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from opusmon.cli.watch import check_proxy, duration_s_of, headless, naming_a_way
from opusmon.cli.words import ERROR, OK, CliError, size_b_of

if TYPE_CHECKING:
    from opusmon.collectors.api.request import Request
    from opusmon.collectors.canary.endpoint import CanaryConfig


def proxy(args: argparse.Namespace) -> int:
    """`opusmon proxy`: the recorder with nothing but the proxy."""
    from opusmon.clock import SystemClock
    from opusmon.session import LiveSession, default_path, plan
    from opusmon.times import parse_duration

    check_proxy({"--upstream": args.upstream, "--listen": args.listen, "--allow": ",".join(args.allow)})
    duration_s = duration_s_of(args)
    options = {"upstream": args.upstream, "listen": args.listen, "allow": args.allow}
    wanted = plan(["proxy"], {"proxy": options})
    retain_ns, retain_b = parse_duration(args.retain), size_b_of(args.retain_size)
    with naming_a_way(args.output):
        session = LiveSession(
            wanted,
            SystemClock(),
            path=args.output or default_path(),
            keep_window=False,
            retain_ns=retain_ns,
            retain_b=retain_b,
            process="record",
        )
    where = args.listen if args.listen.startswith("unix:") else f"http://{args.listen}"
    print(
        f"opusmon: once it listens, clients use {where}; for anthropic: export ANTHROPIC_BASE_URL={where}",
        file=sys.stderr,
    )
    return headless(session, duration_s)


def probe(args: argparse.Namespace) -> int:
    """`opusmon probe`: a few requests, or a sweep over prompt lengths."""
    from opusmon.collectors.canary.endpoint import CanaryConfig, check

    config = check(CanaryConfig(args.base_url, args.model, max_tokens=args.max_tokens))
    if args.output is not None and args.output.exists():
        raise CliError(f"{args.output} exists already: name a new file")
    requests: list[Request] = []
    work = _sweep(config, args, requests) if args.sweep else _count(config, args, requests)
    status = OK
    try:
        status = asyncio.run(work)
    except KeyboardInterrupt:
        status = ERROR
    if args.output is not None and requests:
        _keep(args, requests)
    return status


async def _count(config: CanaryConfig, args: argparse.Namespace, requests: list[Request]) -> int:
    from opusmon.collectors.canary.report import request_json, request_line, summary
    from opusmon.collectors.canary.turns import announce_count, ask_in_turn

    print(f"opusmon: {announce_count(config, args.count)}", file=sys.stderr)

    def told(request: Request) -> None:
        requests.append(request)
        print(json.dumps(request_json(request)) if args.json else request_line(request), flush=True)

    _, why = await ask_in_turn(config, args.count, on_request=told)
    if not args.json:
        print(summary(requests))
    return _ended(why, requests)


async def _sweep(config: CanaryConfig, args: argparse.Namespace, requests: list[Request]) -> int:
    from opusmon.collectors.canary.report import render
    from opusmon.collectors.canary.sweep import announce_sweep, as_json, check_sizes, sweep

    sizes = check_sizes(_sizes(args.sweep), args.repeats)
    print(f"opusmon: {announce_sweep(config, sizes, args.repeats)}", file=sys.stderr)
    result = await sweep(config, sizes, args.repeats, on_request=requests.append)
    print(json.dumps(as_json(result), indent=2) if args.json else render(result))
    return _ended(result.aborted, requests)


def _ended(why: str, requests: Sequence[Request]) -> int:
    """Exit status: an error when nothing was answered, or the budget ended it."""
    if why:
        print(f"opusmon: {why}", file=sys.stderr)
    return OK if not why and any(request.outcome == "ok" for request in requests) else ERROR


def _sizes(text: str) -> list[int]:
    """Token counts of `1k,4k,16k`.

    Raises:
        CliError: it is something else.
    """
    found = []
    for word in text.lower().split(","):
        scale = 1024 if word.endswith("k") else 1
        number = word.removesuffix("k")
        if not (number.isascii() and number.isdecimal()):
            raise CliError(f"--sweep {text}: write lengths in tokens, as 1k,4k,16k")
        found.append(int(number) * scale)
    return found


def _keep(args: argparse.Namespace, requests: Sequence[Request]) -> None:
    """Write the requests to a recording."""
    from opusmon.clock import Anchors, SystemClock
    from opusmon.collectors.api.request import Keeper, request_batch
    from opusmon.recording import Recorder
    from opusmon.schema import StringTable
    from opusmon.session import describe

    strings, clock = StringTable(), SystemClock()
    recorder = Recorder(args.output, strings=strings, clock=clock, session=describe())
    with contextlib.closing(recorder):
        anchor = Anchors().observe(clock.anchor())
        if anchor is not None:
            recorder.anchor(anchor)
        recorder.push(request_batch(requests, strings, Keeper()))
    print(f"opusmon: {len(requests)} requests in {args.output}", file=sys.stderr)
